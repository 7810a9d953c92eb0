"""Draw the pictures of docs/why.md: `python benchmarks/figures/why.py --out docs/figures`.

Every curve is computed: the parabolas from data of one parameter, the walk from two small networks on digits.
"""

import argparse
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call

from dlcft import Linearized, ScaledMSE

JANUARY, FEBRUARY, BOTH, REMEMBERED = "#2b6cb0", "#c05621", "#2f855a", "#111111"
STEPS = 300


def lowest(x, y):
    place = int(y.argmin())
    return x[place], y[place]


def parabolas(out):
    """Two months of one parameter: with squared loss nothing is lost, with cross-entropy the memory fades."""
    torch.manual_seed(0)
    theta = torch.linspace(-1.5, 4.5, 601, dtype=torch.float64)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    months = [(torch.randn(20, dtype=torch.float64) + 1.2, goal) for goal in (0.4, 2.6)]
    squared = [0.5 * (goal * x - theta[:, None] * x).square().mean(1) for x, goal in months]
    curve(axes[0], theta, squared, parabola(theta, squared[0]), "squared loss, linear model: exact")

    signs = [torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 1, -1]).double(), torch.tensor([-1.0, -1, -1, 1]).double()]
    softmax = [nn.functional.softplus(-sign * theta[:, None]).mean(1) for sign in signs]
    curve(axes[1], theta, softmax, parabola(theta, softmax[0]), "cross-entropy: only near the minimum")
    axes[0].set_ylabel("mean loss")
    axes[0].legend(frameon=False, fontsize=9)
    save(figure, out / "why-parabolas.svg")


def parabola(theta, loss):
    """The loss's second-order form at its minimum, by differences."""
    at, step = int(loss.argmin()), float(theta[1] - theta[0])
    second = (loss[at + 1] - 2 * loss[at] + loss[at - 1]) / step**2
    return loss[at] + 0.5 * second * (theta - theta[at]) ** 2


def curve(axis, theta, losses, remembered, title):
    january, february = losses
    axis.plot(theta, january, color=JANUARY, linewidth=2, label="January's loss")
    axis.plot(theta, february, color=FEBRUARY, linewidth=2, label="February's loss")
    axis.plot(theta, (january + february) / 2, color=BOTH, linewidth=2.5, label="both, together")
    axis.plot(theta, remembered, "--", color=REMEMBERED, linewidth=1.2, label="January, remembered")
    axis.plot(*lowest(theta, (january + february) / 2), "o", color=BOTH, markersize=9)
    axis.plot(
        *lowest(theta, (remembered + february) / 2), "x", color=REMEMBERED, markersize=9, label="found in sequence"
    )
    axis.set(title=title, xlabel="a parameter, θ", ylim=(0, float(torch.stack(losses).max()) * 0.6))
    axis.title.set_fontsize(10.5)


def walk(out):
    """January's loss on the way that February's training takes: a network, and the same network linearised."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float64), torch.tensor(y)
    january, february = y < 5, y >= 5
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for axis, linear in zip(axes, (False, True), strict=True):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
        network = Linearized(network) if linear else network
        train(network, x[january], y[january])
        start = snapshot(network)
        train(network, x[february], y[february])
        draw_walk(axis, network, start, x[january], y[january])
        axis.set_title("the same network, linearised" if linear else "the network itself", fontsize=10.5)
    axes[0].set_ylabel("January's mean loss")
    axes[0].legend(frameon=False, fontsize=9)
    save(figure, out / "why-linearised.svg")


def snapshot(network):
    return {name: value.detach().clone() for name, value in network.named_parameters() if value.requires_grad}


def train(network, x, y):
    wanted = [value for value in network.parameters() if value.requires_grad]
    optimizer, loss = torch.optim.Adam(wanted, lr=0.01), ScaledMSE(1.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss.value(network(x), y).backward()
        optimizer.step()


def draw_walk(axis, network, start, x, y):
    end, loss = snapshot(network), ScaledMSE(1.0)
    way = {name: end[name] - start[name] for name in start}

    def along(step):
        return loss.value(functional_call(network, {name: start[name] + step * way[name] for name in way}, (x,)), y)

    step = torch.zeros((), dtype=x.dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(along(step), step, create_graph=True)
    bend = torch.autograd.grad(slope, step)[0].item()
    steps = torch.linspace(-0.4, 1.0, 57)
    with torch.no_grad():
        true = [along(s).item() for s in steps.double()]
        first = along(step).item()
    guess = first + slope.item() * steps + 0.5 * bend * steps**2
    axis.plot(steps, true, color=JANUARY, linewidth=2.5, label="January's loss")
    axis.plot(steps, guess, "--", color=REMEMBERED, linewidth=1.2, label="its parabola at θ₁")
    axis.axvline(0, color="#888888", linewidth=0.8)
    axis.set(xlabel="way from θ₁ (0) to what February wants (1)", ylim=(0, 1.15 * max(*true, float(guess.max()))))
    print(f"at the end of the way: loss {true[-1]:.4f}, parabola {float(guess[-1]):.4f}")


def save(figure, path):
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the pictures")
    chosen = parser.parse_args()
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "dlcft"  # the same file every time
    chosen.out.mkdir(parents=True, exist_ok=True)
    parabolas(chosen.out)
    walk(chosen.out)
