"""One run: the same however often it was killed, never computed twice, and in the shape that reports read."""

import json
import sys
from dataclasses import dataclass, replace

import joblib
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dlcft.backbones import ResNet18
from dlcft.bench import experiment as module
from dlcft.bench.datasets import load
from dlcft.bench.events import append_event
from dlcft.bench.experiment import RESULT_FORMAT, Experiment, Result, make_stream, run
from dlcft.bench.metrics import NEIGHBOURS, Examiner, evenly, nearest_neighbours
from dlcft.bench.report import to_html
from dlcft.learner.learner import Learner
from dlcft.methods import Finetune
from dlcft.methods.recipes import RECIPES, Recipe

SMALL = Experiment(dataset="digits", tasks=2, size=8, classes=4, per_class=6)
TRAINED = {"epochs": 2, "batch_size": 8}


def small(method, **changes):
    settings = {} if method in ("ridge", "ranpac") else TRAINED
    return replace(SMALL, method=method, settings={**settings, **changes.pop("settings", {})}, **changes)


def compute(experiment, out):
    return run(experiment, out, report=lambda line: None)


def figures(result):
    """All that does not depend on the clock."""
    return [{k: v for k, v in entry.items() if not k.startswith("seconds")} for entry in result.history]


class Killed(BaseException):
    pass


@dataclass
class Gentle(Finetune):
    """A method of one's own, with a setting of its own."""

    strength: float = 1.0

    def objective(self, task, batch):
        head = task.model.head(task.head).weight
        return super().objective(task, batch) + self.strength * head.square().sum()


def test_a_method_of_ones_own(tmp_path):
    experiment = small(f"{__name__}:Gentle", settings={"strength": 3.0})
    result = compute(experiment, tmp_path)
    assert (tmp_path / experiment.file).exists()
    assert result.recipe["method"] == {"kind": f"{__name__}:Gentle", "strength": 3.0}
    assert compute(experiment, tmp_path) == result
    assert "Gentle" in to_html([result])
    with pytest.raises(ValueError, match="has no setting 'strenght'"):
        small(f"{__name__}:Gentle", settings={"strenght": 3.0})


def test_killed_and_resumed(tmp_path, monkeypatch):
    experiment = small("derpp", knn=2, settings={"buffer": 4})
    expected = compute(experiment, tmp_path / "whole")
    learn, calls = Learner.learn, []

    def dies(self, *args, **kwargs):
        calls.append(self.tasks)
        if len(calls) == 2:
            raise Killed
        return learn(self, *args, **kwargs)

    monkeypatch.setattr(Learner, "learn", dies)
    with pytest.raises(Killed):
        compute(experiment, tmp_path / "killed")
    assert not list((tmp_path / "killed").glob("*.json"))
    assert figures(compute(experiment, tmp_path / "killed")) == figures(expected)
    assert calls == [0, 1, 1], "the first task was not learned again"
    assert not (tmp_path / "killed" / f".{experiment.key}").exists()


def test_never_computed_twice(tmp_path, monkeypatch):
    experiment = small("ridge")
    first = compute(experiment, tmp_path)
    monkeypatch.setattr(module, "load", None)
    assert compute(experiment, tmp_path) == first
    with pytest.raises(TypeError):
        compute(replace(experiment, seed=1), tmp_path)


def test_json_round_trip(tmp_path):
    experiment = small("none", settings={"lr": 1e-3, "clip": None})
    result = compute(experiment, tmp_path)
    assert Result.read(tmp_path / experiment.file) == result
    assert Experiment(**json.loads(json.dumps(experiment.to_dict()))) == experiment
    assert len({experiment.key, replace(experiment, seed=1).key, replace(experiment, knn=1).key}) == 3
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="no result file"):
        Result.read(tmp_path / "other.json")


def test_a_result_notes_its_row(tmp_path):
    assert compute(small("ridge"), tmp_path).row is None
    noted = run(small("ridge"), tmp_path, row="ridge", tuned=True)
    assert (noted.row, noted.tuned) == ("ridge", True)
    assert compute(small("ridge"), tmp_path) == noted == Result.read(tmp_path / small("ridge").file)
    assert run(small("none"), tmp_path, row="None", report=lambda line: None).row == "None"


