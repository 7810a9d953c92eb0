"""Backbones by name. timm, torchvision and transformers are stand-ins, since none of them is a dependency."""

from importlib import resources

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dlcft import Learner
from dlcft.backbones import (
    BACKBONES,
    MEAN,
    STD,
    ResNet18,
    load_backbone,
    load_classifier,
    shipped_resnet18,
)
from dlcft.data.images import Preprocess
from dlcft.learner.build import fingerprint
from tests.support.photos import PHOTOS, features, rebuilt, sentence

pytestmark = pytest.mark.usefixtures("weights_folder")


class TestResNets:
    def test_shipped_is_the_default(self):
        backbone = rebuilt(load_backbone())
        assert backbone.name == "shipped"
        assert fingerprint(backbone.module) == fingerprint(shipped_resnet18())
        assert torch.equal(torch.tensor(backbone.preprocess.mean), MEAN)
        assert torch.equal(torch.tensor(backbone.preprocess.std), STD)
        assert features(backbone).shape == (2, 128)

    def test_a_learner_takes_it(self):
        backbone = load_backbone("shipped")
        learner = Learner(backbone.module, "ridge", preprocess=backbone.preprocess)
        learner.learn((PHOTOS, ["a", "b"]))
        assert learner.predict(PHOTOS) == ["a", "b"]

    @pytest.mark.parametrize("name", ["resnet18", "resnet18-32", "ResNet18-32"])
    def test_random_weights_are_always_the_same(self, name):
        state = torch.random.get_rng_state()
        backbone = load_backbone(name, weights="random", width=4)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert backbone.rebuild == {"name": name.lower(), "weights": "random", "width": 4}
        assert features(rebuilt(backbone)).shape == (2, 32)

    def test_stems_and_activations(self):
        small = load_backbone("resnet18-32", weights="random", width=4)
        large = load_backbone("resnet18", weights="random", width=4)
        assert small.module.conv1.kernel_size == (3, 3)
        assert large.module.conv1.kernel_size == (7, 7)
        assert small.module.relu.negative_slope == 0.1
        assert isinstance(large.module.relu, nn.ReLU)
        assert large.preprocess == Preprocess(
            (224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear", channels=3
        )

    @pytest.mark.parametrize("suffix", [".pth", ".pt", ".safetensors"])
    def test_from_a_file_with_a_classifier(self, tmp_path, suffix):
        network = ResNet18(4, classes=7)
        file = tmp_path / f"mine{suffix}"
        if suffix == ".safetensors":
            save_file(network.state_dict(), file)
        else:
            torch.save(network.state_dict(), file)
        backbone = rebuilt(load_backbone("resnet18", weights=file))
        assert backbone.rebuild == {"name": "resnet18", "weights": str(file), "width": 4}
        assert torch.equal(backbone.module.conv1.weight, network.conv1.weight)
        assert features(backbone).shape == (2, 32)
        assert torch.equal(load_classifier("resnet18", file).fc.weight, network.fc.weight)

    def test_files_without_the_counter_of_batches(self, tmp_path):
        old = {k: v for k, v in ResNet18(2).state_dict().items() if not k.endswith("num_batches_tracked")}
        torch.save(old, tmp_path / "old.pth")
        assert features(load_backbone("resnet18", weights=tmp_path / "old.pth")).shape == (2, 16)

    def test_the_shipped_file_by_its_path(self):
        file = resources.files("dlcft.backbones") / "weights" / "resnet18-32-w16-tinyimagenet.safetensors"
        backbone = load_backbone("resnet18-32", weights=file)
        assert backbone.rebuild["width"] == 16
        assert torch.equal(features(backbone), features(load_backbone()))

    def test_the_folder_of_weights(self, weights_folder):
        with pytest.raises(FileNotFoundError) as error:
            load_backbone("resnet18")
        message = sentence(error)
        assert "resnet18-f37072fd.pth" in message
        assert "https://download.pytorch.org/models/resnet18-f37072fd.pth" in message
        assert str(weights_folder) in message
        assert "DLCFT_WEIGHTS" in message
        torch.save(ResNet18(2, classes=3).state_dict(), weights_folder / "resnet18-f37072fd.pth")
        assert rebuilt(load_backbone("resnet18")).rebuild == {"name": "resnet18", "weights": None, "width": 2}
        named = rebuilt(load_backbone("resnet18", weights="resnet18-f37072fd.pth"))
        assert named.rebuild["weights"] == "resnet18-f37072fd.pth"


class TestMistakes:
    @pytest.mark.parametrize(
        ("name", "suggestion"),
        [
            ("resnet-18", "'resnet18'"),
            ("shiped", "'shipped'"),
            ("timn:resnet50", "'timm'"),
            ("resnet18-64", "resnet18"),
        ],
    )
    def test_a_wrong_name_suggests_the_nearest(self, name, suggestion):
        with pytest.raises(ValueError, match="unknown backbone") as error:
            load_backbone(name)
        assert suggestion in sentence(error).partition("Did you mean")[2]
        assert all(known in sentence(error) for known in BACKBONES)

    def test_weights_that_do_not_fit(self, tmp_path):
        state = ResNet18(4, "small").state_dict()
        state["bn9.weight"] = state.pop("bn1.weight")
        torch.save(state, tmp_path / "other.pth")
        with pytest.raises(ValueError, match="does not fit") as error:
            load_backbone("resnet18", weights=tmp_path / "other.pth")
        message = sentence(error)
        assert "missing: bn1.weight;" in message
        assert "unexpected: bn9.weight;" in message
        assert "conv1.weight is (4, 3, 3, 3), not (4, 3, 7, 7)" in message
        with pytest.raises(ValueError, match=r"and \d+ more"):
            load_backbone("resnet18-32", weights=tmp_path / "other.pth", width=2)

    def test_files_that_are_none(self, tmp_path):
        for name in ("empty.pth", "empty.safetensors"):
            (tmp_path / name).write_bytes(b"")
        (tmp_path / "text.pth").write_text("no weights at all")
        torch.save({"epoch": 3, "model": {}}, tmp_path / "nested.pth")
        torch.save(ResNet18(1), tmp_path / "code.pth")
        for name in ("empty.pth", "empty.safetensors", "text.pth", "code.pth"):
            with pytest.raises(ValueError, match="cannot read weights from") as error:
                load_backbone("resnet18", weights=tmp_path / name)
            sentence(error)
        with pytest.raises(ValueError, match=r"holds a dict of epoch, model; a state dict"):
            load_backbone("resnet18", weights=tmp_path / "nested.pth")
        (tmp_path / "net.onnx").write_bytes(b"")
        with pytest.raises(ValueError, match=r"a \.safetensors, \.pth or \.pt file"):
            load_backbone("resnet18", weights=tmp_path / "net.onnx")
        with pytest.raises(FileNotFoundError, match=r"'absent\.pth'; there is no such file"):
            load_backbone("resnet18", weights="absent.pth")

    def test_metadata_that_is_none(self, tmp_path):
        for metadata in ({"slope": "steep"}, {"preprocess": "{"}, {"preprocess": '{"zoom": 2}'}, {"preprocess": "3"}):
            save_file(ResNet18(1).state_dict(), tmp_path / "odd.safetensors", metadata)
            with pytest.raises(ValueError, match="metadata") as error:
                load_backbone("resnet18", weights=tmp_path / "odd.safetensors")
            sentence(error)

    def test_settings_that_do_not_apply(self, tmp_path):
        with pytest.raises(ValueError, match="width is 8 for 'shipped'"):
            load_backbone("shipped", width=8)
        with pytest.raises(ValueError, match="width is 0"):
            load_backbone("resnet18", weights="random", width=0)
        with pytest.raises(ValueError, match="'shipped' has its own"):
            load_backbone("shipped", weights="random")
        with pytest.raises(ValueError, match="no published weights"):
            load_backbone("resnet18-32")
        with pytest.raises(ValueError, match="it must be one of resnet18, resnet18-32"):
            load_classifier("shipped", tmp_path)
        save_file(ResNet18(1).state_dict(), tmp_path / "features.safetensors")
        with pytest.raises(ValueError, match=r"no classifier 'fc\.weight'"):
            load_classifier("resnet18", tmp_path / "features.safetensors")
