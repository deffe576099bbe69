"""Federated self-supervised learning for clients that differ in data and architecture.

The names below are the public API. They are imported on first use, so that `import hetero_ssfl` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Client as Client
    from .api import Run as Run
    from .api import federate as federate
    from .config import AlignmentConfig as AlignmentConfig
    from .config import Config as Config
    from .config import load_config as load_config
    from .data import random_view as random_view
    from .federation.start import resume as resume
    from .federation.start import start as start
    from .federation.strategy import HeteroSSFLStrategy as HeteroSSFLStrategy
    from .kernels.cka import cka as cka
    from .kernels.cka import factor_cka as factor_cka
    from .kernels.cka import mutual_cka as mutual_cka
    from .kernels.contribution import contribution as contribution
    from .kernels.distance import alignment_distance as alignment_distance
    from .kernels.factor import effective_rank as effective_rank
    from .kernels.mean import Consensus as Consensus
    from .kernels.mean import combine as combine
    from .learning.encoders import build_encoder as build_encoder
    from .learning.encoders import list_encoders as list_encoders
    from .learning.features import extract_features as extract_features
    from .learning.probes import Labeled as Labeled
    from .learning.probes import probe as probe
    from .learning.training import train as train
    from .methods import METHODS as METHODS
    from .methods import Broadcast as Broadcast
    from .methods import FedAvg as FedAvg
    from .methods import FedBYOL as FedBYOL
    from .methods import FedEMA as FedEMA
    from .methods import FedSimSiam as FedSimSiam
    from .methods import FedSSL as FedSSL
    from .methods import FedU as FedU
    from .methods import HeteroSSFL as HeteroSSFL
    from .methods import Local as Local
    from .methods import Method as Method
    from .methods import ServerState as ServerState
    from .methods import Update as Update
    from .runs.folder import RunFolder as RunFolder

__version__ = "0.1.0"

_HOME = {
    "federate": "api",
    "Client": "api",
    "Run": "api",
    "Config": "config",
    "AlignmentConfig": "config",
    "load_config": "config",
    "RunFolder": "runs.folder",
    "start": "federation.start",
    "resume": "federation.start",
    "HeteroSSFLStrategy": "federation.strategy",
    "METHODS": "methods",
    "Method": "methods",
    "HeteroSSFL": "methods",
    "Local": "methods",
    "FedSSL": "methods",
    "FedBYOL": "methods",
    "FedSimSiam": "methods",
    "FedU": "methods",
    "FedEMA": "methods",
    "FedAvg": "methods",
    "Broadcast": "methods",
    "Update": "methods",
    "ServerState": "methods",
    "train": "learning.training",
    "Consensus": "kernels.mean",
    "contribution": "kernels.contribution",
    "combine": "kernels.mean",
    "effective_rank": "kernels.factor",
    "cka": "kernels.cka",
    "factor_cka": "kernels.cka",
    "alignment_distance": "kernels.distance",
    "random_view": "data",
    "Labeled": "learning.probes",
    "extract_features": "learning.features",
    "probe": "learning.probes",
    "mutual_cka": "kernels.cka",
    "build_encoder": "learning.encoders",
    "list_encoders": "learning.encoders",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hetero_ssfl' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
