"""The tables in README and docs are those that `dlcft report` makes of the committed results."""

from pathlib import Path

from dlcft.bench.choices import SCALES
from dlcft.bench.paper import ARTEFACTS
from dlcft.bench.report import read_results, read_traces, summarise, to_markdown
from dlcft.bench.report.summary import stream_of
from dlcft.bench.report.tables import CLAIMED
from tests.support.documents import ROOT

RUNS = ROOT / "results" / "small"
README_ROWS = {  # the row of the report, and its name in README
    "None": "fine-tuning on (`none`)",
    "LwF": "`lwf`",
    "EWC": "`ewc`",
    "DER++": "`derpp`, 250 old images",
    "DLCFT (TK-FAC)": "`dlcft-paper` (new classes: with 250 old images)",
    "dlcft": "`dlcft`",
    "RanPAC": "`ranpac`",
    "dlcft-exact": "`dlcft-exact`",
    "Joint": "all data at once",
}


def tables(folder: Path) -> list[str]:
    """The paper's claims and tables, as `dlcft report --format md` prints them."""
    titles = [CLAIMED, *(artefact.title for artefact in ARTEFACTS.values() if artefact.kind == "table")]
    text = to_markdown(read_results(folder), traces=read_traces(folder))
    return [table.strip() for table in text.split("### ") if table.startswith(tuple(titles))]


def readme_table(folder: Path) -> str:
    """Accuracy in the end, of task-IL with BWT; how many seeds, where these are not all that the scale has."""
    scale = SCALES["small"]
    streams = {stream_of(experiment): name for name, experiment in scale.streams.items()}
    found = {(row.results[0].row, streams[stream_of(row.experiment)]): row for row in summarise(read_results(folder))}

    def cell(name: str, stream: str) -> str:
        row = found.get((name, stream))
        if row is None:
            return ""
        bwt = f" ({100 * row.bwt.mean:+.1f})".replace("-", "−") if stream == "task" and row.bwt else ""
        seeds = "" if len(row.results) == scale.seeds else f" [{len(row.results)}]"
        return f"{100 * row.accuracy.mean:.1f}{bwt}{seeds}"

    lines = ["| | 10 tasks | 50 tasks | new classes | a head for each task |", "|---|---:|---:|---:|---:|"]
    for name, shown in README_ROWS.items():
        lines.append(f"| {shown} | {' | '.join(cell(name, at) for at in ('data', 'long', 'class', 'task'))} |")
    return "\n".join(lines)


def test_docs_show_the_tables_that_the_report_makes():
    shown = (ROOT / "docs" / "results.md").read_text()
    made = tables(RUNS)
    assert len(made) == 7
    for table in made:
        assert table in shown, f"dlcft report --runs results/small --format md says otherwise:\n\n{table}"


def test_readme_shows_the_results():
    table = readme_table(RUNS)
    assert table in (ROOT / "README.md").read_text(), f"the results say otherwise:\n\n{table}"


def test_every_result_says_how_it_was_made():
    results = read_results(RUNS)
    assert {result.experiment.scenario for result in results} == {"data-il", "task-il", "class-il"}
    for result in results:
        assert (RUNS / result.experiment.file).exists(), "the file's name is the hash of what was run"
        assert result.environment["commit"]
        assert result.row
        assert not result.experiment.validate
