"""Sources of inputs: arrays, items read one by one, and files; each has a length and is fetched by index."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dlcft.data.files import existing, read_inputs
from dlcft.data.images import Preprocess, image_tensor, is_pillow_image, most_pixels, read_image
from dlcft.data.shards import Shards
from dlcft.network.inputs import Input

_HASHED = 64  # samples whose content a fingerprint covers
Tokenizer = Callable[[list[str]], Any]  # texts to a network's inputs: a tensor, or a dict of tensors
ACCEPTED_X = (
    "a tensor or numpy array, a tuple or dict of them, a list with one array or image file a sample, or the path of "
    "an image folder, an image, .tar shards, a .csv, .npz or .npy file; with a tokenizer, a list of texts or a .csv or "
    ".tar of them"
)


class Source(ABC):
    """Inputs by index."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, indices: Tensor) -> Input:
        """The prepared inputs at these positions, as one batch."""

    @abstractmethod
    def raw(self, index: int) -> Any:
        """One input as the user gave it; the bytes of a file."""

    def name(self, index: int) -> str:
        """The name of an input in a table: its file, its text, or its number."""
        return str(index)

    def describe(self, index: int) -> str:
        """The name of an input in a sentence."""
        return f"sample {index}"


class Arrays(Source):
    """Tensors or arrays whose first axis counts samples; memory-mapped ones are read batch by batch."""

    def __init__(self, x: Any, preprocess: Preprocess) -> None:
        self._x = tree_map(_checked, _plain(x), is_leaf=lambda part: isinstance(part, list))
        self._preprocess = preprocess
        lengths = {len(part) for part in tree_leaves(self._x)}
        if len(lengths) != 1:
            raise ValueError(f"the inputs have {sorted(lengths)} samples; every part must have the same number.")
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Tensor) -> Input:
        return self._preprocess(tree_map(lambda part: _rows(part, indices), self._x))

    def raw(self, index: int) -> Any:
        return tree_map(lambda part: part[index], self._x)


class Items(Source):
    """Inputs that a function gives one by one: those of a data set, of a list, or of files.

    Args:
        get: gives the input at an index (with `collate`, one item for it).
        length: the number of inputs.
        preprocess: prepares the images among them.
        files: their names, if they are files.
        collate: makes a batch from a list of items; by default inputs of equal shape are stacked.
        tokenizer: makes a batch from a list of items that are texts.
    """

    def __init__(
        self,
        get: Callable[[int], Any],
        length: int,
        preprocess: Preprocess,
        *,
        files: Sequence[str] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._get, self._length, self._preprocess, self._files = get, length, preprocess, files
        self._texts = tokenizer is not None and length > 0 and isinstance(get(0), str)
        self._collate = tokenizer if self._texts else collate
        self._first: tuple[str, list[tuple[int, ...]]] | None = None

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Tensor) -> Input:
        positions = indices.tolist()
        if self._collate is None:
            inputs = [self._prepared(index) for index in positions]
            return tree_map(lambda *parts: torch.stack(parts), *inputs)  # type: ignore[no-any-return]
        batch = self._collate([self._get(index) for index in positions])
        batch = _tensors(tuple(batch) if isinstance(batch, list) else batch)  # default_collate makes lists of tuples
        lengths = {len(part) if part.dim() else 1 for part in tree_leaves(batch)}
        if lengths != {len(positions)}:
            maker = "the tokenizer" if self._texts else "collate_fn"
            raise ValueError(f"{maker} made {sorted(lengths)} inputs of {len(positions)} samples; it must keep all.")
        return self._preprocess(batch)

    def raw(self, index: int) -> Any:
        return self._get(index) if self._files is None else Path(self._files[index]).read_bytes()

    def name(self, index: int) -> str:
        if self._texts:
            return str(self._get(index))
        return super().name(index) if self._files is None else self._files[index]

    def describe(self, index: int) -> str:
        return super().describe(index) if self._files is None else f"the image file {self._files[index]}"

    def _prepared(self, index: int) -> Input:
        batch = self._preprocess(tree_map(lambda part: part[None], _tensors(self._get(index))))
        shapes = [tuple(part.shape[1:]) for part in tree_leaves(batch)]
        if self._first is None:
            self._first = self.describe(index), shapes
        name, expected = self._first
        if shapes != expected:
            here, there = (", ".join(map(str, these)) for these in (shapes, expected))
            raise ValueError(
                f"{self.describe(index)} has shape {here} and {name} has {there}; one shape is needed: set "
                "Preprocess(size=(height, width)) for images, or give a DataLoader whose collate_fn pads."
            )
        return tree_map(lambda part: part[0], batch)  # type: ignore[no-any-return]


class ShardItems(Items):
    """Images or texts in .tar files."""

    def __init__(self, shards: Shards, preprocess: Preprocess, tokenizer: Tokenizer | None) -> None:
        super().__init__(
            lambda index: shards.read(index, preprocess.channels), len(shards), preprocess, tokenizer=tokenizer
        )
        self._shards = shards

    def raw(self, index: int) -> Any:
        return self._shards.content(index)

    def name(self, index: int) -> str:
        return super().name(index) if self._texts else self._shards.name(index)

    def describe(self, index: int) -> str:
        return self._shards.name(index)


