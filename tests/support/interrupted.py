"""Runs `dlcft update` and presses Ctrl-C at random moments; prints how often it came before the end.

    python -m tests.support.interrupted TIMES SEED

Every interrupted command must end with exit code 130, one line, and a directory that the same command can go on with.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dlcft.store.store import Store
from tests.support.samples import pictures

# `ready` is printed when Python itself has started: what it does before is out of our hands
PROGRAM = "import dlcft.__main__ as program; print('ready', flush=True); program.main()"


def update(model: Path, data: Path, seconds: float) -> tuple[int, str, float]:
    """Exit code and standard error of an update that is interrupted after so many seconds, and how long it took."""
    options = ["update", "--model", str(model), "--data", str(data), "--method", "ewc", "--set", "epochs=2"]
    command = [sys.executable, "-c", PROGRAM, *options]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **streams) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        start = time.perf_counter()
        time.sleep(0.005)  # the handler is set
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate()
        return process.returncode, told, time.perf_counter() - start


def main(times: int, seed: int) -> None:
    draw, hits = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as scratch:
        data = pictures(Path(scratch, "data"), ["red", "green"])
        _, _, whole = update(Path(scratch, "model-whole"), data, 600)
        for run in range(times):
            model = Path(scratch, f"model-{run}")
            code, told, _ = update(model, data, draw.uniform(0, whole))
            lines = [line for line in told.splitlines() if "interrupted" in line]
            if code not in (0, 130) or "Traceback" in told or (code == 130) != (len(lines) == 1):
                sys.exit(f"run {run}: exit code {code}: {told}")
            hits += code == 130
            if run % 10 == 0 or code == 0:
                code, told, _ = update(model, data, 600)
                if (code, "as task 1 already" in told) not in ((0, False), (2, True)) or Store(model).current is None:
                    sys.exit(f"run {run}: the same command again: exit code {code}: {told}")
    print(f"{times} times, {hits} before the end")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
