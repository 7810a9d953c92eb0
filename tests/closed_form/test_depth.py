"""Features of all depths against plain loops in float64, and for networks of every kind."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dlcft.closed_form.depth import GRID, Activation, DepthFeatures, find_activations, share_out


class Convolutions(nn.Module):
    """Two stages with a shortcut: `second` and `short` share their input."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 6, 3, stride=2, padding=1)
        self.short, self.last = nn.Conv2d(5, 6, 1, stride=2), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        a = torch.relu(self.first(x))
        b = torch.relu(self.second(a) + self.short(a))
        return self.last(b).mean((2, 3))


class Encoder(nn.Module):
    """A transformer on tokens that heeds a mask."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.embed, self.batch_first = nn.Embedding(11, 8), batch_first
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0, batch_first=batch_first)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.layer(x, src_key_padding_mask=attention_mask == 0)
        x = x if self.batch_first else x.transpose(0, 1)
        real = attention_mask[..., None].to(x)
        return (x * real).sum(1) / real.sum(1)


class Recurrent(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.lstm, self.batch_first = nn.LSTM(4, 6, batch_first=batch_first), batch_first

    def forward(self, x):
        steps, _ = self.lstm(x if self.batch_first else x.transpose(0, 1))
        return steps[:, -1] if self.batch_first else steps[-1]


class Windows(nn.Module):
    """Attention in windows, as Swin has it: a linear layer gets windows in place of samples."""

    def __init__(self, windows_first=False):
        super().__init__()
        self.inner, self.windows_first = nn.Linear(3, 7), windows_first

    def forward(self, x):  # (samples, windows, tokens, channels)
        if self.windows_first:
            x = x.transpose(0, 1)
        y = torch.relu(self.inner(x.flatten(0, 1))).unflatten(0, x.shape[:2])
        return (y.transpose(0, 1) if self.windows_first else y).mean((1, 2))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(network, x, features):
    torch.manual_seed(0)
    network = network.double().eval()
    return DepthFeatures(network, find_activations(network, x, features)), network


def tokens(samples=4, length=6):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([6, 3, 5, 1])[:samples]
    return {
        "input_ids": torch.randint(0, 11, (samples, length), generator=generator),
        "attention_mask": (torch.arange(length)[None] < lengths[:, None]).long(),
    }


def by_hand(features, index, rows, image=None):
    """Mean, covariance and grid of one sample's activation (positions × channels), position by position."""
    one = features.activations[index]
    mean = sum(rows) / len(rows)
    second = sum(torch.outer(row, row) for row in rows) / len(rows) - torch.outer(mean, mean)
    found = [mean @ features.get_buffer(f"mean {index}") if one.means < one.channels else mean]
    if one.pairs == (0, 0):
        found.append(torch.stack([second[i, j] for i in range(len(mean)) for j in range(i, len(mean))]))
    elif one.pairs:
        left, right = features.get_buffer(f"left {index}"), features.get_buffer(f"right {index}")
        found.append((left.T @ second @ right).flatten())
    if one.fields:
        step = image.shape[-1] // GRID
        fields = [
            image[:, i * step : (i + 1) * step, j * step : (j + 1) * step].mean((1, 2))
            for i in range(GRID)
            for j in range(GRID)
        ]
        matrix = (
            features.get_buffer(f"field {index}") if one.fields < one.channels else torch.eye(one.channels).to(mean)
        )
        found += [field @ matrix for field in fields]
    return torch.cat(found)


