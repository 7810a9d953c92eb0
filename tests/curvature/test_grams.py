"""Every sum in `grams` against autograd, one sample and one position at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from dlcft.curvature import grams

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

SAMPLES = 3
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}

# Name -> (layer factory, shapes of the inputs at each use without the batch axis).
LAYERS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "linear": (lambda: nn.Linear(5, 4), [(5,)]),
    "linear-no-bias": (lambda: nn.Linear(5, 4, bias=False), [(5,)]),
    "linear-tokens": (lambda: nn.Linear(5, 4), [(3, 2, 5)]),
    "linear-many-tokens": (lambda: nn.Linear(5, 2), [(9, 5)]),
    "linear-twice": (lambda: nn.Linear(5, 4), [(5,), (2, 5)]),
    "conv1d": (lambda: nn.Conv1d(3, 4, 4, stride=2, padding=1), [(3, 9)]),
    "conv3d": (lambda: nn.Conv3d(2, 3, (2, 3, 1), padding=(1, 1, 0)), [(2, 3, 4, 2)]),
    "conv3d-same": (lambda: nn.Conv3d(2, 3, 3, padding="same", bias=False), [(2, 2, 3, 2)]),
    "3x3": (lambda: nn.Conv2d(3, 4, 3, padding=1, bias=False), [(3, 5, 4)]),
    "3x3-bias": (lambda: nn.Conv2d(3, 4, 3, padding=1), [(3, 4, 4)]),
    "3x3-many-outputs": (lambda: nn.Conv2d(2, 40, 3, padding=1), [(2, 3, 3)]),
    "3x3-few-outputs": (lambda: nn.Conv2d(3, 2, 3, padding=1), [(3, 6, 7)]),
    "3x3-one-pixel": (lambda: nn.Conv2d(3, 4, 3, padding=1), [(3, 1, 1)]),
    "3x3-one-row": (lambda: nn.Conv2d(3, 4, 3, padding=1, bias=False), [(3, 1, 5)]),
    "3x3-two-by-two": (lambda: nn.Conv2d(3, 4, 3, padding=1, bias=False), [(3, 2, 2)]),
    "3x3-same": (lambda: nn.Conv2d(3, 4, 3, padding="same"), [(3, 4, 5)]),
    "3x3-valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid"), [(3, 4, 5)]),
    "3x3-stride": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), [(3, 6, 5)]),
    "3x3-dilation": (lambda: nn.Conv2d(3, 4, 3, padding=2, dilation=2), [(3, 5, 4)]),
    "3x3-stride-dilation": (lambda: nn.Conv2d(2, 3, 3, (1, 2), (2, 1), (2, 1)), [(2, 6, 5)]),
    "3x3-wide-padding": (lambda: nn.Conv2d(2, 3, 3, padding=3), [(2, 2, 3)]),
    "3x3-reflect": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), [(3, 4, 4)]),
    "3x3-circular-groups": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2, padding_mode="circular"),
        [(4, 3, 4)],
    ),
    "same-even-replicate": (
        lambda: nn.Conv2d(2, 3, (2, 4), padding="same", padding_mode="replicate"),
        [(2, 4, 5)],
    ),
    "1x1": (lambda: nn.Conv2d(3, 4, 1, bias=False), [(3, 4, 3)]),
    "1x1-stride": (lambda: nn.Conv2d(3, 4, 1, stride=2), [(3, 5, 4)]),
    "7x7-stride": (lambda: nn.Conv2d(2, 3, 7, stride=2, padding=3, bias=False), [(2, 9, 8)]),
    "even": (lambda: nn.Conv2d(2, 3, 2, stride=2), [(2, 4, 6)]),
    "even-same": (lambda: nn.Conv2d(2, 3, 4, padding="same"), [(2, 5, 4)]),
    "rectangular": (lambda: nn.Conv2d(2, 3, (1, 3), padding=(0, 1)), [(2, 3, 6)]),
    "reach-beyond-image": (lambda: nn.Conv2d(2, 3, 5, padding=2, dilation=1), [(2, 2, 3)]),
    "groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), [(4, 4, 3)]),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), [(4, 4, 4)]),
    "depthwise-multiplier": (lambda: nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3), [(3, 5, 5)]),
    "3x3-twice": (lambda: nn.Conv2d(3, 4, 3, padding=1), [(3, 3, 3), (3, 4, 2)]),
    "groups-twice": (lambda: nn.Conv2d(4, 4, 2, groups=2, bias=False), [(4, 3, 3), (4, 3, 3)]),
}


@dataclass
class Case:
    """A layer, its inputs and output gradients, and its rows by brute force."""

    layer: nn.Module
    xs: list[Tensor]
    gs: list[Tensor]
    a: Tensor  # (N, groups, S, K)
    g: Tensor  # (N, groups, S, O)

    @property
    def d(self) -> Tensor:
        return torch.einsum("nqso,nqsk->nqok", self.g, self.a)


def parameter_matrix(layer: nn.Module, gradients: tuple[Tensor, ...]) -> Tensor:
    groups = getattr(layer, "groups", 1)
    matrix = gradients[0].flatten(1).unflatten(0, (groups, -1))
    if len(gradients) == 2:
        matrix = torch.cat([matrix, gradients[1].view(groups, -1, 1)], -1)
    return matrix


def positions_first(layer: nn.Module, output: Tensor) -> Tensor:
    """Return one sample's output as (S, channels)."""
    if isinstance(layer, nn.Linear):
        return output.reshape(-1, output.shape[-1])
    return output.flatten(1).T


