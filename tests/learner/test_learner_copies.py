"""Copies of a learner: by `copy.deepcopy`, and by `pickle`, as it goes to another process; and what it says it is."""

import copy
import multiprocessing
import pickle

import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.methods.recipes import RECIPES
from tests.learner.test_module import OTHERS, SETTINGS, X, Y, learned


def pickled(learner):
    return pickle.loads(pickle.dumps(learner))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("method", [*SETTINGS, "none", "ewc", "derpp", "lwf", "dlcft", "dlcft-paper"])
def test_a_copy_answers_and_learns_alike(method, copied, tmp_path):
    learner = learned(method)
    learner.save(tmp_path)
    other = copied(learner)
    before = learner.outputs(OTHERS)
    assert torch.equal(other.outputs(OTHERS), before)
    other.learn((X.flip(0), Y))
    assert torch.equal(learner.outputs(OTHERS), before)
    other.save()  # in the same directory: the first one is not current any more
    with pytest.raises(ValueError, match="another version is current now"):
        learner.learn((X.flip(0), Y))


def answer(learner, x):
    return learner.predict(x)


def test_a_learner_goes_to_another_process():
    learner = learned("dlcft-exact")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(answer, (learner, OTHERS)) == learner.predict(OTHERS)


def test_before_anything_is_learned():
    learner = Learner(nn.Linear(4, 3), "ridge")
    for copied in (copy.deepcopy, pickled):
        other = copied(learner)
        other.learn((torch.randn(6, 4), [0, 1] * 3))
        assert (other.tasks, learner.tasks) == (1, 0)


@pytest.mark.parametrize("name", RECIPES)
def test_what_it_says_of_its_recipe(name):
    assert repr(Learner(nn.Linear(4, 3), name)).startswith(f"Learner('{name}', scenario='class-il': tasks learned 0,")


def test_what_it_says_of_itself(tmp_path):
    learner = Learner(nn.Linear(4, 3), "ridge", scenario="task-il", ridge=0.5)
    x = torch.randn(6, 4)
    learner.learn((x, ["a", "b"] * 3), head="letters")
    learner.learn((x, [1, 2] * 3), head="numbers")
    learner.forget((x[:2], [1, 2]), head="numbers")
    learner.save(tmp_path)
    said = "Learner('ridge', ridge=0.5, scenario='task-il': tasks learned 2, samples 10, labels 4"
    assert repr(learner) == f"{said}, heads letters, numbers, in {str(tmp_path)!r})"
