"""The paper's tables: every cell has a valid config, and the figures match the paper."""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import stdev
from typing import Any, cast

import pytest
from rich.markup import render

from helpers.commands import PROGRAM
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.methods import method_for
from hetero_ssfl.runs.events import ClientTrained
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.studies.grid import run_alone
from hetero_ssfl.studies.paper import running
from hetero_ssfl.studies.paper import scores as paper_results
from hetero_ssfl.studies.paper.cells import (
    CHOSEN,
    FEDSIMCLR,
    HETERO,
    OUR_ROWS,
    OURS,
    REPORTED,
    ROW_SETTINGS,
    SCALES,
    Cell,
    cells_of,
)
from hetero_ssfl.studies.paper.printing import _accuracy, paper_table
from hetero_ssfl.studies.paper.scores import RunScore, finished_runs, score

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", REPORTED)
def test_every_cell_is_a_config_its_method_accepts(table: str, scale: str) -> None:
    cells = cells_of(table)  # type: ignore[arg-type]
    folders = {cell.folder(Path("root"), scale, 0) for cell in cells}
    assert len(folders) == (len(cells) if table != "table4" else len(cells) // 2)  # a run has both its columns
    for cell in cells:
        config = cell.config(scale, seed=3)
        method_for(config)
        assert config.seed == 3


@pytest.mark.parametrize("scale", SCALES)
def test_cells_of_different_tables_share_a_run_only_if_their_configs_are_equal(scale: str) -> None:
    runs: dict[Path, set[str]] = {}
    for table in REPORTED:
        for cell in cells_of(table):  # type: ignore[arg-type]
            runs.setdefault(cell.folder(Path("root"), scale, 0), set()).add(cell.config(scale, 0).to_toml())
    assert all(len(configs) == 1 for configs in runs.values())
    assert len(runs) == 39 + 16 + 12 + 1  # Table 3 without its first column, and local SSL of Table 4


def test_full_scale_is_the_papers_setting() -> None:
    cells = {cell.name: cell.config("full", 0) for cell in cells_of("table1")}
    literal = cells[f"CIFAR-10/{HETERO}"]
    assert [m.encoder for m in literal.clients.models] == ["resnet18", "resnet34"]
    assert (literal.rounds, literal.local_epochs, literal.rad.size, literal.alignment.mu) == (200, 5, 5000, 0.5)
    assert (literal.alignment.layer, literal.alignment.power) == ("predictor", 1.0)
    assert cells[f"Tiny-ImageNet/{HETERO}"].alignment.mu == 1
    assert [m.encoder for m in cells["CIFAR-10/FedEMA"].clients.models] == ["resnet34"]
    assert cells["CIFAR-100/FedU"].averaging.threshold == 0.6
    assert cells["CIFAR-10/central BYOL"].clients.count == 1
    ours = cells[f"CIFAR-10/{OURS}"]
    assert (ours.alignment.layer, ours.alignment.power, ours.alignment.augment_rad) == ("encoder", 0.5, True)
    iid = cells_of("table2")[0].config("full", 0)
    assert iid.partition.kind == "iid"
    many = next(c for c in cells_of("table3") if c.column == "100 (10)").config("full", 0)
    assert (many.clients.count, many.clients.selected_per_round(), many.data.source) == (100, 10, "cifar100")


def test_rows_at_workstation_scale_share_images_and_views_but_only_ours_use_the_recipe_of_the_preset() -> None:
    preset = load_config("cifar10-16px")
    cells = {cell.row: cell.config("workstation", 0) for cell in cells_of("table1", "CIFAR-10")}
    for row, config in cells.items():
        assert (config.data, config.rad.size, config.views) == (preset.data, preset.rad.size, preset.views)
        ours = (config.ssl, config.alignment) == (preset.ssl, preset.alignment)
        assert ours == (row in (*OUR_ROWS, FEDSIMCLR))
        assert config.rad.in_ssl == ("with RAD images" in row)
    assert cells["FedEMA"].ssl.kind == "byol"
    literal, defaults = cells[HETERO].alignment, load_config("paper").alignment
    for key in ("distance", "layer", "trained_layer", "estimator", "power", "row_normalize", "augment_rad", "every"):
        assert getattr(literal, key) == getattr(defaults, key), key
    assert [m.encoder for m in cells[FEDSIMCLR].clients.models] == ["resnet14(width=16)"]  # as FedBYOL


def test_clients_that_take_turns_train_as_often_at_workstation_scale_as_clients_of_every_round() -> None:
    for cell in cells_of("table3"):
        config = cell.config("workstation", 0)
        assert config.rounds * config.clients.selected_per_round() / config.clients.count == 6
        images = 7000 // config.clients.count
        assert images // config.optim.batch * config.epochs_of(images) * 6 >= 48  # steps of each client
        assert cell.config("full", 0).rounds == 200  # as in the paper


def test_chosen_settings_hold_for_the_row_with_rad_images_too_and_selection_begins_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CHOSEN, "FedEMA", ["averaging.tau=0.123"])
    for row in ("FedEMA", "FedEMA with RAD images"):
        cell = cells_of("table1", f"CIFAR-10/{row}")[0]
        assert cell.config("workstation", 0).averaging.tau == 0.123
        assert cell.config("workstation", 0, chosen=False).averaging.tau == 0.7
        assert cell.config("laptop", 0).averaging.tau == 0.7


