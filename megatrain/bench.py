"""`python -m megatrain bench` measures whole training steps of a named shape: speed, peaks, and where the time goes.

The model has random weights and the real shape; documents are made in memory, so that neither hub nor tokenizer is
needed. Everything of a step counts: data, head, clipping, optimizer. A table for people goes to stdout, the last line is
JSON. Measured figures are kept as lines of assets/bench/results.jsonl, from which assets/bench/RESULTS.md is generated.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatrain import bench_data
from megatrain.bench_picture import draw
from megatrain.bench_report import print_table, record, rows_of, write_report
from megatrain.bench_shapes import SHAPES
from megatrain.config import RunConfig
from megatrain.engine.events import Event, StepDone
from megatrain.errors import MegaTrainError
from megatrain.hardware import read_machine
from megatrain.plan import Plan
from megatrain.planner import plan as make_plan
from megatrain.precision import PRECISIONS
from megatrain.shape import ModelShape
from megatrain.telemetry.gpu import GpuReader
from megatrain.telemetry.host import HostReader

_TIERS = ("h2d", "d2h", "disk_read", "disk_write")
_PURE_STEPS = 3


@dataclass
class Measured:
    """What was seen, step by step."""

    steps: list[StepDone] = field(default_factory=list)
    vram_bytes: list[int] = field(default_factory=list)  # NVML's figure for this process, context included
    ram_bytes: list[int] = field(default_factory=list)
    reserved_bytes: list[int] = field(default_factory=list)  # by torch's allocator

    def summary(self, plan: Plan, shape: ModelShape, warmup: int) -> dict[str, Any]:
        timed = self.steps[warmup:] or self.steps
        seconds = sum(step.step_s for step in timed)
        tokens = sum(step.num_tokens for step in timed)
        tenth = max(1, len(self.steps) // 10)
        first = min(warmup, len(self.steps) - 1)
        return {
            "tokens_per_s": tokens / seconds,
            "step_s": seconds / len(timed),
            "predicted_step_s": plan.predicted.step_s,
            "tflops_6nd": 6 * shape.num_params * tokens / seconds / 1e12,
            "peak_vram_bytes": max(self.vram_bytes, default=0),
            "predicted_vram_bytes": plan.predicted.vram_bytes,
            "peak_ram_bytes": max(self.ram_bytes, default=0),
            "predicted_ram_bytes": plan.predicted.ram_bytes,
            "predicted_disk_bytes": plan.predicted.disk_bytes,
            "reserved_growth_bytes": self.reserved_bytes[-1] - self.reserved_bytes[first],
            "ram_growth_bytes": self.ram_bytes[-1] - self.ram_bytes[first],
            "first_loss": float(np.mean([step.loss for step in self.steps[:tenth]])),
            "last_loss": float(np.mean([step.loss for step in self.steps[-tenth:]])),
            "steps": len(self.steps),
            "waits_s": {key: sum(s.waits_s.get(key, 0.0) for s in timed) / len(timed) for key in ("optimizer", "gpu", "ring", "disk")},
            "gb_moved": {key: sum(s.bytes_moved.get(key, 0) for s in timed) / len(timed) / 1e9 for key in _TIERS},
        }


def measure(config: RunConfig, shape_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train a named shape from random weights and say what was seen. Loads torch.

    At most options.steps steps or options.seconds, then the same step without copies and updates. options.trace: file for
    the last step's spans.
    """
    import torch

    from megatrain.engine.timeline import Timeline, split
    from megatrain.engine.trainer import Job, Trainer
    from megatrain.models.inspect import inspect_model

    class BenchTrainer(Trainer):
        def _load_weights(self, model_config: object) -> None:
            shapes: dict[str, Sequence[int]] = {}
            for layout in self.engine.layouts:
                shapes |= {entry.name: entry.shape for entry in layout.entries}
                shapes |= {entry.name: entry.shape for entry in layout.buffers}
            self.engine.load_weights(lambda names: bench_data.noise(shapes, names))

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        raw = SHAPES[shape_name]
        positions = max(raw["max_position_embeddings"], config.data.sequence_length)
        (root / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": positions}), "utf-8")
        shape = inspect_model(root, shape_name)
        plan = make_plan(config, shape, read_machine(options.workspace or root))
        loader = bench_data.library(config) if options.text == "library" else bench_data.synthetic(config, shape.vocab_size)
        seen, gpu, host = Measured(), GpuReader(), HostReader(root)
        on_gpu = plan.device != "cpu"
        traced: list[Any] = []

        def report(event: Event) -> None:
            if not isinstance(event, StepDone):
                return
            seen.steps.append(event)
            seen.vram_bytes.append(int(gpu.read().get("process_vram_bytes") or 0))
            seen.ram_bytes.append(int(host.read().get("worker_ram_bytes") or 0))
            seen.reserved_bytes.append(torch.cuda.memory_reserved() if on_gpu else 0)
            device = trainer.engine.device
            if device.timeline is not None:
                traced.append((device.timeline, event.step_s))
                device.timeline = None
            elif event.step == options.steps - 1:
                device.timeline = Timeline(device.torch_device)

        started = time.perf_counter()
        trainer = BenchTrainer(
            Job(config, plan, root, root, loader, options.steps),
            report,
            lambda: "stop_discard" if time.perf_counter() - started > options.seconds else None,
        )
        try:
            ended = trainer.run()
            result: dict[str, Any] = {"shape": shape_name, "parameters": shape.num_params, "ended": ended.reason}
            result |= seen.summary(plan, shape, options.warmup)
            trainer.engine.finish()
            for timeline, step_s in traced:
                spans = timeline.spans()
                result["split_s"] = split(spans, step_s)
                if options.trace:
                    spans_json = [asdict(span) for span in spans]
                    options.trace.write_text(json.dumps({"step_s": step_s, "work": shape_name, "spans": spans_json}), "utf-8")
            if options.pure and trainer.engine.store.disk is None:
                result["pure_compute_s"] = _pure_compute_s(trainer.engine, loader)
                result["step_over_pure_compute"] = result["step_s"] / result["pure_compute_s"]
            result["matmul_tflops"] = _matmul_flops(trainer.engine.device.torch_device, trainer.engine.skeleton.compute_dtype) / 1e12
            result["mfu"] = result["tflops_6nd"] / result["matmul_tflops"]
        finally:
            trainer.close()
    return result | {"wall_s": time.perf_counter() - started}


def _pure_compute_s(engine: Any, loader: Any) -> float:
    """Seconds of a step whose copies move nothing and after which nothing is updated: the same kernels on whatever is in the slots."""
    engine.device.transfers = False
    best = float("inf")
    for step in range(_PURE_STEPS):
        batch = loader.step_batch(step)
        engine.device.synchronize()
        start = time.perf_counter()
        engine.train_step(batch, step)
        engine.device.synchronize()
        best = min(best, time.perf_counter() - start)
    engine.device.transfers = True
    return best


def _matmul_flops(device: Any, dtype: Any) -> float:
    """FLOP/s of one large matrix product, the quickest of several."""
    import torch

    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _configuration(options: argparse.Namespace) -> RunConfig:
    raw: dict[str, Any] = {
        "precision": options.precision,
        "model": {"path": options.shape, "from_scratch": True},
        "data": {"path": options.text, "sequence_length": options.sequence_length, "eval_fraction": 0.0},
        "train": {
            "num_steps": options.steps,
            "global_batch_tokens": options.tokens_per_step,
            "learning_rate": options.learning_rate,
        },
        "memory": {
            "vram_limit_gib": options.vram_limit_gib,
            "ram_limit_gib": options.ram_limit_gib,
            "offload_folder": options.offload_folder,
        },
        "checkpoint": {"every_minutes": 0.0, "every_steps": 10_000_000, "at_end": False},
        "evaluation": {"every_steps": 0},
    }
    for text in options.set:
        key, _, value = text.partition("=")
        *rooms, name = key.split(".")
        target = raw
        for room in rooms:
            target = target.setdefault(room, {})
        target[name] = yaml.safe_load(value)
    return RunConfig.from_dict(raw)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatrain bench", description="Measure training steps of a named shape.")
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="tiny")
    add("--precision", choices=PRECISIONS, default="bf16")
    add("--vram-limit-gib", type=float)
    add("--ram-limit-gib", type=float)
    add("--offload-folder")
    add("--tokens-per-step", type=int, default=8192)
    add("--sequence-length", "--context", type=int, default=1024)
    add("--learning-rate", type=float, default=3e-4)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of a configuration, e.g. memory.moments=nvme")
    add("--text", choices=("synthetic", "library"), default="synthetic", help="library: Python's own, whose loss falls")
    add("--steps", type=int, default=8)
    add("--warmup", type=int, default=3, help="first steps that do not count")
    add("--seconds", type=float, default=3600.0, help="end after this time, whatever the number of steps")
    add("--no-pure", dest="pure", action="store_false", help="do not time a step without copies and updates")
    add("--workspace", type=Path, help="plan with the speeds measured there (doctor --measure)")
    add("--trace", type=Path, metavar="FILE.json", help="write the last step's spans, and FILE.html where plotly is installed")
    add("--trace-from", type=Path, metavar="FILE.json", help="only draw FILE.html")
    add("--record", type=Path, help="append the figures to this file of JSON lines")
    add("--machine", default="", help="name of this machine in the record")
    add("--report", action="store_true", help="only write RESULTS.md from results.jsonl")
    return parser


def main(argv: list[str]) -> int:
    """Measure, print, and record if asked; returns the exit code."""
    options = _parser().parse_args(argv)
    if options.report:
        print(write_report())
        return 0
    if options.trace_from:
        print(draw(options.trace_from))
        return 0
    config = _configuration(options)
    result = measure(config, options.shape, options)
    print_table(result)
    if options.record:
        told = [f"--{text.strip()}" for text in " ".join(argv).split("--")[1:] if not text.startswith(("record", "machine", "trace"))]
        command = " ".join(["python -m megatrain bench", *told])
        record(options.record, rows_of(result, config, command, options.machine or "this machine"))
    if options.trace:
        try:
            print(draw(options.trace))
        except MegaTrainError as error:
            print(error)
    print(json.dumps(result))
    return 0
