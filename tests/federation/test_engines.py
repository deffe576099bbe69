"""All engines use the same server loop and ClientApp."""

import sys
from pathlib import Path

import pytest

from helpers.whole_runs import assert_same, everything, run, tiny
from hetero_ssfl.errors import ConfigError, RunError
from hetero_ssfl.federation.start import start


def test_simulation_engine_is_bit_identical_to_worker_processes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    ours, flowers = (run(tmp_path / kind, f"engine.kind={kind}", "rounds=2") for kind in ("in-process", "simulation"))
    a, b = everything(ours), everything(flowers)
    for event in (*a["events"], *b["events"]):
        event.pop("bytes_up", None)  # node and run ids are longer on Ray
    assert_same(a, b)


def test_error_without_ray_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    monkeypatch.setattr("hetero_ssfl.federation.engines.ray_engine.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'hetero-ssfl\[simulation\]'"):
        start(tiny("engine.kind=simulation"), tmp_path / "run", lambda _: None)


def test_simulation_engine_raises_the_original_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread ends with an error of its own, but the user must see the original one."""
    pytest.importorskip("ray")
    import flwr.simulation

    def engine(server_app: object, **_: object) -> None:
        from flwr.app import Context, RecordDict

        server_app(None, Context(1, 1, {}, RecordDict(), {}))  # type: ignore[operator]

    monkeypatch.setattr(flwr.simulation, "run_simulation", engine)

    def broken(*_: object) -> None:
        raise RunError("nobody is there. Start the others.")

    monkeypatch.setattr("hetero_ssfl.federation.server.loop.Server.run", broken)
    with pytest.raises(RunError, match="nobody is there"):
        start(tiny("engine.kind=simulation"), tmp_path / "run", lambda _: None)
