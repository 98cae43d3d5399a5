"""Rows of a run -> figures as plain dicts for Plotly.react. Pure: no gradio, no plotly.

Plain dicts, because a figure object costs ten times as much to build and check. Colours are names of the theme's CSS variables
(`--mt-blue`); the page fills them in, so that one figure serves light and dark. A chart without data is `{"empty": reason}`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import numpy as np

from megatrain.units import GIB, format_bytes
from ui.feed import RunRows
from ui.rows import Floats, plain, smooth, thin
from ui.words import text

Figure = dict[str, Any]
MAX_SMOOTHING = 500.0  # steps
MINUTES_UNTIL_HOURS = 180.0
GPU_PREFIX = "gpu0_"


@dataclass(frozen=True)
class ChartOptions:
    """What the chart bar chose. `zoom` is a range of x, or None for everything in the window."""

    axis: Literal["step", "time"] = "step"
    window: Literal["all", "500", "10min"] = "all"
    smoothing: float = 20.0  # time constant in steps
    log: bool = False
    zoom: tuple[float, float] | None = None

    @staticmethod
    def parse(raw: object) -> "ChartOptions":
        """Options from a page's request; whatever is missing or impossible takes its default."""
        values = raw if isinstance(raw, dict) else {}
        smoothing, zoom = values.get("smoothing"), values.get("zoom")
        window = values.get("window")
        return ChartOptions(
            axis="time" if values.get("axis") == "time" else "step",
            window=window if window in ("500", "10min") else "all",
            smoothing=min(MAX_SMOOTHING, max(0.0, float(smoothing))) if _is_number(smoothing) else ChartOptions.smoothing,
            log=values.get("log") is True,
            zoom=(float(zoom[0]), float(zoom[1])) if _is_range(zoom) else None,
        )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def _is_range(value: object) -> TypeGuard[list[float]]:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)) and value[0] < value[1]


class Axis:
    """x of every row of a run under the chosen options, and which rows the window and the zoom show."""

    def __init__(self, rows: RunRows, options: ChartOptions) -> None:
        self.by_step = options.axis == "step"
        self.step_times, self.step_numbers = rows.steps["time_s"], rows.steps["step"]
        times = [float(table["time_s"][0]) for table in (rows.steps, rows.telemetry) if len(table)]
        ends = [float(table["time_s"][-1]) for table in (rows.steps, rows.telemetry) if len(table)]
        self.start, self.end = min(times, default=0.0), max(ends, default=0.0)
        self.unit_s = 60.0 if (self.end - self.start) / 60 < MINUTES_UNTIL_HOURS else 3600.0
        self.low, self.high = self._window(options)
        if options.zoom:
            self.low, self.high = options.zoom

    def of(self, times: Floats) -> Floats:
        """x of rows that carry a time. By step, rows before the first step have none (NaN)."""
        if not self.by_step:
            return (times - self.start) / self.unit_s
        if not len(self.step_times):
            return np.full(len(times), np.nan)
        x = np.interp(times, self.step_times, self.step_numbers)
        return np.where(times < self.step_times[0], np.nan, x)

    def of_steps(self) -> Floats:
        """x of the step rows."""
        return self.step_numbers if self.by_step else self.of(self.step_times)

    def of_event(self, event: Mapping[str, Any]) -> float:
        """x of an event at a step."""
        return float(event["step"]) if self.by_step and "step" in event else float(self.of(np.array([event["time_s"]]))[0])

    def title(self) -> str:
        return text("charts.axis_step") if self.by_step else text("charts.axis_minutes" if self.unit_s == 60 else "charts.axis_hours")

    def range(self) -> list[float]:
        """First and last x in sight, the same for every chart."""
        x = self.of_steps() if self.by_step else self.of(np.array([self.start, self.end]))
        first, last = (float(x[0]), float(x[-1])) if len(x) else (0.0, 1.0)
        first, last = max(first, self.low), min(last, self.high)
        return [first, last if last > first else first + 1.0]

    def shown(self, x: Floats) -> slice:
        """The rows to draw: those in sight and one neighbour on each side, so that lines run to the border."""
        first = int(np.searchsorted(x, self.low, "left"))
        last = int(np.searchsorted(x, self.high, "right"))
        return slice(max(0, first - 1), last + 1)

    def _window(self, options: ChartOptions) -> tuple[float, float]:
        if options.window == "500" and len(self.step_times) > 500:
            x = self.of_steps()
            return float(x[-500]), np.inf
        if options.window == "10min":
            return float(self.of(np.array([self.end - 600.0]))[0]) if self.end - self.start > 600 else -np.inf, np.inf
        return -np.inf, np.inf


