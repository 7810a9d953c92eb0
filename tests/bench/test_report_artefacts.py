"""The paper's tables and figures from result files: every result in its cell, beside the paper's number."""

import csv
import io
import json
import re
import statistics
from dataclasses import replace

import pytest

from dlcft.bench.choices import CHOICES, SCALES
from dlcft.bench.experiment import Experiment
from dlcft.bench.paper import ARTEFACTS, cells, experiments, variant
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


def everything(scale="small", seeds=2):
    planned = [measured(one) for one in experiments("all", scale, seeds)]
    return [one for one in planned if not isinstance(one, Trace)], [one for one in planned if isinstance(one, Trace)]


@pytest.fixture(scope="module")
def small():
    return everything()


@pytest.fixture(scope="module")
def large():
    return everything("paper")


@pytest.fixture(params=["small", "paper"])
def scale(request):
    return request.param


@pytest.fixture
def whole(scale, request):
    """All results at a scale."""
    return request.getfixturevalue({"small": "small", "paper": "large"}[scale])


def column(scale, stream):
    """The name of a column, by the stream's data set and tasks."""
    names = {"seq-cifar10": "Seq-CIFAR-10", "seq-cifar100": "Seq-CIFAR-100"}
    experiment = SCALES[scale].streams[stream]
    return f"{names[experiment.dataset]}, {experiment.tasks} tasks"


def entry(found, name, label, column):
    (artefact,) = [one for one in found if one.name == name]
    return artefact.entry(label, column)


def test_every_cell_finds_its_results(scale, whole):
    results, traces = whole
    found = reported(summarise(results), traces)
    assert [one.name for one in found] == list(dict.fromkeys(one.artefact for one in cells("all", scale, 1)))
    assert {one.scale for one in found} == {scale}
    for planned in cells("all", scale, 1):
        if isinstance(planned.experiment, Experiment):
            cell = entry(found, planned.artefact, planned.cell.label, planned.cell.column)
            assert replace(cell.row.experiment, seed=0) == planned.experiment
            assert [result.experiment.seed for result in cell.row.results] == [0, 1]
            assert cell.cell == planned.cell
    (spectra,) = [one for one in found if one.name == "vanishing-curvature"]
    assert len(spectra.traces) == len(traces) == 2 * 2 * len(SCALES[scale].spectra), "two losses, two seeds"
    assert not any(one.traces for one in found if one is not spectra)


def test_only_what_the_scale_has_is_shown(scale, whole):
    """No empty line for a row that is at another scale only; a stream that the scale lacks is an empty column."""
    found = reported(summarise(whole[0]), whole[1])
    for one in found:
        planned = [cell for cell in cells(one.name, scale, 1) if isinstance(cell.experiment, Experiment)]
        shown = [each.cell for each in one.entries if each.cell.stream in SCALES[scale].streams]
        assert shown == [cell.cell for cell in planned]
        assert all(each.row is not None for each in one.entries if each.cell.stream in SCALES[scale].streams)
        empty = {each.cell.column for each in one.entries if each.cell.stream not in SCALES[scale].streams}
        assert empty == ({"Seq-MIT-67, 4 tasks"} if (one.name, scale) == ("data-il", "small") else set())
    tuned = [label for one in found for label in one.labels if label.endswith("λ tuned")]
    assert bool(tuned) == (scale == "small")


def test_ours_the_papers_and_the_difference(scale, whole):
    found = reported(summarise(whole[0]))
    cell = entry(found, "data-il", "EWC", column(scale, "data"))
    assert (cell.ours.mean, cell.cell.paper) == (pytest.approx(60.5), 78.88)
    assert cell.ours.sd == pytest.approx(statistics.stdev([60, 61]))
    assert cell.recovered[0] == pytest.approx(0.1 / 0.2)
    bwt = entry(found, "bwt", "EWC", "BWT")
    assert bwt.cell.paper == -21.63
    assert bwt.ours.mean == pytest.approx(100 * bwt.row.bwt.mean)
    assert bwt.recovered == (None, None)
    if scale == "paper":
        assert cell.difference == pytest.approx(60.5 - 78.88)
        assert bwt.difference == pytest.approx(bwt.ours.mean + 21.63)
    else:
        assert all(each.difference is None for one in found for each in one.entries), "other data and other tasks"
    assert entry(found, "knn", "None", column(scale, "data")).ours.mean == pytest.approx(40)


