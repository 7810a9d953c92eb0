"""Batches through a frozen network in parts: the same features, in bounded memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dlcft.backbones import ResNet18
from dlcft.closed_form import chunks
from dlcft.closed_form.chunks import MOST_SAMPLES, in_chunks
from dlcft.closed_form.depth import DepthFeatures, find_activations
from dlcft.closed_form.features import FrozenFeatures
from dlcft.data import samples as reading
from dlcft.data.samples import Batches, Samples


def network():
    torch.manual_seed(0)
    return ResNet18(4, "small", 0.1).double().eval()


def images(count=30):
    return torch.randn(count, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["frozen", "depth"])
def test_parts_give_what_the_whole_gives(kind, monkeypatch):
    base, x, sizes = network(), images(), []
    activations = find_activations(base, x[:3], 100)
    base.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    make = {
        "frozen": lambda: FrozenFeatures(base, 32, random=50),
        "depth": lambda: DepthFeatures(base, activations),
    }[kind]
    whole = make()(x)
    sizes.clear()
    one = 4 * 16 * 16 * 8  # bytes of the largest activation of a sample
    monkeypatch.setattr(chunks, "_MEMORY", 10 * chunks._ALIVE * one)
    features = make()
    torch.testing.assert_close(features(x), whole, rtol=1e-12, atol=1e-12)
    assert sizes == [1, 2, 8, 8, 8, 6], "a look at one and two samples, then eight that fit: a multiple of four"
    sizes.clear()
    assert torch.equal(features(x), features(x))
    assert sizes == [8, 8, 8, 6] * 2, "the look is taken once"


def test_small_inputs_stay_together_and_few_samples_are_not_looked_at(monkeypatch):
    sizes = []

    def compute(x):
        sizes.append(len(x))
        return x

    known = {}
    in_chunks(compute, torch.zeros(4, 5), known)
    assert (sizes, known) == ([4], {})
    in_chunks(compute, torch.zeros(150, 5), known)
    assert sizes[1:] == [1, 2, MOST_SAMPLES, MOST_SAMPLES, 150 - 2 * MOST_SAMPLES]


def test_a_batch_whose_first_axis_is_no_sample_is_not_split():
    seen = []

    def time_first(x):
        seen.append(len(x))
        return x.mean(0)

    x = torch.randn(200, 3, 5)
    assert torch.equal(in_chunks(time_first, x, {}), x.mean(0))
    assert seen[-1] == 200

    def of_two(pair):
        return pair[0].flatten(1) + pair[1].sum()

    pair = torch.randn(100, 4), torch.randn(7)
    assert torch.equal(in_chunks(of_two, pair, {}), pair[0] + pair[1].sum())


def test_a_network_for_one_size_of_batch():
    def of_ten(x):
        return x.reshape(10, 4)

    x = torch.randn(10, 2, 2)
    assert torch.equal(in_chunks(of_ten, x, {}), x.flatten(1))


def test_a_mistake_of_the_network_is_still_told():
    with pytest.raises(ValueError, match="the network cannot take a batch"):
        FrozenFeatures(nn.Linear(3, 2), 2)(torch.zeros(30, 5))


def test_large_inputs_are_read_few_at_a_time(monkeypatch):
    monkeypatch.setattr(reading, "_READ", 4 * 10 * 9)
    samples, y = Samples((torch.zeros(20, 10), [0] * 20)), torch.zeros(20, dtype=torch.long)
    options = {"device": torch.device("cpu")}
    assert [len(rows) for _, rows in Batches(samples, y, 16, bounded=True, **options)] == [8, 8, 4]
    assert [len(rows) for _, rows in Batches(samples, y, 5, bounded=True, **options)] == [5, 5, 5, 5]
    assert [len(rows) for _, rows in Batches(samples, y, 16, **options)] == [16, 4]


PROGRAM = """
import sys, numpy as np, torch
from pathlib import Path
from dlcft import Learner
from dlcft.backbones import load_backbone
torch.set_num_threads(1)

def status(field):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if field in line)

found = load_backbone("resnet18", weights="random")
learner = Learner(found.module, sys.argv[1], preprocess=found.preprocess)
x = np.random.default_rng(0).integers(0, 256, (120, 224, 224, 3), dtype=np.uint8)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
learner.learn((x, [i % 4 for i in range(120)]), progress=False)
learner.predict(x)
print((status("VmHWM") - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize(("method", "most"), [("ridge", 500), ("dlcft-exact", 1000)])
def test_the_memory_of_large_images_is_bounded(method, most):
    """In MB above the network and the images; before batches were split it was 1,000 and 1,500."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, method], capture_output=True, text=True, check=True)
    assert int(done.stdout) < most
