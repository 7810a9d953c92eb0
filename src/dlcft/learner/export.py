"""A learner's answers as a file for a runtime that knows nothing of dlcft: ONNX, or torch.export's `.pt2`.

What the file computes is compared with the learner before anything is written.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from dlcft import __version__
from dlcft.data.decoding import first_line
from dlcft.data.files import new_file
from dlcft.data.samples import to_device
from dlcft.learner.heads import HEAD
from dlcft.learner.module import Answers, full_floats, plain_module
from dlcft.network.explicit import SAMPLES, is_tokens, sized
from dlcft.network.inputs import Input, reference

if TYPE_CHECKING:
    from dlcft.learner.learner import Learner

OPSET = 18
SUFFIXES = (".onnx", ".pt2")
OUTPUTS = ("outputs", "probabilities")
LARGEST = 1e-4  # difference of an output, of the largest one
_MOST = 2**31 - 1  # bytes of an ONNX file
_CHECKED = (1, 4, 9)  # batch sizes; the graph was made from others

Run = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Exported:
    """A file that was written.

    Attributes:
        path: where it is.
        bytes: its size.
        difference: the largest one between its outputs and the learner's, of the largest output.
        facts: what stands in the file beside the network; JSON can hold it.
    """

    path: Path
    bytes: int
    difference: float
    facts: dict[str, Any]


@torch.inference_mode(False)  # whose tensors take no gradients, of which some features consist
def export(learner: Learner, path: str | Path, *, head: str | None = None, example: Any = None) -> Exported:
    """Write what a learner has learned as one file: the network, its labels, and how inputs are prepared.

    The file's outputs are named `outputs` and `probabilities`, the softmax of outputs / temperature. Its inputs may
    have any number of samples, and texts any number of tokens if the network allows it.

    Args:
        learner: has learned something.
        path: ends in `.onnx` (opset 18; needs the extra `dlcft[export]`) or `.pt2`. It is replaced when all is there.
        head: the task's name in "task-il".
        example: see `Learner.module`.

    Raises:
        ValueError: when the network cannot be exported, or the file would give other answers than the learner.
        ImportError: when a package is missing.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"the file is {path}; its name must end in {' or '.join(SUFFIXES)}.")
    write = _onnx if path.suffix == ".onnx" else _program
    if path.suffix == ".onnx":
        _needed()
    labels = learner.labels(head)
    learner.solve()
    name = HEAD if head is None else head
    x = full_floats(to_device(sized(learner.example(example), SAMPLES[0]), torch.device("cpu")))
    module, any_length = plain_module(Answers(learner.model, name, learner.temperature, both=True).cpu(), x)
    facts = _facts(learner, labels, x, any_length)
    with _quiet():
        try:
            content, run = write(module, x, facts)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            what = path.suffix.removeprefix(".")
            raise ValueError(f"this network cannot be exported as {what}: {_reason(error)}.") from error
        difference = _largest_difference(learner, name, run, x)
    if not difference <= LARGEST:
        raise ValueError(
            f"the exported network's outputs differ from the learner's by {difference:.2g} of the largest one, more "
            f"than {LARGEST:g}; nothing is written."
        )
    with new_file(path) as file:
        file.write(content)
    return Exported(path, len(content), difference, facts)


def _facts(learner: Learner, labels: list[Any], x: Input, any_length: bool) -> dict[str, Any]:
    """What a user of the file has to know."""
    images = isinstance(x, Tensor) and x.dim() == 4
    single = ["images" if images else "x"]
    names = list(x) if isinstance(x, Mapping) else single if isinstance(x, Tensor) else [f"x{i}" for i in range(len(x))]
    inputs = {
        name: {"shape": _shape(t, any_length), "dtype": str(t.dtype).removeprefix("torch.")}
        for name, t in zip(names, _tensors(x), strict=True)
    }
    facts: dict[str, Any] = {
        "dlcft": __version__,
        "inputs": inputs,
        "labels": [label if isinstance(label, str | int) else str(label) for label in labels],
        "temperature": learner.temperature,
        "calibrated": learner.notes.get("temperature") is not None,
    }
    if images:
        assert isinstance(x, Tensor)
        way = "bilinear" if learner.preprocess is None else learner.preprocess.interpolation
        facts["preprocessing"] = {
            "size": list(x.shape[2:]),
            "resize": f"stretched to height × width, {way}, with antialiasing" if way != "nearest" else "nearest",
            "interpolation": way,
            "channels": {1: "grey", 3: "RGB"}.get(x.shape[1], x.shape[1]),
            "layout": "batch, channels, height, width",
            "range": [0, 1],
            "normalisation": "in the network",
        }
    return facts


