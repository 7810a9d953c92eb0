"""The command line, as a person or a script meets it."""

import subprocess
import sys


def dlcft(*arguments):
    return subprocess.run([sys.executable, "-m", "dlcft.cli", *arguments], capture_output=True, text=True, check=False)


def test_help_and_version():
    assert "demo" in dlcft("--help").stdout
    assert "Example" in dlcft("demo", "--help").stdout
    assert dlcft("--version").stdout.strip()[0].isdigit()


def test_wrong_input_is_one_sentence_and_exit_code_2():
    for arguments, words in [
        (["dmo"], "demo"),
        (["demo", "--epohcs", "3"], "--epochs"),
        (["demo", "--epochs", "many"], "int"),
        (["demo", "--epochs", "0"], "at least 1"),
    ]:
        done = dlcft(*arguments)
        said = done.stdout + done.stderr
        assert done.returncode == 2, arguments
        assert words in said
        assert "Traceback" not in said
