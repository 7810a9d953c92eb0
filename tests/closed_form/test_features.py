"""Tangent features against autograd, sample by sample, in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlcft.closed_form.features import MOST_SAMPLES, FrozenFeatures, TangentFeatures, kronecker_sketch, share_budget
from dlcft.curvature.rows import per_sample_gradients
from dlcft.network.inputs import AnyLayout
from dlcft.network.prepare import fold_batchnorm
from tests.curvature.test_grams import LAYERS, make_case
from tests.support.networks import NETWORKS, Windows, build

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


@pytest.mark.parametrize("name", LAYERS)
def test_kronecker_sketch_is_left_times_gradient_times_right(name):
    case = make_case(name)
    groups, outputs, columns = case.d.shape[1:]
    torch.manual_seed(0)
    left = torch.randn(groups, 3, outputs, dtype=torch.float64)
    right = torch.randn(groups, columns, 2, dtype=torch.float64)
    with torch.no_grad():
        found = kronecker_sketch(case.layer, case.xs, case.gs, left, right)
    expected = torch.einsum("qpo,nqok,qkr->npr", left, case.d, right)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def directions_of(network, batch, count):
    with torch.no_grad():
        width = network(batch).shape[1]
    return torch.randn(count, width, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def brute_force(features, batch):
    """z, relu(Pz), and S D R with D from the Jacobian of u·g, one sample at a time."""
    network = copy.deepcopy(features.base).to(memory_format=torch.contiguous_format)
    z = network(batch).detach()
    blocks = [z] if features.weight is None else [z, torch.relu(z @ features.weight.T)]
    parameters = {name: p.detach() for name, p in network.named_parameters()}

    def jacobian(index):
        def directional(params):
            return functional_call(network, params, (batch[index : index + 1],))[0] @ features.directions.T

        with sdpa_kernel(SDPBackend.MATH):
            return jacrev(directional)(parameters)

    jacobians = [jacobian(index) for index in range(len(batch))]

    def sketched(kind, which, name):
        found = []
        for each in jacobians:
            left, right = features._pair(name, which)
            groups, _, rows = left.shape
            d = each[f"{name}.weight" if kind == "layer" else name][which]
            d = d.reshape(groups, rows, -1)
            if kind == "layer" and f"{name}.bias" in each:
                d = torch.cat([d, each[f"{name}.bias"][which].reshape(groups, rows, 1)], 2)
            found.append((left @ d @ right).sum(0).flatten())
        return torch.stack(found)

    for which in range(len(features.directions)):
        blocks += [sketched("layer", which, name) for name in features.layers]
    for which in range(len(features.directions)):
        blocks += [sketched("other", which, name) for name in features.others]
    return torch.cat(blocks, 1)


@pytest.mark.parametrize("name", [n for n in NETWORKS if n not in ("lstm", "gru")])
@pytest.mark.filterwarnings("ignore:.*fast path.*")
def test_equals_the_sketched_jacobian(name):
    network, batch = build(name)
    features = TangentFeatures(network, directions_of(network, batch, 2), features=400, random=3, seed=1)
    with torch.no_grad():
        found = features(batch)
    torch.testing.assert_close(found, brute_force(features, batch), rtol=1e-9, atol=1e-9)
    assert features.length <= 400
    assert found.shape[1] == features.length + 3 + network(batch).shape[1]


@pytest.mark.parametrize("name", ["vit", "transformer-encoder"])
def test_named_norms_and_attention_are_covered(name):
    network, batch = build(name)
    chosen = [n for n, _ in network.named_parameters() if "norm" in n or "attn" in n or "attention" in n]
    features = TangentFeatures(network, directions_of(network, batch, 1), features=100, train=chosen)
    assert set(features.others) == set(chosen)
    torch.testing.assert_close(features(batch).detach(), brute_force(features, batch), rtol=1e-9, atol=1e-9)


def test_attention_is_covered_without_being_named():
    network, batch = build("vit")
    features = TangentFeatures(network, directions_of(network, batch, 1), features=100)
    assert features.others == ["attention.in_proj_weight", "attention.out_proj.weight"]
    assert float(features(batch)[:, -10:].abs().min()) > 0


@pytest.mark.parametrize(
    ("name", "share", "last"),
    [
        ("vgg", 0.5, ["head.0", "head.3"]),
        ("vgg", 0.51, ["features.4", "head.0", "head.3"]),
        ("vgg", 0.01, ["head.3"]),
        ("vit", 0.5, ["mlp.0", "mlp.2", "attention.out_proj.weight"]),
    ],
)
def test_a_share_of_the_layers_is_their_last_ones(name, share, last):
    network, batch = build(name)
    directions = directions_of(network, batch, 1)
    features = TangentFeatures(network, directions, features=100, share=share)
    assert [*features.layers, *features.others] == last
    torch.testing.assert_close(features(batch).detach(), brute_force(features, batch), rtol=1e-9, atol=1e-9)
    named = TangentFeatures(network, directions, features=100, train=features.trainable, share=0.01)
    assert list(named.layers) == list(features.layers), "what is named counts, not the share"


@pytest.mark.parametrize(("memory", "first"), [(1, 1), (1, 2), (1 << 16, 1), (1 << 29, 2)])
def test_does_not_depend_on_how_many_samples_fit_into_memory(memory, first, monkeypatch):
    network, batch = build("vgg")
    features = TangentFeatures(network, directions_of(network, batch, 1), features=60)
    with AnyLayout():
        whole, at_once = features._features(batch, slice(None))
    assert at_once == MOST_SAMPLES
    monkeypatch.setattr("dlcft.closed_form.features.MEMORY", memory)
    monkeypatch.setattr("dlcft.closed_form.features.FIRST_SAMPLES", first)
    if memory == 1:
        with AnyLayout():
            assert features._features(batch, slice(None))[1] == 1
    torch.testing.assert_close(features(batch), whole, rtol=1e-10, atol=1e-12)
    with torch.inference_mode():
        torch.testing.assert_close(features(batch), whole, rtol=1e-10, atol=1e-12)


def test_tokens_folded_into_the_batch():
    torch.manual_seed(0)
    network, x = Windows().double(), torch.randn(6, 7, 5, dtype=torch.float64)
    features = TangentFeatures(network, torch.randn(2, 3, dtype=torch.float64), features=40)
    torch.testing.assert_close(features(x).detach(), brute_force(features, x), rtol=1e-9, atol=1e-9)


def test_a_seed_fixes_it_and_the_backbone_is_left_alone():
    network, batch = build("resnet18-small-stem")
    before = {name: t.clone() for name, t in network.state_dict().items()}
    u = directions_of(network, batch, 1)
    first, again, other = (TangentFeatures(network, u, features=50, random=2, seed=seed)(batch) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
    assert all(p.requires_grad for p in network.parameters())


def test_spans_the_tangent_space_when_the_sketch_is_whole():
    """With square S and R nothing is lost: a linear model on φ is the linearised network, one ψ a class."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    u = torch.randn(1, 2, dtype=torch.float64)
    features = TangentFeatures(network, u, features=16 + 10)
    found = features(x)[:, 2:].detach()
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    jacobian = vmap(jacrev(lambda p, s: functional_call(network, p, (s,)) @ u[0]), (None, 0))(parameters, x)
    whole = torch.cat([t.flatten(1) for t in jacobian.values()], 1)
    assert found.shape == whole.shape
    target = whole @ torch.randn(whole.shape[1], dtype=torch.float64)
    solution = torch.linalg.pinv(found, rtol=1e-12) @ target
    torch.testing.assert_close(found @ solution, target, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("features", [20, 100, 777, 5000])
def test_the_budget_is_shared(features):
    shapes = [(64, 27), (64, 576), (1, 3), (512, 4608), (10, 10)]
    sizes = share_budget(features, shapes)
    used = [o * k for o, k in sizes]
    assert all(
        1 <= o <= outputs and 1 <= k <= columns for (o, k), (outputs, columns) in zip(sizes, shapes, strict=True)
    )
    assert 0.75 * min(features, sum(o * k for o, k in shapes)) <= sum(used) <= features
    assert used[3] >= used[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n, u: TangentFeatures(n, u, features=2), "features is 2; at least one for each of 4"),
        (lambda n, u: TangentFeatures(n, u, share=0.0), "share is 0.0; it must lie above 0"),
        (lambda n, u: TangentFeatures(n, u, share=1.5), "share is 1.5"),
        (lambda n, u: TangentFeatures(n, u[0], features=50), r"directions have shape \(5,\)"),
        (lambda n, u: TangentFeatures(n, u, features=50, train="layer9"), "'layer9'"),
        (lambda n, u: TangentFeatures(n, torch.ones(1, 3), features=50)(torch.ones(1, 3, 8, 8).double()), "shape"),
    ],
)
def test_bad_arguments(make, message):
    network, batch = build("vgg")
    with pytest.raises(ValueError, match=message):
        make(network, directions_of(network, batch, 1))


