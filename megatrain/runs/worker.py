"""The training process: joins engine, telemetry and record. `python -m megatrain.runs.worker RUN_FOLDER`

What it does, in order: take the run's lock, prepare (model, data, plan; see preparation.py), train, record how it
ended. Everything that happens is in the run folder, so nobody needs to be connected to it.
"""

import argparse
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatrain import hardware
from megatrain.engine.events import CheckpointDone, Ended, EvalDone, Event, Notice, Paused, Phase, StepDone
from megatrain.errors import ConfigError, DataError, DiskFullError, MegaTrainError, NonFiniteError, OutOfVramError, PlanError
from megatrain.platform import FileLock, LockHeldError
from megatrain.runs import diagnose
from megatrain.runs.model_source import CancelledError
from megatrain.runs.preparation import Parts, Prepared, prepare
from megatrain.runs.reading import newest_checkpoint
from megatrain.runs.records import RunState
from megatrain.runs.store import RunStore
from megatrain.telemetry.gpu import GpuReader
from megatrain.telemetry.host import HostReader, machine_ram, oom_kills
from megatrain.telemetry.sampler import Sampler

FINISHED, UNKNOWN_ERROR, STOPPED, LOCKED = 0, 1, 3, diagnose.EXIT_LOCKED
EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (  # the first that matches counts; argparse itself uses 2
    (OutOfVramError, 10), (NonFiniteError, 11), (DiskFullError, 12), (MemoryError, 13), (PlanError, 14), (DataError, 15),
    (ConfigError, 16), (MegaTrainError, 17),
)  # fmt: skip
LOCK_PATIENCE_S = 30.0  # the process before may still be giving its memory back

log = logging.getLogger("megatrain.worker")


