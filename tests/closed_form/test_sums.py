"""Ridge regression from sums: order, split and arrival do not matter, and brute force agrees."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from dlcft.closed_form import fit
from dlcft.closed_form import sums as module
from dlcft.closed_form.sums import RIDGES, RidgeSums
from dlcft.closed_form.triangles import is_symmetric

FEATURES, CLASSES, SCALE = 7, 4, 15.0


def data(n=40, seed=0, features=FEATURES, classes=CLASSES):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator, dtype=torch.float64) * torch.arange(1, features + 1) + 1.5
    y = torch.randint(classes, (n,), generator=generator)
    y[:classes] = torch.arange(classes)
    return x, y


def sums(x, y, weights=None):
    return RidgeSums.empty(x.shape[1]).add(x, y, weights)


def brute(x, y, ridge, weights=None, classes=CLASSES):
    """Augmented least squares: rows √w [φ, 1], then √(ridge Σw) diag(σ) without the intercept."""
    w = torch.ones(len(x), dtype=x.dtype) if weights is None else weights
    mean = (w[:, None] * x).sum(0) / w.sum()
    variance = (w[:, None] * (x - mean) ** 2).sum(0) / w.sum()
    sigma = variance.clamp(min=variance.median() / len(x)).sqrt()
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) * w.sqrt()[:, None]
    penalty = torch.cat([torch.diag(sigma), torch.zeros(x.shape[1], 1, dtype=x.dtype)], 1) * (ridge * w.sum()).sqrt()
    target = SCALE * torch.nn.functional.one_hot(y, classes).double() * w.sqrt()[:, None]
    target = torch.cat([target, torch.zeros(x.shape[1], classes, dtype=x.dtype)])
    solution = torch.linalg.lstsq(torch.cat([design, penalty]), target).solution.T
    return solution[:, :-1], solution[:, -1]


def assert_close(got, expected, tolerance=1e-10):
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 99), st.lists(st.integers(0, 40), max_size=6), st.booleans(), st.booleans())
def test_any_order_and_split_gives_the_same(seed, cuts, equal_classes, by_class):
    x, y = data(seed=seed)
    expected = sums(x, y).solve(0.1, equal_classes=equal_classes)
    order = y.argsort() if by_class else torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    bounds = sorted({0, 40, *cuts})
    parts = [order[a:b] for a, b in itertools.pairwise(bounds)]
    apart = RidgeSums.empty(FEATURES)
    for part in parts:
        apart = apart.add(x[part], y[part])
    assert_close(apart.solve(0.1, equal_classes=equal_classes), expected)
    extended = RidgeSums.empty(FEATURES).extend((x[p], y[p]) for p in parts)
    assert_close(extended.solve(0.1, equal_classes=equal_classes), expected)
    names = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(seed))
    weight, bias = sums(x, names[y]).solve(0.1, equal_classes=equal_classes)
    assert_close((weight[names], bias[names]), expected)


def test_equals_brute_force_and_scikit_learn():
    x, y = data()
    weight, bias = sums(x, y).solve(0.3)
    assert_close((weight, bias), brute(x, y, 0.3))
    target = SCALE * torch.nn.functional.one_hot(y, CLASSES).double()
    inputs = StandardScaler().fit_transform(x.numpy())
    theirs = Ridge(alpha=0.3 * 40).fit(inputs, target.numpy())
    assert_close([x @ weight.T + bias], [torch.from_numpy(theirs.predict(inputs))], 1e-9)


def test_merge_and_subtract():
    x, y = data()
    joint = sums(x, y)
    assert_close(sums(x[:13], y[:13]).merge(sums(x[13:], y[13:])).solve(0.1), joint.solve(0.1))
    assert_close(joint.minus(sums(x[30:], y[30:])).solve(0.1), sums(x[:30], y[:30]).grow(CLASSES).solve(0.1), 1e-8)
    one = y == 3
    forgotten = joint.minus(sums(x[one], y[one]))
    assert forgotten.counts[3] == 0
    assert_close(forgotten.solve(0.1), sums(x[~one], y[~one]).grow(CLASSES).solve(0.1), 1e-8)
    nothing = joint.minus(joint)
    assert nothing.samples == 0
    assert not nothing.gram.any()


def test_a_wrong_subtraction_is_refused():
    x, y = data()
    with pytest.raises(ValueError, match=r"would leave -1 samples"):
        sums(x[:3], y[:3]).minus(sums(x[:4], y[:4]))
    with pytest.raises(ValueError, match=r"class 1 with a weight of -1"):
        sums(x[:1], y[:1]).merge(sums(x[2:6], y[2:6])).minus(sums(x[1:2], y[1:2]))
    with pytest.raises(ValueError, match="negative variance"):
        sums(x, y).minus(sums(100 * x[:2], y[:2]))
    with pytest.raises(ValueError, match="negative variance"):
        sums(x[:4], y[:4]).minus(sums(x[:1] + 1, y[:1]))


def test_weights_of_samples_and_tasks():
    x, y = data()
    w = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    assert_close(sums(x, y, w).solve(0.2), brute(x, y, 0.2, w))
    w[:30], w[30:] = 1 / 30, 1 / 10
    equal = sums(x[:30], y[:30], w[:30]).merge(sums(x[30:], y[30:], w[30:]))
    assert_close(equal.solve(0.2), brute(x, y, 0.2, w))
    assert equal.weight == pytest.approx(2)
    assert equal.samples == 40


def test_grown_classes_have_zero_targets():
    x, y = data()
    weight, bias = sums(x, y).grow(6).solve(0.1)
    assert_close((weight, bias), brute(x, y, 0.1, classes=6))
    assert not weight[4:].any()
    with pytest.raises(ValueError, match="cannot grow to 2 classes; there are 4"):
        sums(x, y).grow(2)


def test_loss_is_that_of_the_data():
    x, y = data()
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(6, FEATURES, dtype=torch.float64, generator=generator)
    bias = torch.randn(6, dtype=torch.float64, generator=generator)
    target = 3.0 * torch.nn.functional.one_hot(y, 6)
    expected = 0.5 * (target - x @ weight.T - bias).square().sum() / 40
    assert sums(x, y).loss(weight, bias, 3.0) == pytest.approx(float(expected), rel=1e-12)
    with pytest.raises(ValueError, match="has 2 rows; 4 classes"):
        sums(x, y).loss(weight[:2], bias[:2])


def test_equal_classes():
    x, _ = data()
    even = torch.arange(40) % CLASSES
    assert_close(sums(x, even).solve(0.1, equal_classes=True), sums(x, even).solve(0.1))
    # Classes that share their covariance: class c is the same cloud, moved, and repeated c + 1 times.
    cloud = x[:12]
    moved = [cloud + 3 * x[20 + c] for c in range(CLASSES)]
    many = torch.cat([m.repeat(c + 1, 1) for c, m in enumerate(moved)])
    labels = torch.cat([torch.full((12 * (c + 1),), c) for c in range(CLASSES)])
    once = torch.arange(CLASSES).repeat_interleave(12)
    assert_close(sums(many, labels).solve(0.1, equal_classes=True), sums(torch.cat(moved), once).solve(0.1), 1e-9)
    assert (sums(many, labels).solve(0.1)[0] - sums(torch.cat(moved), once).solve(0.1)[0]).abs().max() > 1e-3


def test_one_decomposition_serves_all_ridges_and_gcv_is_the_definition():
    x, y = data()
    s = sums(x, y)
    path = s.path()
    for ridge in (1e-3, 0.1, 10.0):
        assert_close(path.solve(ridge), s.solve(ridge))
        z = (x - x.mean(0)) / x.std(0, unbiased=False)
        hat = z @ torch.linalg.solve(z.T @ z + ridge * 40 * torch.eye(FEATURES, dtype=x.dtype), z.T)
        expected = s.loss(*s.solve(ridge)) / (1 - (1 + float(hat.trace())) / 40) ** 2
        assert float(s.path().gcv([ridge])[0]) == pytest.approx(expected, rel=1e-9)
    ridges = (1e-3, 0.1, 10.0)
    assert s.choose_ridge(ridges) == ridges[int(s.path().gcv(ridges).argmin())]


def test_degenerate_data_gives_finite_solutions():
    x, y = data()
    x[:, 2] = 1e6 / 3
    x[:, 3] = x[:, 4]
    for ridge in (0.0, 0.1):
        weight, bias = sums(x, y).solve(ridge)
        assert weight.isfinite().all()
        assert not weight[:, 2].any()
        assert (weight[:, 3] - weight[:, 4]).abs().max() < 1e-8
        assert bias.isfinite().all()
    weight, bias = sums(x[:1], y[:1]).solve(0.1)
    assert not weight.any()
    assert bias.tolist() == [SCALE]
    weight, bias = sums(x, torch.zeros_like(y)).solve(0.1)
    assert weight.abs().max() < 1e-12
    weight, bias = sums(*data(5)).solve(0.0)  # fewer samples than features: interpolates
    assert_close([data(5)[0] @ weight.T + bias], [SCALE * torch.nn.functional.one_hot(data(5)[1], CLASSES).double()])
    assert sums(x[:1], y[:1]).path().gcv([0.1]).isinf().all()


@pytest.mark.parametrize("limit", [module.EIGEN_LIMIT, 0])
def test_a_feature_that_was_all_but_silent_does_not_decide_alone(limit, monkeypatch):
    monkeypatch.setattr(module, "EIGEN_LIMIT", limit)
    x, y = data(200)
    x[:, 3] = 0
    x[0, 3] = 1e-3  # 4 as in other features, one day
    silent = sums(x, y)
    weight, bias = silent.solve(0.1)
    assert_close((weight, bias), brute(x, y, 0.1))
    best, _ = silent.solve(silent.choose_ridge())
    for found in (weight, best):
        assert (4 * found[:, 3]).abs().max() < SCALE / 2
    usual, _ = sums(*data(200)).solve(0.1)
    kept = [0, 1, 2, 4, 5, 6]
    assert (weight - usual)[:, kept].abs().max() < 0.1 * usual.abs().max()


def test_blocks_state_and_dtypes(monkeypatch):
    x, y = data()
    expected = sums(x, y)
    assert (expected.gram - x.T @ x).abs().max() < 1e-9
    single = sums(x.float(), y)
    assert single.gram.dtype == torch.float64
    assert (single.gram - x.float().double().T @ x.float().double()).abs().max() < 1e-9
    assert torch.equal(expected.add(x[:0], y[:0]).gram, expected.gram)
    monkeypatch.setattr(module, "_BLOCK", 3)
    assert (sums(x, y).gram - expected.gram).abs().max() < 1e-10
    tensors, header = expected.state()
    again = RidgeSums.from_state(tensors, json.loads(json.dumps(header)))
    assert torch.equal(again.gram, expected.gram)
    assert again.samples == 40
    assert expected.to(torch.float32).gram.dtype == torch.float32


def test_every_operation_keeps_g_symmetric_to_the_last_bit():
    x, y = data(300, features=150)
    w = torch.rand(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first, second = sums(x[:200], y[:200], w[:200]), sums(x[200:].float(), y[200:], w[200:])
    merged = first.merge(second)
    found = [first, merged, merged.add(x, y), merged.minus(first), merged.rearranged([3, 0, 5, 1]), merged.grow(9)]
    zero = x.clone()
    zero[:200, 3] = 0  # a feature that only forgotten samples have
    found += [sums(zero, y).minus(sums(zero[200:], y[200:])), merged.to(torch.float32), merged.minus(merged)]
    assert all(is_symmetric(each.gram) for each in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:, :3], y), r"shape \(40, 3\); \(samples × 7\)"),
        (lambda x, y: (x, y[:3]), r"40 integer class indices"),
        (lambda x, y: (x, y.double()), r"torch.float64 of shape"),
        (lambda x, y: (x, y - 1), "a label is -1"),
        (lambda x, y: (x / 0 * 0, y), "finite numbers"),
        (lambda x, y: (x, y, -torch.ones(40)), "none negative"),
    ],
)
def test_mistakes_are_named_and_harmless(change, message):
    x, y = data()
    s = sums(x, y)
    before = s.gram.clone()
    with pytest.raises(ValueError, match=message):
        s.extend([(x, y), change(x, y)])
    assert torch.equal(s.gram, before)


def test_what_cannot_be_solved():
    with pytest.raises(ValueError, match="hold no data"):
        RidgeSums.empty(3).solve(0.1)
    with pytest.raises(ValueError, match="ridge is -1"):
        sums(*data()).solve(-1)
    with pytest.raises(ValueError, match="ridge is 0; it must be finite and positive"):
        sums(*data()).path().gcv([0])
    with pytest.raises(ValueError, match="over 3 features; these over 7"):
        sums(*data()).merge(RidgeSums.empty(3))
    with pytest.raises(ValueError, match="got 0 features"):
        RidgeSums.empty(0)


def test_a_ridge_is_chosen_alike_with_and_without_an_eigendecomposition(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(300, 60, dtype=torch.float64) @ torch.randn(60, 60, dtype=torch.float64)
    x[:, 7] = 3.0
    y = (x @ torch.randn(60, 3, dtype=torch.float64) + 40 * torch.randn(300, 3, dtype=torch.float64)).argmax(1)
    sums = RidgeSums.empty(60).add(x, y)
    monkeypatch.setattr("dlcft.closed_form.fit._PROBES", 4000)
    problem = sums._problem(scale=1.0)
    counted = problem.counted(sums.samples)
    scores = [problem.gcv(ridge, counted) for ridge in RIDGES]
    expected = sums.path(scale=1.0).gcv(RIDGES)
    assert torch.allclose(torch.tensor(scores, dtype=torch.float64), expected, rtol=0.02)
    monkeypatch.undo()
    chosen = sums.choose_ridge()
    monkeypatch.setattr("dlcft.closed_form.sums.EIGEN_LIMIT", 0)
    assert sums.choose_ridge() == chosen
    assert chosen not in (RIDGES[0], RIDGES[-1])


def noisy(n, features, seed=0):
    """Two classes that one direction tells apart, not well."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator, dtype=torch.float64)
    y = (x[:, :9].sum(1) + 3 * torch.randn(n, generator=generator, dtype=torch.float64) > 0).long()
    return x, y


