"""Encoders of any architecture, and the learner that trains an encoder without labels."""

from .encoders import BUILTIN, build_encoder, output_width, parse_spec
from .learner import Learner, build_learner, count_parameters

__all__ = ["BUILTIN", "Learner", "build_encoder", "build_learner", "count_parameters", "output_width", "parse_spec"]
