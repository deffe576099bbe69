"""Encoders of any architecture, and the learner that trains an encoder without labels."""

from .encoders import BUILTIN, build_encoder, check_name, output_width, parse_spec
from .learner import Learner, build_learner, count_parameters, seeded_encoder
from .work import Work, work_of

__all__ = [
    "BUILTIN",
    "Learner",
    "Work",
    "build_encoder",
    "build_learner",
    "check_name",
    "count_parameters",
    "output_width",
    "parse_spec",
    "seeded_encoder",
    "work_of",
]
