"""Runs as folders and processes: create, list, start, resume, force to end, delete.

A run belongs to nobody: whoever opens the workspace sees every run and can command it, because all there is to know
lies in its folder. Workers are started detached and outlive the process that started them.
"""

import contextlib
import os
import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatrain
from megatrain.config import DEMO, RunConfig
from megatrain.errors import RunError
from megatrain.platform import FileLock, LockHeldError, kill_group, look_at_lock, process_identity, start_detached
from megatrain.runs.diagnose import NO_SPACE, START_MARK
from megatrain.runs.reading import newest_checkpoint
from megatrain.runs.records import CheckpointInfo, RunState, to_json
from megatrain.runs.store import RunStore, load_json

RUN_ID = re.compile(r"[a-z0-9-]{1,40}")
# -P: what lies in the current folder must not shadow a package.
WORKER = (sys.executable, "-P", "-m", "megatrain.runs.worker")
EXPORT = (sys.executable, "-P", "-m", "megatrain", "export")
_MAX_NAME = 22  # leaves room for the time and a number


def create_run(workspace: Path, config: RunConfig, client_id: str = "", origin: dict[str, Any] | None = None) -> RunStore:
    """A new run folder for `config`, in state `created`. The same client_id (a double click) gives the same run.

    `origin` says where the run came from, for the list: {"run": ..., "checkpoint": ...}.
    """
    runs = workspace / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(runs, error) from error
    with _guarded(runs / ".create.lock", "Another run is being created just now."):
        if client_id:
            for folder in _folders(runs):
                if (load_json(folder / "run.json") or {}).get("client_id") == client_id:
                    return RunStore.open(folder)
        folder = _free_folder(runs, config)
        new = runs / f".new-{folder.name}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        _anchored(config).save(new / "config.yaml")
        (new / "run.json").write_text(to_json({"client_id": client_id, "created_s": time.time(), "origin": origin or {}}), "utf-8")
        RunStore.open(new, create=True)
        new.rename(folder)  # a list never shows a half-made run
    return RunStore.open(folder)


def list_runs(workspace: Path) -> list[RunStore]:
    """Every run folder, newest first; broken ones too (their state is `damaged`)."""
    return [_store(folder) for folder in sorted(_folders(workspace / "runs"), key=_created_s, reverse=True)]


def find_run(workspace: Path, run_id: str) -> RunStore:
    """The run with that id. RunError for an id that is none, also one that tries to leave the folder of runs."""
    if not RUN_ID.fullmatch(run_id) or not (workspace / "runs" / run_id).is_dir():
        raise RunError(f"There is no run {run_id[:60]!r}.", "Choose one from the list of runs.")
    return _store(workspace / "runs" / run_id)


def start_worker(store: RunStore, resume: bool = False, checkpoint: str | None = None) -> int:
    """Starts the run's worker detached and returns its pid; returns before the worker has loaded anything.

    `resume` goes on from the newest complete checkpoint, or from the one named. RunError when the run lives already,
    cannot be read, or has nothing to resume from.
    """
    with _guarded(store.folder / "start.lock", "Already running: this run is being started just now."):
        status = store.state()
        if status.state is RunState.DAMAGED:
            raise RunError(f"{status.error.title}. {status.reason}" if status.error else status.reason, "Delete it.")
        if status.is_active:
            raise RunError(f"Already running (process {status.pid}).", "Watch it on the page Monitor.")
        arguments = [*WORKER, str(store.folder.resolve())]
        if resume:
            arguments += ["--resume", "--checkpoint", resume_point(store, checkpoint).name]
        elif any(found.complete for found in store.checkpoints()):
            raise RunError("This run has checkpoints; starting it anew would mix two trainings.", "Resume it, or duplicate its settings.")
        with store.one_commit():
            store.drop_commands()
            for key in ("spawned", "exit", "ended_s", "phase"):
                store.set_fact(key, None)
            store.set_fact("started_s", time.time())
            store.set_state(RunState.STARTING, "The worker is being started.")
        return _spawn(store, arguments)


