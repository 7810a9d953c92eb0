"""Commands on the versions of a model: history, rollback, forget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlcft.cli.arguments import Backbone, Import, Json, Model, Weights, import_own, in_number, positive, say, warn
from dlcft.cli.opening import open_learner, open_store
from dlcft.cli.tracking import UNLOGGED, check_tracking, followed, told
from dlcft.pages import in_bytes

if TYPE_CHECKING:
    from dlcft.learner.records import Record
    from dlcft.store.store import Store

_LEFT = 5  # exit code when a file that may know forgotten samples could not be deleted


def history(*, model: Model, as_json: Json = False) -> None:
    """Show the tasks that a model has learned, and the versions that are kept.

    Example: dlcft history --model scenes
    """
    from dlcft.learner.state import check_header, read_history

    store = open_store(model)
    manifest, records = store.look(), read_history(store)
    for v in manifest.versions:
        check_header(v.header, model)
    kept: list[dict[str, Any]] = [
        {
            "version": v.number,
            "tasks": v.header["tasks"],
            "created": v.created,
            "bytes": v.bytes,
            "current": v.number == manifest.number,
            "accepted": v.accepted,
        }
        for v in manifest.versions
    ]
    if as_json:
        print(json.dumps({"tasks": [record.to_dict() for record in records], "versions": kept}))
        return
    for record in records:
        say(_told(record))
    for row in kept:
        said = " (current)" if row["current"] else "" if row["accepted"] else " (kept aside by a gate)"
        facts = f"{in_number(row['tasks'], 'task')}, {row['created']}, {in_bytes(row['bytes'])}"
        say(f"version {row['version']}{said}: {facts}")


def rollback(*, model: Model, version: int | None = None, mlflow: str | None = None) -> None:
    """Go back to the version before, or to any that is kept.

    Exit code 6 says that this was done, but MLflow could not be told.

    Example: dlcft rollback --model scenes

    Args:
        version: Which; by default the one that the current version was learned from.
        mlflow: The address of an MLflow server or database, to move the alias champion there; needs the extra
            dlcft[mlflow].
    """
    if mlflow is not None:
        check_tracking(mlflow)
    store = open_store(model)
    say(f"version {store.rollback(version)} is current.")
    if mlflow is not None:
        registered = followed(store, mlflow)
        if registered is None:
            raise SystemExit(UNLOGGED)
        say(told(registered))


def forget(
    *,
    model: Model,
    data: Path | None = None,
    weight: float | None = None,
    keep: int = 2,
    backbone: Backbone = None,
    weights: Weights = None,
    import_: Import = None,
) -> None:
    """Forget samples as if they had never been learned: exact, for closed-form methods.

    Exit code 5 says that an old version could not be deleted.

    Example: dlcft forget --model scenes --data complaints/

    Args:
        data: The same images with the same labels as when they were learned. Without it, only versions are removed.
        weight: The weight of each of them, if they are a part of the sample that came with an adopted classifier.
        keep: How many versions stay on disk. Older versions may still know the samples: use 1 to have them gone.
    """
    positive("--keep", keep)
    if data is None:
        store = open_store(model)
        gone = ", ".join(map(str, store.prune(keep)))
        say(f"removed {f'version {gone}' if gone else 'nothing'}; version {store.look().number} is current.")
        _check_deleted(store)
        return
    import_own(import_ or ())
    store = open_store(model)
    learner = open_learner(store, backbone=backbone, weights=weights)
    samples = learner.samples(data)
    learner.forget(samples, weight=weight)
    still = learner.learned_before(samples)
    version = learner.save(keep=keep)
    older = ", ".join(str(kept.number) for kept in store.look().versions if kept.number != version)
    only = f"dlcft forget --model {model} --keep 1"
    also = f" The kept version {older} may still know them; {only} leaves the current one alone." if older else ""
    twice = "" if still is None else f" They were learned more than once, and count as of task {still + 1} still."
    say(f"forgot {len(samples)} samples; version {version} is current.{twice}{also}")
    _check_deleted(store)


def _check_deleted(store: Store) -> None:
    """End with an exit code of its own where a file that may know forgotten samples could not be deleted."""
    if left := store.leftovers():
        warn(f"{', '.join(left)} in {store.directory} could not be deleted, and may still know forgotten samples.")
        raise SystemExit(_LEFT)


def _told(record: Record) -> str:
    """One line on a record."""
    from dlcft.learner.records import Adopted, Forgotten

    if isinstance(record, Forgotten):
        return f"forgot {record.samples} samples"
    if isinstance(record, Adopted):
        return f"task 1: a classifier of {record.labels} labels, adopted with {record.samples} samples"
    accuracy, increase = record.notes.get("accuracy"), record.predicted_increase
    said = "" if accuracy is None else f", {accuracy:.2%} on the holdout of then"
    said += "" if increase is None else f", old loss {increase:+.4g} by the memory"
    return f"task {record.task + 1}: {record.samples} samples{said}"
