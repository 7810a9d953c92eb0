"""The command line, as a person or a script meets it."""

import csv
import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dlcft import Learner
from dlcft.cli import app
from dlcft.cli.opening import First, unbound
from dlcft.data import samples
from dlcft.data.images import Preprocess
from dlcft.learner.train import Run
from dlcft.store import manifest
from dlcft.store.files import CheckpointError
from tests.support.commands import dlcft, dlcft_process
from tests.support.samples import pictures
from tests.support.stores import forge


def test_a_process_of_its_own(tmp_path):
    done = dlcft_process("--version")
    assert (done.returncode, done.stdout.strip()[0].isdigit()) == (0, True)
    done = dlcft_process("update", "--model", "m", "--data", "nowhere", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    small = ["--set", "depth_features=30"]
    data = pictures(tmp_path / "data", ["red", "green"])
    done = dlcft_process("update", "--model", "m", "--data", "data", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = dlcft_process("evaluate", "--model", "m", "--data", data, "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["accuracy"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dmo"], "demo"),
        (["demo", "--epohcs", "3"], "--epochs"),
        (["demo", "--epochs", "many"], "int"),
        (["demo", "--epochs", "0"], "at least 1"),
        (["run", "--method", "dlfct"], "did you mean 'dlcft'?"),
        (["run", "--scenario", "class"], "class-il"),
        (["run", "--set", "epochs"], "key=value is needed"),
        (["run", "--method", "none", "--set", "epoch=3"], "did you mean 'epochs'?"),
        (["run", "--dataset", "seq-cifar1000"], "seq-cifar100"),
        (["run", "--backbone", "shiped"], "shipped"),
        (["list", "method"], "methods"),
        (["report", "--runs", "."], "holds no results"),
        (["pretrain", "--data", "mnistt", "--save", "x.safetensors"], "mnist"),
        (["update", "--model", "m", "--data", "nowhere"], "there is no file or folder"),
        (["update", "--model", "a-file", "--data", "nowhere"], "which is a file; a directory is needed"),
        (["update", "--model", ".", "--data", "."], "which holds a-file and no model"),
        (["update", "--model", "m", "--data", "x", "--page", "a-file/page.html"], "--page is a-file/page.html"),
        (["update", "--model", "m", "--data", "x", "--page", "m/manifest.json"], "in the directory of the model"),
        (["update", "--model", "m", "--data", "x.csv", "--page", "x.csv"], "--page is x.csv, which is read"),
        (["predict", "x", "--model", "m", "--out", "x"], "--out is x, which is read"),
        (["predict", "x", "--model", "nowhere"], "holds no model"),
        (["predict", "x", "--model", "m", "--out", "nowhere/a.csv"], "a file in a folder that exists"),
        (["history", "--model", "nowhere"], "holds no model"),
        (["rollback", "--model", "nowhere"], "holds no model"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(arguments, words, tmp_path):
    (tmp_path / "a-file").write_text("")
    done = dlcft(*arguments, cwd=tmp_path)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, said
    assert words in said
    assert "Traceback" not in said


def test_lists():
    assert "dlcft-exact" in dlcft("list", "methods").stdout.split()
    assert "exact-tk" in json.loads(dlcft("list", "curvatures", "--json").stdout)
    assert "seq-cifar100" in dlcft("list", "datasets").stdout
    assert "shipped" in dlcft("list", "backbones").stdout


def test_run_writes_a_result_once(tmp_path):
    arguments = ["run", "--method", "ridge", "--per-class", "10", "--out", tmp_path, "--json"]
    first = json.loads(dlcft(*arguments).stdout)
    assert first["experiment"]["method"] == "ridge"
    assert len(first["history"]) == 2
    assert json.loads(dlcft(*arguments).stdout) == first
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert "ridge" in dlcft("report", "--runs", tmp_path, "--format", "md").stdout
    page = dlcft("report", "--runs", tmp_path).stdout.strip()
    assert page.endswith("report.html")
    assert "ridge" in Path(page).read_text()


def test_five_months_with_new_labels_in_the_third(tmp_path):
    model, small = tmp_path / "model", ["--set", "depth_features=150"]
    holdout = pictures(tmp_path / "holdout", ["red", "green"], seed=99)
    for month in range(5):
        labels = ["red", "green"] if month < 2 else ["red", "blue", "grey"]
        data = pictures(tmp_path / f"month-{month}", labels, seed=month)
        first = ["--backbone", "shipped", *small] if month == 0 else []
        done = dlcft("update", "--model", model, "--data", data, "--holdout", holdout, *first)
        assert done.returncode == 0, done.stderr
        assert "learned" in done.stdout
        assert ("new labels: blue, grey" in done.stdout) is (month == 2)
        assert "holdout accuracy 100.00%" in done.stdout
    asked = pictures(tmp_path / "asked", ["red", "green", "blue"], seed=7)
    (asked / "broken.png").write_bytes(b"no image")
    answers = tmp_path / "answers.csv"
    done = dlcft("predict", asked, "--model", model, "--out", answers)
    assert done.returncode == 4
    assert "1 of 19 inputs could not be read" in done.stderr
    rows = list(csv.DictReader(answers.read_text().splitlines()))
    assert len(rows) == 18
    assert all(row["label"] in row["input"] for row in rows)
    assert all(0.3 < float(row["probability"]) <= 1 for row in rows)
    lines = dlcft("predict", asked / "red", "--model", model, "--format", "json", "--top", "2").stdout.splitlines()
    assert len(json.loads(lines[0])["answers"]) == 2
    assert json.loads(dlcft("evaluate", "--model", model, "--data", holdout, "--json").stdout)["accuracy"] == 1
    told = json.loads(dlcft("history", "--model", model, "--json").stdout)
    assert len(told["tasks"]) == 5
    assert [v["current"] for v in told["versions"]] == [False, True]
    assert "predicted_increase" in told["tasks"][-1]
    lines = dlcft("history", "--model", model).stdout.splitlines()
    assert lines[4].startswith("task 5: 18 samples, 100.00% on the holdout of then, old loss ")
    assert [line.split(": ")[1].split(",")[0] for line in lines[5:]] == ["4 tasks", "5 tasks"]
    repeated = ["update", "--model", model, "--data", tmp_path / "month-4"]
    done = dlcft(*repeated)
    assert (done.returncode, done.stdout) == (2, "")
    assert "month-4 as task 5 already; --again learns it once more." in done.stderr
    done = dlcft("forget", "--model", model, "--data", tmp_path / "month-4")
    assert "forgot 18 samples" in done.stdout
    assert "The kept version 5 may still know them; dlcft forget" in done.stdout
    assert "would learn 18 samples" in dlcft(*repeated, "--dry-run").stdout, "what was forgotten may be learned"
    assert "version 5 is current" in dlcft("rollback", "--model", model).stdout
    assert "would learn 18 samples" in dlcft(*repeated, "--again", "--dry-run").stdout
    done = dlcft("update", "--model", tmp_path / "mode", "--data", holdout, *small)
    assert "mode: a new model on the backbone 'shipped'; models that are there already: model" in done.stderr
    done = dlcft("update", "--model", model, "--data", holdout, "--backbone", "resnet18-32")
    assert done.returncode == 2
    assert "--backbone is for the first update" in done.stderr


def test_a_dry_run_changes_nothing(tmp_path):
    data = pictures(tmp_path / "data", ["red", "blue"])
    small = ["--set", "depth_features=150"]
    done = dlcft("update", "--model", tmp_path / "model", "--data", data, *small, "--dry-run")
    assert done.returncode == 0
    assert "would learn 12 samples of 2 labels; new: blue, red" in done.stdout
    assert "takes about" in done.stdout
    assert "of memory" in done.stdout
    assert "  instead, 5,000 features: 801 MB of memory, 100 MB on disk" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_a_dry_run_tells_the_size_that_a_version_then_has(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (70, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=pixels, y=np.arange(70))  # more labels than the trial has samples
    settings = ["--set", "depth_features=150"]
    command = ["update", "--model", tmp_path / "model", "--data", tmp_path / "data.npz", *settings, "--json"]
    told = json.loads(dlcft(*command, "--dry-run").stdout)
    assert told["classes"] == 70
    assert told["budgets"][0]["features"] == told["features"]
    written = json.loads(dlcft(*command).stdout)["disk"]["written"]
    assert abs(told["bytes"] - written) < 0.02 * written
    assert told["budgets"][0]["disk"] < told["bytes"]


TEXT_NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(50, 16), nn.Linear(16, 24)

    def forward(self, ids, mask):
        z = self.words(ids) * mask[:, :, None]
        return torch.tanh(self.out(z.sum(1)))

def tokenizer(texts):
    rows = [[sum(map(ord, word)) % 50 for word in text.split()] for text in texts]
    longest = max(map(len, rows))
    padded = [row + [0] * (longest - len(row)) for row in rows]
    mask = [[1.0] * len(row) + [0.0] * (longest - len(row)) for row in rows]
    return {"ids": torch.tensor(padded), "mask": torch.tensor(mask)}

def make():
    return Net(), tokenizer
"""


def sentences(path, topics, seed=0, count=12):
    words = {"food": "bread soup salt plate", "sea": "wave ship salt gull", "code": "loop bug test merge"}
    draw = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for topic in topics:
            for _ in range(count):
                chosen = draw.choice(words[topic].split(), size=draw.integers(2, 6))
                writer.writerow([" ".join(chosen), topic])
    return path


def test_texts(tmp_path):
    (tmp_path / "my_text.py").write_text(TEXT_NETWORK)
    january = sentences(tmp_path / "january.csv", ["food", "sea"])
    february = sentences(tmp_path / "february.csv", ["sea", "code"], seed=1)
    holdout = sentences(tmp_path / "holdout.csv", ["food", "sea", "code"], seed=2)
    small = ["--set", "depth_features=90"]
    model = ["--model", tmp_path / "model"]
    model += ["--backbone", "my_text:make"]
    done = dlcft("update", *model, "--data", january, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = dlcft("update", *model, "--data", february, "--holdout", holdout, "--json", cwd=tmp_path)
    facts = json.loads(done.stdout)
    assert facts["new_labels"] == ["code"]
    assert facts["accuracy"] > 0.8
    assert Path(facts["page"]).parent == tmp_path / "model-updates"
    assert json.loads(dlcft("evaluate", *model, "--data", holdout, "--json", cwd=tmp_path).stdout)["accuracy"] > 0.8
    asked = tmp_path / "asked.csv"
    asked.write_text("text\nbug test loop\n")
    rows = list(csv.DictReader(dlcft("predict", asked, *model, cwd=tmp_path).stdout.splitlines()))
    assert [(row["input"], row["label"]) for row in rows] == [("bug test loop", "code")]
    for arguments, words in (
        (["update", *model, "--data", pictures(tmp_path / "images", ["red"])], "this backbone reads texts"),
        (["predict", tmp_path / "images", *model], "this backbone reads texts"),
        (["update", "--model", tmp_path / "other", "--data", january], "holds texts, and this backbone reads images"),
        (["evaluate", *model, "--data", asked], "the columns text, label are needed"),
    ):
        done = dlcft(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert words in " ".join(done.stderr.split()), done.stderr
        assert "Traceback" not in done.stderr


def run(*arguments):
    """A command in this process."""
    app([str(argument) for argument in arguments], result_action="return_value")


def test_one_layer_learns_and_an_interrupted_update_may_be_begun_anew(tmp_path, capsys, monkeypatch):
    data, other = pictures(tmp_path / "data", ["red", "blue"], count=3), pictures(tmp_path / "other", ["red"], count=2)
    arguments = ["update", "--model", tmp_path / "model", "--method", "dlcft", "--train", "layer4.1.conv2"]
    settings = {"epochs": 2, "batch_size": 3}
    arguments += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    step = Run._step

    def killed(self, *given):
        if self.position.epoch:
            raise KeyboardInterrupt
        steps.append(given)
        return step(self, *given)

    monkeypatch.setattr("dlcft.learner.notes.PROGRESS_SECONDS", 0)
    monkeypatch.setattr(Run, "_step", killed)
    for _ in range(2):  # the same command goes on where the first was interrupted, and not from the beginning
        steps = []
        with pytest.raises(KeyboardInterrupt):
            run(*arguments, "--data", data)
    assert steps == []
    assert "a first update that was interrupted goes on" in capsys.readouterr().err
    monkeypatch.setattr(Run, "_step", step)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "model").iterdir())
    learner, _ = unbound(tmp_path / "model", First(None, None, "dlcft", ["layer4.1.conv2"], settings), data)
    learner.learn(data, progress=False)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "model").iterdir()) == before
    with pytest.raises(ValueError, match="a first update that was interrupted; give the same dlcft update"):
        run("predict", data, "--model", tmp_path / "model")
    with pytest.raises(ValueError, match="interrupted, with other settings"):
        run(*arguments[:3], "--data", data)
    with pytest.raises(CheckpointError, match="dlcft update --restart"):
        run(*arguments, "--data", other)
    run(*arguments, "--data", other, "--restart", "--json")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["samples"] == 2
    header = json.loads((tmp_path / "model" / "manifest.json").read_text())["versions"][-1]["header"]
    assert header["train"] == ["layer4.1.conv2"]


def test_a_model_that_was_adopted_in_python_goes_on_at_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_classifier.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def classifier():\n"
        "    torch.manual_seed(0)\n"
        "    features = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 8), nn.Tanh()\n"
        "    return nn.Sequential(*features, nn.Linear(8, 2))\n"
        "def features():\n"
        "    return classifier()[:4].append(nn.Identity())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    data, more = pictures(tmp_path / "data", ["red", "green"]), pictures(tmp_path / "more", ["green", "blue"], seed=1)
    classifier = importlib.import_module("my_classifier").classifier()
    options = {"preprocess": Preprocess(size=(8, 8)), "depth_features": 28}
    Learner.adopt(classifier, "4", ["green", "red"], data, **options).save("model")
    with pytest.raises(ValueError, match="give --backbone NAME"):
        run("update", "--model", "model", "--data", more)
    with pytest.raises(CheckpointError, match="give the same network"):
        run("update", "--model", "model", "--data", more, "--backbone", "shipped")
    run("update", "--model", "model", "--data", more, "--backbone", "my_classifier:features", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert facts["new_labels"] == ["blue"]
    own = ["--backbone", "my_classifier:features"]
    run("evaluate", "--model", "model", "--data", more, "--json", *own)
    assert json.loads(capsys.readouterr().out)["accuracy"] == 1
    with pytest.raises(ValueError, match=r"has learned .* as task 2 already"):
        run("update", "--model", "model", "--data", more, *own)


@pytest.mark.parametrize("name", ["os:abort", "my_network:make", "timm:resnet18", "torchvision:resnet18", "hf:bert"])
def test_a_directory_from_someone_else_runs_no_code(name, tmp_path):
    """A forged manifest with a valid checksum: nothing is imported, called or downloaded."""
    data = pictures(tmp_path / "data", ["red", "green"])
    model = ["--model", tmp_path / "model"]
    assert dlcft("update", *model, "--data", data, "--method", "ridge").returncode == 0
    notes = {"name": name, "weights": None, "width": None}
    forge(tmp_path / "model", lambda fields: fields["versions"][0]["header"]["notes"].update(backbone=notes))
    marker = tmp_path / "ran"
    (tmp_path / "my_network.py").write_text(f"open({str(marker)!r}, 'w')")
    more = pictures(tmp_path / "more", ["blue"])
    for command in (
        ["predict", data / "red", *model],
        ["evaluate", *model, "--data", data],
        ["forget", *model, "--data", data],
        ["update", *model, "--data", more],
        ["update", *model, "--data", more, "--dry-run"],
    ):
        done = dlcft(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert (
            f"made on the backbone '{name}', whose code is not part of dlcft; if you trust it, repeat it" in done.stderr
        )
        assert f"--backbone {name} (in Python" in done.stderr
    assert not marker.exists()


def test_a_gate_has_its_own_exit_code(tmp_path):
    model, small = tmp_path / "model", ["--set", "depth_features=150"]
    good = pictures(tmp_path / "good", ["red", "green"])
    bad = tmp_path / "bad"
    pictures(bad / "x", ["red", "green"], count=30)
    (bad / "x" / "red").rename(bad / "green")
    (bad / "x" / "green").rename(bad / "red")
    (bad / "x").rmdir()
    assert dlcft("update", "--model", model, "--data", good, *small).returncode == 0
    done = dlcft("update", "--model", model, "--data", bad, "--holdout", good, "--max-drop", "0.1")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "it is not current" in done.stdout
    assert "--holdout was learned as task 1" in done.stderr
    assert "version 2 (kept aside by a gate): 2 tasks" in dlcft("history", "--model", model).stdout
    versions = json.loads(dlcft("history", "--model", model, "--json").stdout)["versions"]
    assert [(v["tasks"], v["current"], v["accepted"]) for v in versions] == [(1, True, True), (2, False, False)]
    done_twice = dlcft("update", "--model", model, "--data", bad, "--holdout", bad)
    assert "the same samples as --data" in done_twice.stderr
    refused = dlcft("update", "--model", model, "--data", bad, "--max-drop", "0.1", "--dry-run")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "accuracy on known labels fell by" in done.stdout
    page = Path(done.stdout.strip().splitlines()[-1].removeprefix("page: ")).read_text()
    assert "Kept, but not current" in page
    assert "12 answers turned from right to wrong" in page
    assert json.loads(dlcft("evaluate", "--model", model, "--data", good, "--json").stdout)["accuracy"] == 1


def test_a_first_update_that_fails_leaves_nothing(tmp_path):
    data, model = pictures(tmp_path / "data", ["red", "blue"]), tmp_path / "model"
    broken = pictures(tmp_path / "broken", ["red", "blue"])
    (broken / "red" / "0.png").write_bytes(b"no image")
    for arguments in (
        ["--data", tmp_path / "nowhere"],
        ["--data", data, "--set", "depth_features=-5"],
        ["--data", data, "--set", "depth_features=abc"],
        ["--data", broken, "--set", "depth_features=100"],
        ["--data", broken, "--method", "dlcft"],
    ):
        done = dlcft("update", "--model", model, *arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert not model.exists()
    model.mkdir()
    assert dlcft("update", "--model", model, "--data", broken, "--method", "dlcft").returncode == 2
    assert list(model.iterdir()) == []
    first = ["update", "--model", model, "--data", data, "--set", "depth_features=150"]
    done = dlcft(*first, "--holdout", pictures(tmp_path / "held", ["red"], seed=3), "--max-drop", "0.1")
    assert "nothing was known before: gates count from the next update on" in done.stderr


def test_old_versions_are_removed_when_asked(tmp_path):
    model = tmp_path / "model"
    small = ["--set", "depth_features=150"]
    for month in range(2):
        data = pictures(tmp_path / f"month-{month}", ["red", "blue"], seed=month)
        dlcft("update", "--model", model, "--data", data, *(small if month == 0 else []))
    half = tmp_path / "half"
    shutil.copytree(data / "red", half / "red")
    assert "The kept version 2 may still know them" in dlcft("forget", "--model", model, "--data", half).stdout
    done = dlcft("update", "--model", model, "--data", data)
    assert "as task 2 already, and forgotten some samples since; --again" in done.stderr
    assert dlcft("forget", "--model", model, "--keep", "1").stdout == "removed version 2; version 3 is current.\n"
    assert dlcft("forget", "--model", model, "--keep", "1").stdout == "removed nothing; version 3 is current.\n"
    assert [path.name for path in model.glob("version-*")] == ["version-3.safetensors"]
    assert json.loads(dlcft("evaluate", "--model", model, "--data", data, "--json").stdout)["accuracy"] == 1


def test_an_update_reads_the_manifest_twice_and_fingerprints_data_once(tmp_path, monkeypatch):
    january, february = pictures(tmp_path / "january", ["red"]), pictures(tmp_path / "february", ["blue"])
    assert dlcft("update", "--model", tmp_path / "m", "--data", january, "--method", "ridge").returncode == 0
    read, hashed = [], []
    real, fingerprint = manifest.read_json, samples.fingerprint
    monkeypatch.setattr(manifest, "read_json", lambda path: read.append(path.name) or real(path))
    monkeypatch.setattr(samples, "fingerprint", lambda source: hashed.append(source) or fingerprint(source))
    given = ["--model", tmp_path / "m", "--data", february, "--holdout", january, "--max-drop", "0.5"]
    assert dlcft("update", *given).returncode == 0
    assert read.count("manifest.json") <= 2
    assert len(hashed) == 2, "of the data and of the holdout"


def test_a_first_update_given_again_says_that_it_was_learned(tmp_path):
    """As after a kill between its commit and its end."""
    data = pictures(tmp_path / "data", ["red", "green"])
    first = ["update", "--model", tmp_path / "m", "--data", data, "--backbone", "shipped", "--method", "ridge"]
    first += ["--set", "ridge=0.5"]
    assert dlcft(*first).returncode == 0
    done = dlcft(*first)
    assert done.returncode == 2
    assert f"has learned {data} as task 1 already" in done.stderr
    done = dlcft(*first[:-1], "ridge=0.7")
    assert "--set is for the first update" in done.stderr


def test_a_page_that_fails_does_not_make_an_update_look_failed(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise KeyError("broken")

    monkeypatch.setattr("dlcft.update.page.to_html", broken)
    data = pictures(tmp_path / "data", ["red", "green"])
    done = dlcft("update", "--model", tmp_path / "m", "--data", data, "--method", "ridge")
    assert done.returncode == 0
    assert "could not be written" in done.stderr
    assert "version 1 is current" in done.stdout


def test_forgotten_versions_are_deleted_or_named(tmp_path, monkeypatch):
    data, model = pictures(tmp_path / "data", ["red", "green"]), tmp_path / "m"
    assert dlcft("update", "--model", model, "--data", data, "--method", "ridge").returncode == 0
    stale = model / "version-7.safetensors"  # as a kill between the manifest and the sweep leaves it
    stale.write_bytes(b"old")
    done = dlcft("forget", "--model", model, "--keep", "1")
    assert (done.returncode, stale.exists()) == (0, False)
    stale.write_bytes(b"old")
    unlink = Path.unlink

    def refused(self, *given, **options):
        if self.name == stale.name:
            raise PermissionError("in use")
        unlink(self, *given, **options)

    monkeypatch.setattr(Path, "unlink", refused)
    for words in ([], ["--data", data]):
        done = dlcft("forget", "--model", model, "--keep", "1", *words)
        assert done.returncode == 5
        assert "version-7.safetensors in" in done.stderr
        assert "could not be deleted, and may still know forgotten samples" in done.stderr
