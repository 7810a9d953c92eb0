"""Where a head starts: at the least of the task's objective over the head alone, the memory included."""

import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.closed_form.sums import RidgeSums
from dlcft.learner.head import HEAD_RIDGE, head_step
from dlcft.learner.train import Run
from dlcft.methods import PastOfHead

SCALE = 3.0


def features(count, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    z = (
        torch.randn(count, 5, generator=generator, dtype=torch.float64)
        @ torch.randn(5, 5, generator=generator).double()
    )
    return z + 1, torch.randint(0, classes, (count,), generator=generator)


def with_one(z):
    return torch.cat([z, z.new_ones(len(z), 1)], 1)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_no_other_head_has_a_lower_objective(ridge):
    z, y = features(40, 3, seed=0)
    old, _ = features(30, 3, seed=1)
    past = PastOfHead(with_one(old).T @ with_one(old) / len(old), 2.0)
    head = torch.randn(3, 6, dtype=torch.float64)
    target = SCALE * torch.nn.functional.one_hot(y, 3).double()
    both = torch.cat([z, old])
    weights = torch.cat([z.new_full((len(z),), 1 / len(z)), z.new_full((len(old),), past.weight / len(old))])
    mean = weights @ both / weights.sum()
    spread = torch.cat([weights @ (both - mean) ** 2, z.new_zeros(1)])
    step = head_step(RidgeSums.empty(5).add(z, y), head, past, ridge, SCALE).requires_grad_()
    data = 0.5 * (target - with_one(z) @ (head + step).T).square().sum(1).mean()
    memory = 0.5 * past.weight * (step @ past.moment * step).sum()
    (data + memory + 0.5 * ridge * (step.square() @ spread).sum() / (1 + past.weight)).backward()
    assert step.grad.abs().max() < 1e-10


def test_without_a_past_it_is_the_ridge_solution():
    z, y = features(40, 3, seed=0)
    sums = RidgeSums.empty(5).add(z, y)
    step = head_step(sums, torch.zeros(3, 6, dtype=torch.float64), None, 0.2, SCALE)
    weight, bias = sums.solve(0.2, scale=SCALE)
    torch.testing.assert_close(step, torch.cat([weight, bias[:, None]], 1), rtol=0, atol=1e-10)


def test_task_after_task_equals_all_at_once():
    parts = [features(40, 4, seed=s) for s in range(3)]
    head = torch.zeros(4, 6, dtype=torch.float64)
    moment = torch.zeros(6, 6, dtype=torch.float64)
    for tasks, (z, y) in enumerate(parts):
        head = head + head_step(RidgeSums.empty(5).add(z, y).grow(4), head, PastOfHead(moment, tasks), 0.0, SCALE)
        moment = (tasks * moment + with_one(z).T @ with_one(z) / len(z)) / (tasks + 1)
    joint = RidgeSums.empty(5).extend(parts)
    weight, bias = joint.solve(0.0, scale=SCALE)
    torch.testing.assert_close(head, torch.cat([weight, bias[:, None]], 1), rtol=0, atol=1e-9)


def test_many_small_tasks_end_near_the_joint_solution():
    z, y = features(600, 3, seed=0)
    y = (z @ torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).double()).argmax(1)
    head, moment = torch.zeros(3, 6, dtype=torch.float64), torch.zeros(6, 6, dtype=torch.float64)
    for tasks, part in enumerate(torch.arange(600).split(6)):
        sums = RidgeSums.empty(5).add(z[part], y[part]).grow(3)
        head = head + head_step(sums, head, PastOfHead(moment, tasks), HEAD_RIDGE, SCALE)
        moment = (tasks * moment + with_one(z[part]).T @ with_one(z[part]) / 6) / (tasks + 1)
    joint = RidgeSums.empty(5).add(z, y)
    found = joint.loss(head[:, :-1], head[:, -1], SCALE)
    assert found < 1.01 * joint.loss(*joint.solve(0.0, scale=SCALE), SCALE)


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 8, 3, stride=3), nn.LeakyReLU(), nn.Flatten())


