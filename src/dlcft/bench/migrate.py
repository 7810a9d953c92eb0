"""Rewrite results of format 1 as format 2: `python -m dlcft.bench.migrate FOLDER`.

Format 2 notes the complete recipe and the row of the paper's tables. Joint training is a field of the experiment, not
the methods "joint" and "joint-linear", and two settings have other names. Files are renamed: their names are hashes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlcft.bench.choices import SCALES
from dlcft.bench.datasets.catalogue import CATALOGUE
from dlcft.bench.experiment import Experiment, Result
from dlcft.bench.paper import cells, variant
from dlcft.bench.tune import FOLDER, PREFIX, chosen_file, noted, tunings
from dlcft.data.files import write_text
from dlcft.methods.recipes import RECIPES, Recipe

_METHODS = {"joint": "none", "joint-linear": "none-linear"}
_SETTINGS = {"head": "head_start", "balanced": "equal_classes"}


def migrate(folder: Path) -> list[Path]:
    """Rewrite all results and records of tuning in a folder; gives the new files. Those of format 2 stay."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the one that the results were written to.")
    written = []
    for path in sorted((folder / FOLDER).glob(f"{PREFIX}*.json")):
        content = json.loads(path.read_text())
        if "joint" not in content["base"]:
            base = _experiment(content["base"])
            content |= {"variant": variant(base), "base": base.to_dict()}
            written.append(_written(path, chosen_file(base, folder), content))
    # the row of each experiment of the paper's, and whether it is tuned, by the key of seed 0
    rows: dict[str, tuple[str, bool]] = {}
    for scale in SCALES:
        for chosen in ({}, noted(tunings("all", scale), folder)):
            rows |= {one.experiment.key: (one.cell.row, one.tuned) for one in cells("all", scale, 1, chosen)}
    for path in sorted([*folder.glob("*.json"), *(folder / FOLDER).glob("*.json")]):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.pop("format", None) == 1:
            experiment = _experiment(content["experiment"])
            row, tuned = rows.get(replace(experiment, seed=0).key, (None, False))
            # older results note no recipe: it is the method's own, with the data set's augmentation
            usual = {"augment": CATALOGUE[experiment.dataset].augment} if experiment.dataset in CATALOGUE else {}
            own = experiment.recipe.with_settings({**usual, **experiment.settings})
            recipe = Recipe.from_dict(content["recipe"]) if "recipe" in content else own
            content |= {"experiment": experiment, "recipe": recipe.to_dict(), "row": row, "tuned": tuned}
            written.append(_written(path, path.with_name(experiment.file), Result(**content).to_dict()))
    return written


def _experiment(content: Mapping[str, Any]) -> Experiment:
    method = _METHODS.get(content["method"], content["method"])
    renamed = {_SETTINGS.get(name, name): value for name, value in content["settings"].items()}
    known = RECIPES[method].settings
    settings = {name: value for name, value in renamed.items() if name in known}  # others had no effect
    changed = {"method": method, "joint": content["method"] in _METHODS, "settings": settings}
    return Experiment(**{**content, **changed})


def _written(old: Path, new: Path, content: Mapping[str, Any]) -> Path:
    write_text(new, json.dumps(content, indent=1))
    if new != old:
        old.unlink()
    return new


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m dlcft.bench.migrate FOLDER")
    for file in migrate(Path(sys.argv[1])):
        print(file)
