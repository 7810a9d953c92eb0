"""What closed-form learning costs beside a network's own passes: features and sums, the solve, inference, and memory.

    OMP_NUM_THREADS=1 python benchmarks/exact.py           # ResNet-18 at 64 pixels, quarter width at 32: minutes
    OMP_NUM_THREADS=1 python benchmarks/exact.py --quick   # quarter width alone, 1,000 features, seconds

A data set is learned by one pass (forward, sums) and one solve, the choice of the ridge included. Fine-tuning passes
over it five times, forward and backward. Both are measured on a few batches and counted up to 20,000 images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measure import medians, table

from curvature import BATCH, OUTPUTS, Stem, epoch, images, network
from dlcft.closed_form.depth import DepthFeatures, find_activations
from dlcft.closed_form.discriminant import linear_discriminant
from dlcft.closed_form.sums import RidgeSums

IMAGES, EPOCHS = 20_000, 5
SAMPLES = 10 * OUTPUTS  # behind a solve


def filled(width: int) -> RidgeSums:
    """Sums of so many features of random samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, width, generator=generator)
    return RidgeSums.empty(width).add(x, torch.arange(SAMPLES) % OUTPUTS)


def solving(sums: RidgeSums) -> Callable[[], object]:
    """What `dlcft-exact` does after a task: choose the ridge, and solve."""
    return lambda: linear_discriminant(sums, sums.choose_ridge(), shrunken=True)


def measure(width: int, stem: Stem, size: int, budget: int, samples: int, rounds: int) -> list[str]:
    batches = images(samples, size)
    backbone = network(width, stem)
    features = DepthFeatures(backbone, find_activations(backbone, batches[0][0][:3], budget))
    total = filled(features.length + 8 * width)
    head = torch.randn(total.features, OUTPUTS)

    def forward() -> None:
        with torch.no_grad():
            for x, _ in batches:
                backbone(x)

    programs: dict[str, Callable[[], object]] = {
        "forward": forward,
        "epoch": epoch(width, stem, batches),
        "features": lambda: [features(x) for x, _ in batches],
        "predict": lambda: [features(x) @ head for x, _ in batches],
        "pass": lambda: total.extend((features(x), y) for x, y in batches),
        "copy": lambda: total.extend([]),
    }
    seconds = medians(programs, rounds)
    solve = medians({"solve": solving(total)}, 1)["solve"]
    # `extend` copies the sums once for a whole task, however many images it has
    per_image = (seconds["pass"] - seconds["copy"]) / samples
    learned = IMAGES * per_image + seconds["copy"] + solve
    plain = seconds["forward"] / samples
    return [
        f"width {width}, {size}×{size}",
        f"{total.features:,}",
        f"{seconds['features'] / seconds['forward']:.2f}",
        f"{per_image / plain:.2f}",
        f"{seconds['predict'] / seconds['forward']:.2f}",
        f"{solve / (IMAGES * plain):.3f}",
        f"{learned / (EPOCHS * IMAGES * seconds['epoch'] / samples):.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="quarter width alone, 1,000 features")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions behind each median")
    options = parser.parse_args()
    if options.quick:
        rows = [measure(16, "small", 32, 1000, BATCH, options.rounds)]
    else:
        rows = [measure(16, "small", 32, 4096, 2 * BATCH, options.rounds)]
        rows += [measure(64, "imagenet", 64, budget, 2 * BATCH, options.rounds) for budget in (4500, 9500)]
    header = [
        f"ResNet-18, {OUTPUTS} classes",
        "features",
        "features / forward pass",
        "with the sums (bar 1.5 at 5,000)",
        "inference / forward pass (bar 1.3)",
        f"choice of the ridge and solve / forward pass over {IMAGES:,}",
        f"learn {IMAGES:,} once / fine-tune {EPOCHS} epochs (bar 0.08)",
    ]
    table(f"Closed form beside the network's own passes, batch {BATCH}", header, rows)


if __name__ == "__main__":
    main()
