"""Commands under torchrun: the same answers as one process, one sentence, and kills that cost nothing."""

import os
import subprocess
import sys

import pytest

from tests.support.commands import dlcft
from tests.support.samples import pictures

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo")


def torchrun(*words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dlcft"]
    options = {"capture_output": True, "text": True, "check": False, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    return subprocess.run([*command, *map(str, words)], **options)


def test_two_workers_write_one_model_and_say_what_is_wrong_once(tmp_path):
    data = pictures(tmp_path / "data", ["red", "green"], count=40)
    model = ["--model", tmp_path / "m"]
    done = torchrun("update", *model, "--data", data, "--method", "ranpac", "--set", "random_features=50")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("version 1 is current") == 1
    assert dlcft("evaluate", *model, "--data", data).stdout.startswith("accuracy 100.00%")
    failed = torchrun("evaluate", *model, "--data", tmp_path / "nowhere")
    assert failed.returncode
    assert failed.stderr.count("dlcft: there is no file or folder") == 1


@pytest.mark.slow
def test_killed_workers_are_started_again_and_end_bit_equal():
    command = [sys.executable, "-m", "tests.support.killed_workers", "20", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "20 kills of a worker, bit-equal\n"
