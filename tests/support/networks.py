"""Small networks of every family that tests linearise, each in float64 with an input that fits."""

import functools
import importlib
import sys

import pytest
import torch
from torch import nn

from dlcft.backbones import ResNet18


def randomize_norms(network, seed=0):
    """BatchNorm statistics and scales away from their initial 0 and 1, as in a trained network."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.running_var, module.weight):
                if tensor is not None:
                    tensor.data.uniform_(0.5, 1.5, generator=generator)
            for tensor in (module.running_mean, module.bias):
                if tensor is not None:
                    tensor.data.normal_(0, 0.3, generator=generator)
    return network


class VGG(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(24, 8), nn.ReLU(True), nn.Dropout(), nn.Linear(8, 5))

    def forward(self, x):
        x = self.features(x)
        return self.head(x.view(x.shape[0], -1))


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x):
        gate = torch.relu(self.down(x.mean((2, 3), keepdim=True)))
        return x * torch.sigmoid(self.up(gate))


class MobileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6(True))
        self.depthwise = nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1, groups=4, bias=False), nn.BatchNorm2d(4), nn.SiLU(True))
        self.excite = SqueezeExcite(4)
        self.project = nn.Sequential(nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6))
        self.act = nn.Hardswish()

    def forward(self, x):
        return self.act(self.project(self.excite(self.depthwise(self.stem(x))))).mean((2, 3))


class PreActivation(nn.Module):
    """A BatchNorm that follows no convolution, and a convolution whose output has two uses."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn0, self.bn1, self.bn2 = nn.BatchNorm2d(3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)

    def forward(self, x):
        y = self.conv1(self.bn0(x))
        return (y + self.conv2(torch.tanh(self.bn1(y))) + self.bn2(self.conv2(y))).mean((2, 3))


class ViT(nn.Module):
    """Patches, a class token, a position embedding and torch's own attention."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return (x + self.mlp(self.norm2(x)))[:, 0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, tokens):
        return self.encoder(self.embed(tokens)).mean(1)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.recurrent = kind(4, 5, num_layers=2, batch_first=True, dropout=0.5)
        self.out = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.out(self.recurrent(self.embed(tokens))[0][:, -1])


class Shared(nn.Module):
    """One layer used twice, and a second module that holds the same weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))


class Windows(nn.Module):
    """Folds tokens into the batch, as attention over windows does."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        tokens = torch.tanh(self.inner(x.flatten(0, 1))).unflatten(0, x.shape[:2])
        return self.out(tokens.mean(1))


class CachedBias(nn.Module):
    """Keeps a function of its parameters in evaluation mode, as LeViT does."""

    def __init__(self):
        super().__init__()
        self.bias, self.layer, self.bias_cache = nn.Parameter(torch.randn(6)), nn.Linear(6, 4), {}

    def train(self, mode=True):
        self.bias_cache = {} if mode else self.bias_cache
        return super().train(mode)

    def forward(self, x):
        if "cpu" not in self.bias_cache:
            self.bias_cache["cpu"] = self.bias.square()
        return self.layer(x + self.bias_cache["cpu"])


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.ReLU(inplace=True), nn.Linear(5, 4))


def images(size=8):
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tokens():
    return torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(1))


def vectors():
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


NETWORKS = {
    "resnet18-imagenet-stem": (lambda: ResNet18(2), lambda: images(33)),
    "resnet18-small-stem": (lambda: ResNet18(2, "small", 0.1), lambda: images(9)),
    "vgg": (VGG, images),
    "mobilenet": (MobileNet, images),
    "pre-activation": (PreActivation, images),
    "vit": (ViT, images),
    "transformer-encoder": (Encoder, tokens),
    "lstm": (lambda: Recurrent(nn.LSTM), tokens),
    "gru": (lambda: Recurrent(nn.GRU), tokens),
    "shared": (Shared, vectors),
    "mlp": (MLP, vectors),
}


def build(name):
    """The network in evaluation mode and a batch for it."""
    make, batch = NETWORKS[name]
    torch.manual_seed(0)
    return randomize_norms(make()).double().eval(), batch()


def needs(package, extra="architectures"):
    """A package of an extra, or skip the test."""
    if package in ("timm", "torchvision", "transformers") or extra != "architectures":  # which import torchvision
        _mend_torchvision()
    return pytest.importorskip(package, reason=f"{package} is not installed; pip install 'dlcft[{extra}]'")


@functools.cache
def _mend_torchvision():
    """A torchvision that was built for another torch imports once the operators exist that it describes.

    Returns their library, because they are gone when it is.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return None
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    else:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
