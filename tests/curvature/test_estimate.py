"""Estimators against the brute-force Gauss-Newton matrix, in float64, at ψ ≠ 0, plain and linearised, both losses."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from dlcft import Classifier, CrossEntropy, ScaledMSE, estimate
from dlcft.curvature.blocks import InputGram, Kronecker, TraceKronecker
from tests.support.brute_force import LOSSES, NETWORKS, block_of, build, gauss_newton, layer_blocks, run


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


def test_tkfac_of_each_sample_keeps_the_trace_with_one_position_only():
    for network, kept in (("mlp", True), ("convolutions", False)):
        model, x, y = build(network)
        matrix, _ = gauss_newton(model, x, y, ScaledMSE())
        trace = float(matrix.trace())
        names = ("tkfac-per-sample", "tkfac", "exact-tk")
        found = {n: run(n, model, x, y, ScaledMSE()).curvature.trace(model.params("h")) for n in names}
        assert found["exact-tk"] == pytest.approx(trace, rel=1e-10)
        assert found["tkfac"] == pytest.approx(trace, rel=1e-10)
        assert (found["tkfac-per-sample"] == pytest.approx(trace, rel=1e-10)) is kept


@pytest.mark.parametrize("network", ["mlp", "convolutions"])
@pytest.mark.parametrize("loss", [ScaledMSE(), CrossEntropy()])
def test_tkfac_is_kfac_scaled_to_the_exact_trace(network, loss):
    model, x, y = build(network)
    matrix, slices = gauss_newton(model, x, y, loss)
    kfac, scaled = (run(name, model, x, y, loss).curvature for name in ("kfac", "tkfac"))
    params = model.params("h")
    delta = {name: torch.randn_like(p) for name, p in params.items()}
    for name, block in scaled.blocks.items():
        if not isinstance(block, TraceKronecker):
            continue
        trace = sum(float(matrix[slices[n], slices[n]].trace()) for n in block.names)
        outputs = len(params[block.names[0]])
        assert block.trace(outputs) == pytest.approx(trace, rel=1e-9)
        if block.groups > 1:  # each group is scaled to its own trace
            continue
        factor = trace / kfac.blocks[name].trace(outputs)
        for n, product in kfac.blocks[name].matvec(delta).items():
            torch.testing.assert_close(block.matvec(delta)[n], factor * product)
    assert any(isinstance(block, TraceKronecker) for block in scaled.blocks.values())


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
