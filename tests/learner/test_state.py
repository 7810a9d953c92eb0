"""Saved, loaded, interrupted and resumed: every recipe ends as if nothing had happened."""

import errno
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.data.images import Preprocess
from dlcft.learner import notes
from dlcft.methods import Finetune
from dlcft.methods.recipes import RECIPES
from dlcft.store.files import CheckpointError, state_digest
from dlcft.store.store import Store
from tests.learner.test_learner import backbone, data, make
from tests.support.stores import forge

STREAM = [data([0, 1], seed=1), data([1, 2], seed=2), data([3, 0], seed=3)]


def digest(learner):
    """Of everything that is saved, but for times."""
    learner.solve()
    tensors, header = learner.state()
    history = [{k: v for k, v in entry.items() if not k.startswith("seconds")} for entry in header["history"]]
    return state_digest(tensors, {**header, "history": history})


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_continues_after_a_load(name, tmp_path):
    whole = make(name)
    for task in STREAM:
        whole.learn(task)
    whole.model  # noqa: B018 (closed forms are solved when asked for, and saved solved)
    learner = make(name)
    for task in STREAM:
        learner.learn(task)
        learner.save(tmp_path / "model")
        learner = Learner.load(tmp_path / "model", backbone(), device="cpu")
    assert digest(learner) == digest(whole)
    assert torch.equal(learner.outputs(STREAM[0][0]), whole.outputs(STREAM[0][0]))


@pytest.mark.parametrize("name", ["dlcft", "lwf", "derpp", "dlcft-exact"])
def test_heads_of_task_il_are_kept(name, tmp_path):
    learner = make(name, "task-il")
    learner.learn(data([0, 1]), head="first")
    learner.learn(data([2, 3]), head="second")
    learner.save(tmp_path)
    loaded = Learner.load(tmp_path, backbone(), device="cpu")
    for head in ("first", "second"):
        assert torch.equal(loaded.outputs(STREAM[0][0], head=head), learner.outputs(STREAM[0][0], head=head))
    assert loaded.labels("second") == [2, 3]


def test_settings_labels_and_preprocessing_are_kept(tmp_path):
    preprocess = Preprocess(mean=(0.5,), std=(0.25,))
    learner = Learner(
        backbone(), "dlcft", seed=5, new_labels="error", epochs=1, preprocess=preprocess, train=lambda n: "out" in n
    )
    x, y = data([0, 1])
    learner.learn((x, ["cat" if label else "dog" for label in y]))
    learner.save(tmp_path)
    loaded = Learner.load(tmp_path, backbone())
    assert (loaded.seed, loaded.new_labels, loaded.recipe) == (5, "error", learner.recipe)
    assert (loaded.preprocess, loaded.labels()) == (preprocess, ["cat", "dog"])
    assert set(loaded.model.params()) == set(learner.model.params())
    assert torch.equal(loaded.outputs(x), learner.outputs(x))
    assert loaded.history == learner.history
    assert learner.history[0].data.startswith("main:")


def test_an_untrained_learner_is_saved_too(tmp_path):
    make("dlcft").save(tmp_path)
    loaded = Learner.load(tmp_path, backbone())
    loaded.learn(STREAM[0])
    assert loaded.tasks == 1


class Interrupted(Exception):
    pass


def interrupt_at(step):
    steps = []

    def report(progress):
        steps.append(progress)
        if len(steps) == step:
            raise Interrupted

    return report


@pytest.mark.parametrize("name", [n for n, recipe in RECIPES.items() if not recipe.closed_form])
def test_an_interrupted_task_ends_bit_equal(name, tmp_path, monkeypatch):
    monkeypatch.setattr(notes, "PROGRESS_SECONDS", 0.0)
    settings = {"adapt": "always"} if "adapt" in RECIPES[name].settings else {}
    whole = make(name, **settings)
    whole.learn(STREAM[0])
    whole.learn(STREAM[1])
    learner = make(name, **settings)
    learner.save(tmp_path)
    for task, step in ((STREAM[0], 2), (STREAM[1], 5)):
        with pytest.raises(Interrupted):
            learner.learn(task, progress=interrupt_at(step))
        learner = Learner.load(tmp_path, backbone(), device="cpu")
        seen = []
        learner.learn(task, progress=seen.append)
        assert len(seen) == 6 - (step - 1), "what was noted is not done again"
        learner.save()
    assert digest(learner) == digest(whole)


@pytest.mark.parametrize("name", ["dlcft", "derpp"])
def test_killed_while_remembering_only_that_is_done_again(name, tmp_path, monkeypatch):
    whole = make(name)
    whole.learn(STREAM[0])
    learner = make(name)
    learner.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(type(learner.method), "finish", lambda self, task: (_ for _ in ()).throw(Interrupted))
        with pytest.raises(Interrupted):
            learner.learn(STREAM[0])
    learner = Learner.load(tmp_path, backbone(), device="cpu")
    seen = []
    learner.learn(STREAM[0], progress=seen.append)
    assert not seen
    assert digest(learner) == digest(whole)


