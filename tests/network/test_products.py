"""Products by oneDNN against float64, and against torch's own where oneDNN is switched off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlcft import Linearized
from dlcft.network import products
from dlcft.network.forward_mode import without_mkldnn

SHAPES = [(600, 300, 200), (20_000, 24, 40), (128, 512, 640), (3, 4, 5), (1, 1, 1), (0, 3, 4), (7, 0, 2)]


def views(rows: int, columns: int) -> dict[str, Tensor]:
    """The same numbers in several layouts."""
    plain = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    wide, tall = torch.zeros(rows, columns + 3), torch.zeros(2 * rows, columns)
    wide[:, 1:-2], tall[::2] = plain, plain
    return {"plain": plain, "transposed": plain.T.contiguous().T, "slice": wide[:, 1:-2], "every other": tall[::2]}


def agree(found: Tensor, expected: Tensor, size: Tensor) -> None:
    """Equal to rounding, relative to the sum of the absolute terms."""
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert bool(((found - expected).abs() <= 1e-6 * size).all())


@pytest.mark.parametrize("layout", ["plain", "transposed", "slice", "every other"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("enabled", [True, False])
def test_products_equal_those_in_float64(shape: tuple[int, int, int], layout: str, enabled: bool) -> None:
    rows, m, n = shape
    a, b = views(rows, m)[layout], views(rows, n)[layout]
    expected, size = a.double().T @ b.double(), a.double().abs().T @ b.double().abs()
    pairs: list[Callable[[], Tensor]] = [
        lambda: products.transposed_times(a, b),
        lambda: products.times_transposed(a.T, b.T),
        lambda: products.times_transposed(a.T.contiguous(), b.T),
        lambda: products.times_transposed(a.T.contiguous(), b.T.contiguous()),
    ]
    for product in pairs:
        if enabled:
            found = product()
            assert torch.equal(found, product())
        else:
            with without_mkldnn():
                assert not products.by_onednn(a, b)
                found = product()
        agree(found, expected, size)


def test_symmetric_products_are_symmetric_to_rounding() -> None:
    a = views(3000, 200)["plain"]
    found = products.transposed_times(a, a)
    agree(found, found.T.double(), a.abs().T @ a.abs())


def test_other_dtypes_and_gradients_are_left_to_torch() -> None:
    a = torch.randn(600, 300, requires_grad=True)
    products.transposed_times(a, a).sum().backward()
    assert a.grad is not None
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(600, 300).to(dtype)
        assert torch.equal(products.transposed_times(x, x), x.T @ x)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Whoever records operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_recorded_and_transformed_tensors_go_to_torch() -> None:
    a = torch.randn(3, 300, 400)
    assert products.by_onednn(a)
    with Seen():
        assert not products.by_onednn(a)
    found = torch.func.vmap(lambda one: products.times_transposed(one, a[0]))(a)
    torch.testing.assert_close(found, a @ a[0].T)


@pytest.mark.parametrize("size", [(1, 16, 9, 9), (5, 16, 8, 7), (2, 16, 1, 1)])
def test_a_convolution_is_added_in_place(size: tuple[int, ...]) -> None:
    """Outputs and gradients of a linearised network, with oneDNN's sum and with torch's own."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.LeakyReLU(0.1), torch.nn.Conv2d(32, 24, 1, groups=2)
    )
    linear = Linearized(network)
    x = torch.randn(size).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for p in linear.delta.parameters():
            p.normal_()

    def outputs_and_gradients(model: Linearized, x: Tensor) -> list[Tensor]:
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.delta.parameters() if p.grad is not None)]

    found = outputs_and_gradients(linear, x)
    with without_mkldnn():
        plain = outputs_and_gradients(linear, x)
    expected = outputs_and_gradients(linear.double(), x.double())
    for one, other, exact in zip(found, plain, expected, strict=True):
        torch.testing.assert_close(one, exact.float(), rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
        torch.testing.assert_close(other, exact.float(), rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
