"""The page of one update: what it learned, what it cost the old, and whether it is live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dlcft.pages import in_bytes, in_seconds, render
from dlcft.pages.drawing import INK, LEVEL, PALETTE, bars, drawing, plot_axes, to_svg
from dlcft.update.update import Update

NOW, BEFORE, BETTER, WORSE = PALETTE[0], LEVEL, PALETTE[2], PALETTE[7]
_SHOWN = 24  # labels in the figure, and turned answers in the table; the rest is folded away


def to_html(done: Update, *, model: str, origin: Sequence[tuple[str, str]] = ()) -> str:
    """A self-contained page of an update.

    Args:
        done: what it did.
        model: the name of the model.
        origin: names and values of what stands behind it, such as the backbone.
    """
    labels = _labels(done)
    return render(
        "update/update.html.jinja",
        title=f"{model}: version {done.version}",
        done=done,
        origin=origin,
        tiles=_tiles(done),
        labels=labels,
        worst=labels[:_SHOWN],
        shown=_SHOWN,
        tested=bool(done.per_class),
        accuracy=_accuracy(labels[:_SHOWN]) if done.per_class else None,
        turned=_turned(done) if done.flips is not None else None,
        rises=_rises(done.tasks),
        accuracies=_accuracies(done.tasks),
        calibration=_calibration(done) if done.calibration else None,
        disk=_disk(done),
        colours={"now": NOW, "before": BEFORE, "better": BETTER, "worse": WORSE},
    )


def _tiles(done: Update) -> list[tuple[str, str, str]]:
    """The facts that come first: what, how much, and a word on it."""
    new = f"{len(done.new_labels)} new label{'s' if len(done.new_labels) != 1 else ''}"
    tiles = [("learned", f"{done.samples:,}", f"samples of {len(done.learned)} labels, {new}")]
    if done.accuracy is not None:
        tiles.append(("accuracy", f"{done.accuracy:.1%}", "on all held-out samples"))
    if done.drop is not None and done.accuracy_before is not None:
        now = done.accuracy_before - done.drop
        words = f"on held-out samples of labels known before: {done.accuracy_before:.1%}, now {now:.1%}"
        tiles.append(("change", f"{100 * (0.0 - done.drop):+.1f} points", words))
        tiles.append(("turned wrong", f"{done.flips:.1%}", f"of these: {len(done.flipped)} answers were right before"))
    if done.predicted_increase is not None:
        words = "of the old data's mean loss, by the memory alone"
        tiles.append(("predicted rise", f"{done.predicted_increase:+.3g}", words))
    if done.calibration_error is not None:
        tiles.append(("calibration error", f"{done.calibration_error:.3f}", "on the samples that it was fitted on"))
    tiles.append(("time", in_seconds(done.seconds), "to learn"))
    tiles.append(("on disk", in_bytes(done.disk.written), f"written; {in_bytes(_total(done))} in all"))
    return tiles


def _labels(done: Update) -> list[dict[str, Any]]:
    """Every label that was learned or tested: those that lost most, the least accurate, and last what is not known."""
    new, lost = {str(label) for label in done.new_labels}, Counter(flip.label for flip in done.flipped)
    rows: list[dict[str, Any]] = []
    for name in sorted({*done.learned, *done.per_class}):
        right, total = done.per_class.get(name, (0, 0))
        before = done.per_class_before.get(name)
        rows.append(
            {
                "name": name,
                "new": name in new,
                "unknown": name not in done.learned and name not in done.per_class_before,
                "learned": done.learned.get(name, 0),
                "total": total,
                "right": right,
                "before": before,
                "flips": lost[name] if before is not None else None,
            }
        )
    tested = [row for row in rows if row["total"]]
    change = {row["name"]: (row["right"] - (row["before"] or row["right"])) / row["total"] for row in tested}
    tested.sort(key=lambda row: (row["unknown"], change[row["name"]], row["right"] / row["total"], row["name"]))
    return tested + [row for row in rows if not row["total"]]


def _accuracy(rows: Sequence[dict[str, Any]]) -> str:
    rows = [row for row in rows if row["total"]]
    names = [row["name"] if len(row["name"]) < 29 else f"{row['name'][:27]}…" for row in rows]
    with drawing():
        height = 0.6 + 0.27 * len(rows)
        left = min(0.05 + 0.0165 * max(map(len, names)), 0.5)
        figure, axes = plot_axes(4.6, height, left=left, right=0.8, bottom=0.46 / height)
        for place, row in enumerate(rows):
            now = 100 * row["right"] / row["total"]
            axes.barh(place, now, color=NOW, height=0.62)
            if row["before"] is not None:
                before = 100 * row["before"] / row["total"]
                axes.plot([before, before], [place - 0.42, place + 0.42], color=INK, linewidth=2)
            words = "not known" if row["unknown"] else f"{row['right']} of {row['total']}{', new' * row['new']}"
            axes.annotate(words, (1.02, place), xycoords=("axes fraction", "data"), va="center")
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 100)
        axes.set_xlabel("right answers, %")
        axes.tick_params(axis="y", length=0)
        said = "; ".join(f"{row['name']} {row['right']} of {row['total']}" for row in rows)
        return to_svg(figure, "accuracy", f"Right answers for each label: {said}")


def _turned(done: Update) -> str:
    """What became of the answers to held-out samples whose labels were known before."""
    lost = len(done.flipped)
    before = sum(done.per_class_before.values())
    right, total = (sum(done.per_class[name][part] for name in done.per_class_before) for part in (0, 1))
    gained = right - before + lost
    counts = {
        "right, as before": before - lost,
        "turned right": gained,
        "turned wrong": lost,
        "wrong, as before": total - before - gained,
    }
    colours = (NOW, BETTER, WORSE, BEFORE)
    said = ", ".join(f"{name} {count}" for name, count in counts.items())
    with drawing():
        figure, axes = plot_axes(4.6, 1.75, left=0.27, right=0.88, bottom=0.27)
        axes.barh(range(4), list(counts.values()), color=colours, height=0.66)
        for place, count in enumerate(counts.values()):
            axes.annotate(str(count), (count, place), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(4), list(counts))
        axes.set_ylim(3.6, -0.6)
        axes.set_xlabel("held-out samples")
        axes.tick_params(axis="y", length=0)
        axes.locator_params(axis="x", nbins=5, integer=True)
        return to_svg(figure, "turned", f"Answers before and now: {said}")


def _rises(tasks: Sequence[dict[str, Any]]) -> str | None:
    """The predicted rise at each update so far; None where none is known."""
    known = [(number, task["predicted_increase"]) for number, task in enumerate(tasks, 1)]
    return _over_updates(known, len(tasks), "rises", "predicted rise of the old loss", "Predicted rise of the old loss")


def _accuracies(tasks: Sequence[dict[str, Any]]) -> str | None:
    """Accuracy at each update so far on what was held out then; None where only one is known."""
    known = [
        (number, None if task["accuracy"] is None else 100 * task["accuracy"]) for number, task in enumerate(tasks, 1)
    ]
    if sum(value is not None for _, value in known) < 2:
        return None
    return _over_updates(known, len(tasks), "accuracies", "accuracy, %", "Accuracy on what was held out")


def _over_updates(
    known: Sequence[tuple[int, float | None]], last: int, identity: str, axis: str, label: str
) -> str | None:
    points = [(number, value) for number, value in known if value is not None]
    if not points:
        return None
    with drawing():
        from matplotlib.ticker import MaxNLocator

        figure, axes = plot_axes(4.6, 2.5, left=0.15, bottom=0.19)
        numbers, values = [number for number, _ in points], [value for _, value in points]
        axes.plot(numbers, values, "o-", color=NOW, linewidth=1.6, markersize=5)
        if identity == "rises":
            axes.axhline(0, color=INK, linewidth=0.7, alpha=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        axes.set_xlim(0.7, last + 0.3)
        if identity == "accuracies":
            axes.set_ylim(0, 103)
        axes.margins(y=0.15)
        axes.set_xlabel("update")
        axes.set_ylabel(axis)
        axes.grid(axis="y", color="#808080", alpha=0.25, linewidth=0.6)
        said = "; ".join(f"update {number}: {value:.3g}" for number, value in points)
        return to_svg(figure, identity, f"{label} over updates: {said}")


def _calibration(done: Update) -> str:
    total = sum(count for _, _, count in done.calibration)
    with drawing():
        figure, axes = plot_axes(4.6, 2.9, left=0.15, bottom=0.17)
        axes.plot([0, 100], [0, 100], color=INK, linewidth=0.8, alpha=0.5)
        for confidence, accuracy, count in done.calibration:
            size = 12 + 200 * count / total
            axes.scatter([100 * confidence], [100 * accuracy], s=size, color=NOW, alpha=0.75, linewidth=0)
        axes.set(xlim=(0, 103), ylim=(-4, 104))
        axes.set_xlabel("probability given, %")
        axes.set_ylabel("right answers, %")
        axes.grid(color="#808080", alpha=0.25, linewidth=0.6)
        label = f"Probability given against share of right answers; calibration error {done.calibration_error:.3f}"
        return to_svg(figure, "calibration", label)


def _disk(done: Update) -> str:
    kept = done.disk.kept
    names = [f"version {row['version']}{', current' if row['current'] else ''}" for row in kept]
    sizes = [row["bytes"] / 1e6 for row in kept]
    said = ", ".join(f"{name} {in_bytes(row['bytes'])}" for name, row in zip(names, kept, strict=True))
    parts = [(sizes, PALETTE[6])]
    return bars(names, parts, lambda size: in_bytes(1e6 * size), "disk", axis="MB", label=f"Versions kept: {said}")


def _total(done: Update) -> int:
    return sum(row["bytes"] for row in done.disk.kept)
