"""All runs of an artefact: several at once, none twice, and what they will cost."""

import json
from dataclasses import replace

import pytest

from dlcft.bench.experiment import Experiment
from dlcft.bench.many import silent
from dlcft.bench.paper import experiments
from dlcft.bench.reproduction import Reproduction, costs, measure_rates, seconds
from dlcft.bench.spectrum import Spectrum
from dlcft.bench.tune import LEARNING_RATES, TUNING, choose_less, chosen_file, grid_of, noted, trials, tunings
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store
from dlcft.update.forecast import Rates

RATES = Rates(training=1.0, remembering=0.1, remembering_once=5.0, testing=0.01, solving=2.0, peak=10**9)


def test_tuning_and_running_several_at_once(tmp_path, monkeypatch):
    rows, lines = ["EWC", "ridge"], []
    monkeypatch.setitem(TUNING, "ewc", {"strength": (1.0, 10.0)})
    monkeypatch.setitem(LEARNING_RATES, "sgd", (1e-3,))
    kinds = tunings("bwt", "smoke", rows)
    assert len(kinds) == 1, "ridge has nothing to tune"
    assert len(trials(kinds, tmp_path)) == 2, "what is tried of λ as it is serves for the learning rate as it is too"
    assert noted(kinds, tmp_path) == {}
    chosen = Reproduction(tmp_path, report=lines.append).choose(kinds)
    assert chosen == noted(kinds, tmp_path)
    assert trials(kinds, tmp_path) == []
    assert Reproduction(tmp_path, report=lines.append).choose(kinds) == chosen
    assert len(lines) == 1
    planned = experiments("bwt", "smoke", tuned=chosen, only=rows)
    results, failures = Reproduction(tmp_path, jobs=2, report=lines.append).execute(planned)
    assert failures == []
    assert {one.experiment.key for one in planned} == set(results)
    assert lines[1] == "0 of 2"
    assert "1 of 2, about" in lines[2]
    assert lines[-1].startswith("2 of 2, all done")
    rows = {result.row: result.tuned for result in results.values()}
    assert rows == {"EWC": True, "ridge": False}
    again, _ = Reproduction(tmp_path, report=lines.append).execute(planned)
    assert again == results
    assert lines[-1] == "2 of 2, all done"


def test_a_run_that_diverges_does_not_end_the_others(tmp_path):
    wild, calm = (one for one in experiments("data-il", "smoke", only=["None", "ridge"]) if one.cell.stream == "data")
    wild, calm = (wild, calm) if wild.cell.label == "None" else (calm, wild)
    settings = {**wild.experiment.settings, "lr": 1e30, "batch_size": 4}
    wild = replace(wild, experiment=replace(wild.experiment, settings=settings))
    lines = []
    results, failures = Reproduction(tmp_path, report=lines.append).execute([wild, calm])
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
    lines, failures = [], [(planned, FloatingPointError("diverged"))]
    runs = Reproduction(tmp_path, report=lines.append)
    assert runs.lower(kinds, [(planned, CheckpointError("in use"))]) == {}
    less = {f"{name}, 2 tasks": {"lr": 1e-3, "strength": 1.0}}
    assert runs.lower(kinds, failures) == less
    assert "strength=1.0" in lines[0]
    assert noted(kinds, tmp_path) == {name: {"lr": 1e-3, "strength": 1e30}, **less}
    (planned,) = experiments("bwt", "smoke", tuned=noted(kinds, tmp_path), only=["EWC"])
    assert planned.experiment.recipe.settings["strength"] == 1.0
    assert json.loads(path.read_text())["diverged"] == [{"strength": 1e30, "tasks": 2}]
    assert runs.lower({}, failures) == {}, "nothing was tuned"
    # and again, until nothing smaller is left
    assert choose_less(kind.experiment, 2, tmp_path) == {"lr": 1e-3, "strength": 0.1}
    assert choose_less(kind.experiment, 2, tmp_path) is None
    assert choose_less(kind.experiment, 3, tmp_path) == {"lr": 1e-3, "strength": 1.0}, "each length for itself"


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path):
    (planned,) = experiments("bwt", "smoke", only=["ridge"])
    with Store(tmp_path / f".{planned.experiment.key}").lock():
        results, failures = Reproduction(tmp_path, report=silent).execute([planned])
    assert results == {}
    assert "in use by process" in str(failures[0][1])


