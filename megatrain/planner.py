"""RunConfig + ModelShape + Machine -> Plan, or what would have to change. Pure functions; loads no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatrain import timing
from megatrain.config import RunConfig
from megatrain.errors import PlanError
from megatrain.fitting import Budget, Problem, budget, least, search
from megatrain.hardware import Machine
from megatrain.plan import Kind, Plan, Predicted
from megatrain.precision import PRECISIONS
from megatrain.shape import ModelShape
from megatrain.units import GIB, format_bytes

__all__ = ["Budget", "Suggestion", "budget", "plan", "suggestions"]

SHORTEST_SEQUENCE = 64  # tokens; suggesting less would help nobody


@dataclass(frozen=True)
class Suggestion:
    """One change of the configuration and the plan that it leads to."""

    text: str
    key: str
    value: Any
    plan: Plan


def plan(config: RunConfig, shape: ModelShape, machine: Machine) -> Plan:
    """The preferred plan that fits. PlanError says how much is missing, and its hint the change that makes it fit."""
    problem = Problem.of(config, shape, machine)
    found = search(problem)
    if found is None:
        raise _refusal(problem, _suggest(config, shape, machine, problem))
    return _predicted(problem, found, machine)


def suggestions(config: RunConfig, shape: ModelShape, machine: Machine) -> list[Suggestion]:
    """Changes that would make it fit, best first: those that leave the training as it is, then the others.

    Empty when the configuration fits as it is, or when no single change helps.
    """
    problem = Problem.of(config, shape, machine)
    return [] if search(problem) is not None else _suggest(config, shape, machine, problem)


def _predicted(problem: Problem, found: Plan, machine: Machine) -> Plan:
    sums = problem.ledger(found)
    times = timing.step_times(problem.work, found, machine.device_rates(problem.budget.device))
    return replace(
        found,
        predicted=Predicted(
            vram_bytes=sums.vram_bytes,
            ram_bytes=sums.ram_bytes,
            disk_bytes=sums.disk_bytes,
            vram_parts=sums.vram,
            ram_parts=sums.ram,
            disk_parts=sums.disk,
            step_s=times.step_s,
            tokens_per_s=problem.work.step_tokens / times.step_s,
            bottleneck=times.bottleneck,
        ),
    )


# ---- when nothing fits -----------------------------------------------------------------------------------------------
def _refusal(problem: Problem, helpful: list[Suggestion]) -> PlanError:
    sums, limits = least(problem), problem.budget
    missing, parts = {}, []
    for tier, what, need, may in (
        ("vram", "VRAM", sums.vram_bytes, limits.vram_bytes),
        ("ram", "RAM", sums.ram_bytes, limits.ram_bytes),
        ("disk", "disk space", sums.disk_bytes, limits.disk_bytes),
    ):
        if need > may:
            missing[tier] = lacking = need - may + (limits.disk_debt_bytes if tier == "disk" else 0)
            free = f"; {format_bytes(limits.disk_reserve_bytes)} stay free for a checkpoint and for others" if tier == "disk" else ""
            parts.append(f"it lacks {format_bytes(lacking)} of {what} (needs {format_bytes(need)}, may use {format_bytes(may)}{free})")
    message = f"{problem.work.shape.name} does not fit: " + " and ".join(parts) + "."
    hint = helpful[0].text if helpful else "No single change makes it fit: choose a smaller model, or a machine with more memory."
    return PlanError(message, hint, missing)


@dataclass(frozen=True)
class _Change:
    """One key that could be changed, and to what: values that need ever less."""

    key: str
    text: str  # with the value to be filled in
    values: tuple[Any, ...]
    changes_training: bool = False


def _suggest(config: RunConfig, shape: ModelShape, machine: Machine, problem: Problem) -> list[Suggestion]:
    """For every key the mildest value that alone makes the configuration fit."""
    found = []
    for change in _changes(config, problem, machine):
        others = [Problem.of(_changed(config, change.key, value), shape, machine) for value in change.values]
        if not others or search(others[-1]) is None:
            continue
        value, other, candidate = next(
            (value, other, candidate)
            for value, other in zip(change.values, others, strict=True)
            if (candidate := search(other)) is not None
        )
        text = change.text.format(f"{value:,}" if isinstance(value, int | float) else value)
        found.append((change.changes_training, Suggestion(text, change.key, value, _predicted(other, candidate, machine))))
    found.sort(key=lambda entry: (entry[0], -entry[1].plan.predicted.tokens_per_s))
    return [suggestion for _, suggestion in found]


def _changes(config: RunConfig, problem: Problem, machine: Machine) -> Iterator[_Change]:
    memory, work = config.memory, problem.work
    sums = least(problem)
    for name, key, limit, need in (
        ("VRAM", "vram", memory.vram_limit_gib, sums.vram_bytes),
        ("RAM", "ram", memory.ram_limit_gib, sums.ram_bytes),
        ("disk", "disk", memory.disk_limit_gib, sums.disk_bytes),
    ):
        if limit is not None and need > limit * GIB:
            yield _Change(f"memory.{key}_limit_gib", f"Raise the {name} limit to {{}} GiB.", (-(-need * 10 // GIB) / 10,))
    if not memory.offload_folder and machine.offload_folder:
        yield _Change("memory.offload_folder", "Keep on disk what RAM lacks, in {}.", (machine.offload_folder,))
    for kind in Kind:
        if getattr(memory, kind.value) != "auto":
            yield _Change(f"memory.{kind.value}", f"Let the planner place the {kind.value}.", ("auto",))
    if memory.micro_batch_packs:
        yield _Change("memory.micro_batch_packs", "Let the planner choose the micro-batch.", (None,))
    if memory.group_micro_batches:
        yield _Change("memory.group_micro_batches", "Let the planner choose the group.", (None,))
    else:
        yield _Change("memory.group_micro_batches", "Run {} micro-batch per group.", (1,))
    if work.gradient_bytes > 2:
        yield _Change("gradient_dtype", "Park gradients in {}.", ("bfloat16",), changes_training=True)
    for precision in PRECISIONS.values():
        if precision.weight_bytes < work.precision.weight_bytes:
            yield _Change("precision", "Use the precision {}.", (precision.name,), changes_training=True)
    length, batch = config.data.sequence_length, config.train.global_batch_tokens
    packs = [config.packs_per_step >> halvings for halvings in range(1, config.packs_per_step.bit_length())]
    batches = tuple(count * length for count in packs)
    yield _Change("train.global_batch_tokens", "Lower the global batch to {} tokens.", batches, changes_training=True)
    halves = [length >> halvings for halvings in range(1, length.bit_length())]
    lengths = tuple(half for half in halves if half >= SHORTEST_SEQUENCE and batch % half == 0)
    yield _Change("data.sequence_length", "Lower the sequence length to {} tokens.", lengths, changes_training=True)


def _changed(config: RunConfig, key: str, value: Any) -> RunConfig:
    *path, name = key.split(".")
    if not path:
        return replace(config, **{name: value})
    return replace(config, **{path[0]: replace(getattr(config, path[0]), **{name: value})})
