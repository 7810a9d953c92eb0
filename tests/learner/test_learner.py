"""Every recipe in every scenario; growth; the loop; and what happens when something goes wrong."""

import copy
import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.data.images import Preprocess
from dlcft.methods import Batch, Finetune, Network, Quadratic, Replay, Ridge, Task
from dlcft.methods.recipes import RECIPES

FAST = {"epochs": 2, "batch_size": 8}
SMALL = {
    "ranpac": {"random_features": 32},
    "tangent": {"tangent_features": 64},
    "dlcft-exact": {"depth_features": 64},
}


class Net(nn.Module):
    """A small pre-trained-like network with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.out = nn.Linear(4 * 16, 6)

    def forward(self, x):
        return torch.tanh(self.out(self.act(self.bn(self.conv(x))).flatten(1)))


def backbone():
    torch.manual_seed(0)
    return Net().eval()


def data(classes, n=24, seed=0, shift=0.0):
    """Images whose mean pattern tells the class."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(10, 1, 4, 4, generator=torch.Generator().manual_seed(99))
    y = torch.tensor([classes[i % len(classes)] for i in range(n)])
    return 2 * patterns[y] + 0.3 * torch.randn(n, 1, 4, 4, generator=generator) + shift, y


def make(name, scenario="class-il", **settings):
    options = {**({} if RECIPES[name].closed_form else FAST), **SMALL.get(name, {}), **settings}
    return Learner(backbone(), name, scenario=scenario, device="cpu", **options)


