"""Errors that the user can fix.

    HeteroSSFLError
    |-- ConfigError              a setting
    |-- DataError                images or labels
    |   |-- UnequalSizesError    images that need data.side (data/decoding.py)
    |   `-- UnreadableImageError an image that could be skipped (data/decoding.py)
    |-- ProtocolError            a message between server and client
    |   |-- NoSeatError          a node that may not take part (federation/server/seats.py)
    |   `-- SumFailedError       a secure sum without enough answers (privacy/sums/rules.py)
    |-- DivergedError            training; also a FloatingPointError
    `-- RunError                 a run folder or a run
        |-- DamagedError         a damaged file
        |   `-- LostStateError   a state that can be computed again
        |-- TooFewRepliesError   a round
        `-- FaultError           a run on one machine

Each message has one or two sentences: the wrong value, what was expected, and what to do. The command line prints it
without a traceback and exits with code 2.
"""


class HeteroSSFLError(Exception):
    """Base class of all errors that a user can fix."""


class ConfigError(HeteroSSFLError):
    """A setting is unknown, has the wrong type, or conflicts with another setting."""


class DataError(HeteroSSFLError):
    """Images or labels are missing, corrupt or inconsistent."""


class ProtocolError(HeteroSSFLError):
    """A message between server and client violates the protocol."""


class NotFiniteError(HeteroSSFLError, FloatingPointError):
    """Training gave a loss or features that are not finite: the user's encoder, views or loss made them."""


class DivergedError(NotFiniteError):
    """Training gave a loss or features that are not finite, because its steps are too large."""


class RunError(HeteroSSFLError):
    """A run folder is missing, in use, incomplete or damaged, or a run cannot continue."""


class DamagedError(RunError):
    """A file of a run is missing, or was changed or damaged after it was written."""


class LostStateError(DamagedError):
    """A state of the server or of a client is damaged. The round before it can be repeated, to the same state."""


class TooFewRepliesError(RunError):
    """A round got too few usable replies, for instance because the loss of all clients diverged."""


class FaultError(RunError):
    """A run on one machine stopped because a client failed twice or a file is damaged. Finished rounds are kept."""
