"""Laws of every estimator: batches, merging, growth, draws, the choice of parameters; and refused arguments."""

import copy

import pytest
import torch
from torch import nn

from dlcft import Classifier, CrossEntropy, Linearized, ScaledMSE, estimate
from dlcft.curvature import rows
from dlcft.curvature.blocks import Diagonal, EigenKronecker, InputGram, Kronecker
from dlcft.curvature.form import Curvature
from dlcft.curvature.statistics import ESTIMATORS, EkfacStatistics, Statistics
from tests.closed_form.test_features import SequenceFirst
from tests.support.brute_force import LAYERWISE, LOSSES, build, gauss_newton, run
from tests.support.networks import vectors


def statistics_of(found):
    return found.curvature.state()[0]


@pytest.mark.parametrize("name", LAYERWISE)
def test_independent_of_batches_and_order(name):
    model, x, y = build("convolutions")
    whole = run(name, model, x, y, CrossEntropy())
    order = torch.tensor([2, 0, 1])
    split = [(x[order][:1], y[order][:1]), (x[order][1:], y[order][1:]), (x[:0], y[:0])]
    parts = estimate(name, model, split, CrossEntropy(), "h", draws=None)
    assert parts.samples == 3
    d = {n: torch.randn_like(p) for n, p in model.params("h").items()}
    assert torch.isclose(parts.curvature.quad(d), whole.curvature.quad(d), rtol=1e-9)
    assert statistics_of(parts).keys() == statistics_of(whole).keys()


