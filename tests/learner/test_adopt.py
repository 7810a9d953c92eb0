"""A classifier that already knows classes is taken over, and holds them when new ones come."""

import copy

import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.closed_form.sums import RidgeSums
from dlcft.learner.adopt import fitted_scale, margin_scale, split_head
from dlcft.methods.ridge import Origin
from dlcft.store.files import state_digest
from tests.learner.test_learner import Net, data


def trained():
    """A softmax classifier of four classes, trained as people do."""
    torch.manual_seed(0)
    model = nn.Sequential(Net().eval(), nn.Linear(6, 4))
    x, y = data([0, 1, 2, 3], n=200)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


MODEL = trained()
TEST = data([0, 1, 2, 3], n=400, seed=5)
SAMPLE = data([0, 1, 2, 3], n=24, seed=6)
LABELS = [0, 1, 2, 3]
SETTINGS = {
    "dlcft-exact": {"depth_features": 64},
    "tangent": {"tangent_features": 64},
    "ridge": {},
    "dlcft": {"epochs": 3},
    "ewc": {"epochs": 2},
}


def opposite(model):
    """A classifier whose logits have the other sign."""
    turned = copy.deepcopy(model)
    with torch.no_grad():
        turned[1].weight.neg_()
        turned[1].bias.neg_()
    return turned


def accuracy(learner, pair=TEST):
    return learner.evaluate(pair)["accuracy"]


def original():
    return float((MODEL(TEST[0]).argmax(1) == TEST[1]).double().mean())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("sample", [SAMPLE, None], ids=["sample", "none"])
def test_as_good_as_before_and_old_classes_hold(name, sample, tmp_path):
    before = copy.deepcopy(MODEL.state_dict())
    learner = Learner.adopt(
        MODEL, "1", LABELS, sample, name, weight=4.0, example=TEST[0], device="cpu", **SETTINGS[name]
    )
    assert all(torch.equal(t, before[key]) for key, t in MODEL.state_dict().items())
    assert accuracy(learner) >= original() - 0.01
    assert (learner.labels(), learner.tasks) == (LABELS, 1)
    learner.learn(data([4, 5], n=40, seed=7))
    learner.learn(data([6, 0], n=40, seed=8))
    assert learner.labels() == [0, 1, 2, 3, 4, 5, 6]
    if sample is not None and name in ("dlcft-exact", "tangent", "ridge"):
        assert accuracy(learner) >= original() - 0.05
        assert accuracy(learner, data([4, 5, 6], n=60, seed=9)) > 0.8
    learner.save(tmp_path)
    backbone, _ = split_head(MODEL, "1")
    loaded = Learner.load(tmp_path, backbone, device="cpu")
    assert torch.equal(loaded.outputs(TEST[0]), learner.outputs(TEST[0]))
    assert state_digest(*loaded.state()) == state_digest(*learner.state())


def test_without_a_sample_the_head_tells_where_old_classes_may_lie():
    learner = Learner.adopt(MODEL, "1", LABELS, None, example=TEST[0][:1], device="cpu", **SETTINGS["dlcft-exact"])
    learner.learn(data([4, 5], n=40, seed=7))
    assert accuracy(learner, data([4, 5], n=60, seed=9)) > 0.8
    assert accuracy(learner) > 0.4  # by chance 0.17
    learner.method.origin = None  # nothing is supposed any more
    learner.method.solved, learner.method.fits = False, []
    assert accuracy(learner) < 0.05


@pytest.mark.parametrize("name", ["dlcft-exact", "ridge"])
@pytest.mark.parametrize("sample", [SAMPLE, None], ids=["sample", "none"])
def test_answers_are_the_old_ones_until_something_is_learned_and_after_it_is_forgotten(name, sample):
    learner = Learner.adopt(
        MODEL, "1", LABELS, sample, name, weight=4.0, example=TEST[0], device="cpu", **SETTINGS[name]
    )
    expected = MODEL(TEST[0]).argmax(1).tolist()
    assert learner.predict(TEST[0]) == expected
    before = learner.outputs(TEST[0])
    learner.learn(data([4, 0], n=40, seed=7))
    assert not torch.equal(learner.outputs(TEST[0])[:, :4], before)
    learner.forget(data([4, 0], n=40, seed=7))
    assert torch.equal(learner.outputs(TEST[0])[:, :4], before)


def adopted(sample=None, weight=1.0, name="ridge"):
    return Learner.adopt(MODEL, "1", LABELS, sample, name, weight=weight, **SETTINGS[name])


@pytest.mark.parametrize("weight", [1.0, 10.0])
def test_the_sample_may_be_forgotten_whatever_it_counted(weight):
    new = data([4, 5], n=40, seed=8)
    one, other = adopted(SAMPLE, weight), adopted()
    assert one.learned_before(SAMPLE) == 0
    for learner in (one, other):
        learner.learn(new)
    one.forget(SAMPLE)
    assert one.method.sums.samples == other.method.sums.samples
    torch.testing.assert_close(one.outputs(TEST[0]), other.outputs(TEST[0]), rtol=1e-3, atol=1e-2)
    alone = adopted(SAMPLE, weight)
    alone.forget(SAMPLE)
    torch.testing.assert_close(alone.outputs(TEST[0]), adopted().outputs(TEST[0]))


