"""Networks and settings of all kinds: what is learned survives saving, and nothing around the learner changes."""

import pytest
import torch
from torch import nn

from dlcft import Learner
from tests.learner.test_learner import FAST, data, make

FLAT = torch.randn(33, 4, generator=torch.Generator().manual_seed(1))
LABELS = [i % 3 for i in range(33)]


def normed(dropout=0.0):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 6)
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("method", ["dlcft", "tangent"])
@pytest.mark.parametrize(
    "choice",
    [lambda: lambda name: True, lambda: lambda name: name[0] == "0", lambda: {"4"}, lambda: iter(["4.weight"])],
)
def test_any_choice_of_parameters_is_saved(method, choice, tmp_path):
    small = {"tangent_features": 24} if method == "tangent" else {"epochs": 2, "lr": 0.01}
    learner = Learner(normed(), method, scenario="data-il", train=choice(), **small)
    learner.learn((FLAT, LABELS), progress=False)
    learner.save(tmp_path)
    again = Learner.load(tmp_path, normed())
    assert torch.equal(again.outputs(FLAT), learner.outputs(FLAT))
    again.learn((FLAT, LABELS), progress=False)


def test_what_was_learned_and_has_no_place_is_no_silence():
    learner = Learner(normed(), "dlcft", **FAST)
    learner.learn((FLAT, LABELS), progress=False)
    tensors, header = learner.model.state()
    with pytest.raises(ValueError, match="stranger' was learned"):
        learner.model.load_state({**tensors, "backbone.delta.stranger": torch.zeros(1)}, header)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["dlcft", "dlcft-paper", "osla", "ewc"])
def test_a_network_in_half_precision_learns(method, dtype):
    learner = Learner(normed().to(dtype), method, scenario="data-il", **FAST)
    for _ in range(2):
        learner.learn((FLAT, LABELS), progress=False)
    assert learner.outputs(FLAT).isfinite().all()