def test_seconds_are_counted_up():
    ridge = Experiment("digits", tasks=4, method="ridge", classes=10, per_class=10)
    # 100 images, 4 tasks, 599 test images four times
    assert seconds(ridge, RATES) == pytest.approx(100 * 0.1 + 4 * 5 + 4 * 2 + 4 * 5.99)
    trained = replace(ridge, method="ewc", settings={"epochs": 3}, evaluate_every=2, knn=1)
    assert seconds(trained, RATES) == pytest.approx(100 * 3.1 + 4 * 5 + 2 * 2 + 2 * 5.99 + 6.99)
    # the first task twice as long: a fourth of the images is seen three times more
    twice = replace(trained, settings={"epochs": 3, "first_times": 2})
    assert seconds(twice, RATES) == pytest.approx(seconds(trained, RATES) + 25 * 3)
    # steps in place of epochs, whatever the number of images
    steps = replace(trained, settings={"epochs": 3, "steps": 20, "batch_size": 16})
    assert seconds(steps, RATES) == pytest.approx(seconds(trained, RATES) - 300 + 4 * 20 * 16)
    both = replace(steps, settings={**steps.settings, "first_times": 2})
    assert seconds(both, RATES) == pytest.approx(seconds(steps, RATES) + 20 * 16)
    joint = replace(ridge, method="none", joint=True, settings={"epochs": 3})
    assert seconds(joint, RATES) == pytest.approx(100 * 3.1 + 5 + 2 + 5.99)
    classes = replace(ridge, scenario="class-il", tasks=5)
    assert seconds(classes, RATES) == pytest.approx(100 * 0.1 + 5 * 5 + 5 * 2 + 3 * 5.99)
    # validation: by the 1098 images that are left out, or where hardly any are, by a fifth of those that are not
    first = replace(ridge, first=2, validate=True)
    assert seconds(first, RATES) == pytest.approx(50 * 0.1 + 2 * 5 + 2 * 2 + 2 * 10.98)
    few = replace(first, per_class=100)
    assert seconds(few, RATES) == pytest.approx(400 * 0.1 + 2 * 5 + 2 * 2 + 2 * 2.00)
    every = replace(first, per_class=None)
    assert seconds(every, RATES) == pytest.approx(479 * 0.1 + 2 * 5 + 2 * 2 + 2 * 2.40)
    large = replace(first, dataset="seq-cifar10", per_class=50)
    assert seconds(large, RATES) == pytest.approx(250 * 0.1 + 2 * 5 + 2 * 2 + 2 * 20.00), "2000 at most"
    with pytest.raises(ValueError, match="size of 'npz'"):
        seconds(replace(ridge, dataset="npz"), RATES)


def test_a_plan_measures_each_kind_once_and_leaves_out_what_is_done(tmp_path):
    planned, measured = experiments("all", "smoke", 2), []
    (tmp_path / planned[0].experiment.file).write_text("")

    def measure(experiment):
        measured.append(experiment.key)
        return RATES

    first, *others = costs(planned, tmp_path, measure=measure)
    assert first is None
    assert len(measured) == len(set(measured)) < len(planned) / 2
    assert all(one.seconds > 0 and one.peak == RATES.peak for one in others)


def test_measured_rates():
    rates = measure_rates(Experiment(size=16, method="dlcft-paper", settings={"epochs": 7}))
    assert 0 < rates.training < 1
    assert 0 < rates.testing < 1
    assert rates.remembering + rates.remembering_once > 0
    assert rates.peak > 10**7
    assert measure_rates(Spectrum(width=10)).training > 0


def test_time_left(tmp_path):
    runs = Reproduction(tmp_path, jobs=2)
    assert runs._left([], 4) == "0 of 4"
    assert runs._left([30.0], 4) == "1 of 4, about 45 s left"
    assert runs._left([30.0, 10.0, 20.0], 4) == "3 of 4, about 20 s left"
    assert runs._left([1.0] * 4, 4) == "4 of 4, all done"
