"""Methods: what is remembered of past tasks, and how it is paid for. The training loop belongs to none of them."""

from dlcft.methods.base import Batch, Finetune, Method, PastOfHead, Task
from dlcft.methods.closed_form import Ridge
from dlcft.methods.distillation import LwF
from dlcft.methods.quadratic import Quadratic
from dlcft.methods.replay import Replay

__all__ = ["Batch", "Finetune", "LwF", "Method", "PastOfHead", "Quadratic", "Replay", "Ridge", "Task"]
