"""Errors that the user can fix.

Each message has one or two sentences: the value that was found, what was expected, and the remedy.
The command line prints it without a traceback and exits with code 2.
"""


class HeteroSSFLError(Exception):
    """Base class of all errors that a user can fix."""


class ConfigError(HeteroSSFLError):
    """A setting is unknown, has the wrong type, or conflicts with another setting."""


class DataError(HeteroSSFLError):
    """Images or labels are missing, corrupt or inconsistent."""

    def __init__(self, message: str, count: int | None = None) -> None:
        super().__init__(message)
        self.count = count
        """The number of bad images that were found."""


class ProtocolError(HeteroSSFLError):
    """A message between server and client violates the protocol."""


class DivergedError(HeteroSSFLError, FloatingPointError):
    """Training gave a loss or features that are not finite."""


class RunError(HeteroSSFLError):
    """A run folder is missing, in use, incomplete or damaged, or a run cannot continue."""