def test_a_network_without_layers():
    with pytest.raises(ValueError, match="no linear or convolutional layer"):
        TangentFeatures(nn.LayerNorm(4), torch.ones(1, 4))


def test_frozen_and_random_features():
    network, batch = build("mlp")
    assert torch.equal(FrozenFeatures(network, 4)(batch), network(batch))
    features = FrozenFeatures(network, 4, random=6)
    assert torch.equal(features(batch), torch.relu(network(batch) @ features.weight.T))


def test_fourier_features_give_the_gaussian_kernel_of_unit_vectors():
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()
    options = {"random": 200_000, "bandwidth": 0.7}
    found = FrozenFeatures(nn.Flatten(), 3, **options)(x.float()).double()
    unit = x / x.norm(dim=1, keepdim=True)
    kernel = torch.exp(-0.5 * torch.cdist(unit, unit).square() / 0.7**2)
    assert torch.allclose(found @ found.T, kernel, atol=0.01)
    assert torch.allclose(FrozenFeatures(nn.Flatten(), 3, **options)(7 * x.float()).double(), found, atol=1e-5)
    assert not torch.allclose(FrozenFeatures(nn.Flatten(), 3, seed=1, **options)(x.float()).double(), found)


def test_batchnorm_is_folded():
    network, batch = build("resnet18-small-stem")
    features = TangentFeatures(network, directions_of(network, batch, 1), features=50)
    torch.testing.assert_close(features(batch)[:, :16], fold_batchnorm(network)(batch), rtol=1e-10, atol=1e-10)


