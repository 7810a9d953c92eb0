"""What a number of features costs: as measured, and as the documentation says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlcft.closed_form.costs import costs
from dlcft.pages import in_bytes
from dlcft.store.files import write_tensors
from tests.closed_form.test_sums import data, sums

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("features", "classes"), [(150, 4), (600, 40)])
def test_the_file_has_the_size_that_is_told(tmp_path, features, classes):
    found = sums(*data(200, features=features, classes=classes))
    head = {"weight": torch.zeros(classes, features), "bias": torch.zeros(classes)}
    size, _ = write_tensors(tmp_path / "file", found.state()[0] | head)
    assert abs(costs(features, classes).disk - size) < 0.02 * size


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory")
@pytest.mark.parametrize("features", [1400, 2000])
def test_an_update_takes_the_memory_that_is_told(features):
    program = """
import sys
import torch
from pathlib import Path
from torch import nn
from dlcft import Learner

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * x

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

for features in (200, int(sys.argv[1])):  # a small one first: torch's own code is not counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before, learner = status("VmRSS"), Learner(Net(), "ridge", device="cpu")
    for number in range(2):
        task = torch.randn(64, features, generator=torch.Generator().manual_seed(number)), torch.arange(64) % 10
        learner.learn(task, progress=False)
        learner.evaluate(task)
    learner.method.predicted_increase()
print(status("VmHWM") - before)
"""
    command = [sys.executable, "-c", program, str(features)]
    # the allocator gives every matrix back at once: below 32 MiB it may keep some, up to a half more
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    measured = int(done.stdout)
    # few samples are solved in their span, which takes less
    assert 0.75 * costs(features, 10).memory < measured < 1.15 * costs(features, 10).memory


def test_the_documentation_tells_the_same():
    rows = re.findall(r"^\| ([\d,]+) \| (\S+ .B) \| (\S+ .B) \|$", (DOCS / "your-own-model.md").read_text(), re.M)
    assert len(rows) == 5
    for features, disk, memory in rows:
        told = costs(int(features.replace(",", "")), 10)
        assert (disk, memory) == (in_bytes(told.disk), in_bytes(told.memory))
