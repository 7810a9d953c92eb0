"""The reservoir is uniform, bounded, and gives back what it got."""

import json

import pytest
import torch

from dlcft.methods.replay import Buffer


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_every_sample_is_kept_equally_often():
    kept = torch.zeros(40)
    runs = 600
    for seed in range(runs):
        buffer, generator = Buffer(10), seeded(seed)
        for part in torch.arange(40).split([3, 17, 1, 19]):
            buffer.add(part[:, None], part, head="a", generator=generator)
        kept[buffer.state()[0]["y"]] += 1
    assert kept.sum() == 10 * runs
    # Each count is binomial(runs, ¼); the statistic has 39 degrees of freedom, and 80 has probability 1e-4.
    assert ((kept - runs / 4) ** 2 / (runs / 4 * 3 / 4)).sum() < 80


def test_split_does_not_matter_and_later_rows_win():
    whole, parts, one = Buffer(5), Buffer(5), seeded()
    y = torch.arange(60)
    whole.add(y[:, None], y, head="a", generator=seeded())
    for part in y.split(1):
        parts.add(part[:, None], part, head="a", generator=one)
    assert torch.equal(whole.state()[0]["y"], parts.state()[0]["y"])
    assert len(whole) == 5
    assert whole.seen == 60


def test_parts_of_a_sample_stay_together():
    buffer, generator = Buffer(8), seeded()
    for head, width, start in (("a", 2, 0), ("b", 4, 20), ("c", 0, 40)):
        y = torch.arange(start, start + 20)
        x = {"image": y.to(torch.uint8)[:, None, None].expand(-1, 2, 2), "size": y.double()}
        logits = y[:, None].float().expand(-1, width) + 1 if width else None
        buffer.add(x, y, logits, head=head, generator=generator)
    batch = buffer.sample(8, generator)
    assert batch.x["image"].dtype == torch.uint8
    assert torch.equal(batch.x["image"][:, 1, 1].long(), batch.y)
    assert torch.equal(batch.x["size"].long(), batch.y)
    for name, rows in batch.by_head():
        assert set((rows.y // 20).tolist()) == {"abc".index(name)}
        stored = torch.arange(4) < {"a": 2, "b": 4, "c": 0}[name]
        assert torch.equal(rows.logits, torch.where(stored, rows.y[:, None] + 1.0, 0.0))
    assert {n for n, _ in batch.by_head()} == {batch.heads[i] for i in batch.head}


def test_sampling():
    buffer, generator = Buffer(6), seeded()
    y = torch.arange(6)
    buffer.add((y[:, None], y), y, head="a", generator=generator)
    assert sorted(buffer.sample(6, generator).y.tolist()) == list(range(6))
    batch = buffer.sample(50, generator)
    assert len(batch.y) == 50
    assert isinstance(batch.x, tuple)
    assert torch.equal(batch.x[1], batch.y)
    assert torch.equal(buffer.sample(4, seeded(3)).y, buffer.sample(4, seeded(3)).y)
    with pytest.raises(ValueError, match="cannot draw 2 samples from a buffer of 0"):
        Buffer(3).sample(2, generator)


def test_memory_is_bounded():
    buffer = Buffer(4)
    x = torch.zeros(100, 3, 8, 8, dtype=torch.uint8)
    buffer.add(x, torch.zeros(100, dtype=torch.long), head="a", generator=seeded())
    assert buffer._tensors["x|0"].nbytes == 4 * 3 * 8 * 8
    assert buffer._tensors["x|0"].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_state_round_trip_continues_the_same():
    first, y = Buffer(5), torch.arange(30)
    first.add(y[:, None], y, y[:, None].float(), head="a", generator=seeded())
    tensors, header = first.state()
    second = Buffer.from_state(tensors, json.loads(json.dumps(header)))
    for buffer in (first, second):
        buffer.add(y[:, None], y + 30, head="b", generator=seeded(1))
    for name, tensor in first.state()[0].items():
        assert torch.equal(tensor, second.state()[0][name])
    assert first.state()[1] == second.state()[1]
    empty = Buffer.from_state(*Buffer(3).state())
    assert (len(empty), empty.capacity) == (0, 3)


def test_mistakes_are_named():
    buffer, y = Buffer(5), torch.arange(3)
    buffer.add(torch.zeros(3, 2), y, head="a", generator=seeded())
    for x, labels, logits, message in (
        (torch.zeros(3, 4), y, None, r"the buffer holds tensor .*\(2,\)"),
        (torch.zeros(3, 2, dtype=torch.uint8), y, None, "torch.uint8"),
        ((torch.zeros(3, 2),), y, None, "samples are tuple"),
        (torch.zeros(2, 2), y, None, "must be the 3 samples"),
        (torch.zeros(3, 2), y, torch.zeros(2, 4), r"logits have shape \(2, 4\)"),
        (([1],), y, None, r"x is a tuple of \['list'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            buffer.add(x, labels, logits, head="a", generator=seeded())
    assert buffer.seen == 3
    with pytest.raises(ValueError, match="capacity is 0"):
        Buffer(0)
