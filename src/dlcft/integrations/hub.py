"""The Hugging Face Hub: a learner saved, pushed and loaded as a repository, with a model card of its history.

A repository is a model directory with one version, safetensors and JSON, and is checked as any other when it is loaded.
"""

from __future__ import annotations

import html
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from dlcft import __version__
from dlcft.backbones import load_backbone
from dlcft.data.files import write_text
from dlcft.data.sources import Tokenizer
from dlcft.learner.learner import Learner
from dlcft.learner.records import Adopted, Forgotten, Record
from dlcft.learner.state import check_header, write_learner
from dlcft.store.store import CheckpointError, Store

try:
    from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download
except ImportError as missing:
    raise ImportError("dlcft.integrations.hub needs huggingface_hub: pip install 'dlcft[hub]'.") from missing

_FILES = ["manifest.json", "version-*.safetensors"]  # all that is downloaded
_SHOWN = 200  # labels in a card
_CARD = """---
{{ card_data }}
---

# A classifier that learns on

{{ summary }}

```python
from dlcft.integrations.hub import HubLearner

learner = HubLearner.from_pretrained("this/repository"{{ argument }}).learner
learner.predict(images)  # or learner.learn((images, labels)), and push it again
```

It has learned {{ labels | length }} labels: {{ labels[:shown] | join(", ") }}{{ " …" if labels | length > shown }}

| | samples | accuracy on the holdout of then | rise of the old loss, by the memory |
|---|---:|---:|---:|
{% for row in history -%}
| {{ row | join(" | ") }} |
{% endfor %}
{%- if page %}
The page of the last update, with its gates and every label, is in [update.html](update.html).
{% endif %}"""


