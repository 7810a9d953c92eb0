"""The page of one update: the new samples, the effect on the old ones, and whether the version is current."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dlcft.pages import in_bytes, in_seconds, render
from dlcft.pages.drawing import INK, LEVEL, PALETTE, bar_axes, bars, drawing, plot_axes, to_svg
from dlcft.update.incoming import Incoming
from dlcft.update.update import Update

NOW, BEFORE, BETTER, WORSE = PALETTE[0], LEVEL, PALETTE[2], PALETTE[7]
_SHOWN = 24  # labels in the figure, and rows of a table that is open at first


def to_html(done: Update, *, model: str, origin: Sequence[tuple[str, str]] = ()) -> str:
    """A self-contained page of an update.

    Args:
        done: the outcome of the update.
        model: the name of the model.
        origin: further facts, each a name and a value, such as the backbone.
    """
    labels = _labels(done)
    rises = [task["predicted_increase"] for task in done.tasks]
    accuracies = [None if task["accuracy"] is None else 100 * task["accuracy"] for task in done.tasks]
    return render(
        "update/update.html.jinja",
        title=f"{model}: version {done.version}",
        done=done,
        origin=origin,
        tiles=_tiles(done),
        labels=labels,
        shown=_SHOWN,
        tested=bool(done.per_class),
        accuracy=_accuracy(labels[:_SHOWN]) if done.per_class else None,
        incoming=_incoming(done.incoming[:_SHOWN]) if done.incoming else None,
        turned=_turned(done) if done.flips is not None else None,
        rises=_over_updates(rises, 1, "rises", "Predicted rise of the old loss"),
        accuracies=_over_updates(accuracies, 2, "accuracies", "Accuracy, %"),
        calibration=_calibration(done) if done.calibration else None,
        disk=_disk(done),
        colours={"now": NOW, "better": BETTER, "worse": WORSE, "before": BEFORE},
    )


def _tiles(done: Update) -> list[tuple[str, str, str]]:
    """The facts at the top of the page: a name, a value and a remark each."""
    new = f"{len(done.new_labels)} new label{'s' if len(done.new_labels) != 1 else ''}"
    tiles = [("learned", f"{done.samples:,}", f"samples of {len(done.learned)} labels, {new}")]
    if done.accuracy is not None:
        if done.not_learned and done.accuracy_known is not None:
            right = sum(hits for hits, _ in done.per_class.values())
            known = sum(total for name, (_, total) in done.per_class.items() if name not in done.not_learned)
            words = f"on held-out samples of labels that were learned: {right} of {known}"
            tiles.append(("accuracy", f"{done.accuracy_known:.1%}", words))
            words = f"labels that were not learned yet count as errors: {len(done.not_learned)}"
            tiles.append(("on all held-out", f"{done.accuracy:.1%}", words))
        else:
            tiles.append(("accuracy", f"{done.accuracy:.1%}", "on all held-out samples"))
    if done.drop is not None and done.accuracy_before is not None:
        now = done.accuracy_before - done.drop
        words = f"on held-out samples of labels known before: {done.accuracy_before:.1%}, now {now:.1%}"
        tiles.append(("change", f"{100 * (0.0 - done.drop):+.1f} points", words))
        tiles.append(("turned wrong", f"{done.flips:.1%}", f"of these: {len(done.flipped)} answers were right before"))
    if done.predicted_increase is not None:
        words, rise = "of the old data's mean loss, by the memory alone", f"{done.predicted_increase:+.3g}"
        if done.rise is not None:
            words, rise = f"{words}: {rise}", f"{done.rise:+.1%}"
        tiles.append(("predicted rise", rise, words))
    if done.calibration_error is not None:
        tiles.append(("calibration error", f"{done.calibration_error:.3f}", "on the samples that it was fitted on"))
    tiles.append(("time", in_seconds(done.seconds), "to learn"))
    total = sum(row["bytes"] for row in done.disk.kept)
    tiles.append(("on disk", in_bytes(done.disk.written), f"written; {in_bytes(total)} in all"))
    return tiles


def _labels(done: Update) -> list[dict[str, Any]]:
    """Every label that was learned or tested: those that lost most, then the least accurate; unknown ones last."""
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
    with drawing():
        figure, axes = bar_axes([row["name"] for row in rows], right=0.8)
        for place, row in enumerate(rows):
            now = 100 * row["right"] / row["total"]
            axes.barh(place, now, color=NOW, height=0.62)
            if row["before"] is not None:
                before = 100 * row["before"] / row["total"]
                axes.plot([before, before], [place - 0.42, place + 0.42], color=INK, linewidth=2)
            words = "not known" if row["unknown"] else f"{row['right']} of {row['total']}{', new' * row['new']}"
            axes.annotate(words, (1.02, place), xycoords=("axes fraction", "data"), va="center")
        axes.set(xlim=(0, 100), xlabel="right answers, %")
        said = "; ".join(f"{row['name']} {row['right']} of {row['total']}" for row in rows)
        return to_svg(figure, "accuracy", f"Right answers for each label: {said}")


def _incoming(rows: Sequence[Incoming]) -> str:
    """The answers of the version before to the new samples of each label: as labelled, as one other label, others."""
    names = [row.label for row in rows]
    own = [100 * row.same / row.looked_at for row in rows]
    other = [100 * row.as_other / row.looked_at for row in rows]
    with drawing():
        figure, axes = bar_axes(names, right=0.95)
        places = range(len(names))
        axes.barh(places, own, color=NOW, height=0.66)
        axes.barh(places, other, left=own, color=WORSE, height=0.66)
        both = [a + b for a, b in zip(own, other, strict=True)]
        axes.barh(places, [100 - done for done in both], left=both, color=BEFORE, height=0.66)
        axes.set(xlim=(0, 100), xlabel="new samples, %")
        said = "; ".join(f"{row.label} {row.same} of {row.looked_at}" for row in rows)
        return to_svg(figure, "incoming", f"New samples answered as labelled, before they were learned: {said}")


def _turned(done: Update) -> str:
    """The answers before and now to held-out samples whose labels were known before."""
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
    parts = [(list(counts.values()), (NOW, BETTER, WORSE, BEFORE))]
    said = ", ".join(f"{name} {count}" for name, count in counts.items())
    label = f"Answers before and now: {said}"
    return bars(list(counts), parts, lambda count: f"{count:.0f}", "turned", axis="held-out samples", label=label)


def _over_updates(values: Sequence[float | None], least: int, identity: str, name: str) -> str | None:
    """A value of each update so far; None where fewer than `least` are known."""
    points = [(number, value) for number, value in enumerate(values, 1) if value is not None]
    if len(points) < least:
        return None
    with drawing():
        from matplotlib.ticker import MaxNLocator

        figure, axes = plot_axes(4.6, 2.5, left=0.15, bottom=0.19)
        axes.plot(
            [number for number, _ in points],
            [value for _, value in points],
            "o-",
            color=NOW,
            linewidth=1.6,
            markersize=5,
        )
        if identity == "rises":
            axes.axhline(0, color=INK, linewidth=0.7, alpha=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        if identity == "accuracies":
            axes.set_ylim(0, 103)
        axes.margins(y=0.15)
        axes.set(xlim=(0.7, len(values) + 0.3), xlabel="update", ylabel=name.lower())
        axes.grid(axis="y", color="#808080", alpha=0.25, linewidth=0.6)
        said = "; ".join(f"update {number}: {value:.3g}" for number, value in points)
        return to_svg(figure, identity, f"{name}, over updates: {said}")


def _calibration(done: Update) -> str:
    total = sum(count for _, _, count in done.calibration)
    with drawing():
        figure, axes = plot_axes(4.6, 2.9, left=0.15, bottom=0.17)
        axes.plot([0, 100], [0, 100], color=INK, linewidth=0.8, alpha=0.5)
        for confidence, accuracy, count in done.calibration:
            size = 12 + 200 * count / total
            axes.scatter([100 * confidence], [100 * accuracy], s=size, color=NOW, alpha=0.75, linewidth=0)
        axes.set(xlim=(0, 103), ylim=(-4, 104), xlabel="probability given, %", ylabel="right answers, %")
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
