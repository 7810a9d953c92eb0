"""The start from the network after the first task."""

import copy

import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.learner import notes
from dlcft.network.linearize import Linearized
from tests.learner.test_learner import SMALL, backbone, data
from tests.learner.test_state import Interrupted, digest, interrupt_at

START = {"start": "first-task", "start_epochs": 4, "start_batch_size": 8, "start_lr": 0.05}
FIRST, SECOND = data([0, 1, 2], n=48, seed=1), data([0, 1, 2], n=48, seed=2, shift=0.3)


def make(method="dlcft", scenario="data-il", **settings):
    options = {**START, **SMALL.get(method, {}), **settings}
    if method.startswith("dlcft") and method != "dlcft-exact":
        options = {"epochs": 2, "batch_size": 8, **options}
    return Learner(backbone(), method, scenario=scenario, device="cpu", **options)


def plain():
    """The network after the first task, by a learner of its own."""
    learner = Learner(
        backbone(),
        "none",
        scenario="data-il",
        device="cpu",
        epochs=4,
        batch_size=8,
        lr=0.05,
        schedule="linear",
        clip=1.0,
    )
    learner.learn(FIRST, progress=False)
    return learner


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_the_first_task_trains_the_plain_network():
    learner = make()
    learner.learn(FIRST, progress=False)
    assert same(learner.trained_backbone, plain().trained_backbone)
    base = learner.model.backbone
    assert isinstance(base, Linearized)
    assert not any(bool(p.any()) for p in base.delta.parameters()), "ψ = 0 there"
    x = FIRST[0]
    torch.testing.assert_close(base.value(x), plain().trained_backbone(x))
    assert learner.evaluate(FIRST)["accuracy"] > 0.9, "the head is solved for the squared loss"
    assert len(learner.history[0].loss) == 4
    learner.learn(SECOND, progress=False)
    assert any(bool(p.any()) for p in learner.model.backbone.delta.parameters())


@pytest.mark.parametrize("method", ["dlcft", "dlcft-paper", "none-linear", "ridge", "dlcft-exact"])
@pytest.mark.parametrize("scenario", ["data-il", "task-il", "class-il"])
def test_every_linearised_and_closed_form_method_in_every_scenario(method, scenario):
    learner = make(method, scenario)
    for number, task in enumerate((FIRST, SECOND)):
        head = f"t{number}" if scenario == "task-il" else None
        learner.learn(task, head=head, progress=False)
    assert learner.evaluate(SECOND, head="t1" if scenario == "task-il" else None)["accuracy"] > 0.6


@pytest.mark.parametrize("method", ["dlcft", "dlcft-exact"])
def test_saved_and_loaded(method, tmp_path):
    learner = make(method)
    learner.learn(FIRST, progress=False)
    learner.save(tmp_path)
    loaded = Learner.load(tmp_path, backbone(), device="cpu")
    for one in (learner, loaded):
        one.learn(SECOND, progress=False)
    assert digest(loaded) == digest(learner)
    with pytest.raises(ValueError, match="not those that"):
        Learner.load(tmp_path, plain().trained_backbone)


@pytest.mark.parametrize("step", [1, 13, 23])
def test_killed_in_the_first_task_it_ends_bit_equal(step, tmp_path, monkeypatch):
    monkeypatch.setattr(notes, "PROGRESS_SECONDS", 0.0)
    whole, learner = make(), make()
    whole.learn(FIRST, progress=False)
    learner.save(tmp_path)
    with pytest.raises(Interrupted):
        learner.learn(FIRST, progress=interrupt_at(step))
    loaded = Learner.load(tmp_path, backbone(), device="cpu")
    steps = []
    loaded.learn(FIRST, progress=steps.append)
    assert len(steps) == 25 - step, "the step that was interrupted is done again"
    assert digest(loaded) == digest(whole)


def test_samples_of_the_first_task_cannot_be_forgotten():
    learner, never = make("ridge"), make("ridge")
    for one, task in ((learner, SECOND), (never, (SECOND[0][5:], SECOND[1][5:]))):
        one.learn(FIRST, progress=False)
        one.learn(task, progress=False)
    with pytest.raises(ValueError, match="2 of these samples were in the first task, which has trained the network"):
        learner.forget((torch.cat([FIRST[0][:2], SECOND[0][:1]]), torch.cat([FIRST[1][:2], SECOND[1][:1]])))
    learner.forget((SECOND[0][:5], SECOND[1][:5]))
    torch.testing.assert_close(learner.outputs(FIRST[0]), never.outputs(FIRST[0]), rtol=1e-3, atol=1e-3)


def test_learners_that_have_trained_their_network_cannot_be_merged():
    first, other, plain = make("ridge"), make("ridge"), make("ridge", start="pretrained")
    first.learn(FIRST, progress=False)
    other.learn(FIRST, progress=False)
    plain.learn(SECOND, progress=False)
    with pytest.raises(ValueError, match="both learners hold the first task"):
        first.merge(other)
    for one in (first, make("ridge")):
        with pytest.raises(ValueError, match="another start"):
            one.merge(plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["dlcft", "ridge"])
def test_half_precision_is_trained_and_kept_in_float32(method, dtype, tmp_path):
    network = backbone().to(dtype)
    settings = {} if method == "ridge" else {"epochs": 2}
    learner = Learner(network, method, scenario="data-il", start="first-task", start_epochs=2, device="cpu", **settings)
    learner.learn(FIRST, progress=False)
    learner.save(tmp_path)
    again = Learner.load(tmp_path, network, device="cpu")
    assert torch.equal(again.outputs(FIRST[0]), learner.outputs(FIRST[0]))
    for one in (learner, again):
        one.learn(SECOND, progress=False)
    assert torch.equal(again.outputs(FIRST[0]), learner.outputs(FIRST[0]))


def test_a_chosen_part_learns_from_the_pretrained_network():
    learner = Learner(backbone(), "dlcft", scenario="data-il", train=["out"], epochs=1, device="cpu")
    learner.learn(FIRST, progress=False)
    assert learner._builder.started is None
    with pytest.raises(ValueError, match="train= is for start='pretrained'"):
        Learner(backbone(), "dlcft", scenario="data-il", train=["out"], start="first-task")


def test_one_sample_leaves_batchnorm_alone():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
    learner = Learner(network, "dlcft", scenario="data-il", epochs=1, device="cpu")
    learner.learn((torch.randn(1, 1, 8, 8), ["a"]), progress=False)
    assert torch.equal(learner.trained_backbone[2].running_mean, network[2].running_mean)


def test_refused_and_left_alone():
    with pytest.raises(ValueError, match="none has no setting 'start'"):
        Learner(backbone(), "none", start="first-task")
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="start='first-task' is for a network that has learned no task"):
        Learner.adopt(classifier, "2", ["a", "b"], method="ridge", start="first-task")
    learner = make("dlcft", start_lr=1e20, start_clip=None)
    given = copy.deepcopy(learner._builder.given)
    with pytest.raises(FloatingPointError, match="Try a smaller start_lr or start_clip="):
        learner.learn(FIRST, progress=False)
    assert same(learner._builder.given, given)
    assert learner.tasks == 0


def test_auto_is_the_paper_s_choice():
    for scenario, started in {"data-il": True, "task-il": True, "class-il": False}.items():
        learner = make("dlcft-paper", scenario, start="auto")
        learner.learn(FIRST, head="a" if scenario == "task-il" else None, progress=False)
        assert (learner._builder.started is not None) is started
