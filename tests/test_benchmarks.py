"""How benchmarks measure, and that the tables in the documents are those that they have kept."""

import json
import shutil
import sys

import pytest
import torch

from tests.support.documents import ROOT

KEPT = sorted((ROOT / "results" / "benchmarks").glob("*.json"))
CHANGED = "1.23 (1.22–1.24)"


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import measure

    return measure


@pytest.fixture
def tables(measure):
    import tables

    return tables


def status(tables, monkeypatch, *options):
    """With which status `python benchmarks/tables.py` ends."""
    monkeypatch.setattr(sys, "argv", ["tables.py", *options])
    with pytest.raises(SystemExit) as ended:
        tables.main()
    return ended.value.code


# Documents


def test_documents_show_the_kept_tables(tables, monkeypatch, capsys):
    code = status(tables, monkeypatch, "--check")
    assert code == 0, f"run python benchmarks/tables.py: {capsys.readouterr().out}"


def test_places_are_found(tables):
    """None is misspelled, and no table inside one was kept under another name."""
    for document in tables.documents():
        text = document.read_text()
        assert len(tables.PLACE.findall(text)) == text.count("<!-- benchmark "), document.name
    assert "<!-- benchmark " in (ROOT / "docs" / "cost.md").read_text()


@pytest.fixture
def copied(tables, monkeypatch, tmp_path):
    """A small project: a document, and what a benchmark has kept."""
    kept = tmp_path / "results" / "benchmarks"
    kept.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("No tables.\n")
    shutil.copy(ROOT / "docs" / "cost.md", tmp_path / "docs")
    for file in KEPT:
        shutil.copy(file, kept)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "KEPT", kept)
    return tmp_path / "docs" / "cost.md"


def test_a_table_changed_by_hand_is_found_and_made_again(tables, copied, monkeypatch, capsys):
    right = copied.read_text()
    assert status(tables, monkeypatch, "--check") == 0
    cell = json.loads((tables.KEPT / "linearize.json").read_text())["tables"]["step"]["rows"][0][1]
    wrong = right.replace(f"| {cell} |", f"| {CHANGED} |", 1)
    assert wrong != right
    copied.write_text(wrong)
    assert status(tables, monkeypatch, "--check") == 1
    assert "docs/cost.md differs" in capsys.readouterr().out
    assert copied.read_text() == wrong, "--check changes nothing"
    assert status(tables, monkeypatch) == 0
    assert copied.read_text() == right


def test_a_new_measurement_is_found(tables, copied, monkeypatch):
    file = tables.KEPT / "linearize.json"
    kept = json.loads(file.read_text())
    kept["tables"]["step"]["rows"][0][1] = CHANGED
    file.write_text(json.dumps(kept))
    assert status(tables, monkeypatch, "--check") == 1
    assert status(tables, monkeypatch) == 0
    assert f"| {CHANGED} |" in copied.read_text()


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_what_is_kept_says_how_it_was_measured(file):
    kept = json.loads(file.read_text())
    assert kept["command"].startswith(f"python benchmarks/{file.stem}.py")
    assert {"processor", "threads", "torch", "dlcft", "day", "others' share"} <= kept["machine"].keys()
    assert kept["tables"]
    for table in kept["tables"].values():
        assert {len(row) for row in table["rows"]} == {len(table["header"])}
        assert all(isinstance(cell, str) for row in table["rows"] for cell in row)


# Laws of measuring


def test_spread_is_the_median_and_the_quartiles(measure):
    found = measure.Spread.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.low, found.median, found.high) == (2, 3, 4)
    assert str(found) == "3.00 (2.00–4.00)"
    assert f"{found:.1f}" == "3.0 (2.0–4.0)"
    assert measure.Spread.of([7.0]) == measure.Spread(7, 7, 7)


def test_a_ratio_is_the_median_of_the_rounds_ratios(measure):
    times = measure.Times({"a": [2.0, 30.0, 4.0], "b": [1.0, 10.0, 5.0]})
    assert times.ratio("a", "b").median == 2  # of 2, 3 and 0.8; the medians' own ratio is 4 / 5
    assert times["a"] / times["b"] == 0.8
    assert times.combined(lambda s: s["a"] - s["b"]).median == 1


def test_programs_take_turns_after_a_round_to_warm_up(measure):
    order = []
    programs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = measure.timed(programs, 2)
    assert "".join(order) == "ababab"
    assert {name: len(seconds) for name, seconds in times.seconds.items()} == {"a": 2, "b": 2}
    order.clear()
    measure.timed(programs, 2, warm_up=False)
    assert "".join(order) == "aabab"


def test_the_share_of_others(measure):
    start = measure._Ticks(busy=100, all=1000, own=40)
    assert measure._others(start, measure._Ticks(busy=180, all=1200, own=110)) == pytest.approx(10 / 200)
    assert measure._others(start, measure._Ticks(busy=180, all=1200, own=121)) == 0, "clocks may differ by a tick"
    assert measure._others(start, start) == 0


def large_then_small():
    """Prepare a program that needs 64 MB, gives them back, and needs 32 MB."""

    def program():
        torch.ones(16 * 2**20)
        torch.ones(8 * 2**20)

    return program


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_that_of_what_lives_at_once(measure):
    assert measure.peak_memory(large_then_small) / 2**20 == pytest.approx(64, abs=6)


def test_output_is_kept_with_its_command(measure, monkeypatch, tmp_path, capsys):
    file = tmp_path / "new" / "b.json"
    monkeypatch.setattr(sys, "argv", ["benchmarks/b.py", "--rounds", "2", "--out", str(file)])
    options = measure.arguments("What.").parse_args()
    with measure.reported(options.out) as output:
        output.table("t", "Title", ["", "x"], [["row", "1.00"]])
    kept = json.loads(file.read_text())
    assert kept["command"] == "python benchmarks/b.py --rounds 2"
    assert kept["tables"]["t"]["rows"] == [["row", "1.00"]]
    assert kept["machine"]["torch"] == torch.__version__
    assert "| row | 1.00 |" in capsys.readouterr().out
