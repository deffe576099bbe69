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


class ProtocolError(HeteroSSFLError):
    """A message between server and client violates the protocol."""


class RunError(HeteroSSFLError):
    """A run folder is missing, in use, incomplete or damaged, or a run cannot continue."""
