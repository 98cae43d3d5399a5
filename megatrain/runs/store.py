"""RunStore: one run folder, read by pages and the command line, written by its worker.

The worker's rows are buffered and written once in a quarter of a second by a helper thread, so a slow, full or locked
disk never holds up a training step: nothing is lost while the process lives, and the trouble is reported. Readers see
what is on disk and judge from the lock file whether the worker still lives.
"""

import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain.engine.events import StepDone
from megatrain.errors import RunError
from megatrain.platform import FileLock
from megatrain.runs import reading
from megatrain.runs.database import Database, DatabaseBusyError, DatabaseDamagedError, Statement
from megatrain.runs.diagnose import Explanation
from megatrain.runs.records import (
    ACTIVE,
    COMMANDS,
    ENDED,
    CheckpointInfo,
    EventRow,
    RunState,
    RunStatus,
    RunSummary,
    StepRow,
    TelemetryRow,
    finite,
    may_follow,
    to_json,
)

FLUSH_S = 0.25
MAX_BUFFERED = 200_000  # rows; beyond it telemetry is dropped, steps and events never

log = logging.getLogger(__name__)


class RunStore:
    """One run folder. Cheap to make; holds no file open unless `start_background` was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_id = folder.name
        self.trouble = ""  # why rows are waiting in memory; empty when all is written
        self._database = Database(folder / "run.sqlite")
        self._pending: deque[Statement] = deque()
        self._batch: list[Statement] = []
        self._flush_guard = threading.Lock()
        self._facts: dict[str, str] = {}
        self._state: RunState | None = None
        self._commands: deque[tuple[int, str]] = deque()
        self._last_command = 0
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closing = False
        self._gathering = False

    @staticmethod
    def open(folder: Path, create: bool = False) -> "RunStore":
        """The run in `folder`. RunError when there is none and `create` is not set.

        A damaged database of a run without a worker is set aside here and an empty one started; an event says so.
        """
        store = RunStore(folder)
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():
            raise RunError(f"There is no run in {folder}.", "It may have been deleted or moved.")
        if not store._database.path.exists():
            if not create:
                raise RunError(f"{folder} holds no run: run.sqlite is missing.", "Delete the folder, or copy the whole run again.")
            store._database.create()
            with store.one_commit():
                store.set_fact("created_s", time.time())
                store.set_state(RunState.CREATED)
        try:
            store._database.read("SELECT key FROM facts LIMIT 1")
        except DatabaseDamagedError:
            store._repair()
        return store

    # Writer side: the worker, and the supervisor before it starts one ------------------------------------------------

    def start_background(self) -> None:
        """From now on rows are written, commands fetched and the heartbeat renewed by a thread; `close` ends it."""
        self._database.hold()
        self._closing = False
        self._thread = threading.Thread(target=self._background, name="run store", daemon=True)
        self._thread.start()

    def close(self, patience_s: float = 5.0) -> bool:
        """Writes what waits and lets go of the file; False (and a line in the log) when rows had to be given up."""
        if self._thread is not None:
            self._closing = True
            self._wake.set()
            self._thread.join()
            self._thread = None
        give_up = time.monotonic() + patience_s
        while not self.flush() and time.monotonic() < give_up:
            time.sleep(0.05)
        self._database.drop()
        lost = len(self._pending) + len(self._batch)
        if lost:
            log.error("%d rows of this run's record could not be written: %s", lost, self.trouble)
        return lost == 0

    def log_event(self, kind: str, data: dict[str, Any]) -> None:
        """Appends an event. kind: phase, eval, checkpoint, notice, ended, state, export."""
        self._add(("INSERT INTO events (time_s, kind, data) VALUES (?, ?, ?)", (time.time(), kind, to_json(data))))

    def log_step(self, event: StepDone) -> None:
        """Appends one optimizer step."""
        rate = event.num_tokens / event.step_s if event.step_s > 0 else None
        self._add((
            "INSERT INTO steps (time_s, step, loss, grad_norm, learning_rate, num_tokens, trained_tokens, step_s, tokens_per_s,"
            " epoch, bytes, waits) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (time.time(), int(event.step), finite(event.loss), finite(event.grad_norm), finite(event.learning_rate), int(event.num_tokens),
             int(event.trained_tokens), finite(event.step_s), finite(rate), finite(event.epoch), to_json(event.bytes_moved),
             to_json(event.waits_s)),
        ))  # fmt: skip

    def log_telemetry(self, time_s: float, values: dict[str, float | None]) -> None:
        """Appends the readings of one second; dropped when the disk has refused everything for hours."""
        if len(self._pending) < MAX_BUFFERED:
            self._add(("INSERT INTO telemetry (time_s, data) VALUES (?, ?)", (time_s, to_json(values))))

    def set_fact(self, key: str, value: Any) -> None:
        """Replaces one value that describes the run now: phase, num_steps, attempt, ..."""
        text = to_json(value)
        self._facts[key] = text
        self._add(("INSERT INTO facts (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, text)))

    def set_state(self, state: RunState, reason: str = "", **details: Any) -> None:
        """The run is in `state` from now on, for `reason` (words for people). `error`: an Explanation, when it failed.

        RunError when the run cannot go there from where it is: that is a fault of the caller.
        """
        before = self._state or reading.stored_state(self._database)
        if before is not None and not may_follow(before, state):
            raise RunError(f"A run that is {before} cannot become {state}.")
        self._state = state
        now = time.time()
        with contextlib.nullcontext() if self._gathering else self.one_commit():
            self.set_fact("state", {"state": state, "reason": reason, "since_s": now, **details})
            if state in ENDED:
                self.set_fact("ended_s", now)
            self.log_event("state", {"state": state, "reason": reason, **details})
        self._wake.set()

    def heartbeat(self) -> None:
        """Renews the time of the lock file: "the worker lives". Works on a full disk."""
        try:
            os.utime(self.folder / "lock")
        except OSError as error:
            log.debug("no heartbeat: %s", error)

    def take_command(self) -> str | None:
        """The oldest command that nobody took yet; it counts as taken from now on."""
        if self._thread is None:
            self._fetch_commands()
        if not self._commands:
            return None
        number, command = self._commands.popleft()
        self._add(("UPDATE commands SET taken_s = ? WHERE id = ?", (time.time(), number)))
        return command

    def peek_command(self) -> str | None:
        """The command that `take_command` would return."""
        if self._thread is None:
            self._fetch_commands()
        return self._commands[0][1] if self._commands else None

    def drop_commands(self) -> None:
        """Untaken commands were meant for a worker that is gone."""
        self._add(("UPDATE commands SET taken_s = ? WHERE taken_s IS NULL", (time.time(),)))

    def truncate_after(self, step: int) -> None:
        """Forgets what was recorded of later steps: training goes on from `step`."""
        self._add(("DELETE FROM steps WHERE step > ?", (step,)))
        self._add(("DELETE FROM events WHERE kind IN ('eval', 'checkpoint') AND json_extract(data, '$.step') > ?", (step,)))

    def flush(self) -> bool:
        """Writes what waits in one commit; False when that was not possible now (`trouble` says why)."""
        with self._flush_guard:
            while self._pending:
                self._batch.append(self._pending.popleft())
            if not self._batch:
                return True
            try:
                self._database.write(self._batch)
            except (DatabaseBusyError, DatabaseDamagedError, sqlite3.Error, OSError) as error:
                if not self.trouble:
                    log.warning("The run's record cannot be written, rows wait in memory: %s", error)
                self.trouble = str(error)
                if isinstance(error, DatabaseDamagedError):
                    self._repair()
                return False
            self._batch.clear()
            if self.trouble:
                log.warning("The run's record is written again.")
                self.trouble = ""
            return True

    # Reader side: pages, the command line --------------------------------------------------------------------------------

    def state(self) -> RunStatus:
        """The run now; `crashed` when it is said to be active and its worker is gone."""
        try:
            return reading.status(self.folder, self._database)
        except DatabaseDamagedError:
            self._repair()
        return reading.status(self.folder, self._database)

    def steps(self, after_id: int = 0, limit: int = 100_000) -> list[StepRow]:
        """Steps with a larger id, oldest first."""
        return reading.steps(self._database, after_id, limit)

    def telemetry(self, after_id: int = 0, limit: int = 100_000) -> list[TelemetryRow]:
        """Readings with a larger id, oldest first."""
        return reading.telemetry(self._database, after_id, limit)

    def events(self, after_id: int = 0, limit: int = 100_000) -> list[EventRow]:
        """Events with a larger id, oldest first."""
        return reading.events(self._database, after_id, limit)

    def summary(self, points: int = 40) -> RunSummary:
        """Losses and speed for the list of runs; reads a few rows, however long the run is."""
        return reading.summary(self._database, points)

    def fact(self, key: str) -> Any:
        """One value set with `set_fact`; None when it never was."""
        return reading.facts(self._database).get(key)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Oldest step first; the unfinished and damaged ones too."""
        return reading.checkpoints(self.folder)

    def log_tail(self, num_bytes: int = 65536) -> str:
        """The end of worker.log."""
        return reading.tail(self.folder / "worker.log", num_bytes)

    def is_live(self) -> bool:
        """True while a worker of this run lives, or is just being started."""
        return self.state().state in ACTIVE

    def send_command(self, command: str) -> None:
        """Asks the worker: pause | continue | stop | stop_discard | checkpoint. RunError when none is there to hear it."""
        if command not in COMMANDS:
            raise RunError(f"{command!r} is no command.", f"Known: {', '.join(COMMANDS)}.")
        status = self.state()
        if not status.is_active:
            raise RunError(f"This run is {status.state}, so it cannot {command.split('_')[0]}.", "Resume it first.")
        if status.pending_command != command:
            self._insist([("INSERT INTO commands (time_s, command) VALUES (?, ?)", (time.time(), command))])

    # ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def one_commit(self) -> Iterator[None]:
        """What is written inside is on disk afterwards, in one commit: quicker, and readers see all of it or none."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False
        self._write_now()

    def _add(self, statement: Statement) -> None:
        self._pending.append(statement)
        if not self._gathering:
            self._write_now()

    def _write_now(self) -> None:
        if self._thread is None:
            give_up = time.monotonic() + 2.0
            while not self.flush():
                if time.monotonic() > give_up:
                    raise RunError(f"The run's record cannot be written: {self.trouble}", "Free disk space or close what holds the file.")
                time.sleep(0.02)

    def _insist(self, statements: Sequence[Statement]) -> None:
        give_up = time.monotonic() + 2.0
        while True:
            try:
                return self._database.write(statements)
            except DatabaseBusyError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.02)

    def _fetch_commands(self) -> None:
        try:
            sql = "SELECT id, command FROM commands WHERE taken_s IS NULL AND id > ? ORDER BY id"
            rows = self._database.read(sql, (self._last_command,))
        except (DatabaseBusyError, DatabaseDamagedError, sqlite3.Error):
            return  # they are still there next time; a damaged file shows at the next write
        for number, command in rows:
            self._commands.append((number, command))
            self._last_command = number

    def _background(self) -> None:
        beat, abandoned = 0.0, False
        while not self._closing:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            self.flush()
            self._fetch_commands()
            if time.monotonic() - beat >= 1.0:
                self.heartbeat()
                beat = time.monotonic()
            if not abandoned and not self.folder.exists():
                abandoned = True
                log.error("The run's folder %s was moved or deleted: there is nothing left to write to. Stopping.", self.folder)
                self._commands.appendleft((0, "stop_discard"))

    def _repair(self) -> None:
        """Sets a damaged database aside and writes what this process knows into a new one. A live worker does it itself."""
        if self._thread is None and reading.other_worker_lives(self.folder):
            return
        try:
            with FileLock(self.folder / "repair.lock").acquire(2.0):
                if self._database.is_damaged():  # nobody else did it meanwhile
                    self._start_anew(self._database.set_aside())
        except (OSError, DatabaseBusyError) as error:
            log.warning("The damaged record of this run cannot be set aside now: %s", error)

    def _start_anew(self, kept: Path) -> None:
        text = f"The record of this run (curves and events) was damaged. It is kept as {kept.name}; a new one was started."
        log.warning(text)
        self._last_command = 0
        facts = dict(self._facts)
        if "state" not in facts:  # nobody is running it: what is left is the folder with its checkpoints
            hint = "Checkpoints are not touched. Resume goes on from the newest."
            error = Explanation("The run's record was damaged", text, hint, "resume")
            facts["state"] = to_json({"state": RunState.FAILED, "reason": error.title, "since_s": time.time(), "error": error})
        statements: list[Statement] = [("INSERT OR REPLACE INTO facts (key, value) VALUES (?, ?)", item) for item in facts.items()]
        event = to_json({"level": "warning", "text": text})
        statements.append(("INSERT INTO events (time_s, kind, data) VALUES (?, 'notice', ?)", (time.time(), event)))
        self._database.write(statements)


def load_json(path: Path) -> Any:
    """A JSON file of the run folder (data.json, shape.json, run.json); None when it is missing or half-written."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


__all__ = ["RunState", "RunStatus", "RunStore", "load_json"]
