"""The sections about privacy, studies, costs, faults and how to repeat a run."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ..config import differences, flat
from ..runs.events import ClientTrained, RoundDone
from ..runs.schema import StudyPlot, StudySection
from . import charts
from .blocks import TEXT, Block, Figure, Figures, Folded, Rows, Section, Text
from .reported_run import MAX_ROWS, ReportedRun, legend
from .tables import duration, volume, without_folders

# --- privacy and studies ---------------------------------------------------------------------------


def privacy(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return what runs with a privacy budget have spent, or nothing if none of the runs has noise."""
    rows = []
    for run in runs:
        noise, spent = run.result.config.privacy, run.server_series("epsilon")
        if noise.epsilon is not None and spent:
            last, epsilon = spent[-1]
            settings = [f"{noise.epsilon:g}", f"{noise.delta:g}", str(last + 1), f"{noise.clip:g}"]
            seen = "sums (secure)" if noise.secure else "each contribution"
            rows.append([run.label, f"{epsilon:.3g}", *settings, seen])
    intro = (
        "The noise hides the whole of what one client contributed in all rounds together. Accuracies of probes and the "
        "clients' own models have no noise. A client that was asked for a round twice has spent more: its own count is "
        "in the card of its model. docs/privacy.md explains the guarantee."
    )
    head = ["run", "epsilon spent", "of", "delta", "contributions of a client", "largest norm", "noise added to"]
    return [Section("privacy", "Privacy budget", intro, [Rows("Spent so far", head, rows, TEXT)])] if rows else []