@pytest.mark.parametrize("name", [*LAYERWISE, "mas", "dense"])
def test_no_graph_is_kept(name):
    """A graph would hold every batch's activations until the end: 9 MB an image for a small ResNet with BatchNorm."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = Classifier(network.eval(), features=4)
    model.add_head("h", 3)
    x, y = torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 2, 0])
    found = estimate(name, model, [(x, y), (x, y)], CrossEntropy(), "h", draws=1, gradient=True)
    assert "backbone.1.weight" in found.curvature.names
    kept = {**statistics_of(found), **found.gradient}
    assert not [key for key, tensor in kept.items() if tensor.requires_grad]


@pytest.mark.parametrize("name", ["diagonal", "kfac", "tkfac", "tkfac-per-sample", "exact-tk"])
def test_merged_statistics_are_those_of_the_pooled_data(name):
    model, x, y = build("convolutions")
    one, two = (run(name, model, x[part], y[part], ScaledMSE()) for part in (slice(0, 1), slice(1, 3)))
    merged = one.curvature.merge(two.curvature, one.samples, two.samples)
    pooled = statistics_of(run(name, model, x, y, ScaledMSE()))
    for key, tensor in merged.state()[0].items():
        assert torch.allclose(tensor, pooled[key], atol=1e-10), key
    traces = [c.trace(model.params("h")) for c in (one.curvature, two.curvature, merged)]
    summed = traces[0] / 3 + 2 * traces[1] / 3
    assert (traces[2] == pytest.approx(summed, rel=1e-10)) is (name != "kfac")


@pytest.mark.parametrize("name", [*LAYERWISE, "dense"])
def test_growth_equals_units_that_were_there_with_zero_weights(name):
    model, x, y = build("convolutions", outputs=3)
    small = run(name, model, x, y, ScaledMSE()).curvature.grow(model.head_names("h"), 5)
    model.grow("h", 5)
    large = run(name, model, x, y, ScaledMSE()).curvature
    d = {n: torch.randn_like(p) for n, p in model.params("h").items()}
    assert torch.isclose(small.quad(d), large.quad(d), rtol=1e-10)
    matrix, slices = gauss_newton(model, x, y, ScaledMSE())
    head = torch.cat([torch.arange(slices[n].start, slices[n].stop) for n in model.head_names("h")])
    only = {n: torch.zeros_like(p) if n not in model.head_names("h") else p for n, p in d.items()}
    flat = torch.cat([d[n].reshape(-1) for n in model.head_names("h")])
    if name != "diagonal":
        assert torch.isclose(small.quad(only), flat @ matrix[head][:, head] @ flat)


@pytest.mark.parametrize("name", ["diagonal", "kfac", "exact-tk"])
def test_sampled_draws_estimate_the_exact_one(name):
    model, x, y = build("convolutions")
    exact = run(name, model, x, y, CrossEntropy())
    generator = torch.Generator().manual_seed(0)
    sampled = estimate(name, model, [(x, y)], CrossEntropy(), "h", draws=800, generator=generator)
    for key, tensor in statistics_of(sampled).items():
        scale = statistics_of(exact)[key].abs().max()
        assert torch.allclose(tensor, statistics_of(exact)[key], atol=0.1 * float(scale) + 1e-6), key


def test_the_seed_fixes_the_draws_and_samples_limits_the_data():
    model, x, y = build("convolutions")
    one, two, other = (
        estimate("kfac", model, [(x, y)], ScaledMSE(), "h", generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    )
    key = "backbone.delta.stem|left"
    assert torch.equal(statistics_of(one)[key], statistics_of(two)[key])
    assert not torch.equal(statistics_of(one)[key], statistics_of(other)[key])
    limited = estimate("kfac", model, [(x[:2], y[:2]), (x[2:], y[2:])], ScaledMSE(), "h", draws=None, samples=1)
    assert limited.samples == 1
    first = run("kfac", model, x[:1], y[:1], ScaledMSE())
    assert torch.allclose(statistics_of(limited)[key], statistics_of(first)[key])


def test_without_the_head_and_with_a_subset():
    model, x, y = build("convolutions")
    found = run("exact-tk", model, x, y, ScaledMSE(), include_head=False, gradient=True)
    assert all(n.startswith("backbone.delta.") for n in found.curvature.names)
    assert set(found.gradient) == set(model.params())
    network = copy.deepcopy(model.backbone.base)
    for chosen, names in (
        ("*.weight", {"stem.weight", "strided.weight", "dilated.weight"}),
        ("*.bias", {"strided.bias", "dilated.bias"}),
    ):
        part = Classifier(Linearized(network, train=chosen), 2)
        part.add_head("h", 3)
        nn.init.normal_(part.head("h").weight)
        found = run("exact-tk", part, x, y, ScaledMSE())
        assert set(found.curvature.names) == {f"backbone.delta.{n}" for n in names} | set(part.head_names("h"))
        matrix, slices = gauss_newton(part, x, y, ScaledMSE())
        for name in slices:
            d = {n: torch.ones_like(p) * (n == name) for n, p in part.params("h").items()}
            assert found.curvature.quad(d) > 0
        assert found.curvature.trace(part.params("h")) == pytest.approx(float(matrix.trace()), rel=1e-10)


def test_wide_layers_get_a_diagonal_and_a_log_line(caplog):
    model, x, y = build("mlp")
    with caplog.at_level("INFO", logger="dlcft"):
        found = run("kfac", model, x, y, ScaledMSE(), max_factor=5)
    assert "0 is wider than max_factor=5" in caplog.text
    assert isinstance(found.curvature.blocks["backbone.delta.0.weight"], Diagonal)
    assert isinstance(found.curvature.blocks["backbone.delta.2"], Kronecker)
    exact = run("diagonal", model, x, y, ScaledMSE())
    assert torch.allclose(
        found.curvature.blocks["backbone.delta.0.weight"].values,
        exact.curvature.blocks["backbone.delta.0.weight"].values,
    )


def test_attention_is_covered(caplog):
    model, x, y = build("vit")
    with caplog.at_level("INFO", logger="dlcft"):
        found = run("kfac", model, x, y, ScaledMSE())
    assert "attention.out_proj is not called as a module: diagonal curvature" in caplog.text
    kinds = {n: type(b).__name__ for n, b in found.curvature.blocks.items()}
    assert kinds["backbone.delta.attention.in_proj_weight"] == "Diagonal"
    assert kinds["backbone.delta.attention.out_proj.weight"] == "Diagonal"
    assert kinds["backbone.delta.token"] == kinds["backbone.delta.norm1.weight"] == "Diagonal"
    assert kinds["backbone.delta.mlp.0"] == kinds["backbone.delta.patch"] == "Kronecker"


def test_the_model_is_left_as_it_was():
    model, x, y = build("convolutions")
    model.train()
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    run("exact-tk", model, x, y, ScaledMSE(), gradient=True)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_half_precision_inputs():
    model, x, y = build("convolutions")
    single = copy.deepcopy(model).float()
    exact = run("exact-tk", single, x.float(), y, ScaledMSE())
    with torch.autocast("cpu", torch.bfloat16):
        rough = run("exact-tk", single, x.float(), y, ScaledMSE())
    assert all(t.dtype == torch.float32 for t in statistics_of(rough).values())
    d = {n: torch.randn_like(p) for n, p in single.params("h").items()}
    assert torch.isclose(rough.curvature.quad(d), exact.curvature.quad(d), rtol=0.1)


class Skipping(nn.Module):
    """A layer that runs for some batches only."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x)) if len(x) > 1 else self.first(x)


