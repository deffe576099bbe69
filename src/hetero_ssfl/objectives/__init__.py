"""The two terms of a client's loss, as pure functions."""

from .alignment import alignment_distance, centre, cka, cka_debiased, factor_cka, gram
from .siamese import feature_spread, regression_loss, siamese_loss

__all__ = [
    "alignment_distance",
    "centre",
    "cka",
    "cka_debiased",
    "factor_cka",
    "feature_spread",
    "gram",
    "regression_loss",
    "siamese_loss",
]
