"""Evaluate encoders: probes on frozen features, and fine-tuning with few labels."""

from .features import extract_features
from .finetune import finetune, share_of_labels
from .probes import Labeled, accuracy, balanced_accuracy, few_labels, knn_probe, linear_probe, probe

__all__ = [
    "Labeled",
    "accuracy",
    "balanced_accuracy",
    "extract_features",
    "few_labels",
    "finetune",
    "knn_probe",
    "linear_probe",
    "probe",
    "share_of_labels",
]
