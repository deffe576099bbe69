"""The config of a run: its settings (schema.py, sections/) and how it is read (reading.py)."""

from .reading import differences, evaluation_config, flat, settings_of, validate, with_settings
from .reading import load_config, parse_config, preset_names, preset_text
from .schema import Config
from .sections.base import Layer, Precision, Section
from .sections.data import DataConfig, PartitionConfig, RadConfig, ViewsConfig
from .sections.federation import ClientsConfig, EngineConfig, PrivacyConfig, SeatConfig, TrackingConfig, WatchConfig
from .sections.learning import AlignmentConfig, AveragingConfig, EvaluationConfig, ModelConfig, OptimConfig, SslConfig
