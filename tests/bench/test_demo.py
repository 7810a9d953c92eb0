"""The demonstration: what it compares, and what a person sees; here with digits of 8 pixels."""

import re
from dataclasses import replace

import pytest

from dlcft.bench import demo as module
from dlcft.bench.choices import CHOICES
from dlcft.bench.demo import METHODS, demonstrate, experiments
from dlcft.bench.experiment import Result
from dlcft.cli import main

ASKED = {"none", "ewc", "osla", "lwf", "er", "ranpac", "dlcft", "dlcft-exact", "dlcft-paper", "none (joint)"}


@pytest.fixture
def tiny(monkeypatch):
    for name in ("TURNED", "NEW_CLASSES"):
        small = replace(getattr(module, name), tasks=2, size=8, classes=4, per_class=4)
        monkeypatch.setattr(module, name, small)
    monkeypatch.setattr(module, "FEATURES", 40)


def test_what_is_compared():
    planned = list(experiments(2, 0))
    for scenario in ("data-il", "class-il"):
        assert {e.title for e in planned if e.scenario == scenario} == set(METHODS) >= ASKED
    assert {e.turn for e in planned if e.scenario == "data-il"} == {40}, "a shift from task to task"
    assert all(e.settings["epochs"] == 2 for e in planned if "epochs" in e.settings)
    assert {e.method for e in planned if "epochs" not in e.settings} == {"ranpac", "dlcft-exact"}
    rates = {e.title: e.recipe.settings["lr"] for e in planned if "epochs" in e.settings}
    chosen = CHOICES["lr"].value["small"]  # on validation images, for each method
    plain = ("none", "ewc", "osla", "lwf", "er", "none (joint)")
    assert {rates[title] for title in plain} == {chosen["sgd"], chosen["lwf"]}
    assert rates["lwf"] == chosen["lwf"]
    assert rates["dlcft-paper"] == chosen["adam"]


def test_tables_a_chart_and_a_page(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    words = ["demo", "--epochs", "1", "--jobs", "1", "--out", str(tmp_path)]
    main(words)
    said = capsys.readouterr().out
    rows = re.findall(r"^│ (\S+(?: \(joint\))?) +│.*?│ +\d+% │ +[\d.]+% │ █* +│ +\d+ │$", said, re.M)
    assert rows == [*METHODS, *METHODS]
    page = said.partition("report: ")[2].strip()
    assert page == str((tmp_path / "report.html").resolve())
    assert all(method in (tmp_path / "report.html").read_text() for method in METHODS)
    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")}
    assert len(written) == 2 * len(METHODS)
    main(words)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")} == written, "computed once"


def test_the_report_on_the_terminal_is_the_same_table(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "METHODS", {"ranpac": "", "none": ""})
    results = demonstrate(tmp_path, epochs=1, seed=3, jobs=1, report=lambda line: None)
    assert [(r.experiment.scenario, r.experiment.method) for r in results] == [
        (scenario, method) for scenario in ("data-il", "class-il") for method in ("ranpac", "none")
    ]
    assert all(Result.read(tmp_path / r.experiment.file) == r for r in results)
    main(["report", "--runs", str(tmp_path), "--format", "md"])
    said = capsys.readouterr().out
    assert "| ranpac" in said.replace("`", "")
