"""The paper's theorem: linear model, squared loss, exact curvature, true minimisers: in sequence equals jointly.

And how much worse approximations of the curvature are on the same problem.
"""

import pytest
import torch
from torch import nn

from dlcft import Classifier, Linearized, ScaledMSE
from dlcft.methods import Batch, Network, Quadratic, Task, Training

LOSS = ScaledMSE(3.0)


def problem(tasks, strict, seed=0):
    """A small convolutional classifier, and tasks whose inputs differ in scale and place."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(2, 2, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
    )
    model = Classifier(Linearized(network.double()), 8, strict=strict)
    model.add_head("h", 3)
    if strict:
        model.fix_directions("h", torch.randn(3, 8, dtype=torch.float64))
    else:
        nn.init.normal_(model.head("h").weight)  # and fixed: then the model is linear in ψ
    data = []
    for _ in range(tasks):
        scale = torch.linspace(0.2, 2, 2).double()[torch.randperm(2)].view(1, 2, 1, 1)
        x = scale * torch.randn(8, 2, 4, 4, dtype=torch.float64) + torch.randn(1, 2, 4, 4, dtype=torch.float64)
        data.append((x, torch.randint(0, 3, (8,))))
    return model, data


def minimise(params, objective):
    """The exact minimum of a quadratic: Newton's step with the whole Hessian, from differences of its affine gradient.

    Directions without curvature are left alone. Repeating the step removes rounding errors.
    """
    tensors = list(params.values())

    def gradient():
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(objective(), tensors)])

    def move(step):
        with torch.no_grad():
            for t, s in zip(tensors, step.split([t.numel() for t in tensors]), strict=True):
                t += s.view(t.shape)

    start = gradient()
    columns = []
    for unit in torch.eye(len(start), dtype=start.dtype):
        move(unit)
        columns.append(gradient() - start)
        move(-unit)
    hessian = torch.stack(columns)
    values, vectors = torch.linalg.eigh((hessian + hessian.T) / 2)
    inverse = torch.where(values > 1e-12 * values.max(), 1 / values, 0)
    for _ in range(4):
        move(-vectors @ (inverse * (vectors.T @ gradient())))


def joint_loss(model, data):
    return sum(LOSS.value(model(x, "h"), y) for x, y in data) / len(data)


def learn(curvature, model, data, *, include_head):
    """The classifier after learning one task after the other, each to its true minimum."""
    method = Quadratic(curvature, draws=None)
    method.bind("data-il" if include_head else "task-il", Network(), Training())
    params = model.params("h" if include_head else None)
    increases = []
    for t, (x, y) in enumerate(data):
        task = context(model, x, y)
        method.start(task)
        before = joint_loss(model, data[:t]).item() if t else 0.0
        minimise(params, lambda task=task, x=x, y=y: method.objective(task, Batch(x, x, y, 0, torch.Generator())))
        after = joint_loss(model, data[:t]).item() if t else 0.0
        method.finish(task)
        increases.append((method.increase, after - before))
    return model, increases


def context(model, x, y):
    return Task(model, "h", LOSS, [(x, y)], len(y), lambda x, g: x, lambda purpose: torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=[(2, True), (2, False), (10, True), (10, False)], ids=str)
def case(request):
    tasks, strict = request.param
    model, data = problem(tasks, strict)
    minimise(model.params("h" if strict else None), lambda: joint_loss(model, data))
    return tasks, strict, model, data


def test_in_sequence_equals_jointly(case):
    tasks, strict, joint, data = case
    model, increases = learn("dense", *problem(tasks, strict), include_head=strict)
    assert abs(joint_loss(model, data) - joint_loss(joint, data)).item() < 1e-8
    for x, _ in data:
        assert torch.allclose(model(x, "h"), joint(x, "h"), atol=1e-8)
    for predicted, measured in increases[1:]:
        assert predicted == pytest.approx(measured, abs=1e-8)


def smooth_problem(tasks, strict, seed):
    """More samples than parameters, of images whose neighbouring pixels are alike, with a shift from task to task."""
    model, _ = problem(tasks, strict, seed)
    data = []
    for _ in range(tasks):
        mean = torch.randn(1, 2, 1, 1, dtype=torch.float64)
        x = mean + torch.randn(40, 2, 1, 1, dtype=torch.float64) + 0.3 * torch.randn(40, 2, 4, 4, dtype=torch.float64)
        brightness = x.mean((2, 3))
        y = (brightness.sum(1) > mean.sum()).long() + (brightness[:, 0] > brightness[:, 1]).long()
        data.append((x, y))
    return model, data


@pytest.mark.parametrize("seed", [0, 1])
def test_what_approximations_lose_in_this_order(seed):
    model, data = smooth_problem(3, False, seed)
    minimise(model.params(), lambda: joint_loss(model, data))
    best = joint_loss(model, data).item()
    excess = {}
    for name in ("diagonal", "kfac", "exact-tk", "dense"):
        learned = learn(name, *smooth_problem(3, False, seed), include_head=False)[0]
        excess[name] = joint_loss(learned, data).item() - best
    assert excess["diagonal"] > excess["kfac"] > excess["exact-tk"] > 0.1 * best
    assert abs(excess["dense"]) < 1e-8


@pytest.mark.parametrize(("first_order", "kept"), [(True, False), (False, True), (False, False)])
def test_the_gradient_matters_where_training_stops_early(first_order, kept):
    """With the first-order term the old loss is predicted exactly also from a point that is no minimum."""
    model, data = problem(2, True)
    method = Quadratic("dense", draws=None, first_order=first_order, keep_gradient=kept)
    for t, (x, y) in enumerate(data):
        task = context(model, x, y)
        method.start(task)
        before = joint_loss(model, data[:1]).item()
        with torch.no_grad():
            for p in model.params("h").values():
                p.add_(0.1 * torch.randn_like(p))
        method.finish(task)
        if t:
            measured = joint_loss(model, data[:1]).item() - before
            assert (method.increase == pytest.approx(measured, abs=1e-9)) is (first_order or kept)
