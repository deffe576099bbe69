"""The sections about costs, faults and how to repeat a run."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..config import differences, flat
from . import svg
from .blocks import WORDS, Block, Code, Figure, Figures, Folded, Rows, Section, Text
from .reported_run import ReportedRun, without_folders
from .status import duration
from .wording import MOST_ROWS, bytes_of, legend, volume

# --- costs and faults ------------------------------------------------------------------------------


def costs(runs: Sequence[ReportedRun]) -> Section:
    figures = [figure for figure in (_traffic(runs), _seconds(runs)) if figure.drawing]
    head = ["run", "up", "down", "up per client and round", "rounds", "time in rounds", "median round"]
    blocks: list[Block] = [Rows("Data sent and time taken", head, [_cost_row(run) for run in runs])]
    if figures:
        blocks = [*legend(runs), Figures(figures), *blocks]
    last = runs[-1]
    up, down = (bytes_of(last, key) for key in ("bytes_up", "bytes_down"))
    if any(up.values()) or any(down.values()):
        table = [[c, volume(up.get(c, 0)), volume(down.get(c, 0))] for c in last.clients[:MOST_ROWS]]
        more = f", the first {MOST_ROWS} of {len(last.clients)}" if len(last.clients) > MOST_ROWS else ""
        blocks.append(Folded("Bytes of each client", [Rows(last.label + more, ["client", "up", "down"], table)]))
    intro = "Bytes are payload, without the transport protocol."
    if all(run.method and not run.method.averages_weights for run in runs):
        intro += f" Clients do not send weights, nor {last.things} that are not in the RAD."
    return Section("costs", "Bytes and time", intro, blocks)


def _traffic(runs: Sequence[ReportedRun]) -> Figure:
    lines = []
    for run in runs:
        for key, style, way in (("bytes_up", run.style, "up"), ("bytes_down", f"{run.style} dashed", "down")):
            sums: dict[int, float] = {}
            for points in run.series(key).values():
                for number, count in points:
                    sums[number] = sums.get(number, 0.0) + count
            if any(sums.values()):
                named = [(r, b / 1e6, f"{run.label}, round {r}, {way}: {volume(b)}") for r, b in sorted(sums.items())]
                lines.append(svg.Line(style, named))
    drawing = svg.line_chart(lines, "round", "Megabytes sent in each round by and to all clients")
    return Figure("MB per round, all clients", drawing, "Solid: up to the server. Dashed: down to the clients.")


def _seconds(runs: Sequence[ReportedRun]) -> Figure:
    lines = [
        svg.Line(run.style, [(r, s, f"{run.label}, round {r}: {s:.1f} s") for r, s in run.server_series("seconds")])
        for run in runs
    ]
    drawing = svg.line_chart(lines, "round", "Seconds that each round took")
    return Figure("Seconds per round", drawing, "From broadcast to saved state, including evaluation if there is one.")


def _cost_row(run: ReportedRun) -> list[str]:
    up, down = (sum(bytes_of(run, key).values()) for key in ("bytes_up", "bytes_down"))
    replies = sum(event.bytes_up is not None for event in run.trained)
    trained = [seconds for number, seconds in run.server_series("seconds") if number > 0]
    return [
        run.label,
        volume(up),
        volume(down),
        volume(up / replies) if replies else "-",
        str(run.rounds_done),
        duration(sum(seconds for _, seconds in run.server_series("seconds"))),
        f"{median(trained):.1f} s" if trained else "-",
    ]


def faults(runs: Sequence[ReportedRun]) -> Section:
    title = "Faults and exclusions"
    found = [(run, fault) for run in runs for fault in run.faults()]
    if not found:
        return Section("faults", title, "None: every reply was used, no client was away, and there were no warnings.")
    rows = [[run.label, str(number), who, what, without_folders(words)] for run, (number, who, what, words) in found]
    counts: dict[str, int] = {}
    for _, (_, _, what, _) in found:
        counts[what] = counts.get(what, 0) + 1
    intro = "Total: " + ", ".join(f"{what} {number}" for what, number in counts.items()) + "."
    if len(rows) > MOST_ROWS:
        intro += f" The first {MOST_ROWS} of {len(rows)} are listed; events.jsonl has all."
    head = ["run", "round", "who", "what", "why"]
    return Section("faults", title, intro, [Rows("What happened, in order", head, rows[:MOST_ROWS], WORDS)])


# --- how to repeat it ------------------------------------------------------------------------------


def repeat(runs: Sequence[ReportedRun]) -> Section:
    blocks: list[Block] = []
    differing = _differences(runs)
    if differing:
        blocks.append(Rows("Settings that differ", ["setting", *[run.label for run in runs]], differing, WORDS))
    for run in runs:
        about = run.folder.read_json("environment.json")
        inner: list[Block] = [
            Text("It was started with this command (absolute paths are shortened to their last part):"),
            Code(without_folders(str(about.get("command") or "not recorded"))),
            *_changes(run),
            Text(_again(run)),
            Code(without_folders(run.result.config.to_toml())),
            _versions(run, about),
        ]
        blocks.append(Folded(f"{run.label}: command, settings, versions, machine", inner))
    intro = "All random choices depend on the seed: the same settings, versions and machine give the same results."
    return Section("repeat", "How to repeat it", intro, blocks)


def _changes(run: ReportedRun) -> list[Block]:
    """Say which settings changed within the run, and after which round."""
    configs = [config for _, config in run.folder.read_earlier()] + [run.result.config]
    found = []
    for (number, before), after in zip(run.folder.read_earlier(), configs[1:], strict=True):
        changed = ", ".join(f"{key} = {value}" for key, value in differences(before, after).items())
        found.append(Text(f"Its settings changed after round {number}: {changed}."))
    return list(found)


def _again(run: ReportedRun) -> str:
    """Say how to repeat the run from its settings; the clients' own parts are not in the page."""
    if run.folder.read_facts().site == "python":
        return "Its clients were passed from Python. Call federate(...) again with the same clients, RAD and settings:"
    if run.folder.read_facts().elsewhere:
        return (
            "Its participants were on other machines. To repeat it with them, save these settings as federation.toml:"
        )
    more = " --node NODE.toml, with --node for each participant" if run.folder.read_facts().site == "nodes" else ""
    return f"Or save these settings as settings.toml and start: hetero-ssfl run settings.toml{more}"


def _versions(run: ReportedRun, about: Mapping[str, Any]) -> Rows:
    facts = {
        "commit": about.get("commit") or "not from a checkout",
        "Python": about.get("python"),
        "machine": f"{about.get('platform')}, {about.get('cpus')} CPUs",
        **(about.get("packages") or {}),
        "RAD digest": run.result.facts.get("rad_digest"),
        "images skipped as unreadable": run.result.facts.get("skipped_images", 0),
    }
    rows = [[str(key), str(value)] for key, value in facts.items() if value is not None]
    return Rows("Recorded when the run started", ["what", "value"], rows, WORDS)


def _differences(runs: Sequence[ReportedRun]) -> list[list[str]]:
    everyones = [flat(run.result.config.model_dump(mode="json")) for run in runs]
    keys = list(dict.fromkeys(key for settings in everyones for key in settings))
    return [
        [key, *[without_folders(str(settings.get(key, "-"))) for settings in everyones]]
        for key in keys
        if len({str(settings.get(key)) for settings in everyones}) > 1
    ]
