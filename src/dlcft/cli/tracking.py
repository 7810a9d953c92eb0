"""What commands tell MLflow, after their work is committed: a failure is one sentence and an exit code of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlcft.cli.arguments import warn

if TYPE_CHECKING:
    from dlcft.integrations.mlflow import Registered
    from dlcft.learner.learner import Learner
    from dlcft.store.store import Store
    from dlcft.update.update import Update

UNLOGGED = 6  # exit code when all was done, but MLflow could not be told
Tracking = tuple[str, dict[str, Any]]  # the address, and the limits of the gates


def check_tracking(uri: str) -> None:
    """Refuse, before anything is done, what is no address, and a missing package."""
    from dlcft.integrations.mlflow import check_address

    check_address(uri)


def tracked(learner: Learner, done: Update, page: str | None, uri: str, limits: dict[str, Any]) -> Registered | None:
    """Log an update; None, with a warning, where that fails."""
    from dlcft.integrations.mlflow import log_update

    store = learner.store
    assert store is not None
    origin = {"backbone": learner.notes["backbone"]["name"], "method": learner.notes.get("method")}
    settings = {**learner.recipe.settings, **origin, **limits}
    state = f"version {done.version} of {store.directory} {'is current' if done.accepted else 'is kept'}"
    later = _later(store, done.version) if done.accepted else ""
    return _attempt(lambda: log_update(uri, store, done, settings=settings, page=page), state, later, uri)


def followed(store: Store, uri: str) -> Registered | None:
    """Move the champion to the current version; None, with a warning, where that fails."""
    from dlcft.integrations.mlflow import follow

    return _attempt(lambda: follow(uri, store), "this was done", _later(store, store.look().number), uri)


def _later(store: Store, version: int) -> str:
    return f"; dlcft rollback --model {store.directory} --version {version} --mlflow … does it later"


def told(registered: Registered) -> str:
    """One line on a registered version."""
    return f"mlflow: {registered.name} version {registered.version} is {' and '.join(registered.aliases)}"


def _attempt(work: Callable[[], Registered], state: str, later: str, uri: str) -> Registered | None:
    from dlcft.data.decoding import first_line
    from dlcft.integrations.mlflow import without_password

    try:
        return work()
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{state}, but MLflow was not told{later}") from error
    except Exception as error:  # of a server, a database, a plug-in: none may make the update look failed
        sentence = f"{state}, but MLflow at {uri} could not be told ({first_line(error)}){later}."
        warn(without_password(sentence, uri))
        return None