@pytest.mark.parametrize("scenario", ["data-il", "task-il", "class-il"])
@pytest.mark.parametrize(
    ("method", "joint"), [("none", False), ("none", True), ("none-linear", True), ("ranpac", False)]
)
def test_shapes(method, joint, scenario, tmp_path):
    settings = {"random_features": 32} if method == "ranpac" else {}
    result = compute(small(method, scenario=scenario, joint=joint, settings=settings), tmp_path)
    shared = scenario == "data-il"
    two_rounds = method == "none-linear" and scenario != "class-il"
    assert len(result.history) == (1 if joint and not two_rounds else 2)
    assert len(result.history[-1]["accuracy"]) == (1 if shared else 2)
    assert result.curve[-1] == (len(result.history), pytest.approx(result.accuracy))
    assert (result.matrix is None) == (joint or shared)
    if result.matrix is not None:
        assert result.matrix.shape == (2, 2)
        assert result.matrix.isnan().tolist() == [[False, True], [False, False]]
    assert (result.converged is None) == (method == "ranpac")
    assert result.state_bytes > 0
    assert result.environment["backbone"]


def test_how_often_a_learner_learns():
    for scenario in ("data-il", "task-il", "class-il"):
        base = replace(SMALL, scenario=scenario, tasks=3, classes=6)
        auto = 1 if scenario == "class-il" else 2
        counts = {"none": 1, "ridge": 1, "none-linear": auto, "dlcft-paper": auto, "dlcft": auto}
        for method, count in counts.items():
            assert replace(base, method=method, joint=True).rounds == count, (scenario, method)
            assert replace(base, method=method).rounds == 3
            assert replace(base, method=method, first=2).rounds == 2
        linear = replace(base, method="none-linear", joint=True)
        assert replace(linear, settings={"start": "pretrained"}).rounds == 1
        assert replace(linear, settings={"start": "first-task"}).rounds == 2


@pytest.mark.parametrize("scenario", ["data-il", "task-il"])
def test_joint_training_of_a_linearised_network_starts_from_the_first_task(scenario, tmp_path):
    changes = {"scenario": scenario, "tasks": 3, "classes": 6, "joint": True, "evaluate_every": 1, "knn": 1}
    experiment, lines = small("none-linear", **changes), []
    result = run(experiment, tmp_path, report=lines.append)
    first, last = result.history
    stream = make_stream(experiment, load("digits"))
    assert [entry["samples"] for entry in result.history] == [12, 36]
    assert first["heads"] == ([stream.tasks[0].head] if scenario == "task-il" else ["main"])
    assert last["heads"] == ([task.head for task in stream.tasks] if scenario == "task-il" else ["main"])
    # the last round alone is tested
    assert first["accuracy"] is None
    assert "knn" not in first
    assert 0 < last["knn"] <= 1
    assert result.curve == [(2, pytest.approx(result.accuracy))]
    assert len(lines) == 1
    assert "task 2 of 2" in lines[0]
    # by hand: the first task trains the plain network, everything together the linearised one
    backbone = module.load_backbone("shipped")
    preprocess = replace(backbone.preprocess, size=(8, 8))
    learner = Learner(backbone.module, "none-linear", scenario=scenario, preprocess=preprocess, **TRAINED)
    learner.learn(stream.tasks[0].train, head=stream.tasks[0].head, progress=False)
    start = learner.trained_backbone.state_dict()
    assert any(not torch.equal(start[name], t) for name, t in backbone.module.state_dict().items())
    if scenario == "task-il":
        learner.learn_jointly({task.head: task.train for task in stream.tasks}, progress=False)
    else:
        x, y = (torch.cat([task.train[place] for task in stream.tasks]) for place in (0, 1))
        learner.learn((x, y), progress=False)
    assert all(torch.equal(start[name], t) for name, t in learner.trained_backbone.state_dict().items())
    assert [entry["loss"] for entry in result.history] == [pytest.approx(record.loss) for record in learner.history]
    assert [len(entry["loss"]) for entry in result.history] == [2 * TRAINED["epochs"], TRAINED["epochs"]]
    tested = stream.tasks[:1] if scenario == "data-il" else stream.tasks
    assert last["accuracy"] == [learner.evaluate(task.test, head=task.head)["accuracy"] for task in tested]


