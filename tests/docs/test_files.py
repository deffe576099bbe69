"""Files for other programs: the citation and the forms of the issue tracker."""

from pathlib import Path

import pytest
import yaml

import hetero_ssfl

ROOT = Path(__file__).parents[2]
FORMS = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]


def test_the_citation_has_the_required_fields() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= found.keys()
    assert found["version"] == hetero_ssfl.__version__
    paper = found["preferred-citation"]
    assert {"type", "title", "authors"} <= paper.keys()
    assert [author["family-names"] for author in paper["authors"]] == ["Makhija", "Ho", "Ghosh"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_has_the_required_fields(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"])


def test_the_form_for_bugs_asks_for_the_check_of_the_machine() -> None:
    assert any("hetero-ssfl check machine" in path.read_text() for path in FORMS)
