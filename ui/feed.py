"""The rows of each run, read once from its store and kept: a poll costs only what is new.

This is a cache of what the run folder says, shared by all tabs; it holds nothing that a restart of the server would lose.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from megatrain.config import RunConfig
from megatrain.errors import ConfigError
from megatrain.plan import Plan, Predicted
from megatrain.runs.records import EventRow, RunState, RunStatus, StepRow, TelemetryRow
from megatrain.runs.store import RunStore
from megatrain.runs.supervisor import find_run, list_runs
from ui.rows import Table

STEP_COLUMNS = ("time_s", "step", "loss", "grad_norm", "learning_rate", "num_tokens", "trained_tokens", "step_s", "tokens_per_s", "epoch",
                "h2d", "d2h", "disk_read", "disk_write")  # fmt: skip
READINGS = ("gpu0_vram_used_bytes", "gpu0_vram_total_bytes", "gpu0_utilization", "gpu0_pcie_up_bytes_per_s", "gpu0_pcie_down_bytes_per_s",
            "gpu0_power_w", "gpu0_temperature_c", "process_vram_bytes", "ram_used_bytes", "worker_ram_bytes")  # fmt: skip
TELEMETRY_COLUMNS = ("time_s", *(f"{name}_{kind}" for name in READINGS for kind in ("mean", "max")))
PAGE_ROWS = 20_000  # rows read at once
LOG_BYTES = 262_144  # of the log in one reply

T = TypeVar("T")


@dataclass(frozen=True)
class RunRows:
    """All that is known of one run at one moment. Events are dicts: `kind`, `time_s` and the event's own fields."""

    run_id: str
    name: str
    status: RunStatus
    config: RunConfig | None
    predicted: Predicted | None
    has_gpu: bool
    steps: Table
    telemetry: Table
    events: Sequence[dict[str, Any]]
    phases: dict[str, dict[str, Any]]  # latest report of each stage since the latest start
    seen: str  # equal as long as no row came


class RunFeed:
    """One run. Methods may be called from any thread."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._plan = _File(store.folder / "plan.json", _plan)
        self._config = _File(store.folder / "config.yaml", _config)
        self._lock = threading.Lock()
        self._forget(attempt=0)

    def rows(self) -> RunRows:
        """Reads what is new, and returns everything."""
        with self._lock:
            status = self.store.state()
            if status.attempt != self._attempt:  # rows may have been cut when the run went on from a checkpoint
                self._forget(status.attempt)
            if status.state is not RunState.DAMAGED:
                self._read_new()
            plan = self._plan.read()
            seen = f"{status.attempt}-{'-'.join(map(str, self._last))}"
            return RunRows(
                self.store.run_id, self.name(), status, self._config.read(), plan.predicted if plan else None,
                self._has_gpu(plan), self._steps, self._telemetry, tuple(self._events), dict(self._phases), seen,
            )  # fmt: skip

    def config(self) -> RunConfig | None:
        """The run's configuration; None while its file is missing or does not parse."""
        return self._config.read()

    def name(self) -> str:
        """The name that the user gave, else the run's id."""
        config = self._config.read()
        return (config.name if config else "") or self.store.run_id

    def num_checkpoints(self) -> int:
        """Checkpoints that can be resumed from."""
        return sum(checkpoint.complete for checkpoint in self.store.checkpoints())

    def log(self, offset: int) -> dict[str, Any]:
        """Whole lines of worker.log from byte `offset` on; a negative offset, or one past the end, starts near the end."""
        path = self.store.folder / "worker.log"
        if not path.exists():
            return {"offset": -1, "restart": True, "text": ""}
        size = path.stat().st_size
        restart = offset < 0 or offset > size or size - offset > LOG_BYTES
        start = max(0, size - LOG_BYTES) if restart else offset
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(LOG_BYTES)
        end = data.rfind(b"\n") + 1 or (LOG_BYTES if len(data) == LOG_BYTES else 0)  # a line that never ends is cut
        begin = data.find(b"\n") + 1 if restart and start > 0 else 0
        return {"offset": start + end, "restart": restart, "text": data[begin:end].decode("utf-8", "replace")}

    def _forget(self, attempt: int) -> None:
        self._attempt = attempt
        self._steps, self._telemetry = Table(STEP_COLUMNS), Table(TELEMETRY_COLUMNS)
        self._events: list[dict[str, Any]] = []
        self._phases: dict[str, dict[str, Any]] = {}
        self._last = [0, 0, 0]  # ids of the newest step, reading and event

    def _read_new(self) -> None:
        while steps := self.store.steps(self._last[0], PAGE_ROWS):
            self._steps.append(map(_step_cells, steps))
            self._last[0] = steps[-1].id
        while readings := self.store.telemetry(self._last[1], PAGE_ROWS):
            self._telemetry.append(map(_reading_cells, readings))
            self._last[1] = readings[-1].id
        while events := self.store.events(self._last[2], PAGE_ROWS):
            for event in events:
                self._take(event)
            self._last[2] = events[-1].id

    def _take(self, row: EventRow) -> None:
        event = {**row.data, "kind": row.kind, "time_s": row.time_s}
        if row.kind == "phase":
            self._phases[str(event.get("name"))] = event
            return
        if row.kind == "state" and event.get("state") == "starting":
            self._phases.clear()
        self._events.append(event)

    def _has_gpu(self, plan: Plan | None) -> bool:
        if plan is not None:
            return plan.device != "cpu"
        return bool(np.isfinite(self._telemetry["gpu0_vram_used_bytes_max"]).any())


