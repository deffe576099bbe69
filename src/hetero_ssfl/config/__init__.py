"""The config of a run: its settings (schema.py, sections/) and how it is read (reading.py)."""

from .reading import (
    differences,
    evaluation_config,
    flat,
    load_config,
    parse_config,
    preset_names,
    preset_text,
    settings_of,
    validate,
    with_settings,
)
from .schema import Config
from .sections.base import Section
from .sections.data import DataConfig, PartitionConfig, RadConfig, ViewsConfig
from .sections.federation import ClientsConfig, EngineConfig, PrivacyConfig, SeatConfig, TrackingConfig
from .sections.learning import (
    AlignmentConfig,
    AveragingConfig,
    EvaluationConfig,
    Layer,
    ModelConfig,
    OptimConfig,
    Precision,
    SslConfig,
    as_model,
)

__all__ = [
    "AlignmentConfig",
    "AveragingConfig",
    "ClientsConfig",
    "Config",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "Layer",
    "ModelConfig",
    "OptimConfig",
    "PartitionConfig",
    "Precision",
    "PrivacyConfig",
    "RadConfig",
    "SeatConfig",
    "Section",
    "SslConfig",
    "TrackingConfig",
    "ViewsConfig",
    "as_model",
    "differences",
    "evaluation_config",
    "flat",
    "load_config",
    "parse_config",
    "preset_names",
    "preset_text",
    "settings_of",
    "validate",
    "with_settings",
]
