"""Tuning: by held-out training images, noted, and never done twice."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dlcft.bench.choices import CHOICES, SCALES
from dlcft.bench.experiment import Result, run
from dlcft.bench.paper import experiments, variant
from dlcft.bench.tune import FOLDER, LEARNING_RATES, TUNING, chosen_file, grid_of, read_chosen, trial, tune, tunings
from dlcft.methods.recipes import RECIPES


def test_a_choice_that_changes_nothing_changes_no_name():
    (plain,) = (one for one in experiments("bwt", "smoke") if one.cell.label == "EWC")
    same = {variant(plain.experiment): {"strength": 1.0, "lr": RECIPES["ewc"].settings["lr"]}}
    assert [one.experiment for one in experiments("bwt", "smoke", tuned=same)] == [
        one.experiment for one in experiments("bwt", "smoke")
    ]
    assert trial(plain.experiment, same[variant(plain.experiment)]) == trial(plain.experiment, {})


def test_what_is_tried():
    assert set(TUNING) == {"der", "derpp"}, "λ of LwF, EWC, MAS and OSLA is fixed at 1"
    for planned in experiments("task-class-il", "small", seeds=1):
        experiment, grid = planned.experiment, grid_of(planned.experiment)
        if experiment.recipe.closed_form:
            assert grid == {}
            continue
        assert list(grid) == ["lr", *(["replay_logits"] if experiment.method in TUNING else [])]
        assert grid["lr"] == LEARNING_RATES[experiment.recipe.settings["optimizer"]]
        assert RECIPES[experiment.method].settings["lr"] == grid["lr"][0], "the paper's stands first"
        if experiment.method in TUNING:
            values = grid["replay_logits"]
            assert len(values) == len(set(values)) == 4
            assert values[0] == CHOICES["der"].value[experiment.method]["replay_logits"]


def test_tuning(tmp_path, monkeypatch):
    (planned,) = (
        one for one in experiments("data-il", "smoke") if one.cell.label == "EWC" and one.cell.stream == "data"
    )
    grid = grid_of(planned.experiment)
    assert {name: len(values) for name, values in grid.items()} == {"lr": 3}, "λ is the authors' 1"
    assert RECIPES["ewc"].settings["lr"] in grid["lr"]
    ran = []
    monkeypatch.setattr("dlcft.bench.tune.run", lambda *words, **options: ran.append(words) or run(*words, **options))
    small = {"strength": (1.0, 1e12), "lr": (1e-3,)}
    best = tune(planned.experiment, small, tmp_path)
    assert best["lr"] == 1e-3
    assert len(ran) == 4
    trials = list((tmp_path / FOLDER).glob("digits-*.json"))
    assert 1 <= len(trials) <= 4
    assert all(Result.read(path).experiment.validate for path in trials)
    # what was chosen is noted, and holds for this grid and this experiment alone
    for path in trials:
        path.unlink()
    assert tune(planned.experiment, small, tmp_path) == best
    assert len(ran) == 4
    assert read_chosen(planned.experiment, {**small, "lr": (1e-3, 1e-2)}, tmp_path) == {}
    assert read_chosen(replace(planned.experiment, per_class=5), small, tmp_path) == {}
    chosen_file(planned.experiment, tmp_path).write_text("[]")
    with pytest.raises(ValueError, match="no record of tuning"):
        read_chosen(planned.experiment, small, tmp_path)
    chosen_file(planned.experiment, tmp_path).unlink()
    steps = replace(planned.experiment, settings={**planned.experiment.settings, "batch_size": 4})
    with pytest.raises(ValueError, match="diverges with every lr"):
        tune(steps, {"lr": (1e30,)}, tmp_path)


@pytest.mark.parametrize(("best", "tried"), [(3e-3, [1e-3, 3e-3, 1e-2]), (3e-2, [1e-3, 3e-3, 1e-2, 3e-2, 1e-1])])
def test_the_learning_rate_is_sought_beyond_its_grid(tmp_path, monkeypatch, best, tried):
    seen = []

    def accuracy(one, out, **_):
        seen.append(RECIPES["none"].with_settings(dict(one.settings)).settings["lr"])
        return SimpleNamespace(accuracy=1 - abs(math.log10(seen[-1] / best)))

    monkeypatch.setattr("dlcft.bench.tune.run", accuracy)
    (planned,) = tunings("data-il", "smoke", ["None"]).values()
    assert tune(planned.experiment, grid_of(planned.experiment), tmp_path) == {"lr": best}
    assert seen == tried


def test_what_is_tuned():
    found = tunings("data-il", "small")
    assert not any(planned.cell.label in ("ridge", "RanPAC", "dlcft-exact") for planned in found.values())
    assert {planned.cell.label for planned in found.values()} >= {
        "LwF",
        "EWC",
        "MAS",
        "OSLA",
        "DLCFT (TK-FAC)",
        "Joint",
    }
    assert len({variant(planned.experiment) for planned in found.values()}) == len(found)
    assert not any(planned.cell.label.endswith("λ tuned") for planned in found.values()), "tuned with λ = 1"
    few, many = (SCALES["small"].streams[stream].tasks for stream in ("data", "long"))
    assert {planned.experiment.tasks for planned in found.values()} == {few}, f"what is chosen there serves {many} too"
    # what is asked for does not change how it is tuned
    kfac = tunings("ablation", "small", ["DLCFT (K-FAC)"])
    assert {planned.cell.label for planned in kfac.values()} == {"DLCFT (TK-FAC)"}
    assert all(found[name] == planned for name, planned in kfac.items() if name in found)
    both = tunings("task-class-il", "small")
    assert {planned.cell.label: planned.experiment.scenario for planned in both.values()}.items() >= {
        ("ER", "class-il"),
        ("DLCFT (TK-FAC)", "class-il"),
        ("LwF", "task-il"),
        ("OSLA", "task-il"),
    }