def test_bad_input():
    model, x, y = build("convolutions")
    loss = ScaledMSE()
    with pytest.raises(ValueError, match="the data set is empty"):
        estimate("kfac", model, [], loss, "h")
    with pytest.raises(ValueError, match=r"unknown curvature 'kfca'; did you mean 'kfac'\? Known: diagonal"):
        estimate("kfca", model, [(x, y)], loss, "h")
    with pytest.raises(ValueError, match="no head 'g'; there are: h"):
        estimate("kfac", model, [(x, y)], loss, "g")
    with pytest.raises(ValueError, match=r"curvature of 'backbone\.delta\.\w+' is not finite"):
        estimate("kfac", model, [(x * float("nan"), y)], loss, "h")
    with pytest.raises(ValueError, match="samples is 0"):
        estimate("kfac", model, [(x, y)], loss, "h", samples=0)
    with pytest.raises(ValueError, match="curvature is 3; it must be a name or a subclass of Statistics"):
        estimate(3, model, [(x, y)], loss, "h")
    with pytest.raises(ValueError, match="include_head and include_backbone are both False"):
        estimate("kfac", model, [(x, y)], loss, "h", include_head=False, include_backbone=False)
    skipping = Classifier(Skipping().double(), 3)
    skipping.add_head("h", 3)
    v = vectors()
    with pytest.raises(
        ValueError, match="layer 'second' ran for an earlier batch, and not, or in another way, for this one"
    ):
        estimate("kfac", skipping, [(v, y), (v[:1], y[:1])], loss, "h")
    wide = Classifier(nn.Linear(6, 4000).double(), 4000)
    wide.add_head("h", 3)
    with pytest.raises(ValueError, match="dense curvature is for at most 20,000 parameters; these are 40,003"):
        estimate("dense", wide, [(v, y)], loss, "h")


class Largest(Statistics):
    """An estimator of one's own: a multiple of the identity."""

    def add(self, inputs, grads):
        self.add_to("most", sum(g.square().sum() for gs in grads for g in gs))

    def blocks(self, count):
        shapes = {n: p.shape for n, p in zip(self.names, self.layer.parameters(), strict=True)}
        return {n: Diagonal((n,), (self.sums["most"] / count).expand(s)) for n, s in shapes.items()}


class LargestEverywhere(Largest):
    """It chooses its own block for the head, other vectors, and the sum of parameters in no layer."""

    @classmethod
    def on_head(cls, loss):
        return cls

    @classmethod
    def output_grads(cls, outputs, loss, draws, generator):
        return torch.ones_like(outputs)[None]

    @classmethod
    def diagonal_sum(cls, gradients):
        return torch.full_like(gradients[0, 0], 7.0)


def test_an_estimator_of_ones_own():
    model, x, y = build("vit")
    found = run(Largest, model, x, y, ScaledMSE()).curvature
    assert set(found.names) == set(model.params("h"))
    assert isinstance(found.blocks["heads.h"], InputGram)
    named = run("tests.curvature.test_estimate_laws:Largest", model, x, y, ScaledMSE()).curvature
    layer = "backbone.delta.mlp.0.weight"
    assert torch.equal(named.blocks[layer].values, found.blocks[layer].values)
    own = run(LargestEverywhere, model, x, y, ScaledMSE()).curvature.blocks
    assert torch.equal(own["heads.h.weight"].values, torch.full((3, 8), 3.0, dtype=torch.float64))
    assert torch.equal(own["backbone.delta.token"].values, torch.full((1, 1, 8), 7 / 3, dtype=torch.float64))


class EkfacEverywhere(EkfacStatistics):
    @classmethod
    def on_head(cls, loss):
        return cls


class EkfacOnHead(Largest):
    @classmethod
    def on_head(cls, loss):
        return EkfacStatistics


