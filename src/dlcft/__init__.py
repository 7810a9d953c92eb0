"""dlcft: continually fine-tune a pre-trained network."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dlcft.backbones.opening import load as load
    from dlcft.curvature.estimate import estimate as estimate
    from dlcft.curvature.form import Curvature as Curvature
    from dlcft.curvature.losses import CrossEntropy as CrossEntropy
    from dlcft.curvature.losses import ScaledMSE as ScaledMSE
    from dlcft.curvature.memory import Memory as Memory
    from dlcft.learner.learner import Learner as Learner
    from dlcft.network.classifier import Classifier as Classifier
    from dlcft.network.linearize import Linearized as Linearized
    from dlcft.network.prepare import fold_batchnorm as fold_batchnorm
    from dlcft.network.prepare import relu_to_leaky as relu_to_leaky

# Public names and their homes. They are imported when first used: the command line's --help needs none of them.
_HOMES = {
    "Classifier": "network.classifier",
    "CrossEntropy": "curvature.losses",
    "Curvature": "curvature.form",
    "Learner": "learner.learner",
    "Linearized": "network.linearize",
    "Memory": "curvature.memory",
    "ScaledMSE": "curvature.losses",
    "estimate": "curvature.estimate",
    "fold_batchnorm": "network.prepare",
    "load": "backbones.opening",
    "relu_to_leaky": "network.prepare",
}
__all__ = [  # noqa: RUF022 (the order of a first reading)
    "Learner",
    "load",
    "Linearized",
    "fold_batchnorm",
    "relu_to_leaky",
    "Classifier",
    "ScaledMSE",
    "CrossEntropy",
    "estimate",
    "Curvature",
    "Memory",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dlcft' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dlcft.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