def test_joint_training_by_epochs(small):
    found = reported(summarise(small[0]))
    (table,) = [one for one in found if one.name == "joint"]
    usual = CHOICES["joint"].value["small"]
    assert table.labels == [f"{epochs} epochs" for epochs in (5, usual, 40)]
    assert table.columns == [f"{name}, {column('small', 'data')}" for name in ("Plain network", "Linearised")]
    for each in table.entries:
        experiment = each.row.experiment
        assert experiment.joint
        assert experiment.recipe.settings["epochs"] == int(each.cell.label.split()[0])
        assert experiment.recipe.linear == each.cell.column.startswith("Linearised")
    assert table.entry(f"{usual} epochs", table.columns[1]).row is (
        entry(found, "data-il", "Joint, linear", column("small", "data")).row
    )


def test_what_is_missing_is_empty_and_says_why(scale, whole):
    streams = SCALES[scale].streams
    there = {(streams[name].scenario, streams[name].tasks) for name in ("data", "task")}
    some = [r for r in whole[0] if r.row == "EWC" and (r.experiment.scenario, r.experiment.tasks) in there]
    found = reported(summarise(some))
    assert {one.name for one in found} == {"data-il", "task-class-il", "curvatures", "bwt", "data-il-curves", "knn"}
    mit = entry(found, "data-il", "EWC", "Seq-MIT-67, 4 tasks")
    assert (mit.ours, mit.cell.paper) == (None, 63.68)
    assert entry(found, "data-il", "None", column(scale, "data")).ours is None
    text = to_markdown(some)
    assert ("Seq-MIT-67, 4 tasks is empty: MIT-67's photos" in text) == (scale == "small")
    # with time and size beside the accuracy where there is one, and a difference only where there are two numbers that
    # can be compared
    apart = r"−18\.38 \| " if scale == "paper" else ""
    data_il = (
        rf"^\| EWC \| \*\*60\.50 ± 0\.71 \(2\)\*\* \| 78\.88 \| {apart}55 \| 2\.9 \| – \| 72\.61 \| – \| 63\.68 \|$"
    )
    assert re.search(data_il, text, re.M)
    apart, seconds = r" \| \S+" if scale == "paper" else "", f"{5.5 * streams['task'].tasks:.0f}"
    task_il = (
        rf"^\| EWC \| \S+ ± \S+ \(2\)\S+ \| 77\.44{apart} \| {seconds} \| 2\.9 "
        rf"\| \S+ ± \S+ \(2\)\S+ \| −21\.63{apart} \|$"
    )
    assert re.search(task_il, text, re.M), "not beside BWT again"


def test_digits_are_compared_with_nothing():
    results, traces = everything("smoke", 1)
    text = to_markdown(results, traces=traces)
    assert "handwritten digits in a few tasks stand in" in text
    assert "78.88" not in text
    assert ": ours |" in text
    assert ": paper |" not in text
    assert ": difference |" not in text
    found = reported(summarise(results), traces)
    assert all(each.cell.paper is None and each.difference is None for one in found for each in one.entries)
    assert [one.name for one in found] == [name for name, one in ARTEFACTS.items() if "smoke" in (one.scales or SCALES)]


def test_results_of_no_row_or_of_another_stream_belong_to_no_artefact(small):
    first = small[0][0]
    assert reported(summarise([first])) != []
    assert reported(summarise([replace(first, row=None)])) == []
    assert reported(summarise([replace(first, experiment=replace(first.experiment, per_class=7))])) == []


