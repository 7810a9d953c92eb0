"""Memory at the peak of learning and predicting large images in closed form, above the network and the images.

    python benchmarks/memory.py            # Linux; needs timm

The networks have random weights, which changes no size. Each row is a process of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure import arguments, peak_memory, reported

ROWS = (("resnet18", 224), ("resnet50", 224), ("tf_efficientnet_lite0", 192), ("vit_small_patch16_224", 224))


def prepared(name: str, method: str, size: int, count: int) -> Callable[[], Any]:
    from dlcft import Learner
    from dlcft.data.images import Preprocess
    from update import network

    torch.set_num_threads(1)
    preprocess = Preprocess((size, size), (0.5,) * 3, (0.25,) * 3)
    learner = Learner(network(name, size), method, preprocess=preprocess)
    x = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)

    def learn() -> None:
        learner.learn((x, [index % 10 for index in range(count)]), progress=False)
        learner.predict(x)

    return learn


def main() -> None:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--images", type=int, default=250, help="how many are learned")
    options = parser.parse_args()
    if importlib.util.find_spec("timm") is None:
        print("benchmarks/memory.py needs timm: left out")
        return
    with reported(options.out) as output:
        rows = []
        for name, size in ROWS:
            peaks = [peak_memory(prepared, name, method, size, options.images) for method in ("ridge", "dlcft-exact")]
            rows.append([name, f"{size} × {size}", *(f"{peak / 1e6:,.0f}" for peak in peaks)])
            print(*rows[-1], flush=True)
        header = ["network", "pixels", "`ridge`", "`dlcft-exact`"]
        output.table("peaks", f"Peak memory, MB, {options.images} images", header, rows)


if __name__ == "__main__":
    main()
