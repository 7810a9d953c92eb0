"""How the benchmarks measure: everything in one run, interleaved, medians; memory in a process of its own."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path


def medians(programs: dict[str, Callable[[], object]], rounds: int = 7, *, warm_up: bool = True) -> dict[str, float]:
    """Seconds of each program: the median over rounds in which they take turns, after one round to warm up.

    Programs that run for many seconds do not need to warm up, apart from the first.
    """
    times: dict[str, list[float]] = {name: [] for name in programs}
    for program in list(programs.values())[: None if warm_up else 1]:
        program()
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _status(field: str) -> int:
    """Bytes of VmRSS (resident now) or VmHWM (at the peak of this program, not of what started it)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _peak(prepare: Callable[..., Callable[[], object]], arguments: tuple, answer) -> None:
    program = prepare(*arguments)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on: not that of preparing
    before = _status("VmRSS")
    program()
    answer.send(max(0, _status("VmHWM") - before))


def peak_memory(prepare: Callable[..., Callable[[], object]], *arguments: object) -> int:
    """Bytes that `prepare(*arguments)()` needs at its peak above what `prepare` left resident (Linux)."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_peak, args=(prepare, arguments, send))
    process.start()
    send.close()
    try:
        return int(receive.recv())
    finally:
        process.join()


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n### {title}\n\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
