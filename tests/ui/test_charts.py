"""Rows -> figures: plain dicts that survive JSON, gaps, long runs, and whatever a page asks for."""

import json

import numpy as np
import pytest

from megatrain.plan import Predicted
from megatrain.units import GIB
from tests.ui.rows_of_a_run import START, run_rows
from ui.charts import CHARTS, MAX_SMOOTHING, ChartOptions, figures


def trace(figure, name):
    return next(line for line in figure["data"] if line["name"] == name)


def names(figure):
    return [line["name"] for line in figure["data"]]


def test_a_run_without_steps_says_what_it_waits_for():
    found = figures(run_rows(), ChartOptions())
    assert found["loss"]["empty"] == "Waiting for the first step"
    assert found["gpu"]["empty"] == "No GPU in this run"
    assert set(found) == set(CHARTS)


def test_figures_are_valid_json_also_with_gaps():
    losses = [2.0, None, float("nan"), float("inf"), 1.5]
    text = json.dumps(figures(run_rows(5, losses=losses), ChartOptions(smoothing=0)), allow_nan=False)
    raw = trace(json.loads(text)["loss"], "loss, smoothed")
    assert raw["y"] == [2.0, None, None, None, 1.5]


def test_loss_is_drawn_raw_and_smoothed_with_evaluations_and_checkpoints():
    events = [{"kind": "eval", "step": 50, "loss": 1.9, "time_s": START + 100}, {"kind": "checkpoint", "step": 60, "time_s": START + 120},
              {"kind": "notice", "text": "", "time_s": START}]  # fmt: skip
    figure = figures(run_rows(100, events=events), ChartOptions())["loss"]
    assert names(figure) == ["raw", "loss, smoothed", "held-out loss", "checkpoint"]
    assert (trace(figure, "held-out loss")["x"], trace(figure, "held-out loss")["y"]) == ([50.0], [1.9])
    assert trace(figure, "checkpoint")["x"] == [60.0]


def test_a_lone_spike_is_drawn():
    losses = [1.0] * 20_000
    losses[12_345] = 50.0
    figure = figures(run_rows(20_000, losses=losses), ChartOptions())["loss"]
    assert max(value for value in trace(figure, "raw")["y"] if value is not None) == 50.0
    assert len(trace(figure, "raw")["x"]) <= 1000


def test_a_long_run_makes_a_small_reply():
    reply = json.dumps(figures(run_rows(100_000), ChartOptions()))
    assert len(reply) < 400_000


def test_windows_cut_by_steps_and_by_time():
    rows = run_rows(1000, step_s=2.0)
    last = figures(rows, ChartOptions(window="500", smoothing=0))["loss"]
    assert last["layout"]["xaxis"]["range"] == [501.0, 1000.0]
    minutes = figures(rows, ChartOptions(window="10min", smoothing=0))["loss"]
    assert minutes["layout"]["xaxis"]["range"] == pytest.approx([700.0, 1000.0])
    by_time = figures(rows, ChartOptions(axis="time", window="10min", smoothing=0))["loss"]
    first, end = by_time["layout"]["xaxis"]["range"]
    assert end - first == pytest.approx(10.0)


def test_a_zoom_brings_every_row_in_sight_and_a_neighbour_on_each_side():
    losses = list(np.sin(np.arange(50_000.0)))
    zoomed = figures(run_rows(50_000, losses=losses), ChartOptions(smoothing=0, zoom=(20_000.0, 20_500.0)))["loss"]
    line = zoomed["data"][0]
    assert line["x"][0] == 19_999.0
    assert line["x"][-1] == 20_501.0
    assert len(line["x"]) == 503


def test_smoothing_is_the_same_however_one_zooms():
    losses = list(np.random.default_rng(0).random(3000))
    whole = trace(figures(run_rows(3000, losses=losses), ChartOptions(zoom=(900.0, 1100.0)))["loss"], "loss, smoothed")
    part = trace(figures(run_rows(3000, losses=losses), ChartOptions(zoom=(1000.0, 1050.0)))["loss"], "loss, smoothed")
    at = dict(zip(whole["x"], whole["y"], strict=True))
    assert all(at[x] == y for x, y in zip(part["x"], part["y"], strict=True) if x in at)


