"""Federated self-supervised learning for clients that differ in data and architecture.

The names below are the public API. They are imported on first use, so that `import hetero_ssfl` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Client as Client, Run as Run, federate as federate
    from .config import AlignmentConfig as AlignmentConfig, Config as Config, load_config as load_config
    from .data import random_view as random_view
    from .federation.start import resume as resume, start as start
    from .federation.strategy import HeteroSSFLStrategy as HeteroSSFLStrategy
    from .kernels.cka import cka as cka, factor_cka as factor_cka, mutual_cka as mutual_cka
    from .kernels.contribution import contribution as contribution
    from .kernels.distance import alignment_distance as alignment_distance
    from .kernels.factor import effective_rank as effective_rank
    from .kernels.mean import Consensus as Consensus, combine as combine
    from .learning.encoders import build_encoder as build_encoder, list_encoders as list_encoders
    from .learning.features import extract_features as extract_features
    from .learning.probes import Labeled as Labeled, probe as probe
    from .learning.training import train as train
    from .methods import METHODS as METHODS, Broadcast as Broadcast, ServerState as ServerState, Update as Update
    from .methods import FedAvg as FedAvg, FedBYOL as FedBYOL, FedEMA as FedEMA, FedSimSiam as FedSimSiam
    from .methods import FedSSL as FedSSL, FedU as FedU, HeteroSSFL as HeteroSSFL, Local as Local, Method as Method
    from .runs.folder import RunFolder as RunFolder

__version__ = "0.1.0"

_NAMES = {
    "api": ("Client", "Run", "federate"),
    "config": ("AlignmentConfig", "Config", "load_config"),
    "data": ("random_view",),
    "federation.start": ("resume", "start"),
    "federation.strategy": ("HeteroSSFLStrategy",),
    "kernels.cka": ("cka", "factor_cka", "mutual_cka"),
    "kernels.contribution": ("contribution",),
    "kernels.distance": ("alignment_distance",),
    "kernels.factor": ("effective_rank",),
    "kernels.mean": ("Consensus", "combine"),
    "learning.encoders": ("build_encoder", "list_encoders"),
    "learning.features": ("extract_features",),
    "learning.probes": ("Labeled", "probe"),
    "learning.training": ("train",),
    "methods": (
        *("METHODS", "FedAvg", "FedBYOL", "FedEMA", "FedSSL", "FedSimSiam", "FedU", "HeteroSSFL", "Local", "Method"),
        *("Broadcast", "ServerState", "Update"),
    ),
    "runs.folder": ("RunFolder",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hetero_ssfl' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
