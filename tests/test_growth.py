"""The exponents by which costs grow, and the tables that show them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from growth_shown import exponent, shown, tables


@pytest.mark.parametrize("power", [-0.5, 0.0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("values", [(1, 3, 10, 30, 100, 300, 1000), (32, 224), (10, 50, 250)])
def test_the_exponent_of_a_power_law_is_its_power(values, power):
    assert exponent(values, [7.5 * value**power for value in values]) == pytest.approx(power, abs=1e-12)


def test_the_lower_half_does_not_count():
    values = [1, 10, 100, 1000, 10_000]
    costs = [5.0, 5.0, 100.0**2, 1000.0**2, 10_000.0**2]
    assert exponent(values, costs) == pytest.approx(2, abs=1e-12)


def test_the_exponent_is_the_least_squares_slope():
    import numpy as np

    values, costs = [2.0, 3.0, 5.0, 9.0, 20.0, 50.0], [1.0, 1.2, 3.0, 2.5, 9.0, 8.0]
    assert exponent(values, costs) == pytest.approx(np.polyfit(np.log(values[3:]), np.log(costs[3:]), 1)[0], abs=1e-12)


def test_points_at_one_place_have_no_exponent():
    with pytest.raises(ValueError, match="two different ones"):
        exponent([1, 4, 4], [1.0, 1.0, 2.0])


def test_a_table_has_a_row_for_each_point_and_one_of_exponents():
    def point(method, value, **more):
        times = {name: {"median": seconds, "low": seconds, "high": seconds} for name, seconds in more.items()}
        sizes = {"disk": 10**6 * value**2, "memory": 2 * 10**6}
        return {"method": method, "scenario": "data-il", "value": value, **times, **sizes}

    points = [point("dlcft-exact", n, learn=n, solve=n**3, predict=1.0) for n in (10, 100)]
    points += [point("dlcft", n, learn=0.5 * n, predict=3.0) for n in (10, 100)]
    ((name, _, header, rows),) = tables({"classes": points})
    assert name == "classes"
    assert header[1:4] == ["dlcft-exact: learn", "dlcft-exact: solve", "dlcft-exact: predict"]
    assert [row[0] for row in rows] == ["10", "100", "exponent"]
    assert [cell.strip("*") for cell in rows[2][1:5]] == ["1.00", "3.00", "0.00", "2.00"]
    assert rows[0][1:] == ["10.0", "1,000", "1.00", "100", "2.00", "5.00", "3.00", "100", "2.00"]


def test_numbers_have_three_digits():
    assert [shown(value) for value in (0.123, 1.234, 12.34, 123.4, 12345.6)] == [
        "0.12",
        "1.23",
        "12.3",
        "123",
        "12,346",
    ]