def brute_force_patches(layer: nn.Module, x: Tensor) -> Tensor:
    """Return one sample's patches (groups, S, K): gradients of single output positions."""
    groups = getattr(layer, "groups", 1)
    output = positions_first(layer, layer(x[None])[0])
    first = output.unflatten(1, (groups, -1))[:, :, 0].sum(1)
    parameters = list(layer.parameters())
    rows = [parameter_matrix(layer, torch.autograd.grad(value, parameters, retain_graph=True))[:, 0] for value in first]
    return torch.stack(rows, 1)


@cache
def make_case(name: str, samples: int = SAMPLES) -> Case:
    torch.manual_seed(sum(map(ord, name)))
    factory, shapes = LAYERS[name]
    layer = factory().double()
    groups = getattr(layer, "groups", 1)
    xs = [torch.randn(samples, *shape, dtype=torch.float64) for shape in shapes]
    gs = [torch.randn_like(layer(x)) for x in xs]
    a = torch.stack([torch.cat([brute_force_patches(layer, x[n]) for x in xs], 1) for n in range(samples)])
    flat = [torch.cat([positions_first(layer, g[n]) for g in gs]) for n in range(samples)]
    g = torch.stack(flat).unflatten(2, (groups, -1)).transpose(1, 2)
    return Case(layer, xs, gs, a.detach(), g.detach())


