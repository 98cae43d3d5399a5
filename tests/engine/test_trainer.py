"""The trainer's ends: whatever fails, what was trained is saved, and a checkpoint that fails is not the end."""

import errno
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain import platform
from megatrain.config import RunConfig
from megatrain.costs import GPU_CONTEXT_BYTES
from megatrain.data.batch import PackedBatch
from megatrain.engine import checkpoint, trainer
from megatrain.engine import engine as engine_module
from megatrain.engine.checkpoint import CheckpointWriter
from megatrain.engine.device import Device
from megatrain.engine.engine import Engine
from megatrain.engine.events import CheckpointDone, Ended, EvalDone, Event, Notice, Paused, Phase, StepDone
from megatrain.engine.trainer import Job, Trainer, train
from megatrain.errors import DiskFullError, OutOfVramError, TrainingError
from megatrain.models.compiler import Compiler
from megatrain.plan import Placement, Plan
from megatrain.units import GIB
from tests.families import FAMILIES
from tests.parity import batches

STEPS = 6


class Batches:
    """Random packs; one of them held out."""

    fingerprint = "random"
    packs_per_step = 2

    def step_batch(self, step: int) -> PackedBatch:
        return batches(1, 2, 16, first_seed=step)[0]

    def epoch(self, step: int) -> float:
        return step / 10

    def eval_batches(self, packs: int) -> list[PackedBatch]:
        return batches(1, 1, 16, first_seed=99)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    model = FAMILIES["llama_tied"]()
    model.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(tmp_path / "model")
    raw = RunConfig().to_dict()
    raw["precision"] = "fp32"
    raw["model"] |= {"path": str(tmp_path / "model"), "from_scratch": True}
    raw["data"]["sequence_length"], raw["train"]["global_batch_tokens"] = 16, 32
    raw["checkpoint"] |= {"every_minutes": 0.0, "every_steps": 2, "keep": 9}
    raw["evaluation"]["every_steps"] = 3
    plan = Plan((Placement(),) * (model.num_hidden_layers + 2), micro_batch_packs=1, group_micro_batches=2)
    return Job(RunConfig.from_dict(raw), plan, tmp_path / "model", tmp_path / "run", Batches(), STEPS)


def run(job: Job, between: Callable[[int], None] = lambda step: None, poll: Callable[[list[Event]], str | None] = lambda events: None,
        ) -> list[Event]:  # fmt: skip
    """`between` is called after every step, `poll` gives commands, from what happened so far."""
    events: list[Event] = []

    def report(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepDone):
            between(event.step)

    try:
        train(job, report, lambda: poll(events))
    finally:
        job.events = events  # type: ignore[attr-defined]
    return events


def saved(job: Job) -> list[int]:
    found = checkpoint.complete(job.run_folder / "checkpoints")
    assert all(checkpoint.verify(reader.path) == [] for reader in found)
    return [reader.step for reader in found]


def test_the_held_out_loss_is_measured_before_the_first_step_and_at_the_end(job: Job) -> None:
    events = run(job)
    assert [event.step for event in events if isinstance(event, EvalDone)] == [0, 3, 6]
    assert saved(job) == [2, 4, 6]


def test_the_first_step_compiles_whatever_comes_before_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Compiler", lambda enabled: Compiler(enabled, backend="eager"))
    events = run(replace(job, config=replace(job.config, kernels="compiled")))
    told = [event.name if isinstance(event, Phase) else "step" for event in events if isinstance(event, Phase | StepDone)]
    told = told[told.index("compile") :]
    assert told[:5] == ["compile", "evaluate", "compile", "step", "step"]
    assert "train" in told
    assert "compile" not in told[5:]


def test_a_limit_on_vram_is_the_allocators_too(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    class Limited(Device):
        def limit_memory(self, num_bytes: int) -> None:
            limits.append(num_bytes)

    monkeypatch.setattr(trainer, "make_device", lambda name: Limited())
    run(job)
    assert limits == []
    memory = replace(job.config.memory, vram_limit_gib=6.0)
    run(replace(job, run_folder=job.run_folder / "limited", config=replace(job.config, memory=memory)))
    assert limits == [6 * GIB - GPU_CONTEXT_BYTES]


def test_memory_that_plain_operations_lack_is_told_with_what_the_compiler_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_step(self: Engine, batch: PackedBatch, step: int) -> tuple[float, float]:
        self.compiler.problem = "RuntimeError: no compiler here"
        raise OutOfVramError("No VRAM for logits", "Lower the VRAM limit of the plan.")

    with pytest.raises(OutOfVramError):
        run(job, poll=lambda events: monkeypatch.setattr(Engine, "train_step", train_step))
    assert ["no compiler here" in event.text for event in job.events if isinstance(event, Notice)] == [True]  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("of the driver"), TrainingError("a bad sector")])
