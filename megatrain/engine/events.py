"""What the trainer reports, through one callback. Plain values; no torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Phase:
    """A stage of the run has begun or moved on: check | load | plan | train | evaluate | save.

    `done` of `total` in `unit`; total 0 means that it cannot be known.
    """

    name: str
    done: float = 0
    total: float = 0
    unit: str = ""


@dataclass(frozen=True)
class StepDone:
    """One optimizer step is computed; its update is decided. `step` counts from 1."""

    step: int
    loss: float  # mean over the step's trained tokens, nats
    grad_norm: float  # global 2-norm before clipping
    learning_rate: float
    num_tokens: int  # real tokens, padding excluded
    trained_tokens: int
    step_s: float
    epoch: float
    bytes_moved: dict[str, int] = field(default_factory=dict)  # h2d, d2h, disk_read, disk_write in this step
    waits_s: dict[str, float] = field(default_factory=dict)  # host time spent waiting, by reason (optimizer, ring, writer, data)


@dataclass(frozen=True)
class EvalDone:
    """Held-out loss of the weights after `step` updates."""

    step: int
    loss: float  # mean over trained tokens, nats
    trained_tokens: int
    duration_s: float


@dataclass(frozen=True)
class CheckpointDone:
    """A checkpoint is complete and verified on disk."""

    step: int
    path: str
    num_bytes: int
    duration_s: float
    removed: tuple[str, ...] = ()  # checkpoints that retention deleted


@dataclass(frozen=True)
class Notice:
    """Something a person should know. level: info | warning."""

    level: str
    text: str


@dataclass(frozen=True)
class Paused:
    """The trainer waits for a command, its state in memory: the disk is full, and the last checkpoint does not fit."""

    step: int
    text: str  # what is missing where


@dataclass(frozen=True)
class Ended:
    """Training is over. reason: finished | stopped."""

    reason: str
    step: int


Event = Phase | StepDone | EvalDone | CheckpointDone | Notice | Paused | Ended
