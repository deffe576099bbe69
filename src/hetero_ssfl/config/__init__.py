"""A run's settings: what they are (schema.py) and how they are read (reading.py)."""

from .reading import load_config, parse_config, preset_names, validate
from .schema import (
    AlignmentConfig,
    AveragingConfig,
    ClientsConfig,
    Config,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    Layer,
    ModelConfig,
    OptimConfig,
    PartitionConfig,
    RadConfig,
    Section,
    SslConfig,
    ViewsConfig,
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
    "RadConfig",
    "Section",
    "SslConfig",
    "ViewsConfig",
    "as_model",
    "load_config",
    "parse_config",
    "preset_names",
    "validate",
]