def _spawn(store: RunStore, arguments: list[str]) -> int:
    def ended(code: int) -> None:
        with contextlib.suppress(RunError):  # only a help to explain the end; the folder may be gone by now
            store.set_fact("exit", {"pid": pid, "code": code})

    try:
        with (store.folder / "worker.log").open("a", encoding="utf-8") as log:
            log.write(f"{START_MARK}{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(arguments[1:])}\n")
        pid = start_detached(arguments, store.folder / "worker.log", _environment(), ended)
    except OSError as error:
        text = f"The worker cannot be started: {error.strerror or error}."
        store.set_state(RunState.FAILED, text, error={"title": "The worker cannot be started", "text": text, "hint": "", "action": ""})
        raise RunError(text) from error
    store.set_fact("spawned", {"pid": pid, "identity": process_identity(pid)})
    return pid


def _anchored(config: RunConfig) -> RunConfig:
    """Paths that exist here, and the offload folder, made absolute: a run may be resumed from any folder."""

    def absolute(path: str, if_exists: bool = True) -> str:
        try:
            found = Path(path).expanduser()
            return str(found.absolute()) if path and (not if_exists or found.exists()) else path
        except (OSError, ValueError, RuntimeError):  # no path at all
            return path

    model, data, memory = config.model, config.data, config.memory
    if model.path != DEMO:
        model = replace(model, path=absolute(model.path))
    if data.path != DEMO:
        data = replace(data, path=absolute(data.path))
    if memory.offload_folder:
        memory = replace(memory, offload_folder=absolute(memory.offload_folder, if_exists=False))
    return replace(config, model=model, data=data, memory=memory)


def resume_point(store: RunStore, name: str | None = None) -> CheckpointInfo:
    """The checkpoint to resume from: the named one, else the complete one that was saved last."""
    newest = newest_checkpoint(found for found in store.checkpoints() if name is None or found.name == name)
    if newest is None:
        wanted = f"the checkpoint {name[:60]!r} is not there or not complete" if name else "no complete checkpoint was written yet"
        raise RunError(f"This run cannot be resumed: {wanted}.", "Choose another checkpoint, or start the run from the beginning.")
    return newest


def change_config(store: RunStore, changes: dict[str, Any]) -> RunConfig:
    """Rewrites config.yaml with `changes` (dotted keys), for a resume with other limits. Refuses a live run."""
    if store.is_live():
        raise RunError("The settings of a running training cannot be changed.", "Stop it first.")
    raw = RunConfig.load(store.folder / "config.yaml").to_dict()
    for key, value in changes.items():
        *path, last = key.split(".")
        place = raw
        for part in path:
            place = place[part]
        place[last] = value
    config = RunConfig.from_dict(raw)
    config.save(store.folder / "config.yaml")
    store.log_event("notice", {"level": "info", "text": "Settings changed: " + ", ".join(f"{k} = {v}" for k, v in changes.items())})
    return config


def force_quit(store: RunStore) -> None:
    """Ends the worker and all its children at once; what was not in a checkpoint is lost. The last resort."""
    status = store.state()
    held, holder = look_at_lock(store.folder / "lock")
    spawned = store.fact("spawned") or {}
    targets = [(holder.pid, holder.identity)] if held is not False and holder is not None and holder.is_here() else []
    targets += [(spawned["pid"], spawned["identity"])] if spawned.get("identity") else []
    killed = [kill_group(pid, identity) for pid, identity in targets]
    if not any(killed):
        raise RunError("There is no process of this run to end.", "It is over already.")
    give_up = time.monotonic() + 2.0
    while any(process_identity(pid) == identity for pid, identity in targets) and time.monotonic() < give_up:
        time.sleep(0.02)
    if status.is_active:
        store.set_state(RunState.STOPPED, "Forced to quit; steps after the last checkpoint are lost.")


