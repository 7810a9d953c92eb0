"""Every example runs as its first lines say, and says something sensible."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "new_method.py": r"accuracy on the latest task: (9\d|100)%",
    "new_curvature.py": r"predicted rise of the first task's loss: -?\d",
    "update_your_model.py": r"labels known: \['green', 'red', 'blue'\]; accuracy: 100%",
}


def test_all_are_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(name):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[name], done.stdout), done.stdout
    assert f"python examples/{name}" in (EXAMPLES / name).read_text()
