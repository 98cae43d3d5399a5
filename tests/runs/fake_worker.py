"""A worker whose model, data and trainer are stand-ins: real process, lock, signals and record; no torch, a step in milliseconds.

`python fake_worker.py RUN_FOLDER [...]` is what tests let the supervisor start. The run's name says what happens:
"fail ..." raises, "nan" reports a loss that is no number, "silent" dies by signal 9, "children" leaves a child behind,
"kernels" tells where compiled ones are kept, "full disk" finds no space for its last checkpoint once, "slow save" never gets done with one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from megatrain.engine.events import CheckpointDone, Ended, Notice, Paused, Phase, StepDone
from megatrain.errors import DataError, DiskFullError, NonFiniteError, OutOfVramError
from megatrain.plan import Placement, Plan
from megatrain.runs.model_source import CancelledError
from megatrain.runs.preparation import Parts
from megatrain.runs.worker import main
from megatrain.shape import ModelShape

STEP_S = 0.01
ERRORS = {
    "vram": OutOfVramError("CUDA out of memory. Tried to allocate 1.90 GiB"),
    "nan": NonFiniteError("Loss became NaN at step 4."),
    "disk": DiskFullError("No space for checkpoint step-00000004"),
    "data": DataError("No row has a trained token.", "Choose another format."),
    "bug": ValueError("hf_abcdefgh12345678 is a secret"),
}


class FakeLoader:
    num_packs, packs_per_step, steps_per_epoch, sequence_length, fingerprint = 10, 4, 3, 64, "f"

    def epoch(self, step: int) -> float:
        return step * self.packs_per_step / self.num_packs


def write_checkpoint(folder: Path, step: int) -> Path:
    """A folder that looks like the engine's checkpoints from outside."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "block-0000.safetensors").write_bytes(b"w" * 100)
    blocks = [{"file": "block-0000.safetensors", "num_bytes": 100}]
    manifest = {"step": step, "sequence": time.time_ns(), "sha256": "c0ffee" * 5, "blocks": blocks}
    (path / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    return path


def train(report, poll, config, run_folder, num_steps, resume_from, loader, **_):
    step = int(resume_from.name.removeprefix("step-")) if resume_from else 0
    name = config.name
    report(Phase("load", 1, 1, "blocks"))
    if name == "kernels":
        report(Notice("info", os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    report(Phase("train"))
    while step < num_steps:
        command = poll()
        while command == "pause":
            command = _wait(poll)
        if command in ("stop", "stop_discard"):
            if command == "stop":
                save_last(name, report, poll, run_folder, step)
            return Ended("stopped", step)
        if command == "checkpoint":
            save(report, run_folder, step)
        time.sleep(STEP_S)
        step += 1
        loss = float("nan") if name == "nan" else 3.0 / step
        report(StepDone(step, loss, 1.0, 1e-4, 256, 200, STEP_S, loader.epoch(step), {"h2d": 10}, {"data": 0.001}))
        if step == 3:
            misbehave(name, report)
    if name == "full disk":
        save_last(name, report, poll, run_folder, step)
    return Ended("finished", step)


def save_last(name: str, report, poll, run_folder: Path, step: int) -> None:
    if name == "full disk":
        report(Phase("save"))
        report(Paused(step, "No space is left to write step-00000003."))
        _wait(poll)
    if name == "slow save":
        report(Phase("save"))
        time.sleep(600)
    save(report, run_folder, step)


def _wait(poll):
    while True:
        command = poll()
        if command:
            return None if command == "continue" else command
        time.sleep(0.01)


def save(report, run_folder: Path, step: int) -> None:
    report(Phase("save"))
    path = write_checkpoint(run_folder, step)
    report(CheckpointDone(step, str(path), 100, 0.0))


def misbehave(name: str, report) -> None:
    kind, _, what = name.partition(" ")
    if kind == "fail":
        raise ERRORS[what]
    if kind == "silent":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "children":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        report(Notice("info", f"child {child.pid}"))


def prepare_data(config, tokenizer_folder, cache_folder, progress, cancelled, cache_key):
    for done in range(200 if config.name == "slow data" else 1):
        progress(Phase("tokenise", done, 200, "rows"))
        if cancelled():
            raise CancelledError("while tokenising")
        time.sleep(0.02)
    return SimpleNamespace(loader=FakeLoader(), report=SimpleNamespace(largest_id=0, to_json=lambda: json.dumps({"rows_read": 10})))


def shape(folder: Path, name: str) -> ModelShape:
    return ModelShape(name=name, model_type="fake", architecture="Fake", hidden_size=8, vocab_size=16, num_heads=1,
                      num_kv_heads=1, head_dim=8, intermediate_size=8, max_positions=64, tied_head=False, blocks=())  # fmt: skip


def parts() -> Parts:
    return Parts(
        resolve_model=lambda config, report, cancelled: Path(__file__).parent,
        prepare_data=prepare_data,
        inspect=shape,
        plan=lambda config, shape, machine: Plan((Placement(),), 1, 1),
        train=train,
        gpu_uuids=list,
    )


if __name__ == "__main__":
    sys.exit(main(parts=parts()))