@pytest.mark.parametrize("limit", [0, 1500])
@pytest.mark.parametrize("again", [1, 20, 60])
def test_samples_that_come_again_do_not_spoil_the_ridge(limit, again, monkeypatch):
    monkeypatch.setattr("dlcft.closed_form.sums.EIGEN_LIMIT", limit)
    x, y = noisy(60, 90)
    once, twice = sums(x, y), sums(x, y).add(x[:again], y[:again])
    assert once.choose_ridge() > 1e-2
    ratio = twice.choose_ridge() / once.choose_ridge()
    assert 0.3 < ratio < 3.3, "at the most one step of the grid"


@pytest.mark.parametrize("features", [90, 30])
def test_how_many_samples_differ(features):
    x, y = noisy(60, features)
    path = sums(x, y).add(x[:5], y[:5]).path()
    told, weights = path.counted()
    assert told == pytest.approx(60 if features > 60 else 65, abs=1e-4), "only where a fit can go through all samples"
    assert torch.allclose(weights, torch.ones_like(weights), atol=1e-5)
    by_trace = path.problem.counted(path.samples).samples
    assert by_trace == pytest.approx(told, abs=4), "from random vectors"


@pytest.mark.parametrize("limit", [100, 1500])
def test_what_float32_leaves_of_forgotten_samples_chooses_no_ridge(limit, monkeypatch):
    """Features as another batch gives them: other last bits, where they are forgotten and where they come again."""
    monkeypatch.setattr("dlcft.closed_form.sums.EIGEN_LIMIT", limit)
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        x, y = noisy(40 + 6 * seed, 300, seed)
        x, kept = x.float(), 20 + 3 * seed

        def again(part, generator=generator):
            return part * (1 + 1e-6 * torch.randn(part.shape, generator=generator))

        never = sums(x[:kept], y[:kept]).add(again(x[:4]), y[:4])
        left = sums(again(x), y).add(again(x[:4]), y[:4]).minus(sums(again(x[kept:]), y[kept:]))
        assert left.choose_ridge() == never.choose_ridge()
        assert (left.path().counted()[0], never.path().counted()[0]) == pytest.approx((kept, kept), abs=0.5)


