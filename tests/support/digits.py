"""A small real stream: handwritten digits, turned by another quarter in every task."""

import functools

import numpy as np
import torch
from sklearn.datasets import load_digits

TASKS = 3


@functools.cache
def turned(task, held_out=False):
    """Images (1 × 8 × 8) and labels of one task; a third of them is held out."""
    digits = load_digits()
    chosen = (np.arange(len(digits.target)) % 3 == 0) == held_out
    x = np.rot90(digits.images[chosen] / 16, task, (1, 2)).copy()
    return torch.tensor(x, dtype=torch.float32)[:, None], torch.tensor(digits.target[chosen])


@torch.no_grad()
def accuracy(outputs, y):
    return float((outputs.argmax(1) == y).float().mean())


def forgetting(table):
    """The mean loss of accuracy on earlier tasks, from rows of accuracies on all tasks, one row after each task."""
    last = len(table) - 1
    return sum(table[task][task] - table[last][task] for task in range(last)) / last