def test_joint_training_killed_between_its_rounds(tmp_path, monkeypatch):
    experiment = small("none-linear", joint=True)
    expected = compute(experiment, tmp_path / "whole")
    learn, calls = Learner.learn, []

    def dies(self, *args, **kwargs):
        calls.append(self.tasks)
        if len(calls) == 2:
            raise Killed
        return learn(self, *args, **kwargs)

    monkeypatch.setattr(Learner, "learn", dies)
    with pytest.raises(Killed):
        compute(experiment, tmp_path / "killed")
    assert figures(compute(experiment, tmp_path / "killed")) == figures(expected)
    assert calls == [0, 1, 1], "the first task was not learned again"


@pytest.mark.parametrize(
    ("method", "augment", "expected"),
    [
        ("none", "none", False),
        ("none", "flip", True),
        ("none", "crop1+flip", True),
        ("none", "crop1", False),
        ("ridge", "flip", True),
    ],
)
def test_mirror_images_are_tested_where_they_are_learned(method, augment, expected, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        module, "Examiner", lambda *words, **options: made.append(Examiner(*words, **options)) or made[-1]
    )
    faster = {} if method == "ridge" else {"lr": 0.01}
    result = compute(small(method, settings={"augment": augment, **faster}), tmp_path)
    (examiner,) = made
    assert examiner.mirrored is expected
    # and these are the numbers of the result
    plain = Examiner(examiner.learner, examiner.stream, mirrored=False)
    both = Examiner(examiner.learner, examiner.stream, mirrored=True)
    assert result.history[-1]["accuracy"] == (both if expected else plain).accuracies(2)
    assert (plain.accuracies(2) != both.accuracies(2)) == (method == "none"), "here it makes a difference"


def curves(*losses):
    """A result with these losses after the epochs of each task."""
    history = [{"loss": list(loss), "accuracy": [0.5]} for loss in losses]
    return Result(SMALL, history, 1.0, 1.0, 1, {}, {})


def test_training_has_converged_when_the_last_epochs_hardly_lower_the_loss():
    assert module.CONVERGED == 0.01
    assert curves([10.0, 5.0, 4.91]).converged is True, "less than 1 % of the first epoch's loss"
    assert curves([10.0, 5.0, 4.89]).converged is False
    assert curves([10.0, 0.08, 0.01]).converged is True, "though it is most of what was left"
    assert curves([10.0, 5.0, 5.5]).converged is True, "a rise is no fall"
    # all tasks together: a fall of 0.15 in one of them is more than 0.1, and less than 0.2
    assert curves([10.0, 5.0, 4.85]).converged is False
    assert curves([10.0, 5.0, 4.85], [10.0, 5.0, 5.0]).converged is True
    assert curves([10.0, 5.0, 4.85], [10.0, 5.0, 4.9]).converged is False
    assert curves([10.0, 5.0, 4.85], [10.0, 5.0, 4.9], [10.0, 5.0, 5.1]).converged is True
    # the first epoch's size counts, whatever its sign
    assert curves([-10.0, -20.0, -20.05]).converged is True
    assert curves([-10.0, -20.0, -20.15]).converged is False
    assert curves([3.0], []).converged is None, "one epoch says nothing"
    assert curves([3.0], [10.0, 5.0, 4.0]).converged is False


@pytest.mark.parametrize("found", [1, 2, RESULT_FORMAT + 1])
def test_a_result_of_another_format_is_refused(found, tmp_path):
    compute(small("ridge"), tmp_path)
    path = tmp_path / small("ridge").file
    content = json.loads(path.read_text())
    assert content["format"] == RESULT_FORMAT
    path.write_text(json.dumps({**content, "format": found}))
    for read in (lambda: Result.read(path), lambda: compute(small("ridge"), tmp_path)):
        with pytest.raises(ValueError, match=rf"has result format {found}; this version reads {RESULT_FORMAT}\.$"):
            read()


def test_closed_form_in_turn_is_closed_form_at_once(tmp_path):
    results = [compute(small("ridge", tasks=tasks, settings={"ridge": 1.0}), tmp_path) for tasks in (1, 4)]
    assert results[0].accuracy == results[1].accuracy > 0.5


@pytest.mark.parametrize("scenario", ["data-il", "task-il", "class-il"])
@pytest.mark.parametrize("method", ["ridge", "none"])
def test_features_computed_once_give_what_evaluation_gives(method, scenario):
    stream = make_stream(small(method, scenario=scenario, per_class=20), load("digits"))
    backbone = module.load_backbone("shipped")
    preprocess = replace(backbone.preprocess, size=(8, 8))
    settings = {} if method == "ridge" else {**TRAINED, "lr": 0.01}
    learner = Learner(backbone.module, method, scenario=scenario, preprocess=preprocess, **settings)
    examiner = Examiner(learner, stream)
    for number, task in enumerate(stream.tasks):
        learner.learn(task.train, head=task.head, progress=False)
        asked = stream.tasks[:1] if stream.shares_test else stream.tasks[: number + 1]
        found = [learner.evaluate(one.test, head=one.head)["accuracy"] for one in asked]
        assert examiner.accuracies(number + 1) == found


