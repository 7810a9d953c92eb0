"""Where inputs come from: arrays, items read one by one, and files; each can be counted and fetched by index."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dlcft.data.files import existing, read_inputs
from dlcft.data.images import Preprocess, image_tensor, is_pillow_image, read_image
from dlcft.network.inputs import Input

_HASHED = 64  # samples whose content a fingerprint covers
Tokenizer = Callable[[list[str]], Any]  # texts to a network's inputs: a tensor, or a dict of tensors
ACCEPTED_X = (
    "a tensor or numpy array, a tuple or dict of them, a list with one array or image file a sample, or the path of "
    "an image folder, an image, a .csv, .npz or .npy file; with a tokenizer, a list of texts or a .csv of them"
)


class Source(Protocol):
    """Inputs by index."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor) -> Input:
        """The prepared inputs at these positions, as one batch."""
        ...

    def raw(self, index: int) -> Any:
        """One input as it was handed in."""
        ...

    def name(self, index: int) -> str:
        """What to call it in a sentence."""
        ...

    def called(self, index: int) -> str:
        """What to call it in a table: its file, its text, or its number."""
        ...


class Arrays:
    """Tensors or arrays whose first axis counts samples; memory-mapped ones are read batch by batch.

    Raises:
        TypeError: when something else is among them.
        ValueError: when they hold no numbers, or differ in length.
    """

    def __init__(self, x: Any, preprocess: Preprocess) -> None:
        self._x = tree_map(_checked, _plain(x), is_leaf=lambda part: isinstance(part, list))
        self._preprocess = preprocess
        lengths = {len(part) for part in tree_leaves(self._x)}
        if len(lengths) != 1:
            raise ValueError(f"the inputs have {sorted(lengths)} samples; every part must have as many.")
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Tensor) -> Input:
        """See `Source`."""
        return self._preprocess(tree_map(lambda part: _rows(part, indices), self._x))

    def raw(self, index: int) -> Any:
        """See `Source`."""
        return tree_map(lambda part: part[index], self._x)

    def name(self, index: int) -> str:
        """See `Source`."""
        return f"sample {index}"

    def called(self, index: int) -> str:
        """See `Source`."""
        return str(index)


class Items:
    """Inputs that a function gives one by one: a data set's, a list's, or those of files.

    Args:
        get: the input at an index (with `collate`, whatever that takes).
        length: how many there are.
        preprocess: for the images among them.
        files: their names, if they are files.
        collate: makes a batch of inputs from a list of what `get` gave; by default equal shapes are stacked.
    """

    _maker = "collate_fn"

    def __init__(
        self,
        get: Callable[[int], Any],
        length: int,
        preprocess: Preprocess,
        *,
        files: Sequence[str] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._get, self._length, self._preprocess, self._collate = get, length, preprocess, collate
        self.files = files
        self._first: tuple[str, list[tuple[int, ...]]] | None = None

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Tensor) -> Input:
        """See `Source`.

        Raises:
            ValueError: when inputs differ in shape.
        """
        positions = indices.tolist()
        if self._collate is None:
            inputs = [self._prepared(index) for index in positions]
            return tree_map(lambda *parts: torch.stack(parts), *inputs)  # type: ignore[no-any-return]
        batch = self._collate([self._get(index) for index in positions])
        batch = _tensors(tuple(batch) if isinstance(batch, list) else batch)  # default_collate makes lists of tuples
        lengths = {len(part) if part.dim() else 1 for part in tree_leaves(batch)}
        if lengths != {len(positions)}:
            raise ValueError(
                f"{self._maker} made {sorted(lengths)} inputs of {len(positions)} samples; it must keep all."
            )
        return self._preprocess(batch)

    def raw(self, index: int) -> Any:
        """See `Source`; a file's bytes."""
        return self._get(index) if self.files is None else Path(self.files[index]).read_bytes()

    def name(self, index: int) -> str:
        """See `Source`."""
        return f"sample {index}" if self.files is None else f"the image file {self.files[index]}"

    def called(self, index: int) -> str:
        """See `Source`."""
        return str(index) if self.files is None else self.files[index]

    def _prepared(self, index: int) -> Input:
        batch = self._preprocess(tree_map(lambda part: part[None], _tensors(self._get(index))))
        shapes = [tuple(part.shape[1:]) for part in tree_leaves(batch)]
        if self._first is None:
            self._first = self.name(index), shapes
        name, expected = self._first
        if shapes != expected:
            raise ValueError(
                f"{self.name(index)} has shape {_shown(shapes)} and {name} has {_shown(expected)}; one shape is "
                "needed: set Preprocess(size=(height, width)) for images, or give a DataLoader whose collate_fn pads."
            )
        return tree_map(lambda part: part[0], batch)  # type: ignore[no-any-return]


