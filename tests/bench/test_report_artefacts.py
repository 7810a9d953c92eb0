"""The paper's tables and figures from result files: every result in its cell, beside the paper's number."""

import csv
import io
import json
import re
import statistics
from dataclasses import replace

import pytest

from dlcft.bench.experiment import Experiment
from dlcft.bench.paper import cells, experiments
from dlcft.bench.report import (
    read_results,
    read_traces,
    reported,
    summarise,
    to_csv,
    to_html,
    to_latex,
    to_markdown,
)
from dlcft.bench.spectrum import Spectrum, Trace
from tests.bench.test_report import ENVIRONMENT, made

FINAL = {"none": 0.50, "none-linear": 0.55, "none (joint)": 0.70, "none-linear (joint)": 0.72}
FINAL |= {"ewc": 0.6, "dlcft-paper": 0.65}


def measured(planned, shift=0.0):
    """A plausible result of what is planned."""
    experiment = planned.experiment
    if isinstance(experiment, Spectrum):
        records = [
            {
                "epochs": experiment.epochs * share,
                "train_loss": 2.0 * 0.1**share,
                "test_loss": 2.0 * 0.5**share,
                "test_accuracy": 0.5 + 0.4 * share,
                "eigenvalue": 30.0 * (0.02**share if experiment.loss == "cross-entropy" else 1.2**share),
            }
            for share in (0.0, 0.5, 1.0)
        ]
        return Trace(experiment, records, 12.0, dict(ENVIRONMENT))
    result = made(experiment, FINAL.get(experiment.title, 0.62) + 0.01 * experiment.seed + shift)
    for index, entry in enumerate(result.history):
        if (index + 1) % experiment.evaluate_every and index + 1 < len(result.history):
            entry["accuracy"] = None
    if experiment.knn:
        result.history[-1]["knn"] = 0.4
    result.environment["peak_bytes"] = 900_000_000
    return replace(result, row=planned.cell.row, tuned=planned.tuned)


def everything(scale="mini", seeds=2):
    planned = [measured(one) for one in experiments("all", scale, seeds)]
    return [one for one in planned if not isinstance(one, Trace)], [one for one in planned if isinstance(one, Trace)]


@pytest.fixture(scope="module")
def mini():
    return everything()


def entry(found, name, label, column):
    (artefact,) = [one for one in found if one.name == name]
    return artefact.entry(label, column)


def test_every_cell_finds_its_results(mini):
    results, traces = mini
    found = reported(summarise(results), traces)
    assert [one.name for one in found] == list(dict.fromkeys(one.artefact for one in cells("all", "mini", 1)))
    assert {one.scale for one in found} == {"mini"}
    for planned in cells("all", "mini", 1):
        if isinstance(planned.experiment, Experiment):
            cell = entry(found, planned.artefact, planned.cell.label, planned.cell.column)
            assert replace(cell.row.experiment, seed=0) == planned.experiment
            assert [result.experiment.seed for result in cell.row.results] == [0, 1]
            assert cell.cell == planned.cell
    assert len(found[5].traces) == len(traces) == 8


def test_ours_the_papers_and_the_difference(mini):
    found = reported(summarise(mini[0]))
    cell = entry(found, "data-il", "EWC", "Seq-CIFAR-100, 10 tasks")
    assert (cell.ours.mean, cell.cell.paper) == (pytest.approx(60.5), 78.88)
    assert cell.ours.sd == pytest.approx(statistics.stdev([60, 61]))
    assert cell.difference == pytest.approx(60.5 - 78.88)
    assert cell.recovered[0] == pytest.approx(0.1 / 0.2)
    bwt = entry(found, "bwt", "EWC", "BWT")
    assert bwt.cell.paper == -21.63
    assert bwt.ours.mean == pytest.approx(100 * bwt.row.bwt.mean)
    assert bwt.recovered == (None, None)
    assert entry(found, "knn", "None", "10 tasks").ours.mean == pytest.approx(40)


def test_what_is_missing_is_empty_and_says_why(mini):
    some = [r for r in mini[0] if r.experiment.method == "ewc" and r.experiment.tasks == 10]
    found = reported(summarise(some))
    assert {one.name for one in found} == {"data-il", "task-class-il", "curvatures", "bwt", "data-il-curves", "knn"}
    mit = entry(found, "data-il", "EWC", "Seq-MIT-67, 4 tasks")
    assert (mit.ours, mit.cell.paper) == (None, 63.68)
    assert entry(found, "data-il", "None", "Seq-CIFAR-100, 10 tasks").ours is None
    text = to_markdown(some)
    assert "Seq-MIT-67, 4 tasks is empty: MIT-67's photos" in text
    # with time and size beside the accuracy where there is one, and a difference only where there are two numbers
    whole = (
        r"^\| EWC \| \*\*60\.50 ± 0\.71 \(2\)\*\* \| 78\.88 \| −18\.38 \| 55 \| 2\.9 \| – \| 72\.61 \| – \| 63\.68 \|$"
    )
    assert re.search(whole, text, re.M)
    task_il = (
        r"^\| EWC \| \S+ ± \S+ \(2\)\S+ \| 77\.44 \| \S+ \| 55 \| 2\.9 \| \S+ ± \S+ \(2\)\S+ \| −21\.63 \| \S+ \|$"
    )
    assert re.search(task_il, text, re.M), "not beside BWT again"