def test_a_failing_evaluation_at_the_end_costs_no_step(job: Job, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.evaluate

    def evaluate(self: Engine, data: list[PackedBatch]) -> tuple[float, int]:
        if armed:
            raise error
        return real(self, data)

    armed: list[int] = []
    monkeypatch.setattr(Engine, "evaluate", evaluate)
    with pytest.raises(type(error)):
        run(job, lambda step: armed.append(step) if step == STEPS else None)
    assert saved(job)[-1] == STEPS


def test_a_checkpoint_that_fails_is_tried_again_and_training_goes_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = checkpoint._write_block, []

    def write(*arguments: object) -> object:
        if not failures:
            failures.append(arguments)
            raise DiskFullError("No space is left.", "Free disk space.")
        return real(*arguments)

    monkeypatch.setattr(checkpoint, "_write_block", write)
    monkeypatch.setattr(trainer, "_RETRY_S", 0.0)
    events = run(job)
    assert failures
    assert [event.step for event in events if isinstance(event, StepDone)] == list(range(1, STEPS + 1))
    assert any("No space is left" in event.text for event in events if isinstance(event, Notice))
    assert saved(job)[-1] == STEPS
    assert len([event for event in events if isinstance(event, CheckpointDone)]) == len(saved(job))


def test_a_checkpoint_that_failed_unseen_does_not_cost_the_last_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails when the last step is over: nobody has looked at it before the last checkpoint is due."""
    real_write, real_wait = checkpoint._write_block, CheckpointWriter.wait
    may_fail, trained = threading.Event(), []

    def write(folder: Path, *arguments: object) -> object:
        if folder.name.endswith("00000004"):
            assert may_fail.wait(60)
            raise DiskFullError("No space is left.", "Free disk space.")
        return real_write(folder, *arguments)

    def wait(writer: CheckpointWriter) -> CheckpointDone | None:
        if trained:
            may_fail.set()
        return real_wait(writer)

    monkeypatch.setattr(checkpoint, "_write_block", write)
    monkeypatch.setattr(CheckpointWriter, "wait", wait)
    monkeypatch.setattr(Batches, "eval_batches", lambda *_: [])  # an evaluation needs the blocks that the writer holds
    job.num_steps = 5
    events = run(job, lambda step: trained.append(step) if step == 5 else None)
    assert any("No space is left" in event.text for event in events if isinstance(event, Notice))
    assert saved(job) == [2, 5]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, the system has no space for what is written of a checkpoint."""
    full, real = threading.Event(), platform._system_write_at

    def write(*arguments: object) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(platform, "_system_write_at", write)
    monkeypatch.setattr(trainer, "_PAUSE_POLL_S", 0.0)
    return full


def pauses(events: list[Event]) -> list[Paused]:
    return [event for event in events if isinstance(event, Paused)]


def last_states(job: Job) -> dict[str, bytes]:
    newest = checkpoint.complete(job.run_folder / "checkpoints")[-1].path
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


@pytest.mark.parametrize("answer", ["continue", "stop", "checkpoint"])
@pytest.mark.parametrize(("last", "ended"), [(STEPS, "finished"), (3, "stopped")])
def test_a_full_disk_at_the_last_checkpoint_pauses_the_run_and_loses_nothing(
    job: Job, last: int, ended: str, answer: str, full_disk: threading.Event, tmp_path: Path
) -> None:
    job.config = replace(job.config, checkpoint=replace(job.config.checkpoint, every_steps=0))

    def stop_at_last(events: list[Event]) -> str | None:
        return "stop" if any(isinstance(event, StepDone) and event.step == last < STEPS for event in events) else None

    def poll(events: list[Event]) -> str | None:
        if len(pauses(events)) == 2:
            full_disk.clear()
        return answer if pauses(events) else stop_at_last(events)

    events = run(job, lambda step: full_disk.set() if step == last else None, poll)
    assert [(pause.step, "No space is left" in pause.text) for pause in pauses(events)] == [(last, True)] * 2
    assert events[-1] == Ended(ended, last)
    assert saved(job) == [last]
    untroubled = replace(job, run_folder=tmp_path / "other")
    run(untroubled, poll=stop_at_last)
    assert last_states(job) == last_states(untroubled)


def test_a_run_that_a_full_disk_paused_can_be_ended_without_saving(job: Job, full_disk: threading.Event) -> None:
    events = run(job, lambda step: full_disk.set() if step == STEPS else None, lambda events: "stop_discard" if pauses(events) else None)
    assert events[-1] == Ended("stopped", STEPS)
    assert STEPS not in saved(job)


def test_the_last_of_the_regular_checkpoints_waits_for_space_too(
    job: Job, full_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checkpoint at the end, one that is still being written then, and fails, is not lost either."""
    job.config = replace(job.config, checkpoint=replace(job.config.checkpoint, every_steps=5, at_end=False))
    monkeypatch.setattr(Trainer, "_look_after_writer", lambda self, wait=False: None)  # nobody looks before the end

    def poll(events: list[Event]) -> str | None:
        if pauses(events):
            full_disk.clear()
            return "continue"
        return None

    events = run(job, lambda step: full_disk.set() if step == 5 else None, poll)
    assert len(pauses(events)) == 1
    assert saved(job) == [STEPS]


def test_a_folder_of_checkpoints_that_was_deleted_is_made_again(job: Job) -> None:
    run(job, lambda step: shutil.rmtree(job.run_folder / "checkpoints") if step == 5 else None)
    assert saved(job)[-1] == STEPS
