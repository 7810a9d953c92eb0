"""What linearised training and inference cost beside the plain network.

    python benchmarks/linearize.py           # ResNet-18 at 32×32, full and quarter width, batches of 32 and 128
    python benchmarks/linearize.py --quick   # a quarter of the width, batch 32, seconds

A plain training step is 3 units of convolution arithmetic (forward, gradient of the input, gradient of the weight), a
linearised one 5 (two more forward): the limit of their ratio is 5/3 = 1.67. All networks have BatchNorm folded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from measure import arguments, peak_memory, reported, timed
from torch import Tensor, nn
from torch.func import functional_call, jvp

from dlcft import Linearized, fold_batchnorm
from dlcft.backbones import ResNet18
from dlcft.network.values import Values

Step = Callable[[], object]


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return fold_batchnorm(ResNet18(width, "small", 0.1))


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)


def training(forward: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor) -> Step:
    def step() -> None:
        for p in parameters:
            p.grad = None
        forward(x).square().sum().backward()

    return step


def plain(width: int, batch: int) -> Step:
    model = network(width).to(memory_format=torch.channels_last)
    return training(model, list(model.parameters()), images(batch))


def linearised(width: int, batch: int, train: str | None = None) -> Step:
    model = Linearized(network(width), train=train)
    with torch.no_grad():
        for p in model.delta.parameters():
            p.normal_(0, 0.01)
    return training(model, list(model.delta.parameters()), images(batch))


def naive(width: int, batch: int) -> Step:
    """`jvp` as one would first write it: default layout."""
    base = network(width).requires_grad_(False)
    delta = {name: nn.Parameter(0.01 * torch.randn_like(p)) for name, p in base.named_parameters()}
    frozen = dict(base.named_parameters())

    def forward(x: Tensor) -> Tensor:
        value, change = jvp(lambda p: functional_call(base, p, (x,)), (frozen,), (delta,))
        return value + change

    return training(forward, list(delta.values()), images(batch).contiguous())


class DualConv(nn.Module):
    """A row of the paper's appendix B: hidden and augmented state side by side."""

    def __init__(self, base: nn.Conv2d) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.weight = nn.Parameter(0.01 * torch.randn_like(base.weight))
        assert base.bias is not None
        self.bias = nn.Parameter(0.01 * torch.randn_like(base.bias))

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, dx = pair
        how = (self.base.stride, self.base.padding)
        change = F.conv2d(x, self.weight, self.bias, *how) + F.conv2d(dx, self.base.weight, None, *how)
        return self.base(x), change