def test_an_unknown_cell_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="CIFAR-10/FedEMA"):
        cells_of("table1", "CIFAR-10/FedEMMA")


def test_the_table_shows_the_papers_figure_beside_ours() -> None:
    entry = {
        "cell": "CIFAR-10/FedU",
        "metric": "linear_all",
        "mean": 12.34,
        "sd_over_seeds": 0.56,
        "sd_over_clients": 1.23,
        "bytes_per_client_and_round": 1000,
    }
    table = paper_table("table1", [entry], "laptop")
    assert "over seeds [deviation over clients]" in render(str(table.title)).plain
    columns = {column.header: list(column.cells) for column in table.columns}
    row = columns["method"].index("FedU")
    assert columns["CIFAR-10"][row] == r"12.3 ± 0.6 \[1.2] | 79.6 ± 0.5"  # the backslash keeps rich from reading markup
    assert columns["CIFAR-100"][row] == "- | 58.9 ± 0.12"


def test_a_table_over_digits_says_so_and_leaves_the_papers_figures_out() -> None:
    entry = {"cell": "CIFAR-10/FedU", "metric": "linear_all", "mean": 12.3, "sd_over_seeds": None}
    entry |= {"sd_over_clients": None, "floors": {"raw pixels": 36.0}, "untrained_mean": None}
    table = paper_table("table1", [entry], "smoke")
    assert [str(column.header) for column in table.columns][1:4] == [
        *(f"digits ({name})" for name in ("CIFAR-10", "CIFAR-100", "Tiny-ImageNet"))
    ]
    cells = [cell for column in table.columns for cell in column.cells]
    assert {"36.0", "12.3"} < set(cells)
    assert not [cell for cell in cells if "|" in str(cell)]


def test_a_cell_shows_its_model_the_number_of_trained_clients_and_losses() -> None:
    plain = {"cell": "CIFAR-10/FedU", "metric": "linear_all", "mean": 12.34, "sd_over_seeds": None}
    plain |= {"sd_over_clients": 1.23, "bytes_per_client_and_round": 1000, "clients_mean": 11.0}
    shared = {**plain, "of": "global model", "classifier_mean": 8.0}
    few = {
        **plain,
        "cell": "CIFAR-100/FedU",
        "never_trained_clients": 4,
        "trained_clients": 6,
        "lost": ["a in round 1"],
    }
    table = paper_table("table1", [shared, few], "laptop")
    columns = {column.header: list(column.cells) for column in table.columns}
    row = columns["method"].index("FedU")
    assert cast(str, columns["CIFAR-10"][row]).startswith("12.3 g (clients 11.0) (own classifier 8.0) |")
    assert cast(str, columns["CIFAR-100"][row]).startswith(r"12.3 \[1.2] (6 of 10 clients trained) ! |")
    assert "replies, clients or whole runs were lost" in str(table.caption)


