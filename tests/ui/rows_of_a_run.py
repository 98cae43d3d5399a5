"""RunRows made in memory, for tests of what is computed from them."""

import time
from collections.abc import Sequence
from typing import Any

from megatrain.config import RunConfig
from megatrain.engine.events import Phase
from megatrain.plan import Predicted
from megatrain.runs.records import RunState, RunStatus
from ui.feed import STEP_COLUMNS, TELEMETRY_COLUMNS, RunRows
from ui.rows import Table

START = time.mktime((2026, 12, 1, 12, 0, 0, 0, 0, -1))


def run_rows(
    num_rows: int = 0,
    step_s: float = 2.0,
    state: RunState = RunState.RUNNING,
    num_steps: int | None = 1000,
    losses: Sequence[float | None] | None = None,
    events: Sequence[dict[str, Any]] = (),
    phase: Phase | None = None,
    phases: dict[str, dict[str, Any]] | None = None,
    predicted: Predicted | None = None,
    has_gpu: bool = False,
    telemetry: Sequence[dict[str, float]] = (),
    disk: tuple[float, float] = (0.0, 0.0),
    **status: Any,
) -> RunRows:
    """`num_rows` steps of `step_s` from START on."""
    steps, readings = Table(STEP_COLUMNS), Table(TELEMETRY_COLUMNS)
    for index in range(num_rows):
        loss = losses[index] if losses is not None else 2.0 - index / max(num_rows, 1)
        cells = {"time_s": START + (index + 1) * step_s, "step": index + 1, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-5,
                 "step_s": step_s, "tokens_per_s": 1000.0, "h2d": 4e9, "d2h": 2e9,
                 "disk_read": disk[0], "disk_write": disk[1]}  # fmt: skip
        steps.append([cells])
    readings.append(telemetry)
    said = RunStatus(state=state, num_steps=num_steps, phase=phase, **{"step": num_rows, **status})
    return RunRows("a-run", "A run", said, RunConfig(), predicted, has_gpu, steps, readings, events, phases or {}, "seen")
