"""Backbones of other packages, which stand-ins play, and one's own."""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dlcft.backbones import load_backbone
from dlcft.backbones.packages import Pooled
from dlcft.data.images import Preprocess
from tests.support.photos import PHOTOS, features, rebuilt, sentence

pytestmark = pytest.mark.usefixtures("weights_folder")


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

    def test_a_package_that_is_there_and_cannot_be_imported(self, monkeypatch, tmp_path):
        for module in [module for module in sys.modules if module.partition(".")[0] == "timm"]:
            monkeypatch.delitem(sys.modules, module)
        (tmp_path / "timm").mkdir()
        for code, why in (("import not_here", "No module named 'not_here'"), ("raise RuntimeError('nms')", "nms")):
            (tmp_path / "timm" / "__init__.py").write_text(code)
            monkeypatch.syspath_prepend(tmp_path)
            with pytest.raises(ImportError, match=f"timm, which is installed but cannot be imported .*{why}") as error:
                load_backbone("timm:a")
            assert "pip install" not in sentence(error)


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
        with pytest.raises(
            ImportError, match=r"installed but cannot be imported \(RuntimeError: operator does not exist\)"
        ):
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
            def from_pretrained(place, *, output_loading_info, trust_remote_code):
                assert not trust_remote_code
                hub.places.append(place)
                model = Transformer()
                model.load_state_dict(state)
                return model, {"missing_keys": list(hub.missing)}

        class AutoImageProcessor:
            @staticmethod
            def from_pretrained(place, *, trust_remote_code):
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
from dlcft.data.images import Preprocess

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


def test_the_mean_of_tokens_leaves_padding_out():
    class Tokens(nn.Module):
        def forward(self, ids, attention_mask=None, return_dict=False):
            return {"last_hidden_state": ids[:, :, None].float().expand(-1, -1, 2)}

    pooled = Pooled(Tokens(), mean=True)
    ids = torch.tensor([[2, 4, 99], [1, 2, 3]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert pooled(ids=ids, attention_mask=mask).tolist() == [[3, 3], [2, 2]]
    assert pooled(ids=ids).tolist() == [[35, 35], [2, 2]]
