"""The paper's artefacts: its own numbers, nothing run twice, and every scale runnable."""

from dataclasses import replace
from pathlib import Path

import pytest

from dlcft.bench import experiment
from dlcft.bench.choices import OPEN_CHOICES, SCALES
from dlcft.bench.paper import ARTEFACTS, ROWS, cells, experiments, variant
from dlcft.bench.spectrum import Spectrum
from dlcft.bench.tune import tunings
from dlcft.methods.recipes import RECIPES, named_recipe


def test_the_papers_numbers():
    table = {(c.artefact, c.cell.label, c.cell.column): c.cell.paper for c in cells("all", "paper", 1)}
    assert table["data-il", "DLCFT (TK-FAC)", "Seq-CIFAR-100, 100 tasks"] == 80.07
    assert table["data-il", "Joint", "Seq-MIT-67, 4 tasks"] == 74.40
    assert table["task-class-il", "DLCFT (TK-FAC)", "Class-IL"] == 59.98
    assert table["task-class-il", "DLCFT without buffer", "Class-IL"] is None
    assert ("task-class-il", "LwF", "Class-IL") not in table
    assert table["ablation", "TK-FAC, nonlinear + SCE", "Data-IL, 10 tasks"] == 79.58
    assert table["curvatures", "EWC", "Linear+MSE"] == 82.17
    assert table["bwt", "EWC", "BWT"] == -21.63
    assert sum(number is not None for number in table.values()) == 24 + 11 + 12 + 5 + 8


@pytest.mark.parametrize("scale", SCALES)
def test_nothing_is_run_twice(scale):
    planned = experiments("all", scale, 2)
    keys = [one.experiment.key for one in planned]
    assert len(set(keys)) == len(keys)
    for name in ARTEFACTS:
        needed = {cell.experiment.key for cell in cells(name, scale, 2)}
        assert needed == {one.experiment.key for one in experiments(name, scale, 2)} <= set(keys)
        assert needed
    # curves and probes come from the tables' own runs
    tables = {one.experiment.key for name in ("data-il", "ablation") for one in cells(name, scale, 1)}
    assert {one.experiment.key for name in ("data-il-curves", "knn") for one in cells(name, scale, 1)} <= tables
    assert [one.experiment.seed for one in planned] == sorted(one.experiment.seed for one in planned)


@pytest.mark.parametrize("scale", SCALES)
def test_cells_are_what_their_rows_say(scale):
    for one in cells("all", scale, 1):
        experiment = one.experiment
        if isinstance(experiment, Spectrum):
            assert one.artefact == "vanishing-curvature"
            continue
        recipe = RECIPES[experiment.method].with_settings(dict(experiment.settings))
        assert ("epochs" in experiment.settings) != recipe.closed_form
        assert (experiment.knn > 0) >= (one.cell.metric == "knn")
        if "buffer" in experiment.settings:
            assert experiment.scenario == "class-il" or experiment.method in ("er", "der", "derpp")
        if one.cell.label == "DLCFT without buffer":
            assert recipe.settings["buffer"] == 0
    methods = {row.method for row in ROWS.values()}
    assert {"ridge", "ranpac", "dlcft-exact", "dlcft", "dlcft-paper", "none-linear"} <= methods
    assert {row.method for row in ROWS.values() if row.joint} == {"none", "none-linear"}


def test_scales():
    mini = {one.cell.column: one.experiment for one in cells("data-il", "mini", 1) if one.cell.label == "EWC"}
    assert [(e.tasks, e.per_class, e.settings["epochs"], e.evaluate_every) for e in mini.values()] == [
        (10, 100, 5, 2),
        (100, 100, 10, 20),
    ]
    paper = [one for one in cells("data-il", "paper", 1) if one.cell.label in ("EWC", "DLCFT (TK-FAC)")]
    assert {one.experiment.per_class for one in paper} == {None}
    assert len({one.weights for one in paper}) == 4, "ReLU for nonlinear rows, LeakyReLU for linearised ones"
    assert len(experiments("all", "paper")) == 3 * len(experiments("all", "paper", 1))
    assert all(choice.reason for choice in OPEN_CHOICES.values())


def test_docs_tell_every_open_choice():
    table = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text().split("## What the paper leaves open")[1]
    told = [line for line in table.splitlines() if line.startswith("| `")]
    assert told == [f"| `{name}` | {choice.value} | {choice.reason} |" for name, choice in OPEN_CHOICES.items()]


def test_unknown_names():
    with pytest.raises(ValueError, match="did you mean 'data-il'"):
        cells("dta-il", "mini")
    with pytest.raises(ValueError, match="unknown scale 'big'"):
        cells("data-il", "big")
    with pytest.raises(ValueError, match="seeds is 0"):
        cells("data-il", "mini", 0)


def test_tuned_settings_take_effect():
    (plain,) = (one for one in experiments("data-il", "smoke") if one.cell.label == "EWC" and "10 " in one.cell.column)
    tuned = {variant(plain.experiment): {"strength": 7.0, "lr": 3e-3}}
    changed = [one.experiment for one in experiments("data-il", "smoke", tuned=tuned)]
    found = [e for e in changed if e.settings.get("strength") == 7.0]
    assert found[0] == replace(
        plain.experiment, settings={**plain.experiment.settings, **tuned[variant(plain.experiment)]}
    )
    assert [(e.method, e.tasks) for e in found] == [("ewc", 2), ("ewc", 3)], "of both streams, and of no other method"


def test_the_order_of_runs():
    planned = experiments("data-il", "mini")
    assert [one.experiment.seed for one in planned] == sorted(one.experiment.seed for one in planned)
    needed = {(one.experiment.key, one.artefact) for one in cells("all", "mini")}
    for seed in range(3):
        keys = [one.experiment.key for one in planned if one.experiment.seed == seed]
        counts = [sum(key == other for other, _ in needed) for key in keys]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > counts[-1]


def test_some_rows_only():
    found = experiments("curvatures", "smoke", only=["K-FAC"])
    assert {one.experiment.method for one in found} == {"osla", "dlcft-paper"}
    assert {one.experiment.key for one in experiments("all", "smoke", only=["ridge"])} < {
        one.experiment.key for one in experiments("all", "smoke")
    }
    assert {one.cell.label for one in cells("data-il", "smoke", only=["ewc", "Joint, linear"])} == {
        "EWC",
        "Joint, linear",
    }
    with pytest.raises(ValueError, match="unknown row 'EWD'; did you mean 'EWC'"):
        cells("data-il", "smoke", only=["EWD"])


def test_an_experiment_belongs_to_one_row():
    rows = {}
    for one in cells("all", "mini", 1):
        assert rows.setdefault(one.experiment.key, one.cell.row) == one.cell.row


def test_a_plan_makes_few_recipes(monkeypatch):
    made = []
    monkeypatch.setattr(experiment, "_MADE", {})
    monkeypatch.setattr(experiment, "named_recipe", lambda *words: made.append(words) or named_recipe(*words))
    kinds = tunings("data-il", "mini", ["EWC", "None"])
    tuned = {name: {"lr": 3e-3} for name in kinds}
    assert len(experiments("data-il", "mini", 1, tuned, ["EWC", "None"])) == 4
    assert len(made) < 200
