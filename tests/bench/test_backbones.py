"""Backbones by name. timm, torchvision and transformers are stand-ins, since none of them is a dependency."""

import json
import sys
from enum import Enum
from importlib import resources
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dlcft import Learner
from dlcft.assembly import fingerprint
from dlcft.bench.backbones import (
    BACKBONES,
    MEAN,
    STD,
    ResNet18,
    load_backbone,
    load_classifier,
    load_features,
    shipped_resnet18,
)
from dlcft.images import Preprocess

PHOTOS = torch.randint(0, 256, (2, 3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def weights_folder(tmp_path, monkeypatch):
    folder = tmp_path / "weights"
    folder.mkdir()
    monkeypatch.setenv("DLCFT_WEIGHTS", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def rebuilt(backbone):
    """Built again from what a JSON file would hold."""
    again = load_backbone(**json.loads(json.dumps(backbone.rebuild)))
    assert fingerprint(again.module) == fingerprint(backbone.module)
    assert again.preprocess == backbone.preprocess
    assert again.name == backbone.name
    return again


def features(backbone):
    assert not backbone.module.training
    with torch.no_grad():
        return backbone.module(backbone.preprocess(PHOTOS))


def sentence(error):
    """The message, which must be one line."""
    message = str(error.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    return message


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
        file = resources.files("dlcft.bench") / "weights" / "resnet18-32-w16-tinyimagenet.safetensors"
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
        with pytest.raises(ValueError, match=r"missing: conv1\.weight"):
            load_features(ResNet18(2), {})

    def test_files_that_are_none(self, tmp_path):
        for name in ("empty.pth", "empty.safetensors"):
            (tmp_path / name).write_bytes(b"")
        (tmp_path / "text.pth").write_text("no weights at all")
        torch.save({"epoch": 3, "model": {}}, tmp_path / "nested.pth")
        torch.save(ResNet18(1), tmp_path / "code.pth")
        for name in ("empty.pth", "empty.safetensors", "text.pth", "code.pth"):
            with pytest.raises(ValueError, match="cannot be read as weights") as error:
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


def small_network(classifier="fc", last=None):
    network = nn.Sequential()
    network.add_module("conv", nn.Conv2d(3, 4, 3))
    network.add_module("pool", nn.AdaptiveAvgPool2d(1))
    network.add_module("flat", nn.Flatten() if last is None else nn.Identity())
    network.add_module(classifier, nn.Linear(4, 10) if last is None else last)
    return network


def offline(*args, **kwargs):
    raise OSError("name resolution failed\nand more lines")


class TestTimm:
    @pytest.fixture(autouse=True)
    def timm(self, monkeypatch):
        def create_model(name, *, pretrained, num_classes):
            assert num_classes == 0
            if name != "resnet50":
                raise RuntimeError(f"Unknown model ({name})")
            network = small_network()
            network.fc = nn.Identity()
            network.pretrained = pretrained
            return network

        config = {
            "input_size": (3, 20, 24),
            "interpolation": "bicubic",
            "mean": (0.5, 0.5, 0.5),
            "std": (0.2, 0.2, 0.2),
        }
        timm, data = ModuleType("timm"), ModuleType("timm.data")
        timm.create_model, timm.list_models = create_model, lambda: ["resnet18", "resnet50"]
        data.resolve_model_data_config = lambda module: config
        monkeypatch.setitem(sys.modules, "timm", timm)
        monkeypatch.setitem(sys.modules, "timm.data", data)
        return timm

    def test_by_name(self):
        backbone = rebuilt(load_backbone("timm:resnet50"))
        assert backbone.module.pretrained
        assert backbone.preprocess == Preprocess((20, 24), (0.5,) * 3, (0.2,) * 3, "bicubic", 3)
        assert features(backbone).shape == (2, 4)
        assert not rebuilt(load_backbone("timm:resnet50", weights="random")).module.pretrained

    def test_from_a_file(self, tmp_path):
        network = small_network()
        save_file(network.state_dict(), tmp_path / "model.safetensors")
        backbone = rebuilt(load_backbone("timm:resnet50", weights="model.safetensors"))
        assert torch.equal(backbone.module.conv.weight, network.conv.weight)
        assert not backbone.module.pretrained

    def test_an_unknown_model(self):
        with pytest.raises(ValueError, match=r"Unknown model \(resnet5\)") as error:
            load_backbone("timm:resnet5")
        assert sentence(error).endswith("Did you mean 'resnet50'?")

    def test_without_a_network(self, timm):
        timm.create_model = offline
        with pytest.raises(FileNotFoundError, match=r"'timm:resnet50' .* \(name resolution failed\).*weights=FILE"):
            load_backbone("timm:resnet50")

    @pytest.mark.parametrize(
        ("name", "package"), [("timm:a", "timm"), ("torchvision:a", "torchvision"), ("hf:a", "transformers")]
    )
    def test_without_the_package(self, monkeypatch, name, package):
        for module in ("timm", "timm.data", "torchvision", "torchvision.models", "transformers"):
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=f"pip install {package}") as error:
            load_backbone(name)
        sentence(error)


NETWORKS = {
    "resnet": small_network,
    "densenet": lambda: small_network("classifier"),
    "vit": lambda: small_network("heads", nn.Sequential(nn.Flatten(), nn.Linear(4, 10))),
    "swin": lambda: small_network("head"),
    "convnext": lambda: small_network(
        "classifier", nn.Sequential(nn.LayerNorm([4, 1, 1]), nn.Flatten(), nn.Linear(4, 10))
    ),
    "squeezenet": lambda: small_network(
        "classifier", nn.Sequential(nn.Conv2d(4, 10, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    ),
    "detector": lambda: small_network("roi_heads"),
}


class TestTorchvision:
    @pytest.fixture(autouse=True)
    def models(self, monkeypatch):
        mode = Enum("InterpolationMode", {"BILINEAR": "bilinear"})
        used = SimpleNamespace(crop_size=[28], mean=[0.4] * 3, std=[0.3] * 3, interpolation=mode.BILINEAR)
        published = SimpleNamespace(url="https://example.org/models/net-0123.pth", transforms=lambda: used)
        models = ModuleType("torchvision.models")
        models.list_models = lambda: list(NETWORKS)
        models.get_model_weights = lambda name: SimpleNamespace(DEFAULT=published)
        models.asked = []

        def get_model(name, *, weights):
            models.asked.append(weights)
            return NETWORKS[name]()

        models.get_model = get_model
        monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
        monkeypatch.setitem(sys.modules, "torchvision.models", models)
        return models

    @pytest.mark.parametrize("name", [name for name in NETWORKS if name != "detector"])
    def test_the_classifier_is_removed(self, name, models):
        backbone = rebuilt(load_backbone(f"torchvision:{name}"))
        assert models.asked == ["DEFAULT", "DEFAULT"]
        assert features(backbone).shape == (2, 4)
        assert backbone.preprocess == Preprocess((28, 28), (0.4,) * 3, (0.3,) * 3, "bilinear", 3)

    def test_from_a_file(self, tmp_path, models):
        network = NETWORKS["convnext"]()
        torch.save(network.state_dict(), tmp_path / "convnext.pth")
        backbone = rebuilt(load_backbone("torchvision:convnext", weights=tmp_path / "convnext.pth"))
        assert models.asked == [None, None]
        assert torch.equal(backbone.module.conv.weight, network.conv.weight)

    def test_mistakes(self, models):
        with pytest.raises(ValueError, match="Did you mean 'resnet'"):
            load_backbone("torchvision:resnets")
        with pytest.raises(ValueError, match="'detector' has no classifier called fc, classifier, heads, head"):
            load_backbone("torchvision:detector")
        models.get_model = offline
        with pytest.raises(FileNotFoundError, match=r"net-0123\.pth into .*checkpoints") as error:
            load_backbone("torchvision:resnet")
        sentence(error)

    def test_a_build_for_another_torch(self, monkeypatch, tmp_path):
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator does not exist')")
        for name in ("torchvision", "torchvision.models"):
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ImportError, match=r"operator does not exist\): pip install torchvision"):
            load_backbone("torchvision:resnet")


class Transformer(nn.Module):
    main_input_name = "pixel_values"

    def __init__(self):
        super().__init__()
        self.embedding = nn.Conv2d(3, 4, 8, 8)
        self.pooler = nn.Linear(4, 4)

    def forward(self, pixel_values, return_dict):
        assert return_dict
        hidden = self.embedding(pixel_values).flatten(2).mT
        output = {"last_hidden_state": hidden}
        return output if self.pooler is None else output | {"pooler_output": self.pooler(hidden[:, 0])}


class TestTransformers:
    @pytest.fixture(autouse=True)
    def hub(self, monkeypatch):
        hub = SimpleNamespace(places=[], missing=[], size={"height": 16, "width": 24}, resample=3)
        torch.manual_seed(0)
        state = Transformer().state_dict()

        class AutoModel:
            @staticmethod
            def from_pretrained(place, *, output_loading_info):
                hub.places.append(place)
                model = Transformer()
                model.load_state_dict(state)
                return model, {"missing_keys": list(hub.missing)}

        class AutoImageProcessor:
            @staticmethod
            def from_pretrained(place):
                settings = {"size": hub.size, "resample": hub.resample, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
                return SimpleNamespace(to_dict=lambda: settings)

        module = ModuleType("transformers")
        module.AutoModel, module.AutoImageProcessor = AutoModel, AutoImageProcessor
        monkeypatch.setitem(sys.modules, "transformers", module)
        hub.module = module
        return hub

    def test_by_name(self, hub):
        backbone = rebuilt(load_backbone("hf:someone/net"))
        assert hub.places == ["someone/net", "someone/net"]
        assert backbone.preprocess == Preprocess((16, 24), (0.5,) * 3, (0.5,) * 3, "bicubic", 3)
        assert features(backbone).shape == (2, 4)

    def test_a_pooler_without_weights_is_not_used(self, hub):
        pooled = features(load_backbone("hf:net"))
        hub.missing = ["pooler.weight", "pooler.bias"]
        backbone = load_backbone("hf:net")
        first = backbone.module.model.embedding(backbone.preprocess(PHOTOS)).flatten(2)[:, :, 0]
        assert torch.equal(features(backbone), first)
        assert not torch.equal(pooled, first)
        assert not any("pooler" in name for name, _ in backbone.module.named_parameters())

    @pytest.mark.parametrize(
        ("size", "expected"),
        [(20, (20, 20)), ({"shortest_edge": 18}, (18, 18)), (SimpleNamespace(height=8, width=9), (8, 9))],
    )
    def test_forms_of_sizes(self, hub, size, expected):
        hub.size = size
        assert load_backbone("hf:net").preprocess.size == expected

    def test_from_a_folder(self, hub, tmp_path):
        (tmp_path / "folder").mkdir()
        rebuilt(load_backbone("hf:net", weights="folder"))
        assert hub.places == ["folder", str(tmp_path / "folder")]

    def test_mistakes(self, hub, tmp_path):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            load_backbone("hf:net", weights="absent")
        with pytest.raises(ValueError, match="'hf:' accepts a folder"):
            load_backbone("hf:net", weights="random")
        hub.missing = ["embedding.weight"]
        with pytest.raises(ValueError, match=r"lacks weights of the model \(embedding\.weight\)"):
            load_backbone("hf:net")
        hub.module.AutoModel.from_pretrained = offline
        with pytest.raises(FileNotFoundError, match=r"'hf:net' .*huggingface\.co/net and pass weights=FOLDER") as error:
            load_backbone("hf:net")
        sentence(error)


class TestOnesOwn:
    CODE = """
import torch
from dlcft.images import Preprocess

def plain():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 40 * 50, 5))

def prepared():
    return torch.nn.Flatten(), Preprocess(size=(2, 2))

def wrong():
    return 3
"""

    @pytest.fixture(autouse=True)
    def module(self, tmp_path, monkeypatch):
        (tmp_path / "my_networks.py").write_text(self.CODE)
        (tmp_path / "needs_more.py").write_text("import absent_package")
        yield
        sys.modules.pop("my_networks", None)

    def test_by_module_and_factory(self, tmp_path):
        path = list(sys.path)
        backbone = rebuilt(load_backbone("my_networks:plain"))
        assert sys.path == path
        assert backbone.name == "my_networks:plain"
        assert backbone.preprocess == Preprocess()
        assert features(backbone).shape == (2, 5)
        assert features(load_backbone("my_networks:prepared")).shape == (2, 12)
        torch.save({k: torch.ones_like(t) for k, t in backbone.module.state_dict().items()}, tmp_path / "ones.pth")
        filled = rebuilt(load_backbone("my_networks:plain", weights="ones.pth"))
        assert bool((filled.module[1].weight == 1).all())

    @pytest.mark.parametrize(
        ("name", "match"),
        [
            ("my_network:plain", "there is no module 'my_network'"),
            ("my_networks.deep:plain", "there is no module"),
            ("my_networks:plane", "Did you mean 'plain'"),
            ("my_networks:wrong", "returned a int"),
            ("my_networks:", "unknown backbone"),
            (":plain", "unknown backbone"),
            ("../my_networks:plain", "unknown backbone"),
        ],
    )
    def test_mistakes(self, name, match):
        with pytest.raises(ValueError, match=match) as error:
            load_backbone(name)
        sentence(error)

    def test_random_weights_cannot_be_asked_for(self):
        with pytest.raises(ValueError, match="'my_networks:plain' accepts a file"):
            load_backbone("my_networks:plain", weights="random")

    def test_an_error_inside_the_module_is_the_users_to_see(self):
        with pytest.raises(ModuleNotFoundError, match="absent_package"):
            load_backbone("needs_more:net")
