"""A finished run in Python: the clients' results and trained encoders, with a summary for notebooks."""

import base64
import io
import logging
import re
from collections.abc import Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ..config import Config, evaluation_config
from ..data import Data
from ..errors import ConfigError, RunError
from ..federation.participants import Site, open_site
from ..federation.start import Prepared, change_settings, reopen
from ..plugins import GIVEN, Given
from ..report.progress import RunView
from ..runs.events import ClientTrained, Listener
from ..runs.folder import RunFolder
from ..terminal import Console
from ..use.embed import embed_data
from ..use.encoders import Encoders, encoders_of, mutual_cka_of, read_rad_features, reevaluate
from ..use.evaluate import evaluate_on, read_new_data
from ..use.export import check_format
from ..use.export import export as export_model
from ..use.models import find_models

if TYPE_CHECKING:
    from pandas import DataFrame

log = logging.getLogger(__name__)


def train_here(run: Prepared, progress: bool | Listener) -> None:
    """Run all remaining rounds on this machine and show them, or pass the events to a function."""
    if callable(progress):
        run.train(progress)
        return
    with RunView(Console(stderr=True), run.folder.read_config().name, quiet=not progress, shorter="rounds=1") as view:
        run.train(view)


class Run:
    """A run on this machine: results and trained encoders of its clients. A notebook shows it as a table and plots."""

    def __init__(self, folder: RunFolder, site: Site | None = None, given: Given | None = None) -> None:
        self.folder, self._site, self._given = folder, site or open_site(folder), given or Given()

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open an earlier run in any process.

        Encoders that are built in or can be imported are available again. Those that were passed as objects exist only
        in the program that passed them: call `federate` there again.
        """
        return cls(RunFolder.open(Path(path)))

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def config(self) -> Config:
        return self.folder.read_config()

    @property
    def clients(self) -> list[str]:
        """The clients' names in the order they were passed; for participants on other machines, sorted."""
        try:
            return [client.name for client in self._site.clients(self.folder)]
        except (ConfigError, RunError):
            return sorted(self.folder.read_json("results.json")["clients"])

    # --- encoders ---

    def encoder(self, client: int | str) -> nn.Module:
        """Return a client's trained encoder in evaluation mode. `client` is a number, starting at 0, or a name."""
        (module,) = self._encoders(client).modules.values()
        return module

    def _encoders(self, client: int | str | None = None) -> Encoders:
        """Return the encoder of one client, or of all clients whose encoder exists here; warn about the others."""
        names = [client.name for client in self._site.clients(self.folder)]
        wanted = [k for k, name in enumerate(names) if client is None or client in (k, name)]
        if not wanted:
            raise RunError(
                f"'{self.path}' has no client {client!r}, expected 0 to {len(names) - 1} or one of "
                f"{', '.join(names[:10])}."
            )
        with self._given.at_hand():
            built = encoders_of(self.folder, self._site, clients=wanted).require()
        for name, reason in built.missing.items():
            log.warning("%s is left out: %s", name, reason)
        return built

    def embed(self, data: Data, client: int | str | None = None) -> dict[str, Tensor]:
        """Return each client's features (n, width) of new data, in the order of the data; files by their sorted paths.

        Args:
            data: as for a client: a folder, an array, a Dataset, ...; images are converted to the encoders' input
            client: only this client, by number or name
        """
        built = self._encoders(client)
        assert built.rad is not None
        return embed_data(built.modules, data, built.rad, self.config.data)

    def evaluate(
        self,
        data: Data = None,
        labels: Any = None,
        *,
        test: Data = None,
        split: Literal["validation", "test"] = "test",
        settings: Mapping[str, Any] | None = None,
    ) -> "DataFrame":
        """Probe the trained encoders and return one row of accuracies per client.

        Args:
            data: new labeled data, of the kinds that a client's data can be. Probes are fitted on one part of them and
                tested on the other. By default, the run's own data
            labels: one per sample of `data`
            test: the part of the new data to test on, as for a client; by default, a source's own test split or a fifth
            split: which of the run's own data to test on, if there are no new ones
            settings: evaluation settings to change, such as {"evaluation.labels_per_class": 10}
        """
        from pandas import DataFrame

        config = evaluation_config(self.config, settings or {})
        if data is None:
            with self._given.at_hand():
                scores = dict(reevaluate(self.folder, config, split, self._site))
        else:
            built = self._encoders()
            assert built.rad is not None
            scores = dict(evaluate_on(built.modules, *read_new_data(data, labels, test, config, built.rad), config))
        return DataFrame.from_dict(scores, orient="index").rename_axis("client")

    def export(
        self, output: str | Path = "exported", to: str = "safetensors", client: int | str | None = None
    ) -> dict[str, Path]:
        """Write the trained encoders for other programs: to OUTPUT/NAME for each client. Return the models' files.

        Args:
            output: a folder
            to: `safetensors`, `torch-export` or `onnx`
            client: only this client, by number or name
        """
        check_format(to)
        files = {}
        with self._given.at_hand():
            for model in find_models(self.path, "all" if client is None else str(client)):
                try:
                    files[model.client] = export_model(model, to, Path(output) / model.client)
                except ConfigError as error:
                    if client is not None:
                        raise
                    log.warning("%s is left out: %s", model.client, error)
        return files

    # --- the run ---

    def report(self, output: str | Path = "report.html") -> Path:
        """Write a report as a single HTML page that works offline, and return its path."""
        from ..report.page import write_report  # imports matplotlib

        with self._given.at_hand():
            write_report([self.path], Path(output), read_rad_features)
        return Path(output)

    def more(
        self,
        rounds: int | None = None,
        settings: Mapping[str, Any] | None = None,
        progress: bool | Listener = True,
    ) -> "Run":
        """Continue the run, finished or not, from its last finished round, and return it.

        Args:
            rounds: the new number of all rounds, with those that are done
            settings: other settings from here on, such as {"optim.lr": 0.01}
            progress: as in `federate`
        """
        wanted = {**(settings or {}), **({} if rounds is None else {"rounds": rounds})}
        with self._given.at_hand():
            change_settings(self.folder, wanted, self._site)
            train_here(reopen(self.folder, self._site), progress)
        self.__dict__.pop("_mutual", None)
        return self

    def table(self) -> "DataFrame":
        """Return one row per client: encoder, figures of its last round, mean CKA with the others, and accuracies."""
        from .tables import shown_whole

        results = self.folder.read_json("results.json")
        last = {e.client: e.to_json() for e in self._trained()}
        rows = {}
        models = results.get("models", {})
        for name in (name for name in self.clients if name in models):  # some may be absent at the end
            model = models[name]
            row = {
                "encoder": re.sub(rf"^{GIVEN}:(.*?)(-[0-9a-f]{{8}})?(-\d+)?$", r"\1", str(model["encoder"])),
                "parameters": model["parameters"],
                **{key: last.get(name, {}).get(key) for key in _FIGURES},
                "mutual_cka": self._mean_cka.get(name),
                **results["clients"].get(name, {}),
                **{f"{key}_untrained": value for key, value in results["untrained"].get(name, {}).items()},
            }
            rows[name] = {key: value for key, value in row.items() if value is not None}
        return shown_whole(rows)

    def events(self) -> "DataFrame":
        """Return one row per client and round, and one per round: losses, spread, bytes, seconds."""
        from pandas import DataFrame

        return DataFrame([event.to_json() for event in self.folder.events()])

    def _trained(self) -> list[ClientTrained]:
        """Return the rounds of all clients whose replies were used."""
        return [e for e in self.folder.events() if isinstance(e, ClientTrained) and e.excluded is None]

    @property
    def mutual_cka(self) -> Tensor:
        """CKA on the RAD between every two of `clients`: 1 for equal up to rotation and scale, 0 for unrelated.

        Clients whose encoder does not exist in this process are left out.
        """
        return self._mutual[1]

    @cached_property
    def _mutual(self) -> tuple[list[str], Tensor]:
        with self._given.at_hand():
            return mutual_cka_of(self.folder, self._site, trained=True)

    @property
    def _mean_cka(self) -> dict[str, float]:
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
        alt = "self-supervised loss of each client over the rounds"
        if self._mean_cka:
            heat_map(right, self.mutual_cka, "mutual CKA on the RAD", list(self._mean_cka))
            means = ", ".join(f"{name} {value:.2f}" for name, value in self._mean_cka.items())
            alt += f"; mutual CKA of the clients, {means} on average"
        else:
            right.set_axis_off()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
        data = base64.b64encode(buffer.getvalue()).decode()
        return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


_FIGURES = ("examples", "loss_ssl", "loss_alignment", "spread", "effective_rank")
