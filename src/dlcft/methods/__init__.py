"""Methods: the memory of past tasks. One algorithm a file; recipes name them with their settings."""

from dlcft.methods.base import Batch, Loop, Method, PastOfHead, Task
from dlcft.methods.finetune import Finetune
from dlcft.methods.lwf import LwF
from dlcft.methods.quadratic import Quadratic
from dlcft.methods.recipes import RECIPES, Recipe
from dlcft.methods.replay import Buffer, Replay
from dlcft.methods.ridge import Ridge
from dlcft.methods.settings import Features, Network, OnePass, Training, setting

__all__ = [
    "RECIPES",
    "Batch",
    "Buffer",
    "Features",
    "Finetune",
    "Loop",
    "LwF",
    "Method",
    "Network",
    "OnePass",
    "PastOfHead",
    "Quadratic",
    "Recipe",
    "Replay",
    "Ridge",
    "Task",
    "Training",
    "setting",
]