def studies(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return the sections that studies (`hetero-ssfl audit`, `theory`, or your own) left in the run folders.

    A study writes NAME.json with a key "section" (`StudySection` in runs/schema.py): tables, plots and notes as data.
    """
    sections: dict[str, Section] = {}
    for run in runs:
        for name, study in run.folder.read_sections().items():
            before = sections.get(name, Section(name, study.title, study.intro))
            blocks = [*before.blocks, *_study(run.label, study)]
            sections[name] = Section(name, before.title, before.intro, blocks)
    return list(sections.values())


def _study(label: str, section: StudySection) -> Iterator[Block]:
    first, *others = section.tables
    yield Rows(f"{label}: {first.caption}", first.head, first.rows)
    yield from map(Text, section.notes)
    if section.plots:
        yield Figures([_plot(plot) for plot in section.plots])
    yield from (Rows(f"{label}: {table.caption}", table.head, table.rows) for table in others)
    yield from (Folded(title, [Text(text) for text in texts]) for title, texts in section.folded.items())


def _plot(plot: StudyPlot) -> Figure:
    """Draw one mark per value; a second mark shows the limit of chance."""
    lines = []
    for name, value in plot.values.items():
        marks = [("c0", value, f"{name}: {value:.3g}")]
        marks += [] if plot.limit is None else [("c1", plot.limit, f"95 % of random guesses: at most {plot.limit:.3g}")]
        lines.append((name, marks))
    note = "" if plot.limit is None else "Square: 95 % of random guesses are below."
    return Figure(plot.title, charts.dot_plot(lines, plot.title, f"{plot.title} for each view"), note)


# --- costs and faults ------------------------------------------------------------------------------


def costs(runs: Sequence[ReportedRun]) -> Section:
    figures = [figure for figure in (_traffic(runs), _seconds(runs)) if figure.drawing]
    head = ["run", "up", "down", "up per client and round", "rounds", "time in rounds", "median round"]
    blocks: list[Block] = [Rows("Data sent and time taken", head, [_cost_row(run) for run in runs])]
    if figures:
        blocks = [*legend(runs), Figures(figures), *blocks]
    last = runs[-1]
    up, down = last.bytes_of("bytes_up"), last.bytes_of("bytes_down")
    if any(up.values()) or any(down.values()):
        table = [[c, volume(up.get(c, 0)), volume(down.get(c, 0))] for c in last.clients[:MAX_ROWS]]
        more = f", the first {MAX_ROWS} of {len(last.clients)}" if len(last.clients) > MAX_ROWS else ""
        blocks.append(Folded("Bytes of each client", [Rows(last.label + more, ["client", "up", "down"], table)]))
    intro = "Bytes are payload, without the transport protocol."
    if all(run.method and not run.method.averages_weights for run in runs):
        intro += f" Clients do not send weights, nor {last.things} that are not in the RAD."
    return Section("costs", "Bytes and time", intro, blocks)


def _traffic(runs: Sequence[ReportedRun]) -> Figure:
    lines = []
    for run in runs:
        for key, style, way in (("bytes_up", run.style, "up"), ("bytes_down", f"{run.style} dashed", "down")):
            sums: Counter[int] = Counter()
            for event in run.events_of(ClientTrained):
                sums[event.round] += getattr(event, key) or 0
            points = [(r, b / 1e6, f"{run.label}, round {r}, {way}: {volume(b)}") for r, b in sorted(sums.items())]
            lines += [charts.Line(style, points)] if any(sums.values()) else []
    drawing = charts.line_chart(lines, "round", "Megabytes sent in each round by and to all clients")
    return Figure("MB per round, all clients", drawing, "Solid: up to the server. Dashed: down to the clients.")


def _seconds(runs: Sequence[ReportedRun]) -> Figure:
    lines = [
        charts.Line(run.style, [(r, s, f"{run.label}, round {r}: {s:.1f} s") for r, s in run.server_series("seconds")])
        for run in runs
    ]
    drawing = charts.line_chart(lines, "round", "Seconds that each round took")
    return Figure("Seconds per round", drawing, "From broadcast to saved state, including evaluation if there is one.")


def _cost_row(run: ReportedRun) -> list[str]:
    up, down = (sum(run.bytes_of(key).values()) for key in ("bytes_up", "bytes_down"))
    replies = sum(event.bytes_up is not None for event in run.events_of(ClientTrained))
    trained = [event.seconds for event in run.events_of(RoundDone) if event.round > 0]
    return [
        run.label,
        volume(up),
        volume(down),
        volume(up / replies) if replies else "-",
        str(run.rounds_done),
        duration(run.seconds),
        f"{median(trained):.1f} s" if trained else "-",
    ]


def faults(runs: Sequence[ReportedRun]) -> Section:
    title = "Faults and exclusions"
    rows = [
        [run.label, str(number), who, what, without_folders(why)]
        for run in runs
        for number, who, what, why in run.faults()
    ]
    if not rows:
        return Section("faults", title, "None: every reply was used, no client was away, and there were no warnings.")
    counts = Counter(what for _, _, _, what, _ in rows)
    intro = "Total: " + ", ".join(f"{what} {number}" for what, number in counts.items()) + "."
    if len(rows) > MAX_ROWS:
        intro += f" The first {MAX_ROWS} of {len(rows)} are listed; events.jsonl has all."
    head = ["run", "round", "who", "what", "why"]
    return Section("faults", title, intro, [Rows("What happened, in order", head, rows[:MAX_ROWS], TEXT)])


# --- how to repeat it ------------------------------------------------------------------------------


def repeat(runs: Sequence[ReportedRun]) -> Section:
    settings = [flat(run.result.config.model_dump(mode="json")) for run in runs]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    rows = [[key, *[without_folders(str(one.get(key, "-"))) for one in settings]] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    blocks: list[Block] = []
    if rows:
        blocks.append(Rows("Settings that differ", ["setting", *[run.label for run in runs]], rows, TEXT))
    for run in runs:
        about = run.folder.read_json("environment.json")
        inner: list[Block] = [
            Text("It was started with this command (absolute paths are shortened to their last part):"),
            Text(without_folders(str(about.get("command") or "not recorded")), code=True),
            *_changes(run),
            Text(_again(run)),
            Text(without_folders(run.result.config.to_toml()), code=True),
            _versions(run, about),
        ]
        blocks.append(Folded(f"{run.label}: command, settings, versions, machine", inner))
    intro = "All random choices depend on the seed: the same settings, versions and machine give the same results."
    return Section("repeat", "How to repeat it", intro, blocks)


def _changes(run: ReportedRun) -> Iterator[Block]:
    """Say which settings changed within the run, and after which round."""
    earlier = run.folder.read_earlier()
    configs = [config for _, config in earlier] + [run.result.config]
    for (number, before), after in zip(earlier, configs[1:], strict=True):
        changed = ", ".join(f"{key} = {value}" for key, value in differences(before, after).items())
        yield Text(f"Its settings changed after round {number}: {changed}.")


def _again(run: ReportedRun) -> str:
    """Say how to repeat the run from its settings; the clients' own parts are not in the page."""
    facts = run.folder.read_facts()
    if facts.site == "python":
        return "Its clients were passed from Python. Call federate(...) again with the same clients, RAD and settings:"
    if facts.elsewhere:
        return (
            "Its participants were on other machines. To repeat it with them, save these settings as federation.toml:"
        )
    more = " --node NODE.toml, with --node for each participant" if facts.site == "nodes" else ""
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
    return Rows("Recorded when the run started", ["what", "value"], rows, TEXT)
