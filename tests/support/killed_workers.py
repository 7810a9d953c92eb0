"""Two workers under torchrun, of which one is killed at a random step, again and again; prints what it did.

    python -m tests.support.killed_workers KILLS SEED

torchrun starts them anew, and they go on from the last note. In the end the model must be, bit for bit, the one of two
workers that nobody has disturbed.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.samples import pictures
from tests.support.stores import learned

OPTIONS = ["--method", "ewc", "--set", "epochs=4", "--set", "batch_size=4", "--set", "batchnorm=frozen"]
STEPS = 4 * 6  # of a task: four epochs over 24 images


def worker(kills: int, seed: int, words: list[str]) -> None:
    """One worker: a command, in which it or the other one dies at a random step, as long as there are kills left."""
    from dlcft.__main__ import main as dlcft
    from dlcft.learner import notes, train

    notes.PROGRESS_SECONDS = 0.0  # after every step
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    draw = random.Random(f"{seed} {life}")
    victim, last, step = draw.randrange(2), draw.randrange(1, STEPS // 2), train.Run._step
    done = []

    def deadly(run, *arguments):
        if life < kills and len(done) == last and os.environ["RANK"] == str(victim):
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(step(run, *arguments))
        return done[-1]

    train.Run._step = deadly
    sys.argv = ["dlcft", *words]
    dlcft()


def update(model: Path, data: Path, kills: int, seed: int) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    restarts = str(kills + 5)  # gloo itself may abort a process that ends
    command = [*torchrun, "--max-restarts", restarts, "-m", "tests.support.killed_workers", "worker"]
    command += [str(kills), str(seed), "update", "--model", str(model), "--data", str(data), *OPTIONS]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return learned(model)


def main(kills: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        data = pictures(Path(scratch, "data"), ["red", "green"], count=12)
        expected = update(Path(scratch, "whole"), data, 0, seed)
        if update(Path(scratch, "killed"), data, kills, seed) != expected:
            sys.exit("it ended otherwise")
    print(f"{kills} kills of a worker, bit-equal")


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
