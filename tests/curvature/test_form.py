"""Every kind of block passes one contract, against the dense matrix it stands for, in float64."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcft.curvature.blocks import BLOCKS, Dense, Diagonal, EigenKronecker, InputGram, Kronecker, TraceKronecker
from dlcft.curvature.form import Curvature
from tests.support.brute_force import dense

GROUPS, OUTPUTS, INPUTS = 2, 3, 4  # per group; the weight is 6 × 4 × 1, the bias 6


def psd(*shape, seed=0, dtype=torch.float64):
    root = torch.randn(*shape, shape[-1] + 1, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return root @ root.mT


def params(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(GROUPS * OUTPUTS, INPUTS, 1, generator=generator, dtype=dtype),
        "b": torch.randn(GROUPS * OUTPUTS, generator=generator, dtype=dtype),
    }


def make(kind, seed=0, dtype=torch.float64):
    """A curvature of one kind on both parameters."""
    names, k = ("w", "b"), INPUTS + 1
    left, right = psd(GROUPS, OUTPUTS, seed=seed, dtype=dtype), psd(GROUPS, k, seed=seed + 100, dtype=dtype)
    if kind == "Diagonal":
        return Curvature({n: Diagonal((n,), p.square()) for n, p in params(seed, dtype).items()})
    if kind == "Kronecker":
        return Curvature({"l": Kronecker(names, GROUPS, left, right, torch.rand(GROUPS, dtype=dtype) + 0.5)})
    if kind == "TraceKronecker":
        return Curvature({"l": TraceKronecker(names, GROUPS, left, right, torch.rand(GROUPS, dtype=dtype) + 0.5)})
    if kind == "EigenKronecker":
        vectors = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
        values = torch.rand(GROUPS, OUTPUTS, k, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        return Curvature({"l": EigenKronecker(names, GROUPS, left, right, *vectors, values)})
    if kind == "InputGram":
        return Curvature({"l": InputGram(names, GROUPS, right)})
    shapes = tuple(tuple(p.shape) for p in params().values())
    return Curvature({"all": Dense(names, shapes, True, psd(30, seed=seed, dtype=dtype))})


def cast(curvature, dtype):
    tensors, header = curvature.state()
    return Curvature.from_state({name: t.to(dtype) for name, t in tensors.items()}, header)


def flat(tensors):
    return torch.cat([tensors[n].reshape(-1) for n in ("w", "b")])


def written_out(kind, curvature):
    """The dense matrix, from the definition, in the order of flat()."""
    block = next(iter(curvature.blocks.values()))
    if kind == "Dense":
        return block.values
    if kind == "Diagonal":
        return torch.diag(torch.cat([b.values.reshape(-1) for b in curvature.blocks.values()]))
    matrix = torch.zeros(GROUPS, OUTPUTS, INPUTS + 1, GROUPS, OUTPUTS, INPUTS + 1, dtype=torch.float64)
    for g in range(GROUPS):
        if kind == "Kronecker":
            part = torch.einsum("op,ij->oipj", block.left[g], block.right[g]) / block.divisor[g]
        elif kind == "TraceKronecker":
            scale = block.exact[g] / (block.left[g].trace() * block.right[g].trace())
            part = scale * torch.einsum("op,ij->oipj", block.left[g], block.right[g])
        elif kind == "InputGram":
            part = torch.einsum("op,ij->oipj", torch.eye(OUTPUTS, dtype=torch.float64), block.gram[g])
        else:
            u, v = block.left_vectors[g], block.right_vectors[g]
            part = torch.einsum("ox,iy,xy,px,jy->oipj", u, v, block.values[g], u, v)
        matrix[g, :, :, g] = part
    index = torch.arange(30).view(GROUPS * OUTPUTS, INPUTS + 1)
    order = torch.cat([index[:, :-1].reshape(-1), index[:, -1]])
    return matrix.view(30, 30)[order][:, order]


KINDS = list(BLOCKS)


@pytest.mark.parametrize("kind", KINDS)
def test_contract(kind):
    curvature, delta = make(kind), params(3)
    matrix, d = written_out(kind, curvature), flat(params(3))
    assert torch.allclose(dense(curvature, delta), matrix, atol=1e-12)
    assert torch.allclose(flat(curvature.matvec(delta)), matrix @ d, atol=1e-10)
    assert torch.isclose(curvature.quad(delta), d @ matrix @ d)
    assert curvature.trace(delta) == pytest.approx(float(matrix.trace()), rel=1e-12)
    damped = matrix + 0.3 * matrix.trace() / 30 * torch.eye(30, dtype=torch.float64)
    assert torch.allclose(flat(curvature.solve(delta, 0.3)), torch.linalg.solve(damped, d), atol=1e-8)
    assert torch.linalg.eigvalsh(matrix).min() > -1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_share_one_product(kind, monkeypatch):
    curvature = make(kind)
    calls = []
    original = Curvature.matvec
    monkeypatch.setattr(Curvature, "matvec", lambda self, delta: calls.append(1) or original(self, delta))
    delta = {n: p.requires_grad_() for n, p in params(3).items()}
    curvature.quad(delta).backward()
    assert len(calls) == 1
    d = flat(params(3))
    assert torch.allclose(flat({n: p.grad for n, p in delta.items()}), 2 * written_out(kind, curvature) @ d, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind):
    curvature = make(kind)

    def quad(w, b):
        return curvature.quad({"w": w, "b": b})

    inputs = tuple(p.requires_grad_() for p in params(3).values())
    assert torch.autograd.gradcheck(quad, inputs)
    assert torch.autograd.gradgradcheck(quad, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_state_and_size(kind):
    curvature, delta = make(kind), params(3)
    tensors, header = curvature.state()
    again = Curvature.from_state(tensors, json.loads(json.dumps(header)))
    assert torch.equal(again.quad(delta), curvature.quad(delta))
    single = cast(curvature, torch.float32)
    assert all(t.dtype == torch.float32 for t in single.state()[0].values())
    assert single.nbytes() * 2 == curvature.nbytes()
    rounded = {n: p.float() for n, p in delta.items()}
    assert torch.isclose(single.quad(rounded).double(), curvature.quad(delta), rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_merge_averages_statistics(kind):
    one, other = make(kind, 0), make(kind, 1)
    merged = one.merge(other, 3, 1)
    if kind != "EigenKronecker":
        mine, theirs = one.state()[0], other.state()[0]
        for name, tensor in merged.state()[0].items():
            assert torch.allclose(tensor, 0.75 * mine[name] + 0.25 * theirs[name])
    assert torch.linalg.eigvalsh(dense(merged, params())).min() > -1e-9
    same = one.merge(one, 5, 2)
    assert torch.allclose(dense(same, params()), dense(one, params()), atol=1e-10)


def test_traces_after_a_merge():
    """EK-FAC and TK (with divisor = trace) keep the sum of the traces; K-FAC does not."""

    def with_trace(seed, tk):
        left, right = psd(1, OUTPUTS, seed=seed), psd(1, INPUTS, seed=seed + 50)
        if tk:  # partial traces of a matrix share its trace
            right = right / right.diagonal(dim1=1, dim2=2).sum() * left.diagonal(dim1=1, dim2=2).sum()
        divisor = left.diagonal(dim1=1, dim2=2).sum(1) if tk else torch.ones(1, dtype=torch.float64)
        return Curvature({"l": Kronecker(("w",), 1, left, right, divisor)})

    shapes = {"w": torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)}
    for tk in (True, False):
        one, other = with_trace(0, tk), with_trace(1, tk)
        pooled = 0.75 * one.trace(shapes) + 0.25 * other.trace(shapes)
        assert (abs(one.merge(other, 3, 1).trace(shapes) / pooled - 1) < 1e-12) is tk
    one, other = make("EigenKronecker", 0), make("EigenKronecker", 1)
    pooled = 0.75 * one.trace(params()) + 0.25 * other.trace(params())
    assert one.merge(other, 3, 1).trace(params()) == pytest.approx(pooled)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "Dense"])
def test_growing_one_group(kind):
    """Old rows keep their curvature; new ones get none, but that of the others under squared loss."""
    generator = torch.Generator().manual_seed(0)
    small = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in (("w", (3, 4)), ("b", (3,)))}
    left, right = psd(1, 3), psd(1, 5, seed=9)
    vectors = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
    names = ("w", "b")
    blocks = {
        "Diagonal": {n: Diagonal((n,), p.square()) for n, p in small.items()},
        "Kronecker": {"l": Kronecker(names, 1, left, right, torch.ones(1, dtype=torch.float64))},
        "TraceKronecker": {"l": TraceKronecker(names, 1, left, right, torch.ones(1, dtype=torch.float64))},
        "EigenKronecker": {
            "l": EigenKronecker(names, 1, left, right, *vectors, torch.rand(1, 3, 5, dtype=torch.float64))
        },
        "InputGram": {"l": InputGram(names, 1, right)},
    }[kind]
    curvature = Curvature(blocks)
    grown = curvature.grow(names, 5)
    large = {n: torch.cat([p, p.new_zeros(2, *p.shape[1:])]) for n, p in small.items()}
    assert torch.isclose(grown.quad(large), curvature.quad(small))
    new = {n: torch.cat([torch.zeros_like(p), p[:2] + 1]) for n, p in small.items()}
    expected = curvature.quad({n: torch.cat([p[:2] + 1, p.new_zeros(1, *p.shape[1:])]) for n, p in small.items()})
    assert torch.isclose(grown.quad(new), expected if kind == "InputGram" else torch.zeros((), dtype=torch.float64))
    if kind == "InputGram":
        assert grown.blocks["l"] is curvature.blocks["l"]
    with pytest.raises(ValueError, match="cannot shrink from 3 to 2"):
        Curvature({"d": Diagonal(("w",), small["w"])}).grow(("w",), 2)


@pytest.mark.parametrize("kind", ["Kronecker", "EigenKronecker", "InputGram", "Diagonal"])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0.001, 0.999))
def test_single_precision_stays_positive_after_a_thousand_merges(kind, seed, share):
    curvature = make(kind, seed, torch.float32)
    for step in range(1000):
        curvature = curvature.merge(make(kind, seed + step % 7, torch.float32), 1 - share, share)
        if kind == "EigenKronecker" and step == 200:  # an eigendecomposition a merge
            break
    values = torch.linalg.eigvalsh(dense(cast(curvature, torch.float64), params()))
    assert values.min() >= -1e-6 * values.max()
    assert torch.isfinite(values).all()


def test_wrong_arguments():
    curvature = make("Kronecker")
    with pytest.raises(ValueError, match="covers 'b', which was not given"):
        curvature.quad({"w": params()["w"]})
    with pytest.raises(ValueError, match="damping is 0; it must be positive"):
        curvature.solve(params(), 0)
    with pytest.raises(ValueError, match="weights are 1 and 0; both must be positive"):
        curvature.merge(curvature, 1, 0)
    with pytest.raises(ValueError, match="cannot merge a InputGram block"):
        curvature.merge(make("InputGram"), 1, 1)
    with pytest.raises(ValueError, match="only one of them has"):
        curvature.merge(make("Dense"), 1, 1)
    with pytest.raises(ValueError, match="cannot merge blocks of different sizes"):
        curvature.merge(Curvature({"l": replace(curvature.blocks["l"], divisor=torch.ones(1))}), 1, 1)
    with pytest.raises(ValueError, match="a parameter stands in two blocks"):
        Curvature({"a": Diagonal(("w",), torch.ones(1)), "b": Diagonal(("w",), torch.ones(1))})
    with pytest.raises(ValueError, match="unknown kind of block 'Magic'"):
        Curvature.from_state({}, {"l": {"kind": "Magic", "names": ["w"]}})


def test_a_layer_without_gradient_has_no_curvature():
    zero = torch.zeros(1, 3, 3)
    block = Kronecker(("w",), 1, zero, torch.zeros(1, 4, 4), torch.zeros(1))
    assert Curvature({"l": block}).quad({"w": torch.ones(3, 4)}) == 0
