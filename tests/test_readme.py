"""README's blocks are run by `tests/support/documents.py`; here, that none escapes and that a wrong one would fail."""

import re
import subprocess

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser

from tests.support.documents import ROOT, SHELL, clear, inline_commands, possible, prepare

README = (ROOT / "README.md").read_text()


def test_every_block_has_a_language_that_is_run():
    assert set(re.findall(r"^```(.*)$", README, re.M)[::2]) == {"python", "bash"}


def test_the_two_commands_are_named():
    assert "make demo" in README
    assert "make test" in README


def test_it_is_short():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize(
    "command",
    ["dlcft dmo", "dlcft run --metod ewc", "dlcft list method", "make dmeo", "python benchmarks/nothing.py", "rm -r x"],
)
def test_a_wrong_command_is_found(command):
    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        possible(command.split())


def test_commands_run(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("```bash\ndlcft history --model nowhere  # nothing was learned\n```\nSay `dlcft list methods`.\n")
    first, second = Document.parse(str(path), SHELL, inline_commands).examples()
    prepare(first.namespace)
    with pytest.raises(AssertionError, match="holds no model"):
        first.evaluate()
    second.evaluate()
    clear(first.namespace)


def test_the_suite_collects_it(pytestconfig):
    assert {"README.md", "docs"} <= set(pytestconfig.getini("testpaths"))
    document = Document.parse(str(ROOT / "README.md"), PythonCodeBlockParser(), SHELL, inline_commands)
    assert len(list(document.examples())) >= len(re.findall("^```", README, re.M)) // 2
