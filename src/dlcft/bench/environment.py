"""The surroundings of a run that its figures may depend on: versions, hardware, weights, data."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from dlcft import __version__
from dlcft.backbones import Backbone
from dlcft.bench.datasets import NAMES
from dlcft.bench.datasets.download import md5_of
from dlcft.learner.build import fingerprint
from dlcft.network import workers
from dlcft.update.forecast import peak_memory


def environment(backbone: Backbone) -> dict[str, Any]:
    """Versions, commit, hardware, the backbone's hash and the peak of memory: figures may depend on each."""
    return {
        "dlcft": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "workers": workers.count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
        "backbone": fingerprint(backbone.module),
        "peak_bytes": peak_memory(),
    }


def forget_peak() -> None:
    """Reset the peak of this process's memory, where the system can (Linux): it is noted for each run."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _commit() -> str | None:
    """Of the source tree, if the package lies in one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    return None


def content_of(dataset: str, data: Path | None) -> str | None:
    """A hash of the file that data comes from (of a folder its files' names and sizes); None where none is given."""
    path = data or Path(dataset)
    if (data is None and dataset in NAMES) or not path.exists():
        return None
    state = path.stat()
    return _content(path.resolve(), state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=16)
def _content(path: Path, time_ns: int, size: int) -> str:
    if path.is_file():
        return md5_of(path)
    files = sorted((str(one.relative_to(path)), one.stat().st_size) for one in path.rglob("*") if one.is_file())
    return hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()
