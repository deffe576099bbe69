"""The server's state on disk. The state of each client is a separate file that is read on access, so that the memory
and time of a round depend on the clients that took part, not on the number of all clients."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ...methods import ClientId, ServerState
from ...runs import RunFolder, SavedTensors, load_tensors, save_tensors


def save_contribution(folder: RunFolder, name: ClientId, number: int, arrays: Mapping[str, Tensor]) -> SavedTensors:
    """Write a contribution to disk. It counts only after `save_state` of the same round."""
    contributions = folder.shares(name)
    contributions.save(number, arrays)
    return SavedTensors(contributions.file(number))


def save_state(folder: RunFolder, state: ServerState) -> ServerState:
    """Save new contributions of clients, then `server.safetensors`, which names them and commits the round."""
    clients: dict[ClientId, SavedTensors] = {}
    for name, kept in state.clients.items():
        if not isinstance(kept, SavedTensors):
            kept = save_contribution(folder, name, state.round, kept)
        clients[name] = kept
    about = {"round": state.round, "roster": state.roster, "examples": dict(state.examples), "seats": dict(state.seats)}
    saved = {name: kept.path.name for name, kept in clients.items()}
    save_tensors(folder.path / "server.safetensors", state.shared, {**about, "shares": saved})
    return replace(state, clients=clients)


def restore_state(folder: RunFolder) -> ServerState | None:
    """Return the state after the last finished round, and delete files of an unfinished later round."""
    path = folder.path / "server.safetensors"
    if not path.exists():
        return None
    shared, about = load_tensors(path)
    clients = {}
    for name, file in about["shares"].items():
        contributions = folder.shares(name)
        contributions.forget_after(about["round"])
        clients[name] = SavedTensors(contributions.path / file)
    seats = about.get("seats", {})
    return ServerState(about["round"], tuple(about["roster"]), shared, clients, about["examples"], seats)
