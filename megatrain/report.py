"""Plans, runs and exports as lines of text, for the command line."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from megatrain import costs
from megatrain.config import RunConfig
from megatrain.engine.events import Phase
from megatrain.errors import MegaTrainError, RunError
from megatrain.export import ExportReport
from megatrain.hardware import CPU, Machine
from megatrain.plan import Kind, Placement, Plan, Tier
from megatrain.planner import Budget, Suggestion
from megatrain.precision import precision_named
from megatrain.runs.reading import newest_checkpoint
from megatrain.runs.records import EventRow, RunState, RunStatus, StepRow
from megatrain.runs.store import RunStore
from megatrain.runs.supervisor import force_quit
from megatrain.shape import ModelShape
from megatrain.units import format_bytes, format_count, format_duration, three_digits

POLL_S = 0.5
STEP_LINE_S = 1.0  # at most one line of steps in this time
RECENT_STEPS = 100  # the time left follows from the mean of these


# ---- plans -----------------------------------------------------------------------------------------------------------
def plan_lines(config: RunConfig, shape: ModelShape, machine: Machine, plan: Plan, limits: Budget) -> list[str]:
    """A plan that fits: where everything lives, what it takes of what may be used, how fast it should be."""
    predicted, precision = plan.predicted, precision_named(config.precision)
    gpu = machine.gpu(plan.device)
    device = f"{plan.device} ({gpu.name})" if gpu else f"the CPU ({machine.cpu_name})"
    count = -(-config.packs_per_step // plan.micro_batch_packs)
    tokens = plan.micro_batch_packs * config.data.sequence_length
    cut = f"{config.train.global_batch_tokens:,} tokens in {_many(count, 'micro-batch')} of up to {tokens:,}"
    if plan.group_micro_batches < count:
        cut += f", {plan.group_micro_batches} in a group"
    lines = [
        f"{shape.name}: {format_count(shape.num_params)} parameters in {config.precision} on {device}. It fits.",
        f"  step   {cut}",
        f"  speed  about {format_duration(predicted.step_s) if predicted.step_s >= 10 else three_digits(predicted.step_s) + ' s'} a step,"
        f" {predicted.tokens_per_s:,.0f} tokens/s; limited by {predicted.bottleneck} (estimate{_measured(machine, plan)})",
    ]
    if gpu:
        lines.append(f"  VRAM   {_use(predicted.vram_bytes, limits.vram_bytes, predicted.vram_parts)}")
    lines.append(f"  RAM    {_use(predicted.ram_bytes, limits.ram_bytes, predicted.ram_parts)}")
    if predicted.disk_bytes:
        lines.append(f"  NVMe   {_use(predicted.disk_bytes, limits.disk_bytes, predicted.disk_parts)}, in {config.memory.offload_folder}")
    lines += [f"  {line}" for line in _where(shape, plan)]
    one = costs.checkpoint_bytes(shape, precision)
    all_of_them = (config.checkpoint.keep + 1) * one  # the oldest goes when the newest is safe
    free = machine.disk_free_bytes
    short = "" if all_of_them <= free else " WARNING: not enough"
    lines.append(f"  disk   {format_bytes(one)} a checkpoint, up to {format_bytes(all_of_them)} of {format_bytes(free)} free{short}")
    return lines


def suggestion_lines(suggestions: Sequence[Suggestion]) -> list[str]:
    """Changes that make it fit, with the speed each leads to; empty when there are none."""
    if not suggestions:
        return []
    return ["Any of these makes it fit:"] + [
        f"  {item.text} ({item.key}: {item.value}; about {item.plan.predicted.tokens_per_s:,.0f} tokens/s)" for item in suggestions
    ]


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}es"


def _measured(machine: Machine, plan: Plan) -> str:
    return " from measured rates" if machine.device_rates(plan.device).measured else ""


def _use(used: int, limit: int, parts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return f"{format_bytes(used)} of {format_bytes(limit)} that may be used: {shown}"


def _where(shape: ModelShape, plan: Plan) -> Iterator[str]:
    """One line for each stretch of blocks that are placed alike."""
    if plan.device == CPU and all(placement.tier(kind) is Tier.VRAM for _, placement in plan.placement_runs for kind in Kind):
        yield "where  everything in RAM, updated in place"
        return
    pairs = zip(shape.blocks, plan.placements, strict=True)
    for number, (placement, group) in enumerate(groupby(pairs, key=lambda pair: pair[1])):
        names = [block.name for block, _ in group]
        stretch = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        yield f"{'' if number else 'where':6} {stretch}: {_tiers(placement)}"


def _tiers(placement: Placement) -> str:
    by_tier: dict[Tier, list[str]] = {}
    for kind in Kind:
        by_tier.setdefault(placement.tier(kind), []).append(kind.value)
    if len(by_tier) == 1:
        return f"all in {next(iter(by_tier)).upper()}"
    return "; ".join(f"{', '.join(kinds)} in {tier.upper()}" for tier, kinds in by_tier.items())


# ---- runs ------------------------------------------------------------------------------------------------------------
def follow(store: RunStore, say: Callable[[str], None]) -> bool:
    """Say what happens in a run until its worker ends; False when it had to end without saving.

    Ctrl+C (or a request to end) stops and saves, a second one says what that waits for, a third one ends the worker at once.
    """
    watch = _Watch(store, say)
    with _interrupts() as interrupts:
        asked, forced = 0, False
        while True:
            status = watch.look()
            if not status.is_active and status.state is not RunState.CREATED:
                say(status.reason or f"{status.state.capitalize()}.")
                return not forced
            if interrupts.wait(POLL_S):
                interrupts.clear()
                asked += 1
                with contextlib.suppress(RunError):  # it has just ended
                    forced |= _interrupt(store, asked, say)


def _interrupt(store: RunStore, asked: int, say: Callable[[str], None]) -> bool:
    """What the first, second and third Ctrl+C do; True when the worker was ended."""
    if asked > 2:
        force_quit(store)
        return True
    status = store.state()
    waits = status.state is RunState.PAUSED and status.error is not None  # for space on the disk
    if asked > 1:
        newest = newest_checkpoint(store.checkpoints())
        say(still_busy(status, newest.step if newest else None))
    elif status.state is RunState.STARTING:
        say("Stopping.")
    else:
        say("Trying to save again." if waits else "Stopping after this step, then saving.")
    if asked == 1 or waits:
        store.send_command("stop")
    return False


def still_busy(status: RunStatus, saved_step: int | None) -> str:
    """What a run that was told to stop is doing, and what is lost when it is ended now. `saved_step`: its newest checkpoint's."""
    phase = status.phase.name if status.phase else ""
    if status.state is RunState.STARTING:
        return f"Still ending: {phase or 'start'}. Ctrl+C once more ends the run at once; nothing is trained yet."
    if saved_step == status.step:
        return f"Still ending. Ctrl+C once more ends the run at once; its state after step {saved_step} is saved."
    doing = f"Still saving the state after step {status.step}." if phase == "save" else f"Still at step {status.step + 1}, then it saves."
    if status.state is RunState.PAUSED:
        doing = "Trying to save again."
    lost = "all that it has trained" if saved_step is None else f"what it trained after step {saved_step}"
    return f"{doing} Ctrl+C once more ends the run at once, without saving: {lost} is lost."


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl+C and requests to end set an event while inside."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM") if hasattr(signal, name)]
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Watch:
    """What of a run was said already."""

    def __init__(self, store: RunStore, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        steps, events = store.steps(), store.events()
        state = store.state()
        began = state.started_s or 0.0  # a resumed run has a past that need not be told again
        self._last_step = max((row.id for row in steps if row.time_s < began), default=0)
        self._last_event = max((row.id for row in events if row.time_s < began), default=0)
        self._phase = ""
        self._recent: list[float] = []
        self._said_s = 0.0
        self._unsaid: StepRow | None = None

    def look(self) -> RunStatus:
        """Say what is new; returns the state as it was before looking, so that nothing of an ended run is missed."""
        status = self._store.state()
        self._say_phase(status.phase)
        for row in self._store.steps(self._last_step):
            self._last_step, self._unsaid = row.id, row
            self._recent = [*self._recent, row.step_s or 0.0][-RECENT_STEPS:]
        if self._unsaid and (time.monotonic() - self._said_s >= STEP_LINE_S or not status.is_active):
            self._say(step_line(self._unsaid, status.num_steps, sum(self._recent) / len(self._recent)))
            self._said_s, self._unsaid = time.monotonic(), None
        for event in self._store.events(self._last_event):
            self._last_event = event.id
            line = event_line(event)
            if line:
                self._say(line)
        return status

    def _say_phase(self, phase: Phase | None) -> None:
        line = phase_line(phase) if phase and phase.name not in ("train", "evaluate") else ""
        if line and line != self._phase:
            self._say(line)
        self._phase = line or self._phase


def phase_line(phase: Phase) -> str:
    """`tokenise 40 %`, in steps of ten so that lines stay few."""
    if not phase.total:
        return f"{phase.name} …"
    return f"{phase.name} {int(phase.done / phase.total * 10) * 10} %"


def step_line(row: StepRow, num_steps: int | None, mean_step_s: float) -> str:
    """One training step in one line. A value that was not a number is shown as such."""
    of = f"/{num_steps}" if num_steps else ""
    left = f", {format_duration((num_steps - row.step) * mean_step_s)} left" if num_steps and num_steps > row.step else ""
    loss, norm, rate = (_shown(value, form) for value, form in ((row.loss, ".4f"), (row.grad_norm, ".3g"), (row.learning_rate, ".3g")))
    speed = _shown(row.tokens_per_s, ",.0f")
    return f"step {row.step}{of}  loss {loss}  norm {norm}  learning rate {rate}  {speed} tokens/s{left}"


def _shown(value: float | None, form: str) -> str:
    return "not a number" if value is None else format(value, form)


def event_line(event: EventRow) -> str:
    """An event in one line; empty for those that other lines tell already."""
    data: dict[str, Any] = event.data
    if event.kind == "eval":
        return f"held-out loss after step {data['step']}: {_shown(data.get('loss'), '.4f')}"
    if event.kind == "checkpoint":
        size, duration = format_bytes(data["num_bytes"]), format_duration(data["duration_s"])
        return f"checkpoint of step {data['step']} saved ({size} in {duration}): {data['path']}"
    if event.kind == "notice":
        return f"{data.get('level', 'info')}: {data.get('text', '')}"
    return ""


# ---- exports ---------------------------------------------------------------------------------------------------------
def export_lines(written: ExportReport) -> list[str]:
    """What was written, and how it was checked."""
    lines = [f"Exported to {written.path}: {format_bytes(written.num_bytes)} in {format_duration(written.duration_s)}."]
    if written.loaded:
        lines.append("transformers loaded it.")
    if written.answer:
        lines.append(f"It answered: {written.answer[:200]}{' (and ended by itself)' if written.ends_itself else ''}")
    return lines + list(written.notices)


class ExportProgress:
    """Says how far an export is, and records it as events of its run, so that the page shows it too."""

    def __init__(self, store: RunStore, checkpoint: str, target: Path, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self._fixed = {"checkpoint": checkpoint, "target": str(target)}
        self._line = ""

    def __call__(self, phase: Phase) -> None:
        line = phase_line(phase)
        if line != self._line:
            self._line = line
            self._say(line)
            self._log("running", done=phase.done, total=phase.total)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """A failure inside is recorded, then raised on."""
        try:
            yield
        except (MegaTrainError, OSError, MemoryError) as error:
            self._log("failed", text=str(error))
            raise

    def finished(self, written: ExportReport) -> None:
        self._log("finished", text=" ".join(export_lines(written)))

    def _log(self, state: str, **details: Any) -> None:
        with contextlib.suppress(RunError):  # a copy that cannot be written can be exported all the same
            self._store.log_event("export", {"state": state, **self._fixed, **details})
