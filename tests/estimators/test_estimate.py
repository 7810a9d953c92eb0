"""Estimators against the brute-force Gauss-Newton matrix, in float64, at ψ ≠ 0, plain and linearised, both losses."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlcft import Classifier, CrossEntropy, Linearized, ScaledMSE, estimate
from dlcft.blocks import Diagonal, InputGram, Kronecker
from dlcft.estimators import ESTIMATORS, Statistics, rows
from tests.networks import Encoder, Recurrent, Shared, ViT, images, tokens, vectors

LOSSES = {"mse": ScaledMSE(2.0), "cross-entropy": CrossEntropy()}
LAYERWISE = [name for name in ESTIMATORS if name not in ("dense", "mas")]


class Convolutions(nn.Module):
    """Stride, padding, dilation, groups, no bias, and in-place activations."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.strided = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2)
        self.dilated = nn.Conv2d(4, 2, (2, 3), dilation=(1, 2), padding=(0, 2))
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x):
        y = self.strided(self.act(self.stem(x)))
        y += x[:, :1, ::2, ::2]
        return self.act(self.dilated(torch.tanh(y))).mean((2, 3))


class Tokens(nn.Module):
    """A layer over positions, used twice."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = x.view(-1, 2, 3).repeat(1, 1, 2)
        return self.out(torch.tanh(self.mix(torch.tanh(self.mix(x))))).sum(1)


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


NETWORKS = {
    "mlp": (Mlp, vectors, 3),
    "convolutions": (Convolutions, lambda: images(6), 2),
    "tokens": (Tokens, vectors, 3),
    "shared": (Shared, vectors, 6),
    "vit": (ViT, images, 8),
    "encoder": (Encoder, tokens, 8),
    "lstm": (lambda: Recurrent(nn.LSTM), tokens, 3),
}


def build(name, linear=True, strict=False, outputs=3, seed=0):
    make, batch, features = NETWORKS[name]
    torch.manual_seed(seed)
    network = make().double().eval()
    model = Classifier(Linearized(network) if linear else network, features, strict=strict)
    model.add_head("h", outputs)
    with torch.no_grad():
        for p in model.params("h").values():
            p.add_(0.3 * torch.randn_like(p))
        if strict:
            model.fix_directions("h", torch.randn(outputs, features, dtype=torch.float64))
    return model, batch(), torch.tensor([0, 2, 1])


def gauss_newton(model, x, y, loss):
    """(1/N) Σ_n J_nᵀ (∂²ℓ/∂f²) J_n and its parameter slices, by jacrev through the whole classifier."""
    params = {n: p.detach() for n, p in model.params("h").items()}
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = jacrev(lambda p: functional_call(model, p, (x, "h")))(params)
    flat = torch.cat([jacobian[n].flatten(2) for n in params], 2)
    outputs = model(x, "h").detach()
    hessians = [torch.func.hessian(lambda f, n=n: loss.value(f[None], y[n : n + 1]))(outputs[n]) for n in range(len(y))]
    matrix = sum(j.T @ h @ j for j, h in zip(flat, hessians, strict=True)) / len(y)
    starts = torch.tensor([0] + [p.numel() for p in params.values()]).cumsum(0).tolist()
    return matrix, {n: slice(a, b) for n, a, b in zip(params, starts[:-1], starts[1:], strict=True)}


def block_of(matrix, slices, block, params):
    """The part of the brute-force matrix that a layer's block stands for: groups × (outputs × inputs)²."""
    index = {n: torch.arange(s.start, s.stop).view(params[n].shape) for n, s in slices.items()}
    positions = block.matrix(index)  # where each entry of D lies in the flat vector
    return [matrix[p.reshape(-1)][:, p.reshape(-1)].view(*p.shape, *p.shape) for p in positions]


def run(name, model, x, y, loss, **options):
    return estimate(name, model, [(x, y)], loss, "h", draws=None, **options)


def layer_blocks(estimate):
    return {n: b for n, b in estimate.curvature.blocks.items() if not isinstance(b, Diagonal)}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("network", NETWORKS)
