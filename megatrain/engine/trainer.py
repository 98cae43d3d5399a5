"""READ FIRST: the training loop as a table of contents.

    check     a small copy of the model is streamed and compared with autograd
    load      weights into their homes
    train     step after step: batch -> forward and backward -> decide the update -> report
    evaluate  on finished weights, between steps
    save      beside training, from finished states

The update decided in one step is carried out in the next step's forward pass, block by block; whatever else reads weights
finishes it first. Events leave through one callback; commands come in through another, asked between steps.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatrain.config import RunConfig
from megatrain.costs import GPU_CONTEXT_BYTES
from megatrain.data.batch import PackedBatch
from megatrain.engine import adamw_cpu, checkpoint
from megatrain.engine.adamw import Update
from megatrain.engine.device import HOST, Device, make_device
from megatrain.engine.engine import Engine, gradient_dtype
from megatrain.engine.events import Ended, EvalDone, Event, Notice, Paused, Phase, StepDone
from megatrain.engine.schedules import learning_rate
from megatrain.errors import CheckpointError, DiskFullError, MegaTrainError, NonFiniteError
from megatrain.models.blocks import layout_record
from megatrain.models.check import self_check
from megatrain.models.initial import initial_tensors
from megatrain.models.inspect import read_config
from megatrain.models.meta import build_meta_model
from megatrain.models.skeleton import Skeleton
from megatrain.models.weights import WeightSource
from megatrain.plan import Placement, Plan, Tier
from megatrain.platform import can_compile
from megatrain.precision import precision_named
from megatrain.units import GIB

_PAUSE_POLL_S = 0.2
_RETRY_S = 60.0


class Batches(Protocol):
    """What the trainer needs of a data loader (megatrain.data.loader.Loader)."""

    fingerprint: str
    packs_per_step: int

    def step_batch(self, step: int) -> PackedBatch: ...
    def epoch(self, step: int) -> float: ...
    def eval_batches(self, packs: int) -> list[PackedBatch]: ...


@dataclass
class Job:
    """Everything that one training run is made from."""

    config: RunConfig
    plan: Plan
    model_folder: Path
    run_folder: Path
    loader: Batches
    num_steps: int
    resume_from: Path | None = None  # a checkpoint folder


def train(job: Job, report: Callable[[Event], None], poll: Callable[[], str | None]) -> Ended:
    """Train until the last step or a command to stop.

    Raises a MegaTrainError (NonFiniteError, OutOfVramError, DiskFullError, ...) when it cannot go on; the state of the
    last whole step is saved first if that is possible.
    """
    trainer = Trainer(job, report, poll)
    try:
        return trainer.run()
    finally:
        trainer.close()


def streamed_gradients(
    skeleton: Skeleton, weights: Mapping[str, torch.Tensor], batch: PackedBatch
) -> tuple[float, Mapping[str, torch.Tensor]]:
    """Loss and gradients of one step of the engine in fp32 on the CPU, every state streamed: what the self-check compares."""
    placements = tuple(Placement() for _ in skeleton.layouts)
    plan = Plan(placements, micro_batch_packs=2, group_micro_batches=2, inputs_tier=Tier.RAM)
    engine = Engine(skeleton, plan, precision_named("fp32"), torch.float32, Device(), batch.num_packs, batch.input_ids.shape[1])
    engine.load_weights(lambda names: {name: weights[name] for name in names})
    loss, _ = engine.train_step(batch, 0)
    return loss, engine.parked_gradients()


class Trainer:
    """One run of one job. `step` counts finished decisions: the next step to compute."""

    def __init__(self, job: Job, report: Callable[[Event], None], poll: Callable[[], str | None]) -> None:
        self.job = job
        self.config = job.config
        self.report = report
        self.poll = poll
        self.step = self._first_step = 0
        self._precision = precision_named(self.config.precision)
        self._engine: Engine | None = None
        self._writer: checkpoint.CheckpointWriter | None = None
        self._saved_step = -1
        self._saved_time = time.monotonic()
        self._retry_time: float | None = None  # when a checkpoint that failed is tried again
        self._evaluated_step = -1

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the engine is not set up yet")
        return self._engine

    def run(self) -> Ended:
        self._set_up()
        try:
            reason = self._loop()
            if reason != "stopped without saving":
                self._evaluate(due=reason == "finished")
        except Exception:  # whatever it was: what was trained so far is worth saving
            self._report_compiler()  # plain operations may lack memory
            self._save_what_can_be_saved()
            raise
        if reason != "stopped without saving":
            reason = self._save_last(reason)
        self._report_saved()
        ended = Ended("finished" if reason == "finished" else "stopped", self.step)
        self.report(ended)
        return ended

    def close(self) -> None:
        """Release device and host memory, when nobody reads them any more."""
        if self._writer is not None:
            self._writer.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    # -- before the first step

    def _set_up(self) -> None:
        config, job = self.config, self.job
        torch.set_flush_denormal(True)  # moments of rows that are not hit again become denormal: ten times slower
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.allow_tf32
        torch.use_deterministic_algorithms(config.deterministic)
        model_config = read_config(job.model_folder)
        self.report(Phase("check"))
        skeleton = Skeleton(model_config, getattr(torch, self._precision.compute_dtype))
        if getattr(model_config, "output_router_logits", False):
            self.report(Notice("warning", "The router's auxiliary loss is not part of this training; it was switched off."))
        notice = self_check(model_config, [layout.kind for layout in skeleton.layouts[1:-1]], streamed_gradients)
        if notice:
            self.report(Notice("warning", notice))
        self.report(Phase("load", 0, len(skeleton.layouts), "blocks"))
        parked = gradient_dtype(config, self._precision)
        device = make_device(job.plan.device)
        if device.torch_device.type == "cuda":
            device.launch(HOST, adamw_cpu.prepare)  # beside the loading of weights
        if config.memory.vram_limit_gib:
            device.limit_memory(max(0, int(config.memory.vram_limit_gib * GIB) - GPU_CONTEXT_BYTES))
        packs, length = config.packs_per_step, config.data.sequence_length
        offload = Path(config.memory.offload_folder).expanduser() if config.memory.offload_folder else None
        compiled = config.compiles(device.torch_device.type == "cuda", can_compile())
        seed = config.train.seed
        self._engine = Engine(skeleton, job.plan, self._precision, parked, device, packs, length, seed, offload, compiled)
        if self.engine.store.pinned.refusal:
            self.report(Notice("warning", self.engine.store.pinned.refusal))
        disk = self.engine.store.disk
        if disk is not None:
            cached = "" if disk.file.direct else " This file system has no direct I/O: it goes through the page cache, slower."
            self.report(Notice("info" if disk.file.direct else "warning", f"States on disk: {disk}.{cached}"))
        self._writer = checkpoint.CheckpointWriter(job.run_folder / "checkpoints", config.checkpoint.keep)
        if job.resume_from is not None:
            self._resume(job.resume_from)
        else:
            self._load_weights(model_config)
        device.synchronize()

    def _load_weights(self, model_config: object) -> None:
        def progress(done: int, total: int) -> None:
            self.report(Phase("load", done, total, "blocks"))

        meta = build_meta_model(model_config, getattr(torch, self._precision.compute_dtype))  # type: ignore[arg-type]
        if self.config.model.from_scratch:
            seed = self.config.train.seed
            self.engine.load_weights(lambda names: initial_tensors(meta, names, seed), progress)
            return
        source = WeightSource(self.job.model_folder, meta)
        self.engine.load_weights(source.tensors, progress)
        for text in source.notices:
            self.report(Notice("info", text))

    def _resume(self, folder: Path) -> None:
        reader = checkpoint.load(folder)
        meta = reader.meta
        if meta.get("loader_fingerprint") != self.job.loader.fingerprint:
            raise CheckpointError(
                f"{folder.name} was made with other data than this run now has.",
                "Restore the data and its settings, or start a new run.",
            )
        if meta.get("precision") != self._precision.name:
            held = meta.get("precision")
            raise CheckpointError(f"{folder.name} holds {held} states, not {self._precision.name}.", "Resume with that precision.")
        for index, layout in enumerate(self.engine.layouts):
            self.engine.write_block(index, checkpoint.engine_states(layout, reader.block(layout.name)))
            self.report(Phase("load", index + 1, len(self.engine.layouts), "blocks"))
        self.step = self._saved_step = int(meta["step"])

    # -- the loop

    def _loop(self) -> str:
        """Until the last step ("finished") or a command ("stopped", "stopped without saving")."""
        self._first_step = self.step
        self._report_training()
        if self.step == 0:
            self._evaluate(due=bool(self.config.evaluation.every_steps))  # what training is compared with
        last = time.perf_counter()
        while self.step < self.job.num_steps:
            ended = self._obey()
            if ended:
                return ended
            last = last if ended is None else time.perf_counter()  # a pause is no part of a step
            batch = self.job.loader.step_batch(self.step)
            loss, grad_norm = self.engine.train_step(batch, self.step)
            self._require_finite(loss, grad_norm)
            self._report_compiler()
            rate = learning_rate(self.config, self.step, self.job.num_steps)
            self.engine.decide(self._update(rate, grad_norm))
            self.step += 1
            now = time.perf_counter()
            self._report_step(batch, loss, grad_norm, rate, now - last)
            last = now
            self._look_after_writer()
            if self._evaluate(due=self._is_due(self.config.evaluation.every_steps)) | self._save_if_due():
                last = time.perf_counter()
        return "finished"

    def _update(self, rate: float, grad_norm: float) -> Update:
        settings = self.config.train
        limit = settings.max_grad_norm
        clip = limit / grad_norm if limit and grad_norm > limit else 1.0
        return Update(self.step + 1, rate, clip, settings.beta1, settings.beta2, settings.eps, settings.weight_decay)

    def _require_finite(self, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        what = "The loss" if not math.isfinite(loss) else "The gradient norm"
        raise NonFiniteError(
            f"{what} became {loss if not math.isfinite(loss) else grad_norm} at step {self.step + 1}; nothing was updated.",
            "Resume from the last checkpoint with half the learning rate, or look at the data of that step.",
        )

    def _report_step(self, batch: PackedBatch, loss: float, grad_norm: float, rate: float, step_s: float) -> None:
        counters = self.engine.device.take_counters()
        epoch = self.job.loader.epoch(self.step)
        self.report(StepDone(self.step, loss, grad_norm, rate, batch.num_tokens, batch.trained_tokens, step_s, epoch, *counters))

    def _report_compiler(self) -> None:
        """Say once why something is not compiled."""
        if self.engine.compiler.take_problem():
            text = "Plain operations take the place of compiled kernels, slower and with more memory (kernels: plain plans for them)"
            self.report(Notice("warning", f"{text}: {self.engine.compiler.problem}"))

    def _report_training(self) -> None:
        """Training begins or goes on; in the first step of a process each kernel is compiled at its first use."""
        compiles = self.engine.compiler.enabled and self.step == self._first_step
        self.report(Phase("compile" if compiles else "train", self.step, self.job.num_steps, "steps"))

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _evaluate(self, due: bool) -> bool:
        """Measure the held-out loss, if it is due and there is any held-out data."""
        if not due or self._evaluated_step == self.step:
            return False
        batches = self.job.loader.eval_batches(self.job.plan.micro_batch_packs)
        if not batches:
            return False
        self.report(Phase("evaluate"))
        start = time.perf_counter()
        loss, tokens = self.engine.evaluate(batches)
        self._evaluated_step = self.step
        self.report(EvalDone(self.step, loss, tokens, time.perf_counter() - start))
        self._report_training()
        return True

    # -- commands

    def _obey(self) -> str | None:
        """Carry out what was commanded. None: nothing was; "": go on; else how the run ends."""
        command = self.poll()
        if command == "checkpoint":
            self._save()
            return ""
        if command == "pause":
            self.engine.finish()
            while command not in ("continue", "stop", "stop_discard"):
                if command == "checkpoint":
                    self._save()
                time.sleep(_PAUSE_POLL_S)
                command = self.poll()
        return {"stop": "stopped", "stop_discard": "stopped without saving", None: None}.get(command, "")

    # -- saving

    def _save_if_due(self) -> bool:
        settings = self.config.checkpoint
        minutes = (time.monotonic() - self._saved_time) / 60
        retry = self._retry_time is not None and time.monotonic() >= self._retry_time
        if self.step >= self.job.num_steps or not (
            retry or self._is_due(settings.every_steps) or settings.every_minutes and minutes >= settings.every_minutes
        ):
            return False
        self._retry_time = None
        self._save()
        return True

    def _save(self) -> None:
        """Start writing the state after `step` updates; training goes on, each block's next update waits for the writer."""
        self._look_after_writer(wait=True)  # a failure of the one before must not keep this one from being written
        if self._writer is None or self._saved_step == self.step:
            return
        self.engine.finish()
        self.report(Phase("save"))
        gates = {index: threading.Event() for index in range(len(self.engine.layouts))}
        blocks = [self._snapshot(index, gate) for index, gate in gates.items()]
        self._writer.start(self.step, blocks, self._meta())
        self.engine.optimizer.gate(gates)
        self._saved_step, self._saved_time = self.step, time.monotonic()

    def _save_last(self, reason: str) -> str:
        """Write the checkpoint that the run ends with; returns how it ends. While the disk is full the run is paused with its
        state in memory: any command tries again, but `stop_discard` gives up."""
        wanted = self.config.checkpoint.at_end
        while True:
            try:
                if wanted:
                    self._save()
                self._report_saved()
                return reason
            except DiskFullError as error:
                self._saved_step, wanted = -1, True
                self.report(Paused(self.step, error.message))
            while (command := self.poll()) not in ("continue", "stop", "stop_discard", "checkpoint"):
                time.sleep(_PAUSE_POLL_S)
            if command == "stop_discard":
                return "stopped without saving"

    def _snapshot(self, index: int, gate: threading.Event) -> checkpoint.BlockSnapshot:
        layout, engine = self.engine.layouts[index], self.engine
        return checkpoint.BlockSnapshot(layout.name, lambda: checkpoint.file_states(layout, engine.read_block(index)), gate.set)

    def _meta(self) -> dict[str, object]:
        return {
            "step": self.step,
            "position": self.step,
            "loader_fingerprint": self.job.loader.fingerprint,
            "precision": self._precision.name,
            "config": self.config.to_dict(),
            "layouts": [layout_record(layout) for layout in self.engine.layouts],
        }

    def _look_after_writer(self, wait: bool = False) -> None:
        """Report a checkpoint that is complete. One that failed is tried again: training need not end for it."""
        try:
            self._report_saved(wait)
        except MegaTrainError as error:
            self._saved_step = -1
            self._retry_time = time.monotonic() + _RETRY_S
            self.report(Notice("warning", f"{error} Training goes on; saving is tried again every {_RETRY_S:.0f} s."))

    def _report_saved(self, wait: bool = True) -> None:
        """Report the checkpoint that is complete, or raise the writer's failure; `wait` for one that is being written."""
        done = self._writer and (self._writer.wait() if wait else self._writer.finished())
        if done:
            self.report(done)

    def _save_what_can_be_saved(self) -> None:
        """After a failure: the state of the last whole step, unless saving fails as well."""
        try:
            if self._engine is not None:
                self._save()
                self._report_saved()
        except Exception as error:  # the failure that came first is the one to be told
            self.report(Notice("warning", f"The state could not be saved after the failure: {error}"))
