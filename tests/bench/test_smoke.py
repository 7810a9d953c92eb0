"""Every table and figure of the paper, end to end at the smallest scale: what must hold of numbers, and all files."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from dlcft.bench.choices import SCALES
from dlcft.bench.experiment import Experiment, Result, run
from dlcft.bench.paper import ARTEFACTS, cells, experiments
from dlcft.bench.spectrum import Spectrum, Trace
from dlcft.cli import main

SHARED = ("digits, 2 tasks", "digits, 3 tasks")
HERE = {name: one for name, one in ARTEFACTS.items() if "smoke" in (one.scales or SCALES)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all runs, two at a time."""
    out = tmp_path_factory.mktemp("smoke")
    main(["reproduce", "all", "--scale", "smoke", "--jobs", "2", "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def found(folder):
    """The result of every cell."""
    read = {
        one.experiment.key: (Trace if isinstance(one.experiment, Spectrum) else Result).read(
            folder / one.experiment.file
        )
        for one in experiments("all", "smoke")
    }
    return {(one.artefact, one.cell.label, one.cell.column): read[one.experiment.key] for one in cells("all", "smoke")}


def test_every_artefact_is_whole(found):
    assert {artefact for artefact, _, _ in found} == set(HERE) == set(ARTEFACTS) - {"joint"}
    for result in found.values():
        if isinstance(result, Trace):
            assert len(result.records) == result.spectrum.points
            assert all(math.isfinite(value) for record in result.records for value in record.values())
            assert all(record["eigenvalue"] > 0 for record in result.records)
        else:
            assert 0 <= result.accuracy <= 1
            assert result.environment["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("artefact", "column", "scenario", "start", "margin"),
    [
        *(("data-il", column, "data-il", start, 0.03) for column in SHARED for start in ("pretrained", "auto")),
        ("task-class-il", "Class-IL, digits, 2 tasks", "class-il", "auto", 0.2),
        ("task-class-il", "Task-IL, digits, 2 tasks", "task-il", "pretrained", 0.0),
    ],
)
def test_all_data_at_once_is_better_than_no_memory(artefact, column, scenario, start, margin, found, tmp_path):
    # a head that was solved on the few images of the first task is solved again on all
    ridge = {"head_start": "ridge", "careful": True, "start": start}
    ridge |= {"head_end": "ridge"} if start == "auto" else {}

    def accuracy(label):
        """With heads from the ridge solution: from zero, an epoch of a few images is nothing."""
        planned = found[artefact, label, column].experiment
        assert planned.scenario == scenario
        one = replace(planned, settings={**planned.settings, **ridge}, knn=0)
        return run(one, tmp_path, report=lambda line: None).accuracy

    assert accuracy("Joint, linear") > accuracy("None, linear") + margin


def test_closed_form_in_sequence_is_closed_form_at_once(found, tmp_path):
    for label in ("ridge", "RanPAC"):
        two, three = (found["data-il", label, column] for column in SHARED)
        assert (len(two.history), len(three.history)) == (2, 3)
        one = run(replace(two.experiment, tasks=1, knn=0), tmp_path, report=lambda line: None)
        # an image may lie on the border of two classes
        assert two.accuracy == pytest.approx(one.accuracy, abs=0.003)
        assert three.accuracy == pytest.approx(one.accuracy, abs=0.003)


def test_accuracy_matrices(found):
    for result in found.values():
        if isinstance(result, Trace):
            continue
        experiment, tasks = result.experiment, len(result.history)
        two_rounds = experiment.method == "none-linear" and experiment.scenario != "class-il"
        assert tasks == ((2 if two_rounds else 1) if experiment.joint else experiment.tasks)
        if experiment.joint:
            assert [entry["accuracy"] is None for entry in result.history] == [True] * (tasks - 1) + [False]
        if experiment.joint or experiment.scenario == "data-il":
            assert result.matrix is None
        else:
            assert result.matrix.shape == (tasks, tasks)
            assert result.matrix.isnan().tolist() == [[column > row for column in range(tasks)] for row in range(tasks)]


def test_the_figures_have_their_points(found):
    for (artefact, label, _), result in found.items():
        if artefact == "knn":
            assert result.knn[-1][0] == len(result.history), label
            assert 0 < result.knn[-1][1] <= 1
        if artefact == "data-il-curves":
            rounds = len(result.history)
            tested = [rounds] if result.experiment.joint else list(range(1, rounds + 1))
            assert [task for task, _ in result.curve] == tested


def test_predictions_are_measured(found):
    predicted = [
        found["bwt", label, "ACC, digits, 2 tasks"].history[-1] for label in ("EWC", "DLCFT (TK-FAC)", "dlcft")
    ]
    assert all(math.isfinite(entry["predicted_increase"] + entry["measured_increase"]) for entry in predicted)


def test_events(found, folder):
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    results = {r.experiment.file: r for r in found.values() if isinstance(r, Result)}
    assert len([line for line in lines if "experiment" in line]) == sum(len(r.history) for r in results.values())
    last = {line["experiment"]: line["accuracy"] for line in lines if "experiment" in line}
    assert last == {file: result.history[-1]["accuracy"] for file, result in results.items()}


def test_a_dry_run_lists_everything(folder, capsys):
    main(["reproduce", "all", "--scale", "smoke", "--dry-run", "--out", str(folder)])
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(experiments("all", "smoke"))
    assert all(line.endswith(": done") for line in lines)
    assert last.startswith("0 runs")


def test_what_is_there_is_shown_again_without_computing(folder, capsys):
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    main(["reproduce", "bwt", "--scale", "smoke", "--out", str(folder)])
    said = capsys.readouterr()
    count = len(experiments("bwt", "smoke"))
    assert f"{count} of {count}, all done" in said.err
    assert "bwt, scale smoke" in said.out
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.json")} == before


def test_eigenvalues_are_shown(folder, found, capsys):
    main(["reproduce", "vanishing-curvature", "--scale", "smoke", "--out", str(folder)])
    said = capsys.readouterr().out
    for (artefact, _, _), trace in found.items():
        if artefact == "vanishing-curvature":
            assert f"{trace.records[-1]['eigenvalue']:.4g}" in said


def report(folder, kind):
    path = folder / f"all.{kind}"
    main(["report", "--runs", str(folder), "--format", kind, "--out", str(path)])
    return path.read_text()


def test_csv(folder, found):
    lines = list(csv.DictReader(io.StringIO(report(folder, "csv"))))
    shown = {(line["artefact"], line["row"], line["column"]): line for line in lines if line["artefact"] == "data-il"}
    for (artefact, label, column), result in found.items():
        if artefact == "data-il":
            line = shown[artefact, label, column]
            assert float(line["ours"]) == pytest.approx(100 * result.accuracy)
            assert Experiment(**{**result.experiment.to_dict(), "settings": json.loads(line["settings"])}) == (
                result.experiment
            )


def test_markdown_and_latex(folder):
    markdown, latex = report(folder, "md"), report(folder, "tex")
    for name, artefact in ARTEFACTS.items():
        assert (f"### {artefact.title} (scale smoke)" in markdown) == (name in HERE)
        assert (rf"\caption{{{artefact.title} (scale smoke)" in latex) == (name in HERE)
    assert "claims" not in markdown + latex, "digits say nothing about them"
    assert latex.count(r"\begin{") == latex.count(r"\end{")
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


class Outline(HTMLParser):
    """Elements that are open, and all headings."""

    def __init__(self):
        super().__init__()
        self.open, self.headings = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "path", "use", "br"):
            self.open.append(tag)
        if tag == "h2":
            self.headings.append("")

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in ("path", "use"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings[-1] += data


def test_the_page(folder):
    outline = Outline()
    outline.feed(report(folder, "html"))
    assert outline.open == []
    assert outline.headings[: len(HERE)] == [f"{one.title} (scale smoke)" for one in HERE.values()]
    assert len(outline.headings) == len(HERE) + 4, "and a section for each stream"
