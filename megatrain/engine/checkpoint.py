"""Checkpoints: written beside training, whole or not at all, and checked before anything older is given up.

`step-00000100/` holds one safetensors file per block with the block's flat states as the engine holds them, and
`manifest.json`, which is written last: every file with size, sha256 and tensors, and what the trainer adds (`meta`).
The folder is written under a temporary name, flushed, read back, and only then renamed. A crash at any instant leaves
the checkpoints before it untouched; what it leaves behind is removed at the next start.
Checkpoints are ordered by when they were saved, not by name: a run that went back to an earlier step goes on from there.
"""

import hashlib
import json
import os
import platform as system
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from megatrain import platform
from megatrain.engine.events import CheckpointDone
from megatrain.errors import CheckpointError, MegaTrainError
from megatrain.models.blocks import BlockLayout, layout_from_record
from megatrain.models.tensorfile import TensorFile, TensorFileWriter, bytes_of, disk_errors

FORMAT = 1
MANIFEST = "manifest.json"
_WRITING, _REMOVED, _REPLACED = ".tmp-", ".tmp-removed-", ".tmp-replaced-"


@dataclass(frozen=True)
class BlockSnapshot:
    """One block to save. Its states must not change until `taken` is called."""

    name: str
    read: Callable[[], Mapping[str, torch.Tensor]]  # the states by name, on the CPU; may wait for copies, may be the live ones
    taken: Callable[[], object]  # they are on disk, or no longer wanted; called exactly once, whatever happens


