"""The timeline of one step as a picture: a row per lane, colours by what it was for."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from megatrain.errors import MegaTrainError
from megatrain.units import format_bytes, format_rate

_LANES = ("compute", "h2d", "d2h", "host", "disk_read", "disk_write", "launcher")
_COLOURS = {
    "forward": "#0072B2", "head": "#CC79A7", "backward": "#56B4E9", "optimizer": "#E69F00", "h2d": "#009E73", "d2h": "#D55E00",
    "disk_read": "#999999", "disk_write": "#666666", "other": "#BBBBBB", "waiting": "#F0E442",
}  # fmt: skip


def draw(spans_file: Path) -> Path:
    """The picture of spans that `bench --trace` wrote, beside them as .html with plotly.min.js; opens without a network."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        text = f"The spans are in {spans_file}; a picture needs plotly, which is not installed."
        raise MegaTrainError(text, f"Run `python -m megatrain bench --trace-from {spans_file.name}` where it is.") from error
    try:
        raw = json.loads(spans_file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise MegaTrainError(f"{spans_file} cannot be read: {error}", "Choose a file that `bench --trace` wrote.") from error
    figure = go.Figure(layout=_layout(raw))
    parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in raw["spans"]:
        parts["waiting" if span["lane"] == "launcher" else span["part"]].append(span)
    for part in [name for name in _COLOURS if name in parts]:
        spans = parts[part]
        figure.add_bar(
            name=part, orientation="h", y=[span["lane"] for span in spans], base=[span["start_s"] for span in spans],
            x=[span["end_s"] - span["start_s"] for span in spans], text=[_told(span) for span in spans], textposition="none",
            hovertemplate="%{text}<extra></extra>", marker={"color": _COLOURS[part], "line": {"width": 0}},
        )  # fmt: skip
    target = spans_file.with_suffix(".html")
    figure.write_html(target, include_plotlyjs="directory")
    return target


def _told(span: dict[str, Any]) -> str:
    """What is read when the pointer rests on a span."""
    seconds = span["end_s"] - span["start_s"]
    lines = [span["name"], f"at {span['start_s']:.4f} s, {seconds * 1e3:.3f} ms long"]
    if span["num_bytes"]:
        lines.append(format_bytes(span["num_bytes"]) + (f", {format_rate(span['num_bytes'] / seconds)}" if seconds else ""))
    return "<br>".join(lines)


def _layout(raw: dict[str, Any]) -> dict[str, Any]:
    used = {span["lane"] for span in raw["spans"]}
    lanes = [lane for lane in _LANES if lane in used]
    return {
        "title": f"One step of {raw['work']}: {raw['step_s']:.3f} s",
        "barmode": "overlay",
        "xaxis": {"title": "seconds", "range": [0, raw["step_s"]]},
        "yaxis": {"categoryorder": "array", "categoryarray": lanes[::-1]},
        "height": 120 + 70 * len(lanes),
    }
