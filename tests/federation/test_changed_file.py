"""An operator edits federation.toml and starts server/run.sh again."""

import logging
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from flwr.common.logger import log

from helpers.federations import write_federation
from helpers.grids import LocalGrid
from hetero_ssfl.federation import superlink
from hetero_ssfl.federation.start import change_settings
from hetero_ssfl.runs.folder import RunFolder


class Deployed:
    def __init__(self, root: Path) -> None:
        self.file, paths = write_federation(root)
        self.grid, self.folder = LocalGrid({100 + k: path for k, path in enumerate(paths)}), RunFolder(root / "run")

    def edit(self, old: str, new: str) -> None:
        assert old in self.file.read_text()
        self.file.write_text(self.file.read_text().replace(old, new))

    def run_script(self) -> None:
        """What server/run.sh starts."""
        told: dict[str, bool | float | int | str] = {"config": str(self.file), "run-dir": str(self.folder.path)}
        superlink.main(self.grid, Context(1, 0, {}, RecordDict(), told))


@pytest.fixture
def deployed(tmp_path: Path) -> Deployed:
    return Deployed(tmp_path)


def test_flower_adds_no_traceback_to_the_sentence(deployed: Deployed, capfd: pytest.CaptureFixture[str]) -> None:
    deployed.edit("size = 24", "size = 'many'")
    with pytest.raises(RuntimeError, match=r"rad\.size") as failed:
        deployed.run_script()
    handler = logging.StreamHandler()
    logging.getLogger("flwr").addHandler(handler)
    try:  # as Flower's run_serverapp does
        log(logging.ERROR, "%s raised an exception", "ServerApp", exc_info=failed.value)
        log(logging.ERROR, "%s raised an exception", "ServerApp", exc_info=ValueError("a real fault"))
    finally:
        logging.getLogger("flwr").removeHandler(handler)
    said = capfd.readouterr().err
    assert "StoppedError" not in said
    assert "ValueError: a real fault" in said


def test_a_deadline_changes_before_the_first_round(deployed: Deployed) -> None:
    nodes, deployed.grid.nodes = deployed.grid.nodes, {}
    deployed.edit("round_timeout = 240", "round_timeout = 1")
    with pytest.raises(RuntimeError, match="0 of 3"):
        deployed.run_script()
    deployed.grid.nodes = nodes
    deployed.edit("round_timeout = 1", "round_timeout = 120")
    deployed.run_script()
    assert deployed.folder.read_config().engine.round_timeout == 120
    assert deployed.folder.finished


def test_a_finished_run_gets_more_rounds_and_keeps_what_resume_changed(deployed: Deployed) -> None:
    deployed.run_script()
    change_settings(deployed.folder, {"rounds": 3, "optim.lr": 0.004})  # run --resume RUN --rounds 3 --set optim.lr=...
    deployed.run_script()
    assert deployed.folder.read_config().rounds == 3, "the file did not change"
    deployed.edit("rounds = 2", "rounds = 4")
    for _ in range(2):
        deployed.run_script()
        config = deployed.folder.read_config()
        assert (config.rounds, config.optim.lr) == (4, 0.004)
    assert deployed.folder.read_json("results.json")["round"] == 4
    assert [number for number, _ in deployed.folder.read_earlier()] == [2, 3]


def test_a_setting_goes_back_to_its_first_value(deployed: Deployed) -> None:
    deployed.run_script()
    deployed.edit("rounds = 2", "rounds = 3")
    deployed.edit("round_timeout = 240", "round_timeout = 100")
    deployed.run_script()
    assert deployed.folder.read_config().engine.round_timeout == 100
    deployed.edit("rounds = 3", "rounds = 4")
    deployed.edit("round_timeout = 100", "round_timeout = 240")
    deployed.run_script()
    assert deployed.folder.read_config().engine.round_timeout == 240


def test_what_defines_the_run_cannot_change_and_the_message_does_not_advise_the_same_command(
    deployed: Deployed,
) -> None:
    deployed.run_script()
    deployed.edit("size = 24", "size = 25")
    with pytest.raises(RuntimeError, match=r"rad\.size is 24 there and 25 here") as refused:
        deployed.run_script()
    assert "Continue that run with" not in str(refused.value)
    assert deployed.folder.read_config().rad.size == 24
