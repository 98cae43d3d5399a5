"""Runs -> what the Runs page shows: one line per run, and the detail of one with all that can be done with it. No gradio."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.runs.records import CheckpointInfo, RunState, RunStatus
from megatrain.runs.store import RunStore
from megatrain.runs.supervisor import find_run, folder_bytes, latest_export, list_runs
from megatrain.units import format_bytes, format_duration
from ui import view
from ui.context import checked_run_id
from ui.feed import Feeds
from ui.words import text

SIZE_AGE_S = 15.0  # a run's size on disk is counted again after this long
EXPORT_TYPES = ("bf16", "fp32")
Reply = dict[str, Any]


@dataclass
class Counted:
    """Bytes of a run folder, and when they were counted."""

    num_bytes: int
    at_s: float


class RunList:
    """The runs of a workspace as the page's server functions hand them out. Keeps sizes for a few seconds, nothing else."""

    def __init__(self, feeds: Feeds) -> None:
        self.feeds = feeds
        self._sizes: dict[str, Counted] = {}

    def lines(self) -> list[Reply]:
        """Every run, newest first; damaged folders too, with the reason."""
        return [self._line(store) for store in list_runs(self.feeds.workspace)]

    def detail(self, run_id: object) -> Reply:
        """One run: configuration, checkpoints, exports, its failure in words, and its buttons. RunError when it is not there."""
        store = find_run(self.feeds.workspace, checked_run_id(run_id))
        status, checkpoints = store.state(), store.checkpoints()
        error = status.error
        return {
            **self._line(store),
            "folder": str(store.folder),
            "explanation": None if error is None else {"title": error.title, "text": error.text, "hint": error.hint},
            "yaml": _yaml(store.folder),
            "checkpoints": [_checkpoint(found) for found in reversed(checkpoints)],
            "export": None if status.state is RunState.DAMAGED else _export(latest_export(store)),
            "buttons": buttons(status, checkpoints, self._size(store)),
        }

    def _line(self, store: RunStore) -> Reply:
        status = store.state()
        size = self._size(store)
        line: Reply = {
            "run": store.run_id, "name": store.run_id, "state": str(status.state), "word": text(f"states.{status.state}"),
            "tone": view.tone(status.state), "active": status.is_active, "size": format_bytes(size), "reason": "", "model": view.NOTHING,
            "data": view.NOTHING, "precision": view.NOTHING, "last": view.NOTHING, "best": view.NOTHING, "line": [],
            "steps": view.NOTHING, "progress": None, "time": view.NOTHING, "started": _moment(status.started_s or status.created_s),
        }  # fmt: skip
        if status.state is RunState.DAMAGED:
            return line | {"reason": status.reason}
        feed = self.feeds.of(store.run_id)
        config, summary = feed.config(), store.summary()
        if config is not None:
            line |= {"model": _short(config.model.path), "data": _short(config.data.path), "precision": config.precision}
        return line | {
            "name": feed.name(), "last": view.loss_number(summary.last_loss), "best": view.loss_number(summary.best_loss),
            "line": [round(loss, 4) for loss in summary.sparkline], "steps": _steps(status), "time": _time(status),
            "progress": status.step / status.num_steps if status.num_steps else None,
            "reason": status.reason if status.state in (RunState.FAILED, RunState.CRASHED) else "",
        }  # fmt: skip

    def _size(self, store: RunStore) -> int:
        now = time.monotonic()
        known = self._sizes.get(store.run_id)
        if known is None or now - known.at_s > SIZE_AGE_S:
            known = self._sizes[store.run_id] = Counted(folder_bytes(store.folder), now)
        return known.num_bytes


def buttons(status: RunStatus, checkpoints: list[CheckpointInfo], size: int) -> dict[str, Reply]:
    """What can be done with a run now, by action: label, enabled, why (when not), and `ask` (what is confirmed first)."""
    damaged = status.state is RunState.DAMAGED
    complete = any(checkpoint.complete for checkpoint in checkpoints)
    live = text("runs.why_live") if status.is_active else ""
    broken = text("runs.why_damaged") if damaged else ""
    unsaved = "" if complete else text("monitor.why_no_checkpoint")
    found = {
        "resume": broken or live or unsaved,
        "export": broken or unsaved,
        "open": broken,
        "duplicate": broken,
        "delete": live,
    }
    if status.state is RunState.FINISHED:
        del found["resume"]
    elif not complete and not status.is_active and not damaged:
        del found["resume"]
        found = {"start": "", **found}
    asks = {"delete": text("runs.delete_ask", size=format_bytes(size))}
    return {
        action: {"action": action, "label": text(f"runs.do_{action}"), "enabled": not why, "why": why, "ask": asks.get(action, "")}
        for action, why in found.items()
    }


def _checkpoint(found: CheckpointInfo) -> Reply:
    state = text("runs.complete") if found.complete else text("runs.incomplete")
    return {"name": found.name, "step": f"{found.step:,}", "size": format_bytes(found.num_bytes), "time": _moment(found.time_s),
            "complete": found.complete, "state": state}  # fmt: skip


def _export(data: dict[str, Any] | None) -> Reply | None:
    """The latest export: how far it is, or what came of it."""
    if data is None:
        return None
    state, done, total = str(data.get("state", "")), data.get("done") or 0, data.get("total") or 0
    known = state if state in ("started", "finished", "failed") else "running"
    return {
        "state": state, "tone": {"finished": "ok", "failed": "bad"}.get(state, "warn"),
        "text": str(data.get("text") or "") or text(f"runs.export_{known}"), "target": str(data.get("target", "")),
        "checkpoint": str(data.get("checkpoint", "")), "fraction": done / total if total else None,
    }  # fmt: skip


def _yaml(folder: Path) -> str:
    try:
        return (folder / "config.yaml").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _short(path: str) -> str:
    """A folder by its last name, a hub id whole."""
    return Path(path).name if path.startswith(("/", "~", ".")) or "\\" in path else path


def _steps(status: RunStatus) -> str:
    return f"{status.step:,} / {status.num_steps:,}" if status.num_steps else f"{status.step:,}" if status.step else view.NOTHING


def _time(status: RunStatus) -> str:
    """How long the latest start has run, or ran."""
    if status.started_s is None:
        return view.NOTHING
    end = status.ended_s if not status.is_active and status.ended_s else time.time()
    return format_duration(max(0.0, end - status.started_s))


def _moment(seconds: float | None) -> str:
    return view.NOTHING if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