def test_directions_of_float32_rounding_do_not_count():
    values = torch.tensor([1e-2, 1e-1, 1.0, 1e1, 1e2]).double()
    weights = fit.noise_weights(values, 1.0)
    assert weights.tolist() == pytest.approx([6.5e-14, 2.6e-6, 0.25, 0.9967, 1.0], rel=0.3)
    problem = sums(*noisy(30, 90)).path().problem
    assert problem.rounding < 2 * torch.finfo(torch.float64).eps
    assert fit.least_left(problem.rounding) == 1e-3
    x, y = noisy(30, 90)
    coarse = sums(x.float(), y)
    assert coarse.path().gcv([1e-6]).isinf().all(), "far below the floor"
    assert coarse.path().problem.gcv(1e-6, coarse.path().problem.counted(30)) == float("inf")
    assert fit.least_left(coarse.rounding) == pytest.approx(0.0345, rel=0.01)
    assert sums(x.bfloat16(), y).epsilon == coarse.epsilon, "half precision is summed in float32"


def test_rounding_grows_where_far_more_was_subtracted_than_is_left():
    x, y = noisy(600, 20)
    x = x.float()
    few, many = (sums(x, y).minus(sums(x[kept:], y[kept:])) for kept in (300, 6))
    assert few.rounding == few.epsilon == torch.finfo(torch.float32).eps
    assert many.rounding == pytest.approx(many.epsilon * (594 / 4 / 6) ** 0.5)
    assert many.add(x, y).rounding == many.epsilon, "it fades as data comes"
    assert many.merge(many).removed == 2 * 594
    assert RidgeSums.from_state(*many.state()).rounding == many.rounding
    tensors, _ = many.state()
    assert RidgeSums.from_state(tensors, {"samples": 6}).rounding == many.epsilon, "an earlier state"


