"""Following the run folder of another process."""

from pathlib import Path

from hetero_ssfl.deploy.local import RunWatch
from hetero_ssfl.runs.events import Event, Started, Warned
from hetero_ssfl.runs.files import write_json


class Heard(list[Event]):
    """Replaces a view."""

    rounds = None

    def __call__(self, event: Event) -> None:
        self.append(event)


def test_new_events_of_a_run_folder_are_shown(tmp_path: Path) -> None:
    events, view = tmp_path / "events.jsonl", Heard()
    events.write_text('{"event": "round", "round": 1}\n')
    watch = RunWatch(tmp_path, view)  # type: ignore[arg-type]
    watch.look()
    assert (watch.round, view) == (1, []), "what was there before is not news"
    with events.open("a") as file:
        file.write(
            '{"event": "client", "client": "node-1", "round": 2, "excluded": "node-1 is late"}\n{"event": "round", "ro'
        )
    watch.look()
    assert view == [Warned(2, "node-1 is late")]
    events.write_text('{"event": "round", "round": 1}\n{"event": "round", "round": 2}\n')  # a server continued
    watch.look()
    assert (watch.round, watch.finished) == (2, False)
    write_json(tmp_path / "status.json", {"phase": "training", "round": 3, "rounds": 9})
    (tmp_path / "results.json").write_text("{}")
    watch.look()
    assert view[-1] == Started(2, 9)
    assert watch.finished
