"""The paper's artefacts: its own numbers, nothing run twice, and every scale runnable."""

from dataclasses import replace
from pathlib import Path

import pytest

from dlcft.bench import experiment
from dlcft.bench.choices import CHOICES, SCALES, scale_settings
from dlcft.bench.paper import ARTEFACTS, ROWS, Cell, cells, cells_at, experiments, titled, variant
from dlcft.bench.spectrum import Spectrum
from dlcft.bench.tune import tunings
from dlcft.methods.recipes import RECIPES, named_recipe


def test_the_papers_numbers():
    table = {(c.artefact, c.cell.label, c.cell.column): c.cell.paper for c in cells("all", "paper", 1)}
    assert table["data-il", "DLCFT (TK-FAC)", "Seq-CIFAR-100, 100 tasks"] == 80.07
    assert table["data-il", "Joint", "Seq-MIT-67, 4 tasks"] == 74.40
    class_il = "Class-IL, Seq-CIFAR-100, 10 tasks"
    assert table["task-class-il", "DLCFT (TK-FAC)", class_il] == 59.98
    assert table["task-class-il", "DLCFT without buffer", class_il] is None
    assert ("task-class-il", "LwF", "Task-IL, Seq-CIFAR-100, 10 tasks") in table
    assert ("task-class-il", "LwF", class_il) not in table
    assert table["ablation", "TK-FAC, nonlinear + SCE", "Data-IL, Seq-CIFAR-100, 10 tasks"] == 79.58
    assert table["ablation", "TK-FAC, nonlinear + SCE", "Data-IL, Seq-CIFAR-100, 100 tasks"] == 73.18
    assert table["bwt", "LwF", "ACC, Seq-CIFAR-100, 10 tasks"] == 92.16
    assert table["curvatures", "EWC", "Linear+MSE"] == 82.17
    assert table["bwt", "EWC", "BWT"] == -21.63
    assert sum(number is not None for number in table.values()) == 24 + 11 + 12 + 5 + 8


@pytest.mark.parametrize("scale", SCALES)
def test_columns_are_named_by_the_data_set_and_the_tasks_of_the_scale(scale):
    names = {"digits": "digits", "seq-cifar10": "Seq-CIFAR-10", "seq-cifar100": "Seq-CIFAR-100"}
    names["seq-mit67"] = "Seq-MIT-67"
    for one in cells("all", scale, 1):
        if isinstance(one.experiment, Spectrum) or one.cell.column in ("BWT", "Nonlinear+SCE", "Linear+MSE"):
            continue
        expected = f"{names[one.experiment.dataset]}, {one.experiment.tasks} tasks"
        before, after = one.cell.column[: -len(expected)], one.cell.column[-len(expected) :]
        assert after == expected
        assert before in ("", "Task-IL, ", "Class-IL, ", "Data-IL, ", "ACC, ", "Plain network, ", "Linearised, ")
        if before.endswith("-IL, "):
            assert one.experiment.scenario == before[:-2].lower()
    # a stream that the scale lacks has the paper's name
    mit = titled(Cell("EWC", "{mit}", "mit", "EWC", "accuracy"), scale)
    assert mit == Cell("EWC", "Seq-MIT-67, 4 tasks", "mit", "EWC", "accuracy")


@pytest.mark.parametrize("scale", SCALES)
def test_rows_and_tables_of_some_scales_only(scale):
    planned = {(one.artefact, one.cell.label, one.cell.column) for one in cells("all", scale, 1)}
    for name, artefact in ARTEFACTS.items():
        here = not artefact.scales or scale in artefact.scales
        expected = [
            cell
            for cell in artefact.cells
            if here
            and cell.stream in SCALES[scale].streams
            and scale in (ROWS[cell.row].scales or SCALES)
            and cell.stream in (ROWS[cell.row].streams or SCALES[scale].streams)
        ]
        assert cells_at(name, scale) == expected
        shown = {(name, cell.label, titled(cell, scale).column) for cell in expected}
        assert shown == {one for one in planned if one[0] == name and name != "vanishing-curvature"}
    assert bool(cells_at("joint", scale)) == (scale == "small")
    tuned = {one.cell.label: one.experiment for one in cells("data-il", scale, 1) if "λ tuned" in one.cell.label}
    assert set(tuned) == ({f"{name}, λ tuned" for name in ("LwF", "MAS", "OSLA")} if scale == "small" else set())
    for one in tuned.values():
        assert one.recipe.settings["strength"] == CHOICES["strength"].value[one.method] != 1
        fixed = {name: value for name, value in one.settings.items() if name != "strength"}
        assert replace(one, settings=fixed, knn=SCALES[scale].knn) in (
            planned.experiment for planned in cells("data-il", scale, 1)
        )
        assert replace(one, settings=fixed).recipe.settings["strength"] == 1, "the authors'"


