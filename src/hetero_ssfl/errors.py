"""What can go wrong through no fault of the code.

Each message is one sentence or two for the person who can mend it: the value that was met,
what was expected, and the remedy. The command line prints it without a traceback and exits with 2.
"""


class HeteroSSFLError(Exception):
    """Base of all errors a user can mend."""


class ConfigError(HeteroSSFLError):
    """A setting is unknown, of the wrong type, or impossible beside another one."""


class DataError(HeteroSSFLError):
    """Images or labels are missing, corrupt or do not fit together."""


class ProtocolError(HeteroSSFLError):
    """A message between server and client is not what the protocol allows."""


class RunError(HeteroSSFLError):
    """A run folder is missing, in use, or not what it claims to be."""
