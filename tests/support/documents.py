"""README and docs as tests: Python blocks run, shell blocks run command by command, inline commands must be possible.

A command that takes minutes, or needs what is not here, is only parsed: its options must exist.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from cyclopts import CycloptsError, MissingArgumentError
from PIL import Image
from sybil import Region
from sybil.parsers.markdown import CodeBlockParser

from dlcft.cli import app

ROOT = Path(__file__).parents[2]
RUN = {"update", "predict", "evaluate", "history", "rollback", "forget", "export", "list"}
SMALL = ["--set", "depth_features=150"]  # so that a first update takes a second
FOLDERS = [f"{part}/{label}" for part in ("january", "february", "holdout") for label in ("dark", "light")]
INLINE = re.compile(r"(?<!`)`((?:dlcft|python|make) [^`\n…]+)`(?!`)")


def prepare(namespace):
    """A folder with what README's commands take: pictures by label, and pictures without."""
    folder = namespace["folder"] = Path(tempfile.mkdtemp())
    namespace["home"] = Path.cwd()
    draw = np.random.default_rng(0)
    for place in FOLDERS:
        level = 30 if place.endswith("dark") else 220
        (folder / place).mkdir(parents=True)
        for number in range(4):
            pixels = np.clip(draw.normal(level, 20, (32, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / place / f"{number}.png")
    shutil.copytree(folder / "holdout" / "dark", folder / "new-images")
    os.chdir(folder)  # what a document writes is gone with it


def clear(namespace):
    os.chdir(namespace["home"])
    shutil.rmtree(namespace["folder"])


def possible(words):
    """Refuse a command that nobody could give: a make target, a file or an option that does not exist."""
    program, *rest = words
    if program == "make":
        subprocess.run(["make", "--dry-run", "--directory", ROOT, *rest], check=True, capture_output=True)
    elif program == "pip":
        assert rest == ["install", "."]
    elif program == "python" and rest[0] == "-m":
        assert (ROOT / rest[1].replace(".", "/")).with_suffix(".py").is_file(), f"there is no {rest[1]}"
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), f"there is no {rest[0]}"
        source = (ROOT / rest[0]).read_text()
        if "from measure import" in source:  # the options that benchmarks share
            source += (ROOT / "benchmarks" / "measure.py").read_text()
        unknown = [word for word in rest if word.startswith("--") and word not in source]
        assert not unknown, f"{rest[0]} has no {unknown}"
    else:
        assert program == "dlcft", f"{program} is no command that is known here"
        try:
            app.parse_args(rest, exit_on_error=False, print_error=False)
        except MissingArgumentError:
            assert len(rest) == 1, f"{shlex.join(words)} lacks an argument"  # a command that is only named
        except CycloptsError as error:
            raise AssertionError(f"{shlex.join(words)}: {error}") from None


def run_shell(example):
    """Every line of a block: what is cheap is run where its folders are."""
    for line in example.parsed.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        possible(words)
        if words[0] == "dlcft" and words[1] in RUN and example.path.endswith(("README.md", "start.md", "forget.md")):
            small = SMALL if "--backbone" in words else []
            command = [sys.executable, "-m", "dlcft", *words[1:], *small]
            done = subprocess.run(command, cwd=example.namespace["folder"], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def inline_commands(document):
    """Commands within the text."""
    for found in INLINE.finditer(document.text):
        yield Region(found.start(), found.end(), found[1], lambda example: possible(shlex.split(example.parsed)))


SHELL = CodeBlockParser("bash", run_shell)