def weights(learner):
    learner.solve()
    return {n: p.detach().clone() for n, p in learner.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("scenario", ["data-il", "task-il", "class-il"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_in_every_scenario(name, scenario):
    learners = [make(name, scenario) for _ in range(2)]
    tasks = {
        "data-il": [data([0, 1, 2], seed=1), data([0, 1, 2], seed=2, shift=0.5)],
        "task-il": [data([0, 1], seed=1), data([2, 3], seed=2)],
        "class-il": [data([0, 1], seed=1), data([2, 3, 1], seed=2)],
    }[scenario]
    for learner in learners:
        for t, task in enumerate(tasks):
            learner.learn(task, head=f"t{t}" if scenario == "task-il" else None)
    one, two = learners
    assert same(weights(one), weights(two)), "a seed fixes everything"
    head = "t1" if scenario == "task-il" else None
    outputs = one.outputs(tasks[1][0], head=head)
    assert torch.isfinite(outputs).all()
    assert outputs.shape[1] == {"data-il": 3, "task-il": 2, "class-il": 4}[scenario]
    result = one.evaluate(tasks[1], head=head)
    assert 0 <= result["accuracy"] <= 1
    predicted = one.predict(tasks[1][0], head=head)
    assert sum(p == y for p, y in zip(predicted, tasks[1][1].tolist(), strict=True)) / 24 == result["accuracy"]
    known = isinstance(one.method, Quadratic) or (isinstance(one.method, Ridge) and scenario != "task-il")
    assert (one.predicted_increase() is not None) is known
    assert one.tasks == len(one.history) == 2


def test_the_seed_matters_and_so_does_training():
    one, two = make("dlcft"), make("dlcft", seed=1)
    for learner in (one, two):
        learner.learn(data([0, 1]))
    assert not same(weights(one), weights(two))
    assert one.history[0].loss[-1] < one.history[0].loss[0]
    assert one.evaluate(data([0, 1], seed=5))["accuracy"] > 0.9


def test_growth_keeps_old_logits_and_extends_everything():
    learner = make("dlcft-replay", epochs=1, first_order=True)
    learner.learn(data([0, 1]))
    method = learner.method
    assert isinstance(method, Quadratic)
    x = data([0, 1], seed=7)[0]
    rows = learner.model.head("main").weight.detach().clone()
    before, anchor = learner.outputs(x), method.memory.anchor["heads.main.weight"].clone()
    learner.model.grow("main", 4)
    method.grown(learner.model.head_names("main"), 4)
    after = learner.outputs(x)
    assert torch.equal(learner.model.head("main").weight[:2], rows)
    assert torch.allclose(
        after[:, :2], before, rtol=1e-5, atol=1e-5
    )  # a wider product may round its last bit elsewhere
    assert (after[:, 2:] == 0).all()
    assert torch.equal(method.memory.anchor["heads.main.weight"][:2], anchor)
    assert method.memory.gradient["heads.main.weight"].shape[0] == 4
    assert method.memory.predicted_increase(learner.model.params("main")) == pytest.approx(0, abs=1e-6)
    assert len(method.kept) == 24


@pytest.mark.parametrize("name", ["lwf", "der", "derpp", "ewc", "dlcft-paper"])
def test_memories_survive_growth(name):
    learner = make(name)
    for t, classes in enumerate(([0, 1], [2], [3, 4, 0])):
        learner.learn(data(classes, seed=t))
    assert learner.labels() == [0, 1, 2, 3, 4]
    assert learner.outputs(data([0])[0]).shape[1] == 5


def test_a_memory_forgets_less():
    accuracy = {}
    for name in ("none-linear", "dlcft", "dlcft-replay"):
        learner = make(name, epochs=15, lr=1e-2)
        learner.learn(data([0, 1], n=40, seed=1))
        learner.learn(data([2, 3], n=40, seed=2))
        accuracy[name] = learner.evaluate(data([0, 1], n=40, seed=3))["accuracy"]
    assert accuracy["dlcft"] > accuracy["none-linear"]
    assert accuracy["dlcft-replay"] > accuracy["none-linear"]


@pytest.mark.parametrize("name", ["ridge", "ranpac"])
def test_ridge_is_exact_for_any_order(name):
    """In sequence, in another order, and at once: the same weights."""
    parts = [data([0, 1], seed=1), data([2], n=10, seed=2), data([1, 3], n=7, seed=3)]
    joined = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    reference = None
    for stream in (parts, parts[::-1], [joined]):
        learner = make(name, ridge=0.1)
        learner.method.sums = None
        for part in stream:
            learner.learn(part)
        order = [learner.labels().index(label) for label in range(4)]
        outputs = learner.outputs(joined[0])[:, order]
        reference = outputs if reference is None else reference
        assert torch.allclose(outputs, reference, atol=1e-4)
        sums = learner.method.sums
        assert sums.samples == len(joined[1])


def test_ridge_predicts_the_rise_of_the_old_loss_exactly():
    learner = make("ridge", ridge=0.1)
    old, new = data([0, 1], seed=1), data([2, 0], seed=2)
    learner.learn(old)
    before = learner.evaluate(old)["loss"]
    learner.learn(new)
    # the old targets of the new output are zero, so the loss is comparable
    assert learner.predicted_increase() == pytest.approx(learner.evaluate(old)["loss"] - before, rel=1e-3)


ABLATION = [
    {"linear": linear, "loss": loss, "curvature": curvature}
    for linear in (True, False)
    for loss in ("mse", "cross-entropy")
    for curvature in ("kfac", "tkfac", "diagonal")
]


@pytest.mark.parametrize("cell", ABLATION, ids=str)
def test_every_cell_of_the_ablation_is_a_switch(cell):
    learner = make("dlcft-paper", "data-il", **cell)
    learner.learn(data([0, 1], seed=1))
    learner.learn(data([0, 1], seed=2))
    assert learner.predicted_increase() is not None


def test_joint_training_with_one_head_a_task():
    learner = make("none-linear", "task-il", epochs=3)
    learner.learn_jointly({"a": data([0, 1], seed=1), "b": data([2, 3], seed=2)})
    assert learner.evaluate(data([2, 3], seed=3), head="b")["accuracy"] > 0.9
    with pytest.raises(ValueError, match="learn_jointly is for 'task-il'"):
        make("none").learn_jointly({"a": data([0, 1])})


def test_batchnorm_learns_in_the_first_task_only():
    learner = make("none")
    learner.learn(data([0, 1], seed=1))
    first = weights(learner)["backbone.bn.running_mean"]
    assert not torch.equal(first, backbone().bn.running_mean)
    learner.learn(data([0, 1], seed=2))
    assert torch.equal(weights(learner)["backbone.bn.running_mean"], first)
    frozen = make("none", batchnorm="frozen")
    frozen.learn(data([0, 1], seed=1))
    assert torch.equal(weights(frozen)["backbone.bn.running_mean"], backbone().bn.running_mean)


@pytest.mark.parametrize("name", RECIPES)
def test_no_reference_to_the_data_is_kept(name):
    learner = make(name)
    x, y = data([0, 1])
    watched = weakref.ref(x)
    learner.learn((x, y))
    del x
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("name", ["none", "dlcft", "er", "lwf"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_diverging_task_leaves_the_learner_as_it_was(name, before):
    learner = make(name)
    for t in range(before):
        learner.learn(data([0, 1], seed=t))
    kept = copy.deepcopy(weights(learner)) if before else None
    x, y = data([1, 2])
    broken = x.clone()
    broken[-1] = float("nan")
    with pytest.raises((FloatingPointError, ValueError), match=r"as it was before this task|finite numbers are needed"):
        learner.learn((broken, y))
    assert learner.tasks == before
    if before:
        assert same(weights(learner), kept)
        assert learner.labels() == [0, 1]
    learner.learn((x, y))
    fresh = make(name)
    for t in range(before):
        fresh.learn(data([0, 1], seed=t))
    fresh.learn((x, y))
    assert same(weights(learner), weights(fresh))


def test_labels_by_name():
    learner = make("dlcft", epochs=1)
    x, _ = data([0, 1])
    learner.learn((x, ["dog", "cat"] * 12))
    learner.learn((x.numpy(), ["ant", "dog"] * 12))
    assert learner.labels() == ["cat", "dog", "ant"]
    assert set(learner.predict(x)) <= {"cat", "dog", "ant"}
    assert learner.evaluate((x, ["bee"] * 24))["accuracy"] == 0


def test_a_dataset_and_several_inputs():
    x, y = data([0, 1])
    learner = make("dlcft", epochs=1)
    learner.learn(torch.utils.data.TensorDataset(x, y))
    plain = make("dlcft", epochs=1)
    plain.learn((x, y))
    assert same(weights(learner), weights(plain))

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 5)

        def forward(self, left, right):
            return torch.tanh(self.layer(left.flatten(1) + right.flatten(1)))

    torch.manual_seed(0)
    pair = Learner(Pair(), "dlcft", device="cpu", **FAST)
    pair.learn(({"left": x, "right": x}, y))
    assert len(pair.predict({"left": x, "right": x})) == 24


def test_augmentation_schedule_clipping_and_precision():
    x, y = data([0, 1])
    plain = make("dlcft")
    plain.learn((x, y))
    for settings in ({"augment": "crop1+flip"}, {"schedule": "cosine"}, {"clip": 0.01}, {"amp": True}):
        changed = make("dlcft", **settings)
        changed.learn((x, y))
        assert not same(weights(changed), weights(plain)), settings
        assert all(torch.isfinite(w).all() for w in weights(changed).values())


class Halved(Finetune):
    """A method of one's own."""

    def objective(self, task, batch):
        return 0.5 * super().objective(task, batch)


def test_a_method_of_ones_own():
    learner = Learner(backbone(), replace(RECIPES["none-linear"], method=Halved()), device="cpu", **FAST)
    learner.learn(data([0, 1]))
    plain = make("none-linear")
    plain.learn(data([0, 1]))
    assert learner.history[0].loss[0] < plain.history[0].loss[0]


@pytest.mark.parametrize("name", ["er", "der", "derpp"])
def test_samples_are_offered_once(name):
    learner = make(name, epochs=20, lr=0.05)
    learner.learn(data([0, 1]))
    assert learner.method.kept.seen == 24
    if name != "er":  # in the last epoch, when the head knows the task: stored logits are nearly what it answers now
        kept = learner.method.kept.sample(24, torch.Generator().manual_seed(0))
        now = learner.model(kept.x, "main")
        assert (now - kept.logits).norm() < 0.1 * now.norm()


def test_der_keeps_what_was_answered_and_new_outputs_at_zero():
    learner = make("der", epochs=1, replay_batch=24, replay_logits=0.3)
    learner.learn(data([0, 1]))
    x, y = data([2, 3])
    method, head = learner.method, learner.model.heads["main"]
    assert isinstance(method, Replay)
    learner.model.grow("main", 4)
    with torch.no_grad():
        learner.model.heads["main"].weight[2:] = 0.5
    drawn = method.kept.sample(24, torch.Generator().manual_seed(0))
    outputs = learner.model(drawn.x, "main")
    target = torch.cat([drawn.logits, torch.zeros(24, 2)], 1)
    expected = (
        torch.nn.functional.cross_entropy(learner.model(x, "main"), y) + 0.3 * (outputs - target).square().sum(1).mean()
    )
    task = Task(learner.model, "main", learner.loss, [(x, y)], len(y), lambda x, _: x, learner._stream)
    found = method.objective(task, Batch(x, x, y, 0, torch.Generator().manual_seed(0)))
    assert drawn.logits.shape == (24, head.out_features)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda: make("dlcft", "online"), ValueError, "scenario is 'online'; it must be"),
        (
            lambda: Learner(backbone(), "dlfct"),
            ValueError,
            r"unknown method 'dlfct'; did you mean 'dlcft'\? Known: none",
        ),
        (
            lambda: make("dlcft", learning_rate=1),
            ValueError,
            "dlcft has no setting 'learning_rate'; it has linear, strict",
        ),
        (lambda: make("dlcft", epochs="many"), ValueError, "epochs is 'many'; it must be a whole number"),
        (lambda: make("dlcft", epochs=True), ValueError, "epochs is True; it must be a whole number"),
        (lambda: make("dlcft", first_order=1), ValueError, "first_order is 1; it must be true or false"),
        (lambda: make("dlcft", clip="no"), ValueError, "clip is 'no'; it must be a finite number or None"),
        (
            lambda: make("dlcft-exact", depth_features=-5),
            ValueError,
            "depth_features is -5; it must be at least 0",
        ),
        (lambda: make("dlcft", lr=0), ValueError, "lr is 0; it must be positive"),
        (lambda: make("dlcft", epochs=0), ValueError, "epochs is 0; it must be at least 1"),
        (lambda: make("dlcft", loss="hinge"), ValueError, "loss is 'hinge'; it must be one of 'mse', 'cross-entropy'"),
        (lambda: make("dlcft", balance=2), ValueError, "balance is 2; it must be at most 1"),
        (lambda: make("er", buffer=0), ValueError, "buffer is 0; it must be at least 1"),
        (lambda: make("none", train="conv"), ValueError, "train= is for recipes on the tangent space"),
        (lambda: make("dlcft", augment="blur"), ValueError, "blur"),
        (lambda: Learner(backbone(), device="tpu"), ValueError, "device is 'tpu'; it must be 'auto' or"),
        (lambda: Learner("resnet18"), TypeError, "the backbone is a str; an nn.Module is needed"),
        (lambda: Learner(backbone(), new_labels="maybe"), ValueError, "new_labels is 'maybe'"),
        (lambda: make("dlcft").predict(data([0])[0]), ValueError, "nothing has been learned yet"),
        (lambda: make("dlcft").learn(data([0, 1]), head="a"), ValueError, "head= is for 'task-il', not 'class-il'"),
        (lambda: make("dlcft", "task-il").learn(data([0, 1])), ValueError, "every task needs a head= name"),
        (lambda: make("dlcft").learn(42), TypeError, "data is a int; give a pair"),
        (
            lambda: make("dlcft").learn((torch.ones(2, 1, 4, 4), [1])),
            ValueError,
            r"there are 2 inputs and 1 labels",
        ),
        (lambda: make("dlcft").learn((torch.ones(0, 1, 4, 4), [])), ValueError, "the data set is empty"),
        (lambda: Learner(nn.Conv2d(1, 2, 3)).learn(data([0, 1])), ValueError, "must map a batch to a batch × features"),
        (
            lambda: Learner(backbone(), "dlcft-exact", epochs=500),
            ValueError,
            r"dlcft-exact has no setting 'epochs'; did you mean 'start_epochs'\? It has depth_features, "
            "random_features, tangent_features, tangent_share, direction, scale, random_kind, bandwidth, bfloat16, "
            "batch_size, augment, ridge, weigh_by, equal_classes, solution",
        ),
        (lambda: make("dlcft", curvature="kfacc"), ValueError, r"unknown curvature 'kfacc'; did you mean 'kfac'\?"),
        (lambda: make("dlcft", curvature="kfac"), ValueError, "curvature='kfac' has no effect in 'class-il': the back"),
        (lambda: make("dlcft", "data-il", buffer=9), ValueError, "buffer=9 has no effect in 'data-il': samples are"),
        (lambda: Learner(backbone(), seed="x"), ValueError, "seed is 'x'"),
        (lambda: Learner(backbone(), amp="yes"), ValueError, "amp 'yes'"),
        (lambda: make("dlcft", "task-il").learn(data([0, 1]), head=1), TypeError, "head is 1; it must be a name"),
        (lambda: make("ridge").merge("x"), TypeError, "merge takes another Learner, not a str"),
        (lambda: Network(linear=False, strict=True), ValueError, "strict=True needs linear=True"),
    ],
)
def test_wrong_input(action, error, message):
    with pytest.raises(error, match=message):
        action()


def test_new_labels_may_be_refused():
    learner = make("dlcft", "data-il")
    learner.learn(data([0, 1]))
    before = weights(learner)
    with pytest.raises(ValueError, match=r"label 5 is new; with new_labels='error' only \[0, 1\] are accepted"):
        learner.learn(data([0, 5]))
    assert same(weights(learner), before)


@pytest.mark.parametrize("name", ["dlcft", "none", "dlcft-exact", "ranpac"])
def test_images_are_normalised_after_augmentation(name):
    x, y = data([0, 1])
    mean, std = (0.5,), (0.25,)
    inside, outside = make(name, preprocess=Preprocess(mean=mean, std=std)), make(name)
    inside.learn((x, y))
    outside.learn(((x - 0.5) / 0.25, y))
    assert torch.allclose(inside.outputs(x), outside.outputs((x - 0.5) / 0.25), atol=1e-3)
    seen = []
    learner = make("none", preprocess=Preprocess(mean=mean, std=std), augment="crop4", epochs=1)
    learner._builder.backbone.conv.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    learner.learn((x.abs() + 1, y))
    assert float(torch.cat(seen).min()) == -2.0, "black, normalised"


def test_a_trained_backbone_can_be_taken_elsewhere():
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8), [0, 1, 2] * 4
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    preprocess = Preprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2))
    tuner = Learner(network, "none", preprocess=preprocess, epochs=2, batch_size=4, lr=0.1)
    tuner.learn(images)
    found = tuner.trained_backbone
    assert not any(torch.equal(a, b) for a, b in zip(found.parameters(), network.parameters(), strict=True))
    expected = tuner.model.features(tuner._reading(images[0]))
    torch.testing.assert_close(found(preprocess(images[0])), expected, rtol=0, atol=0)
    with torch.no_grad():
        next(found.parameters()).zero_()
    torch.testing.assert_close(tuner.model.features(tuner._reading(images[0])), expected, rtol=0, atol=0)
    for method in ("dlcft", "ridge"):
        with pytest.raises(ValueError, match="leaves the backbone as it was; those that train it are none, lwf"):
            _ = Learner(network, method).trained_backbone


def test_labels_that_were_never_learned_are_errors_and_told():
    learner = make("ridge")
    learner.learn(data([0, 1]))
    (x, y), (strange, names) = data([0, 1]), data([2])
    known = learner.evaluate((x, y))
    both = learner.evaluate((torch.cat([x, strange]), torch.cat([y, names])))
    assert known["unknown"] == 0
    assert both["unknown"] == len(names)
    assert both["accuracy"] == pytest.approx(known["accuracy"] * len(y) / (len(y) + len(names)))
    assert both["loss"] == pytest.approx(known["loss"], rel=1e-5), "of the labels that it knows"
    only = learner.evaluate((strange, names))
    assert only["accuracy"] == 0
    assert math.isnan(only["loss"])
