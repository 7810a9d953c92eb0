"""Results of format 1 are rewritten: nothing but their form changes, and they are found by their new names."""

import json
import subprocess
import sys

import pytest

from dlcft.bench.experiment import Experiment, Result
from dlcft.bench.migrate import migrate
from dlcft.bench.paper import experiments
from dlcft.bench.report import read_results
from dlcft.bench.tune import chosen_file, grid_of, noted, tunings
from dlcft.methods.recipes import RECIPES
from tests.bench.test_report import made

FLAT = {"method": "finetune", "linear": True, "loss": "mse", "head": "zero", "lr": 1e-4, "epochs": 5, "careful": True}
FLAT |= {"augment": "crop4+flip", "buffer": 0, "balanced": False}


def older(experiment, method, settings):
    """The experiment as format 1 has it."""
    content = experiment.to_dict()
    del content["joint"]
    return {**content, "method": method, "settings": settings}


def write(folder, experiment, method, settings, **fields):
    content = made(experiment, 0.5).to_dict()
    for name in ("row", "tuned", "recipe"):
        del content[name]
    content |= {"format": 1, "experiment": older(experiment, method, settings), **fields}
    (folder / f"{method}.json").write_text(json.dumps(content))


@pytest.fixture
def joint():
    (planned,) = (one for one in experiments("data-il", "mini", 1, only=["Joint, linear"]) if "10 " in one.cell.column)
    return planned.experiment


def test_joint_renamed_settings_row_and_recipe(tmp_path, joint):
    settings = {**joint.settings, "head": "zero", "buffer": 3}
    del settings["head_start"]
    write(tmp_path, joint, "joint-linear", settings, recipe=FLAT)
    with pytest.raises(ValueError, match=r"result format 1; this version reads 2: python -m dlcft\.bench\.migrate "):
        Result.read(tmp_path / "joint-linear.json")
    assert migrate(tmp_path) == [tmp_path / joint.file]
    assert list(tmp_path.iterdir()) == [tmp_path / joint.file]
    (result,) = read_results(tmp_path)
    assert result.experiment == joint
    assert (result.row, result.tuned) == ("Joint, linear", False)
    assert result.history == made(joint, 0.5).history
    assert result.recipe["training"]["head_start"] == "zero"
    assert migrate(tmp_path) == [], "once is enough"


def test_a_result_without_a_recipe_gets_that_of_its_method(tmp_path):
    own = Experiment(dataset="seq-cifar100", method="none", tasks=7)
    write(tmp_path, own, "none", {})
    (path,) = migrate(tmp_path)
    result = Result.read(path)
    assert result.row is None
    assert result.recipe == RECIPES["none"].with_settings({"augment": "crop4+flip"}).to_dict()


def test_records_of_tuning_are_found_again(tmp_path, joint):
    kinds = tunings("data-il", "mini", ["Joint, linear"])
    ((name, kind),) = kinds.items()
    base = older(kind.experiment, "joint-linear", {**kind.experiment.settings, "head": "zero"})
    del base["settings"]["head_start"]
    record = {"variant": "old", "chosen": {"lr": 3e-3}, "grid": grid_of(kind.experiment), "accuracy": {}, "base": base}
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "tuned-old.json").write_text(json.dumps(record))
    write(tmp_path, joint, "joint-linear", {**base["settings"], "lr": 3e-3}, recipe={**FLAT, "lr": 3e-3})
    done = subprocess.run(
        [sys.executable, "-m", "dlcft.bench.migrate", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 2
    assert chosen_file(kind.experiment, tmp_path).exists()
    assert noted(kinds, tmp_path) == {name: {"lr": 3e-3}}
    (result,) = read_results(tmp_path)
    assert (result.row, result.tuned, result.experiment.settings["lr"]) == ("Joint, linear", True, 3e-3)
    with pytest.raises(ValueError, match="is no folder"):
        migrate(tmp_path / "absent")
