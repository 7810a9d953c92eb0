"""The notebooks of examples/: stored with their outputs, and still saying the same when they are run again."""

import json
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
ENDS = {  # printed by a last cell, which only the test adds: numbers of the notebook's own variables
    "five_months.ipynb": "[ours, ours_on_all, fine_tuned, difference, left, bad.accepted]",
    "the_paper_in_twenty_minutes.ipynb": "[left, accuracies, rises]",
}
MOST_BYTES = 300_000
# folders of a machine, and addresses in its memory
PRIVATE = re.compile(r"(?<![\w.])/(?:home|Users|tmp|root|work|opt|usr|var|private)/|[A-Z]:\\\\|0x[0-9a-f]{6,}")


def read(name):
    return json.loads((EXAMPLES / name).read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_all_are_here():
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == set(ENDS)


@pytest.mark.parametrize("name", ENDS)
def test_is_stored_with_outputs_and_nothing_private(name):
    notebook, size = read(name), (EXAMPLES / name).stat().st_size
    assert size < MOST_BYTES
    assert [cell["execution_count"] for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert sum("image/png" in output.get("data", ()) for output in outputs) >= 3
    assert any(output.get("name") == "stdout" for output in outputs)
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    words = json.dumps([{key: value for key, value in cell.items() if key != "outputs"} for cell in notebook["cells"]])
    told = json.dumps([output.get("text") or output["data"].get("text/plain") for output in outputs])
    assert PRIVATE.findall(words + told + json.dumps(notebook["metadata"])) == []


@pytest.mark.parametrize("name", ENDS)
def test_lines_are_short_and_documents_exist(name):
    source = ["".join(cell["source"]) for cell in read(name)["cells"]]
    assert [line for text in source for line in text.splitlines() if len(line) > 120] == []
    named = re.findall(r"`(docs/[\w-]+\.md)`", "\n".join(source))
    assert named
    assert [path for path in named if not (EXAMPLES.parent / path).is_file()] == []


def executed(name, folder):
    """What the last, added cell gives after all others have been run in a folder of their own."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; make test-slow installs it")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; make test-slow installs it")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed; make test-slow installs it")
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    nbformat.validate(notebook)
    last = nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({ENDS[name]}))")
    notebook.cells.append(last)
    nbclient.NotebookClient(notebook, timeout=900).execute(cwd=str(folder))
    return json.loads("".join(output.text for output in last.outputs if output.get("name") == "stdout"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the packages that run notebooks
def test_five_months(tmp_path):
    ours, at_once, fine_tuned, difference, left, accepted = executed("five_months.ipynb", tmp_path)
    assert ours[-1] > 0.98
    assert ours[-1] > fine_tuned[-1] + 0.2
    assert ours == pytest.approx(at_once, abs=1e-9)
    assert difference < 1e-3  # of outputs up to 16, in float32
    assert left < 1e-3
    assert accepted is False


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_paper_in_twenty_minutes(tmp_path):
    left, accuracies, rises = executed("the_paper_in_twenty_minutes.ipynb", tmp_path)
    assert left["cross-entropy"] < left["mse"] / 3
    first = {method: of_tasks[0] for method, of_tasks in accuracies.items()}
    assert max(first["none"], first["ewc"]) + 0.2 < first["dlcft"] < first["dlcft-exact"]
    for measured, predicted in rises["dlcft-exact"]:
        assert predicted == pytest.approx(measured, rel=1e-3)
    for measured, predicted in rises["ewc"]:
        assert predicted < measured / 20
    for measured, predicted in rises["dlcft"]:
        assert measured / 4 < predicted < measured * 2
