"""What stands around the package agrees with it: versions, hooks, the workflow, the citation."""

import ast
import re
import shlex

import pytest

import dlcft
from tests.support.documents import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def section(name):
    """The commands below a target of the Makefile."""
    lines = re.search(rf"^{name}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in lines.splitlines()]


def test_hooks_are_make_lint():
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert [hook["entry"] for hook in hooks] == section("lint")
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in hooks)


def test_the_oldest_versions_are_those_that_are_claimed():
    text = (ROOT / "pyproject.toml").read_text()
    listed = ast.literal_eval(re.sub(r"#.*", "", re.search(r"^dependencies = (\[.*?^\])", text, re.M | re.S)[1]))
    claimed = dict(one.split(">=") for one in listed)
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "oldest.txt").read_text(), re.M))
    assert claimed.keys() == pins.keys()
    wrong = {name for name, least in claimed.items() if pins[name] != least and not pins[name].startswith(f"{least}.")}
    assert wrong == set()


def test_the_version_is_the_same_everywhere():
    citation = read("CITATION.cff")
    assert citation["version"] == dlcft.__version__
    assert f"## [{dlcft.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Shon", "Lee", "Kim", "Kim"]
    assert (paper["year"], citation["license"]) == (2022, "MIT")


def test_the_workflow_runs_what_exists():
    jobs = read(".github/workflows/check.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {target for command in commands for target in re.findall(r"\bmake ([\w-]+)", command)}
    assert targets >= {"lint", "test", "docs"}
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []
    named = {word for command in commands for word in shlex.split(command) if word.startswith(("tests/", "oldest"))}
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["bug", "wish"])
def test_issue_forms(name):
    form = read(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= form.keys()
    assert len({part["id"] for part in form["body"]}) == len(form["body"])


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", ".github/pull_request_template.md"])
def test_links_of_the_project_files(name):
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