def test_only_some_evaluations_and_the_first_tasks(tmp_path):
    result = compute(small("ridge", tasks=4, evaluate_every=2, first=3), tmp_path)
    assert [entry["accuracy"] is None for entry in result.history] == [True, False, False]
    assert [number for number, _ in result.curve] == [2, 3]


def pixels(x):
    """Each image as something that a set can hold."""
    return [tuple(image.flatten().tolist()) for image in x]


@pytest.mark.parametrize("scenario", ["data-il", "class-il"])
def test_validation_leaves_the_test_images_alone(scenario):
    """Without `per_class`, or where it leaves hardly any images, a share of those that would be learned."""
    images = load("digits")
    some = torch.arange(len(images.y_train)).split(200)[0]
    few = replace(images, x_train=images.x_train[some], y_train=images.y_train[some])
    most = int(few.y_train[few.y_train < 4].bincount().min())
    for per_class in (None, most):
        base = replace(SMALL, per_class=per_class, scenario=scenario)
        plain, held = (make_stream(replace(base, validate=flag), few) for flag in (False, True))
        every = [image for task in plain.tasks for image in pixels(task.train[0])]
        learned = [image for task in held.tasks for image in pixels(task.train[0])]
        tasks = held.tasks[:1] if held.shares_test else held.tasks
        tested = [image for task in tasks for image in pixels(task.test[0])]
        assert len(learned) + len(tested) == len(every)
        assert len(tested) == pytest.approx(module.VALIDATION_SHARE * len(every), abs=2)
        assert sorted(learned + tested) == sorted(every)
        assert set(tested) & set(learned) == set()
        assert set(tested) & set(pixels(images.x_test)) == set()


@pytest.mark.parametrize("scenario", ["data-il", "class-il"])
def test_validation_images_are_those_that_per_class_leaves_out(scenario):
    images, base = load("digits"), replace(SMALL, per_class=10, scenario=scenario)
    plain, held = (make_stream(replace(base, validate=flag), images) for flag in (False, True))
    for one, other in zip(plain.tasks, held.tasks, strict=True):
        assert torch.equal(one.train[0], other.train[0]), "as much is learned"
        assert torch.equal(one.train[1], other.train[1])
    learned = {image for task in held.tasks for image in pixels(task.train[0])}
    tasks = held.tasks[:1] if held.shares_test else held.tasks
    pairs = [pair for task in tasks for pair in zip(pixels(task.test[0]), task.test[1].tolist(), strict=True)]
    tested = dict(pairs)
    assert len(tested) == len(pairs)
    assert len(learned) == 40
    assert not learned & set(tested)
    assert not set(tested) & set(pixels(images.x_test))
    # by hand: every other training image of these classes, in the order of the data set
    left = {}
    for label in range(4):
        own = pixels(images.x_train[images.y_train == label])
        left |= dict.fromkeys(own[10:], label)
    assert len(left) < module.VALIDATION_IMAGES
    assert tested == left


