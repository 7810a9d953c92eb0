"""What curvature costs: to estimate it, beside training on the same samples and other libraries; and as a penalty.

    python benchmarks/curvature.py           # ResNet-18 at 32×32 and 64×64, about twelve minutes on two cores
    python benchmarks/curvature.py --quick   # a quarter of the width and fewer samples, under a minute

The unit is a plain training epoch over the same samples: forward and full backward of the folded network with a linear
head, 3 units of convolution arithmetic, no optimiser. A pass of rows is 2 such units for a plain network (4 for a
linearised one with its head, whose features need the first-order change), and then come the factors.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

import torch
from measure import medians, peak_memory, table
from torch import Tensor, nn

from dlcft import Classifier, CrossEntropy, Curvature, Linearized, Memory, ScaledMSE, estimate, fold_batchnorm
from dlcft.backbones import ResNet18, shipped_resnet18
from dlcft.bench.datasets import load
from dlcft.curvature.blocks import Block, Kronecker
from dlcft.curvature.grams import Layer
from dlcft.curvature.losses import Loss
from dlcft.curvature.statistics import EkfacStatistics, Statistics

Stem = Literal["imagenet", "small"]
Batches = list[tuple[Tensor, Tensor]]

OUTPUTS = 100
BATCH = 128
HEAD = "h"


# Networks and data


def network(width: int, stem: Stem, slope: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    folded = fold_batchnorm(ResNet18(width, stem, slope)).to(memory_format=torch.channels_last)
    return folded.requires_grad_(True)  # the biases that folding has made too


def classifier(backbone: nn.Module, features: int, *, linear: bool, outputs: int = OUTPUTS) -> Classifier:
    """A classifier with a random head, at ψ ≠ 0 if it is linearised."""
    torch.manual_seed(1)
    model = Classifier(Linearized(backbone) if linear else backbone, features)
    model.add_head(HEAD, outputs)
    with torch.no_grad():
        model.head(HEAD).weight.normal_(0, 0.1)
        if linear:
            for p in model.params().values():
                p.normal_(0, 0.01)
    return model


def images(samples: int, size: int) -> Batches:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(samples, 3, size, size, generator=generator).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, OUTPUTS, (samples,), generator=generator)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def epoch(width: int, stem: Stem, batches: Batches) -> Callable[[], None]:
    """Plain training without an optimiser."""
    model = classifier(network(width, stem), 8 * width, linear=False)

    def program() -> None:
        for x, y in batches:
            model.zero_grad()
            ScaledMSE().value(model(x, HEAD), y).backward()

    return program


def estimation(
    estimator: str | type[Statistics], model: Classifier, batches: Batches, *, seed: int = 3, **options: object
) -> Callable[[], Curvature]:
    def program() -> Curvature:
        generator = torch.Generator().manual_seed(seed)
        return estimate(estimator, model, batches, ScaledMSE(), HEAD, generator=generator, **options).curvature

    return program


# Beside training


class Rotated(EkfacStatistics):
    """The sums of EK-FAC without the eigenvectors, which cost the same however many samples there are."""

    def __init__(self, layer: Layer, names: tuple[str, ...], first: Block | None = None) -> None:
        Statistics.__init__(self, layer, names)
        assert isinstance(first, Kronecker)
        self.factors, self.left, self.right = first, first.left, first.right


ESTIMATORS: dict[str, str | type[Statistics]] = {
    "kfac": "kfac",
    "exact-tk": "exact-tk",
    "tkfac": "tkfac",
    "tkfac-per-sample": "tkfac-per-sample",
    "diagonal": "diagonal",
    "ekfac, eigenvectors given": Rotated,
}
BARS = {"kfac": 2.0, "exact-tk": 3.0}
CONFIGURATIONS: dict[str, tuple[bool, dict[str, object]]] = {
    "linearised": (True, {}),
    "its task-IL": (True, {"include_head": False}),
    "its gradient too": (True, {"gradient": True}),
    "plain": (False, {}),
}


def heaviest(name: str, width: int, stem: Stem, size: int, samples: int) -> Callable[[], Curvature]:
    """What is measured for memory: a linearised classifier, its head and the gradient."""
    model = classifier(network(width, stem), 8 * width, linear=True)
    return estimation(ESTIMATORS[name], model, images(samples, size), gradient=True)


def beside_training(
    width: int, stem: Stem, size: int, samples: int, rounds: int, estimators: list[str], peaks: dict[str, int]
) -> None:
    batches = images(samples, size)
    models = {linear: classifier(network(width, stem), 8 * width, linear=linear) for linear in (False, True)}
    ratios: dict[tuple[str, str], str] = {}
    sizes: dict[str, int] = {}

    def sized(name: str, program: Callable[[], Curvature]) -> Callable[[], None]:
        return lambda: sizes.update({name: program().nbytes()})

    for configuration, (linear, options) in CONFIGURATIONS.items():
        names = estimators if configuration == "linearised" else list(BARS)
        programs: dict[str, Callable[[], object]] = {"epoch": epoch(width, stem, batches)}
        for name in names:
            programs[name] = sized(name, estimation(ESTIMATORS[name], models[linear], batches, **options))
        seconds = medians(programs, rounds, warm_up=False)
        ratios |= {(name, configuration): f"{seconds[name] / seconds['epoch']:.2f}" for name in names}
    rows = []
    for name in estimators:
        times = [ratios.get((name, configuration), "") for configuration in CONFIGURATIONS]
        peak = peaks.get(name)
        above = "" if peak is None else f"{max(0, peak - sizes[name]) / 2**20:.0f}"
        rows.append([name, *times, str(BARS.get(name, "")), f"{sizes[name] / 2**20:.0f}", above])
    header = ["estimation / plain epoch", *CONFIGURATIONS, "bar", "factors, MiB", "peak above them (bar 1024)"]
    table(f"ResNet-18 width {width}, {stem} stem, {size}×{size}, N = {samples}, one draw", header, rows)


# A part of the samples


def gradients(model: Classifier, batches: Batches) -> list[dict[str, Tensor]]:
    params = model.params(HEAD)
    found = [torch.autograd.grad(ScaledMSE().value(model(x, HEAD), y), list(params.values())) for x, y in batches]
    return [dict(zip(params, g, strict=True)) for g in found]


def error(found: Curvature, reference: Curvature, directions: list[dict[str, Tensor]]) -> float:
    """The mean relative error of dᵀHd."""
    return statistics.mean(abs(float(found.quad(d) / reference.quad(d)) - 1) for d in directions)


def part_of_the_samples(samples: int, draws: int, rounds: int) -> None:
    """On the shipped network and real images, whose samples differ as a user's do."""
    data = load("digits")
    train, test = data.preprocess(data.x_train), data.preprocess(data.x_test)
    model = classifier(fold_batchnorm(shipped_resnet18()), 128, linear=True, outputs=10)
    x, y = train[:samples].contiguous(memory_format=torch.channels_last), data.y_train[:samples]
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    params = model.params(HEAD)
    torch.manual_seed(4)
    random = [{n: torch.randn_like(p) for n, p in params.items()} for _ in range(8)]
    steps = gradients(model, list(zip(test.split(32), data.y_test.split(32), strict=True))[:8])
    rows = []
    for e in ("kfac", "exact-tk", "tkfac", "diagonal", "ekfac"):
        programs = {"all": estimation(e, model, batches), "half": estimation(e, model, batches, samples=samples // 2)}
        seconds = medians(programs, rounds)
        reference = estimation(e, model, batches, draws=draws, seed=5)()
        curvatures = {name: program() for name, program in programs.items()}
        errors = [f"{error(curvatures[n], reference, ds):.1%}" for ds in (random, steps) for n in ("half", "all")]
        rows.append([e, f"{seconds['half'] / seconds['all']:.2f}", *errors])
    header = [
        "",
        f"time / all {samples}",
        "error, random d",
        f"(all {samples})",
        "error, gradients",
        f"(all {samples})",
    ]
    title = f"samples={samples // 2} of {samples} digits, shipped network; errors of dᵀHd against {draws} draws on all"
    table(title, header, rows)


# Other libraries


def sequential(model: Classifier) -> nn.Sequential:
    """The same layers as modules alone, the shortcuts in BackPACK's own: it follows nothing else."""
    from backpack.custom_module.branching import Parallel

    net = model.backbone
    parts: list[nn.Module] = [net.conv1, nn.ReLU()]
    for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
        for block in stage:
            shortcut = block.downsample[0] if isinstance(block.downsample, nn.Sequential) else nn.Identity()
            parts += [Parallel(nn.Sequential(block.conv1, nn.ReLU(), block.conv2), shortcut), nn.ReLU()]
    return nn.Sequential(*parts, nn.AvgPool2d(4), nn.Flatten(), model.head(HEAD))


def ours(model: Classifier, batches: Batches, loss: Loss) -> Callable[[], object]:
    return lambda: estimate("kfac", model, batches, loss, HEAD, generator=torch.Generator().manual_seed(3))


def curvlinops(model: Classifier, batches: Batches) -> Callable[[], object]:
    from curvlinops import KFACLinearOperator

    plain = nn.Sequential(model.backbone, model.head(HEAD))

    def program() -> object:
        operator = KFACLinearOperator(
            plain,
            nn.CrossEntropyLoss(),
            list(plain.parameters()),
            batches,
            fisher_type="mc",
            mc_samples=1,
            kfac_approx="expand",
            separate_weight_and_bias=False,
            check_deterministic=False,
            num_data=sum(len(y) for _, y in batches),
            num_per_example_loss_terms=1,
        )
        operator.compute_kronecker_factors()
        return operator

    return program


def nngeometry(model: Classifier, batches: Batches) -> Callable[[], object]:
    from nngeometry import FIM_MonteCarlo
    from nngeometry.object import PMatKFAC
    from torch.utils.data import DataLoader, TensorDataset

    plain = nn.Sequential(model.backbone, model.head(HEAD))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    return lambda: FIM_MonteCarlo(plain, loader, PMatKFAC, trials=1)


def backpack(model: Classifier, batches: Batches) -> Callable[[], object]:
    from backpack import backpack as extensions
    from backpack import extend
    from backpack.extensions import KFAC

    plain = extend(sequential(model))
    loss = extend(nn.CrossEntropyLoss())

    def program() -> object:
        sums: list[Tensor] = []
        for x, y in batches:
            plain.zero_grad()
            with extensions(KFAC(1)), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss(plain(x), y).backward()
            factors = [factor for p in plain.parameters() for factor in p.kfac]
            sums = [s.add_(f) for s, f in zip(sums, factors, strict=True)] if sums else factors
        return sums

    return program


def rival_classifier(width: int) -> Classifier:
    """ReLU, because BackPACK knows no LeakyReLU; not in place, because hooks on what is overwritten go wrong."""
    backbone = network(width, "small", None)
    for module in backbone.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return classifier(backbone, 8 * width, linear=False)


RIVALS: dict[str, Callable[[Classifier, Batches], Callable[[], object]]] = {
    "curvlinops": curvlinops,
    "nngeometry": nngeometry,
    "backpack": backpack,
}


def rival(name: str, width: int, samples: int) -> Callable[[], object]:
    model, batches = rival_classifier(width), images(samples, 32)
    return ours(model, batches, CrossEntropy()) if name == "dlcft" else RIVALS[name](model, batches)


def beside_others(width: int, samples: int, rounds: int) -> None:
    installed = [name for name in RIVALS if find_spec(name)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seconds = medians({name: rival(name, width, samples) for name in ("dlcft", *installed)}, rounds)
    rows = [[name, f"{seconds[name] / seconds['dlcft']:.2f}"] for name in seconds]
    rows += [[name, "not installed"] for name in RIVALS if name not in installed]
    title = f"K-FAC of a plain ResNet-18 width {width}, 32×32, N = {samples}, cross-entropy, one draw, float32"
    table(title, ["", "time / ours"], rows)


# The penalty


def beside_a_step(width: int, batch_sizes: tuple[int, ...], rounds: int) -> None:
    model = classifier(network(width, "small"), 8 * width, linear=True)
    params = model.params(HEAD)
    programs: dict[str, Callable[[], object]] = {}
    for e in ("kfac", "ekfac"):
        curvature = estimation("kfac" if e == "kfac" else Rotated, model, images(8, 32))()
        memory = Memory.of({n: p + 0.01 * torch.randn_like(p) for n, p in params.items()}, curvature, 1.0)

        def penalty(memory: Memory = memory) -> None:
            torch.autograd.grad(memory.penalty(params), list(params.values()))

        programs[e] = penalty
    for size in batch_sizes:
        programs[f"step {size}"] = epoch(width, "small", images(size, 32))
    seconds = medians(programs, rounds)
    rows = [[e, *(f"{seconds[e] / seconds[f'step {size}']:.2f}" for size in batch_sizes)] for e in ("kfac", "ekfac")]
    title = f"Penalty, value and gradient / plain step, ResNet-18 width {width} (bar 0.35 at batch 128)"
    table(title, ["", *(f"batch {size}" for size in batch_sizes)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="quarter width, fewer samples")
    parser.add_argument("--ekfac", action="store_true", help="measure the estimation of EK-FAC too, some minutes more")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions behind each median")
    options = parser.parse_args()
    width, samples, rounds = (16, 32, 1) if options.quick else (64, 256, options.rounds)
    peaks: dict[str, int] = {}
    if not options.quick:  # first: a process that is started by a large one is born with its peak
        peaks = {name: peak_memory(heaviest, name, width, "small", 32, BATCH) for name in BARS}
    beside_a_step(width, (32, 128), max(3, rounds))
    beside_others(width, samples, rounds)
    fast = [name for name in ESTIMATORS if ESTIMATORS[name] is not Rotated]
    beside_training(width, "small", 32, samples, rounds, list(ESTIMATORS) if options.ekfac else fast, peaks)
    beside_training(width, "imagenet", 64, samples, rounds, list(BARS), {})
    part_of_the_samples(*((128, 2) if options.quick else (512, 8)), 1)


if __name__ == "__main__":
    main()
