"""The paper's claims, and ours, against the results: each a difference over common seeds, with its standard error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dlcft.bench import metrics
from dlcft.bench.experiment import Result
from dlcft.bench.spectrum import Trace

Figure = Literal["accuracy", "bwt", "knn"]
Verdict = Literal["holds", "level", "does not hold", "one seed"]
ERRORS = 2  # standard errors that a difference must exceed
RECOVERED = 0.8  # of the way from None to Joint
_DLCFT = "DLCFT (TK-FAC)"


@dataclass(frozen=True)
class Claim:
    """A sum of figures with weights, seed by seed, that is said to be above zero, or at least at a bound.

    Attributes:
        letter: of the claim that it belongs to.
        text: what is said.
        stream: see `choices.Scale`.
        weights: of rows, by their names in `paper.ROWS`.
        figure: of a result, in percent or points.
        least: the bound; None for above zero by more than `ERRORS` standard errors.
    """

    letter: str
    text: str
    stream: str
    weights: Mapping[str, float]
    figure: Figure = "accuracy"
    least: float | None = None


def _ahead(letter: str, stream: str, row: str, *others: str, figure: Figure = "accuracy") -> list[Claim]:
    what = "BWT of " if figure == "bwt" else ""
    return [Claim(letter, f"{what}{row} above {other}", stream, {row: 1, other: -1}, figure) for other in others]


def _recovers(stream: str, none: str, text: str) -> Claim:
    weights = {_DLCFT: 1, none: RECOVERED - 1, "Joint, linear": -RECOVERED}
    return Claim("a", f"{_DLCFT} above {100 * RECOVERED:.0f} % of the way from {text}", stream, weights, least=0)


LETTERS = {
    "a": "in data-IL DLCFT is ahead of every other method and recovers most of the way from None to Joint",
    "b": "curvature serves the linearised network with squared loss better, and better curvature serves it more",
    "c": "with a head for each task DLCFT forgets nearly nothing",
    "d": "with new classes and a buffer DLCFT is ahead of replay",
    "e": "the largest eigenvalue of the Fisher matrix vanishes with cross-entropy, and stays with squared loss",
    "f": "features get better from task to task",
    "ours": "not the paper's",
}
CLAIMS: tuple[Claim, ...] = (
    *(one for at in ("data", "long") for one in _ahead("a", at, _DLCFT, "None", "LwF", "EWC", "MAS", "OSLA")),
    *(_recovers(at, "None", "the nonlinear None to Joint, as the paper counts") for at in ("data", "long")),
    *(_recovers(at, "None, linear", "None to Joint of its own model") for at in ("data", "long")),
    *(one for at in ("data", "long") for one in _ahead("a", at, _DLCFT, "None, linear")),
    *_ahead("b", "data", "DLCFT (diagonal)", "EWC"),
    *(one for at in ("data", "long") for one in _ahead("b", at, "DLCFT (K-FAC)", "OSLA")),
    *(one for at in ("data", "long", "class") for one in _ahead("b", at, _DLCFT, "TK-FAC, nonlinear + SCE")),
    *_ahead("b", "class", "DLCFT (K-FAC)", "K-FAC, nonlinear + SCE"),
    *(one for at in ("data", "long", "class") for one in _ahead("b", at, _DLCFT, "DLCFT (K-FAC)")),
    *(one for at in ("data", "long", "task", "class") for one in _ahead("b", at, "DLCFT (exact TK)", _DLCFT)),
    Claim("c", f"BWT of {_DLCFT} at least −1", "task", {_DLCFT: 1}, "bwt", least=-1),
    Claim("c", "BWT of DLCFT (exact TK) at least −1", "task", {"DLCFT (exact TK)": 1}, "bwt", least=-1),
    *_ahead("c", "task", _DLCFT, "EWC", "OSLA", figure="bwt"),
    *_ahead("c", "task", _DLCFT, "LwF", "EWC", "OSLA", "ER", "DER", "DER++"),
    *_ahead("d", "class", _DLCFT, "ER", "DER", "DER++"),
    *(Claim("f", f"k-NN of {row} rises", "data", {row: 1}, "knn") for row in (_DLCFT, "None", "LwF", "EWC", "OSLA")),
    *(one for at in ("data", "long", "task") for one in _ahead("ours", at, "dlcft", _DLCFT)),
    *_ahead("ours", "class", "dlcft-replay", _DLCFT),
    *(one for at in ("data", "long", "task", "class") for one in _ahead("ours", at, "dlcft-exact", "dlcft", "Joint")),
)


def _knn_rise(result: Result) -> float:
    points = result.knn
    return points[-1][1] - points[0][1] if len(points) > 1 else math.nan


def _bwt(result: Result) -> float:
    matrix = result.matrix
    return math.nan if matrix is None else metrics.backward_transfer(matrix)


_FIGURES: dict[Figure, Callable[[Result], float]] = {
    "accuracy": lambda result: result.accuracy,
    "bwt": _bwt,
    "knn": _knn_rise,
}


@dataclass(frozen=True)
class Judged:
    """A claim, the sum over seeds in points, and what it says."""

    claim: Claim
    values: Sequence[float] = field(repr=False)  # one a seed that all rows have

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def error(self) -> float | None:
        """The standard error of the mean over seeds; None for one seed."""
        return statistics.stdev(self.values) / math.sqrt(len(self.values)) if len(self.values) > 1 else None

    @property
    def verdict(self) -> Verdict:
        if self.error is None:
            return "one seed"
        above, margin = self.mean - (self.claim.least or 0), ERRORS * self.error
        if above > margin or (self.claim.least is not None and above >= 0):
            return "holds"
        return "level" if above >= -margin else "does not hold"


def judged(claim: Claim, rows: Mapping[str, Sequence[Result]]) -> Judged | None:
    """The claim against the results of a stream, by the name of their row; None where a row is missing."""
    if not set(claim.weights) <= set(rows):
        return None
    figure = _FIGURES[claim.figure]
    known = {name: {result.experiment.seed: 100 * figure(result) for result in rows[name]} for name in claim.weights}
    common = sorted(set.intersection(*(set(seeds) for seeds in known.values())))
    values = [sum(weight * known[name][seed] for name, weight in claim.weights.items()) for seed in common]
    values = [value for value in values if math.isfinite(value)]
    return Judged(claim, values) if values else None


def share_left(trace: Trace) -> float:
    """The last of the largest eigenvalues, as a share of the highest; claim e: with cross-entropy it vanishes."""
    values = [record["eigenvalue"] for record in trace.records]
    return values[-1] / max(values)
