"""Pre-training: it learns, and an interruption changes no bit of what it ends with."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

from dlcft.backbones import ResNet18, load_backbone, load_classifier
from dlcft.backbones.files import read_weights
from dlcft.bench.pretrain import CONVERSION, leaky_classifier, pretrain
from dlcft.data.images import Preprocess
from dlcft.learner import notes
from dlcft.learner.build import fingerprint
from dlcft.store.files import CheckpointError

QUICK = {"epochs": 3, "batch_size": 16, "lr": 0.05, "augment": "crop1", "progress": False, "device": "cpu"}


def images(samples=56, seed=0, size=8):
    """Noise around one picture a class."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.rand(4, 3, size, size, generator=torch.Generator().manual_seed(9))
    y = torch.arange(samples) % 4
    x = pictures[y] * 0.7 + torch.rand(samples, 3, size, size, generator=generator) * 0.3
    return (x * 255).to(torch.uint8), y


def network(width=2, **options):
    torch.manual_seed(3)
    return ResNet18(width, "small", **{"slope": 0.1, **options})


class Interrupted(Exception):
    pass


def stop_after(steps):
    """A progress function that ends the run before the given step is noted."""
    count = 0

    def report(_):
        nonlocal count
        count += 1
        if count == steps:
            raise Interrupted

    return report


class TestTraining:
    def test_it_learns(self):
        before = fingerprint(start := network(4))
        result = pretrain(start, images(96), validation=images(40, seed=1), **QUICK | {"epochs": 12})
        assert len(result.losses) == 12
        assert result.losses[-1] < 0.5 * result.losses[0]
        assert result.top1 > 0.9
        assert result.labels == [0, 1, 2, 3]
        assert fingerprint(start) == before, "the user's network is left alone"
        assert not result.network.training
        assert result.network.bn1.num_batches_tracked == 12 * 6, "BatchNorm is trained"

    def test_images_are_normalised_by_their_own_mean(self):
        x, y = images()
        preprocess = pretrain(network(), (x, y), **QUICK | {"epochs": 1}).preprocess
        assert preprocess.size == (8, 8)
        assert preprocess.channels == 3
        normalised = preprocess(x)
        assert normalised.mean((0, 2, 3)).abs().max() < 1e-3
        assert (normalised.std((0, 2, 3)) - 1).abs().max() < 1e-2

    def test_forms_of_data_are_the_same_to_it(self):
        x, y = images()
        expected = pretrain(network(), (x, y), **QUICK | {"epochs": 1})
        last = x.permute(0, 2, 3, 1).numpy()
        for data in ((last, y.numpy()), (x.float() / 255, y), (x, y.tolist())):
            result = pretrain(network(), data, **QUICK | {"epochs": 1})
            assert fingerprint(result.network) == fingerprint(expected.network)

    def test_one_step_is_torch_s_sgd_on_cross_entropy(self):
        x, y = images(16)
        preprocess = Preprocess((8, 8), (0.5,) * 3, (0.25,) * 3)
        settings = QUICK | {"epochs": 1, "lr": 0.5, "weight_decay": 0.01, "augment": "none"}
        result = pretrain(network(classes=4).double(), (x, y), preprocess=preprocess, **settings)
        reference = network(classes=4).double()
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
        loss = nn.functional.cross_entropy(reference.train()(preprocess(x).double()), y)
        loss.backward()
        optimizer.step()
        assert abs(result.losses[0] - loss.item()) < 1e-7  # images are normalised in float32
        for name in ("conv1.weight", "layer4.1.conv2.weight", "bn1.running_mean"):
            found, expected = result.network.state_dict()[name], reference.state_dict()[name]
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result.classifier.weight, reference.fc.weight, rtol=1e-6, atol=1e-6)

    def test_it_diverges_aloud(self):
        with pytest.raises(FloatingPointError, match="diverged"):
            pretrain(network(), images(), **QUICK | {"lr": 1e30})