def test_the_table_says_how_many_seeds_a_column_has_and_what_is_reached_without_training() -> None:
    plain = {"metric": "linear_all", "mean": 12.3, "sd_over_seeds": None, "sd_over_clients": None}
    plain["bytes_per_client_and_round"] = 1000
    scores = [
        {**plain, "cell": "CIFAR-10/FedU", "seeds": 3, "untrained_mean": 30.25, "floors": {"raw pixels": 36.0}},
        {**plain, "cell": "CIFAR-10/FedEMA", "seeds": 2, "untrained_mean": 31.75},
        {**plain, "cell": "CIFAR-100/FedU", "seeds": 1, "untrained_mean": None},
    ]
    table = paper_table("table1", scores, "laptop")
    columns = {str(column.header).replace("\n", ", "): list(column.cells) for column in table.columns}
    assert list(columns)[1:4] == ["CIFAR-10, 2 to 3 seeds", "CIFAR-100, 1 seed", "Tiny-ImageNet"]
    assert columns["method"][:2] == ["raw pixels", "untrained encoders of these rows"]
    assert [column[:2] for column in list(columns.values())[1:4]] == [
        ["36.0 | -", "30.2 to 31.8 | -"],
        ["-"] * 2,
        ["-"] * 2,
    ]


def make_cell(root: Path, method: str, **results: object) -> tuple[Cell, RunFolder]:
    cell = next(c for c in cells_of("table1") if c.name == f"CIFAR-10/{method}")
    folder = RunFolder.create(cell.folder(root, "smoke", 0), cell.config("smoke", 0), lambda _: None)
    folder.write_json("facts.json", {"site": "simulated"})
    clients = {f"client-{k:03d}": {"linear_all": 10.0 * k} for k in range(3)}
    whole = {"clients": clients, "models": {}, "mean": {}, "untrained": {}, **results}
    folder.write_json("results.json", whole)
    return cell, folder


def test_only_clients_that_trained_are_averaged(tmp_path: Path) -> None:
    cell, folder = make_cell(tmp_path, HETERO)
    folder.append_events(
        [ClientTrained(0, f"client-{k:03d}", 1, 1, 9) for k in range(3)]
    )  # the opening is not training
    folder.append_events([ClientTrained(1, "client-001", 5, 5, 9), ClientTrained(2, "client-002", 5, 5, 9)])
    found = score(cell, finished_runs([cell.folder(tmp_path, "smoke", 0)]))
    assert (found["mean"], found["trained_clients"], found["never_trained_clients"]) == (15.0, 2, 1)
    assert (found["lost"], found["of"]) == ([], "clients")


def test_a_cell_of_one_architecture_has_the_untrained_encoders_of_that_architecture(tmp_path: Path) -> None:
    untrained = {f"client-{k:03d}": {"linear_all": figure} for k, figure in enumerate([10.0, 50.0, 20.0])}
    make_cell(tmp_path, HETERO, untrained=untrained)
    cells = cells_of("table4", HETERO)  # small and large clients of the run of Table 1: 0 and 2, and 1
    found = [score(cell, finished_runs([cell.folder(tmp_path, "smoke", 0)]))["untrained_mean"] for cell in cells]
    assert found == [15.0, 50.0]


def test_a_cell_has_the_floors_at_the_widths_of_its_clients(tmp_path: Path) -> None:
    pixels = {f"client-{k:03d}": {"linear_all": figure} for k, figure in enumerate([30.0, 36.0, 32.0])}
    make_cell(tmp_path, HETERO, floors={"raw pixels": pixels})
    cells = cells_of("table4", HETERO)
    found = [score(cell, finished_runs([cell.folder(tmp_path, "smoke", 0)]))["floors"] for cell in cells]
    assert found == [{"raw pixels": 31.0}, {"raw pixels": 36.0}]


