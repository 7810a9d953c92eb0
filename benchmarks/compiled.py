"""What torch.compile and bfloat16 save.

    python benchmarks/compiled.py

ResNet-18 with BatchNorm folded, at full and at quarter width. What is compiled is the network written down as ordinary
operations, as `Learner.module()` gives it. Compiling happens once for a batch size; it is given in steps of what is
compiled, and so is what it takes until that has paid. It needs a C++ compiler.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

import torch
from measure import Output, Spread, Times, arguments, reported, timed
from torch import Tensor, nn

from dlcft import Learner, Linearized, fold_batchnorm
from dlcft.backbones import ResNet18, load_backbone
from dlcft.bench.datasets import load
from dlcft.closed_form.depth import DepthFeatures, find_activations
from dlcft.network.explicit import explicit

FEATURES = 4500
Call = Callable[[Tensor], Tensor]


def images(batch: int, size: int = 32) -> Tensor:
    return torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return fold_batchnorm(ResNet18(width, "small", 0.1)).eval()


def linearised(width: int) -> Linearized:
    model = Linearized(network(width))
    with torch.no_grad():
        for p in model.delta.parameters():
            p.normal_(0, 0.01)
    return model


def training(forward: Call, parameters: list[nn.Parameter], x: Tensor, *, half: bool = False) -> Callable[[], None]:
    def step() -> None:
        for p in parameters:
            p.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            outputs = forward(x)
        outputs.float().square().sum().backward()

    return step


def answering(forward: Call, x: Tensor) -> Callable[[], object]:
    return torch.no_grad()(lambda: forward(x))


def row(name: str, times: Times, warm_up: float) -> list[str]:
    saved = times["eager"] - times["compiled"]
    paid = f"{warm_up / saved:,.0f}" if saved > 0.01 * times["eager"] else "never"
    return [name, str(times.ratio("compiled", "eager")), f"{warm_up / times['eager']:,.0f}", paid]


def first_call(program: Callable[[], object]) -> float:
    start = time.perf_counter()
    program()
    return time.perf_counter() - start


def compiled(output: Output, rounds: int) -> None:
    rows = []
    for width, name in ((64, "full width"), (16, "quarter width")):
        model, x = linearised(width), images(32)
        parameters = list(model.delta.parameters())
        graph = explicit(model, x[:3])
        for p in parameters:
            p.requires_grad_(True)  # `explicit` has frozen them
        fast = torch.compile(graph, dynamic=False)
        programs = {"eager": training(model, parameters, x), "compiled": training(fast, parameters, x)}
        warm_up = first_call(programs["compiled"])
        rows.append(row(f"linearised training step, {name}, batch 32", timed(programs, rounds), warm_up))
    features = depth_features(16)
    for batch in (1, 32, 128):
        x = images(batch)
        fast = torch.compile(written_down(features), dynamic=False)
        programs = {"eager": answering(features, x), "compiled": answering(fast, x)}
        warm_up = first_call(programs["compiled"])
        rows.append(row(f"depth features, quarter width, batch {batch}", timed(programs, 4 * rounds), warm_up))
    header = ["", "time, of not compiled", "compiling, in steps", "steps until it has paid"]
    output.table("compiled", "torch.compile", header, rows)


def depth_features(width: int, size: int = 32, *, bfloat16: bool = False) -> DepthFeatures:
    base = network(width)
    return DepthFeatures(base, find_activations(base, images(3, size), FEATURES), bfloat16=bfloat16)


@torch.no_grad()
def written_down(features: DepthFeatures) -> nn.Module:
    features.at_once = True
    graph = explicit(features, images(3))
    features.at_once = False
    return graph


def bfloat16(output: Output, rounds: int) -> None:
    rows = []
    for width, name in ((64, "full width"), (16, "quarter width")):
        linear, plain, x = linearised(width), network(width).to(memory_format=torch.channels_last), images(32)
        for kind, model, parameters in (
            ("linearised", linear, list(linear.delta.parameters())),
            ("plain", plain, list(plain.parameters())),
        ):
            programs = {half: training(model, parameters, x, half=half == "half") for half in ("half", "full")}
            ratio = timed(programs, rounds).ratio("half", "full")
            rows.append([f"{kind} training step (`amp=True`), {name}, batch 32", str(ratio), ""])
    for width, size, batch in ((64, 64, 32), (16, 32, 128), (16, 32, 1)):
        x, full = images(batch, size), depth_features(width, size)
        half = depth_features(width, size, bfloat16=True)
        ratio: Spread = timed({"half": answering(half, x), "full": answering(full, x)}, rounds).ratio("half", "full")
        error = float((half(x) - full(x)).norm() / full(x).norm())
        name = "full" if width == 64 else "quarter"
        what = f"depth features (`bfloat16=True`), {name} width, {size}×{size}, batch {batch}"
        rows.append([what, str(ratio), f"{error:.2%}"])
    output.table("bfloat16", "bfloat16", ["", "time, of float32", "relative error of the features"], rows)


def accuracy(output: Output) -> None:
    """The shipped network on a third of the digits' training images, after learning the others."""
    x, y = load("digits").train()
    held, kept = slice(0, len(y) // 3), slice(len(y) // 3, None)
    backbone, answers, rows = load_backbone("shipped"), {}, []
    for name, half in (("float32", False), ("bfloat16", True)):
        options = {"preprocess": backbone.preprocess, "depth_features": 1000, "device": "cpu"}
        learner = Learner(backbone.module, bfloat16=half, **options)
        learner.learn((x[kept], y[kept].tolist()), progress=False)
        answers[name] = learner.outputs(x[held])
        right = learner.evaluate((x[held], y[held].tolist()))["accuracy"]
        error = float((answers[name] - answers["float32"]).norm() / answers["float32"].norm())
        same = float((answers[name].argmax(1) == answers["float32"].argmax(1)).float().mean())
        rows.append([name, f"{right:.2%}", f"{same:.2%}", f"{error:.2%}"])
    header = ["features", "accuracy", "same label as float32", "relative error of the outputs"]
    output.table("accuracy", "`dlcft-exact` with 1,000 depth features on digits", header, rows)


def main() -> None:
    options = arguments(__doc__, rounds=5).parse_args()
    with tempfile.TemporaryDirectory() as empty, reported(options.out) as output:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty  # torch keeps what it has compiled: a second run takes less
        accuracy(output)
        bfloat16(output, options.rounds)
        compiled(output, options.rounds)


if __name__ == "__main__":
    main()