@pytest.mark.parametrize("scale", SCALES)
def test_none_and_joint_of_the_linearised_network_are_on_every_stream(scale):
    found = {(one.cell.row, one.cell.stream): one.experiment for one in cells("all", scale, 1)}
    for stream in SCALES[scale].streams:
        paper, none, joint = (found[row, stream] for row in ("DLCFT (TK-FAC)", "None, linear", "Joint, linear"))
        assert none.recipe.model == joint.recipe.model == paper.recipe.model
        assert none.recipe.training == paper.recipe.training
        assert none.recipe.start == paper.recipe.start
        assert none.recipe.start.start == "auto"
        assert "curvature" not in none.recipe.settings
        assert (joint.joint, none.joint) == (True, False)
        assert joint.rounds == (1 if paper.scenario == "class-il" else 2)
        same = ("lr", "batch_size", "optimizer", "schedule", "clip", "loss", "head_start", "start_lr", "weight_decay")
        assert {name: joint.recipe.settings[name] for name in same} == {
            name: none.recipe.settings[name] for name in same
        }


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_joint_training_starts_from_the_network_that_others_start_from(scale):
    found = [one for one in cells("all", scale, 1) if one.cell.row.startswith(("None, linear", "Joint, linear"))]
    for stream in SCALES[scale].streams:
        if SCALES[scale].streams[stream].scenario == "class-il":
            continue
        starts = [one.experiment.recipe.first_task("data-il").training for one in found if one.cell.stream == stream]
        lengths = {one.steps or one.epochs for one in starts}
        assert len(lengths) == 1, stream
        assert len({replace(one, epochs=1) for one in starts}) == 1


@pytest.mark.parametrize("scale", SCALES)
def test_settings_of_a_scale_are_those_that_differ_from_the_recipe(scale):
    for method, recipe in RECIPES.items():
        for stream in SCALES[scale].streams:
            for joint in (False, True):
                settings = scale_settings(method, stream, scale, joint)
                assert all(recipe.settings[name] != value for name, value in settings.items())
                applied = recipe.with_settings(settings).settings
                if recipe.closed_form:
                    assert settings == {}
                    continue
                wanted = {name: CHOICES[name].value.get(scale) for name in ("batch_size", "epochs", "first_times")}
                wanted["steps"] = CHOICES["steps"].value.get(scale, {}).get(stream)
                wanted |= CHOICES["der"].value.get(method, {})
                if joint:
                    wanted |= {"epochs" if scale != "paper" else "steps": CHOICES["joint"].value[scale]}
                    wanted["first_times"] = None
                for name, value in wanted.items():
                    assert applied[name] == (recipe.settings[name] if value is None else value), (method, name)
                if "replay_batch" in applied:
                    assert applied["replay_batch"] == applied["batch_size"]
                if not recipe.linear:
                    assert applied["batchnorm"] == ("frozen" if stream == "class" else "first")


@pytest.mark.parametrize("scale", SCALES)
def test_nothing_is_run_twice(scale):
    planned = experiments("all", scale, 2)
    keys = [one.experiment.key for one in planned]
    assert len(set(keys)) == len(keys)
    for name, artefact in ARTEFACTS.items():
        if artefact.scales and scale not in artefact.scales:
            with pytest.raises(ValueError, match=f"'{name}' is not at scale '{scale}'; it is at 'small'"):
                cells(name, scale)
            continue
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
        assert ("steps" in experiment.settings) == (not recipe.closed_form and scale == "paper")
        assert ("epochs" in experiment.settings) == (not recipe.closed_form and scale != "paper")
        assert ROWS[one.cell.row].settings.items() <= recipe.settings.items() or "buffer" in ROWS[one.cell.row].settings
        assert (experiment.knn > 0) >= (one.cell.metric == "knn")
        if "buffer" in experiment.settings:
            assert experiment.scenario == "class-il" or experiment.method in ("er", "der", "derpp")
        if one.cell.label == "DLCFT without buffer":
            assert recipe.settings["buffer"] == 0
    methods = {row.method for row in ROWS.values()}
    assert {"ridge", "ranpac", "dlcft-exact", "dlcft", "dlcft-paper", "none-linear"} <= methods
    assert {row.method for row in ROWS.values() if row.joint} == {"none", "none-linear"}


