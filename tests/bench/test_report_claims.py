"""The paper's claims: verdicts on made-up results, against differences and standard errors that numpy computes."""

import re
from dataclasses import replace

import numpy as np
import pytest

from dlcft.bench.choices import SCALES
from dlcft.bench.experiment import Experiment
from dlcft.bench.paper import ROWS, cells
from dlcft.bench.report import reported, summarise, to_html, to_latex, to_markdown
from dlcft.bench.report.claims import CLAIMS, ERRORS, LETTERS, RECOVERED, Claim, judged, share_left
from dlcft.bench.report.tables import claims_tables, contents
from dlcft.bench.spectrum import Spectrum
from tests.bench.test_report import made
from tests.bench.test_report_artefacts import everything, measured

DLCFT = "DLCFT (TK-FAC)"
ABOVE = Claim("a", "accuracy: one above another", "data", {DLCFT: 1, "EWC": -1})
PLANNED = {
    (scale, one.cell.row, one.cell.stream): one.experiment
    for scale in ("small", "paper")
    for one in cells("all", scale, 1)
    if isinstance(one.experiment, Experiment)
}


def result(row, accuracy, *, seed=0, stream="data", tuned=False, **changes):
    """A result of a row of the tables that ends at an accuracy, a share of 1."""
    experiment = replace(PLANNED["small", row, stream], seed=seed, **changes)
    return replace(made(experiment, accuracy), row=row, tuned=tuned)


def over_seeds(row, accuracies, **options):
    return [result(row, accuracy, seed=seed, **options) for seed, accuracy in enumerate(accuracies)]


def with_matrix(row, matrix, seed=0):
    """A result in task-IL with this accuracy matrix."""
    one = result(row, 0.5, seed=seed, stream="task")
    assert len(one.history) == len(matrix)
    for entry, line in zip(one.history, matrix, strict=True):
        entry["accuracy"] = [value for value in line if not np.isnan(value)]
    return one


def matrix_with(transfer):
    """A random accuracy matrix whose BWT is so many points."""
    tasks = SCALES["small"].streams["task"].tasks
    generator = np.random.default_rng(round(1000 * abs(transfer)))
    matrix = np.tril(generator.uniform(0.5, 0.9, (tasks, tasks)))
    matrix[np.triu_indices(tasks, 1)] = np.nan
    last = np.diag(matrix)[:-1] + transfer / 100 + 0.01 * np.linspace(-1, 1, tasks - 1)
    matrix[-1, :-1] = last
    return matrix


def verdict_by_hand(values, bound=None):
    values = np.asarray(values)
    if len(values) == 1:
        return "one seed"
    above, error = values.mean() - (bound or 0), values.std(ddof=1) / np.sqrt(len(values))
    if bound is not None and above >= 0:
        return "holds"
    if above > 2 * error:
        return "holds"
    return "does not hold" if above < -2 * error else "level"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([2.0, 2.2, 1.9], "holds"),
        ([0.5, -0.4, 0.3], "level"),
        ([-0.5, 0.4, -0.3], "level"),
        ([-2.0, -2.2, -1.9], "does not hold"),
        ([7.0], "one seed"),
        ([-7.0], "one seed"),
        # two values m ± d have the standard error d
        ([2.02 - 1, 2.02 + 1], "holds"),
        ([1.98 - 1, 1.98 + 1], "level"),
        ([-1.98 - 1, -1.98 + 1], "level"),
        ([-2.02 - 1, -2.02 + 1], "does not hold"),
    ],
)
def test_verdicts(differences, verdict):
    generator = np.random.default_rng(0)
    others = generator.uniform(0.2, 0.8, len(differences))  # seeds differ by much more than rows
    rows = {
        DLCFT: over_seeds(DLCFT, others + np.asarray(differences) / 100),
        "EWC": over_seeds("EWC", others)[::-1],
    }
    found = judged(ABOVE, rows)
    assert ERRORS == 2
    assert found.values == pytest.approx(differences)
    assert found.mean == pytest.approx(np.mean(differences))
    if len(differences) == 1:
        assert found.error is None
    else:
        assert found.error == pytest.approx(np.std(differences, ddof=1) / np.sqrt(len(differences)))
    assert found.verdict == verdict == verdict_by_hand(differences)


