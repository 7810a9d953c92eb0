"""Events of a run, task by task: lines of JSON for programs, and TensorBoard for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"  # in the folder of results, of all runs there
_SCALARS = ("predicted_increase", "measured_increase", "knn", "seconds_training", "seconds_remembering")


def append_event(out: Path, event: Mapping[str, Any]) -> None:
    """Add a line with the time to the folder's events; lines of several processes do not mix."""
    line = json.dumps({"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), **event}) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    # one write to a file that is open for appending is not interrupted by another
    with (out / EVENTS).open("ab", buffering=0) as file:
        file.write(line.encode())


def need_tensorboard() -> None:
    """Raise an ImportError that says how to install TensorBoard, if it is missing."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ImportError("--tensorboard needs the package tensorboard: pip install 'dlcft[tensorboard]'.") from error


def write_board(folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Write a run's last task into a folder that TensorBoard reads: steps are tasks, and epochs for the loss."""
    from torch.utils.tensorboard import SummaryWriter

    entry, tasks = history[-1], len(history)
    before = sum(len(earlier["loss"]) for earlier in history[:-1])
    scalars = {name: entry[name] for name in _SCALARS if entry.get(name) is not None}
    accuracies: list[float] = entry.get("accuracy") or []
    if accuracies:
        scalars["accuracy"] = sum(accuracies) / len(accuracies)
    if len(accuracies) > 1:
        scalars |= {f"accuracy on task/{number}": value for number, value in enumerate(accuracies, 1)}
    with SummaryWriter(str(folder)) as board:
        for name, value in scalars.items():
            board.add_scalar(name, value, tasks)
        for epoch, value in enumerate(entry["loss"], before + 1):
            board.add_scalar("loss", value, epoch)
