"""Small networks, and their Gauss-Newton matrix by brute force."""

import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlcft import Classifier, CrossEntropy, Linearized, ScaledMSE, estimate
from dlcft.curvature.blocks import Diagonal
from dlcft.curvature.estimate import ESTIMATORS
from tests.support.networks import Encoder, Recurrent, Shared, ViT, images, tokens, vectors

LOSSES = {"mse": ScaledMSE(2.0), "cross-entropy": CrossEntropy()}
LAYERWISE = [name for name in ESTIMATORS if name not in ("dense", "mas")]


class Convolutions(nn.Module):
    """Stride, padding, dilation, groups, no bias, and in-place activations."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.strided = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2)
        self.dilated = nn.Conv2d(4, 2, (2, 3), dilation=(1, 2), padding=(0, 2))
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x):
        y = self.strided(self.act(self.stem(x)))
        y += x[:, :1, ::2, ::2]
        return self.act(self.dilated(torch.tanh(y))).mean((2, 3))


class Tokens(nn.Module):
    """A layer over positions, used twice."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = x.view(-1, 2, 3).repeat(1, 1, 2)
        return self.out(torch.tanh(self.mix(torch.tanh(self.mix(x))))).sum(1)


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


NETWORKS = {
    "mlp": (Mlp, vectors, 3),
    "convolutions": (Convolutions, lambda: images(6), 2),
    "tokens": (Tokens, vectors, 3),
    "shared": (Shared, vectors, 6),
    "vit": (ViT, images, 8),
    "encoder": (Encoder, tokens, 8),
    "lstm": (lambda: Recurrent(nn.LSTM), tokens, 3),
}


def build(name, linear=True, strict=False, outputs=3, seed=0):
    make, batch, features = NETWORKS[name]
    torch.manual_seed(seed)
    network = make().double().eval()
    model = Classifier(Linearized(network) if linear else network, features, strict=strict)
    model.add_head("h", outputs)
    with torch.no_grad():
        for p in model.params("h").values():
            p.add_(0.3 * torch.randn_like(p))
        if strict:
            model.fix_directions("h", torch.randn(outputs, features, dtype=torch.float64))
    return model, batch(), torch.tensor([0, 2, 1])


def gauss_newton(model, x, y, loss):
    """(1/N) Σ_n J_nᵀ (∂²ℓ/∂f²) J_n and its parameter slices, by jacrev through the whole classifier."""
    params = {n: p.detach() for n, p in model.params("h").items()}
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = jacrev(lambda p: functional_call(model, p, (x, "h")))(params)
    flat = torch.cat([jacobian[n].flatten(2) for n in params], 2)
    outputs = model(x, "h").detach()
    hessians = [torch.func.hessian(lambda f, n=n: loss.value(f[None], y[n : n + 1]))(outputs[n]) for n in range(len(y))]
    matrix = sum(j.T @ h @ j for j, h in zip(flat, hessians, strict=True)) / len(y)
    starts = torch.tensor([0] + [p.numel() for p in params.values()]).cumsum(0).tolist()
    return matrix, {n: slice(a, b) for n, a, b in zip(params, starts[:-1], starts[1:], strict=True)}


def block_of(matrix, slices, block, params):
    """The part of the brute-force matrix that a layer's block stands for: groups × (outputs × inputs)²."""
    index = {n: torch.arange(s.start, s.stop).view(params[n].shape) for n, s in slices.items()}
    positions = block.matrix(index)  # where each entry of D lies in the flat vector
    return [matrix[p.reshape(-1)][:, p.reshape(-1)].view(*p.shape, *p.shape) for p in positions]


def dense(curvature, params):
    """The whole matrix on parameters of these shapes, in the order of `curvature.names`, column by column."""
    sizes = [params[name].numel() for name in curvature.names]
    columns = []
    for unit in torch.eye(sum(sizes), dtype=params[curvature.names[0]].dtype):
        parts = zip(curvature.names, unit.split(sizes), strict=True)
        product = curvature.matvec({name: part.view(params[name].shape) for name, part in parts})
        columns.append(torch.cat([product[name].reshape(-1) for name in curvature.names]))
    return torch.stack(columns, 1)


def run(name, model, x, y, loss, **options):
    return estimate(name, model, [(x, y)], loss, "h", draws=None, **options)


def layer_blocks(estimate):
    return {n: b for n, b in estimate.curvature.blocks.items() if not isinstance(b, Diagonal)}
