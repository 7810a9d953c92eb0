"""A package that is not there gives one sentence, and importing the library imports none of them."""

import importlib
import sys

import pytest

from tests.test_project import loaded


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("lightning", "lightning.pytorch", "lightning"),
        ("huggingface", "transformers", "huggingface"),
        ("avalanche", "avalanche.evaluation.metric_results", "avalanche"),
    ],
)
def test_one_sentence_names_the_extra(monkeypatch, name, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, package.partition(".")[0], None)
    monkeypatch.delitem(sys.modules, f"dlcft.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'dlcft\[{extra}\]'\.$"):
        importlib.import_module(f"dlcft.integrations.{name}")


def test_the_common_part_imports_no_other_library():
    modules = loaded("import dlcft.integrations.penalty")
    assert "torch" in modules
    assert not modules & {"lightning", "transformers", "avalanche", "accelerate", "peft"}
