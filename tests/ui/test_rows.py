"""Tables, smoothing and thinning of the page's numbers."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ui.rows import Table, plain, smooth, thin


def test_a_table_grows_and_fills_gaps_with_nan():
    table = Table(("time_s", "loss"))
    table.append({"time_s": i, "loss": None if i == 3 else float(i), "unknown": 1.0} for i in range(1000))
    assert len(table) == 1000
    assert np.isnan(table["loss"][3])
    assert table["loss"][999] == 999
    assert np.isnan(table["no such column"]).all()
    table.append([{"loss": 5.0}])
    assert np.isnan(table["time_s"][-1]), "a reused row must not keep old cells"


def test_last_is_the_mean_of_readings_only():
    table = Table(("a",))
    table.append([{"a": 1.0}, {"a": None}, {"a": 3.0}])
    assert table.last("a", 2) == 3.0
    assert table.last("a", 3) == 2.0
    assert np.isnan(table.last("b", 3))


def slow_smooth(values, time_constant):
    decay, total, weight, found = np.exp(-1 / time_constant), 0.0, 0.0, []
    for value in values:
        total, weight = total * decay, weight * decay
        if np.isfinite(value):
            total, weight = total + value, weight + 1
        found.append(total / weight if np.isfinite(value) else np.nan)
    return found


@pytest.mark.parametrize("time_constant", [0.3, 1, 20, 500])
def test_smoothing_is_the_bias_corrected_exponential_mean(time_constant):
    values = np.random.default_rng(1).normal(2.0, 1.0, 5000)
    values[[0, 17, 4999]] = [np.nan, np.inf, np.nan]
    np.testing.assert_allclose(smooth(values, time_constant), slow_smooth(values, time_constant), rtol=1e-9)


def test_smoothing_starts_at_the_first_value_and_keeps_gaps():
    smoothed = smooth(np.array([4.0, np.nan, 4.0]), 20)
    assert smoothed[0] == 4.0
    assert np.isnan(smoothed[1])
    assert smoothed[2] == pytest.approx(4.0)


def test_no_smoothing_and_no_rows():
    values = np.array([1.0, 2.0])
    assert smooth(values, 0) is values
    assert len(smooth(np.array([]), 5)) == 0


@pytest.mark.parametrize("num_rows", [1001, 5000, 100_000])
def test_a_lone_spike_a_lone_dip_and_a_gap_survive_thinning(num_rows):
    x, y = np.arange(1.0, num_rows + 1), np.random.default_rng(2).random(num_rows)
    spike, dip, gap = num_rows // 2 + 1, num_rows // 3, num_rows // 5
    y[spike], y[dip], y[gap] = 99.0, -99.0, np.nan
    kept = thin(x, y)
    assert len(kept) <= 1000
    assert {0, spike, dip, gap, num_rows - 1} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


def test_few_rows_are_all_kept():
    x = np.arange(1000.0)
    assert len(thin(x, x)) == 1000


def test_points_once_drawn_stay_while_rows_arrive():
    rng = np.random.default_rng(3)
    x, y = np.arange(1.0, 6001), rng.random(6000)
    before, after = thin(x[:5000], y[:5000]), thin(x[:5100], y[:5100])
    settled = before[before < 4900]
    assert set(settled.tolist()) <= set(after.tolist())


@hypothesis.given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=0, max_size=60), st.integers(10, 40))
def test_thinning_never_exceeds_its_limit_nor_loses_the_ends(values, limit):
    y = np.array(values, dtype=float)
    x = np.arange(len(y), dtype=float)
    kept = thin(x, y, limit)
    assert len(kept) <= max(limit, 15)
    if len(y):
        assert kept[0] == 0
        assert kept[-1] == len(y) - 1


def test_thinning_rows_at_one_x():
    kept = thin(np.zeros(2000), np.arange(2000.0))
    assert {0, 1999} <= set(kept.tolist())
    assert len(kept) <= 5


def test_plain_numbers_are_short_and_valid_json():
    assert plain(np.array([1 / 3, np.nan, np.inf, 0.0, 123456789.0, 1e-12, -2.5])) == [0.333333, None, None, 0.0, 123457000.0, 1e-12, -2.5]
