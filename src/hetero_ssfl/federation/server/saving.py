"""The server's state on disk. The state of each client is a separate file that is read on access, so that the memory
and time of a round depend on the clients that took part, not on the number of all clients."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...errors import LostStateError
from ...methods import ClientId, ServerState
from ...runs.events import RoundDone
from ...runs.files import COPY, SavedTensors, save_tensors, sync_folder
from ...runs.folder import BEFORE, RunFolder, load_commit


def save_contribution(folder: RunFolder, name: ClientId, number: int, arrays: Mapping[str, Tensor]) -> SavedTensors:
    """Write a contribution to disk. It counts only after `save_state` of the same round."""
    contributions = folder.shares(name)
    contributions.save(number, arrays)
    return SavedTensors(contributions.file(number))


def save_state(folder: RunFolder, state: ServerState) -> ServerState:
    """Save new contributions of clients, then `server.safetensors`, which names them and commits the round."""
    clients = {
        name: kept if isinstance(kept, SavedTensors) else save_contribution(folder, name, state.round, kept)
        for name, kept in state.clients.items()
    }
    about: dict[str, Any] = {"round": state.round, "roster": state.roster, "examples": dict(state.examples)}
    about |= {"seats": dict(state.seats), "trained": dict(state.trained), "events": folder.log.mark()}
    about["shares"] = {name: kept.path.name for name, kept in clients.items()}
    path, written = folder.path / "server.safetensors", folder.path / "server-next.safetensors"
    save_tensors(written, state.shared, about)
    if path.exists():
        path.replace(folder.path / BEFORE)
    written.replace(path)
    sync_folder(folder.path)
    for name in (name for name, kept in clients.items() if kept.path == folder.shares(name).file(state.round)):
        folder.shares(name).prune()
    return replace(state, clients=clients)


def restore_state(folder: RunFolder) -> ServerState | None:
    """Return the last finished round, and delete what a later one has left. Raise LostStateError if it is damaged."""
    saved = folder.server_state()
    if saved is None:
        finished = {event.round for event in folder.events() if isinstance(event, RoundDone)}
        if len(finished) > 1:  # a crash leaves at most the events of one round without a state
            raise LostStateError(f"'{folder.path / 'server.safetensors'}' is missing. {COPY}")
        folder.log.keep(b"")
        return None
    shared, about = saved
    folder.log.keep(folder.log.read(about["events"]))
    clients = {}
    for name, file in about["shares"].items():
        contributions = folder.shares(name)
        contributions.forget_after(about["round"])
        clients[name] = SavedTensors(contributions.named(file))
    seats, trained = about.get("seats", {}), about.get("trained", {})
    return ServerState(about["round"], tuple(about["roster"]), shared, clients, about["examples"], seats, trained)


def step_back(folder: RunFolder) -> ServerState | None:
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
