"""A run folder: config, state and results of a run, in files that survive a crash.

    config.toml          the whole config
    environment.json     versions, machine, commit
    facts.json           kind of site, federation id, RAD digest, classes, images of each class for each client
    split.safetensors    rows of the validation set, of the RAD and of each client
    rad.safetensors      the RAD's pixels
    server.safetensors   the server's state after the last finished round; writing it commits the round
    shares/NAME/         contributions of each client that the server keeps, the two newest rounds
    clients/NAME/        each client's own state, the two newest rounds
    models/NAME/         at the end: encoder.safetensors and card.json
    sources.json         names, sizes, times and digests of the data's files
    start/NAME           starting weights of an encoder that was passed from Python as a module
    history.json         if a run was continued with other settings: the earlier configs, and after which round
    faults.log           where the user's own code failed: the last frames of each error
    events.jsonl         one line per client and round, and one per finished round
    results.json         at the end: accuracies on the test images
    status.json          what the run is doing now
    tensorboard/         the same figures for TensorBoard, if the config asks for it

Every file is written under a temporary name and then renamed; only events.jsonl is appended to, and an incomplete last
line is ignored. Tensors are safetensors, all other files are JSON or TOML: nothing is ever unpickled.
"""

import errno
import fcntl
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .config import Config, parse_config
from .errors import HeteroSSFLError, ProtocolError, RunError
from .events import Event, from_lines, to_lines

FORMAT = 3
HISTORY = "history.json"
FAULTS = "faults.log"
SOURCES = "sources.json"
READABLE = (2, 3)

