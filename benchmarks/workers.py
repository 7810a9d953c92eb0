"""Two workers of one thread against one: images a second, the time that they exchange sums in, and the bytes.

    python benchmarks/workers.py                # the shipped network at 32 pixels, and ResNet-18 at 224: minutes
    python benchmarks/workers.py --quick        # fewer images, one round

One worker and two take turns, each in new processes. The limit is that of this machine: two processes that learn half
of the images each, and do not know of each other. Exchange is the time inside torch.distributed, waiting for the other
worker included. Bytes are those of the tensors that one worker gives away; gloo sends them about twice (2·(n − 1)/n
times, for n workers).
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import Times, arguments, reported, timed
from PIL import Image

from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.data.images import Preprocess
from dlcft.data.samples import Samples

CLASSES = 20
TRAINED = {"epochs": 1, "batch_size": 128, "start": "pretrained", "batchnorm": "frozen"}


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Seconds and bytes of all exchanges inside the block."""
    total = {"seconds": 0.0, "bytes": 0.0}
    kept = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_object", "broadcast_object_list")}

    def watched(name: str) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return kept[name](first, *rest, **options)
            finally:
                total["seconds"] += time.perf_counter() - started
                if isinstance(first, torch.Tensor):
                    total["bytes"] += first.numel() * first.element_size()

        return call

    for name in kept:
        setattr(dist, name, watched(name))
    try:
        yield total
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def make(job: dict[str, Any]) -> Learner:
    weights = None if job["backbone"] == "shipped" else "random"
    module = load_backbone(job["backbone"], width=job.get("width"), weights=weights).module
    return Learner(module, job["method"], device="cpu", **job["settings"])


def work(place: int, workers: int, job: dict[str, Any], folder: str) -> None:
    """Learn a small task to warm up, then the measured one."""
    torch.set_num_threads(1)
    if workers > 1:
        store = dist.FileStore(f"{folder}/store", workers)
        dist.init_process_group("gloo", store=store, rank=place, world_size=workers)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(job["images"], 3, job["size"], job["size"], generator=generator)
    y = torch.arange(job["images"]) % job.get("classes", CLASSES)
    try:
        make(job).learn((x[:32], y[:32]), progress=False)
        learner = make(job)
        with counted() as exchanged:
            started = time.perf_counter()
            learner.learn((x, y), progress=False)
            seconds = time.perf_counter() - started
        if place == 0:
            network = sum(p.numel() for p in learner.model.parameters())
            facts = {"learning": seconds, **exchanged, "features": learner.model.feature_count, "parameters": network}
            Path(folder, "facts.json").write_text(json.dumps(facts))
    finally:
        if workers > 1:
            dist.destroy_process_group()
    os._exit(0)  # gloo's threads may end Python with an abort


def measured(job: dict[str, Any], workers: int, *, apart: bool = False) -> dict[str, float]:
    """Facts of a job; with `apart` each worker learns its share alone, and the slower one tells."""
    if apart:
        job, waiting = job | {"images": job["images"] // workers}, []
        with tempfile.TemporaryDirectory() as folder:
            for place in range(workers):
                Path(folder, str(place)).mkdir()
                waiting.append(mp.spawn(work, args=(1, job, f"{folder}/{place}"), nprocs=1, join=False))
            for process in waiting:
                process.join()
            facts = [json.loads(Path(folder, str(place), "facts.json").read_text()) for place in range(workers)]
        return max(facts, key=lambda found: found["learning"])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(workers, job, folder), nprocs=workers)
        return json.loads(Path(folder, "facts.json").read_text())


