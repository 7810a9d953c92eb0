"""Commands that are interrupted or killed: one line, nothing half-written, and the same command goes on."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


def support(name, times):
    command = [sys.executable, "-m", f"tests.support.{name}", str(times), "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("times", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_is_one_line(times):
    told = support("interrupted", times).split()
    assert int(told[0]) == times
    assert int(told[2]) > 0


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_commands_killed_at_any_moment(kills):
    told = support("killed_commands", kills)
    assert int(told.split()[0]) >= kills
    assert told.endswith("all bit-equal")
