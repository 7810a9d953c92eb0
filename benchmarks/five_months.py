"""Five monthly batches of photographs on an untouched network, at the command line; four new labels in the third month.

    python benchmarks/five_months.py --data cifar100.npz --picture docs/figures/update.png

The file holds `x_train`, `y_train`, `x_test`, `y_test` and `classes` of CIFAR-100. Each month brings 40 images of each
of 8 labels, from the third on of 12; 30 test images of each are held out. The picture, which needs a browser, is the
top of the last update's page.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from measure import table
from PIL import Image

FIRST = ("apple", "bicycle", "bus", "castle", "dolphin", "lion", "rose", "train")
LATER = ("whale", "tiger", "tractor", "pear")
MONTHS, EACH, HELD_OUT = 5, 40, 30


def write_folders(arrays: dict[str, np.ndarray], folder: Path) -> None:
    names = [str(name) for name in arrays["classes"]]
    for label in FIRST + LATER:
        places = {"holdout": ("test", slice(HELD_OUT))}
        for month in range(MONTHS):
            if label in FIRST or month >= 2:
                places[f"month-{month + 1}"] = ("train", slice(EACH * month, EACH * (month + 1)))
        for place, (part, chosen) in places.items():
            (folder / place / label).mkdir(parents=True)
            for index in np.flatnonzero(arrays[f"y_{part}"] == names.index(label))[chosen]:
                Image.fromarray(arrays[f"x_{part}"][index]).save(folder / place / label / f"{index}.png")


def photograph(page: Path, picture: Path) -> None:
    """The first screen of a page, small enough to be kept with the docs."""
    from playwright.sync_api import sync_playwright

    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        view = opened.new_page(viewport={"width": 1280, "height": 880})
        view.goto(page.as_uri())
        view.screenshot(path=picture)
        opened.close()
    with Image.open(picture) as image:
        image.convert("P", palette=Image.Palette.ADAPTIVE, colors=48).save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="an .npz file")
    parser.add_argument("--picture", type=Path, help="a .png file to write")
    options = parser.parse_args()
    if options.data is None:
        print("benchmarks/five_months.py needs --data, an .npz file of CIFAR-100: left out")
        return
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_folders(dict(np.load(options.data)), folder)
        for month in range(1, MONTHS + 1):
            command = [sys.executable, "-m", "dlcft", "update", "--json", "--model", "scenes"]
            command += ["--data", f"month-{month}", "--holdout", "holdout"]
            done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
            facts = json.loads(done.stdout)
            known = None if facts["drop"] is None else facts["accuracy_before"] - facts["drop"]
            shares = (facts["accuracy_before"], known, facts["flips"], facts["accuracy"])
            rise = facts["predicted_increase"]
            cells = ["–" if share is None else f"{share:.1%}" for share in shares]
            rows.append([str(month), str(facts["samples"]), *cells, "–" if rise is None else f"{rise:+.2f}"])
            print(" ".join(rows[-1]), flush=True)
        if options.picture is not None:
            photograph(folder / facts["page"], options.picture)
    header = ["month", "images", "known labels, before", "after", "turned wrong", "all 12 labels", "predicted rise"]
    table("Held-out images after each month", header, rows)


if __name__ == "__main__":
    main()
