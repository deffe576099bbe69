"""A finished run in Python: the clients' results and trained encoders, with a summary for notebooks."""

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ..config import Config, evaluation_config
from ..data import Data, skip_with
from ..errors import ConfigError, RunError
from ..federation.participants import Site, open_site
from ..federation.start import Prepared, change_settings, reopen
from ..plugins import GIVEN, Given
from ..report.progress import RunView
from ..runs.events import ClientTrained, Evaluated, Listener
from ..runs.folder import RunFolder
from ..terminal import Console
from ..use.embed import OnBad, embed_data
from ..use.encoders import Encoders, encoders_of, evaluate_on, mutual_cka_of, read_rad_features, reevaluate
from ..use.export import check_format
from ..use.export import export as export_model
from ..use.models import find_models
from .short_errors import short_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

FIGURES = ("examples", "loss_ssl", "loss_alignment", "spread", "effective_rank")
log = logging.getLogger(__name__)


def train_here(run: Prepared, progress: bool | Listener, watch: bool = False) -> None:
    """Run all remaining rounds on this machine and show them, or pass the events to a function."""
    if callable(progress):
        run.train(progress, watch)
        return
    with RunView(Console(stderr=True), run.folder.read_config().name, quiet=not progress, shorter="rounds=1") as view:
        run.train(view, watch)


