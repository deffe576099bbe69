"""The live page in a real browser, beside real runs: the run waits while the browser looks at the page."""

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message

from helpers.browser import CHROMIUM, Browser
from helpers.rig import Rig
from helpers.waiting import until
from helpers.watching import watching
from helpers.whole_runs import tiny
from hetero_ssfl.federation.start import prepare, resume, start
from hetero_ssfl.runs.events import Event, Finished, Progressed, RoundBegun, Watched
from hetero_ssfl.runs.folder import RunFolder

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: run `make browser` as root")
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
ROUNDS = "[...document.querySelectorAll('#newest tbody th')].map(e => e.textContent)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def text_of(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))


def complaints(browser: Browser) -> list[Any]:
    return browser.said("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


def test_the_page_of_a_run_grows_with_it_and_shows_a_killed_client_and_the_end(
    browser: Browser, tmp_path: Path
) -> None:
    """`run --watch`: no reload, no errors, and the page does not outlive the run."""
    killed: list[int] = []
    seen: list[list[str]] = []

    def listen(event: Event) -> None:
        if isinstance(event, Watched):
            browser.open(event.url)
            browser.evaluate("window.opened = 1")
        if isinstance(event, Progressed) and not killed:
            victim = multiprocessing.active_children()[0]
            killed.append(victim.pid or 0)
            os.kill(victim.pid or 0, signal.SIGKILL)
        if isinstance(event, RoundBegun) and event.round > 1:
            wanted = [str(k) for k in range(event.round - 1, -1, -1)]
            until(lambda: browser.evaluate(ROUNDS) == wanted)
            seen.append(browser.evaluate(ROUNDS))
            assert "killed (SIGKILL)" in text_of(browser, "#warnings")
            assert "training" in text_of(browser, "#clients tbody") + text_of(browser, "#clients p")
        if isinstance(event, Finished):
            assert browser.evaluate("window.opened") == 1

    prepare(tiny("engine.workers=1"), tmp_path / "run").train(listen, watch=True)
    assert seen == [["1", "0"], ["2", "1", "0"]]
    until(lambda: "has ended" in text_of(browser, "#connection"))
    assert browser.evaluate(ROUNDS) == ["3", "2", "1", "0"]
    assert "finished" in text_of(browser, "#clients")
    assert browser.evaluate("document.querySelectorAll('#rounds svg').length") > 3
    assert not complaints(browser)


def test_an_excluded_reply_is_shown_as_text_whatever_it_says(browser: Browser, tmp_path: Path) -> None:
    """Warnings come first. The reason of a node is a script, escape sequences and 10 MB."""
    rig, looked = Rig(tmp_path, "rounds=2"), list[str]()
    reason = "<img src=x onerror='window.hit = 1'><script>window.hit = 1</script>\x1b[31m\u202e" + "x" * 10**7

    def fail() -> None:
        rig.grid.tamper[101] = lambda asked, _: Message(Error(1, reason), reply_to=asked)

    def look() -> None:
        until(lambda: "left out" in text_of(browser, "main section"))
        looked.extend(text_of(browser, place) for place in ("main section", "#clients"))

    with watching(rig.folder.path) as url:
        browser.open(url)
        rig.at["begin", 1], rig.at["begin", 2] = fail, look
        rig.run()
        until(lambda: browser.evaluate(ROUNDS) == ["2", "1", "0"])
        until(lambda: browser.evaluate("document.querySelectorAll('#faults tbody tr').length"))
        assert browser.evaluate("window.hit === undefined && !document.querySelector('main img, main script')")
        assert browser.evaluate("document.documentElement.outerHTML.length") < 1e6
    assert rig.excluded()[0] == (1, "node-1")
    assert "<script>window.hit = 1</script>" in looked[0]
    assert "node-1" in looked[0]
    assert "1 left out" in looked[1]
    assert not {"\x1b", "\u202e"} & set("".join(looked))
    assert not complaints(browser)


def test_the_page_survives_the_restart_of_its_server_and_follows_a_resumed_run(
    browser: Browser, tmp_path: Path
) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, RoundBegun) and event.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tiny(), tmp_path / "run", stop)
    folder = RunFolder.open(tmp_path / "run")
    with watching(folder.path) as url:
        browser.open(url)
        browser.evaluate("window.opened = 1")
        until(lambda: browser.evaluate(ROUNDS) == ["1", "0"])
        assert "stopped" in text_of(browser, "#warnings")
    until(lambda: "lost" in text_of(browser, "#connection"))
    resume(folder, lambda _: None)
    with watching(folder.path, address=url.split("/")[2]):
        until(lambda: browser.evaluate(ROUNDS) == ["3", "2", "1", "0"])
        assert browser.evaluate("window.opened") == 1
        assert "stopped" not in text_of(browser, "#warnings")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("two")
    settings = ["rounds=2", "evaluation.every=1"]
    return [start(tiny(*settings, f"seed={k}"), root / f"seed{k}", lambda _: None).path for k in range(2)]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (375, False), (375, True)])
def test_several_runs_side_by_side_fit_any_width(browser: Browser, two: list[Path], width: int, dark: bool) -> None:
    with watching(*two) as url:
        browser.open(url, width, dark=dark)
        until(lambda: browser.evaluate("document.querySelectorAll('#repeat').length"))
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelectorAll('#clients table, #newest table').length") == 4
        assert not complaints(browser)
        browser.resize(width, browser.evaluate("document.documentElement.scrollHeight"))
        browser.screenshot(SCREENSHOTS / f"live-{width}-{'dark' if dark else 'light'}.png")
