"""K-FAC against two independent libraries, curvlinops and nngeometry: same network, samples, exact Fisher, float64.

How a factor is normalised by positions is each library's own choice, so the Kronecker products are compared.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlcft import Classifier, CrossEntropy, ScaledMSE, estimate
from dlcft.curvature.blocks import InputGram

OUTPUTS = 3
SAMPLES, BATCH = 6, 4  # a last batch that is smaller
LOSSES = {"mse": ScaledMSE(), "cross-entropy": CrossEntropy()}


def oracle(name):
    """Import a library that may be absent, and may not be at peace with this version of torch or numpy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


@pytest.fixture(autouse=True)
def double():
    """Both oracles make some of their tensors, and nngeometry its smallest divisor, in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def network():
    """Same padding, a stride, no padding, an asymmetric kernel, no bias, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 5, 3, stride=2, padding=1, bias=False),
        nn.LeakyReLU(0.1),
        nn.Conv2d(5, 4, (2, 3)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 3 * 2, 6),
        nn.Tanh(),
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    classifier = Classifier(network(), 6)
    classifier.add_head("h", OUTPUTS)
    nn.init.normal_(classifier.head("h").weight)
    nn.init.normal_(classifier.head("h").bias)
    return classifier


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    return x, torch.randint(0, OUTPUTS, (SAMPLES,), generator=generator)


def batches(x, y):
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def ours(model, data, loss):
    """The block of every layer as one matrix, rows of D first, by the layer's place in `nn.Sequential`."""
    curvature = estimate("kfac", model, batches(*data), LOSSES[loss], "h", draws=None).curvature
    found = {}
    for name, block in curvature.blocks.items():
        if isinstance(block, InputGram):  # the head under squared loss
            found[name] = torch.kron(torch.eye(OUTPUTS), block.gram[0])
        else:
            found[name] = torch.kron(block.left[0], block.right[0]) / block.divisor[0]
    assert len(found) == 5
    return list(found.values())


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() < 1e-6 * other.norm()
        assert (one - other).abs().max() < 1e-6 * other.abs().max()


@pytest.mark.parametrize("loss", LOSSES)
def test_curvlinops(model, data, loss):
    curvlinops = oracle("curvlinops")
    x, y = data
    plain = nn.Sequential(model.backbone, model.head("h"))
    targets = torch.randn(SAMPLES, OUTPUTS) if loss == "mse" else y  # the exact Fisher does not look at them
    operator = curvlinops.KFACLinearOperator(
        plain,
        nn.MSELoss() if loss == "mse" else nn.CrossEntropyLoss(),
        list(plain.parameters()),
        batches(x, targets),
        fisher_type="type-2",
        kfac_approx="expand",
        separate_weight_and_bias=False,
        check_deterministic=False,
        num_data=SAMPLES,
    )
    operator.compute_kronecker_factors()
    # MSELoss averages over outputs and lacks our ½: its Hessian is 2/C times the identity
    scale = 2 / OUTPUTS if loss == "mse" else 1
    inputs, gradients = operator._input_covariances, operator._gradient_covariances
    layers = [name for name, module in plain.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert_equal(ours(model, data, loss), [torch.kron(gradients[n], inputs[n]) / scale for n in layers])


@pytest.mark.parametrize("loss", LOSSES)
def test_nngeometry(model, data, loss):
    nngeometry = oracle("nngeometry")
    representation = oracle("nngeometry.object").PMatKFAC
    plain = nn.Sequential(model.backbone, model.head("h"))
    fisher = nngeometry.FIM(
        plain,
        DataLoader(TensorDataset(*data), batch_size=BATCH),
        representation,
        variant="regression" if loss == "mse" else "classif_logits",
    )
    assert_equal(ours(model, data, loss), [torch.kron(g, a) for a, g in fisher.data.values()])
