"""Errors of working on files. A message names the file, and the line or row."""


class InputError(ValueError):
    """An input file that cannot be read, or a text in it that cannot be served."""


class OutputError(ValueError):
    """An output that cannot be written, or must not be overwritten."""


class StoppedError(Exception):
    """Ctrl-C during a job; the message says what is kept and how to go on."""