def test_a_lost_reply_marks_the_cell_and_a_global_model_gives_its_figure(tmp_path: Path) -> None:
    cell, folder = make_cell(tmp_path, "FedBYOL", **{"global": {"linear_all": 77.0}, "absent": ["client-009"]})
    folder.append_events([ClientTrained(1, "client-000", 5, 5, 9), ClientTrained(1, "client-001", 5, excluded="NaN.")])
    found = score(cell, finished_runs([cell.folder(tmp_path, "smoke", 0)]))
    assert (found["mean"], found["of"], found["clients_mean"]) == (77.0, "global model", 0.0)
    assert found["lost"] == ["client-001 in round 1: NaN.", "client-009 was absent at the end"]


def cell_config(overrides: list[str]) -> str:
    return cells_of("table4", "local SSL")[0].config("smoke", 0, overrides).to_toml()


def test_a_client_that_dies_every_round_marks_its_cells_and_the_exit_code_and_the_others_are_run(
    tmp_path: Path, dying: str, call: Call
) -> None:
    models = f"clients.models=['resnet8(width=4)', '{dying}']"
    short = ["rounds=1", "clients.count=2", "clients.per_round=2", "evaluation.untrained=false", models]
    arguments = ["table4", "--scale", "smoke", "--only", "local SSL", "--root", tmp_path / "runs", "--quiet"]
    arguments += ["--seeds", "2", *(word for setting in short for word in ("--set", setting))]
    code, printed, said = call("paper", *arguments, "--json")
    assert code == 1, said
    for cell in json.loads(printed)["cells"]:
        assert (cell["mean"], cell["trained_clients"], cell["stopped_runs"]) == (None, 0, 2)  # both seeds were tried
        assert (
            "client-001 (encoder dying:Dying) failed twice in round 1: its process died of SIGABRT" in cell["lost"][1]
        )
        assert _accuracy(cell) == "incomplete !"
    assert said.count("client-001") == 4
    beside = run_alone(cell_config(short), tmp_path / "runs" / "beside")
    assert beside is not None
    assert "SIGABRT" in beside


def test_a_run_whose_loss_diverges_marks_its_cell_and_the_others_are_run(tmp_path: Path, call: Call) -> None:
    table = ["paper", "table1", "--scale", "smoke", "--root", tmp_path, "--quiet", "--json", "--set", "rounds=1"]
    code, printed, said = call(*table, "--only", "CIFAR-10/central BYOL", "--seeds", 2, "--set", "optim.lr=1e30")
    (cell,) = json.loads(printed)["cells"]
    assert (code, cell["mean"], cell["stopped_runs"]) == (1, None, 2)
    assert "the loss diverged" in cell["lost"][0]
    assert said.count("lost in CIFAR-10/central BYOL") == 2


def paper_json(call: Call, *arguments: object) -> dict[str, Any]:
    code, printed, said = call("paper", *arguments, "--json")
    assert code == 0, said
    return json.loads(printed)


def test_a_dry_run_builds_everything_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.chdir(tmp_path)
    costs = paper_json(call, "table1", "--scale", "smoke", "--dry-run", "--only", "CIFAR-10")["costs"]
    by_row = {cost["cell"].split("/")[1]: cost for cost in costs}
    assert len(by_row) == len(REPORTED["table1"])
    assert by_row["FedBYOL"]["models"][0]["bytes_per_round"] > by_row[OURS]["models"][0]["bytes_per_round"] > 0
    assert len(by_row[OURS]["models"]) == 2
    assert not list(tmp_path.iterdir())