class TestInterruption:
    @pytest.fixture(autouse=True)
    def note_every_step(self, monkeypatch):
        monkeypatch.setattr(notes, "PROGRESS_SECONDS", 0.0)

    def test_bits_are_the_same(self, tmp_path):
        def make():
            return network(8)

        data = images()  # four steps an epoch, the last with 8 samples
        whole = pretrain(make(), data, save=tmp_path / "whole.safetensors", **QUICK)
        for steps in (1, 3, 4, 2, 3):  # in all, within and at the end of epochs
            with pytest.raises(Interrupted):
                pretrain(make(), data, save=tmp_path / "cut.safetensors", **QUICK | {"progress": stop_after(steps)})
            assert not (tmp_path / "cut.safetensors").exists()
        seen = []
        cut = pretrain(make(), data, save=tmp_path / "cut.safetensors", **QUICK | {"progress": seen.append})
        assert len(seen) == 12 - (0 + 2 + 3 + 1 + 2), "what was done is not done again"
        assert cut.losses == whole.losses
        assert fingerprint(cut.network) == fingerprint(whole.network)
        assert read_weights(tmp_path / "cut.safetensors")[1] == read_weights(tmp_path / "whole.safetensors")[1]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.safetensors", "whole.safetensors"]
        assert fingerprint(pretrain(make(), data, **QUICK).network) == fingerprint(whole.network), "nothing was saved"

    def test_after_a_kill(self, tmp_path):
        program = f"""
import os, signal, torch
torch.set_num_threads(1)
from dlcft.bench.pretrain import pretrain
from dlcft.learner import notes
from tests.bench.test_pretrain import QUICK, images, network
notes.PROGRESS_SECONDS = 0.0
seen = []
def report(progress):
    seen.append(progress)
    if len(seen) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
pretrain(network(), images(), save={str(tmp_path / "cut.safetensors")!r}, **QUICK | {{"progress": report}})
"""
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
        seen = []
        cut = pretrain(network(), images(), save=tmp_path / "cut.safetensors", **QUICK | {"progress": seen.append})
        assert [p.epoch for p in seen] == [2, 2, 3, 3, 3, 3]
        assert seen[-1].share == 1
        assert fingerprint(cut.network) == fingerprint(pretrain(network(), images(), **QUICK).network)

    def test_another_run_is_not_taken_for_it(self, tmp_path):
        save = tmp_path / "cut.safetensors"
        with pytest.raises(Interrupted):
            pretrain(network(), images(), save=save, **QUICK | {"progress": stop_after(3)})
        others = [
            ({"lr": 0.1}, network(), images(), "lr 0.05, not 0.1"),
            ({"seed": 4}, network(), images(), "seed 0, not 4"),
            ({}, network(slope=0.2), images(), r"slope 0\.1, not 0\.2"),
            ({}, network(4), images(), "network "),
            ({}, network(), images(seed=5), "preprocess|data "),
        ]
        for settings, start, data, match in others:
            with pytest.raises(CheckpointError, match=match):
                pretrain(start, data, save=save, **QUICK | settings)
        anew = pretrain(network(), images(), save=save, resume=False, **QUICK | {"seed": 4})
        assert fingerprint(anew.network) == fingerprint(pretrain(network(), images(), **QUICK | {"seed": 4}).network)


class TestFile:
    def test_it_is_a_backbone(self, tmp_path):
        save = tmp_path / "new" / "net.safetensors"
        x, y = images()
        names = np.array(["ant", "bee", "cat", "dog"])[y]
        result = pretrain(network(4), (x, names), validation=(x, names), save=save, **QUICK)
        backbone = load_backbone("resnet18-32", weights=save)
        assert backbone.rebuild == {"name": "resnet18-32", "weights": str(save), "width": 4}
        assert backbone.preprocess == result.preprocess
        assert fingerprint(backbone.module) == fingerprint(result.network)
        z = backbone.module(backbone.preprocess(x))
        logits = load_classifier("resnet18-32", save)(result.preprocess(x))
        torch.testing.assert_close(logits, result.classifier(z))
        assert result.top1 == (logits.argmax(1) == y).double().mean().item()
        assert set(load_file(save)) == set(ResNet18(4, "small", classes=4).state_dict()), "torchvision's names"

    def test_it_tells_how_it_was_made(self, tmp_path):
        result = pretrain(network(), images(), save=tmp_path / "net.safetensors", **QUICK)
        with safetensors.safe_open(tmp_path / "net.safetensors", "pt") as file:
            metadata = file.metadata()
        recipe = json.loads(metadata["recipe"])
        expected = {"optimizer": "sgd", "loss": "cross-entropy", "epochs": 3, "lr": 0.05, "batch_size": 16}
        expected |= {"momentum": 0.9, "weight_decay": 1e-5, "schedule": "cosine", "augment": "crop1", "seed": 0}
        assert recipe | expected == recipe
        assert recipe["labels"] == [0, 1, 2, 3]
        assert recipe["samples"] == 56
        assert json.loads(metadata["losses"]) == result.losses
        assert metadata["slope"] == "0.1"
        assert metadata["torch"] == torch.__version__

    def test_slopes_are_kept(self, tmp_path):
        for slope in (None, 0.3):
            pretrain(network(slope=slope), images(), save=tmp_path / f"{slope}.safetensors", **QUICK | {"epochs": 1})
        assert isinstance(load_backbone("resnet18-32", weights=tmp_path / "None.safetensors").module.relu, nn.ReLU)
        assert load_backbone("resnet18-32", weights=tmp_path / "0.3.safetensors").module.relu.negative_slope == 0.3

    def test_a_finished_run_is_read(self, tmp_path):
        save = tmp_path / "net.safetensors"
        first = pretrain(network(), images(), save=save, **QUICK)
        again = pretrain(network(), images(), validation=images(), save=save, **QUICK | {"progress": stop_after(1)})
        assert fingerprint(again.network) == fingerprint(first.network)
        assert torch.equal(again.classifier.weight, first.classifier.weight)
        assert again.losses == first.losses
        assert again.top1 is not None
        with pytest.raises(ValueError, match="epochs 3, not 4"):
            pretrain(network(), images(), save=save, **QUICK | {"epochs": 4})
        with pytest.raises(Interrupted):
            pretrain(network(), images(), save=save, resume=False, **QUICK | {"progress": stop_after(1)})
        assert save.exists(), "kept until another is complete"


