"""Commands on streams of tasks and on backbones: run, report, pretrain, list."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from dlcft.cli.arguments import import_own, positive, say, setting, warn

Scenario = Literal["data-il", "task-il", "class-il"]


def run(
    *,
    dataset: str = "digits",
    scenario: Scenario = "data-il",
    tasks: int = 2,
    joint: bool = False,
    method: Annotated[list[str] | None, Parameter(name="--method")] = None,
    seed: int = 0,
    seeds: int = 1,
    backbone: str = "shipped",
    weights: str | None = None,
    width: int | None = None,
    size: int | None = None,
    classes: int | None = None,
    per_class: int | None = None,
    class_order: Literal["random", "labels"] = "random",
    turn: float = 0.0,
    validate: bool = False,
    evaluate_every: int = 1,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    data: Path | None = None,
    download: bool = False,
    out: Path = Path("runs"),
    tensorboard: Path | None = None,
    jobs: int = 1,
    executor: Literal["slurm", "local"] | None = None,
    cluster: list[str] | None = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Run methods on a stream of tasks and write each result as JSON; none is computed twice.

    Example: dlcft run --dataset digits --scenario class-il --tasks 5 --method dlcft --set epochs=2

    Args:
        dataset: A name that `dlcft list datasets` shows, or the path of an image folder or .npz file.
        scenario: The same labels in every task (data-il), a head for each task (task-il), or new labels (class-il).
        tasks: How many.
        joint: Learn all tasks at once: the upper bound, with --method none or none-linear.
        method: A name that `dlcft list methods` shows, or module:Name; dlcft-exact by default; may be repeated.
        seed: Of the split and of training.
        seeds: How many seeds, counted up from that one.
        backbone: A name that `dlcft list backbones` shows.
        weights: The backbone's file, or "random".
        width: Of a ResNet-18.
        size: Resize images to so many pixels.
        classes: Only the first so many.
        per_class: Only so many training images of each class.
        class_order: Of task- and class-IL: random, by the seed, or labels, in their order.
        turn: Turn the images of each task by so many degrees more.
        validate: Test on training images that are not learned, to choose settings by.
        evaluate_every: Test after every so many tasks.
        set_: A setting of the recipe to change, as key=value; may be repeated.
        data: The folder or file of the data set.
        download: Fetch the data set if it is not there.
        out: The folder of results.
        tensorboard: A folder for TensorBoard to read; needs the extra dlcft[tensorboard].
        jobs: How many to run at once on this machine.
        executor: Hand them to a cluster (slurm), or to processes here (local), through submitit.
        cluster: A parameter of submitit's, as key=value, such as slurm_partition=gpu or timeout_min=600; with nodes=2
            and tasks_per_node=4, eight processes learn each experiment together; may be repeated.
        as_json: Print the whole results, one a line.
    """
    from dlcft.bench.datasets import load
    from dlcft.bench.experiment import Experiment
    from dlcft.bench.many import run_all

    positive("--seeds", seeds)
    base = Experiment(
        dataset=dataset,
        scenario=scenario,
        tasks=tasks,
        joint=joint,
        seed=seed,
        backbone=backbone,
        width=width,
        size=size,
        classes=classes,
        per_class=per_class,
        class_order=class_order,
        turn=turn,
        validate=validate,
        evaluate_every=evaluate_every,
    )
    settings = dict(setting(text) for text in set_ or [])
    named = [*(method or []), settings.get("curvature")]
    import_own(name for name in named if isinstance(name, str) and ":" in name)
    experiments = [
        replace(base, method=name, seed=seed + number, settings=settings)
        for name in method or ["dlcft-exact"]
        for number in range(seeds)
    ]
    if download:
        load(dataset, data, download=True)
    results = run_all(
        experiments,
        out,
        data=data,
        weights=weights,
        tensorboard=tensorboard,
        jobs=jobs,
        executor=executor,
        cluster=dict(setting(text, "--cluster") for text in cluster or []),
        report=lambda line: None if as_json else say(line, to=sys.stderr),
    )
    for result in results:
        if as_json:
            print(json.dumps(result.to_dict()))
        else:
            say(f"{result.accuracy:.2%}  {out / result.experiment.file}")


def report(
    *,
    runs: Path = Path("runs"),
    format_: Annotated[Literal["html", "md", "csv", "tex"], Parameter(name="--format")] = "html",
    out: Path | None = None,
) -> None:
    """Make tables and figures from result files: the paper's, for results of its rows, and one for each stream.

    Example: dlcft report --runs runs/ --format md

    Args:
        runs: The folder of results.
        format_: One page with everything (html), or the tables alone.
        out: The file to write; by default report.html in that folder, and the terminal for tables.
    """
    from dlcft.bench import report as reports
    from dlcft.data.files import write_text

    foreign: list[str] = []
    results = reports.read_results(runs, foreign=foreign)
    traces = reports.read_traces(runs, foreign=foreign)
    for sentence in [*foreign[:3], *([f"and {len(foreign) - 3} more."] if len(foreign) > 3 else [])]:
        warn(sentence)
    if not results and not traces:
        raise ValueError(f"{runs} holds no results; dlcft run, dlcft reproduce and dlcft demo write some.")
    if format_ == "html":
        text = reports.to_html(results, title=str(runs), warnings=foreign, traces=traces)
        out = out or runs / "report.html"
    else:
        writers = {"md": reports.to_markdown, "csv": reports.to_csv, "tex": reports.to_latex}
        text = writers[format_](results, traces=traces)
    if out is None:
        say(text)
    else:
        write_text(out, text)
        say(str(out.resolve()))


