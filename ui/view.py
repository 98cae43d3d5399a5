"""Rows of a run -> the words and numbers that the page shows. Pure: no gradio; `now` is a Unix time handed in.

A number that is not known is an en dash, never 0 and never NaN.
"""

import math
import time
from typing import Any

import numpy as np

from megatrain.runs.records import RunState
from megatrain.units import format_bytes, format_count, format_duration, three_digits
from ui.feed import RunRows
from ui.rows import smooth
from ui.words import text

NOTHING = "–"
ETA_STEPS = 100  # time left follows the latest steps
ETA_HIDDEN_STEPS = 10  # the first steps are slower and say little
LOSS_SMOOTHING = 20.0  # steps
TREND_STEPS = 50
TREND_SHARE = 0.005  # a smaller change, or one within the noise, is called steady
CHAIN = ("download", "tokenise", "check", "load", "compile", "train", "save")
CHAIN_OF = {"plan": "download", "evaluate": "train"}  # stages without a link of their own
TONES = {
    RunState.RUNNING: "ok", RunState.FINISHED: "ok", RunState.STARTING: "warn", RunState.PAUSED: "warn", RunState.STOPPING: "warn",
    RunState.FAILED: "bad", RunState.CRASHED: "bad", RunState.DAMAGED: "bad",
}  # fmt: skip
EVENTS_SHOWN = 200


def tone(state: RunState) -> str:
    """ok | warn | bad | idle: the colour that goes with the state's word."""
    return TONES.get(state, "idle")


