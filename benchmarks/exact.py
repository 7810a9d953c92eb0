"""What closed-form learning in the tangent space costs beside training: features and sums, the solve, and memory.

    python benchmarks/exact.py           # ResNet-18 at 32×32, full and quarter width, 10,000 features: four minutes
    python benchmarks/exact.py --quick   # quarter width, 2,000 features, seconds

A data set is learned by one pass (forward, backward to the activations, sums) and one solve. Fine-tuning passes over it
five times, forward and backward to the weights. Both are measured on a few batches and counted up to 20,000 images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measure import medians, table

from curvature import BATCH, OUTPUTS, Batches, classifier, epoch, estimation, images, network
from dlcft.closed_form.features import TangentFeatures
from dlcft.closed_form.sums import RidgeSums
from dlcft.methods.recipes import RECIPES

IMAGES, EPOCHS = 20_000, 5


def passing(features: TangentFeatures, sums: RidgeSums, batches: Batches) -> Callable[[], RidgeSums]:
    """One pass: features of every batch, added to the sums."""
    return lambda: sums.extend((features(x), y) for x, y in batches)


def filled(width: int) -> RidgeSums:
    """Sums of so many features that can be solved."""
    generator = torch.Generator().manual_seed(0)
    sums = RidgeSums.empty(width)
    x = torch.randn(2 * OUTPUTS, width, generator=generator)
    return sums.add(x, torch.arange(2 * OUTPUTS) % OUTPUTS)


def measure(width: int, budget: int, samples: int, rounds: int) -> list[str]:
    batches = images(samples, 32)
    backbone = network(width, "small")
    share = RECIPES["dlcft-exact"].settings["tangent_share"]
    features = TangentFeatures(backbone, torch.ones(1, 8 * width), features=budget, share=share)
    total = filled(features.length + 8 * width)
    programs: dict[str, Callable[[], object]] = {
        "epoch": epoch(width, "small", batches),
        "features": lambda: [features(x) for x, _ in batches],
        "pass": passing(features, total, batches),
        "copy": lambda: total.extend([]),
    }
    seconds = medians(programs, rounds)
    solve = medians({"solve": lambda: total.solve(0.1)}, 1)["solve"]
    per_step = seconds["epoch"] / samples
    # `extend` copies the sums once for a whole task, however many images it has
    per_image = (seconds["pass"] - seconds["copy"]) / samples
    learned = IMAGES * per_image + seconds["copy"] + solve
    state = sum(t.numel() * t.element_size() for t in total.state()[0].values())
    memory = estimation("kfac", classifier(backbone, 8 * width, linear=True), batches[:1])().nbytes()
    return [
        f"width {width}",
        f"{total.features:,}",
        f"{seconds['features'] / samples / per_step:.2f}",
        f"{per_image / per_step:.2f}",
        f"{solve / (IMAGES * per_step):.3f}",
        f"{learned / (EPOCHS * IMAGES * per_step):.2f}",
        f"{state / 2**20:.0f} / {memory / 2**20:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="quarter width, 2,000 features")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions behind each median")
    options = parser.parse_args()
    rows = [measure(16, 2000 if options.quick else 10_000, BATCH if options.quick else 4 * BATCH, options.rounds)]
    if not options.quick:
        rows.append(measure(64, 10_000, 2 * BATCH, options.rounds))
    header = [
        f"ResNet-18, 32×32, {OUTPUTS} classes",
        "features",
        "features / training step, per image",
        "with the sums (bar 1.0 at width 64)",
        f"solve / epoch of {IMAGES:,}",
        f"learn {IMAGES:,} once / {EPOCHS} epochs (bar 0.25 at width 64)",
        "state / K-FAC memory, MiB",
    ]
    table(f"Closed form beside training, batch {BATCH}", header, rows)


if __name__ == "__main__":
    main()
