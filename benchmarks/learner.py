"""What the learner costs: its loop beside one by hand, its memory beside none, an EWC stream beside Avalanche's.

    python benchmarks/learner.py           # quarter-width ResNet-18 at 32×32, some minutes
    python benchmarks/learner.py --quick   # fewer images, one round, no peak memory, a minute

Avalanche is needed for the last table only. It asks for other packages, so it gets an environment of its own:

    python -m venv avalanche
    avalanche/bin/pip install -c constraints.txt torch
    avalanche/bin/pip install -c constraints.txt --no-deps torchvision   # its build for CUDA is enough, see below
    avalanche/bin/pip install -c constraints.txt avalanche-lib==0.6.0
    avalanche/bin/pip install -c constraints.txt -e .
    avalanche/bin/python benchmarks/learner.py

What is timed does not depend on what is learned: images are random, and learning rates so small that nothing diverges.
With OMP_NUM_THREADS=1 other programs disturb less.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from measure import Output, Program, Times, arguments, peak_memory, reported, timed
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dlcft import Learner, Linearized, ScaledMSE, fold_batchnorm
from dlcft.backbones import shipped_resnet18
from dlcft.methods import Quadratic

Data = tuple[Tensor, Tensor]

CLASSES = 10
BATCH = 32
SGD = {"lr": 1e-5, "momentum": 0.9, "weight_decay": 1e-5}


def images(samples: int, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 32, 32, generator=generator), torch.arange(samples) % CLASSES


# The loop


def head(features: int) -> nn.Linear:
    """Zero at first, as the learner's."""
    layer = nn.Linear(features, CLASSES)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def by_hand(
    model: nn.Sequential, loss: Callable[[Tensor, Tensor], Tensor], data: Data, epochs: int, same: Learner
) -> Program:
    """The shortest loop that takes the steps that `same` is about to take, whose order of samples it borrows."""
    x, y = data
    parameters = [p for p in model.parameters() if p.requires_grad]

    def program() -> None:
        model.eval()
        optimizer = torch.optim.SGD(parameters, **SGD)
        for epoch in range(epochs):
            total = 0.0
            for indices in torch.randperm(len(x), generator=same._stream(f"order {epoch}")).split(BATCH):
                value = loss(model(x[indices]), y[indices])
                total += value.item() * len(indices)
                optimizer.zero_grad()
                value.backward()
                optimizer.step()

    return program