def figures(rows: RunRows, options: ChartOptions) -> dict[str, Figure]:
    """Every chart of the monitor page by name."""
    axis = Axis(rows, options)
    drawn = {name: draw(rows, options, axis) for name, draw in CHARTS.items()}
    for name, figure in drawn.items():
        figure["label"] = text("charts.label", chart=text(f"charts.title_{name}"), step=f"{rows.status.step:,}")
    return drawn


def loss(rows: RunRows, options: ChartOptions, axis: Axis) -> Figure:
    """Raw loss, faint, under its smoothed course; evaluations as dots, checkpoints as ticks on the floor."""
    data = _raw_and_smoothed(rows.steps["loss"], axis, options, "--mt-blue", text("charts.loss"))
    evaluations = [event for event in rows.events if event["kind"] == "eval"]
    if evaluations:
        data.append(_dots(axis, evaluations, text("charts.evaluation")))
    checkpoints = [event for event in rows.events if event["kind"] == "checkpoint"]
    if checkpoints:
        data.append(_ticks(axis, checkpoints, text("charts.checkpoint")))
    figure = _figure(rows, axis, data, options, y_format=".4~g")
    if "layout" in figure:
        figure["layout"]["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    return figure


def learning_rate(rows: RunRows, options: ChartOptions, axis: Axis) -> Figure:
    """The schedule as it was applied."""
    line = _line(axis.of_steps(), rows.steps["learning_rate"], axis, "--mt-purple", text("charts.learning_rate"))
    return _figure(rows, axis, [line], options, y_format=".1e")


def grad_norm(rows: RunRows, options: ChartOptions, axis: Axis) -> Figure:
    """Global norm before clipping."""
    data = _raw_and_smoothed(rows.steps["grad_norm"], axis, options, "--mt-orange", text("charts.grad_norm"))
    return _figure(rows, axis, data, options, y_format=".3~g")


def tokens_per_s(rows: RunRows, options: ChartOptions, axis: Axis) -> Figure:
    """Real tokens over the wall time of the whole step, against the plan's expectation."""
    data = _raw_and_smoothed(rows.steps["tokens_per_s"], axis, options, "--mt-green", text("charts.tokens_per_s"))
    if rows.predicted and rows.predicted.tokens_per_s:
        data.append(_level(axis, rows.predicted.tokens_per_s, text("charts.predicted")))
    return _figure(rows, axis, data, options, y_format=".3~s", from_zero=True)


def vram(rows: RunRows, options: ChartOptions, axis: Axis) -> Figure:
    """Memory of the graphics card: all programs, this run, and the predicted peak."""
    if not rows.has_gpu:
        return {"empty": text("charts.no_gpu")}
    lines = [("gpu0_vram_used_bytes_max", "--mt-orange", "charts.vram_all"), ("process_vram_bytes_max", "--mt-blue", "charts.this_run")]
    return _memory(rows, options, axis, lines, rows.predicted.vram_bytes if rows.predicted else 0)


def ram(rows: RunRows, options: ChartOptions, axis: Axis) -> Figure:
    """Host memory: the whole machine, this run, and the predicted peak."""
    lines = [("ram_used_bytes_max", "--mt-orange", "charts.ram_all"), ("worker_ram_bytes_max", "--mt-blue", "charts.this_run")]
    return _memory(rows, options, axis, lines, rows.predicted.ram_bytes if rows.predicted else 0)


def bus(rows: RunRows, options: ChartOptions, axis: Axis) -> Figure:
    """PCIe traffic per direction: as the driver measures it, and as training moved it."""
    if not rows.has_gpu:
        return {"empty": text("charts.no_gpu")}
    x, data = axis.of(rows.telemetry["time_s"]), []
    for key, colour, name in (("down", "--mt-blue", "charts.bus_down"), ("up", "--mt-orange", "charts.bus_up")):
        data.append(_line(x, rows.telemetry[f"gpu0_pcie_{key}_bytes_per_s_mean"] / 1e9, axis, colour, text(name)))
    with np.errstate(divide="ignore", invalid="ignore"):
        for key, colour, name in (("h2d", "--mt-blue", "charts.moved_down"), ("d2h", "--mt-orange", "charts.moved_up")):
            moved = rows.steps[key] / rows.steps["step_s"] / 1e9
            data.append(_line(axis.of_steps(), moved, axis, colour, text(name), dash="dot"))
    return _figure(rows, axis, data, options, y_format=".3~g", from_zero=True)


def disk(rows: RunRows, options: ChartOptions, axis: Axis) -> Figure:
    """What training reads from the offload file and writes to it. Drives wear by writing, so the total is named."""
    read, written = rows.steps["disk_read"], rows.steps["disk_write"]
    total = float(np.nansum(written))
    if not total + float(np.nansum(read)):
        return {"empty": text("charts.no_disk")}
    names = (text("charts.disk_read"), text("charts.disk_written", total=format_bytes(total)))
    with np.errstate(divide="ignore", invalid="ignore"):
        data = [
            _line(axis.of_steps(), moved / rows.steps["step_s"] / 1e9, axis, colour, name)
            for moved, colour, name in zip((read, written), ("--mt-blue", "--mt-orange"), names, strict=True)
        ]
    return _figure(rows, axis, data, options, y_format=".3~g", from_zero=True)


def gpu(rows: RunRows, options: ChartOptions, axis: Axis) -> Figure:
    """Utilisation in percent, and power in watts on the right."""
    if not rows.has_gpu:
        return {"empty": text("charts.no_gpu")}
    x = axis.of(rows.telemetry["time_s"])
    use = _line(x, rows.telemetry["gpu0_utilization_mean"] * 100, axis, "--mt-green", text("charts.utilization"))
    power = _line(x, rows.telemetry["gpu0_power_w_mean"], axis, "--mt-yellow", text("charts.power")) | {"yaxis": "y2"}
    figure = _figure(rows, axis, [use, power], options, y_format=".3~g", from_zero=True)
    if "layout" in figure:
        figure["layout"]["yaxis"] |= {"range": [0, 102], "autorange": False}
        figure["layout"]["yaxis2"] = {"overlaying": "y", "side": "right", "showgrid": False, "fixedrange": True, "rangemode": "tozero",
                                     "tickmode": "auto", "nticks": 6, "tickformat": ".0f"}  # fmt: skip
        figure["layout"]["margin"]["r"] = 44
    return figure


CHARTS: dict[str, Callable[[RunRows, ChartOptions, Axis], Figure]] = {
    "loss": loss,
    "tokens_per_s": tokens_per_s,
    "learning_rate": learning_rate,
    "grad_norm": grad_norm,
    "vram": vram,
    "ram": ram,
    "bus": bus,
    "gpu": gpu,
    "disk": disk,
}


def _memory(rows: RunRows, options: ChartOptions, axis: Axis, lines: Sequence[tuple[str, str, str]], peak: float) -> Figure:
    x = axis.of(rows.telemetry["time_s"])
    data = [_line(x, rows.telemetry[key] / GIB, axis, colour, text(name)) for key, colour, name in lines]
    if peak:
        data.append(_level(axis, peak / GIB, text("charts.predicted_peak")))
    return _figure(rows, axis, data, options, y_format=".3~g", from_zero=True)


def _raw_and_smoothed(values: Floats, axis: Axis, options: ChartOptions, colour: str, name: str) -> list[Figure]:
    """Smoothed over the whole series first, then cut and thinned: a zoom shows the same course."""
    x = axis.of_steps()
    if not options.smoothing:
        return [_line(x, values, axis, colour, name)]
    raw = _line(x, values, axis, colour, text("charts.raw")) | {"opacity": 0.3, "showlegend": False, "hoverinfo": "skip"}
    raw["line"]["width"] = 1
    return [raw, _line(x, smooth(values, options.smoothing), axis, colour, name)]


def _line(x: Floats, y: Floats, axis: Axis, colour: str, name: str, dash: str = "solid") -> Figure:
    placed = np.isfinite(x)
    if not placed.all():
        x, y = x[placed], y[placed]
    seen = axis.shown(x)
    x, y = x[seen], y[seen]
    chosen = thin(x, y)
    line = {"color": colour, "width": 1.5, "dash": dash}
    return {"type": "scatter", "mode": "lines", "name": name, "x": plain(x[chosen]), "y": plain(y[chosen]), "line": line}


def _level(axis: Axis, value: float, name: str) -> Figure:
    """A dashed line across the whole chart."""
    x = axis.of_steps() if axis.by_step else axis.of(np.array([axis.start, axis.end]))
    ends = [max(float(x[0]), axis.low), min(float(x[-1]), axis.high)] if len(x) else []
    line = {"color": "--mt-grey", "width": 1.5, "dash": "dash"}
    return {"type": "scatter", "mode": "lines", "name": name, "x": ends, "y": [value] * len(ends), "line": line}


def _dots(axis: Axis, events: Sequence[Mapping[str, Any]], name: str) -> Figure:
    shown = [(axis.of_event(event), float(event["loss"])) for event in events]
    shown = [(x, y) for x, y in shown if axis.low <= x <= axis.high]
    x, y = np.array([x for x, _ in shown]), np.array([y for _, y in shown])
    marker = {"color": "--mt-orange", "size": 7, "line": {"width": 1, "color": "--mt-card"}}
    return {"type": "scatter", "mode": "markers", "name": name, "x": plain(x), "y": plain(y), "marker": marker}


def _ticks(axis: Axis, events: Sequence[Mapping[str, Any]], name: str) -> Figure:
    xs = [x for x in map(axis.of_event, events) if axis.low <= x <= axis.high]
    marker = {"symbol": "triangle-up", "size": 8, "color": "--mt-grey"}
    return {"type": "scatter", "mode": "markers", "name": name, "x": xs, "y": [0.02] * len(xs), "yaxis": "y2", "marker": marker,
            "hovertemplate": "%{x}", "cliponaxis": False}  # fmt: skip


def _figure(rows: RunRows, axis: Axis, data: list[Figure], options: ChartOptions, y_format: str, from_zero: bool = False) -> Figure:
    """The lines that hold a reading, in the layout that all charts share; or why there are none."""
    drawn = [trace for trace in data if any(value is not None for value in trace["y"])]
    if not any(trace.get("line", {}).get("dash") != "dash" for trace in drawn):
        return {"empty": text("charts.waiting" if not len(rows.steps) else "charts.no_reading")}
    y_axis: dict[str, Any] = {"type": "log" if options.log else "linear", "tickformat": y_format, "hoverformat": y_format}
    y_axis |= {"fixedrange": True, "nticks": 6, "zeroline": False, "automargin": False}
    if from_zero and not options.log:
        y_axis["rangemode"] = "tozero"
    x_title = {"text": axis.title(), "standoff": 6, "font": {"size": 11}}
    layout = {
        "uirevision": rows.run_id,
        "margin": {"l": 52, "r": 12, "t": 8, "b": 34},
        "hovermode": "x",
        "dragmode": "zoom",
        "showlegend": sum(trace.get("showlegend", True) for trace in drawn) > 1,
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "font": {"size": 11}},
        "xaxis": {"title": x_title, "nticks": 8, "zeroline": False, "range": axis.range()},
        "yaxis": y_axis,
    }
    if layout["showlegend"]:
        layout["margin"]["t"] = 26
    return {"data": drawn, "layout": layout}
