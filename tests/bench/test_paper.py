"""The paper's artefacts: its own numbers, nothing run twice, and every scale runnable."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlcft.bench.experiment import Experiment, Result
from dlcft.bench.paper import ARTEFACTS, OPEN_CHOICES, ROWS, SCALES, cells, experiments, variant
from dlcft.bench.planning import (
    Estimate,
    Plan,
    Rates,
    estimate_bytes,
    estimate_seconds,
    measure_rates,
    plan,
    usual_seconds,
)
from dlcft.bench.reproduction import Forecast, choose, execute_all, lowered, noted, trials
from dlcft.bench.spectrum import Spectrum, Trace, trace
from dlcft.bench.tune import (
    FOLDER,
    LEARNING_RATES,
    TUNING,
    choose_less,
    chosen_file,
    grid_of,
    read_chosen,
    trial,
    tune,
    tunings,
)
from dlcft.methods.recipes import RECIPES
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store

RATES = Rates(training=1.0, remembering=0.1, remembering_once=5.0, testing=0.01, settling=2.0, peak=10**9)


def test_the_papers_numbers():
    table = {(c.artefact, c.label, c.column): c.paper for c in cells("all", "paper", 1)}
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
        assert ("epochs" in experiment.settings) == (recipe.method != "ridge")
        assert (experiment.knn > 0) >= (one.metric == "knn")
        if "buffer" in experiment.settings:
            assert experiment.scenario == "class-il" or recipe.method == "replay"
        if one.label == "DLCFT without buffer":
            assert recipe.buffer == 0
    methods = {row.method for row in ROWS.values()}
    assert {"ridge", "ranpac", "dlcft-exact", "dlcft", "dlcft-paper", "none-linear", "joint-linear"} <= methods


def test_scales():
    mini = {one.column: one.experiment for one in cells("data-il", "mini", 1) if one.label == "EWC"}
    assert [(e.tasks, e.per_class, e.settings["epochs"], e.evaluate_every) for e in mini.values()] == [
        (10, 100, 5, 2),
        (100, 100, 10, 20),
    ]
    paper = [one for one in cells("data-il", "paper", 1) if one.label in ("EWC", "DLCFT (TK-FAC)")]
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
    (plain,) = (one for one in experiments("data-il", "smoke") if one.label == "EWC" and "10 " in one.column)
    tuned = {variant(plain.experiment): {"strength": 7.0, "lr": 3e-3}}
    changed = [one.experiment for one in experiments("data-il", "smoke", tuned=tuned)]
    found = [e for e in changed if e.settings.get("strength") == 7.0]
    assert found[0] == replace(
        plain.experiment, settings={**plain.experiment.settings, **tuned[variant(plain.experiment)]}
    )
    assert [(e.method, e.tasks) for e in found] == [("ewc", 2), ("ewc", 3)], "of both streams, and of no other method"


def test_a_choice_that_changes_nothing_changes_no_name():
    (plain,) = (one for one in experiments("bwt", "smoke") if one.label == "EWC")
    same = {variant(plain.experiment): {"strength": 1.0, "lr": RECIPES["ewc"].lr}}
    assert [one.experiment for one in experiments("bwt", "smoke", tuned=same)] == [
        one.experiment for one in experiments("bwt", "smoke")
    ]
    assert trial(plain.experiment, same[variant(plain.experiment)]) == trial(plain.experiment, {})


def test_tuning(tmp_path):
    (planned,) = (one for one in experiments("data-il", "smoke") if one.label == "EWC" and "10 " in one.column)
    grid = grid_of(planned.experiment)
    assert [len(values) for values in grid.values()] == [3, 4]
    assert RECIPES["ewc"].lr in grid["lr"]
    lines = []
    small = {"strength": (1.0, 1e12), "lr": (1e-3,)}
    best = tune(planned.experiment, small, tmp_path, report=lines.append)
    assert best["lr"] == 1e-3
    assert len(lines) == 4
    trials = list((tmp_path / FOLDER).glob("digits-*.json"))
    assert 1 <= len(trials) <= 4
    assert all(Result.read(path).experiment.validate for path in trials)
    # what was chosen is noted, and holds for this grid and this experiment alone
    for path in trials:
        path.unlink()
    assert tune(planned.experiment, small, tmp_path, report=lines.append) == best
    assert len(lines) == 4
    assert read_chosen(planned.experiment, {**small, "lr": (1e-3, 1e-2)}, tmp_path) == {}
    assert read_chosen(replace(planned.experiment, per_class=5), small, tmp_path) == {}
    chosen_file(planned.experiment, tmp_path).write_text("[]")
    with pytest.raises(ValueError, match="no record of tuning"):
        read_chosen(planned.experiment, small, tmp_path)
    chosen_file(planned.experiment, tmp_path).unlink()
    steps = replace(planned.experiment, settings={**planned.experiment.settings, "batch_size": 4})
    with pytest.raises(ValueError, match="diverges with every lr"):
        tune(steps, {"lr": (1e30,)}, tmp_path, report=lines.append)


@pytest.mark.parametrize(("best", "tried"), [(3e-3, [1e-3, 3e-3, 1e-2]), (3e-2, [1e-3, 3e-3, 1e-2, 3e-2, 1e-1])])
def test_the_learning_rate_is_sought_beyond_its_grid(tmp_path, monkeypatch, best, tried):
    seen = []

    def accuracy(one, out, **_):
        seen.append(RECIPES["none"].with_settings(dict(one.settings)).lr)
        return SimpleNamespace(accuracy=1 - abs(math.log10(seen[-1] / best)))

    monkeypatch.setattr("dlcft.bench.tune.run", accuracy)
    (planned,) = tunings("data-il", "smoke", ["None"]).values()
    assert tune(planned.experiment, grid_of(planned.experiment), tmp_path, report=print) == {"lr": best}
    assert seen == tried


def test_what_is_tuned():
    found = tunings("data-il", "mini")
    assert not any(planned.label in ("ridge", "RanPAC", "dlcft-exact") for planned in found.values())
    assert {planned.label for planned in found.values()} >= {"LwF", "EWC", "MAS", "OSLA", "DLCFT (TK-FAC)", "Joint"}
    assert len({variant(planned.experiment) for planned in found.values()}) == len(found)
    assert {planned.experiment.tasks for planned in found.values()} == {10}, "what is chosen there serves 100 tasks too"
    # what is asked for does not change how it is tuned
    kfac = tunings("ablation", "mini", ["DLCFT (K-FAC)"])
    assert {planned.label for planned in kfac.values()} == {"DLCFT (TK-FAC)"}
    assert all(found[name] == planned for name, planned in kfac.items() if name in found)
    both = tunings("task-class-il", "mini")
    assert {planned.label: planned.experiment.scenario for planned in both.values()}.items() >= {
        ("ER", "class-il"),
        ("DLCFT (TK-FAC)", "class-il"),
        ("LwF", "task-il"),
        ("OSLA", "task-il"),
    }


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
    assert {one.label for one in cells("data-il", "smoke", only=["ewc", "Joint, linear"])} == {"EWC", "Joint, linear"}
    with pytest.raises(ValueError, match="unknown row 'EWD'; did you mean 'EWC'"):
        cells("data-il", "smoke", only=["EWD"])


def test_tuning_and_running_several_at_once(tmp_path, monkeypatch):
    rows, lines = ["EWC", "ridge"], []
    monkeypatch.setitem(TUNING, "ewc", {"strength": (1.0, 10.0)})
    monkeypatch.setitem(LEARNING_RATES, "sgd", (1e-3,))
    kinds = tunings("bwt", "smoke", rows)
    assert len(kinds) == 1, "ridge has nothing to tune"
    assert len(trials(kinds, tmp_path)) == 2, "what is tried of λ as it is serves for the learning rate as it is too"
    assert noted(kinds, tmp_path) == {}
    chosen = choose(kinds, tmp_path, jobs=1, report=lines.append)
    assert chosen == noted(kinds, tmp_path)
    assert trials(kinds, tmp_path) == []
    assert choose(kinds, tmp_path, report=lines.append) == chosen
    assert len(lines) == 1
    planned = experiments("bwt", "smoke", tuned=chosen, only=rows)
    results, failures = execute_all(planned, tmp_path, jobs=2, report=lines.append)
    assert failures == []
    assert {one.experiment.key for one in planned} == set(results)
    assert lines[1].startswith("0 of 2, about")
    assert lines[-1].startswith("2 of 2, all done")
    again, _ = execute_all(planned, tmp_path, report=lines.append)
    assert again == results
    assert lines[-1] == "2 of 2, all done"


def test_a_run_that_diverges_does_not_end_the_others(tmp_path):
    wild, calm = (one for one in experiments("data-il", "smoke", only=["None", "ridge"]) if "10 " in one.column)
    wild, calm = (wild, calm) if wild.label == "None" else (calm, wild)
    settings = {**wild.experiment.settings, "lr": 1e30, "batch_size": 4}
    wild = replace(wild, experiment=replace(wild.experiment, settings=settings))
    lines = []
    results, failures = execute_all([wild, calm], tmp_path, report=lines.append)
    assert list(results) == [calm.experiment.key]
    assert len(failures) == 1
    assert failures[0][0] == wild
    assert "diverged" in str(failures[0][1])
    assert any("diverged" in line for line in lines)


def test_what_diverges_on_the_whole_stream_is_lowered(tmp_path, monkeypatch):
    monkeypatch.setitem(TUNING, "ewc", {"strength": (1.0, 0.1, 1e30)})
    monkeypatch.setitem(LEARNING_RATES, "sgd", (1e-3,))
    kinds = tunings("bwt", "smoke", ["EWC"])
    ((name, kind),) = kinds.items()
    path = chosen_file(kind.experiment, tmp_path)
    path.parent.mkdir()
    tried = {"lr": [[1e-3, 0.5]], "strength": [[1.0, 0.4], [0.1, 0.3], [1e30, 0.5]]}
    record = {"grid": grid_of(kind.experiment), "chosen": {"lr": 1e-3, "strength": 1e30}, "accuracy": tried}
    path.write_text(json.dumps(record))
    (planned,) = experiments("bwt", "smoke", tuned=noted(kinds, tmp_path), only=["EWC"])
    assert planned.experiment.settings["strength"] == 1e30
    assert lowered(kinds, [(planned, CheckpointError("in use"))], tmp_path) == {}
    lines, failures = [], [(planned, FloatingPointError("diverged"))]
    less = {f"{name}, 2 tasks": {"lr": 1e-3, "strength": 1.0}}
    assert lowered(kinds, failures, tmp_path, report=lines.append) == less
    assert "strength=1.0" in lines[0]
    assert noted(kinds, tmp_path) == {name: {"lr": 1e-3, "strength": 1e30}, **less}
    (planned,) = experiments("bwt", "smoke", tuned=noted(kinds, tmp_path), only=["EWC"])
    assert planned.experiment.settings["strength"] == 1.0
    assert json.loads(path.read_text())["diverged"] == [{"strength": 1e30, "tasks": 2}]
    assert lowered({}, failures, tmp_path) == {}, "nothing was tuned"
    # and again, until nothing smaller is left
    assert choose_less(kind.experiment, 2, tmp_path) == {"lr": 1e-3, "strength": 0.1}
    assert choose_less(kind.experiment, 2, tmp_path) is None
    assert choose_less(kind.experiment, 3, tmp_path) == {"lr": 1e-3, "strength": 1.0}, "each length for itself"


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path):
    (planned,) = experiments("bwt", "smoke", only=["ridge"])
    with Store(tmp_path / f".{planned.experiment.key}").lock():
        results, failures = execute_all([planned], tmp_path, report=lambda line: None)
    assert results == {}
    assert "in use by process" in str(failures[0][1])


def test_time_left():
    forecast = Forecast({0: 10.0, 1: 20.0, 2: 30.0, 3: 40.0}, jobs=2)
    assert str(forecast) == "0 of 4, about 50 s left"
    forecast.finish(0, 30.0)  # three times as long as usual
    assert str(forecast) == "1 of 4, about 2.2 min left"
    for place in (1, 2, 3):
        forecast.finish(place, 1.0)
    assert str(forecast) == "4 of 4, all done"
    for one in experiments("all", "mini", 1):
        assert usual_seconds(one.experiment) > 0


def test_seconds_are_counted_up():
    ridge = Experiment("digits", tasks=4, method="ridge", classes=10, per_class=10)
    # 100 images, 4 tasks, 599 test images four times
    assert estimate_seconds(ridge, RATES) == pytest.approx(100 * 0.1 + 4 * 5 + 4 * 2 + 4 * 5.99)
    trained = replace(ridge, method="ewc", settings={"epochs": 3}, evaluate_every=2, knn=1)
    assert estimate_seconds(trained, RATES) == pytest.approx(100 * 3.1 + 4 * 5 + 2 * 2 + 2 * 5.99 + 6.99)
    joint = replace(ridge, method="joint", settings={"epochs": 3})
    assert estimate_seconds(joint, RATES) == pytest.approx(100 * 3.1 + 5 + 2 + 5.99)
    classes = replace(ridge, scenario="class-il", tasks=5)
    assert estimate_seconds(classes, RATES) == pytest.approx(100 * 0.1 + 5 * 5 + 5 * 2 + 3 * 5.99)
    first = replace(ridge, first=2, validate=True)
    assert estimate_seconds(first, RATES) == pytest.approx(40 * 0.1 + 2 * 5 + 2 * 2 + 2 * 0.2)
    assert estimate_bytes(ridge, RATES) == 10**9 + 3 * 699 * 1024
    with pytest.raises(ValueError, match="size of 'npz'"):
        estimate_seconds(replace(ridge, dataset="npz"), RATES)


def test_a_plan_measures_each_kind_once_and_leaves_out_what_is_done(tmp_path):
    planned, measured = experiments("all", "smoke", 2), []
    (tmp_path / planned[0].experiment.file).write_text("")

    def measure(experiment):
        measured.append(experiment.key)
        return RATES

    found = plan(planned, tmp_path, measure=measure)
    assert found.runs == len(planned) - 1
    assert found.estimates[0] == Estimate(planned[0], 0.0, 0, True)
    assert len(measured) == len(set(measured)) < len(planned) / 2
    assert found.seconds > 0
    assert found.peak > RATES.peak
    assert (Plan(()).seconds, Plan(()).peak) == (0, 0)


def test_measured_rates():
    rates = measure_rates(Experiment(size=16, method="dlcft-paper", settings={"epochs": 7}))
    assert 0 < rates.training < 1
    assert 0 < rates.testing < 1
    assert rates.remembering + rates.remembering_once > 0
    assert rates.peak > 10**7


def test_spectrum(tmp_path):
    base = Spectrum(per_class=10, epochs=8, points=4, samples=50, iterations=5, width=30, lr=3e-3)
    found = {
        loss: trace(replace(base, loss=loss), tmp_path, report=lambda line: None) for loss in ("cross-entropy", "mse")
    }
    for loss, result in found.items():
        assert [record["epochs"] for record in result.records][-1] == 8
        assert len(result.records) == 4
        assert result.records[-1]["train_loss"] < result.records[0]["train_loss"]
        assert all(record["eigenvalue"] > 0 for record in result.records)
        assert Trace.read(tmp_path / replace(base, loss=loss).file) == result
        assert trace(replace(base, loss=loss), tmp_path) is not result
    with pytest.raises(ValueError, match="unknown loss 'mce'"):
        replace(base, loss="mce")
    with pytest.raises(ValueError, match="points is 0"):
        replace(base, points=0)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match="no spectrum file"):
        Trace.read(tmp_path / "x.json")