def loss_number(value: float | None) -> str:
    """A loss with three decimals at most: 1.84, 12.3, 0.0123."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.3f}" if abs(value) < 10 else three_digits(value)


def paused_overlap(rows: RunRows, begin: float, end: float) -> float:
    """Seconds between two times in which the run did not train: paused, stopped, or not alive."""
    idle, since = 0.0, None
    for event in rows.events:
        if event["kind"] != "state":
            continue
        trains = event.get("state") in ("running", "stopping")
        if trains and since is not None:
            idle += max(0.0, min(event["time_s"], end) - max(since, begin))
            since = None
        elif not trains and since is None:
            since = event["time_s"]
    return idle if since is None else idle + max(0.0, end - max(since, begin))


def seconds_left(rows: RunRows) -> float | None:
    """Expected time until the last step; None in the first steps, without a known end, and for a run that is over."""
    status = rows.status
    count = len(rows.steps)
    if not status.is_active or status.num_steps is None or count <= ETA_HIDDEN_STEPS:
        return None
    first = max(0, count - 1 - ETA_STEPS)
    times, steps = rows.steps["time_s"], rows.steps["step"]
    begin, end = float(times[first]), float(times[-1])
    done = float(steps[-1] - steps[first])
    busy = end - begin - paused_overlap(rows, begin, end)
    return max(0.0, busy / done * (status.num_steps - status.step)) if done > 0 and busy > 0 else None


def clock(seconds_from_now: float, now: float) -> str:
    """The time of day then, with the weekday when it is another day: `23:40`, `Tue 06:15`."""
    then = time.localtime(now + seconds_from_now)
    same_day = then[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M" if same_day else "%a %H:%M", then)


def loss_trend(rows: RunRows) -> tuple[float, str]:
    """The smoothed loss now, and whether it is falling, rising or steady (empty while too few steps are there)."""
    raw = rows.steps["loss"]
    raw = raw[np.isfinite(raw)]
    smoothed = smooth(raw, LOSS_SMOOTHING)
    if not len(smoothed):
        return float("nan"), ""
    if len(smoothed) < 10:
        return float(smoothed[-1]), ""
    reach = min(TREND_STEPS, len(smoothed) // 2)
    before, now = float(smoothed[-1 - reach]), float(smoothed[-1])
    noise = float(np.std(raw[-reach:] - smoothed[-reach:])) * 2 / math.sqrt(LOSS_SMOOTHING)
    change = now - before
    return now, "steady" if abs(change) <= max(TREND_SHARE * abs(before), noise) else "falling" if change < 0 else "rising"


def progress(rows: RunRows) -> float | None:
    """Share of the steps that are done, 0 to 1; None while their number is unknown."""
    return min(1.0, rows.status.step / rows.status.num_steps) if rows.status.num_steps else None


def step_words(rows: RunRows) -> str:
    """`step 412 of 3,000`."""
    if rows.status.num_steps:
        return text("shell.step_of", step=f"{rows.status.step:,}", total=f"{rows.status.num_steps:,}")
    return text("shell.step_only", step=f"{rows.status.step:,}") if rows.status.step else ""


def strip(rows: RunRows, now: float) -> dict[str, Any]:
    """The status strip above every page."""
    value, _ = loss_trend(rows)
    left = seconds_left(rows)
    speed = rows.steps.last("tokens_per_s", 20)
    words = text(f"states.{rows.status.state}")
    share = progress(rows)
    facts = [step_words(rows)]
    if math.isfinite(value):
        facts.append(text("shell.loss", loss=loss_number(value)))
    if rows.status.is_active and math.isfinite(speed):
        facts.append(text("shell.speed", speed=three_digits(speed)))
    if left is not None:
        facts.append(text("shell.left", left=format_duration(left), clock=clock(left, now)))
    title = [f"{share:.0%}" if share is not None and rows.status.is_active else words, loss_number(value) if math.isfinite(value) else ""]
    return {
        "run": rows.run_id, "name": rows.name, "state": str(rows.status.state), "word": words, "tone": tone(rows.status.state),
        "facts": [fact for fact in facts if fact], "progress": share, "title": " · ".join([*filter(None, title), text("shell.title")]),
    }  # fmt: skip


def numbers(rows: RunRows, now: float) -> list[dict[str, str]]:
    """The six numbers: key, value, unit, detail."""
    loss, trend = loss_trend(rows)
    active = rows.status.is_active
    speed, left = rows.steps.last("tokens_per_s", 20), seconds_left(rows)
    predicted = rows.predicted
    expected = text("monitor.expected", speed=three_digits(predicted.tokens_per_s)) if predicted and predicted.tokens_per_s else ""
    return [
        {"key": "loss", "value": loss_number(loss), "detail": text(f"monitor.trend_{trend}") if trend else "", "trend": trend},
        {"key": "speed", "value": three_digits(speed) if math.isfinite(speed) else NOTHING, "detail": expected},
        {"key": "left", "value": format_duration(left) if left is not None else NOTHING,
         "detail": text("monitor.ends", clock=clock(left, now)) if left is not None else _why_no_time(rows)},
        _vram(rows, active),
        _ram(rows, active),
        _bus(rows, active),
    ]  # fmt: skip


def _why_no_time(rows: RunRows) -> str:
    if not rows.status.is_active:
        return text("monitor.ran_for", time=format_duration(trained_seconds(rows))) if len(rows.steps) else ""
    return text("monitor.left_soon")


def trained_seconds(rows: RunRows) -> float:
    """Time spent in steps."""
    seconds = rows.steps["step_s"]
    return float(seconds[np.isfinite(seconds)].sum())


def _vram(rows: RunRows, active: bool) -> dict[str, str]:
    if not rows.has_gpu:
        return {"key": "vram", "value": NOTHING, "detail": text("charts.no_gpu")}
    own, card = rows.telemetry.last("process_vram_bytes_max", 3), rows.telemetry.last("gpu0_vram_used_bytes_max", 3)
    peak = rows.predicted.vram_bytes if rows.predicted else 0
    return _memory("vram", own if math.isfinite(own) else card, peak, active)


def _ram(rows: RunRows, active: bool) -> dict[str, str]:
    peak = rows.predicted.ram_bytes if rows.predicted else 0
    return _memory("ram", rows.telemetry.last("worker_ram_bytes_max", 3), peak, active)


def _memory(key: str, used: float, peak: int, active: bool) -> dict[str, str]:
    expected = text("monitor.peak", size=format_bytes(peak)) if peak else ""
    return {"key": key, "value": format_bytes(used) if active and math.isfinite(used) else NOTHING, "detail": expected}


def _bus(rows: RunRows, active: bool) -> dict[str, str]:
    if not rows.has_gpu:
        return {"key": "bus", "value": NOTHING, "detail": text("charts.no_gpu")}
    down, up = (rows.telemetry.last(f"gpu0_pcie_{way}_bytes_per_s_mean", 5) for way in ("down", "up"))
    detail = text("monitor.bus_measured")
    if not math.isfinite(down):
        seconds = rows.steps.last("step_s", 20)
        down, up = rows.steps.last("h2d", 20) / seconds, rows.steps.last("d2h", 20) / seconds
        detail = text("monitor.bus_moved")
    if not active or not math.isfinite(down):
        return {"key": "bus", "value": NOTHING, "detail": ""}
    both = f"↓ {three_digits(down / 1e9)} ↑ {three_digits(up / 1e9)}" if math.isfinite(up) else f"↓ {three_digits(down / 1e9)}"
    return {"key": "bus", "value": both, "unit": "GB/s", "detail": detail}


def phases(rows: RunRows) -> list[dict[str, Any]]:
    """The chain from download to save. status: todo | now | done | failed; text and fraction of the current one."""
    state = rows.status.state
    current = current_phase(rows)
    compiles = current == "compile" or "compile" in rows.phases  # only kernels for a GPU are compiled
    chain = [name for name in CHAIN if name != "compile" or compiles]
    at = chain.index(current) if current else -1
    links = []
    for index, name in enumerate(chain):
        status = "done" if index < at or state is RunState.FINISHED else "todo"
        if index == at and state is not RunState.FINISHED:
            status = "failed" if tone(state) == "bad" else "now" if rows.status.is_active else "ended"
        detail, fraction = _phase_progress(rows, name) if index == at or (name == "train" and rows.status.step) else ("", None)
        links.append({"name": name, "status": status, "text": detail, "fraction": fraction})
    return links


def current_phase(rows: RunRows) -> str:
    """The link of the chain that the run is in, or was in when it ended; empty before the first."""
    latest = rows.status.phase.name if rows.status.phase else ""
    if not latest and rows.phases:
        latest = max(rows.phases.values(), key=lambda event: event["time_s"])["name"]
    name = CHAIN_OF.get(latest, latest)
    if name == "check" and "tokenise" not in rows.phases:
        name = "download"  # a first look at settings and model, before anything is fetched
    said = rows.phases.get(latest, {}).get("time_s", 0.0)
    trains = len(rows.steps) and float(rows.steps["time_s"][-1]) > said and rows.status.state in (RunState.RUNNING, RunState.PAUSED)
    return "train" if trains or (not name and len(rows.steps)) else name if name in CHAIN else ""


def _phase_progress(rows: RunRows, name: str) -> tuple[str, float | None]:
    if name == "train":
        steps = rows.status.num_steps
        return (f"{rows.status.step:,} / {steps:,}" if steps else f"{rows.status.step:,}"), progress(rows)
    phase = rows.status.phase
    if phase is None or phase.name != name:
        return "", None
    show = format_bytes if phase.unit == "bytes" else format_count
    if not phase.total:
        return (show(phase.done) if phase.done else ""), None
    unit = "" if phase.unit in ("", "bytes") else f" {phase.unit}"
    return f"{show(phase.done)} / {show(phase.total)}{unit}", min(1.0, phase.done / phase.total)


def chips(rows: RunRows) -> list[str]:
    """What the run is, in short: model, data, precision."""
    if rows.config is None:
        return []
    return [rows.config.model.path, rows.config.data.path, rows.config.precision]


def events(rows: RunRows) -> list[dict[str, str]]:
    """What happened, newest first."""
    shown = []
    for event in reversed(rows.events[-EVENTS_SHOWN:]):
        words, colour = _event_words(event)
        if words:
            stamp = time.localtime(event["time_s"])
            shown.append({"day": time.strftime("%Y-%m-%d", stamp), "time": time.strftime("%H:%M:%S", stamp), "tone": colour, "text": words})
    return shown


def _event_words(event: dict[str, Any]) -> tuple[str, str]:
    kind = event["kind"]
    if kind == "state":
        state = RunState(event["state"])
        reason = f": {event['reason']}" if event.get("reason") else ""
        return text(f"states.{state}") + reason, tone(state)
    if kind == "eval":
        return text("monitor.event_eval", step=f"{event['step']:,}", loss=loss_number(event.get("loss"))), "idle"
    if kind == "checkpoint":
        size, seconds = format_bytes(event.get("num_bytes") or 0), format_duration(event.get("duration_s") or 0)
        return text("monitor.event_checkpoint", step=f"{event['step']:,}", size=size, time=seconds), "ok"
    if kind == "notice":
        return str(event.get("text", "")), "warn" if event.get("level") == "warning" else "idle"
    return "", "idle"  # `ended` and `export` have their place elsewhere