class TestConversion:
    def test_relu_becomes_leaky(self, tmp_path):
        data, save = images(), tmp_path / "relu.safetensors"
        trained = pretrain(network(slope=None), data, save=save, **QUICK)
        start = load_classifier("resnet18-32", save)
        assert isinstance(start.relu, nn.ReLU)
        settings, leaky = QUICK | CONVERSION | {"augment": "crop1"}, tmp_path / "leaky.safetensors"
        result = pretrain(leaky_classifier(start, 0.2), data, preprocess=trained.preprocess, save=leaky, **settings)
        assert not any(isinstance(m, nn.ReLU) for m in result.network.modules())
        assert result.losses[0] < trained.losses[0], "it goes on with its classifier"
        moved = (result.network.conv1.weight - trained.network.conv1.weight).abs().max()
        assert 0 < moved < 1e-2
        backbone = load_backbone("resnet18-32", weights=leaky)
        assert backbone.module.relu.negative_slope == 0.2
        assert fingerprint(backbone.module) == fingerprint(result.network)

    def test_what_cannot_be_converted(self):
        with pytest.raises(ValueError, match="no linear classifier 'fc'"):
            leaky_classifier(network(slope=None))
        with pytest.raises(ValueError, match=r"contains no nn\.ReLU"):
            leaky_classifier(network(classes=4))

    def test_labels_are_those_of_the_classifier(self):
        x, y = images()
        settings = QUICK | {"epochs": 1, "preprocess": Preprocess((8, 8))}
        result = pretrain(network(classes=9), (x, y + 2), **settings)
        assert result.labels == list(range(9))
        with pytest.raises(ValueError, match=r"4 labels \('0' …\) and the network's classifier 9 outputs"):
            pretrain(network(classes=9), (x, [str(label.item()) for label in y]), **settings)


class TestMistakes:
    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"epochs": 0}, "epochs is 0"),
            ({"lr": -1.0}, "lr is"),
            ({"schedule": "square"}, "schedule is 'square'"),
            ({"augment": "spin"}, "unknown augmentation 'spin'"),
            ({"save": "net.pth"}, r"'net\.pth'; a file whose name ends in \.safetensors"),
            ({"validation": (images()[0], images()[1] + 1)}, "validation label 4 is none of the 4"),
        ],
    )
    def test_settings(self, settings, match):
        with pytest.raises(ValueError, match=match):
            pretrain(network(), images(), **QUICK | settings)

    def test_networks_and_data(self, tmp_path):
        with pytest.raises(ValueError, match="images, N × C × H × W"):
            pretrain(nn.Linear(5, 2), (torch.rand(8, 5), [0, 1] * 4), **QUICK)
        odd = network()
        odd.fc = nn.Sequential(nn.Linear(16, 3))
        with pytest.raises(ValueError, match="'fc' is a Sequential"):
            pretrain(odd, images(), **QUICK)
        safetensors.torch.save_file(network().state_dict(), tmp_path / "mine.safetensors")
        with pytest.raises(ValueError, match="was not written by pretrain"):
            pretrain(network(), images(), save=tmp_path / "mine.safetensors", **QUICK)
