"""What can be done with a run now: its buttons with the consequence of each, and the card that explains a failure."""

import re
from typing import Any

from megatrain.runs.records import RunState
from megatrain.runs.store import RunStore
from megatrain.runs.supervisor import force_quit, start_worker
from megatrain.units import format_bytes, format_duration
from ui import fixes
from ui.feed import RunRows
from ui.words import text

NO_ANSWER_S = 120.0  # a stop that is not answered for this long offers to end the process
RESUMABLE = (RunState.STOPPED, RunState.FAILED, RunState.CRASHED)
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PAGE_OF = {"choose_model": "new_run", "choose_data": "new_run", "change_plan": "new_run", "change_settings": "new_run", "delete": "runs",
           "choose_checkpoint": "runs"}  # fmt: skip
Button = dict[str, Any]


def buttons(rows: RunRows, num_checkpoints: int, now: float) -> list[Button]:
    """Buttons in order: action, label, enabled, why (when not), and `ask`: the consequence that is confirmed first."""
    status = rows.status
    state, pending = status.state, status.pending_command
    if not status.is_active:
        return _when_over(rows, num_checkpoints)
    busy = text("monitor.why_pending") if pending else ""
    early = busy or (text("monitor.why_not_training") if state is RunState.STARTING else "")
    stopping = state is RunState.STOPPING or pending in ("stop", "stop_discard")
    early = text("monitor.why_stopping") if stopping else early
    first = "continue" if state is RunState.PAUSED else "pause"
    found = [
        _button(first, early),
        _button("checkpoint", early),
        _button("stop", text("monitor.why_stopping") if stopping else "", ask=save_cost(rows)),
        _button("stop_discard", text("monitor.why_stopping") if stopping else "", ask=discard_cost(rows)),
    ]
    if stopping and no_answer(rows, now):
        found.append(_button("force_quit", "", ask=text("monitor.force_quit_ask", lost=discard_cost(rows))))
    return found


def _button(action: str, why: str, ask: str = "") -> Button:
    return {"action": action, "label": text(f"monitor.do_{action}"), "enabled": not why, "why": why, "ask": ask}


def _when_over(rows: RunRows, num_checkpoints: int) -> list[Button]:
    """A run that ended by itself offers its result; one that failed has its buttons on the card that explains it."""
    found: list[Button] = []
    if rows.status.state is RunState.CREATED:
        found.append(_button("start", ""))
    if rows.status.state is RunState.STOPPED:
        found.append(_button("resume", "" if num_checkpoints else text("monitor.why_no_checkpoint")))
    if num_checkpoints:
        found.append({**_button("open_runs", ""), "page": "runs"})
    return found


def last_checkpoint(rows: RunRows) -> dict[str, Any] | None:
    """The newest checkpoint event."""
    return next((event for event in reversed(rows.events) if event["kind"] == "checkpoint"), None)


def save_cost(rows: RunRows) -> str:
    """What stopping with a checkpoint takes, after the last one that was written."""
    last = last_checkpoint(rows)
    if last is None or not last.get("duration_s"):
        return text("monitor.stop_ask")
    return text("monitor.stop_ask_known", time=format_duration(last["duration_s"]), size=format_bytes(last.get("num_bytes") or 0))


def discard_cost(rows: RunRows) -> str:
    """What is lost without one."""
    last = last_checkpoint(rows)
    lost = rows.status.step - (int(last["step"]) if last else 0)
    if last is None:
        return text("monitor.discard_all", lost=f"{lost:,}")
    return text("monitor.discard_ask", lost=f"{lost:,}", step=f"{int(last['step']):,}")


def no_answer(rows: RunRows, now: float) -> bool:
    """True when a stop was asked for long ago and the run still has not ended."""
    since = rows.status.since_s if rows.status.state is RunState.STOPPING else rows.status.pending_since_s
    return since is not None and now - since > NO_ANSWER_S


def pending_words(rows: RunRows) -> str:
    """The wish that the run has not answered yet: `Pause is requested; it happens after step 413.`"""
    command = rows.status.pending_command
    if command:
        return text(f"monitor.pending_{command}", step=f"{rows.status.step + 1:,}")
    return text("monitor.pending_stopping") if rows.status.state is RunState.STOPPING else ""


def explanation(rows: RunRows, num_checkpoints: int) -> dict[str, Any] | None:
    """The card of a run that failed, crashed or is damaged: what happened, what to do, and the buttons that do it."""
    error = rows.status.error
    if error is None:
        return None
    words, _, details = error.text.partition("\n")
    ways = _ways_out(rows, error.action, num_checkpoints)
    return {"title": error.title, "text": words, "details": details, "hint": error.hint, "buttons": ways}


def _ways_out(rows: RunRows, action: str, num_checkpoints: int) -> list[Button]:
    """The fix that the explanation names first, then the plain ways to go on."""
    found: list[Button] = []
    if action in fixes.CHANGES and num_checkpoints:
        found.append(_button(action, ""))
    elif action in PAGE_OF:
        found.append({**_button(f"open_{PAGE_OF[action]}", ""), "page": PAGE_OF[action]})
    elif action == "open_model_page" and rows.config is not None and HUB_ID.fullmatch(rows.config.model.path):
        found.append({**_button("open_model_page", ""), "href": f"https://huggingface.co/{rows.config.model.path}"})
    if rows.status.state in RESUMABLE:
        found.append(_button("resume" if num_checkpoints else "start", ""))
    return found


def act(store: RunStore, action: str) -> None:
    """Carry out what a button says. Returns at once; a MegaTrainError says why it cannot be done."""
    if action in ("resume", "start"):
        start_worker(store, resume=action == "resume")
    elif action == "force_quit":
        force_quit(store)
    elif action in fixes.CHANGES:
        fixes.apply(store, action)
        start_worker(store, resume=True)
    else:
        store.send_command(action)
