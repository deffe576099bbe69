"""The server's state on disk. The state of each client is a separate file that is read on access, so that the memory
and time of a round depend on the clients that took part, not on the number of all clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ...errors import LostStateError
from ...methods import ClientId, ServerState
from ...runs.events import RoundDone
from ...runs.files import COPY, SavedTensors, save_tensors, sync_folder
from ...runs.folder import BEFORE, RunFolder, load_commit


@dataclass(frozen=True)
class Saved:
    """The last finished round, as the commit point describes it."""

    state: ServerState
    trained: dict[ClientId, int] = field(default_factory=dict)
    """The last round in which each client trained and saved its state; 0 if never."""


def save_contribution(folder: RunFolder, name: ClientId, number: int, arrays: Mapping[str, Tensor]) -> SavedTensors:
    """Write a contribution to disk. It counts only after `save_state` of the same round."""
    contributions = folder.shares(name)
    contributions.save(number, arrays)
    return SavedTensors(contributions.file(number))


def save_state(folder: RunFolder, state: ServerState, trained: Mapping[ClientId, int] | None = None) -> ServerState:
    """Save new contributions of clients, then `server.safetensors`, which names them and commits the round.

    The state that was there becomes `server-before.safetensors`.
    """
    clients: dict[ClientId, SavedTensors] = {}
    for name, kept in state.clients.items():
        if not isinstance(kept, SavedTensors):
            kept = save_contribution(folder, name, state.round, kept)
        clients[name] = kept
    about: dict[str, Any] = {"round": state.round, "roster": state.roster, "examples": dict(state.examples)}
    about["seats"] = dict(state.seats)
    about["shares"] = {name: kept.path.name for name, kept in clients.items()}
    about |= {"trained": dict(trained or {}), "events": folder.log.mark()}
    path, written = folder.path / "server.safetensors", folder.path / "server-next.safetensors"
    save_tensors(written, state.shared, about)
    if path.exists():
        path.replace(folder.path / BEFORE)
    written.replace(path)
    sync_folder(folder.path)
    for name in (name for name, kept in clients.items() if kept.path == folder.shares(name).file(state.round)):
        folder.shares(name).prune()
    return replace(state, clients=clients)


def restore_state(folder: RunFolder) -> Saved | None:
    """Return the last finished round, and delete what an unfinished later round has left.

    Raise LostStateError if the state or the events of the round are damaged.
    """
    saved = folder.server_state()
    if saved is None:
        _check_beginning(folder)
        folder.log.keep(b"")
        return None
    shared, about = saved
    folder.log.keep(folder.log.read(about["events"]))
    clients = {}
    for name, file in about["shares"].items():
        contributions = folder.shares(name)
        contributions.forget_after(about["round"])
        clients[name] = SavedTensors(contributions.named(file))
    state = ServerState(
        about["round"], tuple(about["roster"]), shared, clients, about["examples"], about.get("seats", {})
    )
    return Saved(state, about.get("trained", {}))


def step_back(folder: RunFolder) -> Saved | None:
    """Go back to the round before the last finished one; None if it cannot be repeated to the same bits."""
    before = folder.path / BEFORE
    try:
        about = load_commit(before)[1]
        folder.log.read(about["events"])  # both must be whole before they replace the others
    except LostStateError:
        return None
    if any(after > about["round"] for after, _ in folder.read_earlier()):  # the round was played with other settings
        return None
    before.replace(folder.path / "server.safetensors")
    sync_folder(folder.path)
    return restore_state(folder)


def _check_beginning(folder: RunFolder) -> None:
    """Without a state, no round may have been finished: events of two rounds show that a state is missing."""
    rounds = {event.round for event in folder.events() if isinstance(event, RoundDone)}
    if len(rounds) > 1:
        raise LostStateError(f"'{folder.path / 'server.safetensors'}' is missing. {COPY}")
