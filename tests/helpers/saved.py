"""The server's state in a run folder."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from hetero_ssfl.config import with_settings
from hetero_ssfl.runs.files import load_tensors
from hetero_ssfl.runs.folder import RunFolder


def server_tensors(run: Path) -> dict[str, Tensor]:
    """Return `shared/KEY` and `client/NAME/KEY` of the state after the last finished round."""
    shared, about = load_tensors(run / "server.safetensors")
    found = {f"shared/{key}": value for key, value in shared.items()}
    for name, file in about["shares"].items():
        contribution, _ = load_tensors(run / "shares" / name / file)
        found |= {f"client/{name}/{key}": value for key, value in contribution.items()}
    return found


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the raw lines of events.jsonl as JSON objects."""
    return [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]


def change_config(run: Path, settings: dict[str, Any]) -> None:
    """Write a run's config again with other settings and the digest that belongs to them."""
    folder = RunFolder(run)
    folder.write_config(with_settings(folder.read_config(), settings))