class Feeds:
    """The feeds of a workspace, by run. Runs that were deleted are forgotten."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self._feeds: dict[tuple[str, int], RunFeed] = {}
        self._live: RunStore | None = None  # the run that was live at the last look
        self._lock = threading.Lock()

    def of(self, run_id: str) -> RunFeed:
        """The feed of a run; RunError when there is no such run."""
        store = find_run(self.workspace, run_id)
        key = run_id, store.folder.stat().st_ino  # a folder that was replaced is another run
        with self._lock:
            if key not in self._feeds:
                self._feeds = {known: feed for known, feed in self._feeds.items() if feed.store.folder.is_dir() and known[0] != run_id}
                self._feeds[key] = RunFeed(store)
            return self._feeds[key]

    def newest(self) -> str:
        """Id of the live run, else of the newest one, else empty."""
        if self._live is not None and self._live.folder.is_dir() and self._live.is_live():
            return self._live.run_id  # asked every second: looking at all runs would cost as much as there are runs
        stores = list_runs(self.workspace)
        self._live = next((store for store in stores if store.is_live()), None)
        return self._live.run_id if self._live else stores[0].run_id if stores else ""


def _step_cells(row: StepRow) -> dict[str, float | None]:
    cells = {name: getattr(row, name) for name in STEP_COLUMNS[:10]}
    return cells | {name: row.bytes.get(name) for name in STEP_COLUMNS[10:]}


def _reading_cells(row: TelemetryRow) -> dict[str, float | None]:
    return {**row.values, "time_s": row.time_s}


class _File(Generic[T]):
    """A file that is parsed again only when it changed."""

    def __init__(self, path: Path, parse: Callable[[str], T | None]) -> None:
        self.path, self.parse = path, parse
        self._stamp: tuple[int, int] | None = None
        self._value: T | None = None

    def read(self) -> T | None:
        """None while the file is missing or does not parse."""
        try:
            stat = self.path.stat()
            if (stat.st_mtime_ns, stat.st_size) != self._stamp:
                self._value = self.parse(self.path.read_text("utf-8"))
                self._stamp = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            self._stamp, self._value = None, None
        return self._value


def _plan(content: str) -> Plan | None:
    try:
        return Plan.from_json(content)
    except (ValueError, KeyError, TypeError):  # half-written: asked again when the file has changed
        return None


def _config(content: str) -> RunConfig | None:
    try:
        return RunConfig.from_yaml(content)
    except ConfigError:
        return None
