"""Ways to compute a convolution's value and change, layer by layer of ResNet-18 at 32×32.

    python benchmarks/fusions.py           # full width, batches of 1, 32 and 128, and quarter width: two minutes
    python benchmarks/fusions.py --quick   # quarter width, batch 32

A layer has its input x, its weight W, and their changes Δx and ΔW; wanted are `W∗x` and `W∗Δx + ΔW∗x`. Three products
share factors, two by two. The ways differ in what is stacked, and in whether the sum is formed in place:

- apart: three convolutions and a sum
- in place: the third convolution is added to the second, which is the way of `Linearized`
- packed: the same, with W in oneDNN's own layout from before
- batches: x and Δx are one batch (they lie one behind the other already), so that W is used once
- outputs: W and ΔW are one weight with twice the outputs
- inputs: the change is one convolution with twice the inputs
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from measure import Program, Spread, arguments, reported, timed
from torch import Tensor

WAYS = ("apart", "in place", "packed", "batches", "outputs", "inputs")
LAST = torch.channels_last
mkldnn = torch.ops.mkldnn


def layers(width: int) -> dict[str, tuple[int, int, int, int, int]]:
    """Input and output channels, image size, stride, and how many of the network's 3×3 convolutions are like that."""
    found, size = {f"{width}, 32×32": (width, width, 32, 1, 4)}, 32
    for channels in (width, 2 * width, 4 * width):
        more = 2 * channels
        found[f"{channels} → {more}, {size}×{size}"] = (channels, more, size, 2, 1)
        size //= 2
        found[f"{more}, {size}×{size}"] = (more, more, size, 1, 3)
    return found


def ways(batch: int, inputs: int, outputs: int, size: int, stride: int) -> dict[str, Program]:
    both = torch.randn(2 * batch, inputs, size, size).contiguous(memory_format=LAST)
    x, dx = both[:batch], both[batch:]
    weight, dweight = (torch.randn(outputs, inputs, 3, 3).contiguous(memory_format=LAST) for _ in range(2))
    bias, dbias = torch.randn(outputs), torch.randn(outputs)
    how = ([1, 1], [stride, stride], [1, 1], 1)
    packed, packed_both = (mkldnn._reorder_convolution_weight(weight, *how, list(t.shape)) for t in (x, both))

    def plain(t: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.conv2d(t, w, b, stride, 1)

    def add(total: Tensor) -> Tensor:
        return mkldnn._convolution_pointwise_(total, x, dweight, dbias, *how, "add", 1.0, None, [], None)

    def by(t: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return mkldnn._convolution_pointwise(t, w, b, *how, "none", [], "")

    def batches() -> object:
        found = by(both, packed_both)
        return found[:batch].add_(bias.view(-1, 1, 1)), add(found[batch:])

    def stacked_outputs() -> object:
        found = plain(x, torch.cat([weight, dweight]), torch.cat([bias, dbias]))
        return found[:, :outputs].contiguous(memory_format=LAST), plain(dx, weight) + found[:, outputs:]

    return {
        "apart": lambda: (plain(x, weight, bias), plain(dx, weight) + plain(x, dweight, dbias)),
        "in place": lambda: (plain(x, weight, bias), add(plain(dx, weight))),
        "packed": lambda: (by(x, packed, bias), add(by(dx, packed))),
        "batches": batches,
        "outputs": stacked_outputs,
        "inputs": lambda: (
            plain(x, weight, bias),
            plain(torch.cat([x, dx], 1), torch.cat([dweight, weight], 1), dbias),
        ),
    }


@torch.no_grad()
def compare(width: int, batch: int, rounds: int) -> list[list[str]]:
    """Times beside "apart", of each kind of layer and of all 3×3 convolutions together."""
    rows, totals = [], {name: [0.0] * rounds for name in WAYS}
    for title, (*shape, count) in layers(width).items():
        programs = ways(batch, *shape)
        wanted = programs["apart"]()
        for name, program in programs.items():
            for one, other in zip(wanted, program(), strict=True):
                torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-2, msg=f"{name} computes something else")
        times = timed(programs, rounds)
        for name in WAYS:
            totals[name] = [t + count * s for t, s in zip(totals[name], times.seconds[name], strict=True)]
        rows.append([title, *(str(times.ratio(name, "apart")) for name in WAYS[1:])])
    whole = [Spread.of([a / b for a, b in zip(totals[name], totals["apart"], strict=True)]) for name in WAYS[1:]]
    return [*rows, ["all", *map(str, whole)]]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="quarter width, batch 32")
    options = parser.parse_args()
    cases = [(16, 32)] if options.quick else [(64, 1), (64, 32), (64, 128), (16, 32)]
    with reported(options.out) as output:
        for width, batch in cases:
            rows = compare(width, batch, options.rounds)
            title = f"Value and change beside three convolutions apart, width {width}, batch {batch}"
            output.table(f"width-{width}-batch-{batch}", title, ["channels, image", *WAYS[1:]], rows)


if __name__ == "__main__":
    main()
