"""MLflow: each update is a run, its version is registered, and the alias `champion` is on the one that is current.

What is logged as the model is a model directory with one version, safetensors and JSON: nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from dlcft.learner.records import Learned
from dlcft.learner.state import read_history
from dlcft.store.manifest import Manifest, Version
from dlcft.store.store import Store
from dlcft.update.update import Update

CHAMPION, CANDIDATE = "champion", "candidate"
_ON_HOLDOUT = ("accuracy", "accuracy_before", "drop", "flips", "calibration_error")
_METRICS = ("samples", "predicted_increase", "rise", "doubtful", *_ON_HOLDOUT)
_NUMBER, _HASH = "dlcft.version", "dlcft.sha256"  # tags of a registered version, by which it is found again
_DATABASE = "sqlite|postgresql|mysql|mssql"
_QUIET = ("mlflow", "alembic")
_LONGEST = 5000  # characters of a tag or parameter


@dataclass(frozen=True)
class Registered:
    """A version in MLflow's registry.

    Attributes:
        name: of the registered model.
        version: its number there, which is not the one in the model directory.
        aliases: that were put on it.
    """

    name: str
    version: str
    aliases: list[str]


@dataclass(frozen=True)
class _Facts:
    """What is logged of a version beside its files: numbers, settings, tags, and texts by file name."""

    metrics: Mapping[str, float | None]
    step: int
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


def check_address(uri: str) -> None:
    """Refuse, before anything is learned, what is no address, and a missing package.

    Raises:
        ValueError: says what is needed.
        ImportError: names the extra to install.
    """
    if not re.match(r"[a-z0-9+-]+:/|databricks", uri):
        accepted = "http://… of a server, or a database such as sqlite:///mlflow.db"
        raise ValueError(f"the address of MLflow is {uri!r}; {accepted} is needed.")
    try:
        _client_class()
    except ImportError as error:
        raise ImportError("--mlflow needs the package mlflow-skinny: pip install 'dlcft[mlflow]'.") from error
    if re.match(_DATABASE, uri) and find_spec("sqlalchemy") is None:
        raise ImportError("--mlflow with a database needs the whole package: pip install mlflow.")


def without_password(text: str, uri: str) -> str:
    """A sentence in which the name and password of an address are left out."""
    user, at, _ = urlsplit(uri).netloc.rpartition("@")
    return text.replace(user + at, "") if at else text


def log_update(
    uri: str, store: Store, done: Update, *, settings: Mapping[str, Any] | None = None, page: str | None = None
) -> Registered:
    """Log an update as a run and register its version, under the name of the model's directory.

    The version becomes the `candidate`, and the `champion` too if the gates have let it pass.

    Args:
        uri: the address of a tracking server or database.
        store: of the model.
        done: the update.
        settings: of the update and of the method, for the run's parameters.
        page: the file of the update's page.

    Raises:
        Exception: whatever MLflow raises; the update itself is safe by then.
    """
    entry = _entry(store, done.version)
    metrics = {key: getattr(done, key) for key in _METRICS} | {"seconds": done.seconds, "bytes": entry.bytes}
    tags = {"dlcft.accepted": str(done.accepted).lower(), "dlcft.gates": " ".join(done.gates)[:_LONGEST]}
    texts = {"update.json": json.dumps(asdict(done), indent=1)}
    if page is not None:
        texts["update.html"] = Path(page).read_text(encoding="utf-8")
    facts = _Facts(metrics, len(done.tasks), settings or {}, tags, texts)
    client = _client(uri)
    version = _register(client, store, entry, facts)
    return _with_aliases(client, store, version, [CANDIDATE, *([CHAMPION] if done.accepted else [])])


def follow(uri: str, store: Store) -> Registered:
    """Put `champion` on the version that is current in the directory; it is registered first if it never was.

    Raises:
        Exception: whatever MLflow raises.
    """
    client, manifest, aliases = _client(uri), store.look(), [CHAMPION]
    entry = _entry(store, manifest.number)
    version = _found(client, store, entry)
    if version is None:
        learned = [record.to_dict() for record in read_history(store) if isinstance(record, Learned)]
        metrics = {key: learned[-1].get(key) for key in _METRICS} if learned else {}
        version = _register(client, store, entry, _Facts(metrics, len(learned)))
        if entry.number == manifest.last:
            aliases = [CANDIDATE, CHAMPION]
    return _with_aliases(client, store, version, aliases)


def _client_class() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing goes anywhere but to the address
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # where --json prints
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a server that is down is told within seconds
    from mlflow import MlflowClient

    return MlflowClient


def _client(uri: str) -> Any:
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    return _client_class()(tracking_uri=uri, registry_uri=uri)


def _name(store: Store) -> str:
    """The name of the model's directory, in characters that MLflow takes."""
    return re.sub(r"[^\w.-]", "_", store.directory.resolve().name)


def _entry(store: Store, number: int) -> Version:
    entry = store.look().find(number)
    if entry is None:
        raise ValueError(f"version {number} is not kept in {store.directory} any more.")
    return entry


def _with_aliases(client: Any, store: Store, version: str, aliases: list[str]) -> Registered:
    for alias in aliases:
        client.set_registered_model_alias(_name(store), alias, version)
    return Registered(_name(store), version, aliases)


def _found(client: Any, store: Store, entry: Version) -> str | None:
    """The number in the registry of a version, if it is there."""
    token = None
    while True:
        page = client.search_model_versions(f"name='{_name(store)}'", page_token=token)
        for one in page:
            if (one.tags.get(_NUMBER), one.tags.get(_HASH)) == (str(entry.number), entry.sha256):
                return str(one.version)
        token = page.token
        if not token:
            return None


def _register(client: Any, store: Store, entry: Version, facts: _Facts) -> str:
    """Log a version as a run, and register it; gives its number in the registry."""
    from mlflow.entities import Metric, Param

    name, now = _name(store), int(time.time() * 1000)
    tags = {_NUMBER: str(entry.number), _HASH: entry.sha256, **facts.tags}
    run = client.create_run(_experiment(client, name), run_name=f"version {entry.number}", tags=tags).info
    logged = False
    try:
        known = {key: float(value) for key, value in facts.metrics.items() if value is not None}
        metrics = [Metric(key, value, now, facts.step) for key, value in known.items()]
        params = [Param(key, str(value)[:_LONGEST]) for key, value in facts.params.items()]
        client.log_batch(run.run_id, metrics=metrics, params=params)
        for file, text in facts.texts.items():
            client.log_text(run.run_id, text, file)
        with TemporaryDirectory() as folder:
            manifest = Path(folder) / "manifest.json"
            Manifest.alone(entry).write(manifest)
            client.log_artifact(run.run_id, str(store.directory / entry.file), "model")
            client.log_artifact(run.run_id, str(manifest), "model")
        logged = True
    finally:
        if not logged:  # whatever the reason, an interruption among them
            with suppress(Exception):  # the first error is the one to tell
                client.set_terminated(run.run_id, "FAILED")
    client.set_terminated(run.run_id)
    _create_model(client, name)
    return str(client.create_model_version(name, f"{run.artifact_uri}/model", run_id=run.run_id, tags=tags).version)


def _experiment(client: Any, name: str) -> str:
    known = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if known is None else known.experiment_id)


def _create_model(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
