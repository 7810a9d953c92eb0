"""`learner.module()`: the answers of every method as a plain module, for what torch has to run and export it."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.data.images import Preprocess
from dlcft.methods.recipes import RECIPES
from tests.support.networks import Encoder, Recurrent

IMAGES = Preprocess((8, 8), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), channels=3)
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.rand(12, 3, 8, 8, generator=GENERATOR), ["cat", "dog", "owl"] * 4
OTHERS = torch.rand(7, 3, 8, 8, generator=GENERATOR)
SETTINGS = {
    "tangent": {"tangent_features": 60},
    "depth": {"depth_features": 100},
    "dlcft-exact": {"depth_features": 100},
    "ranpac": {"random_features": 50},
    "klda": {"random_features": 50},
}
KINDS = ["dlcft-exact", "tangent", "dlcft-kfac", "none"]  # closed form with and without gradients, linearised, plain


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.Linear(6, 8)

    def forward(self, x):
        x = torch.relu_(self.norm(self.conv(x)))
        return torch.tanh(self.out(x.view(len(x), 6, -1).mean(2)))


def learned(method, **options):
    torch.manual_seed(0)
    settings = SETTINGS.get(method, {} if RECIPES[method].closed_form else {"epochs": 2, "lr": 0.01})
    learner = Learner(Small(), method, preprocess=IMAGES, **settings, **options)
    learner.learn((X, Y), **({"head": "first"} if options.get("scenario") == "task-il" else {}))
    return learner


def assert_agree(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("method", RECIPES)
def test_every_method(method):
    learner = learned(method)
    before = learner.outputs(OTHERS)
    module = learner.module()
    assert torch.equal(learner.outputs(OTHERS), before)
    for size in (7, 1, 4):
        assert_agree(module(OTHERS[:size]), before[:size])
    likely = learner.module(probabilities=True)(OTHERS)
    assert_agree(likely, (before / learner.temperature).softmax(1))


def test_the_module_is_its_own():
    learner = learned("dlcft-exact")
    before, module = learner.outputs(OTHERS), learner.module()
    learner.learn((X.flip(0), Y))
    assert not torch.allclose(learner.outputs(OTHERS), before)
    assert_agree(module(OTHERS), before)
    parameters = sum(p.numel() for p in module.state_dict().values())
    assert parameters < 2 * learner.model.head("main").weight.numel() + 1000  # no sums, which are squares


def test_made_in_inference_mode():
    learner = learned("tangent")
    with torch.inference_mode():
        module = learner.module()
        assert_agree(module(OTHERS), learner.outputs(OTHERS))


def test_the_temperature_of_the_last_holdout():
    learner = learned("ridge")
    learner.notes["temperature"] = 0.25
    assert_agree(learner.module(probabilities=True)(OTHERS), (4 * learner.outputs(OTHERS)).softmax(1))


def test_a_head_of_its_own():
    learner = learned("ridge", scenario="task-il")
    learner.learn((X, [1, 2] * 6), head="second")
    for head in ("first", "second"):
        assert_agree(learner.module(head=head)(OTHERS), learner.outputs(OTHERS, head=head))
    with pytest.raises(ValueError, match="learned so far: first, second"):
        learner.module()


@pytest.mark.parametrize(
    "settings",
    [
        {"depth_features": 60, "random_features": 20},
        {"depth_features": 60, "tangent_features": 40},
        {"depth_features": 60, "augment": "flip"},
    ],
)
def test_features_side_by_side(settings):
    learner = Learner(Small(), "dlcft-exact", preprocess=IMAGES, **settings)
    learner.learn((X, Y))
    assert_agree(learner.module()(OTHERS), learner.outputs(OTHERS))


def test_half_precision_takes_float32():
    learner = Learner(Small().to(torch.bfloat16), "ridge", preprocess=IMAGES)
    learner.learn((X, Y))
    assert_agree(learner.module()(OTHERS), learner.outputs(OTHERS))


def test_an_example_where_the_shape_is_unknown():
    network, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), torch.randn(9, 4)
    learner = Learner(network, "dlcft-kfac", epochs=1)
    with pytest.raises(ValueError, match="nothing has been learned yet"):
        learner.module(example=x)
    learner.learn((x, Y[:9]))
    with pytest.raises(ValueError, match=r"neither data nor example= nor a preprocessing with a size"):
        learner.module()
    assert_agree(learner.module(example=x[:1])(x), learner.outputs(x))


def test_texts_have_any_length_where_the_network_allows_it():
    tokens = torch.randint(0, 11, (9, 4), generator=GENERATOR)
    longer = torch.randint(0, 11, (5, 6), generator=GENERATOR)
    torch.manual_seed(0)
    learner = Learner(Encoder().eval(), "dlcft-exact", depth_features=60)
    learner.learn((tokens, Y[:9]))
    assert_agree(learner.module(example=tokens)(longer), learner.outputs(longer))
    learner = Learner(Recurrent(nn.GRU).eval(), "ridge")
    learner.learn((tokens, Y[:9]))
    assert_agree(learner.module(example=tokens)(tokens[:5]), learner.outputs(tokens[:5]))


class ByFours(Small):
    """Gives other answers for batches of four: none of the batch sizes that its graph is made from."""

    def forward(self, x):
        return super().forward(x) * (1.5 if len(x) == 4 else 1.0)


def test_a_module_that_would_be_wrong_is_refused():
    learner = Learner(ByFours(), "ridge", preprocess=IMAGES)
    learner.learn((X, Y))
    with pytest.raises(ValueError, match="other operations for another batch size"):
        learner.module()


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchScript
def test_what_torch_has_to_run_it(method):
    learner = learned(method)
    module, wanted = learner.module(), learner.outputs(OTHERS)
    program = torch.export.export(module, (X[:3],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    traced = torch.jit.trace(module, (X[:3],))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for run in (program.module(), traced, compiled):
        assert_agree(run(OTHERS), wanted)
    assert_agree(program.module()(OTHERS[:1]), wanted[:1])


@pytest.mark.parametrize("method", ["dlcft-exact", "dlcft-kfac"])
def test_it_serves_where_dlcft_is_not(method, tmp_path):
    learner = learned(method)
    torch.save(learner.module(), tmp_path / "module.pt")
    torch.save((OTHERS, learner.outputs(OTHERS)), tmp_path / "answers.pt")
    code = """
import sys
sys.modules["dlcft"] = None
import torch
module = torch.load("module.pt", weights_only=False)
x, wanted = torch.load("answers.pt")
print(float((module(x) - wanted).abs().max() / wanted.abs().max()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1e-5