class SequenceFirst(nn.Module):
    """Gives its layer tokens × samples, as many transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x):
        return torch.tanh(self.layer(x.transpose(0, 1))).mean(0)


def test_as_many_tokens_as_samples_are_no_samples():
    torch.manual_seed(0)
    network = SequenceFirst().double()
    for tokens in (2, 3, 8):
        x = torch.randn(12, tokens, 3, dtype=torch.float64)
        features = TangentFeatures(network, directions_of(network, x, 1), features=8)
        alone = torch.cat([features(x[i : i + 1]) for i in range(12)])
        torch.testing.assert_close(features(x), alone)


def test_a_weight_without_its_bias():
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.zeros(2, 4, dtype=torch.float64)
    features = TangentFeatures(network, directions_of(network, x, 1), features=4, train=["0.weight"])
    assert not features(x)[:, 2:].any(), "the gradient of a weight whose input is zero"
    assert TangentFeatures(network, directions_of(network, x, 1), features=4, train=["0"])(x)[:, 2:].any()


class ScaledView(nn.Module):
    """Flattens with `view`, and has a parameter that is in no layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale, self.out = nn.Conv2d(3, 4, 3), nn.Parameter(torch.randn(4, 1, 1)), nn.Linear(144, 2)

    def forward(self, x):
        h = torch.tanh(self.conv(x)) * self.scale
        return self.out(h.view(len(x), -1))


def test_a_parameter_in_no_layer_of_a_network_that_flattens_with_view():
    torch.manual_seed(0)
    network, x = ScaledView().double(), torch.randn(5, 3, 8, 8, dtype=torch.float64)
    features = TangentFeatures(network, directions_of(network, x, 2), features=60, train=["conv", "scale"])
    assert features.others == ["scale"]
    torch.testing.assert_close(features(x).detach(), brute_force(features, x), rtol=1e-9, atol=1e-9)
    found = per_sample_gradients(features.base, x, ["scale"], torch.ones(1, 5, 2, dtype=torch.float64))["scale"]
    each = [torch.autograd.grad(network(x[i : i + 1]).sum(), network.scale)[0] for i in range(5)]
    torch.testing.assert_close(found[0], torch.stack(each))
