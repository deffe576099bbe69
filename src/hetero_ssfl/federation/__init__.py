"""The only package that knows Flower."""

from .engine import mutual_cka_of, reevaluate, resume, start, start_or_resume

__all__ = ["mutual_cka_of", "reevaluate", "resume", "start", "start_or_resume"]
