"""Commands that a model learns and answers by: update, predict, evaluate."""

from __future__ import annotations

import json
import math
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from dlcft import __version__
from dlcft.cli.answers import predictions, write_rows
from dlcft.cli.arguments import (
    FAILURES,
    Backbone,
    Import,
    Json,
    Model,
    Weights,
    apart,
    import_own,
    in_number,
    positive,
    printable,
    say,
    setting,
    warn,
)
from dlcft.cli.opening import (
    First,
    going_on,
    nothing_left_behind,
    open_learner,
    open_or_create,
    open_store,
    store_to_update,
    unbound,
)
from dlcft.cli.told import print_update, say_evaluation, say_incoming
from dlcft.cli.tracking import UNLOGGED, Tracking, check_tracking, told, tracked
from dlcft.cli.workers import started_again
from dlcft.pages import in_bytes, in_seconds

if TYPE_CHECKING:
    from dlcft.data.samples import Samples
    from dlcft.learner.learner import Learner
    from dlcft.update.update import Update

_BUDGETS = (1000, 2500, 5000, 10_000)  # features whose costs a dry run tells
_GATE = 3  # exit code when a gate has kept the new version from becoming current
_SKIPPED = 4  # exit code when an input could not be read


def update(
    *,
    model: Model,
    data: Path,
    backbone: str | None = None,
    weights: str | None = None,
    method: str | None = None,
    train: list[str] | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    resize: Literal["stretch", "crop"] | None = None,
    import_: Import = None,
    holdout: Path | None = None,
    max_drop: float | None = None,
    max_drop_per_label: float | None = None,
    max_flips: float | None = None,
    max_rise: float | None = None,
    max_doubtful: float | None = None,
    keep: int = 2,
    restart: bool = False,
    again: bool = False,
    cache_gb: float = 0.0,
    page: Path | None = None,
    mlflow: str | None = None,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Learn a new batch of labelled data; the first update creates the directory.

    Exit code 3 says that a gate was exceeded: the new version is kept, but not made current. Exit code 6 says that it
    is current, but could not be logged to MLflow.

    Example: dlcft update --model scenes --data january/ --backbone shipped

    Args:
        data: A folder with one folder of images a label, a .csv file with path and label (text and label for a text
            encoder), .tar shards, or an .npz file with x and y.
        backbone: The pre-trained network: a name that `dlcft list backbones` shows, or module:factory. Later updates
            need it only if that name imports or downloads something.
        weights: Its file, for the first update; later, where that file is now, if it was moved.
        method: For the first update: a name that `dlcft list methods` shows, or module:Name of your own; dlcft-exact by
            default.
        train: For the first update: only the layers under this name learn, such as layer4; may be repeated.
        set_: A setting of the method to change, for the first update, as key=value; may be repeated.
        resize: For the first update: how images come to the backbone's size. "stretch", the default, takes the whole
            image and may change its proportions; "crop" keeps them and takes the part around the middle.
        holdout: Labelled data that is not learned, to test on.
        max_drop: Do not make the new version current if accuracy on the holdout falls by more, such as 0.02.
        max_drop_per_label: The same for each single label, such as 0.2. A fall that may be chance does not count: at
            least four samples more must turn wrong than right, and two standard errors.
        max_flips: The same if a larger share of the holdout turns from right to wrong.
        max_rise: The same if the mean loss of all old data rises by a larger share of itself, such as 0.5. It is
            computed from the memory and needs no holdout, but a closed-form method. New labels raise it.
        max_doubtful: The same if a larger share of the new samples has a doubtful label, 0 for any: one that the
            version before answers mostly as another label, as where two folders are swapped. Without this such labels
            are only told.
        keep: How many versions stay on disk; one that a gate keeps from becoming current stays beside them until the
            next update.
        restart: Begin anew where an update was interrupted, instead of continuing it.
        again: Learn data that was learned before once more, so that it counts twice. The same data in another order or
            form (images and arrays) is not recognised.
        cache_gb: For trained methods: so much memory, in GB, may hold what the frozen network computes for the samples,
            so that epochs are shorter.
        page: The HTML file for the report; by default one beside the model's directory.
        mlflow: The address of an MLflow server or database, to log the update and register its version there; needs the
            extra dlcft[mlflow].
        dry_run: Change nothing; tell the labels, and by a trial on a few of the samples the time, the memory and the
            size on disk.
    """
    positive("--keep", keep)
    if page is not None:
        if page.is_dir() or any(part.is_file() for part in page.parents):
            raise ValueError(f"--page is {page}; it must be a file, in a folder that can be made if it is not there.")
        apart("--page", page, model, data, holdout)
    from dlcft.network import workers
    from dlcft.update.gates import Gates
    from dlcft.update.update import update as learn_update

    gates = Gates(max_drop, max_drop_per_label, max_flips, max_rise, max_doubtful)
    gates.check(holdout=holdout is not None)
    if mlflow is not None:
        check_tracking(mlflow)
    settings = dict(setting(text) for text in set_ or [])
    first = First(backbone, weights, method, train, settings, resize, tuple(import_ or ()))
    first.import_modules()
    store = store_to_update(model)
    with ExitStack() as held:
        if not dry_run and store.current is not None and workers.place() == 0:
            held.enter_context(store.lock())  # one reading of the manifest, and nobody else meanwhile
        learner = open_or_create(store, first)
        gates.check(holdout=holdout is not None, closed_form=learner.recipe.closed_form)
        samples = learner.samples(data)
        if not again:
            _refuse_learned(learner, samples, data, model)
        held_out = None if holdout is None else learner.samples(holdout)
        if held_out is not None:
            _check_holdout(learner, samples, held_out, holdout, gated=gates.on_holdout)
        if backbone is None and not learner.tasks and learner.directory is None:
            _warn_small(learner, model)
        if dry_run:
            _describe(learner, samples, model, first, data, held_out, as_json)
            return
        if not learner.tasks:
            say(f"{model}: {_new_model(learner, model)}", to=sys.stderr)
            if gates.given:
                say("nothing was known before: gates count from the next update on", to=sys.stderr)
        options: dict[str, Any] = {"holdout": held_out, **asdict(gates), "keep": keep, "resume": not restart}
        options["cache_gb"] = cache_gb
        with nothing_left_behind(model, learner), going_on():
            done = learn_update(learner, samples, directory=model, **options)
    try:
        logged = _tell(done, learner, model, page, as_json, None if mlflow is None else (mlflow, asdict(gates)))
    except BrokenPipeError:
        raise
    except OSError as error:
        untold = f"{model}: version {done.version} is written, but this cannot be printed ({error.strerror})."
        raise OSError(error.errno, untold) from error
    if not done.accepted:
        raise SystemExit(_GATE)
    if not logged:
        raise SystemExit(UNLOGGED)


def _tell(
    done: Update, learner: Learner, model: Path, page: Path | None, as_json: bool, tracking: Tracking | None
) -> bool:
    """Write the page, log to MLflow if asked to, and print what was done; False where it could not be logged."""
    from dlcft.network import workers

    written = _write_page(done, learner, model, page) if workers.place() == 0 else None
    registered = None
    if tracking is not None:
        registered = workers.from_first(tracked(learner, done, written, *tracking) if workers.place() == 0 else None)
    if as_json:
        also = {} if tracking is None else {"mlflow": None if registered is None else asdict(registered)}
        print(json.dumps(asdict(done) | {"page": written} | also))
    else:
        print_update(done, model)
        if written is not None:
            say(f"page: {written}")
        if registered is not None:
            say(told(registered))
    sys.stdout.flush()
    return tracking is None or registered is not None


def predict(
    inputs: Path,
    *,
    model: Model,
    out: Path | None = None,
    format_: Annotated[Literal["csv", "json"], Parameter(name="--format")] = "csv",
    top: int = 1,
    batch_size: int = 64,
    backbone: Backbone = None,
    weights: Weights = None,
    import_: Import = None,
) -> None:
    """Give the label of each image or text, with probabilities.

    An image that cannot be read is skipped with a warning; exit code 4 says that there were some.

    Example: dlcft predict new-images/ --model scenes --out answers.csv

    Args:
        inputs: A folder of images, an image, a .csv file with a column path (text for a text encoder), .tar shards, or
            an .npz or .npy file.
        out: The file to write; by default the terminal.
        format_: CSV, or one JSON object a line.
        top: How many labels to give for each input.
        batch_size: How many inputs to read at once.
    """
    from dlcft.data.files import written_whole
    from dlcft.network import workers

    positive("--top", top)
    positive("--batch-size", batch_size)
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ValueError(f"--out is {out}; it must be a file in a folder that exists.")
    if out is not None:
        apart("--out", out, model, inputs)
    import_own(import_ or ())
    learner = open_learner(open_store(model), backbone=backbone, weights=weights)
    what = learner.inputs(inputs)
    top = min(top, len(learner.labels()))
    skipped: list[str] = []
    rows = predictions(learner, what, top, batch_size, skipped)
    if out is None or workers.place() > 0:
        write_rows(rows, sys.stdout, format_, top)
    else:
        with written_whole(out, errors="surrogateescape") as file:
            write_rows(rows, file, format_, top)
    if learner.notes.get("temperature") is None:
        warn("no holdout was ever given, so the probabilities are not calibrated.")
    if skipped:
        warn(f"{len(skipped)} of {len(what)} inputs could not be read.")
        raise SystemExit(_SKIPPED)


def evaluate(
    *,
    model: Model,
    data: Path,
    batch_size: int = 64,
    backbone: Backbone = None,
    weights: Weights = None,
    import_: Import = None,
    as_json: Json = False,
) -> None:
    """Test a model on labelled data, label by label.

    Example: dlcft evaluate --model scenes --data holdout/

    Args:
        data: Labelled data, as for `dlcft update`.
        batch_size: How many samples to read at once.
    """
    positive("--batch-size", batch_size)
    import_own(import_ or ())
    learner = open_learner(open_store(model), backbone=backbone, weights=weights)
    result = learner.evaluate(data, batch_size=batch_size)
    labels = result.pop("per_label")
    if as_json:
        told = {name: value if math.isfinite(value) else None for name, value in result.items()}
        print(json.dumps(told | {"per_label": {str(label): counts for label, counts in labels.items()}}))
        return
    say_evaluation(result, {str(label): counts for label, counts in labels.items()}, set(map(str, learner.labels())))


def _refuse_learned(learner: Learner, samples: Samples, data: Path, model: Path) -> None:
    from dlcft.learner.records import Forgotten

    task = learner.learned_before(samples)
    if task is None:
        return
    forgotten = any(isinstance(record, Forgotten) and record.task > task for record in learner.history)
    since = ", and forgotten some samples since" if forgotten else ""
    if started_again():
        say(f"{model} has learned {data} as task {task + 1}, before a worker was started again.")
        raise SystemExit(0)
    raise ValueError(f"{model} has learned {data} as task {task + 1} already{since}; --again learns it once more.")


def _check_holdout(learner: Learner, samples: Samples, held_out: Samples, holdout: Path | None, *, gated: bool) -> None:
    from dlcft.update.update import check_labels

    check_labels(learner, samples, held_out, gated=gated)
    if held_out.fingerprint() == samples.fingerprint():
        raise ValueError(f"--holdout is {holdout}, the same samples as --data; give samples that are not learned.")
    task = learner.learned_before(held_out)
    if task is not None:
        warn(f"--holdout was learned as task {task + 1}; on other samples it is less accurate.")


def _warn_small(learner: Learner, model: Path) -> None:
    """Say what network is taken for a new model where none was named."""
    assert learner.preprocess is not None
    size = " × ".join(map(str, learner.preprocess.size or ()))
    given = f"no --backbone is given, so {model} is made on 'shipped', a small network for images of {size} pixels"
    warn(f"{given}: larger ones are reduced to that. For photographs take another one, see dlcft list backbones.")


def _new_model(learner: Learner, model: Path) -> str:
    if learner.directory is not None:
        return "a first update that was interrupted goes on"
    others = ", ".join(sorted(path.parent.name for path in model.resolve().parent.glob("*/manifest.json")))
    beside = f"; models that are there already: {others}" if others else ""
    return f"a new model on the backbone {learner.notes['backbone']['name']!r}{beside}"


def _describe(
    learner: Learner, samples: Samples, model: Path, first: First, data: Path, held_out: Samples | None, as_json: bool
) -> None:
    from dlcft.closed_form.costs import costs
    from dlcft.update.forecast import forecast
    from dlcft.update.incoming import doubts, look_at

    incoming = look_at(learner, samples)
    known = set(learner.labels()) if learner.tasks else set()
    new = sorted({str(label) for label in samples.labels if label not in known})
    tested = 0 if held_out is None else len(held_out)
    if not as_json:
        learned = f"{in_number(learner.tasks, 'task')} learned"
        say(f"{model}: {learned if learner.tasks else _new_model(learner, model)}")
        labels = len(set(samples.labels))
        say(f"would learn {len(samples)} samples of {labels} labels; new: {', '.join(map(printable, new)) or 'none'}")
        say_incoming(incoming)
        for sentence in doubts(incoming):
            warn(sentence)
        sys.stdout.flush()  # before a trial that may take long
    cost = forecast(unbound, (model, first, data), samples=len(samples), tested=tested)
    # the number of features is chosen at the first update
    budgets = [] if cost.features is None else [cost.features, *(_BUDGETS if not learner.tasks else ())]
    shares = {features: costs(features, cost.classes) for features in budgets}
    if as_json:
        facts = {"tasks": learner.tasks, "samples": len(samples), "new_labels": new}
        rows = [{"features": features, **asdict(share)} for features, share in shares.items()]
        seen = {"incoming": [asdict(row) for row in incoming], "doubts": doubts(incoming)}
        print(json.dumps(facts | seen | asdict(cost) | {"budgets": rows}))
        return
    took = f"{in_seconds(cost.trial_seconds)} for a trial on {cost.trial_samples} samples"
    say(f"takes about {in_seconds(cost.seconds)} ({took})")
    say(f"needs about {in_bytes(cost.peak)} of memory, and {in_bytes(cost.bytes)} on disk for each version kept")
    for features, share in shares.items():
        part = "of these" if features == cost.features else "instead"
        say(f"  {part}, {features:,} features: {in_bytes(share.memory)} of memory, {in_bytes(share.disk)} on disk")


def _write_page(done: Update, learner: Learner, model: Path, page: Path | None) -> str | None:
    """The page's path; None, with a warning, where it cannot be written: the version itself is safe by then."""
    from dlcft.data.files import write_text
    from dlcft.update.page import to_html

    backbone, method = learner.notes["backbone"]["name"], learner.notes.get("method")
    origin = [("backbone", backbone), ("method", method), ("updates", str(learner.tasks)), ("dlcft", __version__)]
    home = model.resolve()
    place = page or home.with_name(f"{home.name}-updates") / f"version-{done.version}.html"
    try:
        text = to_html(done, model=home.name, origin=[(name, value) for name, value in origin if value])
        write_text(place, text.encode(errors="backslashreplace").decode())  # a file's name may be of any bytes
    # the update is committed: no page may make it look failed
    except (*FAILURES, ArithmeticError, AttributeError, LookupError) as error:
        warn(f"the page {place} could not be written ({getattr(error, 'strerror', None) or error}).")
        return None
    return str(place)
