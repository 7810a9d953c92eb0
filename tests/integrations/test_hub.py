"""`HubLearner`: saved and loaded here, and pushed to a small Hub that runs on this machine."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store
from tests.support.commands import dlcft
from tests.support.samples import pictures

pytest.importorskip("huggingface_hub")
from dlcft.integrations.hub import HubLearner

OTHERS = ["README.md", "config.json", "manifest.json"]
X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def backbone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh())


@pytest.fixture
def learner(backbone):
    learner = Learner(backbone, "ridge")
    learner.learn((X, ["cat", "d|og"] * 10), progress=False)
    learner.annotate(accuracy=0.875)
    learner.learn((X, ["cat", "[owl](http://a.b)"] * 10), progress=False)
    return learner


def test_saved_and_loaded(learner, backbone, tmp_path):
    HubLearner(learner).save_pretrained(tmp_path / "copy")
    assert sorted(os.listdir(tmp_path / "copy")) == [
        "README.md",
        "config.json",
        "manifest.json",
        "version-1.safetensors",
    ]
    loaded = HubLearner.from_pretrained(tmp_path / "copy", backbone=backbone).learner
    assert torch.equal(loaded.outputs(X), learner.outputs(X))
    assert (learner.directory, loaded.directory) == (None, None)
    for one in (learner, loaded):
        one.learn((X, ["ant", "cat"] * 10), progress=False)
    assert torch.equal(loaded.outputs(X), learner.outputs(X))
    HubLearner(loaded).save_pretrained(tmp_path / "copy")  # once more, into the same place
    assert sorted(os.listdir(tmp_path / "copy")) == [
        "README.md",
        "config.json",
        "manifest.json",
        "version-2.safetensors",
    ]
    assert HubLearner.from_pretrained(tmp_path / "copy", backbone=backbone).learner.tasks == 3


def test_the_card_tells_labels_and_history(learner, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<p>ünder</p>")
    HubLearner(learner, page=page).save_pretrained(tmp_path / "copy")
    card = (tmp_path / "copy" / "README.md").read_text()
    assert "library_name: dlcft" in card
    assert "It has learned 3 labels: cat, d\\|og, \\[owl\\]\\(http://a.b\\)\n" in card
    assert "| task 1 | 20 | 87.5% |" in card
    assert "| task 2 | 20 |  |" in card
    assert "[update.html](update.html)" in card
    assert (tmp_path / "copy" / "update.html").read_text() == "<p>ünder</p>"
    HubLearner(learner).save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy" / "update.html").exists()


def test_a_model_of_the_command_line_needs_no_backbone(tmp_path):
    data = pictures(tmp_path / "data", ["red", "green"])
    first = ["--data", data, "--set", "depth_features=30", "--holdout", pictures(tmp_path / "h", ["red"], seed=4)]
    assert dlcft("update", "--model", tmp_path / "scenes", *first).returncode == 0
    found = load_backbone("shipped")
    learner = Learner.load(tmp_path / "scenes", found.module)
    HubLearner(learner, page=tmp_path / "scenes-updates" / "version-1.html").save_pretrained(tmp_path / "copy")
    assert "| task 1 | 12 | 100.0% |" in (tmp_path / "copy" / "README.md").read_text()
    assert HubLearner.from_pretrained(tmp_path / "copy").learner.predict(data / "red") == ["red"] * 6
    done = dlcft("evaluate", "--model", tmp_path / "copy", "--data", data)
    assert "accuracy 100.00%" in done.stdout, done.stderr


def test_a_directory_of_versions_is_not_written_over(learner, tmp_path):
    learner.save(tmp_path / "model")
    learner.save(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("mine")
    (tmp_path / "model" / "config.json").write_text("mine")
    with pytest.raises(ValueError, match="the learner's own directory"):
        HubLearner(learner).save_pretrained(tmp_path / "model")
    other = Learner(nn.Linear(4, 3), "ridge")
    other.learn((X, [0, 1] * 10), progress=False)
    (tmp_path / "model" / "README.md").unlink()
    with pytest.raises(ValueError, match="versions of its own"):
        HubLearner(other).save_pretrained(tmp_path / "model")
    assert len(Store(tmp_path / "model").look().versions) == 2
    assert (tmp_path / "model" / "config.json").read_text() == "mine"


def test_loading_checks_what_a_learner_checks(learner, backbone, tmp_path):
    copy = tmp_path / "copy"
    HubLearner(learner).save_pretrained(copy)
    with pytest.raises(CheckpointError, match="give the same network"):
        HubLearner.from_pretrained(copy, backbone=nn.Linear(4, 8))
    with pytest.raises(ValueError, match="backbone is not given, and it was saved from Python"):
        HubLearner.from_pretrained(copy)
    with pytest.raises(TypeError, match="bakbone"):
        HubLearner.from_pretrained(copy, bakbone=backbone)
    (copy / "config.json").write_text('{"page": "/etc/hostname"}')  # the mixin would hand it on
    with pytest.raises(TypeError, match="page"):
        HubLearner.from_pretrained(copy, backbone=backbone)
    (copy / "config.json").write_text("{}")
    file = copy / "version-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        HubLearner.from_pretrained(copy, backbone=backbone)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="links are not followed"):
        HubLearner.from_pretrained(copy, backbone=backbone)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no learner"):
        HubLearner.from_pretrained(tmp_path / "empty", backbone=backbone)


def test_a_name_that_imports_something_is_not_taken_from_the_directory(learner, tmp_path):
    learner.notes["backbone"] = {"name": "evil:factory", "weights": None, "width": None}
    HubLearner(learner).save_pretrained(tmp_path / "copy")
    assert 'from_pretrained("this/repository", backbone=network)' in (tmp_path / "copy" / "README.md").read_text()
    with pytest.raises(ValueError, match="it was made on 'evil:factory'; give the module, or its name if you trust"):
        HubLearner.from_pretrained(tmp_path / "copy")


def test_what_is_no_learner_is_refused(tmp_path):
    with pytest.raises(TypeError, match="takes a Learner, not a str"):
        HubLearner("a name")
    with pytest.raises(ValueError, match="nothing has been learned yet"):
        HubLearner(Learner(nn.Linear(4, 2), "ridge")).save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_missing_package_is_one_sentence():
    program = "import sys; sys.modules['huggingface_hub'] = None; import dlcft.integrations.hub"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'dlcft[hub]'" in done.stderr.splitlines()[-1]


class SmallHub(BaseHTTPRequestHandler):
    """As much of the Hub as one repository needs: it is made, files are committed in one request, and read."""

    commit = "0123456789abcdef0123456789abcdef01234567"

    def log_message(self, *_):
        pass

    def answer(self, content, kind="application/json", code=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            self.answer({"url": f"{self.server.address}/me/scenes", "name": "me/scenes"})
        elif self.path == "/api/validate-yaml":
            assert b"library_name: dlcft" in body
            self.answer({"errors": [], "warnings": []})
        elif self.path == "/api/models/me/scenes/preupload/main":
            files = json.loads(body)["files"]
            told = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]
            self.answer({"files": told})
        elif self.path == "/api/models/me/scenes/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.address}/me/scenes/commit/{self.commit}"
            self.answer({"commitUrl": url, "commitOid": self.commit})
        else:
            self.answer({"error": "unknown"}, code=404)

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        path = self.path.partition("?")[0]
        file = path.removeprefix(f"/me/scenes/resolve/{self.commit}/").removeprefix("/me/scenes/resolve/main/")
        files = self.server.files
        if path.startswith("/api/models/me/scenes/tree/"):
            self.answer([{"type": "file", "path": f, "size": len(files[f]), "oid": "0" * 40} for f in files])
        elif path.startswith("/api/models/me/scenes"):
            listed = [{"rfilename": name} for name in files]
            self.answer({"id": "me/scenes", "sha": self.commit, "siblings": listed, "tags": []})
        elif file in files:
            self.answer(files[file], "application/octet-stream", ETag=f'"{file}"', X_Repo_Commit=self.commit)
        else:
            self.answer({"error": "Entry not found"}, code=404, X_Error_Code="EntryNotFound", X_Repo_Commit=self.commit)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), SmallHub)
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    server.files, server.made, server.asked = {}, [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


PROGRAM = """
import sys, torch
from torch import nn
from dlcft import Learner
from dlcft.integrations.hub import HubLearner

