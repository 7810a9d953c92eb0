"""What an exported model costs beside the plain backbone in the same runtime, and how large its file is.

    OMP_NUM_THREADS=1 python benchmarks/export.py           # ResNet-18 at 64×64, and the shipped network at 32×32
    OMP_NUM_THREADS=1 python benchmarks/export.py --quick   # the shipped network, a minute

Both run in onnxruntime on one thread, and in torch as graphs of ordinary operations; they take turns, and the ratio of
each turn counts. The plain backbone is exported in the same way, with BatchNorm, which onnxruntime folds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
from measure import table
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


def ratio(run: Callable[[Tensor], object], beside: Callable[[Tensor], object], x: Tensor, rounds: int) -> float:
    """The median over turns of the time of one, in times of the other."""

    def seconds(one: Callable[[Tensor], object]) -> float:
        start = time.perf_counter()
        one(x)
        return time.perf_counter() - start

    for one in (run, beside):
        one(x)
    return statistics.median(seconds(run) / seconds(beside) for _ in range(rounds))


def compare(title: str, backbone: nn.Module, pixels: int, methods: list[str], rounds: int) -> None:
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
        row = [method, f"{learner.model.feature_count:,}", f"{done.bytes / (len(content) + head):.2f}"]
        for size in (1, BATCH):
            row.append(f"{ratio(run, beside, x[:size], rounds):.2f}")
        with torch.inference_mode():
            row.append(f"{ratio(learner.module(), module, x, rounds):.2f}")
        rows.append([*row, f"{done.difference:.0e}"])
    header = ["method", "features", "file / (backbone + head)", "onnxruntime, batch 1", f"onnxruntime, batch {BATCH}"]
    table(f"{title}: times of the plain backbone", [*header, f"torch, batch {BATCH}", "difference"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shipped network alone, fewer turns")
    parser.add_argument("--rounds", type=int, default=31, help="turns behind each median")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rounds = min(options.rounds, 11) if options.quick else options.rounds
    compare("The shipped network, 32×32", shipped_resnet18(), 32, list(METHODS), rounds)
    if not options.quick:
        compare("ResNet-18, 64×64", ResNet18(64, "small", 0.1), 64, ["dlcft-exact", "ridge"], rounds)


if __name__ == "__main__":
    main()
