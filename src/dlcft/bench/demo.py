"""The demonstration: a pre-trained network learns upright digits, then turned ones, and is asked for both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dlcft.bench.backbones import shipped_resnet18
from dlcft.bench.datasets import Images, digits
from dlcft.classifier import Classifier
from dlcft.estimators import estimate
from dlcft.linearize import Linearized
from dlcft.losses import ScaledMSE
from dlcft.memory import Memory
from dlcft.prepare import fold_batchnorm

log = logging.getLogger("dlcft")
HEAD = "digits"


@dataclass(frozen=True)
class Outcome:
    """Accuracies of one method after both tasks, and what the memory predicted of the first task's loss."""

    method: str
    first: float
    second: float
    predicted_increase: float | None = None
    measured_increase: float | None = None


def run(*, samples: int = 500, epochs: int = 5, seed: int = 0, report: Callable[[Outcome], None]) -> list[Outcome]:
    """Learn two tasks one after the other with and without a memory, and both at once."""
    tasks = [digits(0.0, seed=seed), digits(75.0, seed=seed)]
    tasks = [Images(t.x_train[:samples], t.y_train[:samples], t.x_test, t.y_test) for t in tasks]
    loss = ScaledMSE()
    outcomes = []
    for method in ("none", "kfac", "joint"):
        model = Classifier(Linearized(fold_batchnorm(shipped_resnet18())), 128)
        model.add_head(HEAD, 10)
        generator = torch.Generator().manual_seed(seed)
        predicted = measured = None
        if method == "joint":
            both = (torch.cat([t.x_train for t in tasks]), torch.cat([t.y_train for t in tasks]))
            _train(model, *both, loss, None, epochs, generator)
        else:
            memory = None
            for task in tasks:
                before = _loss(model, tasks[0], loss)
                _train(model, task.x_train, task.y_train, loss, memory, epochs, generator)
                if memory is not None:
                    predicted = memory.predicted_increase(model.params(HEAD))
                    measured = _loss(model, tasks[0], loss) - before
                memory = _remember(model, task, loss, memory, generator) if method == "kfac" else None
        first, second = (_accuracy(model, task) for task in tasks)
        outcome = Outcome(method, first, second, predicted, measured)
        report(outcome)
        outcomes.append(outcome)
    return outcomes


def _remember(
    model: Classifier, task: Images, loss: ScaledMSE, memory: Memory | None, generator: torch.Generator
) -> Memory:
    batches = list(zip(task.x_train.split(64), task.y_train.split(64), strict=True))
    found = estimate("kfac", model, batches, loss, HEAD, generator=generator, gradient=True)
    params = model.params(HEAD)
    if memory is None:
        return Memory.of(params, found.curvature, 1, found.gradient)
    return memory.absorb(params, found.curvature, 1, found.gradient)


def _train(
    model: Classifier,
    x: Tensor,
    y: Tensor,
    loss: ScaledMSE,
    memory: Memory | None,
    epochs: int,
    generator: torch.Generator,
) -> None:
    params = model.params(HEAD)
    optimizer = torch.optim.Adam(params.values(), lr=1e-3, weight_decay=1e-5)
    remembered = 0.0 if memory is None else memory.weight
    for epoch in range(epochs):
        for batch in _batches(len(y), 50, generator):
            value = loss.value(model(x[batch], HEAD), y[batch]) / (1 + remembered)
            if memory is not None:
                value = value + remembered / (1 + remembered) * memory.penalty(params)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        log.info("epoch %d of %d: loss %.2f", epoch + 1, epochs, value.item())


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    yield from torch.randperm(count, generator=generator).split(size)


@torch.no_grad()
def _loss(model: Classifier, task: Images, loss: ScaledMSE) -> float:
    return float(loss.value(model(task.x_train, HEAD), task.y_train))


@torch.no_grad()
def _accuracy(model: Classifier, task: Images) -> float:
    return float((model(task.x_test, HEAD).argmax(1) == task.y_test).float().mean())
