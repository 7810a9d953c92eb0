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
from dlcft.learner.module import Answers, plain_module
from dlcft.network.explicit import batch_size, is_tokens, sized
from dlcft.network.inputs import Input

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
    learner.solve()
    x = learner.example(example)
    name = next(iter(learner.model.heads)) if head is None and len(learner.model.heads) == 1 else head
    labels = learner.labels(*([] if name is None else [name]))
    assert name is not None
    with torch.no_grad():
        module, any_length = plain_module(Answers(learner.model, name, learner.temperature, both=True), x)
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
    names = ["images"] if images else list(x) if isinstance(x, Mapping) else ["x"] if isinstance(x, Tensor) else None
    leaves = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]
    inputs: dict[str, Any] = {}
    for name, t in zip(names or [f"x{i}" for i in range(len(leaves))], leaves, strict=True):
        shape = ["batch", *(["length"] if any_length and is_tokens(t) else t.shape[1:2]), *t.shape[2:]]
        inputs[name] = {"shape": shape, "dtype": str(t.dtype).removeprefix("torch.")}
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


def _names(facts: Mapping[str, Any]) -> list[str]:
    return list(facts["inputs"])


def _onnx(module: fx.GraphModule, x: Input, facts: Mapping[str, Any]) -> tuple[bytes, Run]:
    import numpy as np
    import onnxruntime

    samples = batch_size(x)
    dims = {"batch": "batch", "length": "length"}
    axes = tuple({i: dims[d] for i, d in enumerate(one["shape"]) if d in dims} for one in facts["inputs"].values())
    leaves = [t for t in tree_leaves(x) if isinstance(t, Tensor)]
    varied = tuple(axis if t.dim() and len(t) == samples else {} for axis, t in zip(axes, leaves, strict=True))
    options: dict[str, Any] = {"input_names": _names(facts), "output_names": list(OUTPUTS), "opset_version": OPSET}
    program = torch.onnx.export(module, tuple(leaves), dynamo=True, dynamic_shapes=varied, verbose=False, **options)
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
        feed = {name: t.cpu().numpy() for name, t in zip(_names(facts), given, strict=True)}
        return [torch.from_numpy(np.asarray(found)) for found in session.run(None, feed)]

    return content, run


def _program(module: fx.GraphModule, x: Input, facts: Mapping[str, Any]) -> tuple[bytes, Run]:
    leaves = [t for t in tree_leaves(x) if isinstance(t, Tensor)]
    some = tuple(t[: max(2, len(t))] for t in leaves)
    auto = torch.export.Dim.AUTO  # type: ignore[attr-defined]
    shapes = tuple(
        {i: auto for i, d in enumerate(one["shape"]) if isinstance(d, str)} for one in facts["inputs"].values()
    )
    program = torch.export.export(module, some, dynamic_shapes=shapes)
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
            wanted = model(batch, head).float().cpu()
        try:
            found = run([leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)])
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
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    return first_line(inner).rstrip(".")
