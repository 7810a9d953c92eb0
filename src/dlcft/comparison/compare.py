"""What each method would reach on a user's data, and what it would cost: before anything is decided."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dlcft.comparison.clock import Clock, Report
from dlcft.comparison.crossed import CrossValidation, Data, from_plain, groups, guessed, is_crossed
from dlcft.comparison.folds import chosen, split
from dlcft.comparison.verdict import RULE, Answers, ahead, recommended, share_right, weights
from dlcft.data.images import Preprocess
from dlcft.data.labels import Labels
from dlcft.data.samples import Samples, to_device
from dlcft.data.sources import Tokenizer
from dlcft.learner.build import find_device, without_normalising
from dlcft.learner.display import Progress
from dlcft.learner.learner import Learner
from dlcft.learner.records import Learned
from dlcft.methods.recipes import RECIPES, Recipe, named_recipe
from dlcft.store.files import stored_bytes
from dlcft.update.forecast import TEST_BATCH, fresh_peak, learning_seconds, measure_learning, peak_since

CLOSED_FORM = tuple(name for name, recipe in RECIPES.items() if recipe.closed_form)
TRAINED = ("none", "dlcft")  # in one batch, methods with a memory train as `none` does: there is no past yet
SAMPLES, FOLDS = 2000, 5
_UNEVEN = 1.5  # the largest class has so many times the samples of the smallest: accuracies of classes are told too
_SQUARE = 1000  # rows of a matrix that tells how fast the processor is
_LOOK = 16  # samples that tell how fast the network is
_TRIAL = (8, 8, TEST_BATCH)  # samples of the three tasks that tell how long training takes
_FAILED = (ValueError, TypeError, FloatingPointError)


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        method: its name.
        accuracy: the share of right answers to samples that were not learned, and its standard `error`.
        balanced: the same with every class counting the same.
        difference: how much more accurate it is than the recommended one, on the same samples, with the standard error
            of that difference; negative where it is less.
        tested: how many samples.
        by_fold: the accuracy on each fold that was tested.
        seconds: to learn all samples, counted up from what was measured.
        peak: bytes of memory at the peak, with all that Python and the network take.
        bytes: of a version on disk.
        features: how many, in closed form.
        closed_form: whether it is solved: then parts learned in sequence give the same as all at once.
        can: what can be done later, beside learning more: "forget" samples exactly, "merge" learners.
    """

    method: str
    accuracy: float
    error: float
    balanced: float
    difference: float
    difference_error: float
    tested: int
    by_fold: list[float]
    seconds: float
    peak: int
    bytes: int
    features: int | None
    closed_form: bool
    can: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was found.

    Attributes:
        rows: one a method, the most accurate first.
        recommended: the name of one, by `rule`.
        recommended_balanced: the one by the same rule if every class counts the same.
        rule: in words.
        samples: how many were looked at, of `total`.
        total: how many there are.
        classes: how many labels.
        folds: into how many parts they were split.
        learned: how many samples were learned for each test, on average.
        uneven: whether classes differ so much in size that `balanced` tells something.
        untested: labels with one sample, which was always learned and never tested.
        left_out: methods that could not be tested, with the reason.
        seconds: that the comparison took.
        processor: seconds that the processor worked for it, on all its cores.
    """

    rows: list[Row]
    recommended: str
    recommended_balanced: str
    rule: str
    samples: int
    total: int
    classes: int
    folds: int
    learned: int
    uneven: bool
    untested: list[str]
    left_out: dict[str, str]
    seconds: float
    processor: float

    def row(self, method: str) -> Row:
        """The row of a method."""
        return next(row for row in self.rows if row.method == method)


@dataclass(frozen=True, eq=False)
class _Found:
    """The answers and the costs of one method."""

    tested: Answers
    seconds: float
    peak: int
    features: int | None


def compare(
    backbone: nn.Module,
    data: Any,
    methods: Sequence[str] = CLOSED_FORM,
    *,
    samples: int = SAMPLES,
    folds: int = FOLDS,
    preprocess: Preprocess | None = None,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    device: str = "auto",
    report: Report | None = None,
) -> Comparison:
    """Test methods by cross-validation on some of a user's data, and recommend one.

    Closed-form methods are tested on every fold; the network sees a sample once for each kind of features. Methods that
    are trained are tested on one fold, after learning the others.

    Args:
        backbone: see `Learner`.
        data: see `Samples`.
        methods: names in `RECIPES`, or `module:Name`.
        samples: how many to look at, at most; classes keep their shares, and two samples if they have them.
        folds: into how many parts to split them, at most.
        preprocess: see `Learner`.
        tokenizer: see `Learner`.
        seed: chooses samples and folds, and is that of the methods.
        device: see `Learner`.
        report: called while it works, with how much is done and left; first with a guess of all that it may take.

    Raises:
        ValueError: when a name is unknown, the data has fewer than two labels or two samples of a label, or no method
            can learn it.

    Example:
        >>> x, y = torch.randn(60, 4), ["cat", "dog", "owl"] * 20
        >>> found = compare(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), (x, y), ["ncm", "ridge"])
        >>> found.recommended in ("ncm", "ridge"), found.folds, found.rows[0].tested
        (True, 5, 60)
    """
    began, worked = time.perf_counter(), time.process_time()
    if samples < 2 or folds < 2 or not methods:
        raise ValueError(f"samples is {samples}, folds {folds}, methods {list(methods)}; 2, 2 and one are the least.")
    recipes = {name: named_recipe(name, {}) for name in methods}
    reading: dict[str, Any] = {"preprocess": without_normalising(preprocess), "tokenizer": tokenizer}
    every = data if isinstance(data, Samples) else Samples(data, **reading)
    some = every.part(chosen(every.labels, samples, seed=seed))
    labels = Labels(sorted(set(some.labels), key=str))
    y, parts = labels.indices(some.labels), split(some.labels, folds, seed=seed)
    used = Data(some, y, len(labels), parts, backbone, preprocess, seed, find_device(device))
    options: dict[str, Any] = {"preprocess": preprocess, "tokenizer": tokenizer, "seed": seed, "device": device}
    closed = {name: recipe for name, recipe in recipes.items() if is_crossed(recipe)}
    trained = {name: recipe for name, recipe in recipes.items() if name not in closed}
    left_out: dict[str, str] = {}
    plan = _plan_of_closed(used, closed) | _plan_of_trained(used, trained, options, left_out)
    clock = Clock(plan, report or (lambda _: None))
    found = _test_closed(used, closed, len(every), clock, left_out)
    found |= _test_trained(used, trained, options, len(every), clock, left_out)
    if not found:
        raise ValueError(f"no method can be tested: {'; '.join(dict.fromkeys(left_out.values()))}")
    took = {"seconds": time.perf_counter() - began, "processor": time.process_time() - worked}
    return _concluded(used, found, len(every), left_out, took)


def _plan_of_closed(data: Data, recipes: Mapping[str, Recipe]) -> dict[str, float]:
    """Guesses of the seconds of each group of methods with the same features."""
    if not recipes:
        return {}
    builder, few = data.builder(RECIPES["ridge"]), data.samples.part(torch.arange(min(_LOOK, len(data.y))))
    width = builder.look_at(few).shape[1]  # and the network is warm
    began = time.perf_counter()
    builder.features(to_device(few.fetch(torch.arange(len(few))), data.device, dtype=builder.dtype))
    plain = (time.perf_counter() - began) / len(few)
    square = torch.eye(_SQUARE, dtype=torch.float64, device="cpu")
    began = time.perf_counter()
    torch.linalg.cholesky(square @ square)
    speed = (2 + 1 / 3) * _SQUARE**3 / (time.perf_counter() - began)
    plan: dict[str, float] = {}
    for names in groups(recipes):
        recipe = recipes[names[0]]
        reading, folds = guessed(recipe, len(names), data, width, plain, speed)
        if from_plain(recipe) and plan:
            reading = 0.0  # the network's own features are there already
        plan |= dict(zip(_steps(names), (reading, folds), strict=True))
    return plan


def _plan_of_trained(
    data: Data, recipes: Mapping[str, Recipe], options: dict[str, Any], left_out: dict[str, str]
) -> dict[str, float]:
    """Guesses of the seconds of methods that are trained, by a trial on a few samples."""
    plan: dict[str, float] = {}
    for name, recipe in recipes.items():
        some = torch.linspace(0, len(data.y) - 1, max(_TRIAL)).long()
        tasks = [(data.samples.part(some[:: len(some) // count]), None) for count in _TRIAL]
        try:
            rates = measure_learning(Learner(data.backbone, recipe, **options), tasks)
        except _FAILED as error:
            left_out[name] = str(error)
            continue
        learned, epochs = int((data.folds != 0).sum()), recipe.settings.get("epochs", 0)
        plan[name] = learning_seconds(rates, samples=learned, epochs=epochs, solves=1)
    return plan


def _test_closed(
    data: Data, recipes: Mapping[str, Recipe], total: int, clock: Clock, left_out: dict[str, str]
) -> dict[str, _Found]:
    crossing, found = CrossValidation(data), dict[str, _Found]()
    for names in groups(recipes):
        steps = _steps(names)
        try:
            shown = crossing.test({name: recipes[name] for name in names}, *(partial(clock.tell, s) for s in steps))
        except _FAILED as error:
            left_out |= dict.fromkeys(names, str(error))
            shown = {}
        clock.tell(steps[1], 1.0)
        for name, one in shown.items():
            tested = Answers(one.right, data.folds >= 0, one.bytes, True)
            found[name] = _Found(tested, total * one.reading + one.solving, one.peak, one.features)
    return found


def _test_trained(
    data: Data,
    recipes: Mapping[str, Recipe],
    options: dict[str, Any],
    total: int,
    clock: Clock,
    left_out: dict[str, str],
) -> dict[str, _Found]:
    """Learn all folds but the first, and test on that."""
    held, found = data.folds == 0, dict[str, _Found]()
    known, test = (data.samples.part(part.nonzero().flatten()) for part in (~held, held))
    for name, recipe in recipes.items():
        if name in left_out:
            continue
        fresh_peak()
        learner = Learner(data.backbone, recipe, **options)
        try:
            learner.learn(known, progress=partial(_tell, clock, name))
            learner.solve()
        except _FAILED as error:
            left_out[name] = str(error)
            continue
        peak, record = peak_since(), learner.history[-1]
        assert isinstance(record, Learned)
        answers = learner.outputs(test, batch_size=TEST_BATCH).argmax(1)
        right = torch.zeros(len(held), dtype=torch.bool)
        names = learner.labels()
        right[held] = torch.tensor([names[a] == b for a, b in zip(answers.tolist(), test.labels, strict=True)])
        seconds = (record.seconds_training + record.seconds_remembering) * total / len(known)
        tested = Answers(right, held, stored_bytes(learner.state()[0]), recipe.closed_form)
        found[name] = _Found(tested, seconds, peak, None)
        clock.tell(name, 1.0)
    return found


def _tell(clock: Clock, name: str, progress: Progress) -> None:
    clock.tell(name, progress.share)


def _concluded(
    data: Data, found: Mapping[str, _Found], total: int, left_out: dict[str, str], took: dict[str, float]
) -> Comparison:
    labels, tested = data.samples.labels, {name: one.tested for name, one in found.items()}
    same, fair = (weights(data.y, balanced=balanced) for balanced in (False, True))
    choice = recommended(tested, same)
    rows = [_row(name, one, tested[choice], data, same, fair) for name, one in found.items()]
    counts = Counter(labels)
    single = [str(label) for label, count in counts.items() if count == 1]
    used = [count for count in counts.values() if count > 1]
    folds = data.fold_count
    return Comparison(
        rows=sorted(rows, key=lambda row: -row.accuracy),
        recommended=choice,
        recommended_balanced=recommended(tested, fair),
        rule=RULE,
        samples=len(labels),
        total=total,
        classes=data.classes,
        folds=folds,
        learned=round(len(labels) - int((data.folds >= 0).sum()) / folds),
        uneven=max(used) > _UNEVEN * min(used),
        untested=single,
        left_out=left_out,
        **took,
    )


def _row(name: str, one: _Found, choice: Answers, data: Data, same: Tensor, fair: Tensor) -> Row:
    tested, right = one.tested.tested, one.tested.right
    accuracy, error = share_right(one.tested, same)
    difference, difference_error = ahead(one.tested, choice, same)
    parts = [tested & (data.folds == fold) for fold in range(data.fold_count)]
    return Row(
        method=name,
        accuracy=accuracy,
        error=error,
        balanced=share_right(one.tested, fair)[0],
        difference=difference,
        difference_error=difference_error,
        tested=int(tested.sum()),
        by_fold=[float(right[part].double().mean()) for part in parts if part.any()],
        seconds=one.seconds,
        peak=one.peak,
        bytes=one.tested.bytes,
        features=one.features,
        closed_form=one.tested.closed_form,
        can=[] if one.features is None else ["forget", "merge"],
    )


def _steps(names: Sequence[str]) -> tuple[str, str]:
    """The two steps of methods that have the same features."""
    together = ", ".join(names)
    return f"{together}: features", f"{together}: folds"
