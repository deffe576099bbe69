"""Federated self-supervised learning for clients that differ in data and architecture.

The names below are the public ones. They are imported when first used: `import hetero_ssfl` alone loads no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "federate": "api",
    "Client": "api",
    "Run": "api",
    "Config": "config",
    "load_config": "config",
    "RunFolder": "runs",
    "start": "federation",
    "resume": "federation",
    "METHODS": "methods",
    "Method": "methods",
    "HeteroSSFL": "methods",
    "Local": "methods",
    "FedBYOL": "methods",
    "FedSimSiam": "methods",
    "FedU": "methods",
    "FedEMA": "methods",
    "FedAvg": "methods",
    "Broadcast": "methods",
    "Update": "methods",
    "ServerState": "methods",
    "train": "training",
    "Consensus": "consensus",
    "client_factor": "consensus",
    "combine": "consensus",
    "effective_rank": "consensus",
    "cka": "objectives",
    "factor_cka": "objectives",
    "random_view": "data",
    "Labeled": "evaluation",
    "extract_features": "evaluation",
    "probe": "evaluation",
    "mutual_cka": "consensus",
    "build_encoder": "models",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hetero_ssfl' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
