"""Your own classifier, a new folder of images each month, no old data.

    python examples/update_your_model.py

Here the months are folders of small coloured squares that the program writes first; new labels come in the second.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from dlcft import Learner
from dlcft.data.images import Preprocess

COLOURS = {"red": (200, 40, 40), "green": (40, 180, 60), "blue": (40, 60, 200)}


def backbone() -> nn.Module:
    """Your pre-trained network without its last layer: any module that maps a batch to feature vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()).eval()


def write_month(folder: Path, labels: list[str], seed: int) -> Path:
    """A folder a class, as your pictures are."""
    draw = np.random.default_rng(seed)
    for label in labels:
        (folder / label).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(COLOURS[label] + draw.normal(0, 30, (20, 20, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


def main() -> None:
    """January, a new process, February."""
    with tempfile.TemporaryDirectory() as scratch:
        january = write_month(Path(scratch, "january"), ["red", "green"], seed=1)
        february = write_month(Path(scratch, "february"), ["green", "blue"], seed=2)
        model = Path(scratch, "model")

        learner = Learner(backbone(), preprocess=Preprocess(size=(16, 16)), depth_features=250)
        learner.learn(january)
        learner.save(model)

        learner = Learner.load(model, backbone())  # next month, another process
        learner.learn(february)
        print(f"January's loss has risen by {learner.predicted_increase():.4f}, says the memory")
        learner.save()

        asked = write_month(Path(scratch, "asked"), ["red", "blue"], seed=3)
        print(f"labels known: {learner.labels()}; accuracy: {learner.evaluate(asked)['accuracy']:.0%}")


if __name__ == "__main__":
    main()