def delete_run(store: RunStore) -> int:
    """Deletes the folder with everything in it; returns the bytes freed. Refuses a live run."""
    if store.state().is_active:
        raise RunError("A running training cannot be deleted.", "Stop it first.")
    freed = folder_bytes(store.folder)
    gone = store.folder.with_name(f".deleted-{store.folder.name}-{time.time_ns()}")
    try:
        store.folder.rename(gone)  # at once out of the list, also when removing takes long or is interrupted
        shutil.rmtree(gone)
    except OSError as error:
        text = f"Not all of {store.run_id} could be deleted: {error.strerror or error}."
        raise RunError(text, "Close what has its files open.") from error
    return freed


def folder_bytes(folder: Path) -> int:
    """What the files of a run take on disk."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except OSError:  # removed while we look
            continue
    return total


def start_export(store: RunStore, checkpoint: str, dtype: str, target: Path | None = None) -> int:
    """Starts an export of one checkpoint as a detached process; returns its pid. Progress: events of kind `export`."""
    found = resume_point(store, checkpoint)
    target = target or store.folder / "exports" / f"{found.name}-{dtype}"
    (store.folder / "exports").mkdir(exist_ok=True)
    arguments = [*EXPORT, str(store.folder.resolve()), "--checkpoint", found.name, "--dtype", dtype, "--target", str(target)]

    def ended(code: int) -> None:
        data = {"state": "failed", "checkpoint": found.name, "target": str(target), "text": f"The export ended with exit code {code}."}
        with contextlib.suppress(RunError):  # the run may have been deleted meanwhile
            said = [event.data.get("state") for event in store.events() if event.kind == "export"][-1:]
            if code != 0 and said != ["failed"]:  # it could not say why itself
                store.log_event("export", data)

    pid = start_detached(arguments, store.folder / "exports" / "export.log", _environment(), ended)
    store.log_event("export", {"state": "started", "checkpoint": found.name, "target": str(target), "dtype": dtype, "pid": pid,
                               "identity": process_identity(pid)})  # fmt: skip
    return pid


def latest_export(store: RunStore) -> dict[str, Any] | None:
    """What the last export came to, or how far it is; `failed` also when its process is gone without a word."""
    events = [event.data for event in store.events() if event.kind == "export"]
    if not events or events[-1].get("state") in ("finished", "failed"):
        return events[-1] if events else None
    start = next((data for data in reversed(events) if data.get("state") == "started" and data.get("pid")), None)
    if start is None or process_identity(start["pid"]) == start.get("identity"):
        return events[-1]
    return {**events[-1], "state": "failed", "text": "The export's process is gone; start it again."}


def _environment() -> dict[str, str]:
    """This process's environment; the program is found wherever the current folder is, and CUDA numbers GPUs as NVML does."""
    root = str(Path(megatrain.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, "PYTHONPATH": path}


@contextlib.contextmanager
def _guarded(path: Path, held: str) -> Iterator[None]:
    try:
        lock = FileLock(path).acquire(5.0)
    except LockHeldError as error:
        raise RunError(held, "Wait a moment and try again.") from error
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    with lock:
        try:
            yield
        except OSError as error:
            raise _unwritable(path.parent, error) from error


def _unwritable(folder: Path, error: OSError) -> RunError:
    hint = "Free space on that disk." if error.errno in NO_SPACE else "Choose a workspace that you may write to."
    return RunError(f"{folder} cannot be written: {error.strerror or error}.", hint)


def _folders(runs: Path) -> list[Path]:
    return [folder for folder in runs.iterdir() if folder.is_dir() and not folder.name.startswith(".")] if runs.is_dir() else []


def _store(folder: Path) -> RunStore:
    try:
        return RunStore.open(folder)
    except RunError:
        return RunStore(folder)  # its state says that it is damaged


def _created_s(folder: Path) -> float:
    created = (load_json(folder / "run.json") or {}).get("created_s")
    return created if isinstance(created, int | float) else folder.stat().st_mtime


def _free_folder(runs: Path, config: RunConfig) -> Path:
    name = config.name or f"{Path(config.model.path).name}-{Path(config.data.path).stem}"
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:_MAX_NAME].strip("-") or "run"
    stem = f"{slug}-{time.strftime('%y%m%d-%H%M%S')}"
    number = 1
    while (runs / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return runs / (stem if number == 1 else f"{stem}-{number}")
