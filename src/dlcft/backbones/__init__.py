"""Networks to start from, by name: ResNet-18, the shipped one, those of other packages, one's own."""

from dlcft.backbones.files import weights_folder
from dlcft.backbones.load import MEAN, STD, Backbone, load_backbone, load_classifier, shipped_resnet18
from dlcft.backbones.packages import BACKBONES
from dlcft.backbones.resnet import ResNet18

__all__ = [
    "BACKBONES",
    "MEAN",
    "STD",
    "Backbone",
    "ResNet18",
    "load_backbone",
    "load_classifier",
    "shipped_resnet18",
    "weights_folder",
]