def test_verdicts_against_numpy():
    generator, seen = np.random.default_rng(1), set()
    for _ in range(60):
        one, other = generator.uniform(0.4, 0.6, (2, generator.integers(1, 5)))
        found = judged(ABOVE, {DLCFT: over_seeds(DLCFT, one), "EWC": over_seeds("EWC", other)})
        assert found.values == pytest.approx(100 * (one - other))
        assert found.verdict == verdict_by_hand(100 * (one - other))
        seen.add(found.verdict)
    assert seen == {"holds", "level", "does not hold", "one seed"}


def test_only_seeds_that_all_rows_have_are_compared():
    ours = [result(DLCFT, accuracy, seed=seed) for seed, accuracy in ((0, 0.60), (1, 0.70), (3, 0.99))]
    others = [result("EWC", accuracy, seed=seed) for seed, accuracy in ((2, 0.10), (1, 0.69), (0, 0.57))]
    found = judged(ABOVE, {DLCFT: ours, "EWC": others})
    assert found.values == pytest.approx([3.0, 1.0])
    assert found.mean == pytest.approx(2.0)
    assert found.error == pytest.approx(1.0)


def test_a_claim_without_results_is_left_out():
    ours = over_seeds(DLCFT, [0.6, 0.7])
    assert judged(ABOVE, {}) is None
    assert judged(ABOVE, {DLCFT: ours}) is None
    assert judged(ABOVE, {DLCFT: ours, "OSLA": over_seeds("OSLA", [0.5, 0.5])}) is None
    assert judged(ABOVE, {DLCFT: ours, "EWC": [result("EWC", 0.5, seed=2)]}) is None, "no seed in common"
    assert judged(ABOVE, {DLCFT: ours, "EWC": over_seeds("EWC", [0.5, 0.5])}) is not None


@pytest.mark.parametrize("none", ["None", "None, linear"])
def test_the_share_of_the_way_from_none_to_joint(none):
    (claim,) = [one for one in CLAIMS if one.stream == "data" and set(one.weights) == {DLCFT, none, "Joint, linear"}]
    assert RECOVERED == 0.8
    assert claim.least == 0
    generator = np.random.default_rng(2)
    for _ in range(20):
        low, high, ours = generator.uniform(0.3, 0.5, 3), generator.uniform(0.6, 0.8, 3), generator.uniform(0.5, 0.8, 3)
        rows = {none: over_seeds(none, low), "Joint, linear": over_seeds("Joint, linear", high)}
        found = judged(claim, {**rows, DLCFT: over_seeds(DLCFT, ours)})
        expected = 100 * (ours - (low + 0.8 * (high - low)))
        assert found.values == pytest.approx(expected)
        assert found.verdict == verdict_by_hand(expected, bound=0)
    # from 50 to 70 percent, 80 percent of the way are 66
    rows = {none: over_seeds(none, [0.5, 0.5]), "Joint, linear": over_seeds("Joint, linear", [0.7, 0.7])}
    for ours, points, verdict in (
        ([0.67, 0.65], 0.0, None),
        ([0.69, 0.65], 1.0, "holds"),  # above its bound, however uncertain
        ([0.66, 0.65], -0.5, "level"),
        ([0.65, 0.65], -1.0, "does not hold"),
    ):
        found = judged(claim, {**rows, DLCFT: over_seeds(DLCFT, ours)})
        assert found.mean == pytest.approx(points, abs=1e-9)
        assert verdict in (None, found.verdict)
        share = (np.mean(ours) - 0.5) / (0.7 - 0.5)
        assert found.mean / 20 == pytest.approx(share - 0.8, abs=1e-9)


@pytest.mark.parametrize(
    ("transfers", "verdict"),
    [
        ([-0.5, -0.7, -0.2], "holds"),
        ([3.0, -4.5, 0.0], "holds"),  # −0.5 on the average, however uncertain
        ([0.2, 0.1], "holds"),
        ([-1.2, -0.9, -1.3], "level"),
        ([-3.0, -3.1, -2.8], "does not hold"),
        ([-0.5], "one seed"),
    ],
)
def test_backward_transfer_and_its_bound(transfers, verdict):
    (claim,) = [one for one in CLAIMS if one.figure == "bwt" and set(one.weights) == {DLCFT}]
    assert claim.least == -1
    matrices = [matrix_with(transfer) for transfer in transfers]
    by_hand = [100 * (matrix[-1, :-1] - np.diag(matrix)[:-1]).mean() for matrix in matrices]
    assert by_hand == pytest.approx(transfers)
    found = judged(claim, {DLCFT: [with_matrix(DLCFT, matrix, seed) for seed, matrix in enumerate(matrices)]})
    assert found.values == pytest.approx(transfers)
    assert found.verdict == verdict == verdict_by_hand(by_hand, bound=-1)


