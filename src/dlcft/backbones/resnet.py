"""ResNet-18 with torchvision's parameter names.

References:
    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), https://arxiv.org/abs/1512.03385
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from dlcft.network.inputs import use_channels_last


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = activation()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = activation()
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map N×C×H×W to N×C'×H'×W'."""
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(y + self.downsample(x))  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """ResNet-18 as a feature extractor: a batch of images to feature vectors of 8·width entries.

    Args:
        width: channels of the first stage; 64 is the standard network.
        stem: "imagenet" is 7×7, stride 2, with max-pool; "small" is 3×3, stride 1, for images of 32 pixels.
        slope: None for ReLU, else the slope of LeakyReLU.
        classes: None for feature vectors, else append a linear classifier `fc`.
    """

    def __init__(
        self,
        width: int = 64,
        stem: Literal["imagenet", "small"] = "imagenet",
        slope: float | None = None,
        classes: int | None = None,
    ) -> None:
        super().__init__()

        def activation() -> nn.Module:
            return nn.ReLU(inplace=True) if slope is None else nn.LeakyReLU(slope, inplace=True)

        if stem == "imagenet":
            self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, 2, 1)
        elif stem == "small":
            self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
            self.maxpool = nn.Identity()
        else:
            raise ValueError(f"stem is {stem!r}; it must be 'imagenet' or 'small'.")
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = activation()
        widths = [width * 2**stage for stage in range(4)]
        stages = [
            nn.Sequential(BasicBlock(before, after, stride, activation), BasicBlock(after, after, 1, activation))
            for before, after, stride in zip([width, *widths], widths, [1, 2, 2, 2], strict=False)
        ]
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc: nn.Module = nn.Identity() if classes is None else nn.Linear(widths[-1], classes)
        use_channels_last(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map N×3×H×W images to N feature vectors (or logits)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]
