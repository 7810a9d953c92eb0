"""`--mlflow`: what is logged, which version is the champion, and that no failure there costs an update."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import pytest

from dlcft.integrations.mlflow import check_address, without_password
from dlcft.store.manifest import Manifest
from dlcft.store.store import Store
from tests.support.commands import dlcft, dlcft_process
from tests.support.samples import pictures

SMALL = ["--set", "depth_features=30"]
NOWHERE = "http://me:secret@127.0.0.1:9"  # a port on which nobody listens


def test_a_wrong_address_is_told_before_anything_is_learned(tmp_path):
    pictures(tmp_path / "data", ["red", "green"])
    done = dlcft("update", "--model", "m", "--data", "data", "--mlflow", "mlruns", cwd=tmp_path)
    assert done.returncode == 2
    assert "the address of MLflow is 'mlruns'; http://… of a server" in done.stderr
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("command", [["update", "--data", "data"], ["rollback"]])
def test_a_missing_package_is_told_before_anything_is_done(tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    pictures(tmp_path / "data", ["red", "green"])
    done = dlcft(*command, "--model", "m", "--mlflow", NOWHERE, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install 'dlcft[mlflow]'" in done.stderr
    assert not (tmp_path / "m").exists()


def test_a_database_needs_the_whole_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=None))
    monkeypatch.setattr("dlcft.integrations.mlflow.find_spec", lambda _: None)
    check_address("https://mlflow.example.org")
    with pytest.raises(ImportError, match="pip install mlflow"):
        check_address("sqlite:///mlflow.db")


@pytest.fixture
def failing(monkeypatch):
    """MLflow that is there, and fails when it is told something."""

    def fail(*_, **__):
        raise failures.pop()

    failures = []
    monkeypatch.setattr("dlcft.integrations.mlflow.check_address", lambda _: None)
    monkeypatch.setattr("dlcft.integrations.mlflow.log_update", fail)
    monkeypatch.setattr("dlcft.integrations.mlflow.follow", fail)
    return failures


def test_a_failure_is_told_and_costs_no_update(months, failing):
    update = ["update", "--model", "scenes", "--holdout", "holdout", "--mlflow", "http://x", "--data"]
    failing.append(RuntimeError("no such luck\nat all"))
    done = dlcft(*update, "january", *SMALL)
    assert (done.returncode, Store("scenes").current.number) == (6, 1)
    assert "scenes: version 1 is current\n" in done.stdout
    later = "dlcft rollback --model scenes --version 1 --mlflow … does it later."
    sentence = "version 1 of scenes is current, but MLflow at http://x could not be told (no such luck); " + later
    assert done.stderr.endswith(f"dlcft: {sentence}\n")
    failing.append(OSError("no"))
    done = dlcft(*update, "wrong", "--max-flips", "0.1")
    assert (done.returncode, Store("scenes").current.number) == (3, 1)
    assert done.stderr == "dlcft: version 2 of scenes is kept, but MLflow at http://x could not be told (no).\n"
    failing.append(KeyboardInterrupt())
    done = dlcft(*update, "february")
    assert (done.returncode, Store("scenes").current.number) == (130, 3)
    assert done.stderr.startswith("dlcft: interrupted; version 3 of scenes is current, but MLflow was not told; dlcft")
    failing.append(OSError("no"))
    done = dlcft("rollback", "--model", "scenes", "--mlflow", "http://x")
    assert (done.returncode, done.stdout, Store("scenes").current.number) == (6, "version 1 is current.\n", 1)
    assert done.stderr.startswith("dlcft: this was done, but MLflow at http://x could not be told (no); dlcft rollback")


def test_passwords_are_not_printed():
    assert without_password(f"no answer of {NOWHERE}/api", NOWHERE) == "no answer of http://127.0.0.1:9/api"
    assert without_password("as it is", "sqlite:///x.db") == "as it is"


def test_a_manifest_of_one_version(tmp_path):
    pictures(tmp_path / "data", ["red", "green"])
    for again in ([*SMALL], ["--again"]):
        assert dlcft("update", "--model", "m", "--data", "data", *again, cwd=tmp_path).returncode == 0
    last = Store(tmp_path / "m").current
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "m" / last.file, tmp_path / "alone")
    Manifest.alone(last).write(tmp_path / "alone" / "manifest.json")
    assert dlcft("evaluate", "--model", "alone", "--data", "data", cwd=tmp_path).returncode == 0
    done = dlcft("rollback", "--model", "alone", cwd=tmp_path)
    assert "version 2 was learned from no version" in done.stderr
    assert dlcft("update", "--model", "alone", "--data", "data", "--again", cwd=tmp_path).returncode == 0


@pytest.fixture
def months(tmp_path, monkeypatch):
    """Two months, one whose labels are wrong, and samples to test on."""
    monkeypatch.chdir(tmp_path)  # where MLflow itself may make a database, when tests ask it
    pictures(tmp_path / "january", ["red", "green"])
    pictures(tmp_path / "february", ["red", "blue"], seed=2)
    pictures(tmp_path / "wrong", ["green"], seed=3, count=40)
    (tmp_path / "wrong" / "green").rename(tmp_path / "wrong" / "red")
    pictures(tmp_path / "holdout", ["red", "green"], seed=5)
    return tmp_path


@pytest.fixture
def server(tmp_path):
    """The address of MLflow's own server on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    where = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination",
        tmp_path / "artifacts",
    ]
    command = [sys.executable, "-m", "mlflow", "server", *where, "--port", str(port), "--workers", "1"]
    with open(tmp_path / "server.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=tmp_path)
    try:
        for _ in range(240):
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.fixture(params=["sqlite", "file", "server"])
def address(request, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs the extra integrations")
    if request.param == "server":
        return request.getfixturevalue("server")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow asks for this consent
    return {"sqlite": f"sqlite:///{tmp_path}/mlflow.db", "file": f"file:{tmp_path}/files"}[request.param]


def registered(address):
    """The number in the registry of each alias."""
    from mlflow import MlflowClient

    client = MlflowClient(address, address)
    return {
        alias: int(client.get_model_version_by_alias("scenes", alias).version) for alias in ("candidate", "champion")
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_year_of_a_model(months, address):
    from mlflow import MlflowClient

    def update(data, *more):
        where = ["--model", "scenes", "--data", data, "--holdout", "holdout", "--mlflow", address]
        return dlcft("update", *where, *more, cwd=months)

    done = update("january", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "mlflow: scenes version 1 is candidate and champion" in done.stdout
    assert registered(address) == {"candidate": 1, "champion": 1}
    done = update("wrong", "--max-flips", "0.1")
    assert done.returncode == 3, done.stderr
    assert "mlflow: scenes version 2 is candidate\n" in done.stdout
    assert registered(address) == {"candidate": 2, "champion": 1}
    done = update("february", "--max-flips", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["mlflow"] == {"name": "scenes", "version": "3", "aliases": ["candidate", "champion"]}
    assert registered(address) == {"candidate": 3, "champion": 3}
    _check_run(months, address, told)
    done = dlcft("rollback", "--model", "scenes", "--mlflow", address, cwd=months)
    assert (done.returncode, done.stdout) == (0, "version 1 is current.\nmlflow: scenes version 1 is champion\n")
    assert registered(address) == {"candidate": 3, "champion": 1}
    # one that was not logged is registered then
    assert dlcft("update", "--model", "scenes", "--data", "january", "--again", cwd=months).returncode == 0
    done = dlcft("rollback", "--model", "scenes", "--version", "4", "--mlflow", address, cwd=months)
    assert "mlflow: scenes version 4 is candidate and champion" in done.stdout, done.stderr
    assert registered(address) == {"candidate": 4, "champion": 4}
    client = MlflowClient(address, address)
    runs = client.search_runs([client.get_experiment_by_name("scenes").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] * 4


def _check_run(months, address, told):
    """The numbers, the page, and a model that works wherever it is downloaded."""
    from mlflow import MlflowClient
    from mlflow.artifacts import download_artifacts

    client = MlflowClient(address, address)
    version = client.get_model_version_by_alias("scenes", "champion")
    run = client.get_run(version.run_id)
    assert run.info.run_name == "version 3"
    assert run.data.metrics["accuracy"] == told["accuracy"]
    assert run.data.metrics["predicted_increase"] == pytest.approx(told["predicted_increase"])
    assert run.data.params["backbone"] == "shipped"
    assert run.data.params["max_flips"] == "0.5"
    assert run.data.tags["dlcft.accepted"] == "true"
    rejected = client.get_run(client.get_model_version("scenes", "2").run_id)
    assert "turned from right to wrong" in rejected.data.tags["dlcft.gates"]
    place = download_artifacts(run_id=run.info.run_id, tracking_uri=address, dst_path=str(months / "downloaded"))
    files = sorted(os.path.relpath(os.path.join(d, f), place) for d, _, names in os.walk(place) for f in names)
    assert files == ["model/manifest.json", "model/version-3.safetensors", "update.html", "update.json"]
    assert (months / "downloaded" / "update.html").read_text() == (months / told["page"]).read_text()
    assert json.loads((months / "downloaded" / "update.json").read_text())["samples"] == told["samples"]
    source = download_artifacts(version.source, tracking_uri=address, dst_path=str(months / "again"))
    answers = [dlcft("predict", months / "holdout", "--model", m).stdout for m in (months / "scenes", source)]
    assert answers[0] == answers[1] != ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_server_that_is_down_costs_no_update(months):
    pytest.importorskip("mlflow", reason="needs the extra integrations")
    began = time.monotonic()
    first = ["update", "--model", "scenes", "--data", "january", "--mlflow", NOWHERE, *SMALL, "--json"]
    done = dlcft_process(*first, cwd=months)
    assert done.returncode == 6
    assert json.loads(done.stdout)["mlflow"] is None
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith(
        "dlcft: version 1 of scenes is current, but MLflow at http://127.0.0.1:9 could not be told"
    )
    assert sentence.endswith("; dlcft rollback --model scenes --version 1 --mlflow … does it later.")
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 100  # MLflow alone would try for minutes
    assert Store(months / "scenes").current.number == 1
    assert (months / "scenes-updates" / "version-1.html").exists()
    done = dlcft_process("rollback", "--model", "scenes", "--version", "1", "--mlflow", NOWHERE, cwd=months)
    assert (done.returncode, done.stdout) == (6, "version 1 is current.\n")
    database = f"sqlite:///{months}/mlflow.db"
    done = dlcft_process("rollback", "--model", "scenes", "--version", "1", "--mlflow", database, cwd=months)
    assert (done.returncode, done.stderr) == (0, "")
    assert registered(database) == {"candidate": 1, "champion": 1}
