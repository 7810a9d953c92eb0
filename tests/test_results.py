"""The tables in the docs are those that `dlcft report` makes of the committed results."""

from pathlib import Path

from dlcft.bench.paper import ARTEFACTS
from dlcft.bench.report import read_results, to_markdown
from tests.support.documents import ROOT

RUNS = ROOT / "results" / "mini"


def tables(folder: Path) -> list[str]:
    """The paper's tables, as `dlcft report --format md` prints them."""
    titles = [artefact.title for artefact in ARTEFACTS.values() if artefact.kind == "table"]
    text = to_markdown(read_results(folder))
    return [table.strip() for table in text.split("### ") if table.startswith(tuple(titles))]


def test_docs_show_the_tables_that_the_report_makes():
    shown = (ROOT / "docs" / "results.md").read_text()
    made = tables(RUNS)
    assert len(made) == 5
    for table in made:
        assert table in shown, f"dlcft report --runs results/mini --format md says otherwise:\n\n{table}"


def test_every_result_says_how_it_was_made():
    results = read_results(RUNS)
    assert {result.experiment.scenario for result in results} == {"data-il", "task-il", "class-il"}
    for result in results:
        assert (RUNS / result.experiment.file).exists(), "the file's name is the hash of what was run"
        assert result.environment["commit"]
        assert not result.experiment.validate
