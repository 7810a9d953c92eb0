"""Images by name or by path: `load`."""

from dlcft.bench.datasets.catalogue import NAMES, load
from dlcft.bench.datasets.image_set import ImageFiles, ImageSet

__all__ = ["NAMES", "ImageFiles", "ImageSet", "load"]
