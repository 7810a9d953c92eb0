"""The command `compare`: which method suits some data, before anything is decided."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dlcft.cli.arguments import import_own, in_number, printable, say
from dlcft.cli.opening import open_store
from dlcft.pages import in_bytes, in_seconds

if TYPE_CHECKING:
    from dlcft.comparison.clock import Report, Stage
    from dlcft.comparison.compare import Comparison, Row

_FORMATS = (".svg", ".png")
_BUSY = 0.5  # the share of the time, of one core, below which times are no good measure
_EVERY, _WIDTH = 0.2, 78  # seconds and letters of the line on a terminal
_NAMED = 8  # labels that a sentence names


def compare(
    *,
    data: Path,
    backbone: str | None = None,
    weights: str | None = None,
    model: Path | None = None,
    method: list[str] | None = None,
    train: bool = False,
    samples: int = 2000,
    folds: int = 5,
    seed: int = 0,
    picture: Path | None = None,
    import_: Annotated[list[str] | None, Parameter(name="--import")] = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Tell what each method would reach on your data, by cross-validation, and what it would cost; recommend one.

    Nothing is kept but the picture.

    Example: dlcft compare --data january/ --backbone shipped --picture methods.svg

    Args:
        data: Labelled data, as for `dlcft update`.
        backbone: The pre-trained network, as for `dlcft update`.
        weights: Its file.
        model: The directory of a model whose backbone is taken, in place of --backbone; what it has learned is not.
        method: A method to compare, a name that `dlcft list methods` shows; may be repeated. By default all closed-form
            ones.
        train: Compare methods that are trained too; this takes longer.
        samples: How many samples to look at, at most; labels keep their shares.
        folds: Into how many parts to split them: each is tested once, after learning the others.
        seed: Fixes everything random.
        picture: The file for a picture, .svg or .png.
        import_: A module of your own that defines a method; may be repeated.
        as_json: Print JSON.
    """
    for name, value, least in (("--samples", samples, 2), ("--folds", folds, 2)):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}.")
    if seed < 0:
        raise ValueError(f"--seed is {seed}; it must be 0 or more.")
    if picture is not None:
        _check_picture(picture, data, model)
    from dlcft.comparison.compare import CLOSED_FORM, TRAINED
    from dlcft.comparison.compare import compare as tested
    from dlcft.network import workers

    import_own([*(import_ or ()), *(name for name in method or () if ":" in name)])
    names = [*dict.fromkeys([*(method or CLOSED_FORM), *(TRAINED if train else ())])]
    network, preprocess, tokenizer = _network(backbone, weights, model)
    options: dict[str, Any] = {"samples": samples, "folds": folds, "seed": seed, "preprocess": preprocess}
    with _progress() as report:
        found = tested(network, data, names, tokenizer=tokenizer, report=report, **options)
    if picture is not None and workers.place() == 0:
        from dlcft.comparison.picture import picture as drawn
        from dlcft.data.files import new_file

        with new_file(picture) as file:
            file.write(drawn(found, picture.suffix[1:].lower()))
    if as_json:
        print(json.dumps(asdict(found) | {"picture": None if picture is None else str(picture)}))
        return
    _print(found)
    if picture is not None:
        say(f"picture: {picture}")


def _check_picture(picture: Path, *inputs: Path | None) -> None:
    """Refuse a file of another kind, and one that may be read: an image that is there may be a sample."""
    place = picture.resolve()
    if picture.suffix.lower() not in _FORMATS or picture.is_dir() or not place.parent.is_dir():
        wanted = f"a file in a folder that exists, whose name ends in {' or '.join(_FORMATS)}"
        raise ValueError(f"--picture is {picture}; it must be {wanted}.")
    for given in (path.resolve() for path in inputs if path is not None):
        if given == place or given in place.parents:
            raise ValueError(f"--picture is {picture}, in what is read; choose another place.")
    if place.exists() and picture.suffix.lower() == ".png":
        raise ValueError(f"--picture is {picture}, an image that is there already; choose another name, or .svg.")


