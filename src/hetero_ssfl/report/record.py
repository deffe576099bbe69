"""The sections about privacy, studies, costs, faults and how to repeat a run."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

from ..config import differences, flat
from ..runs.events import ClientTrained, RoundDone
from ..runs.schema import StudyPlot, StudySection
from .blocks import TEXT, Block, Figure, Figures, Folded, Rows, Section, Text
from .plots import dot_chart
from .reported_run import MAX_ROWS, ReportedRun, Series, legend
from .sections import curve
from .tables import duration, volume, without_folders

MAX_REASON = 2000  # characters


def privacy(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return what runs with a privacy budget have spent, or nothing if none of the runs has noise."""
    rows = []
    for run in runs:
        noise = run.config.privacy
        if noise.epsilon is not None and (spent := run.server_series("epsilon")):
            seen = "sums (secure)" if noise.secure else "each contribution"
            limits = [f"{noise.epsilon:g}", f"{noise.delta:g}", str(spent[-1][0] + 1), f"{noise.clip:g}"]
            rows.append([run.label, f"{spent[-1][1]:.3g}", *limits, seen])
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
            sections[name] = before._replace(blocks=[*before.blocks, *_study(run.label, study)])
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
    limit, note = [], ""
    if plot.limit is not None:
        note = "Square: 95 % of random guesses are below."
        limit = [("c1", plot.limit, f"95 % of random guesses: at most {plot.limit:.3g}")]
    rows = [(name, [("c0", value, f"{name}: {value:.3g}"), *limit]) for name, value in plot.values.items()]
    return Figure(plot.title, dot_chart(rows, plot.title, f"{plot.title} for each view"), note)


def costs(runs: Sequence[ReportedRun]) -> Section:
    series = {
        "MB per round, up to the server": [_traffic(run, "bytes_up") for run in runs],
        "MB per round, down to the clients": [_traffic(run, "bytes_down") for run in runs],
        "seconds per round, from broadcast to saved state": [{"": run.server_series("seconds")} for run in runs],
    }
    figures = [figure for title, of_runs in series.items() if (figure := curve(runs, title, of_runs)).drawing]
    head = ["run", "up", "down", "up per client and round", "rounds", "time in rounds", "median round"]
    blocks: list[Block] = [*legend(runs), Figures(figures)] if figures else []
    blocks.append(Rows("Data sent and time taken", head, [_cost_row(run) for run in runs]))
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


def _traffic(run: ReportedRun, key: str) -> Series:
    """Return the megabytes of each round, over all clients."""
    sums: Counter[int] = Counter()
    for number, count in chain(*run.client_series(key).values()):
        sums[number] += int(count)
    return {"": [(number, total / 1e6) for number, total in sorted(sums.items())]}


def _cost_row(run: ReportedRun) -> list[str]:
    up, down = (sum(run.bytes_of(key).values()) for key in ("bytes_up", "bytes_down"))
    replies = sum(event.bytes_up is not None for event in run.events_of(ClientTrained))
    trained = [event.seconds for event in run.events_of(RoundDone) if event.round > 0]
    sent = [volume(up), volume(down), volume(up / replies) if replies else "-"]
    middle = f"{median(trained):.1f} s" if trained else "-"
    return [run.label, *sent, str(run.rounds_done), duration(run.seconds), middle]


def faults(runs: Sequence[ReportedRun]) -> Section:
    title = "Faults and exclusions"
    rows = [
        [run.label, str(number), who, what, without_folders(why[:MAX_REASON])]
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


def repeat(runs: Sequence[ReportedRun]) -> Section:
    settings = [flat(run.config.model_dump(mode="json")) for run in runs]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    rows = [[key, *[without_folders(str(one.get(key, "-"))) for one in settings]] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    head = ["setting", *[run.label for run in runs]]
    blocks: list[Block] = [Rows("Settings that differ", head, rows, TEXT)] if rows else []
    for run in runs:
        about, earlier = run.folder.read_json("environment.json"), run.folder.read_earlier()
        inner: list[Figures | Rows | Text] = [
            Text("It was started with this command (absolute paths are shortened to their last part):"),
            Text(without_folders(str(about.get("command") or "not recorded")), code=True),
        ]
        later = [*(config for _, config in earlier[1:]), run.config]
        for (number, before), after in zip(earlier, later, strict=False):
            changed = ", ".join(f"{key} = {value}" for key, value in differences(before, after).items())
            inner.append(Text(f"Its settings changed after round {number}: {changed}."))
        inner += [Text(_again(run)), Text(without_folders(run.config.to_toml()), code=True), _versions(run, about)]
        blocks.append(Folded(f"{run.label}: command, settings, versions, machine", inner))
    intro = "All random choices depend on the seed: the same settings, versions and machine give the same results."
    return Section("repeat", "How to repeat it", intro, blocks)


def _again(run: ReportedRun) -> str:
    facts = run.folder.read_facts()
    if facts.site == "python":
        return "Its clients were passed from Python. Call federate(...) again with the same clients, RAD and settings:"
    if facts.elsewhere:
        return "Its participants were on other machines. To repeat it, save these settings as federation.toml:"
    more = " --node NODE.toml, with --node for each participant" if facts.site == "nodes" else ""
    return f"Or save these settings as settings.toml and start: hetero-ssfl run settings.toml{more}"


def _versions(run: ReportedRun, about: Mapping[str, Any]) -> Rows:
    facts = {
        "commit": about.get("commit") or "not from a checkout",
        "Python": about.get("python"),
        "machine": f"{about.get('platform')}, {about.get('cpus')} CPUs",
        **(about.get("packages") or {}),
        "RAD digest": run.facts.get("rad_digest"),
        "images skipped as unreadable": run.facts.get("skipped_images", 0),
    }
    rows = [[str(key), str(value)] for key, value in facts.items() if value is not None]
    return Rows("Recorded when the run started", ["what", "value"], rows, TEXT)
