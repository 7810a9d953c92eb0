"""Images by name or by path: `load`, and the demo's `digits`."""

from dlcft.bench.datasets.catalogue import NAMES, load
from dlcft.bench.datasets.embedded import Images, digits
from dlcft.bench.datasets.image_set import ImageFiles, ImageSet

__all__ = ["NAMES", "ImageFiles", "ImageSet", "Images", "digits", "load"]