def test_tuned_results_are_shown_before_others(tmp_path, small):
    kind = variant(replace(SCALES["small"].streams["data"], method="ewc"))
    assert kind == f"{SCALES['small'].streams['data'].dataset}/data-il/ewc"
    chosen = {kind: {"strength": 100.0, "lr": 1e-3}}
    tuned = [measured(one, 0.05) for one in experiments("data-il", "small", 1, chosen, ["EWC"])]
    for result in [*small[0], *tuned]:
        (tmp_path / result.experiment.file).write_text(json.dumps(result.to_dict()))
    for trace in small[1]:
        (tmp_path / trace.spectrum.file).write_text(json.dumps(trace.to_dict()))
    foreign = []
    results, traces = read_results(tmp_path, foreign=foreign), read_traces(tmp_path)
    assert foreign == []
    assert len(results) == len(small[0]) + 2
    assert traces == sorted(small[1], key=lambda trace: trace.spectrum.file)
    found = reported(summarise(results), traces)
    ewc, none = (entry(found, "data-il", label, column("small", "data")) for label in ("EWC", "None"))
    assert (ewc.tuned, none.tuned) == (True, False)
    assert ewc.ours.mean == pytest.approx(65)
    text = to_markdown(results, traces=traces)
    assert "65.00 (1) |" in text
    assert "50.50 ± 0.71 (2)‡ |" in text
    assert "62.50 ± 0.71 (2) |" in text, "closed form has nothing to tune"


def test_csv_has_a_line_for_each_figure(scale, whole):
    lines = list(csv.DictReader(io.StringIO(to_csv(whole[0], traces=whole[1]))))
    place = ("ablation", "TK-FAC, nonlinear + SCE", f"Class-IL, {column(scale, 'class')}")
    (line,) = [x for x in lines if (x["artefact"], x["row"], x["column"]) == place]
    assert (line["scale"], line["metric"], line["paper"]) == (scale, "acc", "44.66")
    assert float(line["ours"]) == pytest.approx(62.5)
    if scale == "paper":
        assert float(line["difference"]) == pytest.approx(float(line["ours"]) - 44.66)
    else:
        assert line["difference"] == ""
    place, long = ("data-il-curves", "EWC", column(scale, "long")), SCALES[scale].streams["long"]
    curve = [x for x in lines if (x["artefact"], x["row"], x["column"]) == place]
    assert [int(x["after"]) for x in curve] == list(range(long.evaluate_every, long.tasks + 1, long.evaluate_every))
    assert len(curve) == 5
    assert {x["metric"] for x in lines if x["artefact"] == "vanishing-curvature"} == {
        "train_loss",
        "test_loss",
        "eigenvalue",
    }
    assert all(json.loads(x["settings"]) is not None for x in lines if x["settings"])


def test_latex_is_regular(scale, whole):
    text = to_latex(whole[0], traces=whole[1])
    tables = text.split(r"\begin{table}")[1:]
    artefacts = [name for name, one in ARTEFACTS.items() if scale in (one.scales or SCALES)]
    assert len(artefacts) == {"small": 9, "paper": 8}[scale]
    assert len(tables) == 1 + len(artefacts) + len(SCALES[scale].streams), "claims, artefacts, and a section a stream"
    for table in tables:
        width = len(re.search(r"\\begin\{tabular\}\{(\w+)\}", table)[1])
        body = table.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
        assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {width - 1}
        spans = [int(span) for span in re.findall(r"\\multicolumn\{(\d+)\}", table)]
        assert sum(spans) in (0, width - 1)


def test_the_page_links_every_number_to_what_is_behind_it(scale, whole):
    page = to_html(whole[0], traces=whole[1])
    identities = set(re.findall(r'\sid="([^"]+)"', page))
    links = re.findall(r'<a href="#(s\d+-\d+)"', page)
    assert len(links) > 100
    assert set(links) <= identities
    assert page.count('aria-label="Largest eigenvalue and losses') == len(SCALES[scale].spectra)
    assert "Predictions of closed-form methods are" in page
    assert "http:" not in page
    assert "https:" not in page


def test_a_damaged_spectrum_is_named_and_left_out(tmp_path, small):
    whole = small[1][0]
    for name in (whole.spectrum.file, f"copy/{whole.spectrum.file}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(whole.to_dict()))
    (tmp_path / "spectrum-broken.json").write_text("{}")
    foreign = []
    assert read_traces(tmp_path, foreign=foreign) == [whole]
    assert [sum(word in sentence for sentence in foreign) for word in ("no spectrum file", "repeats")] == [1, 1]
    assert read_results(tmp_path) == []


def test_spectra_alone_make_a_report(small):
    assert "Largest eigenvalue" in to_html([], traces=small[1])
    assert "| mlp on digits, mse, seed 1, 60.0 epochs |" in to_markdown([], traces=small[1])