class Worker:
    """One life of one run."""

    def __init__(self, store: RunStore, parts: Parts, stop: threading.Event) -> None:
        self.store, self.parts = store, parts
        self._stop = stop  # set by a signal; turned into one "stop"
        self._stop_given = False
        self._state = RunState.STARTING
        self._step = 0
        self._num_steps = 0
        self._phase = ("", 0.0)
        self._logged_s = 0.0
        self._last_loss: float | None = None  # before the resume, until the first step after it

    def run(self, resume: bool, checkpoint: str | None) -> int:
        """Trains to an end and records which; returns the exit code."""
        self.store.start_background()
        self.store.set_fact("started_s", time.time())
        sampler = None
        try:
            self._set_state(RunState.STARTING, "The worker prepares the run.")
            sampler = self._start_sampler()
            ended = self._train(resume, checkpoint)
            return self._end(ended)
        except CancelledError as cancelled:
            log.info("Stopped before training began: %s", cancelled)
            self.store.drop_commands()
            return self._end(Ended("stopped", self._step))
        except BaseException as error:  # the process's outermost boundary: whatever it was is recorded as the run's end
            return self._fail(error)
        finally:
            if sampler is not None:
                sampler.stop()
            self.store.close()

    def _train(self, resume: bool, checkpoint: str | None) -> Ended:
        prepared = prepare(self.store, self.parts, self.report, self._cancelled, resume, checkpoint)
        self._num_steps = prepared.num_steps
        self.store.set_fact("num_steps", prepared.num_steps)
        self._begin_at(prepared)
        return self.parts.train(self.report, self.poll, **prepared.job())

    def _begin_at(self, prepared: Prepared) -> None:
        """What the record holds of later steps is forgotten: they are trained again."""
        self._step = prepared.start_step
        self.store.truncate_after(self._step)
        self.store.set_fact("attempt", (self.store.fact("attempt") or 0) + 1)
        self.store.set_fact("resumed_at", self._step)
        if prepared.resume_from is not None:
            self.store.flush()
            self._last_loss = self.store.summary().last_loss
            self._notice("info", prepared.resume_note)

    # ---- what the trainer reports, and what it is told ---------------------------------------------------------------
    def report(self, event: Event) -> None:
        """One event of the engine, or of the preparation, into the record and the log."""
        match event:
            case StepDone():
                self._step_done(event)
            case Phase():
                self._phase_moved(event)
                if event.name == "save":
                    self.store.flush()  # no checkpoint may be ahead of the record that a resume goes on from
            case EvalDone():
                self.store.log_event("eval", asdict(event))
                log.info("Held-out loss after step %d: %.4f", event.step, event.loss)
            case CheckpointDone():
                self.store.log_event("checkpoint", asdict(event))
                log.info("Checkpoint of step %d written in %.1f s: %s", event.step, event.duration_s, event.path)
            case Notice():
                self._notice(event.level, event.text)
            case Paused():
                reason = diagnose.explain_pause(event.text)
                self._set_state(RunState.PAUSED, f"{reason.title}.", error=asdict(reason))
                self._notice("warning", f"{reason.title}. {reason.text} {reason.hint}")
            case Ended():
                pass  # the trainer returns it too, and then everything is written

    def _step_done(self, event: StepDone) -> None:
        self.store.log_step(event)
        self._step = event.step
        if self._state is RunState.STARTING:
            self._set_state(RunState.RUNNING)
        self._phase_moved(Phase("train", event.step, self._num_steps, "steps"))  # a save runs beside it
        if self._last_loss is not None:
            self._notice("info", f"First loss after the resume {event.loss:.4f}, last one before {self._last_loss:.4f}.")
            self._last_loss = None
        if time.monotonic() - self._logged_s >= 1.0 or event.step == self._num_steps:
            self._logged_s = time.monotonic()
            log.info("step %d/%d  loss %.4f  norm %.3g  lr %.3g  %.0f tokens/s", event.step, self._num_steps, event.loss,
                     event.grad_norm, event.learning_rate, event.num_tokens / event.step_s if event.step_s else 0)  # fmt: skip

    def _phase_moved(self, event: Phase) -> None:
        name, when = self._phase
        fresh = event.name != name
        if not fresh and time.monotonic() - when < 0.5 and (event.done < event.total or not event.total):
            return
        self._phase = (event.name, time.monotonic())
        self.store.set_fact("phase", asdict(event))
        if fresh:
            self.store.log_event("phase", asdict(event))
            log.info("Phase: %s", event.name)
        if event.name == "train" and self._state is RunState.STARTING:
            self._set_state(RunState.RUNNING)

    def poll(self) -> str | None:
        """The next command for the trainer, which acts on it before its next step."""
        command = self._signalled() or self.store.take_command()
        if command and self._state is RunState.STARTING:
            self._set_state(RunState.RUNNING)  # it asks before its first step
        if command == "pause" and self._state is RunState.RUNNING:
            self._set_state(RunState.PAUSED, f"Paused after step {self._step}.")
        elif command == "continue" and self._state is RunState.PAUSED:
            self._set_state(RunState.RUNNING)
        elif command in ("stop", "stop_discard"):
            self._set_state(RunState.STOPPING, f"Stopping after step {self._step}.")
        if command:
            log.info("Command: %s", command)
        return command

    def _signalled(self) -> str | None:
        if self._stop.is_set() and not self._stop_given:
            self._stop_given = True
            return "stop"
        return None

    def _cancelled(self) -> bool:
        """True when the run is to end before it trains."""
        return self._stop.is_set() or self.store.peek_command() in ("stop", "stop_discard")

    # ---- ends --------------------------------------------------------------------------------------------------------
    def _end(self, ended: Ended) -> int:
        finished = ended.reason == "finished"
        self.store.log_event("ended", {"reason": ended.reason, "step": ended.step})
        self._set_state(RunState.FINISHED if finished else RunState.STOPPED, f"{ended.reason.capitalize()} after step {ended.step}.")
        log.info("Run %s after step %d.", ended.reason, ended.step)
        return FINISHED if finished else STOPPED

    def _fail(self, error: BaseException) -> int:
        log.error("The run failed.", exc_info=error)
        newest = newest_checkpoint(self.store.checkpoints())
        explanation = diagnose.explain_error(error, self._step, newest.step if newest else None)
        self.store.log_event("ended", {"reason": "failed", "step": self._step, "error": asdict(explanation)})
        self._set_state(RunState.FAILED, explanation.title, error=asdict(explanation))
        return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), UNKNOWN_ERROR)

    def _set_state(self, state: RunState, reason: str = "", **details: Any) -> None:
        self._state = state
        self.store.set_state(state, reason, **details)

    def _notice(self, level: str, text: str) -> None:
        self.store.log_event("notice", {"level": level, "text": text})
        log.log(logging.WARNING if level == "warning" else logging.INFO, "%s", text)

    def _start_sampler(self) -> Sampler:
        self.store.set_fact("oom_kills", oom_kills())
        read_ram = machine_ram if hardware.RAM_OVERRIDE in os.environ else hardware.read_ram  # what is, not what to plan with
        self.store.set_fact("ram_total_bytes", read_ram()[0])
        gpu = GpuReader(self.parts.gpu_uuids())
        if gpu.problem:
            self._notice("info", gpu.problem)
        host = HostReader(self.store.folder, read_ram)

        def failed(error: Exception) -> None:
            self._notice("warning", f"Readings of the hardware ended ({type(error).__name__}: {error}); training goes on.")

        return Sampler([gpu.read, host.read], self.store.log_telemetry, failed).start()


