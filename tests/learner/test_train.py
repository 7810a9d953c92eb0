"""The training loop: schedules, steps, and the head after training."""

import math

import pytest
import torch

from dlcft.learner.train import Run
from dlcft.methods import Batch, LwF, Quadratic
from tests.learner.test_learner import data, make, same, weights

TASK = data([0, 1, 2], n=24)


@pytest.mark.parametrize(
    ("schedule", "share"),
    [
        ("constant", lambda done: 1.0),
        ("linear", lambda done: 1 - done / 6),
        ("cosine", lambda done: (1 + math.cos(math.pi * done / 6)) / 2),
    ],
)
def test_schedules(schedule, share, monkeypatch):
    rates = []
    step = Run._step

    def noted(self, task, indices, done):
        value = step(self, task, indices, done)
        rates.append(self.optimizer.param_groups[0]["lr"])
        return value

    monkeypatch.setattr(Run, "_step", noted)
    learner = make("none", epochs=2, batch_size=8, lr=0.1, schedule=schedule)
    learner.learn(TASK, progress=False)
    assert rates == pytest.approx([0.1 * share(done) for done in range(6)])


@pytest.mark.parametrize(("settings", "steps"), [({"steps": 7}, 7), ({"steps": 2, "first_times": 4}, 8), ({}, 6)])
def test_a_task_has_so_many_steps(settings, steps):
    learner = make("none", epochs=2, batch_size=8, **settings)
    seen = []
    learner.learn(TASK, progress=seen.append)
    assert len(seen) == steps
    assert seen[-1].share == 1
    assert len(learner.history[0].loss) == -(-steps // 3)
    seen.clear()
    learner.learn(data([0, 1, 2], seed=3), progress=seen.append)
    assert len(seen) == settings.get("steps", 6), "only the first task is longer"


def test_the_head_is_solved_after_training():
    losses = {}
    for end in ("trained", "ridge"):
        learner = make("none-linear", epochs=2, head_end=end)
        learner.learn(TASK, progress=False)
        losses[end] = learner.evaluate(TASK)["loss"]
    assert losses["ridge"] < losses["trained"]


def test_with_a_memory_the_solved_head_minimises_the_objective_over_the_head():
    learner = make("dlcft", "data-il", epochs=1, head_end="ridge", keep_gradient=False)
    learner.learn(TASK, progress=False)
    learner.learn(data([0, 1, 2], seed=2, shift=0.4), progress=False)
    method, head = learner.method, learner.model.head("main")
    assert isinstance(method, Quadratic)
    assert torch.isfinite(head.weight).all()
    plain = make("dlcft", "data-il", epochs=1, head_end="trained", keep_gradient=False)
    plain.learn(TASK, progress=False)
    plain.learn(data([0, 1, 2], seed=2, shift=0.4), progress=False)
    assert not torch.equal(head.weight, plain.model.head("main").weight)


def test_damping_keeps_parameters_near_the_last_task():
    moved = {}
    for damping in (0.0, 100.0):
        learner = make("ewc", "data-il", epochs=2, lr=1e-3, schedule="constant", clip=None, damping=damping)
        learner.learn(TASK, progress=False)
        before = weights(learner)
        learner.learn(data([0, 1, 2], seed=2, shift=1.0), progress=False)
        after = weights(learner)
        moved[damping] = sum(
            float((after[n] - before[n]).square().sum()) for n in after if after[n].is_floating_point()
        )
    assert moved[100.0] < 0.5 * moved[0.0]


def test_damping_is_half_the_squared_distance():
    learner = make("ewc", "data-il", epochs=1)
    learner.learn(TASK, progress=False)
    method, params = learner.method, learner.model.params("main")
    with torch.no_grad():
        for p in params.values():
            p.add_(0.1)
    task = learner._task("main", learner._gathered(TASK), learner._heads.labels["main"])
    x, y = next(iter(task.batches))
    batch = Batch(x, x, y, 0, torch.Generator())
    values = []
    for method.damping in (0.0, 0.5):
        values.append(method.objective(task, batch).item())
    distance = 0.01 * sum(p.numel() for p in params.values())
    assert values[1] - values[0] == pytest.approx(0.25 * distance, rel=1e-3)


def test_curvature_of_augmented_images_is_another():
    outputs = []
    for augmented in (False, True):
        learner = make("dlcft-kfac", "data-il", augment="crop1+flip", curvature_augment=augmented)
        learner.learn(TASK, progress=False)
        outputs.append(learner.method.memory.curvature.trace(learner.model.params("main")))
    assert outputs[0] != outputs[1]


def test_lwf_with_the_normalised_objective():
    """`(L_data + (t−1)·L_distil)/t`: with equal outputs of both models, the data's loss is divided by t."""
    learner = make("lwf", "data-il", mean=True, epochs=1)
    learner.learn(TASK, progress=False)
    method = learner.method
    assert isinstance(method, LwF)
    assert method.tasks == 1
    for tasks, share in ((1, 1 / 2), (3, 1 / 4)):
        method.tasks = tasks
        task = learner._task("main", learner._gathered(TASK), learner._heads.labels["main"])
        x, y = next(iter(task.batches))
        value = method.objective(task, Batch(x, x, y, 0, torch.Generator()))
        alone = task.loss.value(task.model(x, "main"), y).item()
        assert value.item() == pytest.approx(share * alone, rel=1e-4)


def test_settings_that_change_nothing_give_the_same():
    one, other = make("dlcft"), make("dlcft", steps=6, batch_size=8)
    for learner in (one, other):
        learner.learn(TASK, progress=False)
    assert same(weights(one), weights(other)), "two epochs of three steps"


@pytest.mark.parametrize("method", ["dlcft", "dlcft-kfac", "dlcft-diagonal"])
@pytest.mark.parametrize("scenario", ["data-il", "class-il"])
def test_solving_again_changes_nothing_where_training_has_changed_nothing(method, scenario):
    heads = []
    for end in ("trained", "ridge"):
        learner = make(method, scenario, start="pretrained", head_start="ridge", head_end=end, lr=1e-12, careful=False)
        for number, labels in enumerate(
            [[0, 1, 2], [0, 1, 2], [0, 1, 2]] if scenario == "data-il" else [[0, 1], [1, 2]]
        ):
            learner.learn(data(labels, seed=number), progress=False)
        heads.append(learner.model.head("main").weight.detach())
    assert torch.allclose(*heads, rtol=1e-4, atol=1e-4)


def test_a_head_is_not_solved_without_its_buffer():
    with pytest.raises(ValueError, match="head_end='ridge' would solve the head without the buffer"):
        make("dlcft", "class-il", buffer=10, head_end="ridge")
    assert make("dlcft", "data-il", buffer=0).method.kept is None


def test_a_strict_model_keeps_its_head_as_trained():
    learner = make("dlcft", "data-il", strict=True, curvature="dense", start="pretrained", epochs=3)
    for seed in (1, 2):
        learner.learn(data([0, 1, 2], seed=seed), progress=False)
    assert learner.evaluate(TASK)["accuracy"] == 1


@pytest.mark.parametrize("train", [None, "out"])
def test_kept_values_change_nothing_but_rounding(train, caplog):
    caplog.set_level("INFO", "dlcft")
    learners = [make("dlcft", "data-il", epochs=3, batch_size=8, start="pretrained", train=train) for _ in range(3)]
    for learner, gb in zip(learners, (0, 1, 1), strict=True):
        learner.learn(TASK, progress=False, cache_gb=gb)
        learner.learn(data([0, 1, 2], seed=3), progress=False, cache_gb=gb)
    assert caplog.text.count("are kept in") == 4
    without, kept, again = map(weights, learners)
    for name in without:
        torch.testing.assert_close(kept[name], without[name], rtol=1e-3, atol=1e-5)
        assert torch.equal(kept[name], again[name])


@pytest.mark.parametrize(
    ("settings", "gb", "reason"),
    [
        ({"augment": "flip"}, 1, "augment='none'"),
        ({"amp": True}, 1, "full precision"),
        ({}, 1e-9, "GB are allowed"),
        ({"epochs": 1}, 1, ""),
    ],
)
def test_values_are_not_kept_where_that_would_be_wrong_or_too_much(settings, gb, reason, caplog):
    caplog.set_level("INFO", "dlcft")
    learner = make("dlcft", **{"epochs": 2, "batch_size": 8} | settings)
    learner.learn(TASK, progress=False, cache_gb=gb)
    assert "are kept in" not in caplog.text
    assert reason in caplog.text


def test_samples_that_differ_each_time_are_not_kept(caplog):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return torch.randn(TASK[0].shape[1:]), index % 3

    caplog.set_level("INFO", "dlcft")
    make("dlcft", epochs=2, batch_size=4).learn(Noisy(), progress=False, cache_gb=1)
    assert "differ each time they are read" in caplog.text


@pytest.mark.parametrize(
    ("method", "gb", "message"), [("ridge", 1, "read each sample once"), ("dlcft", -1, r"cache_gb is -1; 0 or more")]
)
def test_a_cache_that_makes_no_sense_is_refused(method, gb, message):
    with pytest.raises(ValueError, match=message):
        make(method).learn(TASK, progress=False, cache_gb=gb)
