"""The command line in tests: in this process, which is quick, or in one of its own."""

import contextlib
import io
import os
import subprocess
import sys

from dlcft.cli import main


def dlcft(*arguments, cwd="."):
    """A command in this process, in a folder: its exit code, and what it prints."""
    out, err, here, code = io.StringIO(), io.StringIO(), os.getcwd(), 0
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        code = stopped.code
    finally:
        os.chdir(here)
    return subprocess.CompletedProcess(arguments, code or 0, out.getvalue(), err.getvalue())


def dlcft_process(*arguments, **options):
    """The same in a process of its own."""
    command = [sys.executable, "-m", "dlcft", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)
