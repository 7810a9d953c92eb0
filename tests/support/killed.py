"""Learns in processes that are killed at random moments, until so many were; prints what it did.

    python -m tests.support.killed KILLS SEED

Every run that ends after its kills must hold, bit for bit, what an undisturbed run holds. Processes are forked from one
that has imported torch already, because that takes longer than learning.
"""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from dlcft import Learner
from dlcft.learner import notes
from dlcft.methods.recipes import RECIPES
from dlcft.store.store import Store
from tests.learner.test_learner import SMALL, backbone, data
from tests.support.stores import learned

notes.PROGRESS_SECONDS = 0.0  # after every step
METHODS = ["dlcft", "derpp", "lwf", "dlcft-exact", "dlcft-paper", "ewc"]
STREAM = [data([0, 1], seed=1), data([1, 2], seed=2), data([3, 0], seed=3)]


def learn(method, directory):
    """Begin, or go on where the directory stands."""
    if Store(directory).current is None:
        options = SMALL.get(method, {}) if RECIPES[method].closed_form else {"epochs": 3, "batch_size": 8}
        learner = Learner(backbone(), method, device="cpu", **options)
        learner.save(directory)
    else:
        learner = Learner.load(directory, backbone(), device="cpu")
    while learner.tasks < len(STREAM):
        learner.learn(STREAM[learner.tasks], progress=False)
        learner.save()


def child(method, directory):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            learn(method, directory)
            code = 0
        finally:
            os._exit(code)
    return pid


def main(kills, seed):
    torch.set_num_threads(1)
    draw = random.Random(seed)
    killed = runs = 0
    with tempfile.TemporaryDirectory() as scratch:
        expected, seconds = {}, {}
        for method in METHODS:
            start = time.perf_counter()
            learn(method, Path(scratch, f"whole-{method}"))
            seconds[method] = time.perf_counter() - start
            expected[method] = learned(Path(scratch, f"whole-{method}"))
        while killed < kills:
            method = METHODS[runs % len(METHODS)]
            directory = Path(scratch, f"run-{runs}")
            finished = False
            while not finished:
                pid = child(method, directory)
                time.sleep(draw.uniform(0, seconds[method]) * draw.choice([0.2, 1]))
                os.kill(pid, signal.SIGKILL)
                status = os.waitpid(pid, 0)[1]
                finished = os.WIFEXITED(status)
                killed += not finished
                if finished and os.WEXITSTATUS(status):
                    sys.exit(f"{method} failed after a kill")
            if learned(directory) != expected[method]:
                sys.exit(f"{method} ended otherwise after a kill")
            runs += 1
    print(f"{killed} kills, {runs} runs, all bit-equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
