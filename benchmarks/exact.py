"""What closed-form learning costs beside a network's own passes: features and sums, the solve, inference, and memory.

    python benchmarks/exact.py           # one thread; ResNet-18 at 64 pixels, quarter width at 32: minutes
    python benchmarks/exact.py --quick   # quarter width alone, 1,000 features, seconds

A data set is learned by one pass (forward, sums) and one solve, the choice of the ridge included. Fine-tuning passes
over it five times, forward and backward. Both are measured on a few batches and counted up to 20,000 images. The solve
is the median of a third of the rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import arguments, reported, timed

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
    times = timed(programs, rounds)
    solve = timed({"solve": solving(total)}, max(1, rounds // 3))["solve"]  # takes up to minutes

    def per_image(seconds: dict[str, float]) -> float:
        """`extend` copies the sums once for a whole task, however many images it has."""
        return (seconds["pass"] - seconds["copy"]) / samples

    def learned(seconds: dict[str, float]) -> float:
        return IMAGES * per_image(seconds) + seconds["copy"] + solve

    cells = [
        f"{times.ratio('features', 'forward')}",
        f"{times.combined(lambda s: per_image(s) * samples / s['forward'])}",
        f"{times.ratio('predict', 'forward')}",
        f"{times.combined(lambda s: solve / (IMAGES * s['forward'] / samples))}",
        f"{times.combined(lambda s: learned(s) / (EPOCHS * IMAGES * s['epoch'] / samples)):.3f}",
    ]
    name = "ResNet-18" if width == 64 else f"width {width}"
    return [f"{name}, {size}×{size}, {total.features:,} features", *cells]


ROWS = [
    "features",
    "features and sums (bar 1.5 at 5,000)",
    "inference (bar 1.3)",
    f"choice of the ridge and solve, of a pass over {IMAGES:,} images",
    f"learning {IMAGES:,} images once, of fine-tuning them for {EPOCHS} epochs (bar 0.08)",
]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="quarter width alone, 1,000 features")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with reported(options.out) as output:
        if options.quick:
            columns = [measure(16, "small", 32, 1000, BATCH, options.rounds)]
        else:
            columns = [measure(64, "imagenet", 64, budget, 2 * BATCH, options.rounds) for budget in (4500, 9500)]
            columns += [measure(16, "small", 32, 4096, 2 * BATCH, options.rounds)]
        header, *rows = zip(["in plain forward passes of the same images", *ROWS], *columns, strict=True)
        title = f"Closed form, {OUTPUTS} classes, batch {BATCH}, one thread"
        output.table("closed-form", title, list(header), [list(row) for row in rows])


if __name__ == "__main__":
    main()