class HubLearner(  # the mixin reads these when the class is made
    ModelHubMixin,
    library_name="dlcft",
    tags=["continual-learning", "class-incremental-learning"],
    model_card_template=_CARD,
):
    """A learner as a repository of the Hub: `save_pretrained`, `push_to_hub`, `from_pretrained`.

    Nothing is uploaded but by `push_to_hub`.

    Args:
        learner: one that has learned something.
        page: the file of its last update's page, to be put beside it. It names held-out files.
    """

    def __init__(self, learner: Learner, *, page: str | os.PathLike[str] | None = None) -> None:
        if not isinstance(learner, Learner):
            raise TypeError(f"HubLearner takes a Learner, not a {type(learner).__name__}.")
        self.learner, self.page = learner, None if page is None else Path(page)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card: what the learner is, its labels, and what happened in each task."""
        notes = self.learner.notes
        name = (notes.get("backbone") or {}).get("name")
        backbone = f"the backbone `{name}`" if name else "a network of its maker's, which is not in this repository"
        method = notes.get("method") or type(self.learner.method).__name__
        labels = [label for head in self.learner.state()[1]["labels"].values() for label in head]
        facts = {
            "summary": f"Learned by dlcft {__version__} with the method `{method}`, on {backbone}.",
            "argument": "" if _is_plain(notes.get("backbone")) else ", backbone=network",
            "labels": [_shown(label) for label in labels],
            "shown": _SHOWN,
            "history": [_row(record) for record in self.learner.history],
            "page": self.page is not None,
        }
        return super().generate_model_card(*args, **facts | kwargs)

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """Write the repository's files into a directory; for `options` see the mixin.

        Raises:
            ValueError: when nothing was learned yet, or the directory has versions of its own, which it would lose.
        """
        place, own = Path(save_directory), self.learner.directory
        if not self.learner.tasks:
            raise ValueError("nothing has been learned yet; call learn(data) first.")
        if own is not None and own.resolve() == place.resolve():
            raise ValueError(f"{place} is the learner's own directory, with its versions; choose another place.")
        if (place / "manifest.json").exists() and not (place / "README.md").exists():
            raise ValueError(f"{place} is a model directory with versions of its own; choose another place.")
        return super().save_pretrained(place, **options)

    def _save_pretrained(self, save_directory: Path) -> None:
        learner = self.learner
        page = None if self.page is None else self.page.read_text(encoding="utf-8")
        learner.solve()
        tensors, header = learner.state()
        write_learner(Store(save_directory), tensors, header, keep=1)
        (save_directory / ".lock").unlink(missing_ok=True)  # nobody else writes here, and it is not to be pushed
        if page is not None:
            write_text(save_directory / "update.html", page)
        else:
            (save_directory / "update.html").unlink(missing_ok=True)  # of an update before
        # the Hub counts downloads by this file, and the mixin asks for it
        facts = {"library": "dlcft", "version": __version__, "scenario": learner.scenario, "tasks": learner.tasks}
        write_text(save_directory / "config.json", json.dumps(facts, indent=2) + "\n")

    @classmethod
    def _from_pretrained(  # type: ignore[override]  # an unknown argument is an error
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        backbone: nn.Module | str | None = None,
        weights: str | None = None,
        tokenizer: Tokenizer | None = None,
        device: str = "auto",
    ) -> HubLearner:
        """Load what `save_pretrained` or `push_to_hub` wrote; the learner is bound to no directory.

        Args:
            model_id: a directory, or the name of a repository.
            revision: of the repository.
            cache_dir: where downloads are kept.
            force_download: whether to download again.
            local_files_only: whether to use downloads alone.
            token: of the Hub.
            backbone: the network that it was learned on: a module, or a name, see `load_backbone`. Not needed where
                that is one of dlcft's own with its published weights.
            weights: of a backbone that is named.
            tokenizer: the same as it was learned with, for a module.
            device: see `Learner`.

        Raises:
            CheckpointError: when a file is damaged, foreign or newer, or the backbone is another one.
        """
        options: dict[str, Any] = {"tokenizer": tokenizer, "device": device}
        if os.path.isdir(model_id):
            return cls(_loaded(Path(model_id), backbone, weights, options))
        found = snapshot_download(
            model_id,
            revision=revision,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
            allow_patterns=_FILES,
        )
        with TemporaryDirectory() as folder:  # a download is links, which a store does not follow
            for path in Path(found).glob("*"):
                if any(path.match(pattern) for pattern in _FILES):
                    shutil.copyfile(path, Path(folder) / path.name)
            return cls(_loaded(Path(folder), backbone, weights, options))


def _loaded(folder: Path, backbone: nn.Module | str | None, weights: str | None, options: dict[str, Any]) -> Learner:
    store = Store(folder)
    manifest = store.look()
    if manifest.current is None:
        raise CheckpointError(f"{folder} holds no learner that dlcft has written.")
    check_header(manifest.current.header, folder)
    if backbone is None:
        origin = manifest.current.header["notes"].get("backbone")
        if not _is_plain(origin):
            made = "it was saved from Python" if origin is None else f"it was made on {origin['name']!r}"
            raise ValueError(f"backbone is not given, and {made}; give the module, or its name if you trust that.")
        backbone = str(origin["name"])
    if isinstance(backbone, str):
        named = load_backbone(backbone, weights=weights)
        backbone, options = named.module, options | {"tokenizer": options["tokenizer"] or named.tokenizer}
    return Learner.load(store, backbone, version=manifest.number, **options)


def _is_plain(origin: Any) -> bool:
    """Whether a backbone is one of dlcft's own with its published weights: to make it runs no foreign code."""
    return isinstance(origin, dict) and ":" not in str(origin["name"]) and origin.get("weights") is None


def _row(record: Record) -> list[str]:
    """A record as a row of the card."""
    if isinstance(record, Forgotten):
        return ["forgotten", f"{record.samples:,}", "", ""]
    if isinstance(record, Adopted):
        return [f"task 1: a classifier of {record.labels} labels", f"{record.samples:,}", "", ""]
    accuracy, increase = record.notes.get("accuracy"), record.predicted_increase
    told: list[tuple[Any, Callable[[Any], str]]] = [(accuracy, "{:.1%}".format), (increase, "{:+.3g}".format)]
    return [
        f"task {record.task + 1}",
        f"{record.samples:,}",
        *("" if value is None else form(value) for value, form in told),
    ]


def _shown(label: object) -> str:
    """A label in Markdown: it may hold what would otherwise be a link, a picture or a table."""
    return "".join(f"\\{c}" if c in "\\`*_[]()!|#~" else c for c in html.escape(str(label)))