def file_states(layout: BlockLayout, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A block's states as a file holds them: its bytes of weights become `weights` [numel_a] in the compute dtype,
    `weights_fp32` [numel_b] and `buffers` (bytes), the last two if there are any. Views; nothing is copied."""
    weights = states["weights"]
    parts = {"weights": layout.segment_a(weights), "weights_fp32": layout.segment_b(weights), "buffers": layout.buffer_section(weights)}
    return {name: part for name, part in parts.items() if part.numel() or name == "weights"} | {
        name: state for name, state in states.items() if name != "weights"
    }


def engine_states(layout: BlockLayout, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `file_states`."""
    weights = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
    for name, part in file_states(layout, {"weights": weights}).items():
        if name not in states or states[name].shape != part.shape or states[name].dtype != part.dtype:
            raise CheckpointError(f"Block {layout.name} of the checkpoint does not fit this model: {name} differs.")
        part.copy_(states[name])
    return {"weights": weights} | {name: state for name, state in states.items() if name not in ("weights_fp32", "buffers", "weights")}


class CheckpointWriter:
    """Writes the checkpoints of one run to `root` in a thread of its own; the newest `keep` stay."""

    def __init__(self, root: Path, keep: int) -> None:
        """Creates `root`, and removes what a crashed writer left there."""
        self.root, self.keep = root, max(1, keep)
        with disk_errors(root, CheckpointError):
            root.mkdir(parents=True, exist_ok=True)
            recover(root)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._done: list[CheckpointDone] = []

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, step: int, blocks: Sequence[BlockSnapshot], meta: Mapping[str, Any], protect: Path | None = None) -> None:
        """Begin to save the state after `step` updates; training may go on.

        `meta`: JSON values (finite numbers) that `load` gives back; its `layouts` holds the `layout_record` of every block.
        `protect` is a checkpoint that this save does not remove. Waits for the checkpoint before, and raises what failed there.
        """
        self._join()
        self._raise_failure()
        copied = json.loads(json.dumps(meta, allow_nan=False))
        arguments = (step, list(blocks), copied, protect)
        self._thread = threading.Thread(target=self._run, args=arguments, name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    def finished(self) -> CheckpointDone | None:
        """A completed checkpoint that was not asked for before; None when there is none, or one is still being written.

        Raises the writer's failure: CheckpointError or DiskFullError.
        """
        self._raise_failure()
        return None if self.busy or not self._done else self._done.pop(0)

    def wait(self) -> CheckpointDone | None:
        """`finished`, after the writer has ended."""
        self._join()
        return self.finished()

    def close(self) -> None:
        """Wait for the checkpoint being written; its failure is nobody's any more."""
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None and not self.busy:
            failure, self._failure = self._failure, None
            raise failure

    def _run(self, step: int, blocks: list[BlockSnapshot], meta: dict[str, Any], protect: Path | None) -> None:
        started = time.monotonic()
        untaken = list(blocks)
        try:
            path, num_bytes = self._write(step, untaken, meta)
            removed = self._drop_old({path, protect})
            self._done.append(CheckpointDone(step, str(path), num_bytes, time.monotonic() - started, removed))
        except MegaTrainError as failure:
            self._failure = failure
        except Exception as failure:  # the thread's end: whatever it was, the trainer must hear of it
            self._failure = CheckpointError(f"Saving step {step} failed: {failure!r}")
            self._failure.__cause__ = failure
        finally:
            for block in untaken:
                block.taken()

    def _write(self, step: int, untaken: list[BlockSnapshot], meta: dict[str, Any]) -> tuple[Path, int]:
        """Removes each block from `untaken` as it is taken."""
        target = self.root / folder_name(step)
        work = self.root / f"{_WRITING}{target.name}"
        shutil.rmtree(work, ignore_errors=True)
        manifest = {
            "format": FORMAT,
            "step": step,
            "sequence": 1 + max((found.sequence for found in complete(self.root)), default=0),
            "saved_s": time.time(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "python": system.python_version()},
            "meta": meta,
            "blocks": [],
        }
        try:
            with disk_errors(work, CheckpointError):
                work.mkdir(parents=True)
            while untaken:
                block = untaken[0]
                manifest["blocks"].append(_write_block(work, len(manifest["blocks"]), block))
                untaken.pop(0).taken()
            _write_manifest(work, manifest)
            for problem in verify(work):
                raise CheckpointError(f"The checkpoint of step {step} reads back differently: {problem}", "Check the disk.")
            with disk_errors(target, CheckpointError):
                _put_in_place(work, target)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        return target, sum(record["num_bytes"] for record in manifest["blocks"])

    def _drop_old(self, stay: set[Path | None]) -> tuple[str, ...]:
        """Remove all but the newest `keep` and `stay`. The new one is verified by now; one that resists is tried again next time."""
        removed = []
        for found in complete(self.root)[: -self.keep]:
            if found.path in stay:
                continue
            gone = self.root / f"{_REMOVED}{found.path.name}"
            try:
                os.replace(found.path, gone)  # a half-removed checkpoint must not look like one
            except OSError:
                continue
            shutil.rmtree(gone, ignore_errors=True)
            removed.append(found.path.name)
        return tuple(removed)


def folder_name(step: int) -> str:
    """Name of the checkpoint after `step` updates."""
    return f"step-{step:08d}"


def _write_block(folder: Path, index: int, block: BlockSnapshot) -> dict[str, Any]:
    states = block.read()
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in states.items()}
    path = folder / f"block-{index:04d}.safetensors"
    writer = TensorFileWriter(path, specs, CheckpointError, {"block": block.name})
    try:
        digest = hashlib.sha256(writer.header)
        for name, tensor in states.items():
            writer.write(name, tensor)
            digest.update(bytes_of(tensor))
        writer.close()
    finally:
        writer.abandon()
    tensors = {name: {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)} for name, (dtype, shape) in specs.items()}
    return {"name": block.name, "file": path.name, "num_bytes": writer.num_bytes, "sha256": digest.hexdigest(), "tensors": tensors}


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["sha256"] = _digest(manifest)
    text = json.dumps(manifest, indent=1, allow_nan=False).encode()
    path = folder / MANIFEST
    with disk_errors(path, CheckpointError), path.open("wb", buffering=0) as file:
        platform.write_at(file.fileno(), text, 0)
        os.fsync(file.fileno())
    with disk_errors(folder, CheckpointError):
        platform.flush_folder(folder)


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _put_in_place(work: Path, target: Path) -> None:
    """Rename; a checkpoint of the same step stays reachable (see `recover`) until the new one is there."""
    aside = target.with_name(f"{_REPLACED}{target.name}")
    if target.exists():
        os.replace(target, aside)
    platform.replace_file(work, target)
    shutil.rmtree(aside, ignore_errors=True)


