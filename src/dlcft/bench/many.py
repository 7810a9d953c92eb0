"""Many experiments: one after another, several at once on this machine, or on a cluster. No scheduler of our own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from dlcft.bench.experiment import Experiment, Result, run

Executor = Literal["local", "slurm"]
Item = TypeVar("Item")
Made = TypeVar("Made")
TIMEOUT_MINUTES = 24 * 60  # submitit's own is 5; an experiment that is cut off is queued again, and goes on


def each(work: Callable[[Item], Made], items: Sequence[Item], jobs: int = 1) -> Iterator[tuple[int, Made]]:
    """What a function makes of each item, with the item's place, as soon as it is made.

    Args:
        work: what to do; if several are made at once, it and what it returns go to another process and back.
        items: begun in this order.
        jobs: how many at once on this machine, through joblib; each gets its share of the cores.

    Raises:
        ValueError: when jobs is below 1.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; it must be at least 1.")
    if jobs == 1:
        yield from ((place, work(item)) for place, item in enumerate(items))
        return
    import joblib

    alone = _Alone(work, max(1, cores() // jobs))
    parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1, pre_dispatch=jobs)
    yield from parallel(joblib.delayed(alone)(place, item) for place, item in enumerate(items))


def run_all(
    experiments: Sequence[Experiment],
    out: Path,
    *,
    data: Path | None = None,
    weights: str | None = None,
    tensorboard: Path | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    cluster: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = print,
) -> list[Result]:
    """The result of each experiment, in order; what is in `out` already is read.

    Args:
        experiments: what to do.
        out: the folder of results.
        data: see `run`.
        weights: see `run`.
        tensorboard: see `run`.
        jobs: how many at once on this machine, see `each`.
        executor: hand the list to submitit instead: "slurm" for a cluster, "local" for processes on this machine.
        cluster: parameters of submitit's executor, such as `timeout_min` or `slurm_partition`.
        report: called with a line after each task, or, where several run at once, after each experiment.

    Raises:
        ValueError: when jobs is below 1, submitit refuses a parameter, or a submitted experiment fails.
        ImportError: when submitit is asked for and missing.
    """
    if cluster and executor is None:
        raise ValueError(f"the parameter {next(iter(cluster))!r} is for an executor; give executor='slurm' or 'local'.")
    options: dict[str, Any] = {"out": out, "data": data, "weights": weights, "tensorboard": tensorboard}
    if executor is not None or jobs != 1:
        # what is there already need not wait for a machine
        apart = {experiment.key: experiment for experiment in experiments}.values()  # one may be asked for twice
        missing = [experiment for experiment in apart if not (out / experiment.file).exists()]
        silent = partial(run, **options, report=_silent)
        for _, result in (
            each(silent, missing, jobs)
            if executor is None
            else _submitted(silent, missing, out, executor, {"timeout_min": TIMEOUT_MINUTES, **(cluster or {})})
        ):
            report(f"{result.experiment.method}, {result.experiment.scenario}: {result.accuracy:.1%}")
    return [run(experiment, **options, report=report) for experiment in experiments]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _Alone:
    """Work in a process of its own.

    Attributes:
        work: what to do with an item.
        threads: processes that share cores must not fight for them; None on a machine of its own.
    """

    work: Callable[[Any], Any]
    threads: int | None

    def __call__(self, place: int, item: Any) -> tuple[int, Any]:
        """The item's place, and what was made of it."""
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return place, self.work(item)

    def checkpoint(self, place: int, item: Any) -> Any:
        """What submitit does when a cluster takes the machine away: the same again, which goes on from its progress."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, place, item)


def _silent(line: str) -> None:
    pass


def _submitted(
    work: Callable[[Experiment], Result],
    experiments: Sequence[Experiment],
    out: Path,
    executor: Executor,
    parameters: dict[str, Any],
) -> Iterator[tuple[int, Result]]:
    try:
        import submitit
    except ImportError as error:
        raise ImportError("executor= needs submitit: pip install 'dlcft[cluster]'.") from error
    share = max(1, cores() // max(1, len(experiments)))
    alone = _Alone(work, share if executor == "local" else None)
    try:
        handle = submitit.AutoExecutor(folder=out / "logs", cluster=executor)
        handle.update_parameters(**parameters)
        jobs = handle.map_array(alone, range(len(experiments)), experiments)
    # submitit's words for a parameter that it does not know or take, and for a machine without a cluster
    except (NameError, AssertionError, RuntimeError) as error:
        raise ValueError(f"submitit refuses: {str(error).splitlines()[0]}") from None
    yield from (_result(job, experiment) for job, experiment in zip(jobs, experiments, strict=True))


def _result(job: Any, experiment: Experiment) -> tuple[int, Result]:
    from submitit.core.utils import UncompletedJobError

    try:
        made: tuple[int, Result] = job.result()
        return made
    except UncompletedJobError as error:
        parts = str(error).split("-" * 22)  # submitit's words, the traceback, and where its logs are
        reason = (parts[1] if len(parts) > 2 else parts[0]).strip().splitlines()[-1]
        raise ValueError(f"{experiment.file} failed ({reason}); its log is {job.paths.stderr}.") from None
