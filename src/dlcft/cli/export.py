"""The command that writes a model for a runtime without dlcft, and the lines that run it there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dlcft.cli.arguments import Backbone, Import, Json, Model, apart, import_own, say, warn
from dlcft.cli.opening import open_learner, open_store
from dlcft.pages import in_bytes


def export(
    *,
    model: Model,
    out: Annotated[Path, Parameter(help="The file to write: .onnx, or .pt2 for torch.export.")],
    example: Path | None = None,
    backbone: Backbone = None,
    import_: Import = None,
    as_json: Json = False,
) -> None:
    """Write a model as one file that runs without dlcft: the network, its labels, and how images are prepared.

    The file is compared with the model before it is written. Prints some lines of Python that run it. An .onnx file
    needs the extra dlcft[export].

    Example: dlcft export --model scenes --out scenes.onnx

    Args:
        example: Inputs, as for `dlcft predict`, that show their shape where the model does not know it.
    """
    from dlcft.learner.export import SUFFIXES
    from dlcft.learner.export import export as write

    if out.suffix not in SUFFIXES or out.is_dir() or not out.parent.is_dir():
        kinds = " or ".join(SUFFIXES)
        raise ValueError(f"--out is {out}; it must be a file in a folder that exists, with a name in {kinds}.")
    apart("--out", out, model, example)
    import_own(import_ or ())
    learner = open_learner(open_store(model), backbone=backbone)
    written = write(learner, out, example=example)
    if not written.facts["calibrated"]:
        warn("no holdout was ever given, so the probabilities are not calibrated.")
    if as_json:
        print(json.dumps({**written.facts, "out": str(out), "bytes": written.bytes, "difference": written.difference}))
        return
    same = f"its outputs are the model's to {written.difference:.1g}"
    say(f"{out}: {in_bytes(written.bytes)}, {same}; these lines run it:", to=sys.stderr)
    say(lines(out, written.facts))


def lines(path: Path, facts: dict[str, Any]) -> str:
    """A Python program of ten lines, without dlcft, that runs an exported file on the files given as its arguments."""
    (name, given), *others = facts["inputs"].items()
    images = "preprocessing" in facts
    if path.suffix == ".onnx":
        runtime, feed = "onnxruntime", "dict(x)" if others else f"{{{name!r}: x}}"
        opened = [
            f"session = onnxruntime.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])",
            "labels = json.loads(session.get_modelmeta().custom_metadata_map['labels'])",
        ]
        answers = f"session.run(['probabilities'], {feed})[0]"
    else:
        names = ", ".join(f"torch.from_numpy(x[{one!r}])" for one in facts["inputs"])
        runtime, feed = "torch", names if others else "torch.from_numpy(x)"
        opened = [
            f"network = torch.export.load({str(path)!r}, extra_files=(read := {{'dlcft.json': ''}})).module()",
            "labels = json.loads(read['dlcft.json'])['labels']",
        ]
        answers = f"network({feed})[1].numpy()"
    if images:
        read, named = _images(facts["preprocessing"]), f"zip(sys.argv[1:], {answers})"
    else:
        what = f"an .npz file with {', '.join(facts['inputs'])}" if others else f"an .npy file, {given['shape']}"
        cast = "" if others else f".astype('{given['dtype']}')"
        read, named = [f"x = np.load(sys.argv[1]){cast}  # {what}"], f"enumerate({answers})"
    return "\n".join(
        [
            "import json, sys",
            f"import numpy as np, {runtime}",
            *(["from PIL import Image, ImageOps"] if images else []),
            *opened,
            *read,
            f"for name, row in {named}:",
            "    print(name, labels[row.argmax()], row.max(), sep='\\t')",
        ]
    )


def _images(preprocessing: dict[str, Any]) -> list[str]:
    height, width = preprocessing["size"]
    grey = preprocessing["channels"] == "grey"
    mode, axes = ("L", "[None]") if grey else ("RGB", ".transpose(2, 0, 1)")
    way = preprocessing["interpolation"].upper()
    return [
        "images = [ImageOps.exif_transpose(Image.open(path)) for path in sys.argv[1:]]",
        f"images = [one.convert('{mode}').resize(({width}, {height}), Image.Resampling.{way}) for one in images]",
        f"x = np.stack([np.asarray(one, dtype=np.float32){axes} / 255 for one in images])",
    ]
