"""The page that leads from the paper to the code: every name on it can be imported, every test that it names exists."""

import importlib
import re

import pytest

from tests.support.documents import ROOT

PAGE = (ROOT / "docs" / "paper-to-code.md").read_text()
NAMES = sorted(set(re.findall(r"`(dlcft(?:\.\w+)+)`", PAGE)))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))


def found(name):
    """What a dotted name leads to: a module, then attributes of it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            thing = getattr(thing, part)
        return thing
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", NAMES)
def test_name_exists(name):
    assert found(name) is not None


def test_fields_exist():
    named = re.findall(r"`(\w+)` of `(dlcft[\w.]+)`", PAGE)
    assert len(named) >= 4
    for field, name in named:
        assert re.search(rf"\b{field}\b", found(name).__doc__), f"{name} says nothing of {field}"


@pytest.mark.parametrize(("file", "test"), TESTS)
def test_test_exists(file, test):
    assert f"def {test}" in (ROOT / file).read_text()


def test_every_equation_is_there():
    numbers = [
        int(number) for row in re.findall(r"^\| ((?:\(\d+\),? ?)+)", PAGE, re.M) for number in re.findall(r"\d+", row)
    ]
    assert numbers == list(range(1, 15))


def test_a_wrong_name_is_found():
    with pytest.raises(AttributeError):
        found("dlcft.curvature.memory.Memory.penalties")
