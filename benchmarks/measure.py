"""How the benchmarks measure, and how their tables are kept.

Programs take turns, and a ratio is the median of the rounds' ratios, with the quartiles beside it. Memory is measured
in a process of its own. A run says on which machine it was, how busy others kept that machine, and with which versions.
`--out FILE` keeps all that, and `python benchmarks/tables.py` puts the kept tables into the documents.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

ROUNDS = 9
BUSY = 0.05  # a larger share of the processor that others take distorts ratios
FREED = "MALLOC_MMAP_THRESHOLD_"

Program = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self:.2f}"

    def __format__(self, how: str) -> str:
        median, low, high = (format(value, how or ".2f") for value in (self.median, self.low, self.high))
        return f"{median} ({low}–{high})"


@dataclass(frozen=True)
class Times:
    """Seconds of programs in the rounds in which they took turns."""

    seconds: dict[str, list[float]]

    def __getitem__(self, name: str) -> float:
        """The median of a program's seconds."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, to: str) -> Spread:
        """Of two programs, from the rounds' own ratios: a round that was slow for both does not count as one."""
        return self.combined(lambda s: s[name] / s[to])

    def combined(self, what: Callable[[dict[str, float]], float]) -> Spread:
        """Any number that follows from the seconds of one round."""
        rounds = [dict(zip(self.seconds, row, strict=True)) for row in zip(*self.seconds.values(), strict=True)]
        return Spread.of([what(row) for row in rounds])


def timed(programs: dict[str, Program], rounds: int = ROUNDS, *, warm_up: bool = True) -> Times:
    """Run programs in turns, after one round to warm up.

    Programs that run for many seconds do not need to warm up, apart from the first.
    """
    found: dict[str, list[float]] = {name: [] for name in programs}
    for program in list(programs.values())[: None if warm_up else 1]:
        program()
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            found[name].append(time.perf_counter() - start)
    return Times(found)


# Memory


def _status(field: str) -> int:
    """Bytes of VmRSS (resident now) or VmHWM (at the peak of this program, not of what started it)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _peak(prepare: Callable[..., Program], arguments: tuple, answer) -> None:
    program = prepare(*arguments)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on: not that of preparing
    before = _status("VmRSS")
    program()
    answer.send(max(0, _status("VmHWM") - before))


def peak_memory(prepare: Callable[..., Program], *arguments: object) -> int:
    """Bytes that `prepare(*arguments)()` needs at its peak above what `prepare` left resident (Linux).

    There every tensor is given back when it is freed. Otherwise the C library keeps freed memory or not, depending on
    the order of sizes: the same step then takes 1.3 or 1.9 times the memory of another one.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_peak, args=(prepare, arguments, send))
    before = os.environ.get(FREED)
    os.environ[FREED] = str(1 << 16)
    try:
        process.start()
    finally:
        os.environ.pop(FREED)
        if before is not None:
            os.environ[FREED] = before
    send.close()
    try:
        return int(receive.recv())
    finally:
        process.join()


# Reports


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n### {title}\n\n{markdown(header, rows)}", flush=True)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


class Output:
    """The tables of one run, printed at once and kept in a file if one is given."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.tables: dict[str, dict[str, object]] = {}
        self.figures: dict[str, object] = {}

    def table(self, name: str, title: str, header: list[str], rows: list[list[str]]) -> None:
        """Print a table; `name` is the one that documents know it by."""
        table(title, header, rows)
        self.tables[name] = {"title": title, "header": header, "rows": rows, "command": self._command()}

    def _command(self) -> str:
        return " ".join(["python", *(part for part in sys.argv if part not in ("--out", str(self.file)))])

    def write(self, machine: dict[str, object]) -> None:
        if self.file is None:
            return
        kept = {"command": self._command(), "machine": machine, "tables": self.tables, "figures": self.figures}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        partial.replace(self.file)


def arguments(description: str | None, rounds: int | None = ROUNDS) -> argparse.ArgumentParser:
    """The options that benchmarks share: `--rounds`, unless there are none, and `--out`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        how = "turns behind each median (default: %(default)s)"
        parser.add_argument("--rounds", type=int, default=rounds, help=how)
    parser.add_argument("--out", type=Path, help="a file that keeps the tables, such as results/benchmarks/NAME.json")
    return parser


@contextmanager
def reported(file: Path | None) -> Iterator[Output]:
    """Print the machine, then the tables that are given, then how idle the machine was; keep all of it."""
    output, machine = Output(file), describe_machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    load, start = os.getloadavg()[0], _processor()
    if load > 0.5:
        print(f"warning: the load average is {load:.2f}: the machine is not idle, or was not a minute ago.")
    yield output
    others = _others(start, _processor())
    print(f"\nOthers took {others:.1%} of the processor.")
    if others > BUSY:
        print("warning: that is too much; measure again on an idle machine.")
    output.write({**machine, "load before": round(load, 2), "others' share": round(others, 3)})


def describe_machine() -> dict[str, object]:
    """The processor, versions and the day."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "dlcft")},
        "day": datetime.now(timezone.utc).date().isoformat(),
    }


@dataclass(frozen=True)
class _Ticks:
    busy: float  # of all programs, and what another machine on the same processor has taken
    all: float
    own: float  # of this program and those that it has waited for


def _processor() -> _Ticks:
    fields = next((line.split()[1:] for line in _lines("/proc/stat") if line.startswith("cpu ")), ["0"] * 8)
    user, nice, system, idle, waiting, *interrupts = (int(field) for field in fields[:8])
    busy = user + nice + system + sum(interrupts)
    return _Ticks(busy, busy + idle + waiting, sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK"))


def _others(start: _Ticks, end: _Ticks) -> float:
    return max(0.0, (end.busy - start.busy) - (end.own - start.own)) / max(1.0, end.all - start.all)


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:  # not Linux
        return []
