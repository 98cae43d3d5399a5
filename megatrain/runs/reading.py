"""Looking at a run folder: what its record says, and whether its worker really lives. Changes nothing."""

import contextlib
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.engine.events import Phase
from megatrain.platform import Holder, look_at_lock, process_identity
from megatrain.runs import diagnose
from megatrain.runs.database import Database
from megatrain.runs.diagnose import Explanation
from megatrain.runs.records import ACTIVE, CheckpointInfo, EventRow, RunState, RunStatus, RunSummary, StepRow, TelemetryRow
from megatrain.telemetry.host import oom_kills

HEARTBEAT_LOST_S = 30.0  # only where locks and pids cannot be looked at
SPAWN_S = 10.0  # a start that is this old and has no process never became one
CHECKPOINT_NAME = re.compile(r"step-(\d+)")


def other_worker_lives(folder: Path) -> bool:
    """True when a process other than this one trains the run."""
    _, holder = look_at_lock(folder / "lock")
    mine = holder is not None and holder.is_here() and holder.pid == os.getpid()
    return not mine and worker_lives(folder)


def worker_lives(folder: Path, stored: dict[str, Any] | None = None) -> bool:
    """True while the run's process exists: lock held by a process that is the one that took it, or just being started."""
    state, spawned = (stored or {}).get("state") or {}, (stored or {}).get("spawned")
    if state.get("state") == RunState.STARTING and _being_started(state, spawned):
        return True
    lock = folder / "lock"
    held, holder = look_at_lock(lock)
    if held is False:
        return False
    if holder is not None and holder.is_here() and holder.identity:
        return process_identity(holder.pid) == holder.identity  # a forked child may hold the lock of a dead worker
    if held:
        return True
    try:
        return time.time() - lock.stat().st_mtime < HEARTBEAT_LOST_S
    except OSError:
        return False


def _being_started(state: dict[str, Any], spawned: dict[str, Any] | None) -> bool:
    if spawned is None:
        return time.time() - state.get("since_s", 0.0) < SPAWN_S
    return process_identity(spawned["pid"]) == spawned["identity"]


def facts(database: Database) -> dict[str, Any]:
    """Everything set with `set_fact`."""
    return _facts(database.read("SELECT key, value FROM facts"))