def blobs(labels, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.tensor(labels).repeat(30)
    x = 0.3 * torch.randn(len(y), 2, 6, 6, generator=generator)
    for label in set(labels):
        x[y == label, label % 2, 3 * (label // 2) : 3 * (label // 2) + 3] += 2
    return x, y


@pytest.mark.parametrize("method", ["dlcft", "dlcft-kfac", "none-linear", "dlcft-diagonal"])
def test_new_classes_are_learned_by_a_few_small_steps(method):
    learner = Learner(small_network(), method, epochs=1, lr=1e-5)
    for labels in ([0, 1], [2, 3]):
        learner.learn(blobs(labels, seed=0), progress=False)
    assert learner.evaluate(blobs([2, 3], seed=1))["accuracy"] > 0.9


def test_with_a_memory_the_old_classes_are_kept_too():
    learner = Learner(small_network(), "dlcft", epochs=1, lr=1e-5)
    for labels in ([0, 1], [2, 3]):
        learner.learn(blobs(labels, seed=0), progress=False)
    assert learner.evaluate(blobs([0, 1, 2, 3], seed=1))["accuracy"] > 0.9


def test_a_feature_that_is_always_zero_changes_nothing():
    z, y = features(8, 2, seed=3)
    dead = torch.cat([z, z.new_zeros(8, 2)], 1)
    head = torch.zeros(2, 8, dtype=torch.float64)
    step = head_step(RidgeSums.empty(7).add(dead, y), head, None, 1e-5, SCALE)
    alive = head_step(RidgeSums.empty(5).add(z, y), head[:, :6], None, 1e-5, SCALE)
    assert torch.allclose(step[:, [0, 1, 2, 3, 4, 7]], alive)
    assert not step[:, 5:7].any()


def backbone_of(learner):
    return {name: p.clone() for name, p in learner.model.params().items()}


def test_with_new_classes_the_backbone_is_trained_in_the_first_task_only(caplog):
    caplog.set_level("INFO", logger="dlcft")
    learner = Learner(small_network(), "dlcft", epochs=3, lr=1e-2)
    learner.learn(blobs([0, 1], seed=0), progress=False)
    first = backbone_of(learner)
    assert any(bool(p.any()) for p in first.values())
    learner.learn(blobs([2, 3], seed=0), progress=False)
    learner.learn(blobs([0, 3], seed=2), progress=False)
    for name, p in backbone_of(learner).items():
        assert torch.equal(p, first[name])
    assert "trained in the first task only (adapt='auto')" in caplog.text
    assert learner.evaluate(blobs([0, 1, 2, 3], seed=1))["accuracy"] > 0.9
    tensors, _ = learner.state()
    remembered = {name for name in tensors if name.startswith("method/memory")}
    assert remembered
    assert not any("backbone" in name for name in remembered), "what is not trained again is not remembered"


def test_a_learner_whose_backbone_rests_goes_on_after_loading(tmp_path):
    learner = Learner(small_network(), "dlcft", epochs=2, lr=1e-2)
    learner.learn(blobs([0, 1], seed=0), progress=False)
    learner.save(tmp_path / "saved")
    loaded = Learner.load(tmp_path / "saved", small_network())
    for each in (learner, loaded):
        each.learn(blobs([2, 3], seed=0), progress=False)
    assert torch.equal(learner.model.head("main").weight, loaded.model.head("main").weight)
    assert learner.predicted_increase() == loaded.predicted_increase()
    assert learner.predicted_increase() > 0


@pytest.mark.parametrize(
    ("scenario", "settings", "once"),
    [
        ("class-il", {}, True),
        ("class-il", {"buffer": 5, "head_end": "trained"}, False),
        ("class-il", {"adapt": "always"}, False),
        ("class-il", {"curvature": "diagonal"}, False),
        ("class-il", {"loss": "cross-entropy"}, False),
        ("data-il", {}, False),
        ("data-il", {"adapt": "first"}, True),
        ("task-il", {}, False),
    ],
)
def test_when_the_backbone_is_trained_once(scenario, settings, once):
    learner = Learner(small_network(), "dlcft", scenario=scenario, epochs=1, lr=1e-2, **settings)
    after = []
    for task in range(2):
        head = f"task {task}" if scenario == "task-il" else None
        learner.learn(blobs([0, 1], seed=task), head=head, progress=False)
        after.append(backbone_of(learner))
    assert once == all(torch.equal(p, after[1][name]) for name, p in after[0].items())


def test_adapt_first_needs_a_head_in_closed_form():
    with pytest.raises(ValueError, match="adapt='first' needs"):
        Learner(small_network(), "dlcft", adapt="first", head_start="zero")


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_careful_first_step_ends_where_the_objective_is_least(monkeypatch, optimizer):
    rates = []
    careful = Run._careful_lr

    def noted(self):
        before = {name: p.clone() for name, p in self.params.items()}
        rates.append(careful(self))
        assert all(torch.equal(p, before[name]) for name, p in self.params.items()), "only tried"
        return rates[-1]

    monkeypatch.setattr(Run, "_careful_lr", noted)
    data = blobs([0, 1, 2, 3], seed=0)

    def loss_after_one_step(lr, careful):
        settings = {
            "schedule": "constant",
            "clip": None,
            "epochs": 1,
            "batch_size": 1000,
            "weight_decay": 0.0,
            "optimizer": optimizer,
        }
        learner = Learner(small_network().double(), "none-linear", lr=lr, careful=careful, **settings)
        learner.learn(data, progress=False)
        return learner.evaluate(data)["loss"]

    least = loss_after_one_step(100.0, careful=True)
    assert 0 < rates[0] < 100
    for factor in (0.9, 1.1):
        assert loss_after_one_step(factor * rates[0], careful=False) > least
    assert loss_after_one_step(0.1 * rates[0], careful=True) == loss_after_one_step(0.1 * rates[0], careful=False)
    assert rates[1] == 0.1 * rates[0], "never more than the recipe says"


def test_a_careful_learner_does_not_swing():
    data = blobs([0, 1, 2, 3], seed=0)
    losses, as_trained = {}, {"schedule": "constant", "head_end": "trained"}
    for careful in (True, False):
        learner = Learner(small_network(), "dlcft", epochs=2, lr=1e-1, batch_size=16, careful=careful, **as_trained)
        learner.learn(data, progress=False)
        losses[careful] = learner.evaluate(data)["loss"]
    ridge = Learner(small_network(), "ridge")
    ridge.learn(data, progress=False)
    assert losses[True] <= 1.1 * ridge.evaluate(data)["loss"]
    assert losses[False] > 2 * losses[True]
