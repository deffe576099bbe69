"""Messages from a server to one node, sent to the real ClientApp in this process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hetero_ssfl.config import Config, load_config
from hetero_ssfl.data import digest
from hetero_ssfl.federation.client.app import ClientProcess, client_app
from hetero_ssfl.federation.engines.workers import RUN_ID, set_identity
from hetero_ssfl.federation.wire import Scalar, decode, encode, pack

from .federations import write_images, write_node

LABELS = [k % 3 for k in range(40)]
FEDERATION, NODE = "0" * 32, 100
RAD = torch.arange(24 * 64, dtype=torch.uint8).view(24, 1, 8, 8)
TINY = (
    *("rounds=3", "local_epochs=1", "rad.size=24", "ssl.projector=[16, 8]", "ssl.predictor=16", "optim.batch=8"),
    *("alignment.rad_batch=8", "evaluation.epochs=1", "evaluation.probes=['linear']", "clients.count=1"),
)


def tiny(*overrides: str) -> Config:
    return load_config("smoke", [*TINY, *overrides])


class Owner:
    """The owner of one node: its settings, its images, and a ClientApp that answers messages."""

    def __init__(self, home: Path, limits: str = "", labels: Sequence[int] = LABELS) -> None:
        self.home = home
        pictures = (load_digits().images * 15.9).astype(np.uint8)[: len(labels)]
        write_images(home / "images", pictures, np.array(labels))
        self.settings = write_node(home, "clinic", "resnet8(width=4)")
        with self.settings.open("a") as file:
            file.write(f"validation = 0\n[limits]\n{limits}\n")
        self.app = client_app(ClientProcess())

    def ask(
        self,
        kind: str,
        config: Config | str,
        rad: Tensor | Array | None = None,
        arrays: Mapping[str, Tensor] | None = None,
        **fields: Any,
    ) -> Message:
        """Send an instruction. `fields` replace or add to those of an honest one."""
        text = config if isinstance(config, str) else config.to_toml()
        sent = rad if isinstance(rad, Tensor) else RAD
        usual: dict[str, Scalar] = {
            "federation": FEDERATION,
            "round": 1,
            "rad": digest(sent),
            "channels": 1,
            "side": 8,
            "split": "test",
        }
        content = pack(arrays, {**usual, "config": text, **fields})
        if rad is not None:
            pixels = rad if isinstance(rad, Array) else Array(sent.numpy())
            content["rad"] = ArrayRecord({"pixels": pixels})
        set_identity(NODE)
        context = Context(RUN_ID, NODE, {"settings": str(self.settings)}, RecordDict(), {})
        return decode(encode(self.app(decode(encode(Message(content, NODE, kind))), context)))

    def refusal(self, kind: str, config: Config | str, rad: Tensor | Array | None = None, **more: Any) -> str:
        """Send an instruction that must be refused. Return the reason."""
        reply = self.ask(kind, config, rad, **more)
        assert reply.has_error(), "it was not refused"
        assert reply.error.reason is not None
        return reply.error.reason

    def files(self) -> list[str]:
        """The files that answers have left in the node's home, beside its log, whose size is bounded."""
        files = [f for f in (self.home / "state").rglob("*") if f.is_file() and f.name != "node.log"]
        return sorted(str(f.relative_to(self.home)) for f in files)


class OneConvolution(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(3, 8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(2).mean(2)


class ReadsValues(nn.Linear):
    """It looks at its input, which torch's meta device does not have."""

    def __init__(self) -> None:
        super().__init__(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) + float(x.sum())
