"""The server's state on disk. What it keeps of each client is a file of its own, read when it is looked at: memory and
time of a round depend on those who took part in it, not on how many there are."""

from dataclasses import replace

from ...methods import ClientId, ServerState
from ...runs import RunFolder, SavedTensors, load_tensors, save_tensors


def save_state(folder: RunFolder, state: ServerState) -> ServerState:
    """First what is new of clients; then `server.safetensors`, which names it and makes the round count."""
    clients: dict[ClientId, SavedTensors] = {}
    for name, kept in state.clients.items():
        if not isinstance(kept, SavedTensors):
            shares = folder.shares(name)
            shares.save(state.round, kept)
            kept = SavedTensors(shares.file(state.round))
        clients[name] = kept
    about = {"round": state.round, "roster": state.roster, "examples": dict(state.examples)}
    saved = {name: kept.path.name for name, kept in clients.items()}
    save_tensors(folder.path / "server.safetensors", state.shared, {**about, "shares": saved})
    return replace(state, clients=clients)


def restore_state(folder: RunFolder) -> ServerState | None:
    """As it was after the last finished round; what a crash left of a later one is forgotten."""
    path = folder.path / "server.safetensors"
    if not path.exists():
        return None
    shared, about = load_tensors(path)
    clients = {}
    for name, file in about["shares"].items():
        shares = folder.shares(name)
        shares.forget_after(about["round"])
        clients[name] = SavedTensors(shares.path / file)
    return ServerState(about["round"], tuple(about["roster"]), shared, clients, about["examples"])
