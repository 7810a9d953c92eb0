"""Answers of `dlcft predict`, and their files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dlcft.cli.arguments import printable, warn

if TYPE_CHECKING:
    from torch import Tensor

    from dlcft.data.samples import Inputs
    from dlcft.learner.learner import Learner


def predictions(
    learner: Learner, what: Inputs, top: int, batch_size: int, skipped: list[str]
) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """The name of each input that can be read, with labels and probabilities; sentences on others go to `skipped`.

    With several workers each answers every n-th batch.
    """
    import torch

    from dlcft.network import workers

    names, place = learner.labels(), workers.place()
    parts = torch.arange(len(what)).split(batch_size)
    for first in range(0, len(parts), workers.count()):
        own: list[tuple[str, list[tuple[str, float]]]] = []
        problems: list[str] = []
        with workers.together(), workers.apart():
            for indices in parts[first + place : first + place + 1]:
                for index, x in _readable(what, indices, problems):
                    for row, position in zip(learner.predict_proba(x), index.tolist(), strict=True):
                        best = row.topk(min(top, len(names)))
                        found = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                        own.append((what.name(position), [(str(names[i]), p) for p, i in found]))
        for answers, sentences in workers.gathered((own, problems)):
            for sentence in sentences:
                skipped.append(sentence)
                warn(f"skipped: {sentence}")
            yield from answers


def _readable(what: Inputs, indices: Tensor, skipped: list[str]) -> Iterator[tuple[Tensor, Any]]:
    """The inputs at these positions as a batch; one by one where one of them cannot be read."""
    try:
        x = what.fetch(indices)
    except ValueError as error:
        if len(indices) > 1:
            for index in indices.split(1):
                yield from _readable(what, index, skipped)
        else:
            skipped.append(str(error))
    else:
        yield indices, x


def write_rows(rows: Iterator[tuple[str, list[tuple[str, float]]]], file: Any, format_: str, top: int) -> None:
    """`predictions` as CSV, or one JSON object a line; see `_cell` for spreadsheets."""
    if format_ == "json":
        for name, answer in rows:
            given = [{"label": label, "probability": p} for label, p in answer]
            file.write(json.dumps({"input": name, "answers": given}) + "\n")
        return
    writer = csv.writer(file)
    shown = printable if file.isatty() else str
    numbers = [""] if top == 1 else [f" {number}" for number in range(1, top + 1)]
    writer.writerow(["input", *(f"{kind}{number}" for number in numbers for kind in ("label", "probability"))])
    for name, answer in rows:
        cells = (cell for label, p in answer for cell in (_cell(shown(label)), f"{p:.6g}"))
        writer.writerow([_cell(shown(name)), *cells])


def _cell(text: str) -> str:
    """A text for a spreadsheet, which would run one that begins as a formula does: an apostrophe keeps it a text."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