def test_readings_are_placed_by_step_from_the_first_step_on():
    telemetry = [{"time_s": START + second, "worker_ram_bytes_max": 5 * GIB} for second in range(-20, 21, 2)]
    figure = figures(run_rows(10, step_s=2.0, telemetry=telemetry), ChartOptions())["ram"]
    x = trace(figure, "this run")["x"]
    assert x[0] == 1.0
    assert x[-1] == 10.0


def test_memory_is_drawn_against_the_predicted_peak():
    predicted = Predicted(vram_bytes=6 * GIB, ram_bytes=8 * GIB)
    telemetry = [{"time_s": START + second, "process_vram_bytes_max": 5 * GIB, "gpu0_vram_used_bytes_max": 7 * GIB} for second in range(21)]
    found = figures(run_rows(10, predicted=predicted, has_gpu=True, telemetry=telemetry), ChartOptions())
    assert names(found["vram"]) == ["all programs", "this run", "predicted peak"]
    assert set(trace(found["vram"], "predicted peak")["y"]) == {6.0}
    assert found["ram"]["empty"] == "No reading on this machine", "a prediction alone is no reading"


def test_bus_shows_what_was_measured_beside_what_training_moved():
    telemetry = [{"time_s": START + second, "gpu0_pcie_down_bytes_per_s_mean": 3e9} for second in range(21)]
    figure = figures(run_rows(10, has_gpu=True, telemetry=telemetry), ChartOptions())["bus"]
    assert names(figure) == ["to the GPU, measured", "to the GPU, moved by training", "from the GPU, moved by training"]
    assert set(trace(figure, "to the GPU, moved by training")["y"]) == {2.0}


def test_every_chart_has_the_same_x_range_and_the_runs_revision():
    telemetry = [{"time_s": START + second, "worker_ram_bytes_max": GIB} for second in range(30)]
    drawn = [figure for figure in figures(run_rows(12, telemetry=telemetry), ChartOptions()).values() if "layout" in figure]
    assert len({tuple(figure["layout"]["xaxis"]["range"]) for figure in drawn}) == 1
    assert {figure["layout"]["uirevision"] for figure in drawn} == {"a-run"}


def test_one_step_is_enough_for_every_option():
    for axis in ("step", "time"):
        for window in ("all", "500", "10min"):
            found = figures(run_rows(1), ChartOptions(axis, window, 20.0, log=True))
            low, high = found["loss"]["layout"]["xaxis"]["range"]
            assert low < high


@pytest.mark.parametrize("raw", [
    None, [], "x", {"axis": 3, "window": "all; drop", "smoothing": "much", "log": 1, "zoom": [1]}, {"smoothing": True, "zoom": [2, 1]},
    {"zoom": [float("nan"), 1]}, {"zoom": ["a", "b"]}, {"smoothing": float("inf")},
])  # fmt: skip
def test_impossible_requests_take_the_defaults(raw):
    assert ChartOptions.parse(raw) == ChartOptions()


def test_requests_are_understood_and_limited():
    options = ChartOptions.parse({"axis": "time", "window": "500", "smoothing": 1e9, "log": True, "zoom": [1, 2.5]})
    assert options == ChartOptions("time", "500", MAX_SMOOTHING, True, (1.0, 2.5))


def test_traffic_of_the_disk_is_drawn_where_there_is_any():
    assert figures(run_rows(10), ChartOptions())["disk"]["empty"] == "This run keeps no states on disk"
    figure = figures(run_rows(10, step_s=2.0, disk=(4e9, 1024**3)), ChartOptions())["disk"]
    assert names(figure) == ["read", "written, 10.0 GiB in all"]
    assert trace(figure, "read")["y"] == [2.0] * 10
