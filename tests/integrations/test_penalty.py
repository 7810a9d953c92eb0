"""The memory for other training loops: the curvature of any module, the penalty and its gradient, saving."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev

from dlcft import CrossEntropy, ScaledMSE
from dlcft.curvature.blocks import Diagonal, InputGram
from dlcft.integrations.curvature import module_curvature
from dlcft.integrations.penalty import PastTasks
from tests.support.brute_force import LAYERWISE, dense
from tests.support.own_block import IsotropicStatistics


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank change beside it, as LoRA has."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 0.5 * self.up(self.down(x))


class Scaled(nn.Module):
    """A parameter in no layer that is known."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.scale = nn.Linear(6, 5), nn.LayerNorm(5), nn.Parameter(torch.randn(5))
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return {"logits": self.out(torch.tanh(self.norm(self.inner(x))) * self.scale)}


class Branching(Scaled):
    """Looks at its inputs, which gradients for many samples at once cannot."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else x + 0)["logits"]


def mlp():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def lora():
    return nn.Sequential(Adapter(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))


NETWORKS = {"mlp": mlp, "lora": lora, "scaled": Scaled, "branching": Branching}


def build(name="mlp", seed=0):
    torch.manual_seed(seed)
    return NETWORKS[name]().double()


def data(seed=0, samples=7, classes=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (samples,), generator=generator)


def logits(network, params, x):
    out = functional_call(network, params, (x,))
    return out["logits"] if isinstance(out, dict) else out


def trainable(network):
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def gauss_newton(network, x, loss, order):
    """(1/N) Σ J_nᵀ (∂²ℓ/∂f²) J_n, with the parameters in this order."""
    params = {name: network.get_parameter(name).detach() for name in order}
    jacobian = jacrev(lambda p: logits(network, p, x))(params)
    flat = torch.cat([jacobian[name].flatten(2) for name in order], 2)
    outputs, label = logits(network, params, x).detach(), torch.tensor([0])
    second = [hessian(lambda f: loss.value(f[None], label))(f) for f in outputs]
    return sum(j.T @ h @ j for j, h in zip(flat, second, strict=True)) / len(x)


@pytest.mark.parametrize("loss", [CrossEntropy(), ScaledMSE(2.0)], ids=["cross-entropy", "mse"])
@pytest.mark.parametrize("name", NETWORKS)
def test_dense_curvature_is_the_gauss_newton_matrix(name, loss):
    network, (x, y) = build(name), data()
    found = module_curvature(
        network, [(x[:4], y[:4]), (x[4:], y[4:])], loss, estimator="dense", names=list(trainable(network)), draws=None
    )
    assert set(found.names) == set(trainable(network))
    expected = gauss_newton(network, x, loss, found.names)
    torch.testing.assert_close(dense(found, dict(network.named_parameters())), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", [CrossEntropy(), ScaledMSE(2.0)], ids=["cross-entropy", "mse"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("estimator", ["diagonal", "tkfac", "exact-tk", "exact-ekfac"])
def test_every_trainable_parameter_is_covered_with_the_true_trace(name, loss, estimator):
    network, (x, y) = build(name), data()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    names = list(trainable(network))
    found = module_curvature(network, [(x, y)], loss, estimator=estimator, names=names, draws=None)
    assert sorted(found.names) == sorted(names)
    assert list(trainable(network)) == names
    assert network.training
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    expected = gauss_newton(network, x, loss, found.names).trace()
    assert found.trace(dict(network.named_parameters())) == pytest.approx(float(expected), rel=1e-9)
    if estimator == "diagonal":
        diagonal = torch.diagonal(gauss_newton(network, x, loss, found.names))
        torch.testing.assert_close(dense(found, dict(network.named_parameters())).diagonal(), diagonal)


def test_under_squared_loss_the_last_layer_is_exact_and_new_outputs_are_known():
    network, (x, y) = build(), data()
    found = module_curvature(network, [(x, y)], ScaledMSE(), estimator="exact-tk", names=list(trainable(network)))
    assert isinstance(found.blocks["2"], InputGram)
    assert found.blocks["2"].names == ("2.weight", "2.bias")
    past = PastTasks(loss="mse")
    past.remember(network, [(x, y)])
    network[2] = grown_layer(network[2], 5)
    network[2].weight.data[4] += 1
    assert past.penalty(network) > 0


def grown_layer(layer, outputs):
    new = nn.Linear(layer.in_features, outputs, dtype=layer.weight.dtype)
    with torch.no_grad():
        for grown, kept in ((new.weight, layer.weight), (new.bias, layer.bias)):
            grown.zero_()[: len(kept)] = kept
    return new


@pytest.mark.parametrize("estimator", [*LAYERWISE, "dense", "mas"])
@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_a_head_that_has_grown(estimator, loss):
    network = build()
    past = PastTasks(estimator, loss=loss)
    past.remember(network, [data()])
    network[0].weight.data += 0.1
    expected = past.penalty(network)
    network[2] = grown_layer(network[2], 5)
    torch.testing.assert_close(past.penalty(network), expected)
    past.remember(network, [data(1, classes=5)])
    assert past.memory.anchor["2.weight"].shape == (5, 4)
    assert past.memory.weight == 2


def test_no_penalty_before_anything_is_remembered():
    network = build()
    past = PastTasks()
    assert past.penalty(network) == 0
    assert past.add_gradient(network) == 0
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("estimator", ["diagonal", "exact-tk"])
def test_adding_the_gradient_is_adding_the_penalty_to_the_loss(name, estimator):
    (x, y), batches, ends = data(2), 3, []
    for by_loss in (True, False):
        network = build(name)
        past = PastTasks(estimator, strength=3.0)
        past.remember(network, [data()])
        optimizer = torch.optim.SGD(trainable(network).values(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(batches):  # accumulated
                loss = CrossEntropy().value(logits(network, {}, x), y) / batches
                if by_loss:
                    loss = loss + past.penalty(network) / batches
                loss.backward()
            if not by_loss:
                expected = past.penalty(network).item()
                assert past.add_gradient(network) == pytest.approx(expected)
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)


def test_the_gradient_is_that_of_the_brute_force_matrix():
    network, (x, y) = build("scaled"), data()
    past = PastTasks("dense", strength=0.7, draws=None)
    past.remember(network, [(x, y)])
    order = past.memory.curvature.names
    matrix = gauss_newton(network, x, CrossEntropy(), order)
    steps = {name: torch.randn_like(p) for name, p in network.named_parameters()}
    for name, p in network.named_parameters():
        p.data += steps[name]
        p.grad = torch.ones_like(p)
    value = past.add_gradient(network)
    d = torch.cat([steps[name].flatten() for name in order])
    assert value == pytest.approx(float(0.7 * 0.5 * d @ matrix @ d), rel=1e-9)
    gradient = torch.cat([network.get_parameter(name).grad.flatten() for name in order])
    torch.testing.assert_close(gradient, 1 + 0.7 * matrix @ d, rtol=1e-9, atol=1e-11)


def test_only_the_parameters_of_an_optimizer_get_the_gradient():
    network = build()
    past = PastTasks()
    past.remember(network, [data()])
    network[0].weight.data += 1
    network[2].weight.data += 1
    past.add_gradient(network, among=list(network[2].parameters()))
    assert network[0].weight.grad is None
    assert network[2].weight.grad.abs().sum() > 0


def test_two_tasks_are_remembered_as_their_sum():
    network = build()
    past = PastTasks("dense", draws=None)
    past.remember(network, [data(0)])
    first = gauss_newton(network, data(0)[0], CrossEntropy(), past.memory.curvature.names)
    network[0].weight.data += 0.3
    past.remember(network, [data(1)])
    second = gauss_newton(network, data(1)[0], CrossEntropy(), past.memory.curvature.names)
    assert past.penalty(network) == 0  # the anchor has moved
    network[0].bias.data += 0.5
    d = torch.cat(
        [(network.get_parameter(n) - past.memory.anchor[n]).detach().flatten() for n in past.memory.curvature.names]
    )
    assert past.penalty(network).item() == pytest.approx(float(0.5 * d @ (first + second) @ d), rel=1e-9)


def test_a_parameter_that_nothing_would_keep_is_refused():
    network = build()
    network[0].requires_grad_(False)
    past = PastTasks()
    past.remember(network, [data()])
    network[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"'0.weight' is trainable, and was not"):
        past.penalty(network)
    with pytest.raises(ValueError, match=r"'0.weight' is trainable, and was not"):
        past.remember(network, [data()])
    network[0].requires_grad_(False)
    network.add_module("3", nn.Linear(3, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"'3.weight' is trainable, and was not"):
        past.add_gradient(network)
    past.free = ("3",)
    assert past.penalty(network) == 0


def test_free_parameters_are_neither_remembered_nor_changed():
    network = build()
    past = PastTasks(free=["2.*"])
    past.remember(network, [data()])
    assert set(past.memory.anchor) == {"0.weight", "0.bias"}
    assert all(p.requires_grad for p in network.parameters())
    network[2] = nn.Linear(4, 9, dtype=torch.float64)  # another task's head
    assert past.penalty(network) == 0
    past.remember(network, [data()])


def test_a_parameter_that_is_frozen_for_one_task_stays_remembered():
    network = build()
    past = PastTasks()
    past.remember(network, [data()])
    network[0].requires_grad_(False)
    past.add_gradient(network)
    assert network[0].weight.grad is None
    past.remember(network, [data(1)])
    assert not network[0].weight.requires_grad
    network[0].requires_grad_(True)
    network[0].weight.data += 1
    assert past.penalty(network) > 0


@pytest.mark.parametrize("estimator", [*LAYERWISE, "dense", IsotropicStatistics])
def test_saved_and_loaded(tmp_path, estimator):
    network = build("scaled")
    past = PastTasks(estimator, strength=2.0)
    past.save(tmp_path / "empty.safetensors")
    past.remember(network, [data()])
    past.save(tmp_path / "memory.safetensors")
    network.inner.weight.data += 0.2
    loaded, copied = PastTasks(estimator, strength=2.0), PastTasks(estimator, strength=2.0)
    loaded.load(tmp_path / "memory.safetensors")
    copied.load_state_dict(past.state_dict())
    assert torch.equal(loaded.penalty(network), past.penalty(network))
    assert torch.equal(copied.penalty(network), past.penalty(network))
    loaded.remember(network, [data(1)])
    past.remember(network, [data(1)])
    network.inner.bias.data += 0.2
    assert torch.equal(loaded.penalty(network), past.penalty(network))
    loaded.load(tmp_path / "empty.safetensors")
    assert loaded.memory is None


def test_a_wrong_file_is_refused(tmp_path):
    past = PastTasks()
    past.remember(build(), [data()])
    with pytest.raises(ValueError, match=r"made with curvature 'exact-tk' and loss 'CrossEntropy'; these are 'kfac'"):
        PastTasks("kfac").load_state_dict(past.state_dict())
    with pytest.raises(ValueError, match="no saved memory of past tasks"):
        past.load_state_dict({"other": 1})
    with pytest.raises(FileNotFoundError, match="no memory of past tasks at"):
        past.load(tmp_path / "nothing")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ValueError, match="holds no memory of past tasks"):
        past.load(tmp_path / "text")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"curvature": "exact"}, "unknown curvature 'exact'"),
        ({"loss": "hinge"}, "unknown loss 'hinge'"),
        ({"strength": -1}, "strength is -1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        PastTasks(**settings)
    with pytest.raises(TypeError, match="it must be one of mse, cross-entropy, or a dlcft Loss"):
        PastTasks(loss=nn.CrossEntropyLoss())


def test_data_that_is_no_classification():
    x, y = data()
    with pytest.raises(ValueError, match=r"one class index for each sample"):
        PastTasks().remember(build(), [(x, x)])
    with pytest.raises(ValueError, match=r"must give logits, 7 × outputs; it gave \(7, 1, 3\)"):
        PastTasks().remember(nn.Sequential(build(), nn.Unflatten(1, (1, 3))), [(x, y)])
    with pytest.raises(ValueError, match=r"the network cannot take a batch \(7, 3\) of torch.float64"):
        PastTasks().remember(build(), [(x[:, :3], y)])
    with pytest.raises(ValueError, match="there is no training data"):
        PastTasks().remember(build(), [])
    with pytest.raises(ValueError, match="nothing to remember"):
        PastTasks().remember(build().requires_grad_(False), [(x, y)])


def test_a_layer_that_has_shrunk_is_refused():
    network = build()
    past = PastTasks()
    past.remember(network, [data()])
    network[2] = nn.Linear(4, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'2.weight' has shape \(2, 4\); in the memory it has \(3, 4\)"):
        past.penalty(network)


def test_half_precision():
    network = build().to(torch.bfloat16)
    x, y = data()
    past = PastTasks(loss="mse")
    past.remember(network, [(x.bfloat16(), y)])
    network[0].weight.data += 0.5
    assert past.add_gradient(network) > 0
    assert network[0].weight.grad.dtype == torch.bfloat16


def test_a_layer_outside_of_layers_is_diagonal():
    network = build("scaled")
    found = module_curvature(network, [data()], CrossEntropy(), names=list(trainable(network)))
    assert {name for name, block in found.blocks.items() if isinstance(block, Diagonal)} == {
        "scale",
        "norm.weight",
        "norm.bias",
    }


def test_inputs_by_name_and_a_one_pass_iterator():
    network, (x, y) = build(), data()
    past = PastTasks("ekfac")  # goes over them twice
    past.remember(network, iter([({"input": x}, y)]))
    other = PastTasks("ekfac")
    other.remember(network, [(x, y)])
    network[0].weight.data += 0.5
    assert torch.equal(past.penalty(network), other.penalty(network))


def test_large_parameters_outside_of_layers_are_taken_in_parts(monkeypatch):
    network, whole, parts = build("scaled"), PastTasks(draws=None), PastTasks(draws=None)
    whole.remember(network, [data()])
    monkeypatch.setattr("dlcft.integrations.curvature._GRADIENT_FLOATS", 30)  # two samples of the 15 numbers there
    seen = []
    network.inner.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    parts.remember(network, [data()])
    assert max(n for n in seen if n != 3) == 2  # three: where the estimation asks which layers have rows
    network.scale.data += 0.3
    torch.testing.assert_close(parts.penalty(network), whole.penalty(network))