CLOSED_FORM = {
    "ridge": {},
    "ranpac": {"random_features": 32},
    "depth": {"depth_features": 64},
    "tangent": {"tangent_features": 64, "solution": "ridge", "equal_classes": False},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", CLOSED_FORM)
def test_the_head_of_a_network_in_half_precision_is_in_float32(method, dtype, tmp_path):
    """Its features are small, and so its weights large: 65,504 is the most that float16 holds."""
    network = nn.Sequential(normed(), Scaled(2e-4)).to(dtype)
    learner = Learner(network, method, ridge=1e-3, device="cpu", **CLOSED_FORM[method])
    learner.learn((FLAT[:20], LABELS[:20]), progress=False)
    learner.learn((FLAT[20:], LABELS[20:]), progress=False)
    assert learner.model.features(FLAT.to(dtype)).dtype == (torch.float32 if method == "depth" else dtype)
    assert learner.model.head("main").weight.dtype == learner.model(FLAT.to(dtype), "main").dtype == torch.float32
    outputs = learner.outputs(FLAT)
    weight, bias = learner.method.sums.solve(1e-3)
    with torch.no_grad():
        expected = learner.model.features(FLAT.to(dtype)).double() @ weight.T + bias
    assert torch.allclose(outputs.double(), expected, rtol=0, atol=0.01)
    if method == "ridge":
        assert weight.abs().max() > torch.finfo(torch.float16).max
    learner.save(tmp_path)
    again = Learner.load(tmp_path, network, device="cpu")
    assert torch.equal(again.outputs(FLAT), outputs)
    again.forget((FLAT[20:], LABELS[20:]))
    never = Learner(network, method, ridge=1e-3, device="cpu", **CLOSED_FORM[method])
    never.learn((FLAT[:20], LABELS[:20]), progress=False)
    assert torch.allclose(again.outputs(FLAT), never.outputs(FLAT), rtol=0, atol=0.01)


def test_a_rounded_head_of_an_earlier_version_is_solved_again(tmp_path):
    network = normed().half()
    learner = Learner(network, "ridge", device="cpu")
    learner.learn((FLAT, LABELS), progress=False)
    outputs = learner.outputs(FLAT)
    tensors, header = learner.state()
    heads = [name for name in tensors if "heads." in name]
    assert len(heads) == 2
    del header["parts"]["method"]["parts"]["sums"]["epsilon"]
    again = Learner(network, "ridge", device="cpu")
    rounded = {name: torch.zeros_like(tensors[name], dtype=torch.float16) for name in heads}
    again._load_state({**tensors, **rounded}, header)
    assert torch.allclose(again.outputs(FLAT), outputs, atol=1e-4)


class Scaled(nn.Module):
    """Times a factor; of the dtype of its input."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("method", ["ridge", "none"])
def test_outputs_that_are_no_numbers_are_no_labels(method, dtype):
    learner = Learner(normed().to(dtype), method, device="cpu", **({} if method == "ridge" else FAST))
    learner.learn((FLAT, LABELS), progress=False)
    x = FLAT.clone()
    x[3:5] = 3e38  # finite, and too large for the network
    for ask in (learner.outputs, learner.predict, lambda x: learner.evaluate((x, LABELS))):
        with pytest.raises(ValueError, match="the outputs of 2 of 33 inputs are not finite; inputs must be"):
            ask(x)
    if dtype == torch.float16 and method == "ridge":
        with pytest.raises(ValueError, match="not finite"):
            learner.predict(1e6 * FLAT)


def test_batchnorm_learns_though_one_sample_is_left_over():
    learner = Learner(normed(), "none", epochs=2, batch_size=32)
    learner.learn((FLAT, LABELS), progress=False)
    assert learner.outputs(FLAT).isfinite().all()


def test_dropout_is_off():
    found = []
    for seed in (1, 2):
        learner = Learner(normed(dropout=0.5), "none", **FAST)
        torch.manual_seed(seed)
        learner.learn((FLAT, LABELS), progress=False)
        found.append(learner.outputs(FLAT))
    assert torch.equal(*found)


@pytest.mark.parametrize("method", ["none", "dlcft", "er", "ridge", "dlcft-exact"])
def test_the_callers_random_numbers_are_left_alone(method, tmp_path):
    learner = make(method)
    before = torch.get_rng_state()
    learner.learn(data([0, 1]), progress=False)
    learner.learn(data([2, 3]), progress=False)
    learner.save(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", ["er", "der", "derpp", "lwf", "none", "dlcft"])
def test_old_heads_learn_where_the_objective_is_about_them(method):
    learner = make(method, "task-il", **({} if method in ("none", "lwf", "dlcft") else {"buffer": 10}), lr=1e-2)
    learner.learn(data([0, 1]), head="a", progress=False)
    before = learner.model.head("a").weight.detach().clone()
    learner.learn(data([2, 3]), head="b", progress=False)
    moved = bool((learner.model.head("a").weight != before).any())
    assert moved is (method not in ("none", "dlcft"))


@pytest.mark.parametrize("method", ["dlcft", "ridge"])
def test_the_increase_through_several_tasks_at_once_is_unknown(method):
    learner = make(method, "task-il")
    learner.learn(data([0, 1]), head="a", progress=False)
    learner.learn_jointly({"b": data([2, 3]), "c": data([4, 5])}, progress=False)
    assert learner.predicted_increase() is None


def test_where_a_truly_linear_model_makes_no_sense():
    with pytest.raises(ValueError, match="strict=True is for 'data-il' and 'task-il'"):
        make("dlcft", strict=True)
    with pytest.raises(ValueError, match="strict=True needs head_start='ridge'"):
        make("dlcft", "data-il", strict=True, head_start="zero")
    with pytest.raises(ValueError, match="methods without replay and distillation"):
        make("lwf", "data-il", linear=True, strict=True, head_start="ridge")


def classifier():
    """Of two classes, by the sign of an input."""
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        network[0].weight.copy_(torch.eye(6)[:, :4])
        network[0].bias.zero_()
        network[2].weight.copy_(torch.tensor([[5.0, 0, 0, 0, 0, 0], [-5, 0, 0, 0, 0, 0]]))
        network[2].bias.zero_()
    return network.eval()


def test_an_adopted_classifier_is_a_teacher_without_a_sample():
    learner = Learner.adopt(classifier(), "2", ["plus", "minus"], None, "lwf", **FAST)
    assert torch.equal(learner.method.teacher(FLAT, "main"), learner.outputs(FLAT))


def test_an_adopted_classifier_is_kept_without_a_sample():
    x = 2 * FLAT.clone()
    x[:, 0] = x[:, 0].sign() * x[:, 0].abs().clamp(min=0.5)
    truth = ["plus" if value > 0 else "minus" for value in x[:, 0].tolist()]
    learner = Learner.adopt(classifier(), "2", ["plus", "minus"], None, "dlcft")
    assert learner.predict(x) == truth
    new = x.clone()
    new[:, 1] += 8
    learner.learn((new, ["new"] * len(new)), progress=False)
    kept = [label == answer for label, answer in zip(truth, learner.predict(x), strict=True)]
    assert sum(kept) > 0.7 * len(kept)


class TakesADict(nn.Module):
    """Takes the whole dict as one argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x["a"] + x["b"])


@pytest.mark.parametrize("method", ["ridge", "dlcft-exact", "dlcft"])
def test_a_network_that_takes_the_dict_itself_is_told_how(method):
    data = {"a": torch.randn(12, 4), "b": torch.randn(12, 4)}, [0, 1] * 6
    said = r"unexpected keyword argument 'a' \(a dict is given as keyword arguments, forward\(self, a, b\), not as one"
    with pytest.raises(ValueError, match=said):
        Learner(TakesADict(), method).learn(data)
