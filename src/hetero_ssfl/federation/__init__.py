"""The only package that knows Flower."""

from .engine import resume, start

__all__ = ["resume", "start"]
