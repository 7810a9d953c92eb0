"""Many experiments: one after another, several at once on this machine, or on a cluster. No scheduler of our own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from dlcft.bench.experiment import Experiment, Result, run

Executor = Literal["local", "slurm", "debug"]


def run_all(
    experiments: Sequence[Experiment],
    out: Path,
    *,
    data: Path | None = None,
    weights: str | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    report: Callable[[str], None] = print,
) -> list[Result]:
    """The result of each experiment, in order; what is in `out` already is read.

    Args:
        experiments: what to do.
        out: the folder of results.
        data: see `run`.
        weights: see `run`.
        jobs: how many at once on this machine, through joblib; each gets its share of the cores.
        executor: hand the list to submitit instead: "slurm" for a cluster, "local" for processes on this machine.
        report: called with a line after each task, if nothing runs at once.

    Raises:
        ValueError: when jobs is below 1.
        ImportError: when submitit is asked for and missing.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; it must be at least 1.")
    if executor is not None:
        return _submitted(experiments, out, data, weights, executor)
    if jobs == 1:
        return [run(experiment, out, data=data, weights=weights, report=report) for experiment in experiments]
    import joblib

    threads = max(1, (os.cpu_count() or 1) // jobs)
    work = (joblib.delayed(_alone)(experiment, out, data, weights, threads) for experiment in experiments)
    return list(joblib.Parallel(n_jobs=jobs)(work))


def _alone(experiment: Experiment, out: Path, data: Path | None, weights: str | None, threads: int) -> Result:
    """In a process of its own, silently, with so many threads: processes that share cores must not fight for them."""
    import torch

    torch.set_num_threads(threads)
    return run(experiment, out, data=data, weights=weights, report=_silent)


def _silent(line: str) -> None:
    pass


def _submitted(
    experiments: Sequence[Experiment], out: Path, data: Path | None, weights: str | None, executor: Executor
) -> list[Result]:
    try:
        import submitit
    except ImportError as error:
        raise ImportError("executor= needs submitit: pip install 'dlcft[cluster]'.") from error
    handle = submitit.AutoExecutor(folder=out / "logs", cluster=executor)
    threads = os.cpu_count() or 1
    jobs = [handle.submit(_alone, experiment, out, data, weights, threads) for experiment in experiments]
    return [job.result() for job in jobs]