def test_diagonal_is_the_diagonal(network, linear, loss):
    model, x, y = build(network, linear)
    found = run("diagonal", model, x, y, LOSSES[loss])
    matrix, slices = gauss_newton(model, x, y, LOSSES[loss])
    assert set(found.curvature.names) == set(slices)
    units = {n: torch.ones_like(p) for n, p in model.params("h").items()}
    diagonal = found.curvature.matvec(units)
    for name, where in slices.items():
        expected = matrix.diagonal()[where].view(diagonal[name].shape)
        assert torch.allclose(diagonal[name], expected, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("network", NETWORKS)
def test_exact_tk_holds_the_partial_traces(network, linear, loss):
    model, x, y = build(network, linear)
    found = run("exact-tk", model, x, y, LOSSES[loss])
    matrix, slices = gauss_newton(model, x, y, LOSSES[loss])
    params = model.params("h")
    kronecker = {n: b for n, b in layer_blocks(found).items() if isinstance(b, Kronecker)}
    assert kronecker or network in ("shared", "lstm") or loss == "mse"
    for name, block in kronecker.items():
        for group, true in enumerate(block_of(matrix, slices, block, params)):
            assert torch.allclose(block.left[group], torch.einsum("oipi->op", true), rtol=1e-9, atol=1e-12), name
            assert torch.allclose(block.right[group], torch.einsum("oioj->ij", true), rtol=1e-9, atol=1e-12), name
            assert torch.isclose(block.divisor[group], torch.einsum("oioi->", true))
    true_trace = sum(
        float(matrix[p.reshape(-1), p.reshape(-1)].sum())
        for b in kronecker.values()
        for p in b.matrix({n: torch.arange(s.start, s.stop).view(params[n].shape) for n, s in slices.items()})
    )
    assert sum(b.trace(0) for b in kronecker.values()) == pytest.approx(true_trace, rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["ekfac", "exact-ekfac"])
def test_ekfac_is_exact_on_the_diagonal_of_its_basis(name, loss):
    model, x, y = build("convolutions")
    found = run(name, model, x, y, LOSSES[loss])
    matrix, slices = gauss_newton(model, x, y, LOSSES[loss])
    for block in layer_blocks(found).values():
        if isinstance(block, InputGram):
            continue
        for g, true in enumerate(block_of(matrix, slices, block, model.params("h"))):
            u, v = block.left_vectors[g], block.right_vectors[g]
            assert torch.allclose(block.values[g], torch.einsum("ox,iy,oipj,px,jy->xy", u, v, true, u, v), atol=1e-10)


def test_kfac_is_exact_where_theory_says_so():
    loss = ScaledMSE()
    model, x, y = build("mlp")  # one sample, one position
    single = run("kfac", model, x[:1], y[:1], loss)
    matrix, slices = gauss_newton(model, x[:1], y[:1], loss)
    for block in layer_blocks(single).values():
        (true,) = block_of(matrix, slices, block, model.params("h"))
        if isinstance(block, Kronecker):
            assert torch.allclose(torch.einsum("op,ij->oipj", block.left[0], block.right[0]), true, atol=1e-10)

    torch.manual_seed(0)
    linear_net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)).double()
    model = Classifier(linear_net, 3)
    model.add_head("h", 3)
    nn.init.normal_(model.head("h").weight)
    found = run("kfac", model, x, y, loss)  # a deep linear network: input and gradient are independent
    matrix, slices = gauss_newton(model, x, y, loss)
    for block in layer_blocks(found).values():
        (true,) = block_of(matrix, slices, block, model.params("h"))
        left = block.left[0] if isinstance(block, Kronecker) else torch.eye(3, dtype=torch.float64)
        right = block.right[0] if isinstance(block, Kronecker) else block.gram[0]
        assert torch.allclose(torch.einsum("op,ij->oipj", left, right), true, atol=1e-9)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("network", ["mlp", "convolutions"])
def test_the_head_under_squared_loss_is_exact_and_never_sampled(network, strict):
    model, x, y = build(network, strict=strict)
    matrix, slices = gauss_newton(model, x, y, ScaledMSE())
    for name in ("kfac", "tkfac", "exact-tk", "ekfac"):
        found = estimate(name, model, [(x, y)], ScaledMSE(), "h", generator=torch.Generator().manual_seed(0))
        block = found.curvature.blocks["heads.h"]
        (true,) = block_of(matrix, slices, block, model.params("h"))
        identity = torch.eye(3, dtype=torch.float64)
        assert torch.allclose(torch.einsum("op,ij->oipj", identity, block.gram[0]), true, atol=1e-10)


def test_published_tkfac_keeps_the_trace_with_one_position_only():
    for network, kept in (("mlp", True), ("convolutions", False)):
        model, x, y = build(network)
        matrix, _ = gauss_newton(model, x, y, ScaledMSE())
        trace = float(matrix.trace())
        found = {n: run(n, model, x, y, ScaledMSE()).curvature.trace(model.params("h")) for n in ("tkfac", "exact-tk")}
        assert found["exact-tk"] == pytest.approx(trace, rel=1e-10)
        assert (found["tkfac"] == pytest.approx(trace, rel=1e-10)) is kept