def test_digits_are_compared_with_nothing():
    results, traces = everything("smoke", 1)
    text = to_markdown(results, traces=traces)
    assert "handwritten digits in a few tasks stand in" in text
    assert "78.88" not in text


def test_results_of_no_row_or_of_another_stream_belong_to_no_artefact(mini):
    first = mini[0][0]
    assert reported(summarise([first])) != []
    assert reported(summarise([replace(first, row=None)])) == []
    assert reported(summarise([replace(first, experiment=replace(first.experiment, per_class=7))])) == []


def test_tuned_results_are_shown_before_others(tmp_path, mini):
    chosen = {"seq-cifar100/data-il/ewc": {"strength": 100.0, "lr": 1e-3}}
    tuned = [measured(one, 0.05) for one in experiments("data-il", "mini", 1, chosen, ["EWC"])]
    for result in [*mini[0], *tuned]:
        (tmp_path / result.experiment.file).write_text(json.dumps(result.to_dict()))
    for trace in mini[1]:
        (tmp_path / trace.spectrum.file).write_text(json.dumps(trace.to_dict()))
    foreign = []
    results, traces = read_results(tmp_path, foreign=foreign), read_traces(tmp_path)
    assert foreign == []
    assert len(results) == len(mini[0]) + 2
    assert traces == sorted(mini[1], key=lambda trace: trace.spectrum.file)
    found = reported(summarise(results), traces)
    ewc, none = (entry(found, "data-il", label, "Seq-CIFAR-100, 10 tasks") for label in ("EWC", "None"))
    assert (ewc.tuned, none.tuned) == (True, False)
    assert ewc.ours.mean == pytest.approx(65)
    text = to_markdown(results, traces=traces)
    assert "65.00 (1) |" in text
    assert "50.50 ± 0.71 (2)‡ |" in text
    assert "62.50 ± 0.71 (2) |" in text, "closed form has nothing to tune"


def test_csv_has_a_line_for_each_figure(mini):
    lines = list(csv.DictReader(io.StringIO(to_csv(mini[0], traces=mini[1]))))
    (line,) = [
        x
        for x in lines
        if (x["artefact"], x["row"], x["column"]) == ("ablation", "TK-FAC, nonlinear + SCE", "Class-IL, 10 tasks")
    ]
    assert (line["scale"], line["metric"], line["paper"]) == ("mini", "acc", "44.66")
    assert float(line["difference"]) == pytest.approx(float(line["ours"]) - 44.66)
    curve = [x for x in lines if (x["artefact"], x["row"], x["column"]) == ("data-il-curves", "EWC", "100 tasks")]
    assert [int(x["after"]) for x in curve] == list(range(20, 101, 20))
    assert {x["metric"] for x in lines if x["artefact"] == "vanishing-curvature"} == {
        "train_loss",
        "test_loss",
        "eigenvalue",
    }
    assert all(json.loads(x["settings"]) is not None for x in lines if x["settings"])


def test_latex_is_regular(mini):
    text = to_latex(mini[0], traces=mini[1])
    tables = text.split(r"\begin{table}")[1:]
    assert len(tables) == 8 + 4
    for table in tables:
        width = len(re.search(r"\\begin\{tabular\}\{(\w+)\}", table)[1])
        body = table.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
        assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {width - 1}
        spans = [int(span) for span in re.findall(r"\\multicolumn\{(\d+)\}", table)]
        assert sum(spans) in (0, width - 1)


def test_the_page_links_every_number_to_what_is_behind_it(mini):
    page = to_html(mini[0], traces=mini[1])
    identities = set(re.findall(r'\sid="([^"]+)"', page))
    links = re.findall(r'<a href="#(s\d+-\d+)"', page)
    assert len(links) > 100
    assert set(links) <= identities
    assert page.count('aria-label="Largest eigenvalue and losses') == 2
    assert "Predictions of closed-form methods are" in page
    assert "http:" not in page
    assert "https:" not in page


def test_a_damaged_spectrum_is_named_and_left_out(tmp_path, mini):
    whole = mini[1][0]
    for name in (whole.spectrum.file, f"copy/{whole.spectrum.file}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(whole.to_dict()))
    (tmp_path / "spectrum-broken.json").write_text("{}")
    foreign = []
    assert read_traces(tmp_path, foreign=foreign) == [whole]
    assert [sum(word in sentence for sentence in foreign) for word in ("no spectrum file", "repeats")] == [1, 1]
    assert read_results(tmp_path) == []


def test_spectra_alone_make_a_report(mini):
    assert "Largest eigenvalue" in to_html([], traces=mini[1])
    assert "| mlp on digits, mse, seed 1, 60.0 epochs |" in to_markdown([], traces=mini[1])