def run(folder: Path, resume: bool = False, checkpoint: str | None = None, parts: Parts | None = None,
        stop: threading.Event | None = None, keep_lock: bool = False) -> int:  # fmt: skip
    """Trains the run in `folder` inside this process; returns the exit code. `parts` is the seam for tests.

    `keep_lock` leaves the lock to the end of the process, so that a successor waits until its memory is given back.
    """
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(LOCK_PATIENCE_S)
    except LockHeldError:
        log.error("Already running: another process trains this run.")
        return LOCKED
    try:
        return Worker(RunStore.open(folder), parts or Parts(), stop or threading.Event()).run(resume, checkpoint)
    finally:
        if not keep_lock:
            lock.release()


class _MaskedFormatter(logging.Formatter):
    """Lines with date and level; tokens and the home folder never reach the file."""

    def format(self, record: logging.LogRecord) -> str:
        return diagnose.mask(super().format(record))


def start_log(folder: Path) -> None:
    """Everything that is logged goes to worker.log, and to the terminal when there is one."""
    layout = _MaskedFormatter("%(asctime)s %(levelname)s %(message)s")
    handlers: list[logging.Handler] = [logging.FileHandler(folder / "worker.log", encoding="utf-8")]
    if sys.stderr is not None and sys.stderr.isatty():
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(layout)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
    for name in ("httpx", "httpx2", "filelock", "urllib3", "fsspec"):  # one line a request says nothing to anybody
        logging.getLogger(name).setLevel(logging.WARNING)


def _stop_on_signals(stop: threading.Event) -> None:
    """The first polite request to end means: stop and save."""

    def ask(number: int, _: Any) -> None:
        stop.set()

    for name in ("SIGTERM", "SIGINT", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), ask)


def main(argv: list[str] | None = None, parts: Parts | None = None) -> int:
    """The worker process: prepares the process itself, then trains."""
    parser = argparse.ArgumentParser(prog="python -m megatrain.runs.worker", description="Train one run; normally started by the page.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    parser.add_argument("--checkpoint", help="go on from this one, e.g. step-00000100")
    arguments = parser.parse_args(argv)
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")  # bars would fill the log
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(arguments.folder.resolve().parents[1] / "cache" / "kernels"))  # kept between runs
    faulthandler.enable()
    start_log(arguments.folder)
    stop = threading.Event()
    _stop_on_signals(stop)
    return run(arguments.folder, arguments.resume or arguments.checkpoint is not None, arguments.checkpoint, parts, stop, keep_lock=True)


if __name__ == "__main__":
    sys.exit(main())
