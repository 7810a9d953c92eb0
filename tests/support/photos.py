"""Photos for backbones, and what every backbone must do."""

import json

import torch

from dlcft.backbones import load_backbone
from dlcft.learner.build import fingerprint

PHOTOS = torch.randint(0, 256, (2, 3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


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
