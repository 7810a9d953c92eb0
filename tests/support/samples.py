"""Samples in many forms."""

import csv

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

X = torch.arange(6 * 3 * 8 * 5, dtype=torch.float32).reshape(6, 3, 8, 5) / 100
BYTES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 8, 5), dtype=np.uint8))
Y = [3, 7, 3, -1, 7, 3]
ALL = torch.arange(6)
SOME = torch.tensor([4, 0, 5])
CPU = torch.device("cpu")
COLOURS = {"red": (210, 40, 40), "green": (40, 190, 60), "blue": (40, 60, 210), "grey": (120, 120, 120)}


class Pairs(Dataset):
    """A map-style data set that counts how often an input is read."""

    def __init__(self, x=X, y=Y, **attributes):
        self.x, self.y, self.read = x, y, 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.read += 1
        return self.x[index], self.y[index]


class Alone(Pairs):
    def __getitem__(self, index):
        return self.x[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[0], 1)])


def write_images(folder, sizes=((8, 5),), suffix="png"):
    """Two images of each class "cat" and "dog"; one byte pattern each."""
    for number in range(4):
        path = folder / ("cat", "dog")[number // 2] / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = sizes[number % len(sizes)]
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def pixels_of(number):
    pixels = np.random.default_rng(number).integers(0, 256, (8, 5, 3), dtype=np.uint8)
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def write_table(folder, rows, header=("path", "label")):
    path = folder / "table.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def pictures(folder, labels, seed=0, count=6):
    """A folder of small images of one colour a label."""
    draw = np.random.default_rng(seed)
    for label in labels:
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.clip(COLOURS[label] + draw.normal(0, 25, (20, 24, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder
