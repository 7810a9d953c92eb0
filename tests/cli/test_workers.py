"""Commands under torchrun: the same answers as one process, one sentence, and kills that cost nothing."""

import json
import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from tests.support.commands import dlcft
from tests.support.samples import pictures

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo")


def torchrun(*words, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dlcft"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    options = {"capture_output": True, "text": True, "check": False, "env": environment}
    return subprocess.run([*command, *map(str, words)], **options)


def test_two_workers_write_one_model_and_say_what_is_wrong_once(tmp_path):
    data = pictures(tmp_path / "data", ["red", "green"], count=40)
    model = ["--model", tmp_path / "m"]
    done = torchrun("update", *model, "--data", data, "--method", "ranpac", "--set", "random_features=50")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("version 1 is current") == 1
    assert dlcft("evaluate", *model, "--data", data).stdout.startswith("accuracy 100.00%")
    (data / "red" / "broken.png").write_bytes(b"no image")
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(data, "data")
    answers = []
    for command in (dlcft, torchrun):
        done = command("predict", tmp_path / "data.tar", *model, "--batch-size", "7", "--out", tmp_path / "answers.csv")
        assert done.returncode != 0, "an input was skipped"
        assert done.stderr.count("broken.png") == 1
        answers.append((tmp_path / "answers.csv").read_text())
    assert answers[0] == answers[1]
    assert answers[0].count("\n") == 81
    swapped = tmp_path / "swapped"
    swapped.mkdir()
    (data / "red" / "broken.png").unlink()
    shutil.copytree(data / "red", swapped / "green")
    shutil.copytree(data / "green", swapped / "red")
    gated = torchrun("update", *model, "--data", swapped, "--max-doubtful", "0", "--json")
    assert gated.returncode, "a gate has kept it"
    assert json.loads(gated.stdout.splitlines()[0])["accepted"] is False
    refused = torchrun("rollback", *model)
    assert refused.returncode
    assert refused.stderr.count("dlcft: dlcft rollback is done by one process") == 1
    failed = torchrun("evaluate", *model, "--data", tmp_path / "nowhere")
    assert failed.returncode
    assert failed.stderr.count("dlcft: there is no file or folder") == 1


def test_a_worker_that_hangs_ends_all_in_time_with_one_sentence(tmp_path):
    data = pictures(tmp_path / "data", ["red", "green"], count=8)
    (tmp_path / "hanging.py").write_text(
        "import os, time\nfrom torch import nn\n"
        "def network():\n    time.sleep(600 * (os.environ['RANK'] == '1'))\n"
        "    return nn.Flatten()\n"
    )
    words = ["update", "--model", tmp_path / "m", "--data", data, "--backbone", "hanging:network"]
    failed = torchrun(*words, DLCFT_WORKER_TIMEOUT="3", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert failed.returncode
    assert failed.stderr.count("dlcft: another worker has ended or does not answer") == 1
    assert not list((tmp_path / "m").glob("*.safetensors"))


@pytest.mark.slow
def test_killed_workers_are_started_again_and_end_bit_equal():
    command = [sys.executable, "-m", "tests.support.killed_workers", "20", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "20 kills of a worker, bit-equal\n"
