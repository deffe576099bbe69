"""Federated learning from Python: `federate(...)`, the `Client` it takes and the `Run` it returns."""

from .federated import Client, federate
from .run import Run

__all__ = ["Client", "Run", "federate"]
