"""The command that writes a model for a runtime without dlcft, and the lines that run it there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dlcft.cli.arguments import apart, import_own, say, warn
from dlcft.cli.model import Backbone, Import, Json, Model
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
    """A Python program without dlcft that runs an exported file on inputs given as arguments."""
    (name, given), *others = facts["inputs"].items()
    onnx = path.suffix == ".onnx"
    imports = ["import json", "import sys", "", "import numpy as np", *(["import onnxruntime"] if onnx else [])]
    if onnx:
        open_ = [
            f"session = onnxruntime.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])",
            "labels = json.loads(session.get_modelmeta().custom_metadata_map['labels'])",
        ]
    else:
        imports = [*imports, "import torch"]
        open_ = [
            "facts = {'dlcft.json': ''}",
            f"network = torch.export.load({str(path)!r}, extra_files=facts).module()",
            "labels = json.loads(facts['dlcft.json'])['labels']",
        ]
    if "preprocessing" in facts:
        imports.append("from PIL import Image, ImageOps")
        read = _images(facts["preprocessing"])
    elif others:
        read = [f"x = np.load(sys.argv[1])  # an .npz file with {', '.join(facts['inputs'])}"]
    else:
        read = [f"x = np.load(sys.argv[1]).astype('{given['dtype']}')  # an .npy file of {given['shape']}"]
    if onnx:
        feed = "dict(x)" if others else f"{{{name!r}: x}}"
        run = f"session.run(['probabilities'], {feed})[0]"
    else:
        feed = "*map(torch.from_numpy, x.values())" if others else "torch.from_numpy(x)"
        run = f"network({feed})[1].numpy()"
    of = "sys.argv[1:]" if "preprocessing" in facts else "range(10**9)"
    tell = [f"for name, row in zip({of}, {run}):", "    print(name, labels[row.argmax()], row.max())"]
    return "\n".join([*imports, "", *open_, *read, *tell])


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