def test_backward_transfer_of_two_rows():
    (claim,) = [one for one in CLAIMS if one.figure == "bwt" and set(one.weights) == {DLCFT, "EWC"}]
    assert claim.least is None
    rows = {
        row: [with_matrix(row, matrix_with(transfer), seed) for seed, transfer in enumerate(transfers)]
        for row, transfers in ((DLCFT, [-0.5, -1.5, 0.5]), ("EWC", [-10.0, -12.0, -14.0]))
    }
    found = judged(claim, rows)
    assert found.values == pytest.approx([9.5, 10.5, 14.5])
    assert found.verdict == "holds"


def test_a_seed_without_the_figure_does_not_count():
    (claim,) = [one for one in CLAIMS if one.figure == "bwt" and set(one.weights) == {DLCFT}]
    some = [with_matrix(DLCFT, matrix_with(transfer), seed) for seed, transfer in enumerate([-0.5, -9.0])]
    some[1].history[0]["accuracy"] = None  # not tested when it was new
    found = judged(claim, {DLCFT: some})
    assert found.values == pytest.approx([-0.5])
    assert found.verdict == "one seed"
    assert judged(claim, {DLCFT: some[1:]}) is None


def test_the_rise_of_nearest_neighbours():
    (claim,) = [one for one in CLAIMS if one.figure == "knn" and set(one.weights) == {DLCFT}]
    some = over_seeds(DLCFT, [0.6, 0.6, 0.6])
    points = [(0.40, 0.70, 0.45), (0.50, 0.20, 0.53), (0.30, 0.31)]
    for one, known in zip(some, points, strict=True):
        for entry, value in zip(one.history, known, strict=False):
            entry["knn"] = value
    found = judged(claim, {DLCFT: some})
    assert found.values == pytest.approx([5.0, 3.0, 1.0]), "from the first to the last"
    assert found.verdict == verdict_by_hand([5.0, 3.0, 1.0])
    once = result(DLCFT, 0.6)
    once.history[-1]["knn"] = 0.5
    assert judged(claim, {DLCFT: [once]}) is None, "one point is no rise"


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_claims_are_about_rows_that_are_run(scale):
    for claim in CLAIMS:
        assert claim.stream in SCALES[scale].streams
        for row in claim.weights:
            assert row in ROWS, row
            assert ROWS[row].on(claim.stream, scale), (row, claim.stream)
            planned = PLANNED.get((scale, row, claim.stream))
            assert planned is not None, f"no table has {row} on {claim.stream}"
            if claim.figure == "knn":
                assert planned.knn > 1
            if claim.figure == "bwt":
                assert planned.scenario == "task-il"
                assert planned.evaluate_every == 1
        if len(claim.weights) > 1:
            assert sum(claim.weights.values()) == pytest.approx(0), "a difference"
        else:
            assert list(claim.weights.values()) == [1]
    assert {claim.letter for claim in CLAIMS} == {"a", "b", "c", "d", "f", "ours"}
    said = [(claim.letter, claim.stream, claim.text) for claim in CLAIMS]
    assert len(set(said)) == len(said)


def test_every_claim_names_its_rows():
    for claim in CLAIMS:
        (first, *_) = claim.weights
        assert claim.weights[first] == 1
        assert first in claim.text
        if claim.least is None and len(claim.weights) == 2:
            assert claim.text.endswith(f"{first} above {list(claim.weights)[1]}")


def lines_of(results, traces=()):
    artefacts, sections = contents(results, traces)
    (table,) = claims_tables(artefacts, sections)
    return table, {line.name: [cell.text for cell in line.cells] for line in table.lines}