def beside_a_loop(output: Output, samples: int, epochs: int, rounds: int) -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(20, 32), nn.Tanh())
    vectors = torch.randn(4 * samples, 20), torch.arange(4 * samples) % CLASSES
    cases: dict[str, tuple[nn.Module, int, Data, int]] = {
        "ResNet-18": (shipped_resnet18(), 128, images(samples), rounds),
        "two-layer MLP": (mlp, 32, vectors, 5 * rounds),
    }
    rows = []
    for (name, (backbone, features, data, repeated)), recipe in itertools.product(
        cases.items(), ("none", "none-linear")
    ):
        linear = recipe == "none-linear"
        # nothing but the loop by hand: no schedule, no clipping, no training before the network is linearised
        loop = {"scenario": "data-il", "batchnorm": "frozen", "epochs": epochs, "batch_size": BATCH}
        loop |= {"schedule": "constant", "clip": None} | ({"start": "pretrained"} if linear else {})
        learner = Learner(backbone, recipe, optimizer="sgd", head_start="zero", device="cpu", **loop, **SGD)
        network = Linearized(fold_batchnorm(backbone)) if linear else copy.deepcopy(backbone)
        model = nn.Sequential(network, head(features))
        loss = ScaledMSE().value if linear else F.cross_entropy
        hand = by_hand(model, loss, data, epochs, learner)
        times = timed({"hand": hand, "learn": partial(learner.learn, data, progress=False)}, repeated)
        steps = epochs * -(-len(data[0]) // BATCH)
        above = times.combined(lambda s: s["learn"] - s["hand"]).median / steps
        apart = (model[1].weight - learner.model.head("main").weight).abs().max() / model[1].weight.abs().max()
        rows.append(
            [
                f"{name}, {recipe}",
                str(times.ratio("learn", "hand")),
                "1.10" if name == "ResNet-18" else "",
                f"{1e3 * times['hand'] / steps:.2f}",
                f"{1e6 * above:.0f}",
                f"{apart.item():.0e}",
            ]
        )
    header = ["", "`learn` / by hand", "bar", "a step by hand, ms", "`learn` above it, µs a step", "heads differ by"]
    title = f"`Learner.learn` without a memory, batch {BATCH}, {epochs} epochs of {samples} images"
    output.table("loop", title, header, rows)


# The memory

WITHOUT = {"dlcft, kfac": "none-linear", "dlcft, exact-tk": "none-linear", "dlcft, tkfac": "none-linear", "ewc": "none"}


def beside_no_memory(output: Output, samples: int, epochs: int, rounds: int) -> None:
    data, backbone = images(samples), shipped_resnet18()
    learners: dict[str, Learner] = {}
    for name in (*WITHOUT, *dict.fromkeys(WITHOUT.values())):
        recipe, _, curvature = name.partition(", ")
        settings: dict[str, object] = {"curvature": curvature} if curvature else {}
        if name in ("none", "ewc"):
            settings |= SGD
        learners[name] = Learner(
            backbone, recipe, scenario="data-il", epochs=epochs, batch_size=BATCH, device="cpu", **settings
        )
        learners[name].learn(data, progress=False)  # the first task, which nothing is remembered in
    timed({name: partial(learner.learn, data, progress=False) for name, learner in learners.items()}, rounds)
    seconds: dict[str, list[float]] = {}
    for name, learner in learners.items():
        last = learner.history[-rounds:]
        seconds[name] = [record.seconds_training for record in last]
        seconds[f"{name}, remembering"] = [record.seconds_remembering for record in last]
        seconds[f"{name}, an epoch"] = [record.seconds_training / epochs for record in last]
    times, rows = Times(seconds), []
    for name, without in WITHOUT.items():
        ratios = [times.ratio(f"{name}, remembering", to) for to in (name, f"{name}, an epoch")]
        rows.append([name, without, str(times.ratio(name, without)), *map(str, ratios)])
    header = ["", "without", "step / step without", f"remembering / training of {epochs} epochs", "in epochs"]
    title = f"With a memory, from the second task on, ResNet-18, batch {BATCH}, {samples} images a task"
    output.table("memory", title, header, rows)


# The same stream in Avalanche. The two functions that follow are the lines of user code that are counted.
# 0.5 there is strength 1 here, where the penalty is half the quadratic form.


def stream_in_dlcft(backbone: nn.Module, tasks: list) -> None:
    from dlcft import Learner

    learner = Learner(backbone, "ewc", scenario="data-il", epochs=1, batch_size=BATCH, device="cpu", **SGD)
    for task in tasks:
        learner.learn(task, progress=False)


def stream_in_avalanche(backbone: nn.Module, tasks: list, **mode: object) -> None:
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import as_avalanche_dataset
    from avalanche.training.supervised import EWC

    model = nn.Sequential(backbone, nn.Linear(128, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    how = {"train_mb_size": BATCH, "train_epochs": 1, "ewc_lambda": 0.5, "evaluator": None, **mode}
    strategy = EWC(model=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), **how)
    benchmark = benchmark_from_datasets(train=[as_avalanche_dataset(TensorDataset(x, y)) for x, y in tasks])
    for experience in benchmark.train_stream:
        strategy.train(experience)


STREAMS: dict[str, tuple[Callable[..., None], dict[str, object]]] = {
    "ours": (stream_in_dlcft, {}),
    "ours, a `Dataset` of single samples": (stream_in_dlcft, {}),
    "Avalanche, one memory as ours": (stream_in_avalanche, {"mode": "online", "decay_factor": 1.0}),
    "Avalanche, a memory a task (its default)": (stream_in_avalanche, {"mode": "separate"}),
}

_stubs: list[torch.library.Library] = []  # what is declared in a library is gone when the library is


def import_avalanche() -> None:
    """Import it, also where torchvision's own operators cannot be loaded.

    Avalanche imports torchvision, of which nothing runs here. Built for another torch, torchvision cannot load its
    compiled operators, and its import stops where it describes two of them. Declared, if not implemented, they let it
    pass.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional solvers that EWC does not use
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            _stubs.append(torch.library.Library("torchvision", "DEF"))
            for name in ("nms", "qnms"):
                _stubs[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import avalanche.training.supervised  # noqa: F401


def lines(program: Callable[..., None]) -> int:
    """How many lines its body has, blank ones aside."""
    return sum(bool(line.strip()) for line in inspect.getsource(program).splitlines()) - 1


def stream(name: str, tasks: int, samples: int) -> Program:
    """BatchNorm is folded: the two train it in other modes, which would be another network to step through."""
    run, options = STREAMS[name]
    if run is stream_in_avalanche:
        import_avalanche()
    torch.manual_seed(0)
    backbone = fold_batchnorm(shipped_resnet18())
    data = [images(samples, seed) for seed in range(tasks)]
    given = [TensorDataset(x, y) for x, y in data] if "Dataset" in name else data
    return lambda: run(copy.deepcopy(backbone), given, **options)


def level_stream(name: str, tasks: int, samples: int) -> Program:
    """The stream after what either library loads: else torch's own late imports count for the one that is lighter."""
    import_avalanche()
    convolution = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(convolution.parameters(), **SGD)
    convolution(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return stream(name, tasks, samples)


@contextmanager
def clocked(owner: type, method: str) -> Iterator[list[float]]:
    """The seconds of every call of a method."""
    original, seconds = getattr(owner, method), []

    def watched(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        result = original(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return result

    setattr(owner, method, watched)
    try:
        yield seconds
    finally:
        setattr(owner, method, original)


def beside_avalanche(output: Output, tasks: int, samples: int, rounds: int, peaks: dict[str, int]) -> None:
    if find_spec("avalanche") is None:
        print("\nThe table beside Avalanche is left out: avalanche-lib is not installed (--help says how to).")
        return
    import_avalanche()
    from avalanche.training.plugins import EWCPlugin

    remembering: dict[str, list[float]] = {name: [] for name in STREAMS}

    def observed(name: str) -> Program:
        program = stream(name, tasks, samples)
        ours = STREAMS[name][0] is stream_in_dlcft

        def run() -> None:
            with clocked(*((Quadratic, "finish") if ours else (EWCPlugin, "after_training_exp"))) as seconds:
                program()
            remembering[name].append(sum(seconds))

        return run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is logged
        seconds = timed({name: observed(name) for name in STREAMS}, rounds).seconds
    fisher = {f"{name}, Fisher": taken[1:] for name, taken in remembering.items()}  # not of the round to warm up
    training = {
        f"{name}, training": [a - f for a, f in zip(seconds[name], fisher[f"{name}, Fisher"], strict=True)]
        for name in STREAMS
    }
    times = Times(seconds | fisher | training)
    reference = "Avalanche, one memory as ours"
    rows = []
    for name, (run, _) in STREAMS.items():
        rates = times.ratio(reference, name), times.ratio(f"{reference}, training", f"{name}, training")
        share = times.ratio(f"{name}, Fisher", name)
        peak = f"{peaks[name] / peaks[reference]:.2f} ({peaks[name] / 2**20:.0f} MiB)" if peaks else ""
        rows.append([name, *map(str, rates), str(share), peak, str(lines(run))])
    header = ["", "steps a second, all", "training alone", "Fisher, of all time", "peak memory", "lines of user code"]
    title = (
        f"EWC, {tasks} tasks of {samples} images, one epoch each, batch {BATCH}, ResNet-18 with BatchNorm folded, "
        "beside Avalanche with one memory. Its Fisher squares the mean gradient of a mini-batch (cheaper, but not the "
        "Fisher); ours squares each sample's"
    )
    output.table("avalanche", title, header, rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer images, one round, no peak memory")
    options = parser.parse_args()
    samples, rounds = (64, 1) if options.quick else (256, options.rounds)
    with reported(options.out) as output:
        peaks: dict[str, int] = {}
        if not options.quick and find_spec("avalanche") is not None:
            peaks = {name: peak_memory(level_stream, name, 5, samples // 2) for name in STREAMS}
        beside_a_loop(output, samples, 2, rounds)
        beside_no_memory(output, samples, 2, rounds)
        beside_avalanche(output, 5, samples // 2, rounds, peaks)


if __name__ == "__main__":
    main()
