"""Commands on streams of tasks and on backbones, as a person gives them."""

import json
from typing import get_args, get_type_hints

import pytest
import torch
from safetensors.torch import save_file

from dlcft.backbones import ResNet18, load_backbone
from dlcft.bench.choices import CHOICES, SCALES
from dlcft.bench.experiment import Result
from dlcft.bench.paper import ARTEFACTS
from dlcft.cli import main
from dlcft.cli.paper import reproduce

TINY = ["--data", "digits", "--size", "8", "--width", "2", "--epochs", "1"]
SMALL = ["--classes", "4", "--per-class", "6", "--size", "8", "--method", "ridge"]


@pytest.fixture
def told(capsys, tmp_path, monkeypatch):
    """Gives a command, in a folder of its own, and what it has printed."""
    monkeypatch.chdir(tmp_path)

    def give(*words):
        main(list(words))
        return capsys.readouterr().out

    return give


def test_pretrain_is_read_when_it_is_done_and_its_file_is_a_backbone(told, tmp_path):
    command = ["pretrain", *TINY, "--save", "net.safetensors"]
    first = json.loads(told(*command, "--json"))
    assert first["file"] == "net.safetensors"
    assert len(first["losses"]) == 1
    written = (tmp_path / "net.safetensors").stat().st_mtime_ns
    assert told(*command) == f"top-1 {first['top1']:.2%}  net.safetensors\n"
    assert (tmp_path / "net.safetensors").stat().st_mtime_ns == written
    with pytest.raises(SystemExit):
        main([*command, "--seed", "1"])
    backbone = load_backbone("resnet18-32", weights="net.safetensors")
    assert backbone.preprocess.size == (8, 8)
    assert backbone.module.relu.negative_slope == 0.1
    said = told("run", *SMALL, "--backbone", "resnet18-32", "--weights", "net.safetensors")
    assert said.count("%") == 1


def test_pretrain_converts_relu_at_the_paper_s_rate(told, tmp_path):
    torch.manual_seed(0)
    network = ResNet18(2, "small", None, classes=10)
    save_file(network.state_dict(), tmp_path / "relu.safetensors", metadata={"slope": "0.0"})
    told("pretrain", *TINY, "--slope", "0.2", "--convert", "relu.safetensors", "--save", "leaky.safetensors")
    before, after = (load_backbone("resnet18-32", weights=f"{name}.safetensors") for name in ("relu", "leaky"))
    assert after.module.relu.negative_slope == 0.2
    moved = (after.module.conv1.weight - before.module.conv1.weight).abs().max()
    assert 0 < moved < 1e-2, "a step of lr 1e-4"


def test_run_takes_several_methods_and_seeds_at_once(told, tmp_path):
    lines = told("run", *SMALL, "--method", "none", "--seeds", "2", "--set", "batch_size=16", "--jobs", "2", "--json")
    results = [json.loads(line) for line in lines.splitlines()]
    named = [(result["experiment"]["method"], result["experiment"]["seed"]) for result in results]
    assert named == [("ridge", 0), ("ridge", 1), ("none", 0), ("none", 1)]
    assert {result["experiment"]["settings"]["batch_size"] for result in results} == {16}
    files = sorted((tmp_path / "runs").glob("*.json"))
    assert [Result.read(file).to_dict() in results for file in files] == [True] * 4


@pytest.mark.parametrize("what", ["methods", "curvatures", "datasets", "backbones", "artefacts", "choices"])
def test_lists_are_the_same_as_json(told, what):
    names = json.loads(told("list", what, "--json"))
    assert names
    assert told("list", what).splitlines() == names


def test_choices_are_listed_with_their_origin(told):
    lines = told("list", "choices").splitlines()
    assert len(lines) == len(CHOICES)
    for line, (name, choice) in zip(lines, CHOICES.items(), strict=True):
        assert line == f"{name} ({choice.origin}): {choice.value}. {choice.reason}"


def test_every_artefact_and_scale_has_its_word():
    hints = get_type_hints(reproduce)
    assert get_args(hints["artefact"]) == (*ARTEFACTS, "all")
    assert get_args(hints["scale"]) == tuple(SCALES)
