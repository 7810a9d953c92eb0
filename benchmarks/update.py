"""What one update of 1,000 images costs on networks that people have, beside plain fine-tuning of the same epochs.

    python benchmarks/update.py                         # four networks, six ways, 128×128 pixels
    python benchmarks/update.py --quick                 # ResNet-18 at 64×64 alone
    python benchmarks/update.py --size 224 --batch 32   # as in production, if memory allows

Needs timm. The networks have random weights, which changes no cost. Each row is a process of its own: it learns three
small tasks, from which the costs of an image and of a task are told apart and counted up to 1,000 images, five epochs;
then it trains the plain network for two epochs, which its time is divided by. Memory is the peak of that process up to
the end of the last task, Python and torch included; disk is one version. Processes are slow: there are three rounds.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from typing import Any

import torch
from measure import Times, arguments, reported
from torch import nn

from dlcft import Learner
from dlcft.store.files import stored_bytes
from dlcft.update.forecast import apart, learning_seconds, measure_learning, peak_memory

IMAGES, EPOCHS, CLASSES = 1000, 5, 10
NETWORKS = {  # timm's name, and its last stage
    "ResNet-18": ("resnet18", ["layer4"]),
    "ResNet-50": ("resnet50", ["layer4"]),
    "MobileNet-V2": ("mobilenetv2_100", ["blocks.6", "conv_head"]),
    "ViT-small": ("vit_small_patch16_224", ["blocks.11"]),
}
WAYS: dict[str, tuple[str, bool, dict[str, Any]]] = {  # method, whether the last stage only, settings
    "plain fine-tuning": ("", False, {}),
    "`dlcft-exact`": ("dlcft-exact", False, {}),
    "`dlcft`": ("dlcft", False, {}),
    "`dlcft`, diagonal": ("dlcft", False, {"curvature": "diagonal"}),
    "`dlcft`, last stage": ("dlcft", True, {}),
    "`dlcft`, last stage, diagonal": ("dlcft", True, {"curvature": "diagonal"}),
}


@dataclass(frozen=True)
class Cost:
    """Seconds to learn 1,000 images, and to fine-tune on them; peak and saved bytes."""

    learning: float
    plain: float
    peak: int
    state: int


def network(name: str, size: int) -> nn.Module:
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # a build for another torch: timm needs its names, not its operators
        import sys

        for module in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        network.library = library  # type: ignore[attr-defined]
    import timm

    torch.manual_seed(0)
    options = {"img_size": size} if name.startswith("vit") else {}
    return timm.create_model(name, num_classes=0, **options).eval()


def images(count: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(count) % CLASSES


def plain_epochs(backbone: nn.Module, size: int, batch: int) -> float:
    """Seconds an image, the second of two epochs over two batches."""
    x, y = images(2 * batch, size, 3)
    model = nn.Sequential(backbone, nn.LazyLinear(CLASSES)).train()
    model(x[:1].repeat(2, 1, 1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    for _ in range(2):
        started = time.perf_counter()
        for rows in torch.arange(len(x)).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return (time.perf_counter() - started) / len(x)


def measure(name: str, last: list[str], way: str, size: int, batch: int) -> Cost:
    method, part, settings = WAYS[way]
    backbone = network(name, size)
    if not method:
        plain = plain_epochs(backbone, size, batch) * EPOCHS * IMAGES
        state = sum(t.nbytes for t in backbone.state_dict().values())
        return Cost(plain, plain, peak_memory(), state)
    if method == "dlcft":
        settings = {**settings, "batch_size": batch, "epochs": 1}
    learner = Learner(backbone, method, train=last if part else None, **settings)
    tasks = [(images(count, size, number), None) for number, count in enumerate((batch, batch, 2 * batch))]
    rates = measure_learning(learner, tasks)
    peak = peak_memory()
    state = stored_bytes(learner.state()[0])
    seconds = learning_seconds(rates, samples=IMAGES, epochs=0 if learner.recipe.closed_form else EPOCHS, solves=2)
    return Cost(seconds, plain_epochs(backbone, size, batch) * EPOCHS * IMAGES, peak, state)


def cell(costs: list[Cost]) -> str:
    times = Times({"learning": [cost.learning for cost in costs], "plain": [cost.plain for cost in costs]})
    peak, state = (max(getattr(cost, name) for cost in costs) for name in ("peak", "state"))
    return f"{times.ratio('learning', 'plain')} · {peak / 1e9:.1f} GB · {state / 1e6:.0f} MB"


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--quick", action="store_true", help="ResNet-18 at 64 pixels, one round")
    parser.add_argument("--size", type=int, default=128, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=8, help="images a step")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    if importlib.util.find_spec("timm") is None:
        print("benchmarks/update.py needs timm: left out")
        return
    size, rounds = (64, 1) if options.quick else (options.size, options.rounds)
    networks = ["ResNet-18"] if options.quick else options.networks
    with reported(options.out) as output:
        cells: dict[tuple[str, str], str] = {}
        for name in networks:
            costs: dict[str, list[Cost]] = {way: [] for way in options.ways}
            for _ in range(rounds):
                for way in options.ways:
                    costs[way].append(apart(measure, *NETWORKS[name], way, size, options.batch))
            cells |= {(name, way): cell(costs[way]) for way in options.ways}
            for way in options.ways:
                print(f"{name}, {way}: {cells[name, way]}", flush=True)
        rows = [[way, *(cells[name, way] for name in networks)] for way in options.ways]
        title = (
            f"{IMAGES:,} images of {size}×{size}, batch {options.batch}; time in {EPOCHS} epochs of plain fine-tuning"
        )
        output.table("update", title, ["time · memory · disk", *networks], rows)


if __name__ == "__main__":
    main()
