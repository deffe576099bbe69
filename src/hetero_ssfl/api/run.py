"""A finished run in Python: the clients' results and trained encoders, with a summary for notebooks."""

import base64
import io
import re
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..config import Config
from ..errors import ConfigError, RunError
from ..events import ClientTrained
from ..federation import mutual_cka_of, participants
from ..federation.sites import Site, open_site
from ..plugins import GIVEN, Given
from ..runs import RunFolder

if TYPE_CHECKING:
    from pandas import DataFrame


class Run:
    """A run on this machine: results and trained encoders of its clients. A notebook shows it as a table and plots."""

    def __init__(self, folder: RunFolder, site: Site | None = None, given: Given | None = None) -> None:
        self.folder, self._site, self._given = folder, site or open_site(folder), given or Given()

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open an earlier run. To get encoders that were passed as objects, call `federate` again instead."""
        return cls(RunFolder.open(Path(path)))

    @property
    def path(self) -> Path:
        return self.folder.path

    @cached_property
    def config(self) -> Config:
        return self.folder.config

    @property
    def clients(self) -> list[str]:
        """The clients' names in the order they were passed; for participants on other machines, sorted."""
        try:
            return self._site.names(self.config)
        except (ConfigError, RunError):
            return sorted(self.folder.read_json("results.json")["clients"])

    def encoder(self, client: int | str) -> nn.Module:
        """Return a client's trained encoder in evaluation mode. `client` is a number, starting at 0, or a name."""
        with self._given.at_hand():
            everyone = list(participants(self.folder, self._site, self.config))
            found = [p for k, p in enumerate(everyone) if client in (k, p.name)]
            if not found:
                raise RunError(
                    f"'{self.path}' has no client {client!r}, expected 0 to {len(everyone) - 1} or one of "
                    f"{', '.join(p.name for p in everyone[:10])}."
                )
            return found[0].newest().encoder.eval()

    def table(self) -> "DataFrame":
        """Return one row per client: encoder, figures of its last round, mean CKA with the others, and accuracies."""
        from pandas import DataFrame

        results = self.folder.read_json("results.json")
        last = {e.client: e.to_json() for e in self._trained()}
        rows = {}
        for name in (name for name in self.clients if name in results["models"]):  # some may be absent at the end
            model = results["models"][name]
            row = {
                "encoder": re.sub(rf"^{GIVEN}:(.*?)(-[0-9a-f]{{8}})?(-\d+)?$", r"\1", str(model["encoder"])),
                "parameters": model["parameters"],
                **{key: last.get(name, {}).get(key) for key in _FIGURES},
                "mutual_cka": self._alike.get(name),
                **results["clients"].get(name, {}),
                **{f"{key}_untrained": value for key, value in results["untrained"].get(name, {}).items()},
            }
            rows[name] = {key: value for key, value in row.items() if value is not None}
        return DataFrame.from_dict(rows, orient="index").rename_axis("client")

    def events(self) -> "DataFrame":
        """Return one row per client and round, and one per round: losses, spread, bytes, seconds."""
        from pandas import DataFrame

        return DataFrame([event.to_json() for event in self.folder.events()])

    def _trained(self) -> list[ClientTrained]:
        """Return the rounds of all clients whose replies were used."""
        return [e for e in self.folder.events() if isinstance(e, ClientTrained) and e.excluded is None]

    @property
    def mutual_cka(self) -> Tensor:
        """CKA on the RAD between every two of `clients`: 1 for equal up to rotation and scale, 0 for unrelated."""
        return self._mutual[1]

    @cached_property
    def _mutual(self) -> tuple[list[str], Tensor]:
        with self._given.at_hand():
            return mutual_cka_of(self.folder, self._site, trained=True)

    @property
    def _alike(self) -> dict[str, float]:
        """Mean CKA of each client with the others; empty if the encoders are not available."""
        try:
            names, matrix = self._mutual
        except (ConfigError, RunError):  # reopened, without the encoders
            return {}
        others = len(matrix) - 1
        return {name: float(row.sum() - 1) / others for name, row in zip(names, matrix, strict=True) if others}

    def __repr__(self) -> str:
        state = f"{len(self.clients)} clients" if self.folder.finished else "not finished"
        return f"Run('{self.path}', {state}, {self.config.method}, {self.config.rounds} rounds)"

    def _repr_html_(self) -> str:
        if not self.folder.finished:
            return f"<p><code>{escape(repr(self))}</code></p>"
        table = self.table().to_html(float_format=lambda value: f"{value:.3g}", na_rep="", border=0)
        return f"<p><code>{escape(str(self.path))}</code></p>{table}{self._picture()}"

    def _picture(self) -> str:
        """Return a plot of losses and mutual CKA as an inline image."""
        from ..report.plots import heat_map, subplots

        trained = [e for e in self._trained() if "loss_ssl" in e.figures]
        figure, (left, right) = subplots(1, 2, figsize=(9, 3.2))
        for name in self.clients:
            own = [(e.round, e.figures["loss_ssl"]) for e in trained if e.client == name]
            left.plot([r for r, _ in own], [loss for _, loss in own], marker="o", markersize=3, label=name)
        left.set(xlabel="round", ylabel="self-supervised loss")
        left.legend(frameon=False, fontsize=7)
        words = "self-supervised loss of each client over the rounds"
        if self._alike:
            heat_map(right, self.mutual_cka, "mutual CKA on the RAD", list(self._alike))
            words += (
                f"; mutual CKA of the clients, {', '.join(f'{n} {v:.2f}' for n, v in self._alike.items())} on average"
            )
        else:
            right.set_axis_off()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
        data = base64.b64encode(buffer.getvalue()).decode()
        return f'<img alt="{escape(words)}" src="data:image/png;base64,{data}">'


_FIGURES = ("examples", "loss_ssl", "loss_alignment", "spread", "effective_rank")
