"""Measures training steps of a named shape: as a run does them, then one with its timeline, then computation alone.

The weights are random; documents are made in memory and packed as those of a run. Loads torch.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain import bench_data
from megatrain.bench_shapes import SHAPES
from megatrain.config import RunConfig
from megatrain.data.batch import PackedBatch
from megatrain.data.loader import Loader
from megatrain.engine.engine import Engine
from megatrain.engine.events import Event, Notice, Phase, StepDone
from megatrain.engine.schedules import learning_rate
from megatrain.engine.spans import Span, cut, split
from megatrain.engine.timeline import Timeline
from megatrain.engine.trainer import Job, Trainer
from megatrain.hardware import read_machine
from megatrain.models.inspect import inspect_model
from megatrain.plan import Plan
from megatrain.planner import plan as make_plan
from megatrain.shape import ModelShape
from megatrain.telemetry.gpu import GpuReader
from megatrain.telemetry.host import HostReader

LANES = ("h2d", "d2h", "disk_read", "disk_write")
_WAITS = ("optimizer", "gpu", "ring", "disk")
_PURE_STEPS = 2


@dataclass(frozen=True)
class Wanted:
    """What to measure. At most `steps` steps or `seconds`; the first `warmup` steps do not count."""

    shape: str
    steps: int = 8
    warmup: int = 3
    seconds: float = 3600.0
    text: str = "synthetic"  # or library
    document_tokens: int = bench_data.MEDIAN_TOKENS  # median of synthetic documents
    pure: bool = True  # time computation alone as well
    trace: Path | None = None  # JSON file for the spans of one step
    workspace: Path | None = None  # the machine's measured speeds


@dataclass
class Seen:
    """What was seen, step by step."""

    steps: list[StepDone] = field(default_factory=list)
    vram_bytes: list[int] = field(default_factory=list)  # NVML's figure for this process, context included
    ram_bytes: list[int] = field(default_factory=list)
    reserved_bytes: list[int] = field(default_factory=list)  # by torch's allocator
    notices: list[str] = field(default_factory=list)
    set_up_s: float = 0.0  # from the beginning to the first step

    def timed(self, warmup: int) -> list[StepDone]:
        return self.steps[warmup:] or self.steps

    def summary(self, warmup: int) -> dict[str, Any]:
        timed = self.timed(warmup)
        seconds = sum(step.step_s for step in timed)
        tenth = max(1, len(self.steps) // 10)
        first = min(warmup, len(self.steps) - 1)
        return {
            "tokens_per_s": sum(step.num_tokens for step in timed) / seconds,
            "step_s": seconds / len(timed),
            "fastest_step_s": min(step.step_s for step in timed),
            "slowest_step_s": max(step.step_s for step in timed),
            "peak_vram_bytes": max(self.vram_bytes, default=0),
            "peak_ram_bytes": max(self.ram_bytes, default=0),
            "reserved_growth_bytes": self.reserved_bytes[-1] - self.reserved_bytes[first],
            "ram_growth_bytes": self.ram_bytes[-1] - self.ram_bytes[first],
            "first_loss": float(np.mean([step.loss for step in self.steps[:tenth]])),
            "last_loss": float(np.mean([step.loss for step in self.steps[-tenth:]])),
            "steps": len(self.steps),
            "set_up_s": self.set_up_s,
            "first_step_s": self.steps[0].step_s,  # compiles
            "waits_s": {key: sum(s.waits_s.get(key, 0.0) for s in timed) / len(timed) for key in _WAITS},
            "gb_moved": {key: sum(s.bytes_moved.get(key, 0) for s in timed) / len(timed) / 1e9 for key in LANES},
            "notices": self.notices,
        }


def measure(config: RunConfig, wanted: Wanted) -> dict[str, Any]:
    """Train a named shape from random weights and say what was seen."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # on Windows, files that are mapped stay
        root = Path(folder)
        raw = SHAPES[wanted.shape]
        positions = max(raw["max_position_embeddings"], config.data.sequence_length)
        (root / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": positions}), "utf-8")
        shape = inspect_model(root, wanted.shape)
        plan = make_plan(config, shape, read_machine(wanted.workspace or root))
        loader = _loader(config, wanted, shape, root)
        seen = Seen()
        trainer = _trainer(config, plan, loader, root, wanted, seen)
        try:
            ended = trainer.run()
            result: dict[str, Any] = {"shape": shape.name, "parameters": shape.num_params, "ended": ended.reason}
            result |= seen.summary(wanted.warmup)
            result |= _predicted(plan) | {"disk_bytes": trainer.engine.store.disk.num_bytes if trainer.engine.store.disk else 0}
            result |= _traced(trainer, wanted)
            if wanted.pure:
                result["pure_compute_s"] = _pure_compute_s(trainer.engine, loader)
                result["step_over_pure_compute"] = result["step_s"] / result["pure_compute_s"]
            peak = _matmul_flops_per_s(trainer.engine)
            batches = [loader.step_batch(step.step - 1) for step in seen.timed(wanted.warmup)[:4]]
            result["tflops_6nd"] = 6 * shape.num_params * result["tokens_per_s"] / 1e12
            result["matmul_tflops"] = peak / 1e12
            result["mfu"] = model_flops_per_token(shape, batches) * result["tokens_per_s"] / peak
        finally:
            trainer.close()
    return result | {"wall_s": time.perf_counter() - started}


def model_flops_per_token(shape: ModelShape, batches: Sequence[PackedBatch]) -> float:
    """FLOPs of forward and backward per real token of these batches, without recompute: 6N and causal attention.

    A token at position p of its document attends to p + 1 tokens: 2 products of 2 FLOPs in forward, twice that in backward,
    for each of the L layers and H = heads * head size channels: 12·L·H·(p + 1).
    """
    attended = tokens = 0
    for batch in batches:
        real = np.arange(batch.input_ids.shape[1]) < batch.real_tokens[:, None]
        attended += int(((batch.position_ids + 1) * real).sum())
        tokens += batch.num_tokens
    width = shape.num_heads * shape.head_dim
    return 6 * shape.num_params + 12 * len(shape.layers) * width * attended / tokens


def _loader(config: RunConfig, wanted: Wanted, shape: ModelShape, root: Path) -> Loader:
    if wanted.text == "library":
        return bench_data.library(config, root)
    return bench_data.synthetic(config, shape.vocab_size, root, wanted.document_tokens)


def _predicted(plan: Plan) -> dict[str, Any]:
    found = plan.predicted
    return {
        "predicted_step_s": found.step_s,
        "predicted_bottleneck": found.bottleneck,
        "predicted_vram_bytes": found.vram_bytes,
        "predicted_ram_bytes": found.ram_bytes,
        "predicted_disk_bytes": found.disk_bytes,
        "micro_batch_packs": plan.micro_batch_packs,
        "group_micro_batches": plan.group_micro_batches,
    }


class BenchTrainer(Trainer):
    """A trainer whose weights cost no time to make."""

    def _load_weights(self, model_config: object) -> None:
        shapes: dict[str, Sequence[int]] = {}
        for layout in self.engine.layouts:
            shapes |= {entry.name: entry.shape for entry in layout.entries}
            shapes |= {entry.name: entry.shape for entry in layout.buffers}
        self.engine.load_weights(bench_data.Noise(shapes).tensors)

    def one_more_step(self) -> None:
        """A step as the loop does it, told to nobody."""
        _, grad_norm = self.engine.train_step(self.job.loader.step_batch(self.step), self.step)
        last_rate = learning_rate(self.config, self.job.num_steps - 1, self.job.num_steps)
        self.engine.decide(self._update(last_rate, grad_norm))
        self.step += 1


def _trainer(config: RunConfig, plan: Plan, loader: Loader, root: Path, wanted: Wanted, seen: Seen) -> BenchTrainer:
    started = time.perf_counter()

    def poll() -> str | None:
        return "stop_discard" if seen.steps and time.perf_counter() - started > wanted.seconds else None

    return BenchTrainer(Job(config, plan, root, root, loader, wanted.steps), _reporter(seen, root, plan.device != "cpu"), poll)


def _reporter(seen: Seen, root: Path, on_gpu: bool) -> Callable[[Event], None]:
    """Keeps what is reported in `seen`, and shows on stderr that it goes on."""
    gpu, host, started = GpuReader(), HostReader(root), time.perf_counter()

    def report(event: Event) -> None:
        if isinstance(event, Notice):
            seen.notices.append(event.text)
            print(event.text, file=sys.stderr)
        elif isinstance(event, Phase) and event.name in ("compile", "train") and not seen.steps:
            seen.set_up_s = seen.set_up_s or time.perf_counter() - started
        elif isinstance(event, StepDone):
            seen.steps.append(event)
            seen.vram_bytes.append(int(gpu.read().get("process_vram_bytes") or 0))
            seen.ram_bytes.append(int(host.read().get("worker_ram_bytes") or 0))
            seen.reserved_bytes.append(torch.cuda.memory_reserved() if on_gpu else 0)
            print(f"step {event.step}: {event.step_s:.3f} s, loss {event.loss:.4f}", file=sys.stderr)

    return report


def _traced(trainer: BenchTrainer, wanted: Wanted) -> dict[str, Any]:
    """Where the time of one more step goes; its spans go to `wanted.trace`."""
    spans, step_s = trace(trainer)
    found = split(spans, step_s)
    if wanted.trace:
        raw = {"work": wanted.shape, "step_s": step_s, "split_s": found, "spans": [asdict(span) for span in spans]}
        wanted.trace.write_text(json.dumps(raw), "utf-8")
    return {"traced_step_s": step_s, "split_s": found}


def trace(trainer: BenchTrainer) -> tuple[list[Span], float]:
    """(spans, seconds) of a step. Two are recorded, so that the second finds the updates and copies that follow a first."""
    engine = trainer.engine
    timeline = engine.device.timeline = Timeline(engine.device.torch_device)
    moments = [timeline.now()]
    try:
        for _ in range(2):
            trainer.one_more_step()
            moments.append(timeline.now())
    finally:
        engine.device.timeline = None
    engine.finish()
    return cut(timeline.spans(), *moments[1:]), moments[2] - moments[1]


def _pure_compute_s(engine: Engine, loader: Loader) -> float:
    """Seconds of a step that moves nothing and updates nothing: the same kernels on whatever is in the slots. No update is pending."""
    device, best = engine.device, float("inf")
    device.transfers = False
    try:
        for step in range(_PURE_STEPS):
            batch = loader.step_batch(step)
            device.synchronize()
            start = time.perf_counter()
            engine.train_step(batch, step)
            device.synchronize()
            best = min(best, time.perf_counter() - start)
    finally:
        device.transfers = True
    return best


def _matmul_flops_per_s(engine: Engine) -> float:
    """FLOP/s of one large matrix product in the compute dtype, the quickest of several."""
    device, dtype = engine.device.torch_device, engine.skeleton.compute_dtype
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(10):
        engine.device.synchronize()
        start = time.perf_counter()
        torch.matmul(left, right, out=out)
        engine.device.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