def test_a_feature_that_only_forgotten_samples_varied_is_constant():
    x, y = noisy(40, 30)
    x[:25, 2], x[:25, 3] = 0.0, 1.5
    x = x.float()
    other = x[25:] * (1 + 1e-6 * torch.randn(15, 30, generator=torch.Generator().manual_seed(0)))
    never, left = sums(x[:25], y[:25]), sums(x, y).minus(sums(other, y[25:]))
    assert left._problem().varying == never._problem().varying == 28
    assert left.gram[2].abs().max() == left.class_sums[:, 2].abs().max() == 0
    assert_close(left.solve(0.1), never.solve(0.1), 1e-4)


def test_a_feature_that_is_there_twice_makes_no_samples_equal():
    x, _ = noisy(200, 30)
    path = sums(torch.cat([x, x[:, :1]], 1), (x[:, 0] > 0).long()).path()
    assert len(path.values) == 30
    assert path.counted()[0] == path.problem.counted(200).samples == 200


def test_a_feature_that_only_forgotten_samples_had():
    x, y = data(30)
    x[:, 2] = 0.0
    gone, labels = data(20, seed=1)
    left = sums(x, y).add(gone, labels).minus(sums(gone.float(), labels))
    assert left.gram[2].abs().max() == left.class_sums[:, 2].abs().max() == 0
    for found, expected in zip(left.solve(0.1), sums(x, y).solve(0.1), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    spoiled = sums(x, y)
    spoiled.gram[2, 2] = -1e-17
    assert all(part.isfinite().all() for part in spoiled.solve(0.1))


@pytest.mark.parametrize("limit", [0, 1500])
def test_the_ridge_may_pull_to_a_start(limit, monkeypatch):
    """Against the normal equations written out; without data in a direction, the start is kept there."""
    monkeypatch.setattr("dlcft.closed_form.sums.EIGEN_LIMIT", limit)
    torch.manual_seed(0)
    x = torch.randn(40, 5, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0]).double()
    x[:, 4] = 2.0  # constant: nothing is known of it
    y = x[:, :3].argmax(1)
    start = torch.randn(3, 5, dtype=torch.float64)
    sums = RidgeSums.empty(5).add(x, y)
    weight, bias = sums.solve(0.3, scale=2.0, start=start)
    centred, sigma = x - x.mean(0), x.std(0, correction=0)
    target = 2 * torch.nn.functional.one_hot(y).double()
    target = target - target.mean(0)
    left = centred[:, :4].T @ centred[:, :4] / 40 + 0.3 * torch.diag(sigma[:4] ** 2)
    right = target.T @ centred[:, :4] / 40 + 0.3 * start[:, :4] * sigma[:4] ** 2
    assert torch.allclose(weight[:, :4], torch.linalg.solve(left, right.T).T, atol=1e-10)
    shares = 2 * y.bincount() / 40
    assert torch.allclose(x @ weight.T + bias, centred[:, :4] @ weight[:, :4].T + shares, atol=1e-6)
    assert torch.allclose(sums.solve(1e9, scale=2.0, start=start)[0][:, :4], start[:, :4], atol=1e-6)
    best = sums.solve(sums.choose_ridge(scale=2.0), scale=2.0)[0]
    assert sums.choose_ridge(scale=2.0, start=best) > sums.choose_ridge(scale=2.0)
    assert torch.equal(sums.solve(0.3, start=torch.zeros(3, 5).double())[0], sums.solve(0.3)[0])


