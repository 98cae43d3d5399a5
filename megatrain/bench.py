"""`python -m megatrain bench` measures whole training steps of a named shape: speed, peaks, and whether memory stays flat.

The model has random weights and the real shape; the text is Python's own library, a byte per token, so that neither hub
nor tokenizer is needed. A table for people goes to stdout, the last line is JSON. Measured figures are kept as lines of
assets/bench/results.jsonl, from which assets/bench/RESULTS.md is generated.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.config import RunConfig
from megatrain.data import stdlib
from megatrain.data.batch import IGNORE_INDEX, PackedBatch
from megatrain.engine.events import Ended, Event, StepDone
from megatrain.hardware import Machine, read_machine
from megatrain.plan import Plan
from megatrain.planner import plan as make_plan
from megatrain.precision import PRECISIONS
from megatrain.shape import ModelShape
from megatrain.telemetry.gpu import GpuReader
from megatrain.telemetry.host import HostReader
from megatrain.units import GIB, format_bytes

BENCH_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "bench"
_QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "initializer_range": 0.02, "dtype": "bfloat16",
}  # fmt: skip
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "initializer_range": 0.02, "dtype": "bfloat16",
}  # fmt: skip


def _shape(base: dict[str, Any], layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool) -> dict[str, Any]:
    return base | {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": mlp, "vocab_size": vocab, "tie_word_embeddings": tied,
    }  # fmt: skip


SHAPES = {
    "qwen2.5-0.5b": _shape(_QWEN, 24, 896, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": _shape(_QWEN, 28, 1536, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": _shape(_QWEN, 36, 2048, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": _shape(_QWEN, 28, 3584, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": _shape(_QWEN, 48, 5120, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": _shape(_QWEN, 64, 5120, 40, 8, 27648, 152064, False),
    "llama-3-8b": _shape(_LLAMA, 32, 4096, 32, 8, 14336, 128256, False),
    "tiny": _shape(_QWEN, 4, 64, 4, 2, 128, 512, True),
}  # fmt: skip


class LibraryText:
    """The standard library's functions as bytes, packed to `length` tokens; a trainer's data loader."""

    fingerprint = "python-library-bytes"

    def __init__(self, packs_per_step: int, length: int) -> None:
        self.packs_per_step = packs_per_step
        self._length = length
        texts = [function.source.encode("utf-8")[: length - 1] for function in stdlib.functions()]
        self._packs = _fill_packs(texts, length)
        np.random.default_rng(0).shuffle(self._packs)

    def step_batch(self, step: int) -> PackedBatch:
        chosen = [(step * self.packs_per_step + i) % len(self._packs) for i in range(self.packs_per_step)]
        return _batch([self._packs[i] for i in chosen], self._length)

    def epoch(self, step: int) -> float:
        return step * self.packs_per_step / len(self._packs)

    def eval_batches(self, packs: int) -> list[PackedBatch]:
        return []


def _fill_packs(texts: list[bytes], length: int) -> list[list[bytes]]:
    packs: list[list[bytes]] = [[]]
    room = length
    for text in texts:
        if len(text) + 1 > room:
            packs.append([])
            room = length
        packs[-1].append(text)
        room -= len(text) + 1
    return packs


def _batch(packs: list[list[bytes]], length: int) -> PackedBatch:
    """Token = byte + 3; 2 ends a document; 0 pads."""
    ids = np.zeros((len(packs), length), np.int64)
    labels, positions = np.full_like(ids, IGNORE_INDEX), np.zeros_like(ids)
    real = np.zeros(len(packs), np.int64)
    for row, texts in enumerate(packs):
        at = 0
        for text in texts:
            tokens = np.append(np.frombuffer(text, np.uint8).astype(np.int64) + 3, 2)
            stop = at + len(tokens)
            ids[row, at:stop], positions[row, at:stop] = tokens, np.arange(len(tokens))
            labels[row, at : stop - 1] = tokens[1:]
            at = stop
        positions[row, at:], real[row] = np.arange(length - at), at
    return PackedBatch(ids, labels, positions, real)


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
        return {
            "tokens_per_s": tokens / seconds,
            "step_s": seconds / len(timed),
            "tflops_6nd": 6 * shape.num_params * tokens / seconds / 1e12,
            "peak_vram_bytes": max(self.vram_bytes, default=0),
            "predicted_vram_bytes": plan.predicted.vram_bytes,
            "peak_ram_bytes": max(self.ram_bytes, default=0),
            "predicted_ram_bytes": plan.predicted.ram_bytes,
            "predicted_step_s": plan.predicted.step_s,
            "reserved_growth_bytes": self.reserved_bytes[-1] - self.reserved_bytes[min(warmup, len(self.steps) - 1)],
            "ram_growth_bytes": self.ram_bytes[-1] - self.ram_bytes[min(warmup, len(self.steps) - 1)],
            "first_loss": float(np.mean([step.loss for step in self.steps[:tenth]])),
            "last_loss": float(np.mean([step.loss for step in self.steps[-tenth:]])),
            "steps": len(self.steps),
            "waits_s": {key: sum(s.waits_s.get(key, 0.0) for s in timed) / len(timed) for key in ("optimizer", "gpu", "ring")},
            "bytes_moved": {key: sum(s.bytes_moved.get(key, 0) for s in timed) // len(timed) for key in ("h2d", "d2h")},
        }


def measure(config: RunConfig, shape_name: str, steps: int, seconds: float, warmup: int = 3) -> dict[str, Any]:
    """Train a named shape from random weights, at most `steps` steps or `seconds`, and say what was seen. Loads torch."""
    import torch

    from megatrain.engine.trainer import Job, train
    from megatrain.models.inspect import inspect_model

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "config.json").write_text(json.dumps(SHAPES[shape_name]), "utf-8")
        shape = inspect_model(root, shape_name)
        machine: Machine = read_machine(root)
        plan = make_plan(config, shape, machine)
        loader = LibraryText(config.packs_per_step, config.data.sequence_length)
        seen, gpu, host = Measured(), GpuReader(), HostReader(root)
        on_gpu = plan.device != "cpu"

        def report(event: Event) -> None:
            if isinstance(event, StepDone):
                seen.steps.append(event)
                seen.vram_bytes.append(int(gpu.read().get("process_vram_bytes") or 0))
                seen.ram_bytes.append(int(host.read().get("worker_ram_bytes") or 0))
                seen.reserved_bytes.append(torch.cuda.memory_reserved() if on_gpu else 0)

        job = Job(config, plan, root, root, loader, steps)
        started = time.perf_counter()
        ended: Ended = train(job, report, lambda: "stop_discard" if time.perf_counter() - started > seconds else None)
        summary = seen.summary(plan, shape, warmup)
    return {"shape": shape_name, "parameters": shape.num_params, "ended": ended.reason, "wall_s": time.perf_counter() - started} | summary


def record(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append measured figures, a JSON line each: date, commit, command, machine, work, figure, unit, bar."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def report_markdown(rows: list[dict[str, Any]]) -> str:
    """RESULTS.md from the lines of results.jsonl: one table per machine, newest figure of each work last."""
    origin = "Generated from results.jsonl by `python -m megatrain bench --report`; every figure was measured."
    lines = ["# Measured results", "", origin, ""]
    for machine in dict.fromkeys(row["machine"] for row in rows):
        lines += [f"## {machine}", "", "| date | work | figure | unit | bar | commit | command |", "|---|---|---|---|---|---|---|"]
        for row in rows:
            if row["machine"] == machine:
                figure = f"{row['figure']:,.4g}" if isinstance(row["figure"], float) else f"{row['figure']:,}"
                cells = (row["date"], row["work"], figure, row["unit"], row["bar"] or "–", row["commit"], f"`{row['command']}`")
                lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def write_report(folder: Path = BENCH_FOLDER) -> Path:
    """Write RESULTS.md beside results.jsonl."""
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text("utf-8").splitlines()]
    target = folder / "RESULTS.md"
    target.write_text(report_markdown(rows), "utf-8")
    return target


def rows_of(result: dict[str, Any], config: RunConfig, command: str, machine: str) -> list[dict[str, Any]]:
    """The figures of one measurement as lines for results.jsonl."""
    limit = config.memory.vram_limit_gib
    work = (
        f"{result['shape']}, {config.precision}, {config.train.global_batch_tokens} tokens/step of {config.data.sequence_length}"
        f"{f', VRAM limit {limit:g} GiB' if limit else ''}, {result['steps']} steps"
    )
    figures: list[tuple[str, float, str, str]] = [
        ("speed", result["tokens_per_s"], "tokens/s", ""),
        ("step time", result["step_s"], "s", ""),
        ("6ND rate", result["tflops_6nd"], "TFLOP/s", ""),
        ("peak VRAM of the process (NVML)", result["peak_vram_bytes"] / GIB, "GiB", f"≤ {limit:g}" if limit else ""),
        ("predicted peak VRAM", result["predicted_vram_bytes"] / GIB, "GiB", ""),
        ("peak RAM of the process", result["peak_ram_bytes"] / GIB, "GiB", ""),
        ("predicted peak RAM", result["predicted_ram_bytes"] / GIB, "GiB", ""),
        ("growth of reserved VRAM after warm-up", result["reserved_growth_bytes"] / GIB, "GiB", "0"),
        ("loss, first tenth of the steps", result["first_loss"], "nats", ""),
        ("loss, last tenth of the steps", result["last_loss"], "nats", "lower"),
    ]
    common = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "command": command, "machine": machine}
    return [common | {"work": f"{work}: {name}", "figure": figure, "unit": unit, "bar": bar} for name, figure, unit, bar in figures]


def commit() -> str:
    """The short commit of this checkout; empty outside one."""
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def print_table(result: dict[str, Any], write: Callable[[str], object] = print) -> None:
    """What was measured, for people."""
    for key, value in result.items():
        text = format_bytes(value) if key.endswith("_bytes") else f"{value:,.4g}" if isinstance(value, float) else value
        write(f"{key:24} {text}")


def main(argv: list[str]) -> int:
    """Measure, print, and record if asked; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatrain bench", description="Measure training steps of a named shape.")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--vram-limit-gib", type=float, default=None)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after this time, whatever the number of steps")
    parser.add_argument("--record", type=Path, default=None, help="append the figures to this file of JSON lines")
    parser.add_argument("--machine", default="", help="name of this machine in the record")
    parser.add_argument("--report", action="store_true", help="only write RESULTS.md from results.jsonl")
    options = parser.parse_args(argv)
    if options.report:
        print(write_report())
        return 0
    config = RunConfig.from_dict(
        {
            "precision": options.precision,
            "model": {"path": options.shape, "from_scratch": True},
            "data": {"path": "library", "sequence_length": options.sequence_length, "eval_fraction": 0.0},
            "train": {
                "num_steps": options.steps,
                "global_batch_tokens": options.tokens_per_step,
                "learning_rate": options.learning_rate,
            },
            "memory": {"vram_limit_gib": options.vram_limit_gib},
            "checkpoint": {"every_minutes": 0.0, "every_steps": 10_000_000, "at_end": False},
        }
    )
    result = measure(config, options.shape, options.steps, options.seconds)
    print_table(result)
    if options.record:
        command = "python -m megatrain bench " + " ".join(argv)
        record(options.record, rows_of(result, config, command, options.machine or "this machine"))
    print(json.dumps(result))
    return 0
