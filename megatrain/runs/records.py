"""What a run folder's record holds, as plain values: states, rows, and JSON that is valid whatever a number is."""

import dataclasses
import json
import math
import numbers
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatrain.engine.events import Phase
from megatrain.runs.diagnose import Explanation


class RunState(StrEnum):
    """Where a run is in its life. The last two are derived when the run is looked at, never stored."""

    CREATED = "created"
    STARTING = "starting"  # the worker checks, downloads, tokenises, plans, loads
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    CRASHED = "crashed"  # said to be active, but its process is gone
    DAMAGED = "damaged"  # the folder cannot be read as a run


ACTIVE = frozenset({RunState.STARTING, RunState.RUNNING, RunState.PAUSED, RunState.STOPPING})
ENDED = frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED})

# What may follow what. `starting` may follow everything: the supervisor has made sure that no worker lives.
FOLLOWERS = {
    RunState.CREATED: {RunState.FAILED},
    RunState.STARTING: {RunState.RUNNING, RunState.STOPPING} | ENDED,
    RunState.RUNNING: {RunState.PAUSED, RunState.STOPPING} | ENDED,
    RunState.PAUSED: {RunState.RUNNING, RunState.STOPPING} | ENDED,
    RunState.STOPPING: {RunState.PAUSED} | ENDED,  # paused: the disk is full
    RunState.FINISHED: set(),
    RunState.STOPPED: set(),
    RunState.FAILED: set(),
}


def may_follow(before: RunState, after: RunState) -> bool:
    """True when a run in state `before` may go to `after`; a state may always be repeated with another reason."""
    return after == before or after is RunState.STARTING or after in FOLLOWERS[before]


COMMANDS = ("pause", "continue", "stop", "stop_discard", "checkpoint")


@dataclass(frozen=True)
class RunStatus:
    """A run at this moment, as the page and the command line show it."""

    state: RunState
    reason: str = ""
    step: int = 0
    num_steps: int | None = None  # None until data is prepared, when the run is given in epochs
    pid: int | None = None  # of the live worker
    created_s: float | None = None  # Unix times
    started_s: float | None = None  # of the latest start
    heartbeat_s: float | None = None
    ended_s: float | None = None
    since_s: float | None = None  # when this state began
    error: Explanation | None = None  # of a failed, crashed or damaged run, or of one that paused by itself
    pending_command: str | None = None  # sent and not yet taken by the worker
    pending_since_s: float | None = None  # when it was sent
    phase: Phase | None = None  # latest stage that the worker reported
    attempt: int = 0  # grows with every start, after its rows of later steps were cut: readers forget what they cached

    @property
    def is_active(self) -> bool:
        """True while a worker process lives."""
        return self.state in ACTIVE


@dataclass(frozen=True)
class StepRow:
    """One optimizer step. A loss or norm that was not finite is None."""

    id: int
    time_s: float
    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    num_tokens: int
    trained_tokens: int
    step_s: float | None
    tokens_per_s: float | None
    epoch: float | None
    bytes: dict[str, int]
    waits: dict[str, float]


@dataclass(frozen=True)
class TelemetryRow:
    """Readings of one second: key_mean and key_max; a reading that was not available is absent or None."""

    id: int
    time_s: float
    values: dict[str, float | None]


@dataclass(frozen=True)
class EventRow:
    """Something that happened. kind: phase, eval, checkpoint, notice, ended, state, export."""

    id: int
    time_s: float
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint folder. Only a complete one can be resumed from or exported."""

    name: str
    step: int
    path: Path
    num_bytes: int
    time_s: float
    complete: bool
    sequence: int = 0  # counts the checkpoints of a run in the order of saving; the newest has the highest
    checksum: str = ""  # of the manifest, which holds those of all files


@dataclass(frozen=True)
class RunSummary:
    """What the list of runs shows of one run. Losses are None before the first step."""

    last_loss: float | None
    best_loss: float | None
    last_eval_loss: float | None
    tokens_per_s: float | None  # mean of the last 20 steps
    sparkline: tuple[float, ...]  # losses, evenly spaced over the run


def to_json(value: Any) -> str:
    """Valid JSON always: numbers that are not finite become null, paths and unknown objects their text."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def finite(value: float | None) -> float | None:
    """The number, or None where it is missing, NaN or infinite."""
    return None if value is None or not math.isfinite(value) else float(value)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):  # numpy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return finite(float(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
