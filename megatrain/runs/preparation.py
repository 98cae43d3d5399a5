"""From a run folder to everything that the trainer needs: model files, data, shape, plan, and where to go on.

What is found is written beside the configuration (shape.json, data.json, plan.json), so that page and resume see
exactly what the run uses.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatrain import hardware, planner
from megatrain.config import DataConfig, RunConfig
from megatrain.engine.events import Ended, Event, Phase
from megatrain.errors import DataError
from megatrain.plan import Plan
from megatrain.platform import replace_file
from megatrain.runs import supervisor
from megatrain.runs.model_source import CancelledError, resolve_model
from megatrain.runs.records import CheckpointInfo
from megatrain.runs.store import RunStore, load_json
from megatrain.shape import ModelShape

Report = Callable[[Event], None]
Poll = Callable[[], str | None]


def _prepare_data(config: RunConfig, tokenizer_folder: Path, cache_folder: Path, progress: Callable[[Phase], None],
                  cancelled: Callable[[], bool], cache_key: str) -> Any:  # fmt: skip
    from megatrain.data.prepare import PreparationCancelled, prepare

    try:
        return prepare(config, tokenizer_folder, cache_folder, progress, cancelled, cache_key)
    except PreparationCancelled as stopped:
        raise CancelledError(stopped.message) from stopped


def _own_data_set(data: DataConfig, workspace: Path, run_folder: Path) -> DataConfig:
    """`data` with the run's own copy of the data set that it names: what that held at the first start is what the run is."""
    from megatrain.data import recipes

    kept, mark = run_folder / "dataset.yaml", f"# {json.dumps(data.path)}\n"
    if not (kept.exists() and kept.read_text("utf-8").startswith(mark)):
        file = recipes.file_of(data, workspace)
        if file is None:
            return data
        _write(kept, mark + recipes.load(file).placed_in(file.parent).to_yaml())
    return replace(data, path=str(kept))


def _inspect(folder: Path, name: str) -> ModelShape:
    from megatrain.models.inspect import inspect_model

    return inspect_model(folder, name)


def _train(report: Report, poll: Poll, **job: Any) -> Ended:
    from megatrain.engine.trainer import Job, train

    return train(Job(**job), report, poll)


def _gpu_uuids() -> Sequence[str]:
    return [gpu.uuid for gpu in hardware.read_machine(Path.cwd()).gpus if gpu.uuid]


@dataclass(frozen=True)
class Parts:
    """What a run is joined from. Each loads its room (and torch) when it is called; tests put stand-ins here."""

    resolve_model: Callable[..., Path] = resolve_model
    prepare_data: Callable[..., Any] = _prepare_data
    inspect: Callable[[Path, str], ModelShape] = _inspect
    plan: Callable[..., Plan] = planner.plan
    train: Callable[..., Ended] = _train
    gpu_uuids: Callable[[], Sequence[str]] = _gpu_uuids


@dataclass(frozen=True)
class Prepared:
    """Everything that is decided before the first step."""

    config: RunConfig
    plan: Plan
    model_folder: Path
    run_folder: Path
    loader: Any  # data.loader.Loader
    num_steps: int
    start_step: int = 0
    resume_from: Path | None = None
    resume_note: str = field(default="")

    def job(self) -> dict[str, Any]:
        """The arguments of engine.trainer.Job."""
        names = ("config", "plan", "model_folder", "run_folder", "loader", "resume_from", "num_steps")
        return {name: getattr(self, name) for name in names}


def prepare(store: RunStore, parts: Parts, report: Report, cancelled: Callable[[], bool], resume: bool, checkpoint: str | None) -> Prepared:
    """Model, shape, plan and data of the run, in the order in which a mistake shows soonest."""
    folder = store.folder
    workspace = folder.parent.parent
    config = RunConfig.load(folder / "config.yaml")
    point = supervisor.resume_point(store, checkpoint) if resume else None
    model_folder = parts.resolve_model(config.model, report, cancelled)
    report(Phase("plan"))
    shape = parts.inspect(model_folder, config.model.path)
    _write(folder / "shape.json", shape.to_json())
    plan = _plan(store, parts, config, shape, workspace, resume)
    with_rows = replace(config, data=_own_data_set(config.data, workspace, folder))
    known = _known_tokens(store, config, resume)
    data = parts.prepare_data(with_rows, model_folder, workspace / "cache" / "data", report, cancelled, known)
    _write(folder / "data.json", data.report.to_json())
    if data.report.largest_id >= shape.vocab_size:
        raise DataError(
            f"The tokenizer gives ids up to {data.report.largest_id:,}, but the model has {shape.vocab_size:,} embeddings.",
            "The tokenizer belongs to another model: choose a model folder with its own tokenizer.",
        )
    store.set_fact("data_for", asdict(config.data))
    if cancelled():
        raise CancelledError("stopped while it was being prepared")
    num_steps = config.train.num_steps or max(1, math.ceil(config.train.num_epochs * data.loader.num_packs / config.packs_per_step))
    prepared = Prepared(config, plan, model_folder, folder, data.loader, num_steps)
    if point is None:
        return prepared
    note = (f"Resumed from step {point.step}, epoch {data.loader.epoch(point.step):.3f} of the data, checkpoint {point.name} "
            f"(checksum {point.checksum[:16]}).{_set_aside_later(store, point)}")  # fmt: skip
    return Prepared(config, plan, model_folder, folder, data.loader, num_steps, point.step, point.path, note)


def _plan(store: RunStore, parts: Parts, config: RunConfig, shape: ModelShape, workspace: Path, resume: bool) -> Plan:
    """The plan saved with the run when it is resumed under the same settings, so that no bit changes; else a new one."""
    path = store.folder / "plan.json"
    basis = json.loads(json.dumps({"memory": asdict(config.memory), "precision": config.precision, "data": asdict(config.data),
                                   "batch": config.train.global_batch_tokens}))  # fmt: skip
    if resume and path.exists() and store.fact("planned_for") == basis:
        return Plan.from_json(path.read_text("utf-8"))
    machine = hardware.with_offload(hardware.read_machine(workspace), workspace, config.memory.offload_folder)
    plan = parts.plan(config, shape, machine)
    _write(path, plan.to_json())
    store.set_fact("planned_for", basis)
    return plan


def _known_tokens(store: RunStore, config: RunConfig, resume: bool) -> str:
    """Names the tokens that the run was trained on so far, so that a source that changed since changes nothing."""
    report = load_json(store.folder / "data.json") or {}
    return str(report.get("cache_key", "")) if resume and store.fact("data_for") == asdict(config.data) else ""


def _set_aside_later(store: RunStore, point: CheckpointInfo) -> str:
    """Checkpoints saved after `point` belong to a course that is left now; the next resume must not take one of them."""
    later = [found for found in store.checkpoints() if found.step > point.step or found.sequence > point.sequence]
    for found in later:
        target = found.path.with_name(f"left-{found.name}-{found.path.stat().st_mtime_ns}")
        found.path.rename(target)
    if not later:
        return ""
    names = ", ".join(found.name for found in later)
    return f" Later checkpoints ({names}) were renamed to left-...; delete them when they are not needed."


def _write(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, "utf-8")
    replace_file(new, path)
