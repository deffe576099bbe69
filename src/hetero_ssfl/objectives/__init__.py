"""The two terms of a client's loss, as pure functions."""

from .alignment import alignment_distance, centre, cka, cka_debiased, factor_cka, factor_hsic_debiased, gram
from .siamese import feature_spread, regression_loss, siamese_loss

__all__ = [
    "alignment_distance",
    "centre",
    "cka",
    "cka_debiased",
    "factor_cka",
    "factor_hsic_debiased",
    "feature_spread",
    "gram",
    "regression_loss",
    "siamese_loss",
]
