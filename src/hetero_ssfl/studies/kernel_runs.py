"""What `theory` and `audit` need of a run: a method that aligns kernels, and the server's state, which is only read."""

from ..errors import RunError
from ..methods import HeteroSSFL, ServerState, method_for
from ..plugins import check_trusted
from ..runs.files import SavedTensors
from ..runs.folder import RunFolder


def kernel_method(folder: RunFolder, what: str) -> HeteroSSFL:
    """Return the method of a run, or raise RunError if `what` says nothing about it.

    To measure a run is to train with its config, so all code that it names must be trusted.
    """
    for setting, spec in folder.read_config().own_code.items():
        check_trusted(spec, setting)
    method = method_for(folder.read_config())
    if not isinstance(method, HeteroSSFL):
        raise RunError(
            f"{what} is about methods that align kernels, but '{folder.path}' was trained with method "
            f"'{folder.read_config().method}'. Choose a run with method = 'hetero-ssfl'."
        )
    return method


def saved_state(folder: RunFolder) -> ServerState | None:
    """Return the state after the last finished round; None before round 1."""
    saved = folder.server_state()
    if saved is None:
        return None
    shared, about = saved
    clients = {name: SavedTensors(folder.shares(name).named(file)) for name, file in about["shares"].items()}
    state = ServerState(about["round"], tuple(about["roster"]), shared, clients, about["examples"])
    return state if state.round > 0 else None
