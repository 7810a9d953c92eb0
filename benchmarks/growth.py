"""How the cost of one more task grows: with tasks, classes, features, the size of images and samples.

    python benchmarks/growth.py --out results/benchmarks/growth.json   # some ten minutes on two cores, 20 GB
    python benchmarks/growth.py --quick                                # small, without memory, half a minute
    python benchmarks/growth.py --draw                                 # docs/figures/growth.svg from the kept numbers

`--only classes,size` measures some and keeps the others of `--out`; `--rounds 1` is quicker. `--work DIR` keeps the
learners of many tasks.

One quantity grows, all else is held (`cases`). Timed is one more task: `learn`, in closed form also `solve`, and
`predict`. Their unit is a plain forward pass over the images of an unchanged task, in the same round. Images are
random: what they show changes no size, and no time but that of the search for a ridge. `dlcft` trains for one epoch.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from growth_shown import drawn, tables
from measure import Program, Times, arguments, peak_memory, reported, timed
from torch import Tensor, nn

from dlcft import Learner
from dlcft.backbones import load_backbone

LONG = 10.0  # programs that take more seconds together run once
BATCH = 64  # of a plain forward pass of 32×32; as many pixels of larger images, so that activations fit in the cache
DEPTH = 4096  # features of all depths, by default; the shipped network has few more, so that random ones fill up
SEVERAL = 256  # images that are predicted, at the most


@dataclass(frozen=True)
class Case:
    """One learner at one point.

    Attributes:
        quantity: what grows.
        value: how far it has grown.
        method: of the learner.
        scenario: of the learner.
        images: of the task that is timed.
        usual: images of 32×32 that are the unit.
        past: images that were learned before, in one task.
        classes: of all tasks.
        size: of an image.
        features: of closed form, without those of the network itself; None for the default.
        work: the directory of learners of many tasks; None if it is learned here.
    """

    quantity: str
    value: int
    method: str
    scenario: str = "data-il"
    images: int = 256
    usual: int = 256
    past: int = 2000
    classes: int = 10
    size: int = 32
    features: int | None = None
    work: str | None = None

    @property
    def exact(self) -> bool:
        return self.method == "dlcft-exact"

    @property
    def directory(self) -> Path:
        return Path(self.work or "") / f"{self.method}-{self.scenario}-{self.value}"

    @property
    def settings(self) -> dict[str, int]:
        if not self.exact:
            return {"epochs": 1}
        if self.features is None:
            return {}
        return {"depth_features": min(self.features, DEPTH), "random_features": max(0, self.features - DEPTH)}


POINTS = {
    "tasks": (1, 4, 16, 64, 250, 1000),
    "classes": (10, 50, 250, 1000, 5000),
    "features": (400, 900, 1900, DEPTH, 9870, 19870),
    "size": (32, 48, 72, 104, 152, 224),
    "samples": (50, 150, 500, 1500, 5000),
}
QUICK = {
    "tasks": (1, 3),
    "classes": (5, 20),
    "features": (100, 400),
    "size": (32, 48),
    "samples": (20, 40),
}


def cases(quantity: str, *, quick: bool = False, work: str | None = None) -> list[Case]:
    """What is measured, point by point.

    The past is so large that the ridge is searched for in the same way at every point: with at most 1,500 images it is
    found in their span, with more by one factor for each ridge that is tried. With 20,000 features a factor takes half
    a minute; there it is the span.
    """
    found = []
    for value, method in itertools.product((QUICK if quick else POINTS)[quantity], ("dlcft-exact", "dlcft")):
        one = Case(quantity, value, method)
        if quick:
            one = replace(one, images=32, usual=32, past=40, features=300)
        if not one.exact:
            one = replace(one, past=min(one.past, 100))  # a memory of constant size
        if quantity == "tasks":
            small = replace(one, images=min(one.images, 64), usual=min(one.usual, 64), classes=2, work=work)
            small = replace(small, features=300 if quick else 1000)
            found += [replace(small, scenario=scenario) for scenario in ("data-il", "task-il")]
        elif quantity == "classes":
            found.append(replace(one, classes=value, past=max(one.past, 5000 if one.exact and not quick else value)))
        elif quantity == "features" and one.exact:
            found.append(replace(one, features=value, past=min(one.past, 1000)))
        elif quantity == "size":
            found.append(replace(one, size=value, images=min(one.images, 64), usual=min(one.usual, 64)))
        elif quantity == "samples":
            found.append(replace(one, images=value))
    return found


# Learners


@cache
def network() -> nn.Module:
    return load_backbone("shipped").module.eval()


def images(count: int, classes: int, size: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, size, size, generator=generator), torch.arange(count) % classes


def started(case: Case) -> Learner:
    """A learner of one task."""
    scenario: Any = case.scenario
    learner = Learner(network(), case.method, scenario=scenario, device="cpu", **case.settings)
    head = "0" if case.scenario == "task-il" else None
    learner.learn(images(case.past, case.classes), head=head, progress=False)  # small: their size changes no state
    return learner


def prepared(case: Case) -> Learner:
    """A learner that is about to learn the task that is timed."""
    if case.work is None:
        return started(case)
    return Learner.load(case.directory, network(), version=1, device="cpu")


def chain(points: Sequence[Case]) -> None:
    """Learners of more and more tasks, each of two images; those that are there are not learned again."""
    torch.set_num_threads(1)  # several chains at a time
    known = [case for case in points if case.directory.exists()]
    if len(known) == len(points):
        return
    learner = prepared(known[-1]) if known else started(points[0])
    tiny = images(2, 2)
    for case in points[len(known) :]:
        while learner.tasks < case.value:
            head = str(learner.tasks) if case.scenario == "task-il" else None
            learner.learn(tiny, head=head, progress=False)
        learner.save(case.directory)


def build_chains(found: list[Case]) -> None:
    """The learners of many tasks, two at a time: nothing is timed meanwhile."""
    kinds = sorted({(case.method, case.scenario) for case in found})
    chains = [[case for case in found if (case.method, case.scenario) == kind] for kind in kinds]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(chain, chains))


# One point


def one_more(case: Case, learner: Learner) -> Callable[[], None]:
    """Learn the task that is timed; with a head for each task, a new one."""
    task = images(case.images, case.classes, case.size)

    def learn() -> None:
        head = str(learner.tasks) if case.scenario == "task-il" else None
        learner.learn(task, head=head, progress=False)

    return learn


def whole_step(case: Case) -> Program:
    """All that one more task takes, for its memory."""
    if case.work is not None:  # a learner that is loaded has computed nothing yet: libraries would take memory now
        other = started(replace(case, past=case.images))
        one_more(case, other)()
        other.solve()
    learner = prepared(case)
    learn = one_more(case, learner)

    def program() -> None:
        learn()
        learner.solve()

    return program


@torch.no_grad()
def forward(x: Tensor) -> None:
    for part in x.split(max(4, BATCH * 32**2 // x.shape[-1] ** 2)):
        network()(part)


def programs(case: Case, learner: Learner) -> dict[str, Program]:
    same, head = images(case.images, 1, case.size)[0], "0" if case.scenario == "task-il" else None
    found: dict[str, Program] = {"unit": partial(forward, images(case.usual, 1)[0])}
    if case.quantity in ("size", "samples"):
        found["plain"] = partial(forward, same)
    found["learn"] = one_more(case, learner)
    if case.exact:
        found["solve"] = learner.solve
    return found | {"predict": partial(learner.predict, same[:SEVERAL], head=head)}


def in_turns(todo: dict[str, Program], rounds: int) -> Times:
    once = timed(todo, 1, warm_up=False)
    if sum(once[name] for name in todo) > LONG:
        return once
    return timed(todo, rounds, warm_up=False)


def measured(case: Case, rounds: int, *, peak: bool) -> dict[str, Any]:
    """The numbers of one point: times in units, bytes on disk and, if asked for, at the peak."""
    learner = prepared(case)
    times = in_turns(programs(case, learner), rounds)
    each = case.usual / min(case.images, SEVERAL)
    ratios = {name: vars(times.ratio(name, "unit")) for name in times.seconds if name != "unit"}
    ratios["predict"] = {name: value * each for name, value in ratios["predict"].items()}
    kept = learner.model.feature_count if case.quantity == "features" else case.value
    with tempfile.TemporaryDirectory() as directory:
        learner.save(directory)
        disk = sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())
    del learner
    found = {"method": case.method, "scenario": case.scenario, "value": kept, **ratios, "disk": disk}
    memory = {"memory": peak_memory(whole_step, case)} if peak else {}
    return {**found, "unit_seconds": times["unit"], **memory}


def grown(quantity: str, options: Any, work: str) -> list[dict[str, Any]]:
    found = cases(quantity, quick=options.quick, work=work)
    found = [case for case in found if options.points is None or case.value in options.points]
    if quantity == "tasks":
        build_chains(found)
    points = []
    for case in found:
        points.append(measured(case, 1 if options.quick else options.rounds, peak=not options.quick))
        told = {name: round(value["median"], 3) for name, value in points[-1].items() if isinstance(value, dict)}
        sizes = {name: f"{points[-1][name] / 1e6:.1f} MB" for name in ("disk", "memory") if name in points[-1]}
        print(quantity, case.value, case.method, case.scenario, told, sizes, flush=True)
    return points


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--quick", action="store_true", help="two small points each, no peak memory")
    parser.add_argument("--only", default=",".join(POINTS), help="some of: %(default)s")
    parser.add_argument("--points", type=int, nargs="+", help="of --only, these points alone")
    parser.add_argument("--work", help="a directory that keeps the learners of many tasks")
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw docs/figures/growth.svg")
    options = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    if options.draw:
        kept = options.out or root / "results" / "benchmarks" / "growth.json"
        drawn(json.loads(kept.read_text())["figures"], root / "docs" / "figures" / "growth.svg")
        return
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in POINTS]:
        parser.error(f"--only has {unknown[0]!r}; it takes some of {', '.join(POINTS)}.")
    with reported(options.out) as output, tempfile.TemporaryDirectory() as folder:
        there = options.out is not None and options.out.exists()
        before = json.loads(options.out.read_text()) if there else {"figures": {}}
        output.figures.update(before["figures"])
        for quantity in chosen:
            output.figures[quantity] = grown(quantity, options, options.work or folder)
        for quantity, title, header, rows in tables(output.figures):
            output.table(quantity, title, header, rows)
            if quantity not in chosen:
                output.tables[quantity]["command"] = before["tables"][quantity].get("command", before["command"])


if __name__ == "__main__":
    main()
