"""What README shows runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks(code):
    names = {}
    exec(compile(code, str(README), "exec"), names)
    assert "learner" not in names or set(names["labels"]) <= {"cat", "dog", "owl"}
    assert "penalty" not in names or float(names["penalty"].detach()) == 0


def test_the_two_commands_are_named():
    text = README.read_text()
    assert "make demo" in text
    assert "make test" in text