def test_the_table_has_the_claims_that_there_are_results_for():
    stream = SCALES["small"].streams["data"]
    where = f"a, data-il, {stream.tasks} tasks"
    differences, ewc = np.array([2.5, 1.0, 4.0]), np.array([0.5, 0.6, 0.4])
    results = over_seeds(DLCFT, ewc + differences / 100) + over_seeds("EWC", ewc) + over_seeds("OSLA", ewc[:1])
    table, lines = lines_of(results)
    assert table.title == "The paper's claims (scale small)"
    assert list(table.head) == ["points", "standard error", "seeds", "verdict"]
    error = differences.std(ddof=1) / np.sqrt(3)
    assert lines == {
        f"{where}: {DLCFT} above EWC": ["+2.50", f"{error:.2f}", "3", "holds"],
        f"{where}: {DLCFT} above OSLA": ["+2.50", "–", "1", "one seed"],
    }
    assert f"more than {ERRORS} standard errors" in table.notes[1]
    assert {claim.letter for claim in CLAIMS} | {"e"} == set(LETTERS)
    assert all(f"{letter}: {meaning}" in table.notes[0] for letter, meaning in LETTERS.items())
    # a result of no row, or on another stream, is no evidence
    astray = [replace(one, row=None) if one.row == "EWC" else one for one in results]
    assert list(lines_of(astray)[1]) == [f"{where}: {DLCFT} above OSLA"]
    longer = [replace(one, experiment=replace(one.experiment, per_class=7)) for one in results if one.row == "EWC"]
    assert list(lines_of([*astray, *longer])[1]) == [f"{where}: {DLCFT} above OSLA"]


def test_tuned_results_stand_for_their_row():
    plain = over_seeds(DLCFT, [0.6, 0.6]) + over_seeds("EWC", [0.5, 0.5])
    settings = {**PLANNED["small", "EWC", "data"].settings, "lr": 3e-3}
    tuned = over_seeds("EWC", [0.7, 0.7], tuned=True, settings=settings)
    (line,) = lines_of(plain + tuned)[1].values()
    assert line[0] == "−10.00"
    (line,) = lines_of(plain)[1].values()
    assert line[0] == "+10.00"


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_with_all_results_every_claim_is_judged(scale):
    results, traces = everything(scale, 2)
    for one in results:
        if one.knn:
            one.history[0]["knn"] = 0.3
    table, _ = lines_of(results, traces)
    letters = [line.name.split(",")[0] for line in table.lines]
    assert letters == [*(claim.letter for claim in CLAIMS), *["e"] * len(traces)]
    assert {line.cells[2].text for line in table.lines if not line.name.startswith("e,")} == {"2"}


def test_claims_stand_first_but_for_digits():
    title = "The paper's claims (scale small)"
    results = over_seeds(DLCFT, [0.6, 0.7]) + over_seeds("EWC", [0.5, 0.5])
    markdown, latex, page = to_markdown(results), to_latex(results), to_html(results)
    assert markdown.startswith(f"### {title}\n")
    assert latex.startswith("\\begin{table}\n\\centering\n" + rf"\caption{{{title}. ")
    assert re.findall(r"<h2>(.*?)</h2>", page)[0] == title.replace("'", "&#39;")
    assert re.search(r"^\| a, .*above EWC \| \+15\.00 \| 5\.00 \| 2 \| holds \|$", markdown, re.M)
    assert " & +15.00 & 5.00 & 2 & holds" in latex
    assert re.search(r'<td data-value="15\.0+\d*" class="">\+15\.00</td>', page)
    smoke, traces = everything("smoke", 1)
    assert reported(summarise(smoke), traces)
    for write in (to_markdown, to_latex, to_html):
        assert "claims" not in write(smoke, traces=traces)
    # results of digits beside those of another scale change nothing
    assert to_markdown([*results, *smoke], traces=traces).startswith(markdown.split("\n\n### ")[0])
    # nor is there an empty table
    assert "claims" not in to_markdown(over_seeds("EWC", [0.5]))


def test_what_is_left_of_the_eigenvalue():
    for one in cells("vanishing-curvature", "small", 1):
        trace = measured(one)
        values = (0.5, 40.0, 30.0, 2.0)
        records = [{**trace.records[0], "eigenvalue": value} for value in values]
        assert isinstance(one.experiment, Spectrum)
        assert share_left(replace(trace, records=records)) == pytest.approx(0.05), "of its height"
        _, lines = lines_of([], [replace(trace, records=records)])
        ((name, shown),) = lines.items()
        assert name.startswith("e, largest eigenvalue in the end")
        assert name.endswith(f"{one.cell.label}, {one.experiment.loss}, seed 0")
        assert shown == ["5", "–", "1", "–"]
