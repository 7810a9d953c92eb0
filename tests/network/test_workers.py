"""Several workers learn what one learns, see tests/support/many_workers.py."""

import subprocess
import sys

import pytest
import torch

from dlcft.network import workers


@pytest.mark.skipif(sys.platform == "win32", reason="gloo meets through a file")
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_laws(count):
    command = [sys.executable, "-m", "tests.support.many_workers", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"laws held with {count} workers\n")


def test_one_alone_exchanges_nothing():
    tensor = torch.arange(3.0)
    workers.add_up([tensor])
    assert tensor.tolist() == [0, 1, 2]
    assert (workers.count(), workers.place()) == (1, 0)
    assert workers.gathered("a") == ["a"]
    assert workers.from_first("a") == "a"
    assert workers.share([1, 2, 3]) == [1, 2, 3]
    with pytest.raises(KeyError, match="b"), workers.together():
        raise KeyError("b")
