"""The command line. Each module parses, calls and prints; heavy imports wait until a command needs them."""

from .commands import app, main

__all__ = ["app", "main"]