def speed(title: str, job: dict[str, Any], rounds: int) -> list[str]:
    """How much faster two workers are than one, and what they exchange."""
    found = [(measured(job, 1), measured(job, 2), measured(job, 2, apart=True)) for _ in range(rounds)]
    times = Times(
        {
            "one": [one["learning"] for one, _, _ in found],
            "two": [two["learning"] for _, two, _ in found],
            "apart": [apart["learning"] for _, _, apart in found],
            "exchange": [two["seconds"] for _, two, _ in found],
        }
    )
    return [
        title,
        f"{job['images'] / times['one']:,.0f}",
        str(times.ratio("one", "two")),
        str(times.ratio("one", "apart")),
        f"{times.ratio('exchange', 'two').median:.1%}",
        f"{found[-1][1]['bytes'] / 1e6:.1f} MB",
    ]


def traffic(quick: bool) -> list[list[str]]:
    """Bytes that a worker gives away, as features, classes and parameters grow; learning itself is kept short."""
    base = {"images": 128, "size": 16, "backbone": "shipped", "method": "dlcft-exact"}
    jobs = [
        ("closed form", base | {"settings": {"depth_features": budget}, "classes": classes})
        for budget, classes in ((512, 10), (2048, 10), (2048, 100), (4096, 10))[: 2 if quick else None]
    ]
    trained = base | {"method": "dlcft", "backbone": "resnet18", "settings": TRAINED | {"batch_size": 64}}
    jobs += [("dlcft", trained | {"width": width}) for width in ((8,) if quick else (8, 16, 32))]
    rows = []
    for title, job in jobs:
        found = measured(job, 2)
        steps = "once" if title == "closed form" else "2 steps and the curvature"
        size = (
            f"{found['features']:,.0f}" if title == "closed form" else f"{found['parameters'] / 1e6:.2f} M parameters"
        )
        rows.append([title, size, str(job.get("classes", CLASSES)), steps, f"{found['bytes'] / 1e6:.1f} MB"])
    return rows


def reading(rounds: int) -> list[list[str]]:
    """How fast one thread finds and reads photographs in a .tar."""
    draw, buffer = np.random.default_rng(0), io.BytesIO()
    coarse = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    coarse.resize((500, 375), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    content = buffer.getvalue()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "photographs.tar")
        with tarfile.open(path, "w") as tar:
            for number in range(2000):
                for name, part in ((f"{number:06}.jpg", content), (f"{number:06}.cls", b"7")):
                    info = tarfile.TarInfo(name)
                    info.size = len(part)
                    tar.addfile(info, io.BytesIO(part))
        samples = Samples(path, preprocess=Preprocess(size=(224, 224)))
        programs = {"index": lambda: Samples(path), "read": lambda: samples.fetch(torch.arange(64))}
        times = timed(programs, rounds)
    return [[f"{len(content) / 1e3:.0f} kB", f"{2000 / times['index']:,.0f}", f"{64 / times['read']:,.0f}"]]


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--quick", action="store_true", help="fewer images, one round")
    options = parser.parse_args()
    few, rounds = (8, 1) if options.quick else (1, options.rounds)
    shipped = {"backbone": "shipped", "size": 32}
    jobs = {
        "`dlcft-exact`, shipped network, 32 px": shipped
        | {"images": 4096 // few, "method": "dlcft-exact", "settings": {}},
        "`dlcft`, shipped network, 32 px": shipped | {"images": 2048 // few, "method": "dlcft", "settings": TRAINED},
    }
    if not options.quick:
        jobs["`dlcft-exact`, ResNet-18, 224 px"] = {
            **{"backbone": "resnet18", "size": 224, "images": 256, "method": "dlcft-exact"},
            "settings": {"batch_size": 32},
        }
    torch.set_num_threads(1)
    with reported(options.out) as output:
        rows = [speed(f"{title}, {job['images']:,} images", job, rounds) for title, job in jobs.items()]
        header = ["", "images/s, one worker", "two / one", "limit", "of it exchange", "given away by each"]
        output.table("speed", "Two workers", header, rows)
        header = ["", "features or parameters", "classes", "exchanged", "given away by each"]
        output.table("bytes", "Bytes", header, traffic(options.quick))
        header = ["each", "found a second", "read at 224 px a second"]
        output.table("reading", "Photographs of 500×375 in a .tar", header, reading(rounds))


if __name__ == "__main__":
    main()
