"""The server's state as a run folder holds it."""

from pathlib import Path

from torch import Tensor

from hetero_ssfl.runs import load_tensors


def server_tensors(run: Path) -> dict[str, Tensor]:
    """`shared/KEY` and `client/NAME/KEY` of all that counts after the last finished round."""
    shared, about = load_tensors(run / "server.safetensors")
    found = {f"shared/{key}": value for key, value in shared.items()}
    for name, file in about["shares"].items():
        share, _ = load_tensors(run / "shares" / name / file)
        found |= {f"client/{name}/{key}": value for key, value in share.items()}
    return found