def _network(backbone: str | None, weights: str | None, model: Path | None) -> tuple[Any, Any, Any]:
    """The network, its preprocessing and its tokenizer."""
    from dlcft.backbones import load_backbone
    from dlcft.data.images import Preprocess

    if model is None:
        found = load_backbone(backbone or "shipped", weights=weights)
        return found.module, found.preprocess, found.tokenizer
    if weights is not None:
        raise ValueError(f"--weights is {weights}, and --model tells the weights; leave one of them out.")
    from dlcft.backbones.opening import noted_backbone

    store = open_store(model)
    found = load_backbone(**noted_backbone(store, backbone))
    current = store.current
    assert current is not None
    saved = current.header["preprocess"]
    return found.module, None if saved is None else Preprocess.from_dict(saved), found.tokenizer


@contextmanager
def _progress() -> Iterator[Report]:
    """Tell the time that it may take, and on a terminal how much is left."""
    terminal = sys.stderr.isatty()
    first, last = True, 0.0

    def report(stage: Stage) -> None:
        nonlocal first, last
        if first:
            say(f"takes about {in_seconds(max(1.0, stage.seconds_left))}", to=sys.stderr)
            first = False
        if terminal and time.perf_counter() - last > _EVERY:
            line = f"{stage.share:4.0%}  {in_seconds(max(1.0, round(stage.seconds_left)))} left  {stage.what}"
            sys.stderr.write(f"\r{line[:_WIDTH]:<{_WIDTH}}")
            sys.stderr.flush()
            last = time.perf_counter()

    try:
        yield report
    finally:
        if terminal and last:
            sys.stderr.write("\r" + " " * _WIDTH + "\r")
            sys.stderr.flush()


def _print(found: Comparison) -> None:
    each = found.samples - found.learned
    tested = f"{in_number(found.folds, 'fold')}: {found.learned:,} learned and about {each:,} tested each time"
    say(f"{found.samples:,} of {found.total:,} samples, {found.classes} labels; {tested}")
    if found.untested:
        names = ", ".join(map(printable, found.untested[:_NAMED])) + (" …" if len(found.untested) > _NAMED else "")
        say(f"{in_number(len(found.untested), 'label')} with one sample, learned and never tested: {names}")
    for line in _table(found):
        say(line)
    part = [row for row in found.rows if row.tested < max(other.tested for other in found.rows)]
    if part:
        names = ", ".join(row.method for row in part)
        say(f"tested on one fold of {part[0].tested:,} samples, as are their differences: {names}")
    if any(not row.closed_form for row in found.rows):
        say("trained methods learned one batch here; what they forget when more comes is not in these numbers")
    if found.processor < _BUSY * found.seconds:
        worked = f"of {in_seconds(found.seconds)} the processor worked {in_seconds(found.processor)} for this"
        say(f"{worked}, the rest went to other work or to waiting: undisturbed, the times above are shorter")
    for name, why in found.left_out.items():
        say(f"left out: {name} ({why})")
    say(f"recommended: {found.recommended}, {found.rule}")
    if found.uneven and found.recommended_balanced != found.recommended:
        say(f"if every label counts the same: {found.recommended_balanced}")


def _table(found: Comparison) -> list[str]:
    """The lines of the table; percent, and seconds for all samples."""
    head = ["", "accuracy, %", *(["every label the same"] if found.uneven else []), "difference"]
    head += [f"to learn {found.total:,}", "memory", "disk", "can"]
    rows = [head, *(_cells(row, found) for row in found.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if place in (0, last) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in rows
    ]


def _cells(row: Row, found: Comparison) -> list[str]:
    choice = row.method == found.recommended
    difference = "" if choice else f"{100 * row.difference:+.1f} ± {100 * row.difference_error:.1f}"
    return [
        f"{'*' if choice else ' '} {row.method}",
        f"{100 * row.accuracy:.1f} ± {100 * row.error:.1f}",
        *([f"{100 * row.balanced:.1f}"] if found.uneven else []),
        difference,
        in_seconds(row.seconds),
        in_bytes(row.peak),
        in_bytes(row.bytes),
        ", ".join(row.can) or "–",
    ]