def test_cells_are_run_once_and_both_columns_of_table_4_come_from_one_run(tmp_path: Path, call: Call) -> None:
    arguments = ["table4", "--scale", "smoke", "--root", str(tmp_path), "--only", "local SSL", "--quiet"]
    first = paper_json(call, *arguments)
    (result,) = tmp_path.rglob("results.json")
    written = result.stat().st_mtime_ns
    assert paper_json(call, *arguments) == first
    assert result.stat().st_mtime_ns == written
    cells = first["cells"]
    scores = [s["linear_all"] for s in json.loads(result.read_text())["clients"].values()]
    assert [c["mean"] for c in cells] == pytest.approx([sum(scores[0::2]) / 3, sum(scores[1::2]) / 2])
    assert [c["sd_over_clients"] for c in cells] == pytest.approx([stdev(scores[0::2]), stdev(scores[1::2])])
    own = paper_json(call, *arguments, "--metric", "linear_own")["cells"]
    assert {c["metric"] for c in own} == {"linear_own"}
    assert [c["mean"] for c in own] != [c["mean"] for c in cells]


def test_a_killed_table_loses_no_finished_cell_and_equals_one_whose_cells_ran_side_by_side(
    tmp_path: Path, call: Call
) -> None:
    table = ["table2", "--scale", "smoke", "--only", "FedBYOL", "--set", "rounds=1", "--quiet"]
    one, two = ([*table, "--root", str(tmp_path / name)] for name in ("one", "two"))
    folders = [cell.folder(tmp_path / "one", "smoke", 0) for cell in cells_of("table2", "FedBYOL")]
    first = subprocess.Popen([*PROGRAM, "paper", *one], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (folders[1] / "server.safetensors").exists():  # the second cell has begun
        assert first.poll() is None
        time.sleep(0.02)
    first.kill()
    first.wait()
    assert not (folders[1] / "results.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in folders[0].rglob("*.safetensors")}
    kept[folders[0] / "results.json"] = (folders[0] / "results.json").stat().st_mtime_ns
    resumed = paper_json(call, *one)
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    assert len(list(tmp_path.rglob("results.json"))) == len(folders) == 2
    assert paper_json(call, *two, "--jobs", "2") == resumed


def test_error_for_an_unknown_metric_lists_the_known_ones(tmp_path: Path, call: Call) -> None:
    arguments = ["table4", "--scale", "smoke", "--root", str(tmp_path), "--only", "local SSL", "--quiet"]
    code, _, said = call("paper", *arguments, "--metric", "linear_every")
    assert (code, "linear_all, linear_own" in said.replace("\n", " ")) == (2, True)


def test_kept_figures_give_the_same_table_and_a_check_repeats_a_cell(tmp_path: Path, call: Call) -> None:
    table, kept = ["table4", "--scale", "smoke", "--only", "small clients/local SSL"], tmp_path / "results"
    made = paper_json(call, *table, "--seeds", "2", "--root", str(tmp_path / "runs"), "--keep", str(kept), "--quiet")
    assert {entry["untrained_mean"] is not None for entry in made["cells"]} == {True}
    files = sorted(kept.rglob("*.json"))
    assert [file.name for file in files] == [f"all-local-SSL-seed{k}.json" for k in (0, 1)]
    assert {"command", "settings", "commit", "hours", "seed", "clients"} <= json.loads(files[0].read_text()).keys()
    assert paper_json(call, *table, "--show", str(kept)) == made
    elsewhere = ["--seeds", "2", "--root", str(tmp_path / "elsewhere"), "--keep", str(kept), "--quiet"]
    elsewhere += ["--set", "engine.workers=1"]  # how a run is carried out does not change its figures
    assert paper_json(call, *table, *elsewhere) == made
    assert not (tmp_path / "elsewhere").exists()  # what is kept is not run again, here on a machine without the runs
    same = paper_json(call, *table, "--check", str(kept))
    figures = same["kept"]
    assert same["found"] == figures[0]  # the same seed on the same machine
    assert same["agrees"] is True
    low, high = same["expected"]
    half = 12.706 * abs(figures[0] - figures[1]) / 2**0.5 * 1.5**0.5  # t quantile, deviation of two values, 1 + 1/2
    assert (low, high) == pytest.approx((sum(figures) / 2 - half, sum(figures) / 2 + half))
    for file in files:  # someone's better figures
        values = json.loads(file.read_text())
        for client in values["clients"].values():
            client["linear_all"] = 99.0 + values["seed"] / 100
        file.write_text(json.dumps(values))
    code, said, _ = call("paper", *table, "--check", kept)
    assert (code, "is outside" in said) == (1, True)


def test_a_check_repeats_the_cheapest_of_the_cells_with_the_most_seeds() -> None:
    """With two seeds, the interval of a cell could hold almost any figure."""

    def runs(hours: float, *seeds: int) -> list[RunScore]:
        return [RunScore(seed, {}, [], {}, {}, [], None, hours, "") for seed in seeds]

    cells = cells_of("table4", "small clients")
    kept = dict(zip(cells, [runs(0.1, 0, 1), runs(0.3, 0, 1, 2), runs(0.2, 0, 1, 2), runs(0.1, 1, 2, 3)], strict=True))
    assert running.cell_to_repeat(kept) == cells[2]
    assert running.cell_to_repeat({cells[0]: runs(0.1, 0), cells[3]: kept[cells[3]]}) is None


def test_a_check_that_is_stopped_by_a_fault_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    cell = cells_of("table4", "small clients/local SSL")[0]
    for seed in (0, 1):
        file = paper_results.result_file(tmp_path, cell, "smoke", seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        run = RunScore(seed, {"client-000": {"linear_all": 50.0 + seed}}, [], {}, {}, [], None, 0.1, "")
        about = {"command": "", "settings": paper_results.digest_of_settings(cell, "smoke", seed)}
        file.write_text(json.dumps({**about, **asdict(run)}))
    monkeypatch.setattr(running.Runs, "run", lambda *_, **__: {tmp_path: "the loss is not finite."})
    code, _, said = call("paper", "table4", "--scale", "smoke", "--check", tmp_path, "--only", cell.name)
    assert code == 2
    assert "'small clients/local SSL' could not be repeated: the loss is not finite." in said


def test_a_kept_run_of_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    table = ["paper", "table4", "--scale", "smoke", "--only", "small clients/local SSL", "--quiet"]
    keep = ["--root", tmp_path / "runs", "--keep", tmp_path / "results"]
    assert call(*table, *keep)[0] == 0
    monkeypatch.setitem(ROW_SETTINGS, "local SSL", ["method=local", "optim.lr=0.5"])
    for again in (keep, ["--show", tmp_path / "results"]):
        code, _, said = call(*table, *again)
        assert (code, "with other settings than 'small clients/local SSL' has now" in said) == (2, True)


def test_alignment_settings_are_part_of_a_kept_run_only_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cells_of("table4", f"small clients/{row}")[0] for row in ("local SSL", HETERO)]
    before = [paper_results.digest_of_settings(cell, "smoke", 0) for cell in cells]
    changes = SCALES["smoke"]["settings"]
    monkeypatch.setitem(SCALES["smoke"], "settings", [*changes, "alignment.rad_batch=16"])
    after = [paper_results.digest_of_settings(cell, "smoke", 0) for cell in cells]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False]


def test_a_damaged_result_and_a_check_without_results_are_one_sentence(tmp_path: Path, call: Call) -> None:
    code, _, said = call("paper", "table1", "--scale", "smoke", "--check", tmp_path)
    assert (code, "no cell of scale smoke" in said) == (2, True)
    file = tmp_path / "smoke" / "table1" / "CIFAR-10-FedU-seed0.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"command": "", "seed": 1}')
    code, _, said = call("paper", "table1", "--scale", "smoke", "--show", tmp_path)
    assert (code, "is not a result of" in said) == (2, True)
    code, _, said = call("paper", "table1", "--keep", tmp_path, "--set", "rounds=1")
    assert (code, "Leave out --set rounds=1" in said) == (2, True)
    code, _, said = call("paper", "table1", "--keep", tmp_path, "--set", "engine.precision=bfloat16")
    assert (code, "Leave out --set engine.precision" in said) == (2, True)
