"""Measured figures as a table for people, as lines of results.jsonl, and as RESULTS.md."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.bench_shapes import BARS, Bar
from megatrain.config import RunConfig
from megatrain.units import GIB, format_bytes

BENCH_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "bench"


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
    bar = BARS.get((str(result["shape"]), config.precision, config.train.global_batch_tokens, limit), Bar(0))
    figures: list[tuple[str, float, str, str]] = [
        ("speed", result["tokens_per_s"], "tokens/s", _bar(bar.tokens_per_s, bar.stretch)),
        ("step time", result["step_s"], "s", ""),
        ("6ND rate", result["tflops_6nd"], "TFLOP/s", ""),
        ("peak VRAM of the process (NVML)", result["peak_vram_bytes"] / GIB, "GiB", f"≤ {limit:g}" if limit else ""),
        ("predicted peak VRAM", result["predicted_vram_bytes"] / GIB, "GiB", ""),
        ("peak RAM of the process", result["peak_ram_bytes"] / GIB, "GiB", ""),
        ("predicted peak RAM", result["predicted_ram_bytes"] / GIB, "GiB", ""),
        ("growth of reserved VRAM after warm-up", result["reserved_growth_bytes"] / GIB, "GiB", "0"),
        ("predicted step time", result["predicted_step_s"], "s", ""),
        ("loss, first tenth of the steps", result["first_loss"], "nats", ""),
        ("loss, last tenth of the steps", result["last_loss"], "nats", "lower"),
    ]
    if result.get("pure_compute_s"):
        figures.append(("pure-compute time of a step", result["pure_compute_s"], "s", ""))
        figures.append(("step time / pure-compute time", result["step_over_pure_compute"], "", _bar(bar.ratio, 0, "≤ ")))
    if result.get("mfu"):
        figures.append(("share of the measured matmul peak (6ND)", result["mfu"], "", ""))
    figures += [(f"{part} in one step", seconds, "s", "") for part, seconds in result.get("split_s", {}).items()]
    common = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "command": command, "machine": machine}
    return [common | {"work": f"{work}: {name}", "figure": figure, "unit": unit, "bar": bar} for name, figure, unit, bar in figures]


def _bar(value: float, stretch: float, sign: str = "") -> str:
    if not value:
        return ""
    return f"{sign}{value:,g}" + (f" ({stretch:,g})" if stretch else "")


def commit() -> str:
    """The short commit of this checkout; empty outside one."""
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def print_table(result: dict[str, Any], write: Callable[[str], object] = print) -> None:
    """What was measured, for people."""
    for key, value in result.items():
        if isinstance(value, dict):
            for name, part in value.items():
                write(f"  {key[: -len('_s')] if key.endswith('_s') else key}: {name:24} {part:,.4g}")
            continue
        text = format_bytes(value) if key.endswith("_bytes") else f"{value:,.4g}" if isinstance(value, float) else value
        write(f"{key:24} {text}")
