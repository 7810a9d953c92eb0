"""What an exported model costs beside the plain backbone in the same runtime, and how large its file is.

    python benchmarks/export.py           # one thread; the shipped network at 32×32, and ResNet-18 at 64×64
    python benchmarks/export.py --quick   # the shipped network, a minute

Both run in onnxruntime on one thread, and in torch as graphs of ordinary operations; they take turns, and the ratio of
each turn counts. The plain backbone is exported in the same way, with BatchNorm, which onnxruntime folds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnxruntime
import torch
from measure import arguments, reported, timed
from torch import Tensor, nn

from dlcft import Learner
from dlcft.backbones import ResNet18, shipped_resnet18
from dlcft.data.images import Preprocess
from dlcft.learner.export import OPSET, export
from dlcft.network.explicit import explicit

CLASSES, BATCH = 100, 32
METHODS = {
    "dlcft-exact": {},
    "ridge": {},
    "ranpac": {},
    "tangent": {},
    "none": {"epochs": 1},
    "dlcft-kfac": {"epochs": 1},
}

SAID = {
    "tangent": ", which needs a backward pass",
    "none": ", a plain network",
    "dlcft-kfac": ", linearised: value and change",
}


def session(content: bytes | str) -> Callable[[Tensor], object]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    running = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    name = running.get_inputs()[0].name
    return lambda x: running.run(None, {name: x.numpy()})


def plain(backbone: nn.Module, x: Tensor) -> tuple[bytes, nn.Module]:
    module = explicit(backbone.eval(), x)
    batch = torch.export.Dim("batch")
    options = {"dynamo": True, "verbose": False, "opset_version": OPSET}
    program = torch.onnx.export(module, (x,), dynamic_shapes=({0: batch},), **options)
    return program.model_proto.SerializeToString(), module


def quiet(module: nn.Module) -> Callable[[Tensor], object]:
    """Without gradients."""

    def run(x: Tensor) -> object:
        with torch.inference_mode():
            return module(x)

    return run


def compare(title: str, backbone: nn.Module, pixels: int, methods: list[str], rounds: int) -> list[list[str]]:
    x = torch.rand(BATCH, 3, pixels, pixels)
    content, module = plain(backbone, x[:3])
    beside, rows = session(content), []
    many = torch.rand(2 * CLASSES, 3, pixels, pixels)
    for method in methods:
        preprocess = Preprocess((pixels, pixels), (0.5,) * 3, (0.25,) * 3, channels=3)
        learner = Learner(backbone, method, preprocess=preprocess, **METHODS[method])
        learner.learn((many, [*range(CLASSES)] * 2), progress=False)
        with tempfile.TemporaryDirectory() as folder:
            done = export(learner, Path(folder) / "m.onnx")
            run = session(str(done.path))
        head = sum(p.numel() for p in learner.model.heads.parameters()) * 4
        pairs = [(run, beside, x[:1]), (run, beside, x), (quiet(learner.module()), quiet(module), x)]
        ratios = []
        for one, other, given in pairs:
            times = timed({"model": partial(one, given), "plain": partial(other, given)}, rounds)
            ratios.append(str(times.ratio("model", "plain")))
        size = f"{done.bytes / (len(content) + head):.2f}"
        name = f"{'' if rows else f'{title}: '}`{method}`{SAID.get(method, '')}"
        rows.append([name, f"{learner.model.feature_count:,}", size, *ratios, f"{done.difference:.0e}"])
    return rows


def main() -> None:
    parser = arguments(__doc__, rounds=31)
    parser.add_argument("--quick", action="store_true", help="the shipped network alone, fewer turns")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rounds = min(options.rounds, 11) if options.quick else options.rounds
    with reported(options.out) as output:
        rows = compare("the shipped network, 32×32", shipped_resnet18(), 32, list(METHODS), rounds)
        if not options.quick:
            rows += compare("ResNet-18, 64×64", ResNet18(64, "small", 0.1), 64, ["dlcft-exact", "ridge"], rounds)
        times = ["onnxruntime, 1 image", f"{BATCH} images", f"torch, {BATCH} images"]
        header = ["", "features", "file / (backbone + head)", *times, "outputs differ by"]
        output.table("models", f"{CLASSES} classes, in times of the plain backbone", header, rows)


if __name__ == "__main__":
    main()
