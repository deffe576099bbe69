"""The live page without a browser: who may see what, hostile texts, slow viewers, large runs, and Prometheus."""

import re
import socket
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.waiting import until
from helpers.watching import first_news, read_raw, status_of, watching
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.federation.server.status_file import reporting
from hetero_ssfl.federation.watching import open_page
from hetero_ssfl.report.exposition import exposition
from hetero_ssfl.report.live import LiveRuns
from hetero_ssfl.runs import events
from hetero_ssfl.runs.events import (
    Answered,
    ClientTrained,
    Evaluated,
    Event,
    Joined,
    KernelsSeen,
    Progressed,
    RoundBegun,
    RoundDone,
    Started,
    Warned,
)
from hetero_ssfl.runs.folder import RunFolder

METRICS = {"loss_ssl": 2.0, "loss_alignment": 1.0, "spread": 0.9, "effective_rank": 12.0}


def create(path: Path, *events: Event, rounds: int = 4) -> RunFolder:
    config = load_config("smoke", [f"rounds={rounds}"])
    folder = RunFolder.create(path, config, lambda run: run.write_json("facts.json", {"site": "nodes"}))
    folder.append_events(list(events))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of two clients with one finished round."""
    trained = [ClientTrained(1, name, 10, 20, 5, figures=METRICS) for name in ("a", "b")]
    scores = Evaluated(1, "validation", {"a": {"linear_all": 40.0}, "b": {"linear_all": 60.0}}, {"linear_all": 50.0})
    kernels = KernelsSeen(1, [0.5, 0.5], ["a", "b"], [[1.0, 0.25], [0.25, 1.0]])
    return create(tmp_path / "run", *trained, scores, kernels, RoundDone(1, 2, 3.0, figures=METRICS))


def test_the_parts_show_progress_time_left_scores_and_warnings(folder: RunFolder) -> None:
    live = LiveRuns([folder.path])
    with folder.lock():
        listen = reporting(folder, lambda _: None)
        for event in (Joined("a", "resnet8"), Joined("b", "vit"), Started(1, 4), RoundBegun(2, ("a", "b"))):
            listen(event)
        listen(Progressed("a", 0.25, 1.0))
        listen(Warned(2, "mind the gap"))
        listen(RoundBegun(2, ("a", "b")))  # is written at once
        live.refresh(at_once=True)
    rows = dict(re.findall(r'<th scope="row">(\w)</th>(.*)</tr>', live.parts["clients"]))
    assert "training, 25%, about" in rows["a"]
    assert "waiting for a worker" in rows["b"]
    assert ">0.25<" in rows["a"], "mutual CKA"
    assert ">60.0<" in rows["b"], "accuracy"
    assert "mind the gap" in live.parts["warnings"]
    assert ">50.0<" in live.parts["newest"]


def test_a_client_without_progress_is_expected_after_its_last_time(folder: RunFolder) -> None:
    live = LiveRuns([folder.path])
    with folder.lock():
        listen = reporting(folder, lambda _: None)
        listen(RoundBegun(1, ("a", "b")))
        status = folder.read_status()
        listen(Answered(1, "a"))
        listen(RoundBegun(2, ("a", "b")))
        status = folder.read_status()
        assert status["nodes"]["a"]["seconds"] < 60
        nodes = {"a": {**status["nodes"]["a"], "seconds": 1000.0}, "b": {"state": "training", "seconds": 100.0}}
        folder.write_json("status.json", {**status, "nodes": nodes, "began": time.time() - 500})
        live.refresh(at_once=True)
    rows = dict(re.findall(r'<th scope="row">(\w)</th>(.*)</tr>', live.parts["clients"]))
    assert "training for 8 min, about 8 min left" in rows["a"]
    assert "longer than its last 1 min" in rows["b"]


def test_only_new_lines_are_parsed_and_a_run_that_goes_back_is_followed(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, parsed = LiveRuns([folder.path]), list[int]()
    parse = events.from_lines

    def count(lines: list[bytes]) -> list[Event]:
        parsed.append(len(lines))
        return parse(lines)

    monkeypatch.setattr("hetero_ssfl.report.live.from_lines", count)
    live.refresh(draw=False, at_once=True)
    before = (folder.path / "events.jsonl").read_bytes()
    folder.append_events([RoundDone(2, 2, 3.0)])
    live.refresh(draw=False, at_once=True)
    assert parsed == [5, 1]
    assert [run.rounds_done for run in live.runs] == [2]
    folder.log.keep(before)
    live.refresh(draw=False, at_once=True)
    assert [run.rounds_done for run in live.runs] == [1]


def test_a_damaged_file_is_reported_and_the_page_stays(folder: RunFolder) -> None:
    live = LiveRuns([folder.path])
    live.refresh(at_once=True)
    shown = live.parts["newest"]
    (folder.path / "facts.json").write_text("{}")
    folder.append_events([RoundDone(2, 2, 3.0)])
    live.refresh(at_once=True)
    assert "facts.json" in live.parts["trouble"]
    assert live.parts["newest"] == shown


TEXTS = st.text(max_size=40) | st.sampled_from(
    ["<script>x()</script>", "</section>", "\x1b[2J", "\u202e", "'\"&", "\ud800"]
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=TEXTS, reason=TEXTS, times=st.sampled_from([1, 10**7]))
def test_hostile_names_and_reasons_are_text_and_bounded(
    tmp_path_factory: pytest.TempPathFactory, name: str, reason: str, times: int
) -> None:
    folder = create(
        tmp_path_factory.mktemp("hostile") / "run",
        ClientTrained(1, name, 1, 2, figures=METRICS),
        ClientTrained(1, f"{name}{'n' * times}", 1, excluded=reason * (times // max(1, len(reason)) or 1)),
        Evaluated(1, "validation", {name: {"linear_all": 1.0}, "other": {"linear_all": 2.0}}, {"linear_all": 1.5}),
        RoundDone(1, 1, 1.0, away=[name * (times // max(1, len(name)) or 1)]),
    )
    live = LiveRuns([folder.path])
    live.refresh(at_once=True)
    page = "".join(live.parts.values())
    assert "trouble" not in live.parts or not live.parts["trouble"]
    assert len(page.encode()) < 500_000
    tags = set(re.findall(r"<\s*/?\s*([a-zA-Z0-9]+)", page))
    assert not tags & {"script", "img", "iframe", "x"}
    assert page.count("</section>") == page.count("<section ")
    assert not {"\x1b", "\u202e", "\ud800"} & set(page)


def test_only_the_page_its_events_and_metrics_are_served(folder: RunFolder) -> None:
    with watching(folder.path) as url:
        assert [status_of(url + path) for path in ("", "metrics")] == [200, 200]
        paths = (
            "/../../etc/passwd",
            "/%2e%2e/%2e%2e/etc/passwd",
            "//etc/passwd",
            "/config.toml",
            "/events.jsonl",
            "/x",
        )
        for path in paths:
            answer = read_raw(url, path)
            assert answer.startswith(b"HTTP/1.1 404"), path
            assert b"root:" not in answer
        assert status_of(url, "POST") == status_of(url, "DELETE") == 405
        assert status_of(url, Host="evil.example") == 403, "a name of another site that leads here"


def test_another_machine_needs_the_token(folder: RunFolder) -> None:
    with watching(folder.path, address="0.0.0.0:0", token="geheim") as url:
        assert url.endswith("/?token=geheim")
        place = url.partition("?")[0]
        for path in ("", "events", "metrics", "x"):
            assert status_of(place + path) == status_of(f"{place}{path}?token=geheim2") == 403
        assert status_of(f"{place}x?token=geheim") == 404
        assert status_of(url) == 200
        assert status_of(f"{place}metrics", Authorization="Bearer geheim") == 200
        assert "newest" in first_news(url)["parts"]


@pytest.mark.parametrize("address", ["8765", "here:http", "127.0.0.1:99999", "256.0.0.1:1", "no such host:1"])
def test_a_wrong_address_is_one_sentence(address: str) -> None:
    with pytest.raises(ConfigError, match=r"expected HOST:PORT|Choose another"):
        open_page(address)


def test_a_thousand_slow_connections_stop_nobody(folder: RunFolder) -> None:
    """They send half a request, and are closed."""
    with watching(folder.path) as url:
        host, port = re.findall(r"//(.*):(\d+)/", url)[0]
        slow = [socket.create_connection((host, int(port))) for _ in range(900)]
        for each in slow:
            each.sendall(b"GET / HTTP/1.1\r\nHost: local")
        assert status_of(url) == 200
        assert "newest" in first_news(url)["parts"]
        slow[0].settimeout(60)
        assert slow[0].recv(1) == b"", "it was closed"
        for each in slow:
            each.close()


def test_at_most_fifty_look_on_and_others_are_told_so(folder: RunFolder) -> None:
    with watching(folder.path) as url:
        host, port = re.findall(r"//(.*):(\d+)/", url)[0]
        viewers = [socket.create_connection((host, int(port))) for _ in range(50)]
        for viewer in viewers:
            viewer.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert viewer.recv(12) == b"HTTP/1.1 200"
        assert status_of(f"{url}events") == 503
        assert status_of(url) == 200
        for viewer in viewers:
            viewer.close()
        until(lambda: status_of(f"{url}events") == 200)  # their places are free again


def test_a_thousand_clients_and_two_hundred_rounds_make_less_than_a_megabyte(tmp_path: Path) -> None:
    names, told = [f"client-{k:04d}" for k in range(1000)], list[Event]()
    for at in range(1, 201):
        told += [
            ClientTrained(at, n, 10, 20, figures=METRICS) if k % 50 else ClientTrained(at, n, 10, excluded="too late")
            for k, n in enumerate(names)
        ]
        told.append(RoundDone(at, 980, 3.0, figures=METRICS))
    scores = {name: {"linear_all": 50.0} for name in names}
    told.append(Evaluated(200, "validation", scores, {"linear_all": 50.0}))
    folder = create(tmp_path / "run", *told, rounds=300)
    live = LiveRuns([folder.path])
    live.refresh(at_once=True)
    assert len("".join(live.parts.values()).encode()) < 1_000_000
    assert live.parts["clients"].count("<tr>") == 101
    assert len(exposition(live.runs, live.statuses)) < 1_000_000


def test_the_metrics_are_in_the_format_of_prometheus(folder: RunFolder) -> None:
    folder.append_events([ClientTrained(2, 'c"\\\n', 1, 2, figures={"spread": 0.5, "odd name": 1.0}), RoundDone(2, 1)])
    live = LiveRuns([folder.path])
    live.refresh(draw=False, at_once=True)
    lines = exposition(live.runs, live.statuses).splitlines()
    sample = re.compile(r'hetero_ssfl_[a-z_]+\{([a-z]+="([^"\\]|\\.)*",?)*\} [-+.e\d]+')
    assert all(sample.fullmatch(line) or line.startswith("# TYPE hetero_ssfl_") for line in lines)
    assert 'hetero_ssfl_client_spread{run="run",client="a"} 0.9' in lines
    assert 'hetero_ssfl_accuracy{run="run",probe="linear_all"} 50.0' in lines
    assert 'hetero_ssfl_client_spread{run="run",client="c\\"\\\\?"} 0.5' in lines
    kinds = [line for line in lines if line.startswith("#")]
    assert len(kinds) == len(set(kinds))


def test_the_example_dashboard_asks_only_for_metrics_that_exist(folder: RunFolder) -> None:
    live = LiveRuns([folder.path])
    with folder.lock():
        reporting(folder, lambda _: None)(RoundBegun(2, ("a", "b")))
        live.refresh(draw=False, at_once=True)
    there = set(re.findall(r"^(hetero_ssfl_\w+)\{", exposition(live.runs, live.statuses), re.MULTILINE))
    wanted = set(re.findall(r"hetero_ssfl_\w+", (Path(__file__).parents[2] / "examples" / "grafana.json").read_text()))
    assert wanted
    assert wanted <= there