@pytest.fixture(params=list(LAYERS))
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@pytest.fixture(params=["whole", "chunked", "unfolded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "chunked":
        monkeypatch.setattr(grams, "CHUNK_FLOATS", 1)
        monkeypatch.setattr(grams, "SYMMETRIC_WIDTH", 4)
    if request.param == "unfolded":
        monkeypatch.setattr(grams, "SPECTRUM_FLOATS", 0)
    return str(request.param)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def input_gram(layer: nn.Module, xs: list[Tensor], weights: Tensor | None = None) -> Tensor:
    gram = grams.InputGram(layer)
    gram.add(xs, weights)
    return gram.result()


def gradient_grams(layer: nn.Module, xs: list[Tensor], gs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    sums = grams.GradientGrams(layer)
    sums.add(xs, gs)
    return sums.result()


@pytest.mark.parametrize("weighted", [False, True])
def test_grams(case: Case, way: str, weighted: bool) -> None:
    shape = case.a.shape[:2]
    weights = torch.randn(shape, dtype=torch.float64) if weighted else None
    w = torch.ones(shape, dtype=torch.float64) if weights is None else weights
    positions = case.g.shape[2]
    assert_near(input_gram(case.layer, case.xs, weights), torch.einsum("nq,nqsk,nqsl->qkl", w, case.a, case.a))
    expected = torch.einsum("nq,nqso,nqsp->qop", w, case.g, case.g) / positions
    assert_near(grams.output_gram(case.layer, case.gs, weights), expected)


def test_traces(case: Case, way: str) -> None:
    assert_near(grams.input_traces(case.layer, case.xs), case.a.square().sum((2, 3)))
    assert_near(grams.output_traces(case.layer, case.gs), case.g.square().sum(3).mean(2))


def test_per_sample_gradients_are_autograds(case: Case) -> None:
    actual = grams.per_sample_gradients(case.layer, case.xs, case.gs)
    parameters = list(case.layer.parameters())
    for n in range(SAMPLES):
        pairs = zip(case.xs, case.gs, strict=True)
        loss = sum((case.layer(x[n : n + 1]) * g[n]).sum() for x, g in pairs)
        assert_near(actual[n], parameter_matrix(case.layer, torch.autograd.grad(loss, parameters)))


def test_gradient_grams(case: Case, way: str) -> None:
    phi, psi, delta = gradient_grams(case.layer, case.xs, case.gs)
    assert_near(phi, torch.einsum("nqok,nqol->qkl", case.d, case.d))
    assert_near(psi, torch.einsum("nqok,nqpk->qop", case.d, case.d))
    assert_near(delta, case.d.square().sum((0, 2, 3)))


def test_squared_gradient(case: Case, way: str) -> None:
    assert_near(grams.squared_gradient(case.layer, case.xs, case.gs), case.d.square().sum(0))


def test_gradient_norms(case: Case, way: str) -> None:
    assert_near(grams.gradient_norms(case.layer, case.xs, case.gs), case.d.square().sum((2, 3)))


def test_rotated_squares(case: Case, way: str) -> None:
    groups, outputs, columns = case.d.shape[1:]
    left = torch.linalg.qr(torch.randn(groups, outputs, outputs, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(groups, columns, columns, dtype=torch.float64)).Q
    expected = (left.mT @ case.d @ right).square().sum(0)
    assert_near(grams.rotated_squares(case.layer, case.xs, case.gs, left, right), expected)


@pytest.mark.parametrize("name", ["linear", "linear-tokens", "3x3-bias", "3x3-stride", "depthwise"])
def test_batch_of_one(name: str) -> None:
    case = make_case(name, samples=1)
    assert_near(input_gram(case.layer, case.xs), torch.einsum("nqsk,nqsl->qkl", case.a, case.a))
    assert_near(gradient_grams(case.layer, case.xs, case.gs)[0], torch.einsum("nqok,nqol->qkl", case.d, case.d))


@pytest.mark.parametrize("name", ["3x3", "3x3-bias", "groups", "linear-tokens"])
def test_batches_add_up(name: str) -> None:
    case = make_case(name)
    whole = gradient_grams(case.layer, case.xs, case.gs)
    parts = [
        gradient_grams(case.layer, [x[part] for x in case.xs], [g[part] for g in case.gs])
        for part in (slice(0, 1), slice(1, None))
    ]
    for expected, first, second in zip(whole, *parts, strict=True):
        assert_near(first + second, expected)


@pytest.mark.parametrize("name", ["3x3-twice", "3x3-stride", "1x1", "groups", "linear"])
def test_running_sums_equal_the_sum_of_batches(name: str) -> None:
    case = make_case(name)
    inputs, gradients = grams.InputGram(case.layer), grams.GradientGrams(case.layer)
    inputs.add(case.xs)
    gradients.add(case.xs, case.gs)
    first, first_phi = inputs.result(), gradients.result()[0]
    kept, kept_phi = first.clone(), first_phi.clone()
    inputs.add([2 * x for x in case.xs])
    gradients.add([2 * x for x in case.xs], case.gs)
    other = input_gram(case.layer, [2 * x for x in case.xs])
    assert_near(inputs.result(), kept + other)
    expected = gradient_grams(case.layer, [2 * x for x in case.xs], case.gs)
    assert_near(gradients.result()[0], kept_phi + expected[0])
    # A result already handed out must not change when more is added.
    assert_near(first, kept)
    assert_near(first_phi, kept_phi)


@pytest.mark.parametrize(("channels", "outputs", "size"), [(40, 24, 9), (70, 300, 3), (150, 8, 5)])
def test_float32_and_memory_formats_agree_with_float64(channels: int, outputs: int, size: int) -> None:
    """Widths above SYMMETRIC_WIDTH and both ways of contracting, in channels_last memory format."""
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
    x = torch.randn(4, channels, size, size).relu().contiguous(memory_format=torch.channels_last)
    g = torch.randn(4, outputs, size, size).contiguous(memory_format=torch.channels_last)
    a = nn.functional.unfold(x.double(), 3, padding=1).mT[:, None]
    rows = g.double().flatten(2).mT[:, None]
    d = torch.einsum("nqso,nqsk->nqok", rows, a)
    phi, psi, delta = gradient_grams(layer, [x], [g])
    expected = {
        "input_gram": (input_gram(layer, [x]), torch.einsum("nqsk,nqsl->qkl", a, a)),
        "phi": (phi, torch.einsum("nqok,nqol->qkl", d, d)),
        "psi": (psi, torch.einsum("nqok,nqpk->qop", d, d)),
        "delta": (delta, d.square().sum((0, 2, 3))),
    }
    for name, (actual, reference) in expected.items():
        assert actual.dtype == torch.float32, name
        error = (actual.double() - reference).norm() / reference.norm()
        assert error < 2e-6, (name, float(error))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["linear-tokens", "3x3-bias", "3x3-reflect"])
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    case = make_case(name)
    xs, gs = [x.to(dtype) for x in case.xs], [g.to(dtype) for g in case.gs]
    full_xs, full_gs = [x.double() for x in xs], [g.double() for g in gs]
    calls: list[Callable[[list[Tensor], list[Tensor]], Tensor]] = [
        lambda a, b: input_gram(case.layer, a),
        lambda a, b: grams.output_gram(case.layer, b),
        lambda a, b: grams.input_traces(case.layer, a),
        lambda a, b: gradient_grams(case.layer, a, b)[0],
        lambda a, b: grams.squared_gradient(case.layer, a, b),
    ]
    for call in calls:
        actual = call(xs, gs)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), call(full_xs, full_gs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(3)])
def test_other_layers_are_refused(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=type(layer).__name__):
        input_gram(layer, [torch.randn(2, 3, 4, 4)])


def test_mismatched_inputs_are_refused() -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="received 2 for 1 inputs"):
        gradient_grams(layer, [torch.randn(4, 3)], [torch.randn(4, 2)] * 2)
    with pytest.raises(ValueError, match="implies"):
        gradient_grams(layer, [torch.randn(4, 3)], [torch.randn(5, 2)])
