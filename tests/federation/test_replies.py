"""The server takes replies one by one: its memory does not grow with the number of clients of a round."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from helpers.rig import Rig
from hetero_ssfl.federation.server.loop import Server
from hetero_ssfl.methods import ServerState, Update
from hetero_ssfl.runs.files import SavedTensors

NAMES = ("node-0", "node-1", "node-2")


@pytest.mark.parametrize("form", ["factor", "sketch"])
def test_a_reply_is_on_disk_and_freed_before_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    rig = Rig(tmp_path, f"alignment.form={form}", encoders=("resnet8(width=4)",) * 3)
    server = Server(rig.grid, rig.folder, rig.config, rig.listen)
    server.roster.gather(None)
    read: list[weakref.ref[Message]] = []
    honest, summed = server.roster.read, server.method.aggregate

    def accept(name: str, reply: Message | None, *rest: Any) -> int:
        assert not [old for old in read if old() is not None], "an earlier reply is still in memory"
        assert reply is not None
        read.append(weakref.ref(reply))
        return honest(name, reply, *rest)

    def aggregate(state: ServerState, updates: Mapping[str, Update]) -> ServerState:
        assert all(isinstance(update.arrays, SavedTensors) for update in updates.values())
        return summed(state, updates)

    monkeypatch.setattr(server.roster, "read", accept)
    monkeypatch.setattr(server.method, "aggregate", aggregate)
    state = server.play(ServerState(-1, NAMES), NAMES)
    assert (len(read), tuple(state.clients)) == (3, NAMES)


def test_clients_that_are_sent_the_same_arrays_share_one_copy(tmp_path: Path) -> None:
    for others_only, copies in (("false", 1), ("true", 3)):
        settings = ["alignment.distance=cka", f"alignment.leave_one_out={others_only}"]
        rig = Rig(tmp_path / str(copies), *settings, encoders=("resnet8(width=4)",) * 3)
        server = Server(rig.grid, rig.folder, rig.config, rig.listen)
        server.roster.gather(None)
        state = server.play(ServerState(-1, NAMES), NAMES)
        contents = server.broadcasts(state, NAMES, 1)
        assert len({id(content["arrays"]) for content in contents.values()}) == copies