@pytest.mark.parametrize("kind", [EkfacEverywhere, EkfacOnHead])
@pytest.mark.parametrize("backbone", [True, False])
def test_a_head_whose_statistics_need_a_first_pass(kind, backbone):
    model, x, y = build("mlp")
    found = run(kind, model, x, y, ScaledMSE(), include_backbone=backbone).curvature
    expected = run("ekfac", model, x, y, ScaledMSE()).curvature.blocks
    head = {n: torch.randn_like(p) for n, p in model.params("h").items() if n in model.head_names("h")}
    # one layer, squared loss: the eigenbasis is that of Z ⊗ I, so EK-FAC is exact there
    exact = Curvature({"heads.h": expected["heads.h"]}).quad(head)
    assert torch.isclose(Curvature({"heads.h": found.blocks["heads.h"]}).quad(head), exact)
    assert isinstance(found.blocks["heads.h"], EigenKronecker)
    assert ("backbone.delta.0" in found.blocks) is (backbone and kind is EkfacEverywhere)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_head_alone_equals_a_frozen_backbone(name, linear, loss, monkeypatch):
    model, x, y = build("convolutions", linear)
    options = {"draws": 2, "gradient": True}
    backbone = list(model.params().values())
    for p in backbone:
        p.requires_grad_(False)
    seed = torch.Generator().manual_seed(0)
    expected = estimate(name, model, [(x, y)], LOSSES[loss], "h", generator=seed, **options)
    for p in backbone:
        p.requires_grad_(True)
    monkeypatch.setattr(rows, "backward", lambda z, edges, *_, **__: pytest.fail("a backward pass") if edges else [])
    seed = torch.Generator().manual_seed(0)
    found = estimate(name, model, [(x, y)], LOSSES[loss], "h", generator=seed, include_backbone=False, **options)
    assert set(found.curvature.names) == set(found.gradient) == set(model.head_names("h"))
    assert statistics_of(found).keys() == statistics_of(expected).keys()
    for key, tensor in statistics_of(found).items():
        assert torch.equal(tensor, statistics_of(expected)[key]), key
    for key, tensor in found.gradient.items():
        assert torch.equal(tensor, expected.gradient[key]), key
    assert all(p.requires_grad for p in backbone)


def test_several_inputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, left, right):
            return self.layer(left) * right[:, :3]

    torch.manual_seed(0)
    model = Classifier(Linearized(Pair().double()), 3)
    model.add_head("h", 3)
    nn.init.normal_(model.head("h").weight)
    v, y = vectors(), torch.tensor([0, 1, 2])
    by_position = run("diagonal", model, (v, v), y, ScaledMSE(), samples=2)
    by_name = run("diagonal", model, {"left": v, "right": v}, y, ScaledMSE(), samples=2)
    for key, tensor in statistics_of(by_position).items():
        assert torch.equal(tensor, statistics_of(by_name)[key])
    assert rows.log.name == "dlcft"


def test_as_many_tokens_as_samples_are_no_samples():
    torch.manual_seed(0)
    model = Classifier(SequenceFirst().double(), features=5)
    model.add_head("h", 3)
    nn.init.normal_(model.head("h").weight)
    x, y = torch.randn(16, 8, 3, dtype=torch.float64), torch.arange(16) % 3
    apart = estimate("diagonal", model, [(x[:8], y[:8]), (x[8:], y[8:])], ScaledMSE(), "h", draws=None)
    whole = estimate("diagonal", model, [(x, y)], ScaledMSE(), "h", draws=None)
    for key, tensor in statistics_of(whole).items():
        assert torch.allclose(tensor, statistics_of(apart)[key]), key


def test_a_part_of_the_samples_is_drawn_from_all():
    model, _, _ = build("mlp")
    x = torch.cat([torch.zeros(50, *vectors().shape[1:]), torch.ones(50, *vectors().shape[1:])]).double()
    y = torch.arange(100) % 2
    batches = [(x[part], y[part]) for part in torch.arange(100).split(30)]
    options = {"draws": None, "samples": 40}
    first = estimate("kfac", model, batches, ScaledMSE(), "h", **options)
    drawn = estimate(
        "kfac", model, batches, ScaledMSE(), "h", total=100, generator=torch.Generator().manual_seed(0), **options
    )
    assert (first.samples, drawn.samples) == (40, 40)
    places = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:40]
    expected = estimate("kfac", model, [(x[places], y[places])], ScaledMSE(), "h", draws=None)
    for key, tensor in statistics_of(expected).items():
        assert torch.allclose(tensor, statistics_of(drawn)[key]), key
    assert any(not torch.allclose(tensor, statistics_of(first)[key]) for key, tensor in statistics_of(drawn).items())


@pytest.mark.parametrize("name", ["diagonal", "dense"])
def test_a_model_in_training_mode_is_looked_at_as_in_evaluation(name):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Dropout(0.5), nn.Linear(6, 5)).double()
    model = Classifier(network, features=5)
    model.add_head("h", 3)
    nn.init.normal_(model.head("h").weight)
    batches = [(torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3)]
    expected = estimate(name, model.eval(), batches, ScaledMSE(), "h", draws=None)
    model.train()
    network[2].eval()
    found = estimate(name, model, batches, ScaledMSE(), "h", draws=None)
    assert [module.training for module in network] == [True, True, False, True]
    for key, tensor in statistics_of(expected).items():
        assert torch.allclose(tensor, statistics_of(found)[key]), key
