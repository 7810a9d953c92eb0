"""What goes wrong at the command line costs nobody's model, and is told in one sentence."""

import csv
import errno
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest

from dlcft import Learner
from dlcft.cli import main
from dlcft.cli.arguments import say
from dlcft.cli.opening import open_learner, open_store
from dlcft.store.store import Store
from dlcft.update import forecast
from tests.support.commands import dlcft, dlcft_process
from tests.support.samples import pictures

SMALL = ["--set", "depth_features=50"]


def refused(capsys, *words):
    """The sentence, without `dlcft: `."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    said = capsys.readouterr().err
    assert stopped.value.code == 2, said
    assert "Traceback" not in said
    return said


def test_a_first_update_that_fails_leaves_what_another_process_has_made(tmp_path, capsys, monkeypatch):
    model, january = tmp_path / "m", pictures(tmp_path / "january", ["red", "green"])
    learn = Learner.learn

    def overtaken(self, *arguments, **options):
        monkeypatch.setattr(Learner, "learn", learn)
        main(["update", "--model", str(model), "--data", str(january), *SMALL])
        raise ValueError("an image cannot be read")

    monkeypatch.setattr(Learner, "learn", overtaken)
    assert "cannot be read" in refused(capsys, "update", "--model", model, "--data", january, *SMALL)
    assert Store(model).current.number == 1
    main(["evaluate", "--model", str(model), "--data", str(january)])
    assert "accuracy 100" in capsys.readouterr().out


def test_a_first_update_that_is_refused_leaves_what_another_one_trains(tmp_path, capsys, monkeypatch):
    model, january = tmp_path / "m", pictures(tmp_path / "january", ["red", "green"])
    arguments = ["update", "--model", model, "--data", january, "--method", "dlcft-diagonal", "--set", "epochs=1"]
    save = Learner.save

    def overtaken(self, *places, **options):
        monkeypatch.setattr(Learner, "save", save)
        main([str(word) for word in arguments])
        with Store(model).lock():
            return save(self, *places, **options)

    monkeypatch.setattr(Learner, "save", overtaken)
    assert "in use" in refused(capsys, *arguments)
    assert Store(model).current.header["tasks"] == 1


@pytest.mark.parametrize("left", [".dlcft-0123456789abcdef.tmp", "version-1.safetensors"])
def test_what_a_killed_first_commit_leaves_is_no_hindrance(tmp_path, capsys, left):
    model, january = tmp_path / "m", pictures(tmp_path / "january", ["red", "green"])
    model.mkdir()
    (model / left).write_bytes(b"half")
    main(["update", "--model", str(model), "--data", str(january), *SMALL])
    assert "version 1 is current" in capsys.readouterr().out
    assert sorted(path.name for path in model.iterdir()) == [".lock", "manifest.json", "version-1.safetensors"]


def test_a_damaged_version_is_not_left_alone(tmp_path, capsys):
    model = tmp_path / "m"
    for month, label in (("january", "red"), ("february", "green")):
        data = pictures(tmp_path / month, [label, "blue"])
        main(["update", "--model", str(model), "--data", str(data), *(SMALL if month == "january" else [])])
    (model / "version-2.safetensors").write_bytes(b"damaged")
    assert "version-2" in refused(capsys, "forget", "--model", model, "--keep", "1")
    assert [version.number for version in Store(model).look().versions] == [1, 2]


def test_what_is_learned_twice_and_forgotten_once_is_told(tmp_path, capsys):
    model, january = tmp_path / "m", pictures(tmp_path / "january", ["red", "green"])
    main(["update", "--model", str(model), "--data", str(january), *SMALL])
    main(["update", "--model", str(model), "--data", str(january), "--again"])
    capsys.readouterr()
    main(["forget", "--model", str(model), "--data", str(january)])
    assert "learned more than once" in capsys.readouterr().out
    main(["forget", "--model", str(model), "--data", str(january)])
    assert "learned more than once" not in capsys.readouterr().out


def test_a_holdout_of_other_labels_is_refused_in_a_dry_run_too(tmp_path, capsys):
    model, january = tmp_path / "m", pictures(tmp_path / "january", ["red", "green"])
    numbered = tmp_path / "numbered.npz"
    np.savez(numbered, x=np.zeros((4, 20, 24, 3), np.uint8), y=np.arange(4))
    arguments = ["update", "--model", model, "--data", january, *SMALL, "--holdout", numbered]
    for more in ([], ["--dry-run"]):
        assert "the holdout has none" in refused(capsys, *arguments, *more)
    main(["update", "--model", str(model), "--data", str(january), *SMALL])
    again = ["update", "--model", model, "--data", january, "--again", "--holdout", numbered, "--max-drop", "0.1"]
    assert "measured on known labels" in refused(capsys, *again, "--dry-run")


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
def test_a_class_whose_name_is_no_text_is_refused(tmp_path, capsys):
    january = pictures(tmp_path / "january", ["red", "green"])
    os.rename(os.fsencode(january / "red"), os.fsencode(january) + b"/caf\xe9")
    assert "UTF-8 cannot hold" in refused(capsys, "update", "--model", tmp_path / "m", "--data", january, *SMALL)
    assert not (tmp_path / "m").exists()


def test_a_terminal_that_cannot_show_a_label_costs_nothing(tmp_path, monkeypatch):
    january = pictures(tmp_path / "january", ["red", "green"])
    (january / "red").rename(january / "été")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = dlcft_process("update", "--model", tmp_path / "m", "--data", january, *SMALL)
    assert done.returncode == 0, done.stderr
    assert r"\xe9t\xe9" in done.stdout


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("method=none", "has no setting 'method'; it has"),
        ("preprocess=3", "has no setting 'preprocess'"),
        ("scale=1e400", "scale is inf; it must be a finite number"),
    ],
)
def test_settings_that_cannot_be_meant(tmp_path, capsys, setting, words):
    january = pictures(tmp_path / "january", ["red", "green"])
    assert words in refused(capsys, "update", "--model", tmp_path / "m", "--data", january, "--set", setting)
    assert not (tmp_path / "m").exists()
    assert words in refused(capsys, "run", "--out", tmp_path / "runs", "--set", setting)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.zeros((2, 8, 8, 3), np.uint8), np.array([True, False]), "an integer or a string is needed"),
        (np.zeros((2, 8, 8, 3), np.uint8), np.array([b"cat", b"dog"]), "an integer or a string is needed"),
        (np.zeros((2, 0, 8, 3), np.uint8), np.array([0, 1]), "each of them must hold something"),
    ],
)
def test_arrays_that_cannot_be_meant(tmp_path, capsys, x, y, words):
    np.savez(tmp_path / "data.npz", x=x, y=y)
    assert words in refused(capsys, "update", "--model", tmp_path / "m", "--data", tmp_path / "data.npz", *SMALL)


def test_a_backbone_that_fails_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "broken_network.py").write_text("def make():\n    raise KeyError('weights')\n")
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, "update", "--model", "m", "--data", "x", "--backbone", "broken_network:make")
    assert "'broken_network:make' failed: KeyError: 'weights'" in said


def test_an_empty_argument_is_not_the_current_directory(capsys):
    assert "one of the arguments is empty" in refused(capsys, "predict", "", "--model", "m")


def test_answers_do_not_replace_an_image(tmp_path, capsys):
    january = pictures(tmp_path / "january", ["red"])
    said = refused(capsys, "predict", january, "--model", "m", "--out", january / "red" / "0.png")
    assert "the name of an image" in said


def test_a_trial_that_is_killed_is_told(monkeypatch):
    class Killed(ProcessPoolExecutor):
        def submit(self, work, *arguments):
            return super().submit(os._exit, 9)

    monkeypatch.setattr(forecast, "ProcessPoolExecutor", Killed)
    with pytest.raises(ChildProcessError, match="did the memory run out"):
        forecast.apart(len, "")


@pytest.mark.skipif(sys.platform != "linux", reason="pipes with names")
def test_answers_go_where_a_link_leads_and_into_a_pipe(tmp_path):
    january, model = pictures(tmp_path / "january", ["red", "green"]), tmp_path / "m"
    main(["update", "--model", str(model), "--data", str(january), *SMALL])
    target, link, pipe = (tmp_path / name for name in ("answers.csv", "link.csv", "pipe"))
    target.write_text("old")
    link.symlink_to(target)
    asked = ["predict", str(january), "--model", str(model), "--out"]
    main([*asked, str(link)])
    assert link.is_symlink()
    assert len(target.read_text().splitlines()) == 13
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_text)
        main([*asked, str(pipe)])
        assert read.result() == target.read_text()
    assert pipe.is_fifo()
    assert not [path for path in tmp_path.iterdir() if path.name[0] == "."]


def test_a_network_that_is_another_each_time_is_refused(tmp_path, capsys, monkeypatch):
    text = "from torch import nn\ndef network():\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4))\n"
    (tmp_path / "unseeded.py").write_text(text.replace("nn.LazyLinear(4)", "nn.Linear(1440, 4)"))
    monkeypatch.chdir(tmp_path)
    january = pictures(tmp_path / "january", ["red", "green"])
    said = refused(capsys, "update", "--model", "m", "--data", january, "--backbone", "unseeded:network", *SMALL)
    assert "makes a network with other weights each time" in said
    assert not (tmp_path / "m").exists()


def test_pixels_as_floats_are_no_images_of_floats(tmp_path, capsys):
    x, y = np.random.default_rng(0).integers(0, 256, (8, 20, 24, 3), np.uint8), ["red", "green"] * 4
    np.savez(tmp_path / "bytes.npz", x=x, y=y)
    np.savez(tmp_path / "floats.npz", x=x.astype(np.float32), y=y)
    main(["update", "--model", str(tmp_path / "m"), "--data", str(tmp_path / "bytes.npz"), *SMALL])
    for command in ("update", "evaluate"):
        said = refused(capsys, command, "--data", tmp_path / "floats.npz", "--model", tmp_path / "m")
        assert "images are floats up to 255; give floats in [0, 1], or uint8." in said


def test_a_label_cannot_move_the_cursor_nor_run_in_a_spreadsheet(tmp_path, capsys):
    """Labels with control characters are refused; a formula is a text in answers.csv, and itself in JSON."""
    pictures(tmp_path / "data", ["red", "green"])
    (tmp_path / "data" / "red").rename(tmp_path / "data" / "=1+cmd|x")
    (tmp_path / "data" / "green").rename(tmp_path / "data" / "-5")
    model, data = tmp_path / "m", tmp_path / "data"
    dlcft("update", "--model", model, "--data", data, "--method", "ridge")
    for file, options in (("a.csv", []), ("a.json", ["--format", "json"])):
        dlcft("predict", data, "--model", model, "--out", tmp_path / file, *options)
    with (tmp_path / "a.csv").open() as file:
        assert {row["label"] for row in csv.DictReader(file)} == {"'=1+cmd|x", "-5"}
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert {json.loads(line)["answers"][0]["label"] for line in lines} == {"=1+cmd|x", "-5"}
    (data / "-5").rename(data / "\x1b[31mred")
    capsys.readouterr()
    said = refused(capsys, "update", "--model", tmp_path / "other", "--data", data)
    assert said == "dlcft: a label is '\\x1b[31mred', which has control characters; rename it.\n"


def test_what_others_have_named_cannot_move_the_cursor(capsys):
    say("label \x1b]0;title\x07 \u202egnp.exe \x9b2J\nnext line, ünïcödé 猫")
    shown = capsys.readouterr().out
    assert shown == "label \\u001b]0;title\\u0007 \\u202egnp.exe \\u009b2J\nnext line, ünïcödé 猫\n"


def test_two_spellings_of_a_word_are_one_label(tmp_path, caplog):
    pictures(tmp_path / "one", ["red"])
    for name, spelling in (("one", "caf\u00e9"), ("two", "cafe\u0301")):
        pictures(tmp_path / name, ["red", "green"])
        (tmp_path / name / "red").rename(tmp_path / name / spelling)
    model = tmp_path / "m"
    dlcft("update", "--model", model, "--data", tmp_path / "one", "--method", "ridge")
    assert not caplog.messages
    dlcft("update", "--model", model, "--data", tmp_path / "two", "--again")
    assert caplog.messages == ["1 labels are read in Unicode's composed form (NFC), such as 'caf\u00e9'"]
    assert open_learner(open_store(model)).labels() == ["caf\u00e9", "green"]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_not_read(tmp_path, capsys, kind):
    path = "/dev/zero" if kind == "device" else str(tmp_path / "pipe.png")
    if kind == "pipe":
        os.mkfifo(path)
    (tmp_path / "table.csv").write_text(f"path,label\n{path},cat\n")
    said = refused(capsys, "update", "--model", tmp_path / "m", "--data", tmp_path / "table.csv")
    assert f"table.csv names '{path}', which is no regular file" in said
    said = refused(capsys, "update", "--model", tmp_path / "m", "--data", path)
    assert said == f"dlcft: {path} is neither a folder nor a regular file; give one of these.\n"


def test_what_cannot_be_printed_after_the_commit_is_not_taken_for_a_failure(tmp_path, capsys, monkeypatch):
    data = pictures(tmp_path / "data", ["red", "green"])

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dlcft.cli.model.print_update", full)
    said = refused(capsys, "update", "--model", tmp_path / "m", "--data", data, "--method", "ridge")
    assert said.splitlines()[-1] == (
        f"dlcft: {tmp_path / 'm'}: version 1 is written, but this cannot be printed (No space left on device)."
    )


def test_an_option_without_its_value(capsys):
    assert refused(capsys, "history", "--model=") == refused(capsys, "history", "--model", "")