def _shape(t: Tensor, any_length: bool) -> list[int | str]:
    """Of an input, with names for the axes that may have any length."""
    if not t.dim() or len(t) != SAMPLES[0]:
        return list(t.shape)
    return ["batch", "length"] if any_length and is_tokens(t) else ["batch", *t.shape[1:]]


def _tensors(x: Input) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def _open_axes(facts: Mapping[str, Any], dim: Any = None) -> tuple[dict[int, Any], ...]:
    """The axes of each input that may have any length, by name or as `dim`."""
    shapes = [one["shape"] for one in facts["inputs"].values()]
    return tuple({i: dim or size for i, size in enumerate(shape) if isinstance(size, str)} for shape in shapes)


def _onnx(module: fx.GraphModule, x: Input, facts: Mapping[str, Any]) -> tuple[bytes, Run]:
    import numpy as np
    import onnxruntime

    names = list(facts["inputs"])
    options: dict[str, Any] = {"input_names": names, "output_names": list(OUTPUTS), "opset_version": OPSET}
    options |= {"dynamo": True, "dynamic_shapes": _open_axes(facts), "verbose": False}
    program = torch.onnx.export(module, tuple(_tensors(x)), **options)
    assert program is not None
    model = program.model_proto
    for node in [*model.graph.node, *(node for function in model.functions for node in function.node)]:
        del node.metadata_props[:]  # where the exporter found it in Python
    for name, fact in facts.items():
        model.metadata_props.add(key=name, value=fact if isinstance(fact, str) else json.dumps(fact))
    model.producer_name = f"dlcft {__version__}"
    if model.ByteSize() > _MOST:
        raise ValueError("it is larger than the 2 GB that one ONNX file holds, take .pt2")
    content: bytes = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(given: list[Tensor]) -> list[Tensor]:
        feed = {name: t.cpu().numpy() for name, t in zip(names, given, strict=True)}
        return [torch.from_numpy(np.asarray(found)) for found in session.run(None, feed)]

    return content, run


def _program(module: fx.GraphModule, x: Input, facts: Mapping[str, Any]) -> tuple[bytes, Run]:
    axes = _open_axes(facts, torch.export.Dim.AUTO)
    program = torch.export.export(module, tuple(_tensors(x)), dynamic_shapes=axes)
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"dlcft.json": json.dumps(facts)})
    content = file.getvalue()
    loaded = torch.export.load(io.BytesIO(content)).module()
    return content, lambda given: list(loaded(*given))


def _largest_difference(learner: Learner, head: str, run: Run, x: Input) -> float:
    """Between the outputs of a file and those of the learner itself, of the largest output."""
    model, differences, largest = learner.model.eval(), [], 0.0
    for size in _CHECKED:
        batch = _varied(sized(x, size), seed=size)
        with torch.no_grad():
            own = to_device(batch, learner.device, dtype=reference(model.backbone).dtype)
            wanted = model(own, head).float().cpu()
        try:
            found = run(_tensors(batch))
        except Exception as error:  # a runtime's own kinds of errors
            raise ValueError(f"the exported network cannot be run on {size} samples: {_reason(error)}.") from error
        probabilities = (wanted / learner.temperature).softmax(1)
        largest = max(largest, float(wanted.abs().max()))
        differences += [float((found[0] - wanted).abs().max()), float((found[1] - probabilities).abs().max()) * largest]
    return max(differences) / (largest or 1.0)


def _varied(x: Input, seed: int) -> Input:
    """A batch with noise on its real numbers: an input that is the same everywhere would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        noise = torch.rand(t.shape, generator=generator).to(t)
        return (t + noise) / 2

    return tree_map_only(Tensor, noisy, x)  # type: ignore[no-any-return]


def _needed() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        wanted = "an .onnx file needs onnx, onnxscript and onnxruntime"
        raise ImportError(f"{wanted}: pip install 'dlcft[export]'; a .pt2 file needs none of them.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither the warnings nor the log of the exporters: what they say is of their own working."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _reason(error: Exception) -> str:
    """The innermost error in one line."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return first_line(error)