class Run:
    """A run on this machine: results and trained encoders of its clients. A notebook shows it as a table and plots."""

    def __init__(self, folder: RunFolder, site: Site | None = None, given: Given | None = None) -> None:
        self.folder, self._site, self._given = folder, site or open_site(folder), given or Given()

    @classmethod
    @short_errors
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

    @short_errors
    def encoder(self, client: int | str) -> nn.Module:
        """Return a client's trained encoder in evaluation mode. `client` is a number, starting at 0, or a name."""
        (module,) = self._encoders(client).modules.values()
        return module

    def _encoders(self, client: int | str | None = None) -> Encoders:
        """Return the encoder of one client, or of all clients whose encoder exists here; warn about the others."""
        names = [client.name for client in self._site.clients(self.folder)]
        wanted = [k for k, name in enumerate(names) if client is None or client in (k, name)]
        if not wanted:
            known = ", ".join(names[:10])
            raise RunError(f"'{self.path}' has no client {client!r}, expected 0 to {len(names) - 1} or one of {known}.")
        with self._given.at_hand():
            built = encoders_of(self.folder, self._site, clients=wanted)
        for name, reason in built.missing.items():
            log.warning("%s is left out: %s", name, reason)
        return built

    @short_errors
    def embed(
        self, data: Data, client: int | str | None = None, on_bad_image: OnBad | None = None
    ) -> dict[str, "DataFrame"]:
        """Return a table of each client's features of new data, one row per sample, in the order of the data.

        Rows are named by the images' paths within a folder, otherwise by their numbers.

        Args:
            data: as for a client: a folder, an array, a Dataset, ...; images are converted to the encoders' input
            client: only this client, by number or name
            on_bad_image: "error" or "skip" for images that cannot be read; by default as in the run
        """
        from pandas import DataFrame, Index

        built, config = self._encoders(client), self.config.data
        with skip_with("on_bad_image='skip'"):
            config = config.model_copy(update={"on_bad_image": on_bad_image or config.on_bad_image})
            embedded = embed_data(built.modules, data, built.rad, config)
        named = embedded.paths[0] is not None
        index = Index(embedded.paths if named else embedded.rows, name="path" if named else "row")
        tables = zip(built.modules, embedded.features, strict=True)
        return {name: DataFrame(features.numpy(), index) for name, features in tables}

    @short_errors
    def neighbours(
        self,
        output: str | Path = "neighbours.html",
        images: str | Path | None = None,
        client: int | str | None = None,
        queries: Sequence[int | str | Path] = (),
        k: int = 8,
        on_bad_image: OnBad = "error",
    ) -> Path:
        """Write a page of the images that the encoders consider most similar, and return its path.

        Args:
            output: the page
            images: what to search: a folder, parquet, or a data set's name; by default the RAD
            client: only this client, by number or name
            queries: numbers or paths of images; by default four random ones
            k: the number of nearest images to show
            on_bad_image: "error" or "skip" for images that cannot be read
        """
        from ..use.neighbours import Search, write_neighbours

        models = find_models(self.path, "all" if client is None else str(client))
        source = None if images is None else str(images)
        search = Search(models, source, [str(query) for query in queries], k, 0, on_bad_image)
        with self._given.at_hand(), skip_with("on_bad_image='skip'"):
            write_neighbours(search, Path(output), Console(stderr=True))
        return Path(output)

    @short_errors
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
        from .tables import shown_whole

        config = evaluation_config(self.config, settings or {})
        if data is None:
            with self._given.at_hand():
                scores = dict(reevaluate(self.folder, config, split, self._site))
        else:
            scores = dict(evaluate_on(self._encoders(), data, labels, test, config)[0])
        return shown_whole(scores)

    @short_errors
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

    def push_to_hub(self, name: str, client: int | str, output: str | Path = "hub", dry_run: bool = False) -> Path:
        """Publish a client's encoder as OWNER/MODEL on the Hugging Face hub, privately. Return the folder, `output`.

        Args:
            name: the repository
            client: by number or name
            output: the folder to write
            dry_run: write the folder, and upload nothing
        """
        from ..use.publish import upload, write_folder

        with self._given.at_hand():
            folder = write_folder(find_models(self.path, str(client))[0], Path(output))
        if not dry_run:
            upload(folder, name)
        return folder

    # --- the run ---

    @short_errors
    def report(self, output: str | Path = "report.html") -> Path:
        """Write a report as a single HTML page that works offline, and return its path."""
        from ..report.page import write_report  # imports matplotlib

        with self._given.at_hand():
            write_report([self.path], Path(output), read_rad_features)
        return Path(output)

    @short_errors
    def more(
        self, rounds: int | None = None, settings: Mapping[str, Any] | None = None, progress: bool | Listener = True
    ) -> "Run":
        """Continue the run, finished or not, from its last finished round, and return it.

        Args:
            rounds: the new number of all rounds, with those that are done
            settings: other settings from here on, such as {"optim.lr": 0.01}
            progress: as in `federate`
        """
        wanted = dict(settings or {}) if rounds is None else {**(settings or {}), "rounds": rounds}
        with self._given.at_hand():
            change_settings(self.folder, wanted, self._site)
            train_here(reopen(self.folder, self._site), progress)
        self.__dict__.pop("_mutual", None)
        return self

    @short_errors
    def table(self) -> "DataFrame":
        """Return one row per client: encoder, figures of its last round, mean CKA with the others, and accuracies."""
        from .tables import shown_whole

        results = self.folder.read_json("results.json")
        last, models = {e.client: e.to_json() for e in self._trained()}, results["models"]
        rows = {}
        for name in (name for name in self.clients if name in models):  # some may be absent at the end
            row = {
                "encoder": re.sub(rf"^{GIVEN}:(.*?)(-[0-9a-f]{{8}})?(-\d+)?$", r"\1", str(models[name]["encoder"])),
                "parameters": models[name]["parameters"],
                **{key: last.get(name, {}).get(key) for key in FIGURES},
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
    def mutual_cka(self) -> "DataFrame":
        """CKA on the RAD between every two of `clients`: 1 for equal up to rotation and scale, 0 for unrelated.

        Clients whose encoder does not exist in this process are left out.
        """
        from pandas import DataFrame

        names, matrix = self._mutual
        return DataFrame(matrix.numpy(), names, names)

    @cached_property
    def _mutual(self) -> tuple[list[str], Tensor]:
        with self._given.at_hand():
            return mutual_cka_of(self.folder, self._site, trained=True)

    @property
    def _mean_cka(self) -> dict[str, float]:
        """Mean CKA of each client with the others; empty if the encoders are not available."""
        with suppress(ConfigError, RunError):  # reopened, without the encoders
            names, matrix = self._mutual
            others = len(matrix) - 1
            return {name: float(row.sum() - 1) / others for name, row in zip(names, matrix, strict=True) if others}
        return {}

    def __repr__(self) -> str:
        state = f"{len(self.clients)} clients" if self.folder.finished else "not finished"
        return f"Run('{self.path}', {state}, {self.config.method}, {self.config.rounds} rounds)"

    def _repr_html_(self) -> str:
        if not self.folder.finished:
            return f"<p><code>{escape(repr(self))}</code></p>"
        from .pictures import losses_and_cka

        matrix = self._mutual[1] if self._mean_cka else None
        picture = losses_and_cka(self.clients, self._trained(), self._mean_cka, matrix)
        return f"<p><code>{escape(str(self.path))}</code></p>{self.table()._repr_html_()}{picture}"

    @short_errors
    def plot(self, output: str | Path | None = None, metric: str = "linear_all") -> "Figure":
        """Plot each client's loss, and the validation accuracy if there is one, over the rounds. Return the figure.

        Args:
            output: a file to save it to: .png, .svg or .pdf
            metric: the accuracy: `linear_all`, `knn_all`, ...
        """
        from ..report.plots import curves, save, subplots
        from .pictures import draw_losses

        figure, (left, right) = subplots(1, 2, figsize=(9, 3.2))
        draw_losses(left, self.clients, self._trained())
        events = self.folder.events()
        if any(isinstance(e, Evaluated) and e.split == "validation" and metric in e.mean for e in events):
            curves(right, {self.config.method: events}, metric)
        else:
            right.set_axis_off()
        if output is not None:
            save(figure, Path(output))
        return figure
