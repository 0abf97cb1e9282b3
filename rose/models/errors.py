"""Errors of reading a checkpoint. Each message names the file and what is wrong with it."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be served as it is: a bad file, tensor, setting or architecture."""


class ConvertError(CheckpointError):
    """A file that cannot be converted into a checkpoint: damaged, or of an unknown kind."""