@pytest.mark.parametrize("strict", [False, True])
def test_dense_is_gauss_newton_and_the_hessian_with_one_side_fixed(strict):
    model, x, y = build("convolutions", strict=strict)
    loss = ScaledMSE()
    dense = run("dense", model, x, y, loss).curvature.blocks["all"].values
    matrix, slices = gauss_newton(model, x, y, loss)
    assert torch.allclose(dense, matrix, atol=1e-10)
    params = {n: p.detach() for n, p in model.params("h").items()}
    backbone = [n for n in params if n.startswith("backbone")]
    for part in (backbone, [n for n in params if n not in backbone], list(params)):

        def value(free):
            return loss.value(functional_call(model, {**params, **free}, (x, "h")), y)

        free = {n: params[n] for n in part}
        nested = torch.func.jacrev(torch.func.jacrev(value))(free)
        hessian = torch.cat(
            [torch.cat([nested[a][b].flatten(params[a].dim()).flatten(0, -2) for b in part], 1) for a in part]
        )
        index = torch.cat([torch.arange(slices[n].start, slices[n].stop) for n in part])
        # with everything free the model is bilinear, unless it is strict: then Gauss-Newton is not the Hessian
        assert torch.allclose(dense[index][:, index], hessian, atol=1e-8) is (strict or part != list(params))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("network", ["convolutions", "tokens", "vit"])
def test_the_same_pass_gives_the_gradient(network, linear, loss):
    model, x, y = build(network, linear)
    found = run("kfac", model, x, y, LOSSES[loss], gradient=True)
    params = model.params("h")
    expected = torch.autograd.grad(LOSSES[loss].value(model(x, "h"), y), list(params.values()))
    assert set(found.gradient) == set(params)
    for (name, _), e in zip(params.items(), expected, strict=True):
        assert torch.allclose(found.gradient[name], e, atol=1e-10), name


def test_strict_gradient():
    model, x, y = build("mlp", strict=True)
    found = run("exact-tk", model, x, y, ScaledMSE(), gradient=True)
    params = model.params("h")
    for name, e in zip(params, torch.autograd.grad(ScaledMSE().value(model(x, "h"), y), params.values()), strict=True):
        assert torch.allclose(found.gradient[name], e, atol=1e-10)


def test_mas_is_the_mean_absolute_gradient():
    model, x, y = build("convolutions", linear=False)
    found = run("mas", model, x, y, CrossEntropy())
    params = {n: p.detach() for n, p in model.params("h").items()}
    expected = {n: torch.zeros_like(p) for n, p in params.items()}
    for sample in x:
        g = torch.func.grad(lambda p, s=sample: functional_call(model, p, (s[None], "h")).square().sum())(params)
        expected = {n: e + g[n].abs() / len(x) for n, e in expected.items()}
    for n, e in expected.items():
        assert torch.allclose(found.curvature.blocks[n].values, e, atol=1e-12), n


def statistics_of(found):
    return found.curvature.state()[0]


@pytest.mark.parametrize("name", LAYERWISE)
def test_independent_of_batches_and_order(name):
    model, x, y = build("convolutions")
    whole = run(name, model, x, y, CrossEntropy())
    order = torch.tensor([2, 0, 1])
    split = [(x[order][:1], y[order][:1]), (x[order][1:], y[order][1:]), (x[:0], y[:0])]
    parts = estimate(name, model, split, CrossEntropy(), "h", draws=None)
    assert parts.samples == 3
    d = {n: torch.randn_like(p) for n, p in model.params("h").items()}
    assert torch.isclose(parts.curvature.quad(d), whole.curvature.quad(d), rtol=1e-9)
    assert statistics_of(parts).keys() == statistics_of(whole).keys()


@pytest.mark.parametrize("name", ["diagonal", "kfac", "tkfac", "exact-tk"])
def test_merged_statistics_are_those_of_the_pooled_data(name):
    model, x, y = build("convolutions")
    one, two = (run(name, model, x[part], y[part], ScaledMSE()) for part in (slice(0, 1), slice(1, 3)))
    merged = one.curvature.merge(two.curvature, one.samples, two.samples)
    pooled = statistics_of(run(name, model, x, y, ScaledMSE()))
    for key, tensor in merged.state()[0].items():
        assert torch.allclose(tensor, pooled[key], atol=1e-10), key
    traces = [c.trace(model.params("h")) for c in (one.curvature, two.curvature, merged)]
    summed = traces[0] / 3 + 2 * traces[1] / 3
    assert (traces[2] == pytest.approx(summed, rel=1e-10)) is (name != "kfac")


