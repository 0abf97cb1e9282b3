"""The commands of `rose`, a module each. They import what they need when they run."""
