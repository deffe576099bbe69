"""A run folder: config, state and results of a run, in files that survive a crash.

    config.toml          the whole config
    environment.json     versions, machine, commit
    facts.json           kind of site, federation id, RAD digest, classes, images of each class for each client
    split.safetensors    rows of the validation set, of the RAD and of each client
    rad.safetensors      the RAD's pixels
    server.safetensors   the server's state after the last finished round; writing it commits the round
    server-before.safetensors  the state of the round before, from which a damaged round is repeated
    shares/NAME/         contributions of each client that the server keeps, the two newest rounds
    clients/NAME/        each client's own state, the two newest rounds
    models/NAME/         at the end: encoder.safetensors and card.json
    sources.json         names, sizes, times and digests of the data's files
    skipped.csv          images that could not be read and were left out, and why; nothing reads it
    start/NAME           starting weights of an encoder that was passed from Python as a module
    history.json         if a run was continued with other settings: the earlier configs, and after which round
    faults.log           where the user's own code failed: the last frames of each error
    events.jsonl         one line per client and round, and one per finished round
    results.json         at the end: accuracies on the test images
    status.json          what the run is doing now
    server.log           the log of a deployment's server, rotated
    trackers.json        what MLflow and W&B have got, if the config asks for them
    tensorboard/         the same figures for TensorBoard, if the config asks for it

Every file is written under a temporary name and then renamed; only events.jsonl is appended to. Every file has a
digest, which is checked when the file is read (files.py). That of events.jsonl is part of the commit point; lines
after it do not count. Tensors are safetensors, all other files are JSON or TOML: nothing is ever unpickled.
"""

import fcntl
import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config import Config, parse_config
from ..errors import DamagedError, RunError
from .environment import environment
from .events import Event, EventLog, from_lines, to_lines
from .files import COPY, load_state, load_tensors, locked, read_json, read_text, write_json, write_text
from .schema import Facts, StudySection, check_content
from .schema import SiteKind as SiteKind
from .states import StateFolder

FORMAT = 4
HISTORY = "history.json"
FAULTS = "faults.log"
SOURCES = "sources.json"
SKIPPED = "skipped.csv"
BEFORE = "server-before.safetensors"