@pytest.mark.parametrize("name", [*LAYERWISE, "dense"])
def test_growth_equals_units_that_were_there_with_zero_weights(name):
    model, x, y = build("convolutions", outputs=3)
    small = run(name, model, x, y, ScaledMSE()).curvature.grow(model.head_names("h"), 5)
    model.grow("h", 5)
    large = run(name, model, x, y, ScaledMSE()).curvature
    d = {n: torch.randn_like(p) for n, p in model.params("h").items()}
    assert torch.isclose(small.quad(d), large.quad(d), rtol=1e-10)
    matrix, slices = gauss_newton(model, x, y, ScaledMSE())
    head = torch.cat([torch.arange(slices[n].start, slices[n].stop) for n in model.head_names("h")])
    only = {n: torch.zeros_like(p) if n not in model.head_names("h") else p for n, p in d.items()}
    flat = torch.cat([d[n].reshape(-1) for n in model.head_names("h")])
    if name != "diagonal":
        assert torch.isclose(small.quad(only), flat @ matrix[head][:, head] @ flat)


@pytest.mark.parametrize("name", ["diagonal", "kfac", "exact-tk"])
def test_sampled_draws_estimate_the_exact_one(name):
    model, x, y = build("convolutions")
    exact = run(name, model, x, y, CrossEntropy())
    generator = torch.Generator().manual_seed(0)
    sampled = estimate(name, model, [(x, y)], CrossEntropy(), "h", draws=800, generator=generator)
    for key, tensor in statistics_of(sampled).items():
        scale = statistics_of(exact)[key].abs().max()
        assert torch.allclose(tensor, statistics_of(exact)[key], atol=0.1 * float(scale) + 1e-6), key