torch.manual_seed(0)
backbone, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.randn(20, 4)
learner = Learner(backbone, "ridge")
learner.learn((x, ["cat", "dog"] * 10), progress=False)
HubLearner(learner).save_pretrained("copy")
print("saved", flush=True)
HubLearner(learner).push_to_hub("me/scenes", private=True, token="a-token")
loaded = HubLearner.from_pretrained("me/scenes", backbone=backbone, cache_dir="cache").learner
assert torch.equal(loaded.outputs(x), learner.outputs(x)) and loaded.directory is None
again = HubLearner.from_pretrained("me/scenes", backbone=backbone, cache_dir="cache", local_files_only=True).learner
assert again.predict(x) == learner.predict(x)
"""


def test_pushed_and_loaded_again(hub, tmp_path):
    home = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **home}, timeout=120
    )
    assert done.returncode == 0, f"{done.stderr}\n{hub.asked}"
    assert hub.made == [{"name": "scenes", "organization": "me", "visibility": "private"}]
    assert sorted(hub.files) == [*OTHERS, "version-1.safetensors"]
    assert hub.files["version-1.safetensors"] == (tmp_path / "copy" / "version-1.safetensors").read_bytes()
    assert ("/api/repos/create", "Bearer a-token") in hub.asked
    # what is downloaded is what is read, and the program's own files stay as they were
    names = {path.name for path in Path(tmp_path / "cache").rglob("*.*") if path.is_symlink()}
    assert names == {"config.json", "manifest.json", "version-1.safetensors"}


def test_nothing_is_uploaded_unless_asked(hub, tmp_path, learner, backbone, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
    HubLearner(learner).save_pretrained(tmp_path / "copy")
    HubLearner.from_pretrained(tmp_path / "copy", backbone=backbone)
    assert hub.asked == []