def pretrain(
    *,
    data: str,
    save: Path,
    path: Path | None = None,
    backbone: Literal["resnet18-32", "resnet18"] = "resnet18-32",
    width: int | None = None,
    convert: str | None = None,
    slope: float = 0.1,
    epochs: int | None = None,
    batch_size: int = 256,
    lr: float | None = None,
    size: int | None = None,
    seed: int = 0,
    download: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Train a ResNet-18 as the paper does, or turn one's ReLU into LeakyReLU; the same command continues after a kill.

    Example: dlcft pretrain --data tiny-imagenet --width 16 --save backbone.safetensors

    Example: dlcft pretrain --data imagenet/ --backbone resnet18 --convert resnet18.pth --save leaky.safetensors

    Args:
        data: A name that `dlcft list datasets` shows, or the path of an image folder or .npz file.
        save: The .safetensors file to write; `--backbone NAME --weights FILE` takes it.
        path: The folder or file of the data set.
        backbone: For 32 pixels, or torchvision's for 224.
        width: Channels of the first stage, 64 by default; a file that is converted has its own.
        convert: The file of a network with ReLU and its classifier: train that on with LeakyReLU.
        slope: Of LeakyReLU; 0 for ReLU.
        epochs: Passes over the data: 100 by default, 1 to convert.
        batch_size: Images a step.
        lr: The learning rate at first: 0.1 by default, 1e-4 to convert.
        size: Resize images to so many pixels: by default those that the backbone is made for.
        seed: Fixes everything random.
        download: Fetch the data set if it is not there.
        as_json: Print accuracy, losses and file as JSON.
    """
    for name, value in (("--width", width), ("--epochs", epochs), ("--batch-size", batch_size), ("--size", size)):
        if value is not None:
            positive(name, value)
    import torch

    from dlcft.backbones import ResNet18, load_backbone, load_classifier
    from dlcft.bench.datasets import load
    from dlcft.bench.pretrain import CONVERSION, leaky_classifier
    from dlcft.bench.pretrain import pretrain as train

    images, small = load(data, path, download=download), backbone == "resnet18-32"
    network: torch.nn.Module
    if convert is None:
        options: dict[str, Any] = {}
        torch.manual_seed(seed)
        network = ResNet18(width or 64, "small" if small else "imagenet", slope or None)
        preprocess = replace(images.preprocess, channels=3)
    else:
        options = dict(CONVERSION)
        network = leaky_classifier(load_classifier(backbone, convert, width=width), slope)
        preprocess = load_backbone(backbone, weights=convert, width=width).preprocess
    edge = size or (32 if small else 224)
    options |= {"preprocess": replace(preprocess, size=(edge, edge)), "validation": images.test()}
    options |= {"augment": "crop4+flip" if small else "resized-crop+flip", "batch_size": batch_size}
    options |= {name: value for name, value in (("epochs", epochs), ("lr", lr)) if value is not None}
    done = train(network, images.train(), seed=seed, save=save, **options)
    if as_json:
        print(json.dumps({"top1": done.top1, "losses": done.losses, "file": str(save)}))
    else:
        say(f"top-1 {done.top1:.2%}  {save}")


def list_(
    what: Literal["methods", "curvatures", "datasets", "backbones", "artefacts", "choices"],
    *,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Show the names that other commands accept, or the choices behind the tables, and whose they are.

    Example: dlcft list methods

    Args:
        what: The kind of names. Choices come with their value here, and the reason.
        as_json: Print a JSON list.
    """
    from dlcft.backbones import BACKBONES
    from dlcft.bench.choices import CHOICES
    from dlcft.bench.datasets import NAMES
    from dlcft.bench.paper import ARTEFACTS
    from dlcft.curvature.estimate import ESTIMATORS
    from dlcft.methods.recipes import RECIPES

    known: dict[str, Iterable[str]] = {"methods": RECIPES, "curvatures": ESTIMATORS, "datasets": NAMES}
    known |= {"backbones": BACKBONES, "artefacts": ARTEFACTS}
    known["choices"] = (f"{name} ({one.origin}): {one.value}. {one.reason}" for name, one in CHOICES.items())
    names = list(known[what])
    print(json.dumps(names) if as_json else "\n".join(names))