def test_the_seed_fixes_the_draws_and_samples_limits_the_data():
    model, x, y = build("convolutions")
    one, two, other = (
        estimate("kfac", model, [(x, y)], ScaledMSE(), "h", generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    )
    key = "backbone.delta.stem|left"
    assert torch.equal(statistics_of(one)[key], statistics_of(two)[key])
    assert not torch.equal(statistics_of(one)[key], statistics_of(other)[key])
    limited = estimate("kfac", model, [(x[:2], y[:2]), (x[2:], y[2:])], ScaledMSE(), "h", draws=None, samples=1)
    assert limited.samples == 1
    first = run("kfac", model, x[:1], y[:1], ScaledMSE())
    assert torch.allclose(statistics_of(limited)[key], statistics_of(first)[key])


def test_without_the_head_and_with_a_subset():
    model, x, y = build("convolutions")
    found = run("exact-tk", model, x, y, ScaledMSE(), include_head=False, gradient=True)
    assert all(n.startswith("backbone.delta.") for n in found.curvature.names)
    assert set(found.gradient) == set(model.params())
    network = copy.deepcopy(model.backbone.base)
    for chosen, names in (
        ("*.weight", {"stem.weight", "strided.weight", "dilated.weight"}),
        ("*.bias", {"strided.bias", "dilated.bias"}),
    ):
        part = Classifier(Linearized(network, train=chosen), 2)
        part.add_head("h", 3)
        nn.init.normal_(part.head("h").weight)
        found = run("exact-tk", part, x, y, ScaledMSE())
        assert set(found.curvature.names) == {f"backbone.delta.{n}" for n in names} | set(part.head_names("h"))
        matrix, slices = gauss_newton(part, x, y, ScaledMSE())
        for name in slices:
            d = {n: torch.ones_like(p) * (n == name) for n, p in part.params("h").items()}
            assert found.curvature.quad(d) > 0
        assert found.curvature.trace(part.params("h")) == pytest.approx(float(matrix.trace()), rel=1e-10)


def test_wide_layers_get_a_diagonal_and_a_log_line(caplog):
    model, x, y = build("mlp")
    with caplog.at_level("INFO", logger="dlcft"):
        found = run("kfac", model, x, y, ScaledMSE(), max_factor=5)
    assert "0 is wider than max_factor=5" in caplog.text
    assert isinstance(found.curvature.blocks["backbone.delta.0.weight"], Diagonal)
    assert isinstance(found.curvature.blocks["backbone.delta.2"], Kronecker)
    exact = run("diagonal", model, x, y, ScaledMSE())
    assert torch.allclose(
        found.curvature.blocks["backbone.delta.0.weight"].values,
        exact.curvature.blocks["backbone.delta.0.weight"].values,
    )


def test_attention_is_covered(caplog):
    model, x, y = build("vit")
    with caplog.at_level("INFO", logger="dlcft"):
        found = run("kfac", model, x, y, ScaledMSE())
    assert "attention.out_proj is not called as a module: diagonal curvature" in caplog.text
    kinds = {n: type(b).__name__ for n, b in found.curvature.blocks.items()}
    assert kinds["backbone.delta.attention.in_proj_weight"] == "Diagonal"
    assert kinds["backbone.delta.attention.out_proj.weight"] == "Diagonal"
    assert kinds["backbone.delta.token"] == kinds["backbone.delta.norm1.weight"] == "Diagonal"
    assert kinds["backbone.delta.mlp.0"] == kinds["backbone.delta.patch"] == "Kronecker"


def test_the_model_is_left_as_it_was():
    model, x, y = build("convolutions")
    model.train()
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    run("exact-tk", model, x, y, ScaledMSE(), gradient=True)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_half_precision_inputs():
    model, x, y = build("convolutions")
    single = copy.deepcopy(model).float()
    exact = run("exact-tk", single, x.float(), y, ScaledMSE())
    with torch.autocast("cpu", torch.bfloat16):
        rough = run("exact-tk", single, x.float(), y, ScaledMSE())
    assert all(t.dtype == torch.float32 for t in statistics_of(rough).values())
    d = {n: torch.randn_like(p) for n, p in single.params("h").items()}
    assert torch.isclose(rough.curvature.quad(d), exact.curvature.quad(d), rtol=0.1)


class Skipping(nn.Module):
    """A layer that runs for some batches only."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x)) if len(x) > 1 else self.first(x)


def test_bad_input():
    model, x, y = build("convolutions")
    loss = ScaledMSE()
    with pytest.raises(ValueError, match="the data set is empty"):
        estimate("kfac", model, [], loss, "h")
    with pytest.raises(ValueError, match="unknown curvature 'kfca'; known: diagonal"):
        estimate("kfca", model, [(x, y)], loss, "h")
    with pytest.raises(ValueError, match="no head 'g'; there are: h"):
        estimate("kfac", model, [(x, y)], loss, "g")
    with pytest.raises(ValueError, match=r"curvature of 'backbone\.delta\.\w+' is not finite"):
        estimate("kfac", model, [(x * float("nan"), y)], loss, "h")
    with pytest.raises(ValueError, match="samples is 0"):
        estimate("kfac", model, [(x, y)], loss, "h", samples=0)
    skipping = Classifier(Skipping().double(), 3)
    skipping.add_head("h", 3)
    v = vectors()
    with pytest.raises(
        ValueError, match="layer 'second' ran for an earlier batch, and not, or in another way, for this one"
    ):
        estimate("kfac", skipping, [(v, y), (v[:1], y[:1])], loss, "h")
    wide = Classifier(nn.Linear(6, 4000).double(), 4000)
    wide.add_head("h", 3)
    with pytest.raises(ValueError, match="dense curvature is for at most 20,000 parameters; these are 40,003"):
        estimate("dense", wide, [(v, y)], loss, "h")


class Largest(Statistics):
    """A third party's estimator: a multiple of the identity."""

    def add(self, inputs, grads):
        self._sum("most", sum(g.square().sum() for gs in grads for g in gs))

    def blocks(self, count):
        shapes = {n: p.shape for n, p in zip(self.names, self.layer.parameters(), strict=True)}
        return {n: Diagonal((n,), (self.sums["most"] / count).expand(s)) for n, s in shapes.items()}


def test_an_estimator_of_ones_own():
    model, x, y = build("mlp")
    found = run(Largest, model, x, y, ScaledMSE())
    assert set(found.curvature.names) == set(model.params("h"))


def test_several_inputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, left, right):
            return self.layer(left) * right[:, :3]

    torch.manual_seed(0)
    model = Classifier(Linearized(Pair().double()), 3)
    model.add_head("h", 3)
    nn.init.normal_(model.head("h").weight)
    v, y = vectors(), torch.tensor([0, 1, 2])
    by_position = run("diagonal", model, (v, v), y, ScaledMSE(), samples=2)
    by_name = run("diagonal", model, {"left": v, "right": v}, y, ScaledMSE(), samples=2)
    for key, tensor in statistics_of(by_position).items():
        assert torch.equal(tensor, statistics_of(by_name)[key])
    assert rows.log.name == "dlcft"