class Texts(Items):
    """Texts that a function gives one by one, and a tokenizer makes into a network's inputs batch by batch."""

    _maker = "the tokenizer"

    def __init__(self, get: Callable[[int], Any], length: int, tokenizer: Tokenizer) -> None:
        super().__init__(get, length, Preprocess(), collate=tokenizer)

    def called(self, index: int) -> str:
        """See `Source`."""
        return str(self.raw(index))


class Part:
    """Some of the inputs of another source, each as often as its index is given."""

    def __init__(self, source: Source, indices: Tensor) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def fetch(self, indices: Tensor) -> Input:
        """See `Source`."""
        return self._source.fetch(self._indices[indices])

    def raw(self, index: int) -> Any:
        """See `Source`."""
        return self._source.raw(int(self._indices[index]))

    def name(self, index: int) -> str:
        """See `Source`."""
        return self._source.name(int(self._indices[index]))

    def called(self, index: int) -> str:
        """See `Source`."""
        return self._source.called(int(self._indices[index]))


def make_items(get: Callable[[int], Any], length: int, preprocess: Preprocess, tokenizer: Tokenizer | None) -> Items:
    """Inputs that a function gives one by one: texts if there is a tokenizer for them."""
    if tokenizer is not None and length and isinstance(get(0), str):
        return Texts(get, length, tokenizer)
    return Items(get, length, preprocess)


def make_source(x: Any, preprocess: Preprocess, tokenizer: Tokenizer | None = None) -> Source:
    """Inputs in any form but a data set.

    Raises:
        TypeError: when the form is none of those accepted.
        ValueError: when its content is not.
    """
    if isinstance(x, str | Path):
        x = read_inputs(x, text=tokenizer is not None)
    if isinstance(x, np.ndarray) and x.dtype.kind == "U":
        x = x.tolist()
    if tokenizer is not None and isinstance(x, list | tuple) and len(x) and all(isinstance(part, str) for part in x):
        return Texts(x.__getitem__, len(x), tokenizer)
    if isinstance(x, list | tuple) and len(x) and all(isinstance(part, str | Path) for part in x):
        names = [str(_existing_file(path)) for path in x]
        return Items(lambda index: read_image(names[index], preprocess.channels), len(x), preprocess, files=names)
    if isinstance(x, list):
        return Items(x.__getitem__, len(x), preprocess)
    if isinstance(x, Tensor | np.ndarray | Mapping) or (isinstance(x, tuple) and len(x)):
        return Arrays(x, preprocess)
    raise TypeError(f"x is a {type(x).__name__}; it may be {ACCEPTED_X}.")


def _existing_file(path: str | Path) -> Path:
    found = existing(path)
    if found.is_dir():
        raise ValueError(f"{found} is a folder; the path of an image is needed.")
    return found


def fetch(source: Source, indices: Tensor) -> Input:
    """The inputs at these positions.

    Raises:
        ValueError: when one cannot be read, has another shape or holds a number that is not finite.
    """
    x = source.fetch(indices)
    for part in tree_leaves(x):
        if not part.is_floating_point():
            continue
        # among several inputs −inf is a usual way to mask
        broken = ~part.isfinite() if isinstance(x, Tensor) else part.isnan()
        if broken.any():
            position = int(broken.reshape(len(part), -1).any(1).nonzero()[0])
            value = float(part[position][broken[position]].flatten()[0])
            raise ValueError(f"{source.name(int(indices[position]))} holds {value}; finite numbers are needed.")
    return x


def fingerprint(source: Source) -> str:
    """A short hash of the number of inputs and the content of up to 64 of them, before any preprocessing.

    Where inputs differ each time they are read (random augmentation), their content is left out.
    """
    count = len(source)
    chosen = sorted({position * count // _HASHED for position in range(_HASHED)})
    once, again = (_hash(_content(source.raw(index)) for index in chosen) for _ in range(2))
    return _hash([str(count).encode(), (once if once == again else "random").encode()])


def _tensors(x: Any) -> Any:
    """The same tree with a tensor at each leaf; a list is a leaf."""
    return tree_map(_tensor, _plain(x), is_leaf=lambda part: isinstance(part, list))


def _tensor(value: Any) -> Tensor:
    """A tensor of one sample's tensor, array, Pillow image, number or list of numbers.

    Raises:
        TypeError: when it is something else.
    """
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
    """Any mapping as a dict, which is what the tree functions know."""
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


def _shown(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes))


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _content(raw: Any) -> bytes:
    """The bytes of one input as it was handed in."""
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
        else:  # of other objects the text may hold an address
            content.append(repr(part if isinstance(part, str | int | float) else type(part)).encode())
    return b"|".join(content)
