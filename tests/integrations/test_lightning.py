"""The Lightning callback, with the real trainer on digits that are turned by another quarter in every task."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlcft.integrations.penalty import PastTasks
from tests.support.digits import TASKS, accuracy, forgetting, turned
from tests.support.networks import needs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other libraries


@pytest.fixture
def pl():
    return needs("lightning.pytorch", "lightning")


def classifier(pl, optimizer=None):
    class Digits(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
                nn.Linear(64, 10),
            )  # fmt: skip

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self(x), y)

        def configure_optimizers(self):
            return optimizer(self.parameters()) if optimizer else torch.optim.Adam(self.parameters(), lr=2e-3)

    return Digits()


def trainer(pl, callbacks, tmp_path, **settings):
    settings = {"max_epochs": 15, "logger": False, "enable_checkpointing": False} | settings
    return pl.Trainer(
        accelerator="cpu", devices=1, callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, **settings,
    )  # fmt: skip


def loader(task, samples=None, batch=32):
    x, y = turned(task)
    return DataLoader(TensorDataset(x[:samples], y[:samples]), batch, shuffle=samples is None)


def learned(pl, tmp_path, past, seed):
    """The accuracy on every task after each task."""
    from dlcft.integrations.lightning import DLCFTCallback

    pl.seed_everything(seed)
    module = classifier(pl)
    callbacks = [DLCFTCallback(past)] if past else []
    table = []
    for task in range(TASKS):
        trainer(pl, callbacks, tmp_path).fit(module, loader(task))
        module.eval()
        table.append([accuracy(module(x), y) for x, y in (turned(t, held_out=True) for t in range(TASKS))])
    return table


@pytest.mark.parametrize("seed", range(3))
def test_less_is_forgotten(pl, tmp_path, seed):
    without = learned(pl, tmp_path, None, seed)
    kept = learned(pl, tmp_path, PastTasks("exact-tk", strength=30.0), seed)
    print([[round(100 * a, 1) for a in row] for row in (without[-1], kept[-1])], forgetting(without), forgetting(kept))
    assert forgetting(without) > 0.3
    assert forgetting(kept) < 0.5 * forgetting(without)
    assert sum(kept[-1]) > sum(without[-1]) + 0.2


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.05}, {"precision": "64-true"}],
    ids=["plain", "accumulated", "clipped", "float64"],
)
def test_it_is_the_penalty_added_to_the_loss(pl, tmp_path, settings):
    from dlcft.integrations.lightning import DLCFTCallback

    pl.seed_everything(0)
    past, start = PastTasks(strength=10.0), classifier(pl, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    first = trainer(pl, [DLCFTCallback(past)], tmp_path, max_epochs=2, precision=settings.get("precision"))
    first.fit(start, loader(0, 200))
    weights = {name: t.clone() for name, t in start.state_dict().items()}
    state = past.state_dict()

    def ended(callbacks, module):
        module.load_state_dict(weights)
        fit = trainer(pl, callbacks, tmp_path, max_epochs=3, **settings)
        fit.fit(module, loader(1, 192))
        return torch.cat([p.detach().flatten() for p in module.parameters()]), fit

    module = classifier(pl, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)).to(start.dtype)
    by_gradient, fit = ended([DLCFTCallback(past)], module)
    assert fit.callback_metrics["dlcft_penalty"] > 0

    again = PastTasks(strength=10.0)
    again.load_state_dict(state)
    module = classifier(pl, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)).to(start.dtype)
    plain = module.training_step
    module.training_step = lambda batch, batch_idx: plain(batch, batch_idx) + again.penalty(module)
    by_loss, _ = ended([], module)
    moved = (by_loss - torch.cat([weights[n].flatten() for n, _ in module.named_parameters()])).norm()
    assert (by_loss - by_gradient).norm() < (1e-9 if start.dtype == torch.float64 else 1e-4) * moved


def test_mixed_precision_takes_its_scale_off_first(pl, tmp_path):
    """With float16 gradients are scaled by 65,536; the penalty's must not be lost beside them."""
    from lightning.pytorch.plugins import MixedPrecision

    from dlcft.integrations.lightning import DLCFTCallback

    ends = {}
    for name in ("scaled", "plain", "without"):
        pl.seed_everything(0)
        past, module = PastTasks(strength=3.0), classifier(pl, lambda p: torch.optim.SGD(p, lr=0.01))
        trainer(pl, [DLCFTCallback(past)], tmp_path, max_epochs=20).fit(module, loader(0, 200))
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        settings = {"plugins": [plugin]} if name == "scaled" else {}
        callbacks = [] if name == "without" else [DLCFTCallback(past)]
        trainer(pl, callbacks, tmp_path, max_epochs=5, **settings).fit(module, loader(1, 192))
        ends[name] = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert (ends["scaled"] - ends["plain"]).norm() < 0.1 * (ends["without"] - ends["plain"]).norm()


def test_a_checkpoint_carries_the_memory(pl, tmp_path):
    from dlcft.integrations.lightning import DLCFTCallback

    pl.seed_everything(0)
    callback, module = DLCFTCallback(PastTasks("diagonal")), classifier(pl)
    first = trainer(pl, [callback], tmp_path, max_epochs=1)
    first.fit(module, loader(0, 200))
    first.save_checkpoint(tmp_path / "first.ckpt")
    loaded, other = DLCFTCallback(PastTasks("diagonal")), classifier(pl)
    second = trainer(pl, [loaded], tmp_path, max_epochs=2)
    second.fit(other, loader(1, 200), ckpt_path=tmp_path / "first.ckpt", weights_only=True)
    assert loaded.past.memory.weight == 2
    assert second.callback_metrics["dlcft_penalty"] > 0


def test_what_cannot_work_is_refused(pl, tmp_path):
    from dlcft.integrations.lightning import DLCFTCallback, split_labels

    x, y = turned(0)
    assert split_labels({"x": x, "label": y})[1] is y
    with pytest.raises(ValueError, match="a batch is a Tensor; a pair of inputs and labels"):
        split_labels(x)
    past, module = PastTasks("diagonal"), classifier(pl, torch.optim.LBFGS)
    trainer(pl, [DLCFTCallback(past)], tmp_path, max_epochs=1).fit(module, loader(0, 64))
    with pytest.raises(ValueError, match="LBFGS compares losses"):
        trainer(pl, [DLCFTCallback(past)], tmp_path, max_epochs=1).fit(module, loader(1, 64))
