"""Many experiments: one after another, several at once on this machine, or on a cluster. No scheduler of our own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from dlcft.bench.experiment import Experiment, Result, run
from dlcft.network import workers

Executor = Literal["local", "slurm"]
Item = TypeVar("Item")
Made = TypeVar("Made")
TIMEOUT_MINUTES = 24 * 60  # submitit's own is 5; an experiment that is cut off is queued again, and goes on


def each(work: Callable[[Item], Made], items: Sequence[Item], jobs: int = 1) -> Iterator[tuple[int, Made]]:
    """Apply a function to each item, in order; gives the item's place and the function's value as soon as it is there.

    With several jobs, joblib's processes work on this machine, each with its share of the cores.
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
    jobs: int = 1,
    executor: Executor | None = None,
    cluster: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = print,
    **options: Any,
) -> list[Result]:
    """The result of each experiment, in order; results that are in `out` already are read.

    Several jobs run at once on this machine, see `each`; or an executor of submitit takes the list: "slurm" for a
    cluster, "local" for processes here. `cluster` has its parameters, such as `timeout_min` or `slurm_partition`; with
    `nodes` and `tasks_per_node` several processes learn each experiment together.
    `report` gets a line after each task, or, where several run at once, after each experiment. `options` are of `run`.
    """
    if cluster and executor is None:
        raise ValueError(f"the parameter {next(iter(cluster))!r} is for an executor; give executor='slurm' or 'local'.")
    if executor is not None or jobs != 1:
        # results that are there already need not wait for a machine
        apart = {experiment.key: experiment for experiment in experiments}.values()
        missing = [experiment for experiment in apart if not (out / experiment.file).exists()]
        work = partial(run, out=out, report=silent, **options)
        parameters = {"timeout_min": TIMEOUT_MINUTES, **(cluster or {})}
        made = _submitted(work, missing, out, executor, parameters) if executor else each(work, missing, jobs)
        for _, result in made:
            report(f"{result.experiment.title}, {result.experiment.scenario}: {result.accuracy:.1%}")
    return [run(experiment, out, report=report, **options) for experiment in experiments]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _Alone:
    """Work in a process of its own."""

    work: Callable[[Any], Any]
    threads: int | None  # its share of the cores; None on a machine of its own

    def __call__(self, place: int, item: Any) -> tuple[int, Any]:
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        with _workers_of_job():
            return place, self.work(item)

    def checkpoint(self, place: int, item: Any) -> Any:
        """Called by submitit when a cluster takes the machine away: the same again goes on from its progress."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, place, item)


@contextmanager
def _workers_of_job() -> Iterator[None]:
    """Join the other processes of a job of submitit's that has several (`tasks_per_node`, `nodes`)."""
    submitit, job = sys.modules.get("submitit"), None
    if submitit is not None:
        with suppress(RuntimeError):  # this is no job of submitit's
            job = submitit.JobEnvironment()
    if submitit is None or job is None or job.num_tasks == 1:
        yield
        return
    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    with workers.joined():
        yield


def silent(line: str) -> None:
    """Report nothing."""


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
    for job, experiment in zip(jobs, experiments, strict=True):
        failure = job.exception()
        if failure is not None:
            parts = str(failure).split("-" * 22)  # submitit's words, the traceback, and where its logs are
            reason = (parts[1] if len(parts) > 2 else parts[0]).strip().splitlines()[-1]
            raise ValueError(f"{experiment.file} failed ({reason}); its log is {job.paths.stderr}.")
        yield job.results()[0]