def test_there_are_only_so_many_validation_images(monkeypatch):
    monkeypatch.setattr(module, "VALIDATION_IMAGES", 50)
    images = load("digits")
    (task,) = make_stream(replace(SMALL, tasks=1, per_class=10, validate=True), images).tasks
    assert task.test[1].bincount().tolist() == [50 // 4] * 4
    for label in range(4):
        own = images.x_train[images.y_train == label]
        assert torch.equal(task.test[0][task.test[1] == label], own[10 : 10 + 50 // 4])


def test_the_probe_of_features(tmp_path):
    result = compute(small("ridge", tasks=4, knn=2), tmp_path)
    assert [number for number, _ in result.knn] == [2, 4]
    assert result.knn[0][1] == result.knn[1][1], "frozen features, and all tasks' images as references each time"
    images = load("digits")
    (task,) = make_stream(replace(SMALL, tasks=1), images).tasks
    learner = Learner(
        module.load_backbone("shipped").module,
        "ridge",
        preprocess=replace(module.load_backbone("shipped").preprocess, size=(8, 8)),
    )
    learner.learn(task.train)
    features = [learner.model.features(learner._reading(x)) for x in (task.train[0], task.test[0])]
    found = nearest_neighbours(features[0], task.train[1], features[1], NEIGHBOURS)
    assert result.knn[0][1] == pytest.approx(float((found == task.test[1]).double().mean()), abs=0.02)


def test_images_that_were_sized_as_they_were_read_stay_as_they_are():
    backbone = module.load_backbone("shipped")
    images = load("digits")
    sized = [
        module._preprocess(SMALL if size else replace(SMALL, size=None), backbone, given).size
        for size, given in (
            (8, images),
            (None, images),
            (None, replace(images, preprocess=replace(images.preprocess, size=None))),
        )
    ]
    assert sized == [(8, 8), (32, 32), None]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scenario": "domain-il"}, "unknown scenario"),
        ({"class_order": "name"}, "unknown class order 'name'"),
        ({"method": "ewk"}, "did you mean 'ewc'"),
        ({"method": "none", "settings": {"epoch": 1}}, "did you mean 'epochs'"),
        ({"tasks": 0}, "tasks is 0"),
        ({"first": 3}, "first is 3"),
        ({"knn": -1}, "knn is -1"),
        ({"per_class": -1}, "per_class is -1"),
        ({"turn": float("nan")}, "turn is nan"),
        ({"method": "none", "settings": {"clip": -1.0}}, "clip is -1"),
        ({"method": "none", "settings": {"momentum": 2.0}}, "momentum is 2"),
        ({"method": "ewc", "settings": {"curvature_samples": 2.5}}, "curvature_samples is 2.5"),
    ],
)
def test_what_cannot_be_run(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(SMALL, **changes)


def test_the_rise_of_the_old_loss_is_measured_where_it_is_predicted(tmp_path):
    result = compute(small("dlcft", tasks=3, evaluate_every=1), tmp_path)
    assert "measured_increase" not in result.history[0]
    for entry in result.history[1:]:
        assert entry["predicted_increase"] is not None
        assert np.isfinite(entry["measured_increase"])
    for other in (small("none"), small("ridge"), small("dlcft", scenario="class-il")):
        assert not any("measured_increase" in entry for entry in compute(other, tmp_path).history)


def test_the_old_loss_is_the_mean_over_tasks():
    stream = make_stream(replace(SMALL, tasks=3, scenario="task-il", classes=6), load("digits"))
    backbone = module.load_backbone("shipped")
    learner = Learner(
        backbone.module, "ridge", scenario="task-il", preprocess=replace(backbone.preprocess, size=(8, 8))
    )
    for task in stream.tasks:
        learner.learn(task.train, head=task.head)
    by_hand = [learner.evaluate(evenly(task.train, 3), head=task.head)["loss"] for task in stream.tasks]
    assert Examiner(learner, stream).old_loss(3, images=9) == pytest.approx(sum(by_hand) / 3)
    assert [len(y) for _, y in (evenly(stream.tasks[0].train, count) for count in (3, 10**6))] == [3, 12]


def test_a_line_of_json_after_each_task(tmp_path):
    experiment = small("none", knn=1)
    result = compute(experiment, tmp_path)
    compute(small("ridge"), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["experiment"], line["task"], line["tasks"]) for line in lines[:2]] == [
        (experiment.file, 0, 2),
        (experiment.file, 1, 2),
    ]
    assert len(lines) == 4
    assert lines[1]["knn"] == result.knn[0][1]
    assert all(line["accuracy"] and line["time"].startswith("20") for line in lines)


def test_lines_of_several_processes_do_not_mix(tmp_path):
    lines = [{"writer": writer, "number": number, "long": "x" * 3000} for writer in range(4) for number in range(50)]
    joblib.Parallel(n_jobs=4, prefer="threads")(joblib.delayed(append_event)(tmp_path, line) for line in lines)
    found = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sorted((line["writer"], line["number"]) for line in found) == [(x["writer"], x["number"]) for x in lines]


def test_tensorboard_is_asked_for_by_name_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'dlcft\[tensorboard\]'"):
        run(small("ridge"), tmp_path, tensorboard=tmp_path / "board")
    assert not list(tmp_path.iterdir())


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    experiment = small("dlcft", scenario="task-il")
    result = run(experiment, tmp_path, tensorboard=tmp_path / "board", report=lambda line: None)
    (folder,) = (tmp_path / "board").iterdir()
    assert folder.name == experiment.file.removesuffix(".json")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()

    def written(name):
        return [(event.step, pytest.approx(event.value, rel=1e-5)) for event in found.Scalars(name)]

    assert written("accuracy") == result.curve
    assert written("loss") == list(enumerate((x for entry in result.history for x in entry["loss"]), 1))
    assert written("accuracy on task/1") == [(2, result.history[1]["accuracy"][0])]
    assert written("predicted_increase") == [(2, result.history[1]["predicted_increase"])]


def test_the_seed_decides(tmp_path):
    one, other = (compute(small("none", seed=seed), tmp_path) for seed in (0, 1))
    assert other.history[0]["loss"] != one.history[0]["loss"]


def test_a_path_as_data_set_names_a_file_in_the_folder(tmp_path):
    x, y = np.zeros((8, 8, 8, 3), np.uint8), np.arange(8) % 2
    x[y == 1] = 200
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    result = compute(replace(SMALL, dataset=str(tmp_path / "mine.npz"), method="ridge"), tmp_path / "out")
    assert result.accuracy == 1
    (file,) = (tmp_path / "out").glob("*.json")
    assert file.name.startswith("mine.npz-data-il-2-ridge-0-")


def test_a_result_of_other_weights_is_not_taken_for_it(tmp_path):
    files = [tmp_path / f"{seed}.safetensors" for seed in range(2)]
    for seed, file in enumerate(files):
        torch.manual_seed(seed)
        save_file(ResNet18(2, "small", 0.1).state_dict(), file)
    experiment = small("ridge", backbone="resnet18-32")
    first = run(experiment, tmp_path, weights=str(files[0]), report=lambda line: None)
    assert run(experiment, tmp_path, weights=str(files[0])) == first
    with pytest.raises(ValueError, match="is a result with other weights"):
        run(experiment, tmp_path, weights=str(files[1]))


def test_a_result_of_other_data_or_another_recipe_is_not_taken_for_it(tmp_path, monkeypatch):
    file, images = tmp_path / "set.npz", torch.randint(256, (12, 8, 8, 3), dtype=torch.uint8).numpy()
    for turn in range(2):
        np.savez(file, x_train=images, y_train=(np.arange(12) + turn) % 2, x_test=images[:4], y_test=[0, 1, 0, 1])
        for experiment, data in (
            (small("ridge", dataset=str(file), classes=None), None),
            (small("ridge", dataset="npz", classes=None), file),
        ):
            if turn == 0:
                result = run(experiment, tmp_path / "out", data=data, report=lambda line: None)
                assert Recipe.from_dict(result.recipe).settings["augment"] is not None
                assert run(experiment, tmp_path / "out", data=data) == result
            else:
                with pytest.raises(ValueError, match="is a result with other data"):
                    run(experiment, tmp_path / "out", data=data)
    run(small("ridge"), tmp_path, report=lambda line: None)
    monkeypatch.setitem(RECIPES, "ridge", RECIPES["ridge"].with_settings({"weigh_by": "tasks"}))
    with pytest.raises(ValueError, match="is a result with weigh_by='samples', now 'tasks'"):
        run(small("ridge"), tmp_path)


def test_closed_form_counts_one_solve(tmp_path):
    result = run(small("ridge", tasks=2), tmp_path, report=lambda line: None)
    solving = [entry["seconds_solving"] for entry in result.history]
    assert len(solving) == 2
    sums = sum(entry["seconds_training"] + entry["seconds_remembering"] for entry in result.history)
    assert result.seconds_learning == pytest.approx(sums + solving[-1])
    assert "seconds_solving" not in run(small("none"), tmp_path, report=lambda line: None).history[-1]


def test_an_image_folder_of_files_of_many_sizes(tmp_path):
    for number, part in enumerate(["train"] * 8 + ["test"] * 4):
        label = ("dark", "light")[number % 2]
        pixels = np.full((20 + number, 30 - number, 3), 30 if label == "dark" else 220, np.uint8)
        (tmp_path / "images" / part / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "images" / part / label / f"{number}.png")
    experiment = replace(SMALL, dataset=str(tmp_path / "images"), scenario="class-il", method="ridge", classes=None)
    assert compute(experiment, tmp_path / "out").accuracy == 1