def recover(root: Path) -> None:
    """Undo what a writer that was killed left half done in `root`. Only for the run's own process."""
    for leftover in sorted(root.glob(f"{_WRITING}*")):
        original = root / leftover.name.removeprefix(_REPLACED)
        if leftover.name.startswith(_REPLACED) and not original.exists():
            os.replace(leftover, original)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


# Reading --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointReader:
    """A checkpoint whose manifest is sound and whose files have the right sizes. Contents are checked as they are read."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def sequence(self) -> int:
        """Counts the checkpoints of a run in the order of saving."""
        return self.manifest["sequence"]

    @property
    def meta(self) -> dict[str, Any]:
        """What the trainer gave to `start`."""
        return self.manifest["meta"]

    @property
    def num_bytes(self) -> int:
        return sum(record["num_bytes"] for record in self.manifest["blocks"])

    @property
    def layouts(self) -> list[BlockLayout]:
        """Every block's layout, in the model's order."""
        return [layout_from_record(record) for record in self.meta["layouts"]]

    def block(self, name: str, states: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """The flat states of the block called `name` (None: all), on the CPU. CheckpointError when its file is damaged."""
        record = next((record for record in self.manifest["blocks"] if record["name"] == name), None)
        if record is None:
            raise CheckpointError(f"{self.path} holds no block {name}.")
        file = TensorFile(self.path / record["file"], CheckpointError)
        found = file.read_checked(record["sha256"], states)
        lacking = (set(record["tensors"]) if states is None else set(states) & set(record["tensors"])) - found.keys()
        if lacking:
            raise CheckpointError(f"{file.path} lacks {', '.join(sorted(lacking))}.")
        return found


def load(folder: Path) -> CheckpointReader:
    """Open a checkpoint. CheckpointError, naming the file, when anything is missing or short, or the manifest is damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("sha256") != _digest(manifest):
        raise CheckpointError(f"{path} is damaged: its checksum is not the recorded one.")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {manifest['format']}; this version reads format {FORMAT}.", "Update MegaTrain.")
    for record in manifest["blocks"]:
        file = folder / record["file"]
        try:
            num_bytes = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{file} is missing.") from error
        if num_bytes != record["num_bytes"]:
            raise CheckpointError(f"{file} has {num_bytes} bytes instead of {record['num_bytes']}.")
    return CheckpointReader(folder, manifest)


def complete(root: Path) -> list[CheckpointReader]:
    """The complete checkpoints in `root`, in the order in which they were saved. File contents are not read."""
    found = []
    for folder in root.glob("step-*"):
        try:
            found.append(load(folder))
        except CheckpointError:
            continue  # not complete; `verify` says why
    return sorted(found, key=lambda reader: reader.sequence)


def latest(root: Path) -> Path | None:
    """The complete checkpoint that was saved last, or None."""
    found = complete(root)
    return found[-1].path if found else None


def verify(folder: Path) -> list[str]:
    """Every problem of a checkpoint, all files read and compared with their checksums; empty when it is sound."""
    try:
        reader = load(folder)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for record in reader.manifest["blocks"]:
        try:
            _forget_cached(folder / record["file"])
            TensorFile(folder / record["file"], CheckpointError).read_checked(record["sha256"], ())
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _forget_cached(path: Path) -> None:
    """Ask the system to read `path` from the disk next time, not from memory. Where it cannot, nothing happens."""
    if hasattr(os, "posix_fadvise"):
        with disk_errors(path, CheckpointError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
