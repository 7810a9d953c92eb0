"""What curvature costs: to estimate it, beside training on the same samples and other libraries; and as a penalty.

    python benchmarks/curvature.py                  # ResNet-18 at 32×32 and 64×64, most of an hour on two cores
    python benchmarks/curvature.py --only penalty   # some of the tables
    python benchmarks/curvature.py --quick          # a quarter of the width and fewer samples, one round, a minute

The unit is a plain training epoch over the same samples: forward and full backward of the folded network with a linear
head, 3 units of convolution arithmetic, no optimiser. A pass of rows is 2 such units for a plain network (4 for a
linearised one with its head, whose features need the first-order change), and then come the factors.

A round of an estimation or of another library takes minutes: there are three of them. The short tables, of the penalty
and of a part of the samples, have three times as many.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

import torch
from measure import Output, Times, arguments, peak_memory, reported, timed
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
    "K-FAC": "kfac",
    "TK-FAC": "tkfac",
    "exact TK": "exact-tk",
    "diagonal": "diagonal",
    "EK-FAC": "ekfac",
    "EK-FAC, eigenvectors given": Rotated,
}
BARS = {"K-FAC": 1.4, "exact TK": 2.2, "EK-FAC": 4.0}
RELATIVE_BAR = 1.3  # of TK-FAC to K-FAC
SETTINGS: dict[str, tuple[bool, Stem, int]] = {
    "linearised, 32×32": (True, "small", 32),
    "linearised, 64×64": (True, "imagenet", 64),
    "plain, 32×32": (False, "small", 32),
}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "K-FAC, without the head (task-IL)": ("kfac", {"include_head": False}),
    "K-FAC, and the gradient": ("kfac", {"gradient": True}),
    "exact TK, without the head (task-IL)": ("exact-tk", {"include_head": False}),
    "exact TK, and the gradient": ("exact-tk", {"gradient": True}),
    "TK-FAC, sample by sample": ("tkfac-per-sample", {}),
}


def compared(
    named: dict[str, tuple[str | type[Statistics], dict[str, object]]],
    width: int,
    setting: str,
    samples: int,
    rounds: int,
) -> Times:
    """Estimations, in turns with a plain epoch over the same samples."""
    linear, stem, size = SETTINGS[setting]
    batches = images(samples, size)
    model = classifier(network(width, stem), 8 * width, linear=linear)
    programs: dict[str, Callable[[], object]] = {"epoch": epoch(width, stem, batches)}
    for name, (estimator, options) in named.items():
        programs[name] = estimation(estimator, model, batches, **options)
    return timed(programs, rounds, warm_up=False)


def beside_training(output: Output, width: int, samples: int, rounds: int) -> None:
    named = {name: (estimator, {}) for name, estimator in ESTIMATORS.items()}
    times = {setting: compared(named, width, setting, samples, rounds) for setting in SETTINGS}
    rows = [
        [name, *(str(found.ratio(name, "epoch")) for found in times.values()), str(BARS.get(name, ""))]
        for name in ESTIMATORS
    ]
    relative = [str(found.ratio("TK-FAC", "K-FAC")) for found in times.values()]
    rows.append(["TK-FAC, in times of K-FAC", *relative, str(RELATIVE_BAR)])
    title = f"Estimation in plain epochs, ResNet-18 width {width}, {samples} images, one draw"
    output.table("estimation", title, ["", *SETTINGS, "bar"], rows)


def beside_variants(output: Output, width: int, samples: int, rounds: int) -> None:
    setting = "linearised, 32×32"
    times = compared(VARIANTS, width, setting, samples, rounds)
    rows = [[name, str(times.ratio(name, "epoch"))] for name in VARIANTS]
    title = f"Variants of estimation in plain epochs, ResNet-18 width {width}, {samples} images, one draw"
    output.table("variants", title, ["", setting], rows)


# Memory


def heaviest(name: str, width: int, samples: int) -> Callable[[], Curvature]:
    """What is measured for memory: a linearised classifier, its head and the gradient."""
    model = classifier(network(width, "small"), 8 * width, linear=True)
    return estimation(ESTIMATORS[name], model, images(samples, 32), gradient=True)


def peaks(output: Output, width: int, samples: int) -> None:
    rows = []
    for name in ("K-FAC", "TK-FAC", "exact TK", "diagonal", "EK-FAC, eigenvectors given"):
        factors = heaviest(name, width, 8)().nbytes()
        above = max(0, peak_memory(heaviest, name, width, samples) - factors)
        rows.append([name, f"{factors / 2**20:.0f}", f"{above / 2**20:.0f}", "1024"])
    title = f"Memory of estimation, linearised ResNet-18 width {width}, 32×32, with its gradient, batch {samples}"
    output.table("peaks", title, ["", "factors, MiB", "peak above them, MiB", "bar"], rows)


# A part of the samples


def gradients(model: Classifier, batches: Batches) -> list[dict[str, Tensor]]:
    params = model.params(HEAD)
    found = [torch.autograd.grad(ScaledMSE().value(model(x, HEAD), y), list(params.values())) for x, y in batches]
    return [dict(zip(params, g, strict=True)) for g in found]


def error(found: Curvature, reference: Curvature, directions: list[dict[str, Tensor]]) -> float:
    """The mean relative error of dᵀHd."""
    return statistics.mean(abs(float(found.quad(d) / reference.quad(d)) - 1) for d in directions)


def part_of_the_samples(output: Output, samples: int, draws: int, rounds: int) -> None:
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
    for name, e in ESTIMATORS.items():
        if e is Rotated:
            continue
        programs = {"all": estimation(e, model, batches), "half": estimation(e, model, batches, samples=samples // 2)}
        times = timed(programs, rounds)
        reference = estimation(e, model, batches, draws=draws, seed=5)()
        curvatures = {part: program() for part, program in programs.items()}
        errors = [f"{error(curvatures[n], reference, ds):.1%}" for ds in (random, steps) for n in ("half", "all")]
        rows.append([name, str(times.ratio("half", "all")), *errors])
    header = ["", f"time / all {samples}", *("random d", "of all", "d a gradient", "of all")]
    title = f"samples={samples // 2} of {samples} digits, shipped network; errors of dᵀHd against {draws} draws on all"
    output.table("samples", title, header, rows)


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
    "BackPACK": backpack,
}


def rival(name: str, width: int, samples: int) -> Callable[[], object]:
    model, batches = rival_classifier(width), images(samples, 32)
    return ours(model, batches, CrossEntropy()) if name == "dlcft" else RIVALS[name](model, batches)


def beside_others(output: Output, width: int, samples: int, rounds: int) -> None:
    installed = [name for name in RIVALS if find_spec(name.lower())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = {name: rival(name, width, samples) for name in ("dlcft", *installed)}
        times = timed(programs, rounds, warm_up=False)
    rows = [[name, str(times.ratio(name, "dlcft")) if name in installed else "not installed"] for name in RIVALS]
    title = f"K-FAC of a plain ResNet-18 width {width}, 32×32, N = {samples}, cross-entropy, one draw, float32"
    output.table("rivals", title, ["", "time / ours"], rows)


# The penalty


def beside_a_step(output: Output, width: int, batch_sizes: tuple[int, ...], rounds: int) -> None:
    model = classifier(network(width, "small"), 8 * width, linear=True)
    params = model.params(HEAD)
    programs: dict[str, Callable[[], object]] = {}
    for e, estimator in (("K-FAC", "kfac"), ("EK-FAC", Rotated)):
        curvature = estimation(estimator, model, images(8, 32))()
        memory = Memory.of({n: p + 0.01 * torch.randn_like(p) for n, p in params.items()}, curvature, 1.0)

        def penalty(memory: Memory = memory) -> None:
            torch.autograd.grad(memory.penalty(params), list(params.values()))

        programs[e] = penalty
    for size in batch_sizes:
        programs[f"step {size}"] = epoch(width, "small", images(size, 32))
    times = timed(programs, rounds)
    rows = [[e, *(str(times.ratio(e, f"step {size}")) for size in batch_sizes)] for e in ("K-FAC", "EK-FAC")]
    title = f"Penalty, value and gradient / plain step, ResNet-18 width {width} (bar 0.35 at batch 128)"
    output.table("penalty", title, ["", *(f"batch {size}" for size in batch_sizes)], rows)


TABLES = ("penalty", "peaks", "rivals", "estimation", "variants", "samples")


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--quick", action="store_true", help="quarter width, fewer samples, one round")
    parser.add_argument("--samples", type=int, default=256, help="images of an epoch (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES, metavar="TABLE", help=", ".join(TABLES))
    options = parser.parse_args()
    width, samples, rounds = (16, 32, 1) if options.quick else (64, options.samples, options.rounds)
    with reported(options.out) as output:
        tables: dict[str, Callable[[], None]] = {
            "penalty": lambda: beside_a_step(output, width, (32, 128), 3 * rounds),
            "peaks": lambda: peaks(output, width, BATCH),
            "rivals": lambda: beside_others(output, width, samples, rounds),
            "estimation": lambda: beside_training(output, width, samples, rounds),
            "variants": lambda: beside_variants(output, width, samples, rounds),
            "samples": lambda: part_of_the_samples(output, *((128, 2) if options.quick else (512, 8)), 3 * rounds),
        }
        for name in TABLES:
            if name in options.only:
                tables[name]()


if __name__ == "__main__":
    main()
