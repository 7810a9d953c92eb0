"""Laws of several workers: each learns what one process alone learns. Prints how many were checked.

python -m tests.support.many_workers WORKERS
"""

import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dlcft import Learner
from dlcft.learner import parts
from dlcft.methods.recipes import RECIPES
from dlcft.network import workers
from tests.learner.test_learner import SMALL, backbone, data
from tests.support.stores import learned

X, Y = data([0, 1, 2], n=37, seed=1)
MORE_X, MORE_Y = data([2, 4, 3], n=11, seed=2)
TRAINED = ["dlcft", "dlcft-paper", "none", "ewc", "lwf", "er", "derpp", "dlcft-replay", "mas", "osla"]


def make(method, **settings):
    options = {**SMALL.get(method, {}), "batch_size": 10}
    if not RECIPES[method].closed_form:
        options |= {"epochs": 2, "batchnorm": "frozen"}
    return Learner(backbone().double(), method, device="cpu", **{**options, **settings})


def close(one, other, tolerance):
    """Whether all tensors of two states agree, relative to their size; solving a regression costs digits."""
    one.solve(), other.solve()
    mine, theirs = one.state()[0], other.state()[0]
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        scale = theirs[name].abs().max().clamp(min=1e-30) if theirs[name].numel() else 1
        error = float((tensor - theirs[name]).abs().max() / scale) if tensor.numel() else 0.0
        assert error < max(tolerance, 1e-7 if "heads" in name else 0), (name, error)


def alone(method, tasks, **settings):
    """What one process learns: the same on every worker, which do not know of each other meanwhile."""
    with workers.apart():
        learner = make(method, **settings)
        for task in tasks:
            learner.learn(task, progress=False)
        return learner


def closed_forms():
    tasks = [(X, Y), (MORE_X, MORE_Y)]
    for method in ("dlcft-exact", "ridge", "ranpac", "slda"):
        expected = alone(method, tasks)
        same = make(method)
        for task in tasks:
            same.learn(task, progress=False)
        close(same, expected, 1e-10)
        assert same.labels() == expected.labels()
        yield f"{method}: all have the same data"
        parted = make(method)
        for x, y in tasks:  # the last worker has none, the first most
            ends = [0, *(len(y) * k // (k + 1) for k in range(1, workers.count() - 1)), len(y), len(y)]
            mine = slice(ends[workers.place()], ends[workers.place() + 1])
            own = (x[mine], y[mine]) if len(y[mine]) else None
            parted.learn(own, progress=False, shares=True)
        close(parted, expected, 1e-10)
        assert parted.labels() == expected.labels()
        assert [r.samples for r in parted.history] == [r.samples for r in expected.history]
        yield f"{method}: each has its own"
        parted.forget((MORE_X, MORE_Y))
        same.forget((MORE_X, MORE_Y))
        close(parted, same, 1e-10)
        torch.testing.assert_close(same.outputs(X)[:, :3], alone(method, tasks[:1]).outputs(X), atol=1e-6, rtol=1e-6)
        yield f"{method}: forgotten"


def streams():
    """Each takes its samples of a stream, or has one of its own; labels come late, and to some workers only."""
    kept, parts.PART = parts.PART, 8
    names = [f"{label}{place // 15}" for place, label in enumerate(Y.tolist())]
    expected = alone("ridge", [(X, names)])
    for own in (False, True):
        learner = make("ridge")
        mine = slice(workers.place(), None, workers.count() - 1) if own else slice(None)
        last = workers.place() == workers.count() - 1
        pairs = zip(X[mine], names[mine], strict=True)
        learner.learn(None if own and last else pairs, progress=False, shares=own)
        assert learner.history[0].samples == len(names)
        assert len(set(map(tuple, workers.gathered(learner.labels())))) == 1
        order = [learner.labels().index(label) for label in expected.labels()]
        torch.testing.assert_close(learner.outputs(X)[:, order], expected.outputs(X), atol=1e-6, rtol=1e-6)
        yield f"a stream{' for each' if own else ''}"
    parts.PART = kept
    learner = make("tangent", direction="principal")
    learner.learn((X[workers.place() :: 2], Y[workers.place() :: 2]), progress=False, shares=True)
    found = workers.gathered(learner.state()[0])
    assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)
    yield "the same features everywhere"


def trained():
    tasks = [(X, Y), (MORE_X, MORE_Y)]
    for method in TRAINED:
        expected, learner = alone(method, tasks), make(method)
        for task in tasks:
            learner.learn(task, progress=False)
        close(learner, expected, 1e-6)
        yield f"{method}: trained"
    images, y = torch.rand(23, 3, 8, 8), torch.arange(23) % 3
    settings = {"augment": "crop1+flip", "epochs": 2, "batch_size": 5}
    torch.manual_seed(0)
    conv = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(144, 6))
    found = []
    for alone_or_not in (workers.apart, nullcontext):
        with alone_or_not():
            learner = Learner(conv.double(), "dlcft-paper", device="cpu", **settings)
            learner.learn((images.double(), y), progress=False)
            found.append(learner)
    close(*found, 1e-6)
    yield "augmented images"


def answers():
    learner = alone("ridge", [(X, Y)])
    with workers.apart():
        expected = learner.outputs(X, batch_size=4), learner.evaluate((X, Y), batch_size=4), learner.predict(X)
    torch.testing.assert_close(learner.outputs(X, batch_size=4), expected[0], atol=0, rtol=0)
    found = learner.evaluate((X, Y), batch_size=4)
    assert abs(found["loss"] - expected[1]["loss"]) < 1e-9
    assert (found["accuracy"], found["unknown"]) == (expected[1]["accuracy"], expected[1]["unknown"])
    assert learner.predict(X) == expected[2]
    yield "answers in order"


def saving(folder):
    learner = make("dlcft-exact")
    learner.learn((X, Y), progress=False)
    number = learner.save(folder / "model")
    assert (number, learner.directory) == (1, folder / "model")
    again = Learner.load(folder / "model", backbone().double(), device="cpu")
    again.learn((MORE_X, MORE_Y), progress=False)
    assert again.save() == 2
    assert len(set(workers.gathered(learned(folder / "model")))) == 1
    yield "saved and loaded"
    expected = alone("dlcft-exact", [(X, Y), (MORE_X, MORE_Y)])
    close(again, expected, 1e-10)
    yield "learned on after loading"


def failures():
    """What one worker cannot do, none does; all are told why."""
    learner = make("ridge")
    learner.learn((X, Y), progress=False)
    before = learner.state()[0]
    broken = X.clone()
    broken[-1] = float("nan")
    for given, words in (((broken if workers.place() == 1 else X, Y), "different data"), ((broken, Y), "finite")):
        with pytest.raises((ValueError, workers.WorkerError), match=words):
            learner.learn(given, progress=False)
        assert all(torch.equal(t, before[name]) for name, t in learner.state()[0].items())
    own = (broken, Y) if workers.place() == 1 else (X, Y)
    with pytest.raises((ValueError, workers.WorkerError), match="sample 36 holds nan"):
        learner.learn(own, progress=False, shares=True)
    yield "all are told"


def run(place, count, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=place, world_size=count)
    done = []
    for laws in (closed_forms(), streams(), trained(), answers(), saving(Path(folder)), failures()):
        done += list(laws)
    dist.barrier()
    if place == 0:
        print(f"{len(done)} laws held with {count} workers", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may end Python with an abort


if __name__ == "__main__":
    number = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(run, (number, scratch), nprocs=number)