@pytest.mark.parametrize("budget", [40, 120, 2000])
def test_convolutions_equal_a_plain_loop(budget):
    x = normal(3, 3, 16, 16)
    features, network = made(Convolutions(), x, budget)
    found = features(x)
    a = torch.relu(network.first(x))
    b = torch.relu(network.second(a) + network.short(a))
    assert [one.layer for one in features.activations] == ["first", "second", "last"]  # `short` shares an input
    assert features.length <= budget
    expected = []
    for n in range(3):
        parts = [network(x[n : n + 1])[0]]
        for index, activation in enumerate((x, a, b)):
            parts.append(by_hand(features, index, list(activation[n].flatten(1).T), activation[n]))
        expected.append(torch.cat(parts))
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_counts_in_no_layer(batch_first):
    x = tokens()
    features, _ = made(Encoder(batch_first), x, 60)
    assert {one.layout for one in features.activations} == {"rows" if batch_first else "time"}
    found = features(**x)
    for n, length in enumerate((6, 3, 5, 1)):
        alone = features(**{name: t[n : n + 1, :length] for name, t in x.items()})
        torch.testing.assert_close(found[n : n + 1], alone, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers(batch_first):
    x = normal(4, 5, 4)
    features, network = made(Recurrent(batch_first), x, 30)
    steps, _ = network.lstm(x if batch_first else x.transpose(0, 1))
    steps = steps if batch_first else steps.transpose(0, 1)
    assert [(one.layer, one.output) for one in features.activations] == [("lstm", False), ("lstm", True)]
    for n, row in enumerate(features(x)):
        expected = [by_hand(features, 0, list(x[n])), by_hand(features, 1, list(steps[n]))]
        torch.testing.assert_close(row, torch.cat([steps[n, -1], *expected]))


def test_windows_belong_to_their_samples_or_are_left_out():
    x = normal(5, 4, 6, 3)
    features, _ = made(Windows(), x, 30)
    for n in range(5):
        torch.testing.assert_close(features(x)[n], features(x[n : n + 1])[0])
    with pytest.raises(ValueError, match="no convolution or linear layer that gets one row or more for each sample"):
        find_activations(Windows(windows_first=True).double(), x, 30)


def test_a_layer_used_twice_gives_the_mean_of_both_uses():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(torch.relu(self.layer(x)))

    x = normal(3, 4)
    features, network = made(Twice(), x, 8)
    torch.testing.assert_close(features(x)[:, 4:], (x + torch.relu(network.layer(x))) / 2)


def test_features_do_not_depend_on_the_batch_or_on_earlier_ones():
    x = normal(150, 3, 8, 8)
    features, _ = made(Convolutions(), x[:3], 100)
    whole = features(x)
    torch.testing.assert_close(torch.cat([features(part) for part in x.split(7)]), whole, rtol=1e-10, atol=1e-12)
    again, _ = made(Convolutions(), x[90:91], 100)  # other samples, and only one of them, show the same shapes
    torch.testing.assert_close(again(x), whole, rtol=0, atol=0)


def test_activations_come_back_from_json():
    x = normal(3, 3, 16, 16)
    features, network = made(Convolutions(), x, 70)
    again = DepthFeatures(network, [Activation.from_json(one.to_json()) for one in features.activations])
    assert torch.equal(again(x), features(x))


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(1, 6000),
    shapes=st.lists(st.tuples(st.integers(1, 700), st.sampled_from(["image", "rows"]), st.booleans()), min_size=1),
)
def test_a_budget_is_kept_and_nearly_used_up(budget, shapes):
    wanted = [
        Activation(str(i), False, channels, layout, several) for i, (channels, layout, several) in enumerate(shapes)
    ]
    shared = share_out(budget, wanted)
    length = sum(one.length for one in shared)
    assert all(one.length > 0 for one in shared)
    assert length <= budget
    most = sum(channels for channels, _, _ in shapes)
    assert length >= min(budget // 2, most) - len(shapes)


def test_the_shipped_network_stays_within_its_budget():
    from dlcft.backbones import shipped_resnet18

    network, x = shipped_resnet18(), torch.rand(3, 3, 32, 32)
    features = DepthFeatures(network, find_activations(network, x, 4096))
    assert features(x).shape == (3, 128 + features.length)
    assert 3900 < features.length <= 4096
    inner = {one.layer: one for one in features.activations}
    assert inner["layer1.1.conv2"].pairs == inner["layer2.1.conv2"].pairs == (0, 0)  # all pairs of 16 and 32 channels
    assert F.cosine_similarity(features(x)[:1, :128], network.eval()(x[:1])).item() == pytest.approx(1, abs=1e-5)


def test_half_precision_is_squared_in_float32():
    x = 300 * normal(3, 3, 16, 16)
    features, network = made(Convolutions(), x, 120)
    half = DepthFeatures(copy.deepcopy(network).bfloat16(), features.activations)
    found, expected = half(x.bfloat16()), features(x)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.02 * expected.norm()
