"""What saving and loading a checkpoint costs beside copying the same bytes.

    python benchmarks/checkpoint.py           # 0.4 GB of float32, as many as a K-FAC memory of ResNet-18 holds
    python benchmarks/checkpoint.py --quick   # a tenth of it, seconds

The copy is `shutil.copyfile` followed by fsync. Saving writes, hashes and syncs a version and replaces the manifest;
loading verifies the hash and copies every tensor into memory of its own. The bar is 2 for each. The last column is the
share of a task: one pass of plain training of ResNet-18 over 5,000 images of 32×32, counted up from one batch.

A second table is of closed-form learners: their symmetric matrix G is stored as a triangle, and neither saving nor
loading may hold it twice. Memory is the peak beyond what was there before, in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Output, arguments, peak_memory, reported, timed
from torch import Tensor, nn

from curvature import BATCH, epoch, images
from dlcft import Learner
from dlcft.store.files import state_digest
from dlcft.store.store import Store

BAR = 2.0
IMAGES, WIDTH = 5000, 64


def memory(millions: float) -> dict[str, Tensor]:
    """Square factors from 64 to 4608 wide, as those of 3×3 convolutions, until the numbers are used up."""
    tensors: dict[str, Tensor] = {}
    left = int(millions * 1e6)
    while left > 0:
        for width in (64, 576, 128, 1152, 256, 2304, 512, 4608):
            rows = min(width, -(-left // width))
            tensors[f"factor {len(tensors)}"] = torch.randn(rows, width)
            left -= rows * width
            if left <= 0:
                break
    return tensors


def copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())


class Given(nn.Module):
    """Features that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def save(features: int, directory: Path) -> Callable[[], object]:
    for width in (256, features):  # a small one first: what it loads of torch is not counted
        learner = Learner(Given(), "ridge", device="cpu")
        x = torch.randn(16, width, generator=torch.Generator().manual_seed(0))
        learner.learn((x, torch.arange(16) % 2), progress=False)
        learner.method.solved, learner.method.before = True, None  # solving is another matter
        learner.save(directory / str(width))
    return lambda: learner.save(directory / "again")


def load(features: int, directory: Path) -> Callable[[], object]:
    Learner.load(directory / "256", Given(), device="cpu")
    return lambda: Learner.load(directory / str(features), Given(), device="cpu")


def closed_form(features: int, directory: Path, rounds: int) -> list[str]:
    """G in memory and on disk, and what saving and loading take: memory in units of G, and seconds."""
    whole = 8 * features**2
    saving, loading = (peak_memory(prepare, features, directory) for prepare in (save, load))
    learner = Learner.load(directory / str(features), Given(), device="cpu")
    times = timed({"save": lambda: learner.save(keep=1), "load": load(features, directory)}, rounds)
    size = next((directory / str(features)).glob("*.safetensors")).stat().st_size
    costs = [f"{saving / whole:.3f}", f"{loading / whole:.3f}", f"{times['save']:.2f}", f"{times['load']:.2f}"]
    return [f"{features:,}", f"{whole / 1e6:.0f}", f"{size / 1e6:.0f}", *costs]


def beside_a_copy(output: Output, millions: float, directory: Path, rounds: int) -> None:
    tensors, header = memory(millions), {"tasks": 3}
    store, target = Store(directory / "store"), directory / "copy"
    store.commit(tensors, header)
    source = directory / "source"
    copy(store.directory / store.look().versions[0].file, source)
    assert state_digest(store.load()[0], store.current.header) == state_digest(tensors, header)
    programs = {
        "copy": lambda: copy(source, target),
        "save": lambda: store.commit(tensors, header),
        "load": store.load,
        "step": epoch(WIDTH, "small", images(BATCH, 32)),
    }
    times, size = timed(programs, rounds), source.stat().st_size
    rows = [
        [
            name,
            f"{times[name]:.3f}",
            f"{size / times[name] / 1e9:.2f}",
            str(times.ratio(name, "copy")),
            "" if name == "copy" else f"{BAR:g}",
            f"{times[name] / (times['step'] * IMAGES / BATCH):.1%}",
        ]
        for name in ("copy", "save", "load")
    ]
    columns = ["", "seconds", "GB/s", "in times of the copy", "bar", "share of a task"]
    output.table("copy", f"A checkpoint of {size / 1e6:.0f} MB, beside copy and fsync", columns, rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the bytes")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary directory by default")
    options = parser.parse_args()
    with reported(options.out) as output, tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        beside_a_copy(output, 10 if options.quick else 100, folder, options.rounds)
        budgets = (2000,) if options.quick else (5000, 10_000)
        rows = [closed_form(features, folder / str(features), options.rounds) for features in budgets]
        columns = ["features", "G, MB", "on disk, MB", "saving, × G", "loading, × G", "save, s", "load, s"]
        output.table("closed-form", "Closed form", columns, rows)


if __name__ == "__main__":
    main()
