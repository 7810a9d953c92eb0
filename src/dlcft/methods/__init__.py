"""Methods: what is remembered of past tasks, and how it is paid for. The training loop belongs to none of them."""

from dlcft.methods.base import Batch, Method, PastOfHead, Task
from dlcft.methods.finetune import Finetune
from dlcft.methods.lwf import LwF
from dlcft.methods.quadratic import Quadratic
from dlcft.methods.replay import Replay
from dlcft.methods.ridge import Ridge

__all__ = ["Batch", "Finetune", "LwF", "Method", "PastOfHead", "Quadratic", "Replay", "Ridge", "Task"]
