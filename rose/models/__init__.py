"""Model definitions: architectures, checkpoints, and recipes that turn hidden states into answers."""
