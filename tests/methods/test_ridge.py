"""The laws of closed-form learners, in float64: order, splits, merging and forgetting change nothing."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dlcft import Learner
from dlcft.data.images import Preprocess
from dlcft.learner.records import Forgotten
from dlcft.methods.ridge import SOLUTIONS
from dlcft.update.update import update
from tests.learner.test_learner import Net, data

CLOSED_FORM = {
    "ridge": {},
    "ranpac": {"random_features": 20},
    "ncm": {},
    "slda": {},
    "klda": {"random_features": 20},
    "tangent": {"tangent_features": 40},
    "dlcft-exact": {"depth_features": 50},
}
X, Y = data([0, 1, 2, 3], n=48)
X = X.double()
TEST = data([0, 1, 2, 3], n=16, seed=9)[0].double()


def make(name="dlcft-exact", scenario="class-il", **options):
    torch.manual_seed(0)
    return Learner(Net().double().eval(), name, scenario=scenario, **{"ridge": 0.1, **CLOSED_FORM[name], **options})


def solution(learner):
    """V and b with the classes in the order of their labels."""
    learner.solve()
    head = learner.model.head("main")
    order = [learner.labels().index(label) for label in sorted(learner.labels())]
    return torch.cat([head.weight[order], head.bias[order, None]], 1).detach()


def assert_equal(learner, other, tolerance):
    expected = solution(other)
    error = (solution(learner) - expected).abs().max() / expected.abs().max()
    assert float(error) < tolerance


@pytest.mark.parametrize("name", CLOSED_FORM)
@settings(max_examples=15, deadline=None)
@given(
    order=st.permutations(range(48)),
    cuts=st.lists(st.integers(1, 47), max_size=8),
    batch=st.integers(1, 50),
)
def test_any_order_split_and_arrival_of_classes(name, order, cuts, batch):
    joint = make(name, direction="random")
    joint.learn((X, Y))
    sequence = make(name, direction="random", batch_size=batch)
    edges = [0, *sorted(set(cuts)), 48]
    for start, stop in itertools.pairwise(edges):
        part = torch.tensor(order[start:stop])
        sequence.learn((X[part], Y[part]))
    assert_equal(sequence, joint, 1e-10)


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_learners_trained_apart_and_merged_equal_one(name):
    first, second, both = (make(name, direction="random") for _ in range(3))
    first.learn((X[:20], Y[:20]))
    second.learn((X[20:30][Y[20:30] > 1], Y[20:30][Y[20:30] > 1]))
    second.learn((X[30:], Y[30:]))
    first.merge(second)
    kept = torch.cat([torch.arange(20), 20 + (Y[20:30] > 1).nonzero()[:, 0], torch.arange(30, 48)])
    both.learn((X[kept], Y[kept]))
    assert_equal(first, both, 1e-10)
    assert first.tasks == 3


def test_merging_into_an_empty_learner_and_other_label_sets():
    first, second, both = (make(direction="random") for _ in range(3))
    second.learn((X[Y > 1], Y[Y > 1]))
    first.merge(second)
    assert_equal(first, second, 1e-12)
    third = make(direction="random")
    third.learn((X[Y < 2], Y[Y < 2]))
    first.merge(third)
    both.learn((X, Y))
    assert_equal(first, both, 1e-10)
    first.merge(make(direction="random"))
    assert_equal(first, both, 1e-10)


def test_merging_learners_of_other_features_is_refused():
    first, second = make(direction="random"), make(direction="random", seed=1)
    for learner in (first, second):
        learner.learn((X, Y))
    with pytest.raises(ValueError, match="same features"):
        first.merge(second)
    with pytest.raises(ValueError, match="with itself"):
        first.merge(first)
    with pytest.raises(ValueError, match="another depth_features, 40 in place of"):
        first.merge(make(direction="random", depth_features=40))
    with pytest.raises(ValueError, match=r"another tangent_share, 0.5 in place of 1.0; settings, scenario, backbone"):
        first.merge(make(direction="random", tangent_share=0.5))
    with pytest.raises(ValueError, match=r"another preprocessing, Preprocess\(size=\(4, 4\)"):
        first.merge(make(direction="random", preprocess=Preprocess(size=(4, 4))))
    some = make("tangent", direction="random", train=[next(iter(dict(Net().named_parameters())))])
    with pytest.raises(ValueError, match="another train, "):
        some.merge(make("tangent", direction="random"))
    network = Net().double().eval()
    with pytest.raises(ValueError, match="merge needs a closed-form method"):
        Learner(network, "dlcft", epochs=1).merge(Learner(network, "dlcft", epochs=1))


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_forgetting_equals_never_having_seen(name):
    learner, never = make(name, direction="random"), make(name, direction="random")
    learner.learn((X[:30], Y[:30]))
    never.learn((X[:30], Y[:30]))
    learner.learn((X[30:], Y[30:]))
    learner.forget((X[30:40], Y[30:40]))
    learner.forget((X[40:], Y[40:]))
    assert_equal(learner, never, 1e-8)
    assert learner.history[-1] == Forgotten(learner.tasks, ["main"], 8, learner.history[-1].data)


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_a_forgotten_class_is_never_predicted(solution):
    learner = make(direction="random", solution=solution)
    learner.learn((X, Y))
    learner.forget((X[Y == 3], Y[Y == 3]))
    assert 3 in learner.labels()
    learner.solve()
    assert not learner.model.head("main").weight[3].any()
    assert 3 not in learner.predict(TEST)


def test_what_was_never_learned_cannot_be_forgotten():
    learner = make()
    learner.learn((X[:40], Y[:40]))
    before = solution(learner)
    with pytest.raises(ValueError, match="'x' was never learned"):
        learner.forget((X[:1], ["x"]))
    for strangers in ((100 * X[40:], Y[40:]), (X[40:], Y[40:]), (X[:6], (Y[:6] + 1) % 4), (X[:6] + 0.3, Y[:6])):
        with pytest.raises(ValueError, match="only what was added before"):
            learner.forget(strangers)
    assert torch.equal(solution(learner), before)
    learner.forget((X[:6], Y[:6]))
    with pytest.raises(ValueError, match="only what was added before"):
        learner.forget((X[:6], Y[:6]))
    trained = Learner(Net().double().eval(), "dlcft", epochs=1)
    trained.learn((X, Y))
    with pytest.raises(ValueError, match="forget needs a closed-form method"):
        trained.forget((X, Y))


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_task_il_is_the_same_fit_with_outputs_restricted(solution):
    settings = {"direction": "random", "solution": solution}
    one, apart = make(**settings), make(scenario="task-il", **settings)
    one.learn((X, Y))
    for head, classes in {"even": [0, 2], "odd": [1, 3]}.items():
        part = torch.isin(Y, torch.tensor(classes))
        apart.learn((X[part], Y[part]), head=head)
    expected = one.outputs(TEST)
    for head, classes in {"even": [0, 2], "odd": [1, 3]}.items():
        assert torch.allclose(apart.outputs(TEST, head=head), expected[:, classes], atol=1e-5)


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_a_forgotten_class_is_never_predicted_by_its_head(solution):
    learner = make(scenario="task-il", direction="random", solution=solution)
    for head, classes in {"even": [0, 2], "odd": [1, 3]}.items():
        part = torch.isin(Y, torch.tensor(classes))
        learner.learn((X[part], Y[part]), head=head)
    before = learner.outputs(TEST, head="odd")
    learner.forget((X[Y == 2], Y[Y == 2]), head="even")
    strange = torch.cat([TEST, 10 * TEST, -10 * TEST])
    assert set(learner.predict(strange, head="even")) == {0}
    assert learner.outputs(TEST, head="odd").shape == before.shape


@pytest.mark.parametrize("solution", SOLUTIONS)
@pytest.mark.parametrize("scenario", ["class-il", "data-il"])
def test_predicted_increase_is_exact(scenario, solution):
    learner = make(scenario=scenario, ridge=0.3, solution=solution, equal_classes=False)
    old, new = (torch.arange(24), torch.arange(24, 48)) if scenario == "data-il" else ((Y < 2), (Y > 0))
    learner.learn((X[old], Y[old]))
    before = learner.evaluate((X[old], Y[old]))["loss"]
    learner.learn((X[new], Y[new]))
    after = learner.evaluate((X[old], Y[old]))["loss"]
    assert learner.predicted_increase() == pytest.approx(after - before, rel=1e-6)
    assert solution != "ridge" or learner.predicted_increase() > 0, "the old fit was the best for the old data"


def test_it_is_solved_only_when_asked_for(monkeypatch):
    learner = make()
    solved = []
    monkeypatch.setattr(type(learner.method), "_solve", lambda self, sums: solved.append(1) or sums.solve(0.1))
    for start in range(0, 48, 12):
        learner.learn((X[start : start + 12], Y[start : start + 12]))
    assert not solved
    learner.predict(TEST)
    learner.predict(TEST)
    assert len(solved) == 1
    learner.predicted_increase()
    assert len(solved) == 2, "what was before is solved too, once"
    learner.learn((X, Y))
    learner.predicted_increase()
    learner.predict(TEST)
    assert len(solved) == 3


def test_all_may_be_forgotten(tmp_path):
    learner = make()
    learner.learn((X, Y))
    learner.forget((X, Y))
    learner.save(tmp_path)
    assert not learner.outputs(TEST).any()
    learner.learn((X[:8], Y[:8]))
    assert learner.outputs(TEST).any()


def test_tasks_may_count_the_same():
    learner = make("ridge", weigh_by="tasks")
    learner.learn((X[:40], Y[:40]))
    learner.learn((X[40:], Y[40:]))
    assert float(learner.method.sums.counts.sum()) == pytest.approx(2)
    with pytest.raises(ValueError, match="weigh_by is 'tasks'"):
        learner.forget((X[:40], Y[:40]))


def test_after_all_was_forgotten_there_is_nothing_to_predict_for():
    learner = make()
    learner.learn((X[:20], Y[:20]))
    learner.forget((X[:20], Y[:20]))
    learner.learn((X[20:], Y[20:]))
    assert learner.predicted_increase() is None
    learner.learn((X[:20], Y[:20]))
    assert learner.predicted_increase() is not None


def test_the_default_looks_at_no_data_but_in_its_sums():
    learners = [make(), make()]
    for learner, parts in zip(
        learners, ([slice(0, 20), slice(20, None)], [slice(20, None), slice(0, 20)]), strict=True
    ):
        for part in parts:
            learner.learn((X[part], Y[part]))
    one, other = learners
    order = [other.labels().index(label) for label in one.labels()]
    assert torch.allclose(one.outputs(X), other.outputs(X)[:, order], rtol=0, atol=1e-5)


def test_the_principal_direction_comes_from_the_first_task_and_stays():
    learner = make("tangent", direction="principal")
    learner.learn((X[:20], Y[:20]))
    first = learner.model.backbone.directions.clone()
    learner.learn((X[20:], Y[20:]))
    assert torch.equal(learner.model.backbone.directions, first)
    with torch.no_grad():
        z = learner.model.backbone.base(X[:20])
    assert torch.allclose(first[0].abs(), torch.linalg.svd(z - z.mean(0))[2][0].abs())


def test_a_layer_may_be_chosen():
    learner = make("tangent", train="conv")
    learner.learn((X, Y))
    assert list(learner.model.backbone.layers) == ["conv"]
    with pytest.raises(ValueError, match="tangent space"):
        Learner(nn.Linear(3, 2), "ridge", train="weight")


def test_a_backbone_without_parameters():
    learner = Learner(nn.Flatten(), "ridge")
    learner.learn((X.float(), Y))
    assert learner.evaluate((X.float(), Y))["accuracy"] == 1


def test_mirror_images_are_averaged_where_asked_for():
    plain, flipped = make(augment="none"), make(augment="flip")
    for learner in (plain, flipped):
        learner.learn((X, Y))
    with torch.no_grad():
        each = [plain.model.features(x) for x in (TEST, TEST.flip(-1))]
        assert torch.allclose(flipped.model.features(TEST), (each[0] + each[1]) / 2)
    assert torch.allclose(flipped.outputs(TEST), flipped.outputs(TEST.flip(-1)), atol=1e-4)
    vectors = Learner(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "ridge", augment="flip")
    vectors.learn((torch.randn(8, 3), [0, 1] * 4))
    assert vectors.outputs(torch.randn(2, 3)).shape == (2, 2)


def test_what_was_merged_into_a_learner_without_data_is_saved(tmp_path):
    empty, other = make(), make()
    other.learn((X, Y), progress=False)
    empty.merge(other)
    empty.save(tmp_path)
    torch.manual_seed(0)
    again = Learner.load(tmp_path, Net().double().eval())
    assert again.predict(TEST) == other.predict(TEST)
    again.learn((X[:4], Y[:4]), progress=False)
    assert again.method.sums.samples == len(X) + 4


def test_merging_brings_no_labels_that_may_not_be_new():
    first, second = make(scenario="data-il", direction="random"), make(scenario="data-il", direction="random")
    first.learn((X[Y < 2], Y[Y < 2]))
    second.learn((X[Y > 1], Y[Y > 1]))
    with pytest.raises(ValueError, match="label 2 is new; with new_labels='error'"):
        first.merge(second)
    assert first.labels() == [0, 1]


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_outputs_and_probabilities_survive_saving(solution, tmp_path):
    learner = make(solution=solution)
    learner.learn((X[:40], Y[:40]), progress=False)
    learner.learn((X[40:], Y[40:]), progress=False)
    outputs = learner.outputs(TEST)
    usual = learner.method.usual_temperature
    assert (usual is None) == (solution == "ridge"), "squared-loss outputs have α/10"
    assert torch.allclose(outputs.sum(1), torch.full((len(TEST),), 15.0), atol=1e-3)
    learner.save(tmp_path)
    torch.manual_seed(0)
    again = Learner.load(tmp_path, Net().double().eval())
    assert torch.equal(again.outputs(TEST), outputs)
    assert again.method.usual_temperature == usual
    again.learn((X[:4], Y[:4]), progress=False)
    assert again.method.solution == solution


def test_solutions_are_one_state():
    learners = {solution: make(solution=solution) for solution in SOLUTIONS}
    for learner in learners.values():
        learner.learn((X, Y), progress=False)
    one, *others = [learner.method.sums for learner in learners.values()]
    assert all(torch.equal(other.gram, one.gram) for other in others)
    with pytest.raises(ValueError, match="another solution, ncm in place of ridge"):
        learners["ridge"].merge(learners["ncm"])
    with pytest.raises(ValueError, match="solution is 'svm'; it must be one of 'ridge', 'ncm', 'lda', 'shrunken-lda'"):
        make(solution="svm")


def test_small_classes_are_learned_by_default():
    generator = torch.Generator().manual_seed(3)
    means = 0.9 * torch.randn(12, 30, generator=generator)

    def drawn(counts):
        y = torch.repeat_interleave(torch.arange(12), torch.tensor(counts))
        return means[y] + torch.randn(len(y), 30, generator=generator), y

    months = [drawn([60] * 6 + [0] * 6), drawn([40] * 6 + [10] * 6)]
    x, y = drawn([40] * 12)
    right = {}
    for solution in ("ridge", "shrunken-lda"):
        settings = {} if solution == "shrunken-lda" else {"solution": "ridge", "equal_classes": False}
        learner = Learner(nn.Sequential(nn.Linear(30, 30), nn.Identity()), "tangent", tangent_features=30, **settings)
        assert learner.method.solution == solution
        for month in months:
            learner.learn(month, progress=False)
        hit = torch.tensor(learner.predict(x)) == y
        right[solution] = float(hit[y > 5].float().mean()), float(hit.float().mean())
    assert right["shrunken-lda"][0] > right["ridge"][0] + 0.3
    assert right["shrunken-lda"][1] > right["ridge"][1]


def test_one_huge_sample_is_refused_and_changes_nothing():
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    for earlier in (False, True):
        learner = Learner(nn.Linear(6, 5), "ridge")
        if earlier:
            learner.learn((x, y))
        wrong = x.clone()
        wrong[17, 2] = 1e30
        with pytest.raises(ValueError, match=r"a sample \(17\) has features 1?[0-9.]*e\+\d+ times as large as usual"):
            learner.learn((wrong, y))
        assert learner.tasks == int(earlier)
        wrong[17, 2] = 1e3
        learner.learn((wrong, y))  # large, and nothing is lost


def test_after_all_was_forgotten_nothing_is_answered(tmp_path):
    x, y = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
    learner = Learner(backbone := nn.Linear(6, 5), "ridge")
    learner.learn((x, y))
    learner.forget((x, y))
    for ask in (learner.predict, learner.predict_proba, lambda x: learner.evaluate((x, y))):
        with pytest.raises(ValueError, match="nothing is known any more, because all samples were forgotten"):
            ask(x)
    learner.save(tmp_path / "model")
    learner = Learner.load(tmp_path / "model", backbone)
    assert update(learner, (x, y), holdout=(x, y), max_doubtful=0).accepted
    assert len(learner.predict(x)) == 20


def test_merging_another_method_names_the_method():
    x, y = torch.randn(20, 6), torch.arange(20) % 2
    learners = {name: Learner(nn.Linear(6, 5), name) for name in ("ridge", "dlcft-exact", "ncm")}
    for learner in learners.values():
        learner.learn((x, y))
    with pytest.raises(ValueError, match="has another method, ridge in place of dlcft-exact"):
        learners["dlcft-exact"].merge(learners["ridge"])
    with pytest.raises(ValueError, match="has another method, ncm in place of ridge"):
        learners["ridge"].merge(learners["ncm"])
