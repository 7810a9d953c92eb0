"""README's figure: accuracy after every task, of ours and of three others, from committed results.

python benchmarks/accuracy_by_task.py --runs results/small --picture docs/figures/accuracy-by-task.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from dlcft.bench.choices import SCALES
from dlcft.bench.report import read_results
from dlcft.bench.report.summary import stream_of

METHODS = {  # the row of the report: its name, colour and mark
    "dlcft-exact": ("dlcft-exact", "#c2410c", "o"),
    "DER++": ("DER++ (with 250 old images)", "#2563eb", "s"),
    "DLCFT (TK-FAC)": ("DLCFT, the paper (left with 250 old images)", "#15803d", "^"),
    "None": ("fine-tuning on", "#777777", "v"),
}
PANELS = {"class": "ten new classes in each task", "data": "the same ten classes in each task"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("results/small"))
    parser.add_argument("--picture", type=Path, default=Path("docs/figures/accuracy-by-task.svg"))
    options = parser.parse_args()
    results, streams = read_results(options.runs), SCALES["small"].streams
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "tasks"})
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.5), layout="constrained")
    for axis, (stream, title) in zip(axes, PANELS.items(), strict=True):
        there = [one for one in results if stream_of(one.experiment) == stream_of(streams[stream])]
        for row, (name, colour, mark) in METHODS.items():
            curves = [one.curve for one in there if one.row == row]
            if not curves:
                continue
            tasks = [task for task, _ in curves[0]]
            values = 100 * np.array([[accuracy for _, accuracy in curve] for curve in curves])
            axis.plot(tasks, values.mean(0), mark, ls="-", color=colour, label=name, ms=4)
        joint = [one.accuracy for one in there if one.row == "Joint"]
        if joint:
            axis.axhline(100 * float(np.mean(joint)), color="#777777", ls=":", lw=1)
            place = (0.02, 100 * float(np.mean(joint)))
            axis.annotate(
                "fine-tuning on all data at once", place, (0, -10), ("axes fraction", "data"), "offset points"
            )
        axis.set(xlabel="tasks learned", title=title, xticks=tasks)
    axes[0].set_ylabel("accuracy on what was seen, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(options.picture, metadata={"Date": None} if options.picture.suffix == ".svg" else None)
    print(f"{options.picture}: mean of {len(curves)} seeds")


if __name__ == "__main__":
    main()