SiteKind = Literal["simulated", "python", "nodes"]
"""Where a run's participants are: a split of one data set, objects of a user's program, or node settings files."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, even if the power fails."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename must also survive a power failure
        finally:
            os.close(folder)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some disk space; nothing was lost" if full else "Choose a place where you may write"
        raise RunError(f"cannot write '{path}': {error.strerror}. {remedy}.") from None
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def append_line(path: Path, line: str, most: int = 2**20) -> None:
    """Append to a log that is started anew when it has `most` bytes. A log that cannot be written is not an error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > most:
            path.replace(path.with_name(f"{path.name}.1"))
        with path.open("a") as file:
            file.write(f"{line}\n")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2).encode() + b"\n")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> None:
    # Copies, because safetensors refuses tensors that share memory, such as tied weights.
    contents = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    write_atomically(path, save(contents, {"about": json.dumps(dict(about or {}))}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise RunError(f"'{path}' is missing. The run folder is incomplete; start the run again.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"'{path}' cannot be read ({error}). Restore it from a copy or start the run again.") from None


class SavedTensors(Mapping[str, Tensor]):
    """Tensors in a file that are read on access, so that a thousand clients' contributions need no memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, name: str) -> Tensor:
        return load_tensors(self.path)[0][name]

    def __iter__(self) -> Iterator[str]:
        return iter(load_tensors(self.path)[0])

    def __len__(self) -> int:
        return len(load_tensors(self.path)[0])


def client_name(number: int) -> str:
    """Return the name of a client that has no other. Sorting by name is sorting by number, up to a million clients."""
    return f"client-{number:03d}" if number < 1000 else f"client-x{number:06d}"


def resume_command(path: Path) -> str:
    """Return the command that continues a run, for messages."""
    folder, usual = RunFolder(path), f"hetero-ssfl run --resume {shlex.quote(str(path))}"
    if not (path / "facts.json").exists():
        return usual
    try:
        if folder.site == "python":
            return f"federate(..., run_dir='{path}') and the same other arguments"
        elsewhere = f'server/run.sh of the deployment, or flwr run with run-dir="{path}"'
        return elsewhere if folder.elsewhere else usual
    except RunError:  # the result is part of another message, so it must not fail
        return usual


def change_command(path: Path, setting: str, value: float) -> str:
    """Return the command that continues a run with another setting, for messages."""
    command = resume_command(path)
    if command.startswith("hetero-ssfl"):
        return f"{command} --set {setting}={value:g}"
    if command.startswith("federate"):
        return f"federate(..., run_dir='{path}', settings={{'{setting}': {value:g}}}, more=True)"
    return f"hetero-ssfl run --resume {shlex.quote(str(path))} --set {setting}={value:g}, then {command}"


class RunFolder:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    # --- create and open ---

    @classmethod
    def create(cls, path: Path, config: Config, fill: Callable[["RunFolder"], None]) -> "RunFolder":
        """Create a run folder. `config.toml` is written last: a folder that has it is complete."""
        folder = cls(path)
        folder.write_json("environment.json", environment())
        fill(folder)
        write_atomically(path / "config.toml", config.to_toml().encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        folder = cls(path)
        if not folder.exists:
            raise RunError(f"'{path}' is not a run folder (it has no config.toml). Check the path.")
        found = folder.read_json("environment.json").get("format")
        if found not in READABLE:
            raise RunError(
                f"'{path}' has run format {found}, expected {' or '.join(map(str, READABLE))}. "
                "Read it with the version of hetero-ssfl that wrote it."
            )
        return folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder: only one process at a time can train in it."""
        busy = RunError(f"another process is working in '{self.path}'. Wait for it or stop it.")
        with _locked(self.path / ".lock", busy):
            yield

    @property
    def busy(self) -> bool:
        """Whether a process of this machine is training in the folder. Looking does not write to it."""
        try:
            with (self.path / ".lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except FileNotFoundError:
            return False
        except OSError:
            return True

    @property
    def config(self) -> Config:
        return parse_config((self.path / "config.toml").read_text(), origin=str(self.path / "config.toml"))

    @property
    def earlier(self) -> list[tuple[int, Config]]:
        """The configs that the run had before it continued with other settings, and after which round it did."""
        entries = self.read_json(HISTORY)["earlier"] if (self.path / HISTORY).exists() else []
        origin = str(self.path / HISTORY)
        return [(int(entry["after_round"]), parse_config(entry["config"], origin=origin)) for entry in entries]

    @property
    def exists(self) -> bool:
        return (self.path / "config.toml").is_file()

    @property
    def site(self) -> SiteKind:
        """Where the participants are, as recorded when the run was created."""
        facts = self.read_json("facts.json")
        if "site" not in facts:  # format 2 did not record it
            if facts.get("given"):
                return "python"
            return "simulated" if (self.path / "split.safetensors").exists() else "nodes"
        if facts["site"] not in get_args(SiteKind):
            raise RunError(f"'{self.path}' has participants of kind '{facts['site']}', expected {get_args(SiteKind)}.")
        kind: SiteKind = facts["site"]
        return kind

    @property
    def elsewhere(self) -> bool:
        """Whether the participants are on other machines, and so are their models."""
        return self.site == "nodes" and not self.read_json("facts.json").get("nodes")

    @property
    def finished(self) -> bool:
        return (self.path / "results.json").exists()

    # --- files ---

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            raise RunError(
                f"'{self.path}' has no {name}: the run is not finished. Continue it with: {resume_command(self.path)}"
            ) from None
        except ValueError as error:
            raise RunError(f"'{self.path / name}' is not valid JSON ({error}). Restore it from a copy.") from None
        return content

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_json(self.path / name, content)

    # --- events ---

    def append_events(self, events: list[Event]) -> None:
        lines = to_lines(events)
        try:
            with (self.path / "events.jsonl").open("a") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"cannot write events in '{self.path}': {error.strerror}. Free some disk space and resume."
            ) from None

    def events(self) -> list[Event]:
        return from_lines(self._event_lines())

    def forget_events_after(self, round_number: int) -> None:
        """Drop the events of unfinished rounds after a crash."""
        kept = []
        for line in self._event_lines():
            try:
                kept += [line] if json.loads(line)["round"] <= round_number else []
            except ValueError:
                continue  # an incomplete last line after a crash
        write_atomically(self.path / "events.jsonl", "".join(f"{line}\n" for line in kept).encode())

    def _event_lines(self) -> list[str]:
        try:
            return (self.path / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []

    # --- clients ---

    def states(self, name: str) -> "StateFolder":
        """The networks of a client that keeps its state in this folder."""
        return StateFolder(self.path / "clients" / name)

    def shares(self, name: str) -> "StateFolder":
        """Return the folder of the contributions that the server keeps of a client."""
        return StateFolder(self.path / "shares" / name)


class StateFolder:
    """The tensors of one participant after its two newest rounds: its networks, or its contributions on the server.

    Two rounds are kept because a server that crashes before it saves a round requests that round again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, round_number: int, tensors: Mapping[str, Tensor]) -> None:
        """Save a round. Later ones are deleted: they were not committed, and must not displace the earlier state."""
        save_tensors(self.file(round_number), tensors)
        saved = self._saved()
        kept = [r for r in saved if r <= round_number][-2:]
        for other in set(saved) - set(kept):
            self.file(other).unlink(missing_ok=True)  # a leftover worker of a killed run may have deleted it

    def forget_after(self, round_number: int) -> None:
        """Delete the files of unfinished rounds after a crash."""
        for later in self._saved():
            if later > round_number:
                self.file(later).unlink()

    def newest(self, limit: int) -> int:
        """Return the newest saved round up to `limit`; 0 for an untrained client."""
        saved = self._saved()
        found = max((r for r in saved if r <= limit), default=0)
        if not found and len(saved) > 1:
            raise ProtocolError(
                f"the server asked for networks after round {limit}, but '{self.path.name}' has only rounds {saved}. "
                "The server's run folder may be an old copy: continue with the newest one."
            )
        return found

    def load(self, round_number: int) -> dict[str, Tensor]:
        return load_tensors(self.file(round_number))[0]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Allow one training at a time: after a timeout, the server may ask again while the old training still runs."""
        busy = ProtocolError(f"'{self.path.name}' is still busy with an earlier message. Ask again next round.")
        with _locked(self.path / ".lock", busy):
            yield

    def _saved(self) -> list[int]:
        return sorted(int(file.stem.removeprefix("round-")) for file in self.path.glob("round-*.safetensors"))

    def file(self, round_number: int) -> Path:
        return self.path / f"round-{round_number:06d}.safetensors"


@contextmanager
def _locked(path: Path, busy: HeteroSSFLError) -> Iterator[None]:
    """Hold a file's lock, or raise `busy`. The system releases the lock when the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise RunError(
            f"cannot write in '{path.parent}': {error.strerror}. Check the permissions of the folder."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise busy from None
        yield


def environment() -> dict[str, Any]:
    """Return the versions, machine, commit and command that produce a result."""
    packages = ("hetero-ssfl", "torch", "flwr", "datasets", "flwr-datasets", "safetensors", "pydantic", "numpy")
    return {
        "format": FORMAT,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in packages},
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this code if it runs from a checkout."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