def load_commit(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a state of the server and what it says about its round."""
    tensors, about = load_state(path)
    check_content(about, path, COPY)
    return tensors, about


def client_name(number: int) -> str:
    """Return the name of a client that has no other. Sorting by name is sorting by number, up to a million clients."""
    return f"client-{number:03d}" if number < 1000 else f"client-x{number:06d}"


def resume_command(path: Path, setting: str = "", value: float = 0.0) -> str:
    """Return the command that continues a run, if given with another setting, for messages."""
    usual = f"hetero-ssfl run --resume {shlex.quote(str(path))}" + (f" --set {setting}={value:g}" if setting else "")
    try:
        facts = RunFolder(path).read_facts()
    except RunError:  # the result is part of another message, so it must not fail
        return usual
    if facts.site == "python":
        changed = f", settings={{'{setting}': {value:g}}}, more=True)" if setting else ") and the same other arguments"
        return f"federate(..., run_dir='{path}'{changed}"
    if not facts.elsewhere:
        return usual
    on_server = f'server/run.sh of the deployment, or flwr run with run-dir="{path}"'
    return f"{usual}, then {on_server}" if setting else on_server


class RunFolder:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.log = EventLog(self.path / "events.jsonl")

    # --- create and open ---

    @classmethod
    def create(cls, path: Path, config: Config, fill: Callable[["RunFolder"], None]) -> "RunFolder":
        """Create a run folder. `config.toml` is written last: a folder that has it is complete."""
        folder = cls(path)
        folder.write_json("environment.json", {"format": FORMAT, **environment()})
        fill(folder)
        folder.write_config(config)
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        folder = cls(path)
        if not folder.exists:
            raise RunError(f"'{path}' is not a run folder (it has no config.toml). Check the path.")
        written = folder.read_json("environment.json").get("format")
        if written != FORMAT:
            raise RunError(f"'{path}' has run format {written}, expected {FORMAT}. Use the version that wrote it.")
        return folder

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder: only one process at a time can train in it."""
        busy = RunError(f"another process is working in '{self.path}'. Wait for it or stop it.")
        return locked(self.path / ".lock", busy)

    def is_busy(self) -> bool:
        """Tell whether a process of this machine is training in the folder. Looking does not write to it."""
        try:
            with (self.path / ".lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except FileNotFoundError:
            return False
        except OSError:
            return True

    @property
    def exists(self) -> bool:
        return (self.path / "config.toml").is_file()

    @property
    def finished(self) -> bool:
        return (self.path / "results.json").exists()

    # --- files ---

    def read_config(self) -> Config:
        path = self.path / "config.toml"
        remedy = "Restore it from a copy. To train with other settings, start another run."
        return parse_config(read_text(path, remedy), origin=str(path))

    def write_config(self, config: Config) -> None:
        write_text(self.path / "config.toml", config.to_toml())

    def read_facts(self) -> Facts:
        return Facts.model_validate(self.read_json("facts.json"))

    def read_earlier(self) -> list[tuple[int, Config]]:
        """Return the configs before the run was continued with other settings, each with its last round."""
        path, entries = self.path / HISTORY, self.read_history()["earlier"]
        return [(int(entry["after_round"]), parse_config(entry["config"], origin=str(path))) for entry in entries]

    def read_history(self) -> dict[str, Any]:
        return self.read_json(HISTORY) if (self.path / HISTORY).exists() else {"earlier": []}

    def read_given(self) -> Config:
        """Return what the config file of a deployment said when its server last read it."""
        earlier, given = self.read_earlier(), self.read_history().get("given")
        if given is not None:
            return parse_config(given, origin=str(self.path / HISTORY))
        return earlier[0][1] if earlier else self.read_config()

    def read_json(self, name: str) -> dict[str, Any]:
        path, remedy = self.path / name, COPY
        if name == "results.json":
            resume = resume_command(self.path)
            if not path.exists():
                raise RunError(f"'{self.path}' has no {name}: the run is not finished. Continue it with: {resume}")
            remedy = f"Delete it and continue with: {resume}. It is then computed again."
        content = read_json(path, remedy)
        check_content(content, path, remedy)
        return content

    def read_status(self) -> dict[str, Any]:
        """Return what the server says that it is doing, or an empty dictionary before it has started."""
        return self.read_json("status.json") if (self.path / "status.json").exists() else {}

    def read_sections(self) -> dict[str, StudySection]:
        """Return what studies of this run added to its report, by the names of their files."""
        contents = {path.stem: self.read_json(path.name) for path in sorted(self.path.glob("*.json"))}
        return {name: StudySection(**study["section"]) for name, study in contents.items() if "section" in study}

    def rad(self) -> tuple[Tensor, str]:
        """Return the RAD and its digest."""
        path = self.path / "rad.safetensors"
        tensors, about = load_tensors(path)
        if "pixels" not in tensors or tensors["pixels"].ndim < 2 or not len(tensors["pixels"]):
            raise DamagedError(f"'{path}' holds no RAD: expected rows of pixels. {COPY}")
        return tensors["pixels"], str(about.get("digest"))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_json(self.path / name, content)

    # --- events ---

    def append_events(self, events: list[Event]) -> None:
        self.log.append(to_lines(events).encode())

    def events(self) -> list[Event]:
        """Return the events of all finished rounds."""
        return from_lines(self.event_lines().splitlines())

    def event_lines(self) -> bytes:
        return self.log.read((self.committed() or {}).get("events"))

    def committed(self) -> dict[str, Any] | None:
        """Return what the commit point says about the last finished round; None before the first."""
        return (self.server_state() or (None, None))[1]

    def server_state(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the server's state after the last finished round, and what the commit point says about it."""
        saved = [path for path in (self.path / "server.safetensors", self.path / BEFORE) if path.exists()]
        return load_commit(saved[0]) if saved else None

    # --- clients ---

    def states(self, name: str) -> StateFolder:
        """The networks of a client that keeps its state in this folder."""
        return StateFolder(self._own_folder("clients", name), keep=3)

    def shares(self, name: str) -> StateFolder:
        """Return the folder of the contributions that the server keeps of a client."""
        return StateFolder(self._own_folder("shares", name), keep=3)

    def _own_folder(self, kind: str, name: str) -> Path:
        """Return the folder of a client. A name from a file must not lead out of the run folder."""
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise DamagedError(f"'{self.path}' names a client {str(name)[:40]!r}, expected a plain name. {COPY}")
        return self.path / kind / name