def _facts(rows: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {key: json.loads(value) for key, value in rows}


def stored_state(database: Database) -> RunState | None:
    """The state as it was written last, whether or not the worker still lives."""
    state = facts(database).get("state")
    return None if state is None else RunState(state["state"])


def status(folder: Path, database: Database) -> RunStatus:
    """See RunStore.state."""
    if not database.path.exists():
        return _damaged("Its file run.sqlite is missing.")
    stored, last_step, pending = _read_status(database)
    live = worker_lives(folder, stored)
    if not live and (stored.get("state") or {}).get("state") in ACTIVE:
        stored, last_step, pending = _read_status(database)  # it may have ended properly between the two looks
    said = stored.get("state") or {"state": RunState.CREATED}
    state = RunState(said["state"])
    if not live and not (folder / "config.yaml").exists():
        return _damaged("Its file config.yaml is missing.")
    error = Explanation(**said["error"]) if said.get("error") else None
    lock = folder / "lock"
    heartbeat = lock.stat().st_mtime if lock.exists() else None
    ended, holder = stored.get("ended_s"), look_at_lock(lock)[1]
    if state in ACTIVE and not live:
        error, ended = diagnose.explain_vanished(vanished(folder, database, stored, last_step)), heartbeat or said.get("since_s")
        state = RunState.CRASHED
    phase = stored.get("phase")
    spawned = stored.get("spawned") or {}
    return RunStatus(
        state=state, reason=error.title if state is RunState.CRASHED and error else said.get("reason", ""), step=last_step,
        num_steps=stored.get("num_steps"), pid=_pid(holder, spawned) if state in ACTIVE else None,
        created_s=stored.get("created_s"), started_s=stored.get("started_s"), heartbeat_s=heartbeat,
        ended_s=None if state in ACTIVE else ended, since_s=said.get("since_s"), error=error,
        pending_command=pending[0] if state in ACTIVE else None, pending_since_s=pending[1] if state in ACTIVE else None,
        phase=Phase(**phase) if phase else None,
        attempt=stored.get("attempt", 0),
    )  # fmt: skip


def _pid(holder: Holder | None, spawned: dict[str, Any]) -> int | None:
    """The worker's process: the one that holds the lock, or the one started last, while it has not taken it yet."""
    if holder is not None and (not spawned or process_identity(holder.pid) == holder.identity):
        return holder.pid
    return spawned.get("pid")


def _damaged(text: str) -> RunStatus:
    hint = "Delete it, or copy the whole folder again from where it was complete."
    return RunStatus(RunState.DAMAGED, text, error=Explanation("This run folder is damaged", text, hint, "delete"))


def _read_status(database: Database) -> tuple[dict[str, Any], int, tuple[str | None, float | None]]:
    with database.reading() as connection:
        stored = _facts(connection.execute("SELECT key, value FROM facts"))
        last = connection.execute("SELECT max(step) FROM steps").fetchone()[0]
        pending = connection.execute("SELECT command, time_s FROM commands WHERE taken_s IS NULL ORDER BY id LIMIT 1").fetchone()
    return stored, max(last or 0, stored.get("resumed_at") or 0), pending or (None, None)


def vanished(folder: Path, database: Database, stored: dict[str, Any], step: int) -> diagnose.Vanished:
    """The evidence that a worker left behind which ended without a word."""
    row = database.read("SELECT data FROM telemetry ORDER BY id DESC LIMIT 1")
    readings = json.loads(row[0][0]) if row else {}
    used, total = readings.get("ram_used_bytes_max"), stored.get("ram_total_bytes")
    kills = oom_kills()
    before = stored.get("oom_kills")
    newest = newest_checkpoint(checkpoints(folder))
    ended, spawned = stored.get("exit") or {}, stored.get("spawned") or {}
    return diagnose.Vanished(
        exit_code=ended.get("code") if ended.get("pid") == spawned.get("pid") else None,
        log_tail=tail(folder / "worker.log"), step=step, phase=(stored.get("phase") or {}).get("name", ""),
        ram_share=used / total if used and total else None, system_killed=None if kills is None or before is None else kills > before,
        free_disk_bytes=shutil.disk_usage(folder).free, checkpoint_step=newest.step if newest else None,
    )  # fmt: skip


def steps(database: Database, after_id: int, limit: int) -> list[StepRow]:
    rows = database.read("SELECT * FROM steps WHERE id > ? ORDER BY id LIMIT ?", (after_id, limit))
    return [StepRow(*(*row[:11], json.loads(row[11]), json.loads(row[12]))) for row in rows]


def telemetry(database: Database, after_id: int, limit: int) -> list[TelemetryRow]:
    rows = database.read("SELECT id, time_s, data FROM telemetry WHERE id > ? ORDER BY id LIMIT ?", (after_id, limit))
    return [TelemetryRow(number, time_s, json.loads(data)) for number, time_s, data in rows]


def events(database: Database, after_id: int, limit: int) -> list[EventRow]:
    rows = database.read("SELECT id, time_s, kind, data FROM events WHERE id > ? ORDER BY id LIMIT ?", (after_id, limit))
    return [EventRow(number, time_s, kind, json.loads(data)) for number, time_s, kind, data in rows]


def summary(database: Database, points: int) -> RunSummary:
    with database.reading() as connection:
        low, high, best = connection.execute("SELECT min(step), max(step), min(loss) FROM steps").fetchone()
        recent = connection.execute("SELECT loss, num_tokens, step_s FROM steps ORDER BY step DESC LIMIT 20").fetchall()
        row = connection.execute("SELECT data FROM events WHERE kind = 'eval' ORDER BY id DESC LIMIT 1").fetchone()
        line = [] if low is None else _sparkline(connection, low, high, points)
    seconds = sum(step_s or 0.0 for _, _, step_s in recent)
    return RunSummary(
        last_loss=recent[0][0] if recent else None, best_loss=best, last_eval_loss=json.loads(row[0]).get("loss") if row else None,
        tokens_per_s=sum(tokens for _, tokens, _ in recent) / seconds if seconds else None, sparkline=tuple(line),
    )  # fmt: skip


def _sparkline(connection: sqlite3.Connection, low: int, high: int, points: int) -> list[float]:
    wanted = sorted({low + round((high - low) * i / max(1, points - 1)) for i in range(points)})
    marks = ",".join("?" * len(wanted))
    rows = connection.execute(f"SELECT loss FROM steps WHERE step IN ({marks}) AND loss IS NOT NULL ORDER BY step", wanted)
    return [loss for (loss,) in rows]


def checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Every checkpoint folder of a run, by step number; a half-written or damaged one is not complete."""
    found = []
    for path in (folder / "checkpoints").glob("step-*"):
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match and path.is_dir():
            with contextlib.suppress(OSError):  # retention may remove it just now
                found.append(_checkpoint(path, int(match[1])))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_checkpoint(found: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """The complete one that was saved last: neither the highest number (the run may have gone back) nor the last name."""
    return max((info for info in found if info.complete), key=lambda info: info.sequence, default=None)


def _checkpoint(path: Path, step: int) -> CheckpointInfo:
    """Complete: the manifest, written last, is there, and every file has the size that it says. Contents are not read."""
    with os.scandir(path) as entries:
        sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    info = CheckpointInfo(path.name, step, path, sum(sizes.values()), path.stat().st_mtime, complete=False)
    try:
        manifest = json.loads((path / "manifest.json").read_text("utf-8"))
        complete = all(sizes.get(record["file"]) == record["num_bytes"] for record in manifest["blocks"])
        return replace(info, complete=complete, sequence=int(manifest["sequence"]), checksum=str(manifest["sha256"]))
    except (OSError, ValueError, KeyError, TypeError):
        return info


def tail(path: Path, num_bytes: int = 65536) -> str:
    """The end of a text file; empty when there is none. Bytes that are no UTF-8 are shown as replacements."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read(num_bytes).decode("utf-8", "replace")
    except OSError:
        return ""
