"""Model definitions: architectures, checkpoints, and recipes from hidden states to answers."""
