"""What `dlcft predict` answers, and how it is written."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from dlcft.data.samples import Inputs
    from dlcft.learner.learner import Learner


def predictions(
    learner: Learner, what: Inputs, top: int, batch_size: int, skipped: list[str]
) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """The name of each input that can be read, with labels and probabilities; sentences on others go to `skipped`."""
    import torch

    from dlcft.update.calibration import probabilities

    names = learner.labels()
    temperature = learner.notes.get("temperature") or learner.recipe.scale / 10
    for indices in torch.arange(len(what)).split(batch_size):
        for index, x in _readable(what, indices, skipped):
            given = probabilities(learner.outputs(x), temperature)
            for row, place in zip(given, index.tolist(), strict=True):
                best = row.topk(min(top, len(names)))
                answer = [(str(names[i]), float(p)) for p, i in zip(best.values, best.indices.tolist(), strict=True)]
                yield what.called(place), answer


def _readable(what: Inputs, indices: Tensor, skipped: list[str]) -> Iterator[tuple[Tensor, Any]]:
    """The inputs at these positions as a batch; one by one where one of them cannot be read."""
    try:
        yield indices, what.fetch(indices)
        return
    except ValueError:
        pass
    for index in indices.split(1):
        try:
            x = what.fetch(index)
        except ValueError as error:
            skipped.append(str(error))
            print(f"dlcft: skipped: {error}", file=sys.stderr)
            continue
        yield index, x


def write_rows(rows: Iterator[tuple[str, list[tuple[str, float]]]], file: Any, format_: str, top: int) -> None:
    """`predictions` as CSV, or one JSON object a line."""
    if format_ == "json":
        for name, answer in rows:
            file.write(
                json.dumps({"input": name, "answers": [{"label": a, "probability": p} for a, p in answer]}) + "\n"
            )
        return
    writer = csv.writer(file)
    writer.writerow(["input", *(f"{kind}{number}" for number in _numbers(top) for kind in ("label", "probability"))])
    for name, answer in rows:
        writer.writerow([name, *(cell for label, p in answer for cell in (label, f"{p:.6g}"))])


def _numbers(top: int) -> list[str]:
    return [""] if top == 1 else [f" {number}" for number in range(1, top + 1)]
