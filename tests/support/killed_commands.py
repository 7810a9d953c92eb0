"""Runs commands that are killed at random moments, until so many were; prints what it did.

    python -m tests.support.killed_commands KILLS SEED

A year of a model through the command line: update, rollback, forget, and a merge. A killed command is given again, as a
person would, unless it was committed. Every model must end, bit for bit, as one that was never disturbed. Processes are
forked from one that has imported torch already, because that takes longer than a command.
"""

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.cli import main as dlcft
from dlcft.store.store import Store
from tests.support.samples import pictures
from tests.support.stores import learned

TRAINED = ["--method", "ewc", "--set", "epochs=1"]
LABELS = {"january": ["red", "green"], "february": ["green", "blue"], "march": ["blue", "red"], "other": ["grey"]}
CLOSED = ["--method", "ranpac", "--set", "random_features=200"]


def merge(model: Path, other: Path) -> None:
    """Add what another model has learned; there is no command for it."""
    mine, theirs = (Learner.load(path, load_backbone("shipped").module, device="cpu") for path in (model, other))
    mine.merge(theirs)
    mine.save()


def year(model: Path, data: Path, closed: bool) -> list[Callable[[], None]]:
    """The commands, each of which commits once."""

    def command(name: str, *options: object) -> Callable[[], None]:
        return lambda: dlcft([name, "--model", str(model), *map(str, options)])

    month = [data / name for name in ("january", "february", "march")]
    steps = [
        command("update", "--data", month[0], *(CLOSED if closed else TRAINED)),
        command("update", "--data", month[1], "--holdout", month[0]),
        command("rollback", "--version", 1 if closed else 2),
        command("update", "--data", month[2], "--keep", 3),
    ]
    if closed:
        steps += [
            command("forget", "--data", month[0], "--keep", 1),
            lambda: merge(model, data / "other-model"),
            command("rollback", "--version", 4),
        ]
    return steps


def run(step: Callable[[], None], wait: float | None) -> bool:
    """Run a step in a process of its own, killed after `wait` seconds; whether it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                step()
            code = 0
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        finally:
            os._exit(code)
    if wait is not None:
        time.sleep(wait)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(f"a command ended with exit code {os.WEXITSTATUS(status)}")
    return os.WIFSIGNALED(status)


def committed(model: Path, events: int) -> bool:
    """Whether a command was committed since there were so many events; a first training saves a version before it."""
    now = Store(model).look()
    return now.events > events and now.current is not None and now.current.header["tasks"] > 0


def main(kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    draw, killed, years = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for seed, (name, labels) in enumerate(LABELS.items()):
            pictures(folder / name, labels, seed=seed)
        dlcft(["update", "--model", str(folder / "other-model"), "--data", str(folder / "other"), *CLOSED])
        expected, seconds = {}, {}
        for closed in (True, False):
            whole = folder / f"whole-{closed}"
            for place, step in enumerate(year(whole, folder, closed)):
                start = time.perf_counter()
                run(step, None)
                seconds[closed, place] = time.perf_counter() - start
            expected[closed] = learned(whole)
        while killed < kills:
            closed, model = years % 3 < 2, folder / f"model-{years}"
            for place, step in enumerate(year(model, folder, closed)):
                events = Store(model).look().events
                while not committed(model, events):
                    killed += run(step, draw.uniform(0, seconds[closed, place]) * draw.choice([0.5, 1, 1.2]))
            run(lambda model=model: dlcft(["forget", "--model", str(model), "--keep", "1"]), None)
            if Store(model).leftovers() or learned(model) != expected[closed]:
                sys.exit(f"year {years} ended otherwise")
            shutil.rmtree(model)
            years += 1
    print(f"{killed} kills, {years} years, all bit-equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
