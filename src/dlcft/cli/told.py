"""What an update has to say, as lines on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlcft.cli.arguments import printable, say
from dlcft.pages import in_bytes

if TYPE_CHECKING:
    from dlcft.update.incoming import Incoming
    from dlcft.update.update import Update

_LINES = 12  # labels of the new batch that are told; the page and --json have all


def print_update(done: Update, model: Path) -> None:
    """Print what an update has learned and changed, and whether its version is current."""
    say_incoming(done.incoming)
    new = f"; new labels: {', '.join(map(printable, done.new_labels))}" if done.new_labels else ""
    say(f"learned {done.samples} samples in {done.seconds:.1f} s{new}")
    if done.predicted_increase is not None:
        share = "" if done.rise is None else f" ({done.rise:+.1%} of it)"
        say(f"old data's mean loss, by the memory alone: {done.predicted_increase:+.4g}{share}")
    _say_holdout(done)
    removed = f", removed {', '.join(map(str, done.disk.removed))}" if done.disk.removed else ""
    total = sum(row["bytes"] for row in done.disk.kept)
    kept = ", ".join(str(row["version"]) for row in done.disk.kept)
    say(f"disk: wrote {in_bytes(done.disk.written)}; versions kept {kept}{removed}; {in_bytes(total)} in all")
    for sentence in done.doubts:
        say(f"doubtful: {sentence}")
    if done.not_gated:
        few = ", ".join(map(printable, done.not_gated[:5])) + (", …" if len(done.not_gated) > 5 else "")
        say(f"too few held-out samples for a gate of their own: {few}")
    for sentence in done.gates:
        say(f"gate: {sentence}")
    state = "is current" if done.accepted else "is kept, but exceeds a gate: it is not current"
    say(f"{model}: version {done.version} {state}")


def say_incoming(rows: Sequence[Incoming]) -> None:
    """Tell how the version before answers new samples of known labels, the most doubtful labels first."""
    if not rows:
        return
    seen, same = sum(row.looked_at for row in rows), sum(row.same for row in rows)
    say(f"the new batch, before it is learned: {same} of {seen} samples of known labels are answered as labelled")
    for row in rows[:_LINES]:
        other = f", {row.as_other} as {printable(row.other)}" if row.other is not None else ""
        mark = "  <- doubtful" if row.doubtful else ""
        say(f"  {printable(row.label)}: {row.same} of {row.looked_at}{other}{mark}")
    if len(rows) > _LINES:
        say(f"  and {len(rows) - _LINES} more labels")


def say_evaluation(result: Mapping[str, float], labels: Mapping[str, tuple[int, int]], known: set[str]) -> None:
    """Tell how many samples of each label are answered right; see `Learner.evaluate`."""
    unknown = int(result["unknown"])
    also = f"; {unknown} samples, counted as errors, have labels that were never learned" if unknown else ""
    if unknown and math.isfinite(result["accuracy_known"]):
        also += f": {result['accuracy_known']:.2%} without these"
    say(f"accuracy {result['accuracy']:.2%}, mean loss {result['loss']:.4g}{also}")
    width = max(len(printable(label)) for label in labels)
    for label, (right, total) in labels.items():
        said = f"{right} of {total}, {right / total:.1%}" if label in known else f"never learned, {total} samples"
        say(f"  {printable(label):{width}}  {said}")


def _say_holdout(done: Update) -> None:
    if done.accuracy is None:
        return
    error = done.calibration_error
    calibration = "" if error is None else f"; calibration error {error:.3f} (same samples)"
    say(f"holdout accuracy {in_words(done)}{calibration}")
    for label, (right, total) in done.per_class.items():
        say(f"  {printable(label)}: {right} of {total}{' (not learned)' if label in done.not_learned else ''}")
    if done.flips is not None and done.drop is not None:
        points = f"{100 * (0.0 - done.drop):+.2f} points"
        say(f"labels known before: accuracy {points}, turned from right to wrong {done.flips:.2%}")


def in_words(done: Update) -> str:
    """The accuracy on held-out samples; where labels among them were never learned, also without these."""
    if not done.not_learned or done.accuracy_known is None:
        return f"{done.accuracy:.2%}"
    some = ", ".join(map(printable, done.not_learned[:3])) + (", …" if len(done.not_learned) > 3 else "")
    right = sum(hits for hits, _ in done.per_class.values())
    known = sum(total for label, (_, total) in done.per_class.items() if label not in done.not_learned)
    return (
        f"{done.accuracy_known:.2%} on labels that were learned ({right} of {known}), {done.accuracy:.2%} on all "
        f"(never learned: {some})"
    )
