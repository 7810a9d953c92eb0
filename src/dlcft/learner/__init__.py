"""The one object that users hold."""

from dlcft.learner.learner import Learner

__all__ = ["Learner"]