@pytest.mark.parametrize("samples", [30, 60, 100])
def test_a_ridge_for_few_samples_and_many_features(samples):
    generator = torch.Generator().manual_seed(samples)
    z = torch.randn(samples, 20, generator=generator, dtype=torch.float64)
    x = torch.relu(z @ torch.randn(20, 1600, generator=generator, dtype=torch.float64))
    y = (z[:, :5] + torch.randn(samples, 5, generator=generator, dtype=torch.float64)).argmax(1)
    few = sums(x, y)
    assert few.features > module.EIGEN_LIMIT
    assert abs(RIDGES.index(few.choose_ridge()) - int(few.path().gcv(RIDGES).argmin())) <= 1


def test_a_quiet_direction_that_tells_more_than_loud_ones_is_found():
    """The score has two valleys then."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    z, loud = random(3000, 10), random(3000, 400)
    loud[:, :10] += 0.7 * z
    x = loud @ random(400, 1600) / 20 + 3e-3 * (z @ random(10, 1600) + 0.1 * random(3000, 1600))
    two = sums(x, z.argmax(1))
    scores = two.path().gcv(RIDGES)
    hump = int(scores[:11].argmax())
    assert scores[hump] > 1.02 * scores[hump:].min() > 1.1 * scores.min()
    assert abs(RIDGES.index(two.choose_ridge()) - int(scores.argmin())) <= 1


@pytest.mark.parametrize("features", [1600, 1400])
def test_rounding_does_not_choose_the_ridge(features):
    """Few samples: the fit goes through them, and with little ridge the score is rounding divided by rounding."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(10, 30, generator=generator, dtype=torch.float64)
    x = torch.relu(z @ torch.randn(30, features, generator=generator, dtype=torch.float64))
    y = torch.arange(10) % 2
    x[y == 1, : features // 2] += 2
    chosen = set()
    for _ in range(8):
        rounded = x * (1 + 1e-7 * torch.randn(x.shape, generator=generator, dtype=torch.float64))
        chosen.add(sums(rounded, y).choose_ridge())
    assert len(chosen) == 1
    assert chosen.pop() > 1e-3


def test_features_that_nearly_depend_on_each_other_make_no_samples_equal():
    """More samples than features, a fit that is good, and eigenvalues down to float32's rounding."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(70) % 3
    z = torch.randn(3, 6, generator=generator)[y] + 0.2 * torch.randn(70, 6, generator=generator)
    x = torch.tanh(0.3 * z @ torch.randn(6, 40, generator=generator))
    few = sums(x, y)
    path = few.path()
    assert path.values[0] < path.problem.floor(70) < path.values[-1]
    assert path.counted()[0] == path.problem.counted(70).samples == 70


def test_the_span_of_few_samples_is_enough():
    x, y = noisy(40, 300)
    problem = sums(x, y)._problem()
    thin, full = problem.path(40, 40), problem.path(40)
    assert thin.vectors.shape == (300, 39)
    assert torch.allclose(thin.gcv(RIDGES), full.gcv(RIDGES), rtol=1e-8)
    assert_close(thin.solve(0.1), full.solve(0.1))


def test_forgetting_samples_that_drown_the_others_is_refused():
    """A float32 network would leave their rounding where the others' features are."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(200, 20, generator=generator)
    huge = 1e5 * torch.randn(4, 20, generator=generator)
    labels = torch.arange(200) % 4
    kept = RidgeSums.empty(20).add(features, labels)
    both = kept.add(huge, labels[:4])
    with pytest.raises(ValueError, match="20 of 20 features vary less, over the samples that stay, than the rounding"):
        both.minus(RidgeSums.empty(20).add(huge, labels[:4]))
    left = kept.add(10 * huge / 1e5, labels[:4]).minus(RidgeSums.empty(20).add(10 * huge / 1e5, labels[:4]))
    torch.testing.assert_close(left.gram, kept.gram)
