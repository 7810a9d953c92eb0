"""Directories that were saved before 0.1.0 still load, and learning goes on from them as it did."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dlcft import Learner
from dlcft.store.files import CheckpointError
from tests.learner import test_learner
from tests.learner.test_learner import Net, data, make
from tests.learner.test_state import digest
from tests.support.stores import forge

SAVED = Path(__file__).parents[1] / "support" / "saved"
EXPECTED = json.loads((SAVED / "expected.json").read_text())
CLASSES = {"data-il": [[0, 1, 2], [1, 0, 2], [2, 0, 1]]}
PROBE = data([0, 1, 2], seed=7)[0]


def backbone():
    net = Net()
    net.load_state_dict(load_file(SAVED / "backbone.safetensors"))
    return net.eval()


def task(number, scenario):
    return data(CLASSES.get(scenario, [[0, 1], [1, 2], [3, 0]])[number], seed=number + 1)


def outputs(learner, scenario):
    return learner.outputs(PROBE, head="task-0" if scenario == "task-il" else None)


def close(found, wanted):
    return torch.allclose(found, torch.tensor(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"adopted", "interrupted"}))
def test_a_saved_learner_answers_as_before_and_goes_on(name, tmp_path):
    wanted = EXPECTED[name]
    scenario = wanted["scenario"]
    shutil.copytree(SAVED / name, tmp_path / name)
    learner = Learner.load(tmp_path / name, backbone(), device="cpu")
    head = "task-2" if scenario == "task-il" else None
    assert learner.scenario == scenario
    assert learner.labels("task-0" if head else "main") == wanted["labels"]
    assert close(outputs(learner, scenario), wanted["outputs"])
    learner.learn(task(2, scenario), head=head, progress=False)
    assert close(outputs(learner, scenario), wanted["after"])
    learner.save()
    assert close(outputs(Learner.load(tmp_path / name, backbone(), device="cpu"), scenario), wanted["after"])


def test_an_adopted_learner_forgets_its_sample(tmp_path):
    wanted = EXPECTED["adopted"]
    shutil.copytree(SAVED / "adopted", tmp_path / "adopted")
    learner = Learner.load(tmp_path / "adopted", Headless(backbone()), device="cpu")
    assert close(outputs(learner, "class-il"), wanted["outputs"])
    learner.learn(task(1, "class-il"), progress=False)
    learner.forget(data([0, 1, 2], n=9, seed=8))
    assert close(outputs(learner, "class-il"), wanted["after"])


def test_an_interrupted_task_is_continued(tmp_path):
    wanted = EXPECTED["interrupted"]
    shutil.copytree(SAVED / "interrupted", tmp_path / "interrupted")
    learner = Learner.load(tmp_path / "interrupted", backbone(), device="cpu")
    assert close(outputs(learner, "class-il"), wanted["outputs"])
    steps = []
    learner.learn(task(1, "class-il"), progress=steps.append)
    assert len(steps) == 5, "five of nine steps were left"
    assert close(outputs(learner, "class-il"), wanted["after"])


def test_a_method_of_ones_own_was_saved_without_its_settings(tmp_path):
    shutil.copytree(SAVED / "ewc", tmp_path / "ewc")
    forge(tmp_path / "ewc", lambda fields: fields["versions"][0]["header"].update(custom="Mine"))
    with pytest.raises(CheckpointError, match="was learned by 'Mine', a method of your own"):
        Learner.load(tmp_path / "ewc", backbone(), device="cpu")


class Headless(nn.Module):
    """The classifier that was adopted, without its head."""

    def __init__(self, body):
        super().__init__()
        self.body, self.fc = body, nn.Identity()

    def forward(self, x):
        return self.fc(self.body(x))


def test_a_matrix_that_was_stored_whole_goes_on_bit_by_bit(tmp_path, monkeypatch):
    """Learning, forgetting and merging end the same, whether G was stored whole or as a triangle."""
    learner = make("ranpac", random_features=200)
    learner.learn(task(0, "class-il"), progress=False)
    learner.save(tmp_path / "packed")
    with monkeypatch.context() as earlier:
        earlier.setattr("dlcft.closed_form.triangles.is_symmetric", lambda tensor: False)
        learner.save(tmp_path / "whole")
    sizes = [(tmp_path / name / "version-1.safetensors").stat().st_size for name in ("packed", "whole")]
    assert sizes[0] < 0.6 * sizes[1]
    other = make("ranpac", random_features=200)
    other.learn(task(2, "class-il"), progress=False)
    ends = []
    for name in ("packed", "whole"):
        loaded = Learner.load(tmp_path / name, test_learner.backbone(), device="cpu")
        assert digest(loaded) == digest(learner)
        loaded.learn(task(1, "class-il"), progress=False)
        loaded.forget(task(0, "class-il"))
        loaded.merge(other)
        loaded.save(tmp_path / name)
        ends.append(digest(loaded))
        assert digest(Learner.load(tmp_path / name, test_learner.backbone(), device="cpu")) == ends[-1]
        assert (tmp_path / name / "version-2.safetensors").stat().st_size < 0.7 * sizes[1]
    assert ends[0] == ends[1]