def leaky(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, dx = pair
    positive = (x > 0).to(x.dtype)
    return F.leaky_relu(x, 0.1), dx * positive + 0.1 * dx * (1 - positive)


def layerwise(width: int, batch: int) -> Step:
    """Layer-by-layer dual modules, as the paper describes its implementation."""
    model = network(width).to(memory_format=torch.channels_last)
    duals = {n: DualConv(m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}

    def block(name: str, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        y, dy = duals[f"{name}.conv2"](leaky(duals[f"{name}.conv1"](pair)))
        x, dx = duals[f"{name}.downsample.0"](pair) if f"{name}.downsample.0" in duals else pair
        return leaky((y + x, dy + dx))

    def forward(x: Tensor) -> Tensor:
        pair = leaky(duals["conv1"]((x, torch.zeros_like(x))))
        for stage in range(1, 5):
            for index in range(2):
                pair = block(f"layer{stage}.{index}", pair)
        return (pair[0] + pair[1]).mean((2, 3))

    parameters = [p for dual in duals.values() for p in (dual.weight, dual.bias)]
    return training(forward, parameters, images(batch))


def without_gradient(model: nn.Module, x: Tensor) -> Step:
    def step() -> None:
        with torch.no_grad():
            model(x)

    return step


class LastStage(nn.Module):
    """The last stage alone, on what the stages before it hand over."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layer4 = model.get_submodule("layer4")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer4(x).mean((2, 3))


def training_steps(width: int, batch: int, rounds: int) -> list[str]:
    """Time of linearised steps, and memory of ours, beside a plain step."""
    steps: dict[str, Callable[..., Step]] = {
        "plain": plain,
        "linearised": linearised,
        "layer by layer": layerwise,
        "naive": naive,
    }
    times = timed({name: make(width, batch) for name, make in steps.items()}, rounds)
    peak, beside = (peak_memory(make, width, batch) for make in (linearised, plain))
    ratios = [str(times.ratio(name, "plain")) for name in ("linearised", "layer by layer", "naive")]
    return [*ratios, f"{peak / beside:.2f}"]


def last_stage(width: int, batch: int, rounds: int) -> str:
    """Training it, in plain forward passes of the network above that stage's own linearised step."""
    model = network(width).to(memory_format=torch.channels_last)
    stage = Linearized(LastStage(model))
    handed_over = torch.randn(batch, 4 * width, 8, 8).contiguous(memory_format=torch.channels_last)
    programs = {
        "forward": without_gradient(model, images(batch)),
        "last stage only": linearised(width, batch, "layer4"),
        "its own step": training(stage, list(stage.delta.parameters()), handed_over),
    }
    times = timed(programs, rounds)
    return str(times.combined(lambda s: (s["last stage only"] - s["its own step"]) / s["forward"]))


def inference(width: int, batch: int, rounds: int) -> str:
    """In plain forward passes; a turn has at least 32 images, because one image takes milliseconds."""
    model = network(width).to(memory_format=torch.channels_last)
    programs = {"plain": model, "linearised": Linearized(model)}

    def turn(step: Step) -> Step:
        return lambda: [step() for _ in range(max(1, 32 // batch))]

    times = timed({name: turn(without_gradient(m, images(batch))) for name, m in programs.items()}, rounds)
    return str(times.ratio("linearised", "plain"))


def kept(width: int, batch: int, train: str | None, rounds: int) -> list[str]:
    """A step whose frozen values are read from memory beside one that computes them, and the bytes of an image."""
    samples = 4 * batch  # a batch is drawn from them, as in training
    x = torch.randn(samples, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    model = Linearized(network(width), train=train)
    values = Values(model, x.split(batch), samples, float("inf"))
    parameters = list(model.delta.parameters())

    def step(recalls: bool) -> None:
        indices = torch.randperm(samples)[:batch]
        chosen = x[indices]
        with values.recalled(chosen, indices) if recalls else nullcontext():
            training(model, parameters, chosen)()

    programs = {"plain": plain(width, batch), "computed": partial(step, False), "kept": partial(step, True)}
    times = timed(programs, rounds)
    ratios = [
        str(times.ratio(name, to)) for name, to in (("computed", "plain"), ("kept", "plain"), ("kept", "computed"))
    ]
    return [*ratios, f"{values.bytes / samples / 1e6:.2f}"]


ROWS = [
    "linearised training step, time (the limit by arithmetic is 1.67)",
    "the same with layer-by-layer dual modules, as the paper describes",
    "the same with `jvp` as one would first write it",
    "linearised training step, peak memory",
    "linearised inference, in plain forward passes",
    "training the last stage only: plain forward passes beside that stage's own step",
]
WIDTHS = {64: "", 16: "quarter width, "}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="quarter width alone, batch 32")
    options = parser.parse_args()
    widths, batches, passes = ([16], [32], [1, 32]) if options.quick else (list(WIDTHS), [32, 128], [1, 8, 32, 128])
    with reported(options.out) as output:
        forward = {(width, batch): inference(width, batch, options.rounds) for width in widths for batch in passes}
        columns = {
            f"{WIDTHS[width]}batch {batch}": [
                *training_steps(width, batch, options.rounds),
                forward[width, batch],
                last_stage(width, batch, options.rounds),
            ]
            for width in widths
            for batch in batches
        }
        rows = [[name, *cells] for name, *cells in zip(ROWS, *columns.values(), strict=True)]
        output.table("step", "ResNet-18 at 32×32 beside its plain training step", ["", *columns], rows)
        header = ["", "values computed / plain step", "kept / plain step", "kept / computed", "MB an image"]
        parts = {"all layers": None, "the last stage": "layer4"}
        rows = [
            [f"{WIDTHS[width]}batch {batch}, {part} trained", *kept(width, batch, train, options.rounds)]
            for width in widths
            for batch in batches
            for part, train in parts.items()
        ]
        output.table("kept", "Linearised training step with values of frozen layers kept", header, rows)
        names = {64: "ResNet-18", 16: "quarter width"}
        rows = [[names[width], *(forward[width, batch] for batch in passes)] for width in widths]
        title = "Linearised inference at 32×32, in plain forward passes"
        output.table("inference", title, ["", *(f"batch {batch}" for batch in passes)], rows)


if __name__ == "__main__":
    main()