def test_a_part_of_the_sample_needs_its_weight():
    part = SAMPLE[0][:12], SAMPLE[1][:12]
    learner = adopted(SAMPLE, 10.0)
    learner.forget(part, weight=10.0)
    rest = adopted((SAMPLE[0][12:], SAMPLE[1][12:]), 10.0)
    torch.testing.assert_close(learner.method.sums.gram, rest.method.sums.gram, rtol=1e-6, atol=1e-4)
    with pytest.raises(ValueError, match="weight is 0; it must be positive"):
        learner.forget(part, weight=0)
    with pytest.raises(ValueError, match="without a sample; only what was added before, with the same weights"):
        learner.forget((SAMPLE[0][12:], SAMPLE[1][12:]))


def test_only_learners_adopted_alike_are_merged():
    first, second = data([4], n=40, seed=8), data([5], n=40, seed=9)
    one, other, both = adopted(), adopted(), adopted()
    one.learn(first)
    other.learn(second)
    both.learn(first)
    both.learn(second)
    one.merge(other)
    torch.testing.assert_close(one.outputs(TEST[0]), both.outputs(TEST[0]), rtol=1e-3, atol=1e-2)
    assert [record.task for record in one.history] == [0, 1, 2, 3]
    backbone, _ = split_head(MODEL, "1")
    fresh = Learner(backbone, "ridge")
    learned = Learner(backbone, "ridge")
    learned.learn(first)
    with_sample = adopted(SAMPLE), adopted(SAMPLE)
    for learner, strange in ((fresh, one), (learned, adopted()), (adopted(), learned), with_sample):
        with pytest.raises(ValueError, match="adopted from the same one, without a sample"):
            learner.merge(strange)


def test_supposed_classes_are_those_whose_best_head_is_the_given_one():
    """Gaussian classes of one covariance: of a part of them, the head alone tells the means of the others."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    covariance = root @ root.T + torch.eye(5)
    weight = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    weight -= weight.mean(0)
    weight *= (15.0 / torch.einsum("ci,ij,cj->c", weight, covariance, weight)).sqrt()[:, None]  # ahead by α, each
    centre = torch.randn(5, generator=generator, dtype=torch.float64)
    drawn = torch.linalg.qr(torch.randn(400, 6, generator=generator, dtype=torch.float64))[0]
    drawn = torch.linalg.qr(torch.cat([torch.ones(400, 1), drawn], 1).double())[0][:, 1:6] * 20  # mean 0, covariance 1
    sums = RidgeSums.empty(5).add(centre + drawn @ torch.linalg.cholesky(covariance).T, torch.full((400,), 3))
    found = Origin(weight, torch.zeros(3), torch.zeros(3)).supposed(sums, 15.0)
    assert found.counts.tolist() == [400] * 4
    assert torch.allclose(found.class_sums[:3] / 400, centre + weight @ covariance)
    apart = (found.class_sums[:3] / 400 - centre) @ weight.T
    assert torch.allclose(apart.diagonal(), torch.full((3,), 15.0).double())
    means = found.class_sums / 400
    assert torch.allclose(found.gram / 1600 - means.T @ means / 4, covariance)
    assert found.samples == 1600


def test_the_head_without_a_sample_is_the_old_one():
    learner = Learner.adopt(MODEL, "1", LABELS, None, "ridge")
    expected = MODEL(TEST[0])
    found = learner.outputs(TEST[0])
    centred = expected - expected.mean(1, keepdim=True)
    assert torch.allclose(found, margin_scale(4, 15.0) * centred, atol=1e-4)


def test_the_scale_is_that_of_the_targets():
    y = torch.arange(12) % 3
    logits = 0.2 * nn.functional.one_hot(y, 3).double() + 7
    assert fitted_scale(logits, y, 15.0) == pytest.approx(75)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: Learner.adopt(MODEL, "fc", LABELS), "no linear layer 'fc'; its last linear layer is '1'"),
        (lambda: Learner.adopt(MODEL, "1", [0, 1]), "there are 2 labels; 4 different ones"),
        (lambda: Learner.adopt(MODEL, "1", [0, 1, 2, 2]), "there are 4 labels; 4 different ones"),
        (lambda: Learner.adopt(MODEL, "1", LABELS, data([0, 9])), "the label 9, which is not among"),
        (lambda: Learner.adopt(MODEL, "1", LABELS, scenario="task-il"), "one head for all tasks"),
        (lambda: Learner.adopt(MODEL, "1", LABELS, weight=0), "a positive weight"),
        (lambda: Learner.adopt(MODEL, "1", LABELS), "neither data nor example= nor a preprocessing with a size"),
        (lambda: Learner.adopt(MODEL, "1", LABELS, None, "ranpac"), "ranpac does not see the features"),
        (lambda: Learner.adopt(nn.Flatten(), "fc", LABELS), "no linear layer 'fc'"),
        (
            lambda: Learner.adopt(opposite(MODEL), "1", LABELS, data(LABELS)),
            "labels contradict the classifier's answers",
        ),
    ],
)
def test_what_cannot_be_adopted(action, message):
    with pytest.raises(ValueError, match=message):
        action()


def test_a_head_that_is_not_the_last_layer_is_refused():
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)]
    for model, head in ((nn.Sequential(*layers, nn.Softmax(1)), "2"), (nn.Sequential(*layers), "0")):
        with pytest.raises(ValueError, match="is not the model's last layer"):
            Learner.adopt(model, head, list("abc")[: 8 if head == "0" else 3])

    class Squashed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nn.Sequential(*layers[:2]), layers[2]

        def forward(self, x):
            return self.fc(self.body(x)).softmax(1)

    with pytest.raises(ValueError, match="changes its head's outputs, by a softmax"):
        Learner.adopt(Squashed(), "fc", list("abc"), (torch.randn(6, 4), ["a", "b", "c"] * 2), "ridge")