def test_other_data_does_not_continue_an_interrupted_run(tmp_path, monkeypatch):
    monkeypatch.setattr(notes, "PROGRESS_SECONDS", 0.0)
    learner = make("dlcft")
    learner.save(tmp_path)
    with pytest.raises(Interrupted):
        learner.learn(STREAM[0], progress=interrupt_at(3))
    before = digest(learner)
    with pytest.raises(CheckpointError, match="an interrupted run on other data"):
        learner.learn(STREAM[1])
    assert digest(learner) == before
    learner.learn(STREAM[1], resume=False)
    assert learner.tasks == 1


def test_versions_can_be_looked_at_and_gone_back_to(tmp_path):
    learner = make("dlcft-exact")
    for task in STREAM:
        learner.learn(task)
        learner.save(tmp_path, keep=2)
    assert [version.number for version in Store(tmp_path).look().versions] == [2, 3]
    assert Learner.load(tmp_path, backbone(), version=2).tasks == 2
    Store(tmp_path).rollback()
    with pytest.raises(CheckpointError, match="another version is current now"):
        learner.save()
    loaded = Learner.load(tmp_path, backbone())
    assert loaded.tasks == 2
    loaded.learn(STREAM[2])
    assert loaded.save() == 4
    assert digest(loaded) == digest(learner)


REFUSED = {
    "another backbone": (
        lambda path: Learner.load(path, nn.Sequential(backbone(), nn.Identity())),
        "the backbone's weights are not those",
    ),
    "no checkpoint": (lambda path: Learner.load(path / "nothing", backbone()), "nothing"),
    "a version that is not kept": (lambda path: Learner.load(path, backbone(), version=7), "7"),
    "another learner": (lambda path: make("ewc").save(path), "holds another learner"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    learner = make("dlcft")
    learner.learn(STREAM[0])
    learner.save(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    action, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        action(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == files


def test_another_process_has_moved_on(tmp_path):
    learner = make("dlcft-exact")
    learner.learn(STREAM[0])
    learner.save(tmp_path)
    other = Learner.load(tmp_path, backbone())
    other.learn(STREAM[1])
    other.save()
    with pytest.raises(CheckpointError, match="meanwhile"):
        learner.learn(STREAM[2])
    with pytest.raises(CheckpointError, match="meanwhile"):
        learner.save()
    assert Learner.load(tmp_path, backbone()).tasks == 2


@dataclass
class Mine(Finetune):
    strength: float = 1.0


def test_a_method_of_ones_own_keeps_its_settings(tmp_path):
    learner = Learner(backbone(), Mine(strength=3.0), epochs=1)
    learner.learn(STREAM[0])
    learner.save(tmp_path)
    loaded = Learner.load(tmp_path, backbone())
    assert loaded.method == Mine(strength=3.0)
    assert torch.equal(loaded.outputs(STREAM[0][0]), learner.outputs(STREAM[0][0]))


def test_loading_imports_no_module(tmp_path):
    learner = Learner(backbone(), Mine(), epochs=1)
    learner.save(tmp_path)
    forge(tmp_path, lambda fields: fields["versions"][0]["header"]["recipe"]["method"].update(kind="antigravity:fly"))
    with pytest.raises(CheckpointError, match="'antigravity:fly', a class of your own; import antigravity first"):
        Learner.load(tmp_path, backbone())
    assert "antigravity" not in sys.modules


def test_a_method_inside_a_function_cannot_be_saved(tmp_path):
    class Hidden(Finetune):
        pass

    learner = Learner(backbone(), Hidden(), epochs=1)
    with pytest.raises(ValueError, match="Hidden is defined inside a function"):
        learner.save(tmp_path)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    learner = make("dlcft-exact")
    learner.learn(STREAM[0])
    learner.save(tmp_path)
    learner.learn(STREAM[1])

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="cannot be written"):
            learner.save()
    assert Learner.load(tmp_path, backbone()).tasks == 1
    learner.save()
    assert Learner.load(tmp_path, backbone()).tasks == 2


def test_size_is_constant_over_a_thousand_tasks(tmp_path):
    learner = make("dlcft-exact", "data-il", new_labels="error")
    sizes = []
    for month in range(1000):
        learner.learn(data([0, 1], n=4, seed=month))
        if month % 250 in (0, 249):
            tensors, _ = learner.state()
            sizes.append(sum(t.numel() * t.element_size() for t in tensors.values()))
    assert len(set(sizes)) == 1
    learner.save(tmp_path)
    assert Learner.load(tmp_path, backbone()).tasks == 1000
    assert (tmp_path / "manifest.json").stat().st_size < 20_000, "the history lies with the tensors"


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
@pytest.mark.parametrize("kills", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.killed", str(kills), "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "all bit-equal" in done.stdout
    assert int(done.stdout.split()[0]) >= kills