def test_scales():
    streams = SCALES["small"].streams
    small = {one.cell.stream: one.experiment for one in cells("data-il", "small", 1) if one.cell.label == "EWC"}
    assert list(small) == ["data", "long"]
    for stream, e in small.items():
        base = streams[stream]
        assert (e.dataset, e.tasks, e.per_class) == (base.dataset, base.tasks, base.per_class)
        assert e.recipe.settings["epochs"] == CHOICES["epochs"].value["small"]
        assert e.tasks == 5 * e.evaluate_every, "tested five times"
    assert [streams[name].tasks for name in ("data", "long", "task", "class")] == [10, 50, 5, 5]
    assert [streams[name].scenario for name in streams] == ["data-il", "data-il", "task-il", "class-il"]
    assert replace(streams["task"], scenario="class-il") == streams["class"]
    assert set(SCALES["small"].missing) == set(SCALES["smoke"].missing) == {"mit"}
    assert set(SCALES["paper"].streams) == {*streams, "mit"}
    for scale in SCALES:
        orders = {e.class_order for e in SCALES[scale].streams.values() if e.scenario != "data-il"}
        assert orders == {CHOICES["class_order"].value[scale]}
    # λ is the authors' 1, and a buffer has as many images a class as the paper's
    assert small["data"].recipe.settings["strength"] == 1
    (er,) = [one.experiment for one in cells("task-class-il", "small", 1, only=["ER"]) if one.cell.stream == "class"]
    classes = streams["class"].classes or 10
    assert er.recipe.settings["buffer"] == CHOICES["buffer"].value["small"] == 500 * classes / 100
    paper = [one for one in cells("data-il", "paper", 1) if one.cell.label in ("EWC", "DLCFT (TK-FAC)")]
    assert {one.experiment.per_class for one in paper} == {None}
    files = {(one.cell.stream, one.weights) for one in paper}
    assert files == set(SCALES["paper"].weights.items()) & files
    assert len(files) == 3, "nonlinear and linearised rows start from one network"
    assert len({file for _, file in files}) == 2
    assert len(experiments("all", "paper")) == 3 * len(experiments("all", "paper", 1))
    assert all(choice.reason for choice in CHOICES.values())
    assert {choice.origin for choice in CHOICES.values()} == {"paper", "authors' code", "ours"}


def test_docs_tell_every_open_choice():
    table = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text().split("## Choices\n")[1].split("\n## ")[0]
    told = [line for line in table.splitlines() if line.startswith("| `")]
    assert told == [f"| `{name}` | {one.value} | {one.origin} | {one.reason} |" for name, one in CHOICES.items()]


def test_unknown_names():
    with pytest.raises(ValueError, match="did you mean 'data-il'"):
        cells("dta-il", "small")
    with pytest.raises(ValueError, match="unknown scale 'big'"):
        cells("data-il", "big")
    with pytest.raises(ValueError, match="seeds is 0"):
        cells("data-il", "small", 0)


def test_tuned_settings_take_effect():
    (plain,) = (one for one in experiments("data-il", "smoke") if one.cell.label == "EWC" and one.cell.stream == "data")
    tuned = {variant(plain.experiment): {"strength": 7.0, "lr": 3e-3}}
    changed = [one.experiment for one in experiments("data-il", "smoke", tuned=tuned)]
    found = [e for e in changed if e.settings.get("strength") == 7.0]
    assert found[0] == replace(
        plain.experiment, settings={**plain.experiment.settings, **tuned[variant(plain.experiment)]}
    )
    assert [(e.method, e.tasks) for e in found] == [("ewc", 2), ("ewc", 3)], "of both streams, and of no other method"


def test_the_order_of_runs():
    planned = experiments("data-il", "small")
    assert [one.experiment.seed for one in planned] == sorted(one.experiment.seed for one in planned)
    needed = {(one.experiment.key, one.artefact) for one in cells("all", "small")}
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
    for one in cells("all", "small", 1):
        assert rows.setdefault(one.experiment.key, one.cell.row) == one.cell.row


def test_a_plan_makes_few_recipes(monkeypatch):
    made = []
    monkeypatch.setattr(experiment, "_MADE", {})
    monkeypatch.setattr(experiment, "named_recipe", lambda *words: made.append(words) or named_recipe(*words))
    kinds = tunings("data-il", "small", ["EWC", "None"])
    tuned = {name: {"lr": 3e-3} for name in kinds}
    assert len(experiments("data-il", "small", 1, tuned, ["EWC", "None"])) == 4
    assert len(made) < 200