class Part(Source):
    """The inputs of another source at these positions, which may repeat."""

    def __init__(self, source: Source, indices: Tensor) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def fetch(self, indices: Tensor) -> Input:
        return self._source.fetch(self._indices[indices])

    def raw(self, index: int) -> Any:
        return self._source.raw(int(self._indices[index]))

    def name(self, index: int) -> str:
        return self._source.name(int(self._indices[index]))

    def describe(self, index: int) -> str:
        return self._source.describe(int(self._indices[index]))


def make_source(x: Any, preprocess: Preprocess, tokenizer: Tokenizer | None = None) -> Source:
    """The source for inputs in any form but a data set."""
    if isinstance(x, str | Path):
        x = read_inputs(x, text=tokenizer is not None)
    if isinstance(x, Shards):
        return ShardItems(x, preprocess, tokenizer)
    if is_pillow_image(x):
        x = [x]
    if isinstance(x, np.ndarray) and x.dtype.kind == "U":
        x = x.tolist()
    if tokenizer is not None and isinstance(x, list | tuple) and len(x) and all(isinstance(part, str) for part in x):
        return Items(x.__getitem__, len(x), preprocess, tokenizer=tokenizer)
    if isinstance(x, list | tuple) and len(x) and all(isinstance(part, str | Path) for part in x):
        files = [existing(path) for path in x]
        if others := [path for path in files if not path.is_file()]:  # reading a pipe or device may never end
            kind = "a folder" if others[0].is_dir() else "no regular file"
            raise ValueError(f"{others[0]} is {kind}; the path of an image is needed.")
        most_pixels()  # a wrong limit is told before any image is skipped for it
        names = [str(path) for path in files]
        return Items(lambda index: read_image(names[index], preprocess.channels), len(x), preprocess, files=names)
    if isinstance(x, list):
        return Items(x.__getitem__, len(x), preprocess)
    if isinstance(x, Tensor | np.ndarray | Mapping) or (isinstance(x, tuple) and len(x)):
        return Arrays(x, preprocess)
    raise TypeError(f"x is a {type(x).__name__}; it may be {ACCEPTED_X}.")


def fingerprint(source: Source) -> str:
    """A short hash of the number of inputs and of the content of up to 64 of them, before any preprocessing.

    If inputs differ each time they are read (random augmentation), the content is left out.
    """
    count = len(source)
    chosen = sorted({position * count // _HASHED for position in range(_HASHED)})
    once, again = (_hash(_content(source.raw(index)) for index in chosen) for _ in range(2))
    return _hash([str(count).encode(), (once if once == again else "random").encode()])


def _tensors(x: Any) -> Any:
    """The same tree with every leaf as a tensor; a list is a leaf."""
    return tree_map(_tensor, _plain(x), is_leaf=lambda part: isinstance(part, list))


def _tensor(value: Any) -> Tensor:
    """One sample's tensor, array, Pillow image, number or list of numbers as a tensor."""
    if isinstance(value, Tensor):
        return value.detach()
    if is_pillow_image(value):
        return image_tensor(value)
    if isinstance(value, list | int | float | np.generic | np.ndarray):
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"an input is a list of lists that differ in length ({error}); pad them.") from error
        if array.dtype.kind in "biuf" and array.dtype.itemsize <= 8:
            tensor = _from_numpy(array.copy())
            return tensor.float() if isinstance(value, list | float) and tensor.is_floating_point() else tensor
        raise TypeError(f"an input is a {type(value).__name__} of {array.dtype}; numbers are needed.")
    raise TypeError(f"an input is a {type(value).__name__}; tensors, arrays, images or numbers are needed.")


def _plain(x: Any) -> Any:
    """Any mapping as a dict: torch's tree functions know no other."""
    return dict(x) if isinstance(x, Mapping) else x


def _checked(part: Any) -> Tensor | np.ndarray[Any, Any]:
    if isinstance(part, list):
        part = _tensor(part)
    if not isinstance(part, Tensor | np.ndarray):
        raise TypeError(f"the inputs hold a {type(part).__name__}; tensors or numpy arrays are needed.")
    if isinstance(part, np.ndarray) and (part.dtype.kind not in "biuf" or part.dtype.itemsize > 8):
        raise ValueError(f"the inputs hold an array of {part.dtype}; numbers of at most 64 bits are needed.")
    if isinstance(part, Tensor) and part.layout != torch.strided:
        raise ValueError(f"the inputs hold a tensor of layout {part.layout}; give a dense one, x.to_dense().")
    if part.ndim == 0:
        raise ValueError("the inputs hold a single number; the first axis must count samples.")
    if 0 in part.shape[1:]:
        raise ValueError(f"the inputs have shape {tuple(part.shape)}; each of them must hold something.")
    return part


def _rows(part: Tensor | np.ndarray[Any, Any], indices: Tensor) -> Tensor:
    return part[indices].detach() if isinstance(part, Tensor) else _from_numpy(part[indices.numpy()])


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _content(raw: Any) -> bytes:
    """The bytes of one raw input."""
    content = []
    for part in tree_leaves(_plain(raw)):
        if isinstance(part, Tensor):
            part = part.detach().cpu()
            part = part.view(torch.int16) if part.dtype == torch.bfloat16 else part  # numpy has no bfloat16
        if isinstance(part, Tensor | np.ndarray | np.generic) or is_pillow_image(part):
            array = np.asarray(part)
            content.append(f"{array.dtype.str} {array.shape}".encode() + array.tobytes())
        elif isinstance(part, bytes):
            content.append(part)
        else:  # the text of other objects may hold an address
            content.append(repr(part if isinstance(part, str | int | float) else type(part)).encode())
    return b"|".join(content)
