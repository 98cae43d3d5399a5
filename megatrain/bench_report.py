"""Measured figures as a table for people, as lines of results.jsonl, and as RESULTS.md."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from megatrain.bench_shapes import ACCEPTED_MEMORY, ACCEPTED_STEP_TIME, BAR_SEQUENCE_LENGTH, BARS, Bar
from megatrain.config import RunConfig
from megatrain.units import GIB, format_bytes, format_count

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


def work_of(result: dict[str, Any], config: RunConfig) -> str:
    """What was measured, in a line."""
    limit = config.memory.vram_limit_gib
    return (
        f"{result['shape']}, {config.precision}, {config.train.global_batch_tokens} tokens/step of {config.data.sequence_length}"
        f"{f', VRAM limit {limit:g} GiB' if limit else ''}, {result['steps']} steps"
    )


def bar_of(result: dict[str, Any], config: RunConfig) -> Bar:
    """What this measurement is held to; nothing where no bar is set."""
    if config.data.sequence_length != BAR_SEQUENCE_LENGTH:
        return Bar(0)
    key = (str(result["shape"]), config.precision, config.train.global_batch_tokens, config.memory.vram_limit_gib)
    return BARS.get(key, Bar(0))


def rows_of(result: dict[str, Any], config: RunConfig, command: str, machine: str) -> list[dict[str, Any]]:
    """The figures of one measurement as lines for results.jsonl."""
    limit, bar, work = config.memory.vram_limit_gib, bar_of(result, config), work_of(result, config)
    figures: list[tuple[str, float, str, str]] = [
        ("speed", result["tokens_per_s"], "tokens/s", _bar(bar.tokens_per_s, bar.stretch)),
        ("step time", result["step_s"], "s", ""),
        ("6ND rate", result["tflops_6nd"], "TFLOP/s", ""),
        ("peak VRAM of the process (NVML)", result["peak_vram_bytes"] / GIB, "GiB", f"≤ {limit:g}" if limit else ""),
        ("peak RAM of the process", result["peak_ram_bytes"] / GIB, "GiB", ""),
        ("states on disk", result["disk_bytes"] / GIB, "GiB", ""),
        ("growth of reserved VRAM after warm-up", result["reserved_growth_bytes"] / GIB, "GiB", "0"),
        ("loss, first tenth of the steps", result["first_loss"], "nats", ""),
        ("loss, last tenth of the steps", result["last_loss"], "nats", "lower"),
        ("share of the measured matmul peak (6N and attention)", result["mfu"], "", ""),
    ]
    for name, predicted, measured, accepted in _predictions(result):
        if measured:
            low, high = accepted
            figures.append((f"predicted {name} / measured", predicted / measured, "", f"{low:g} to {high:g}"))
    if result.get("pure_compute_s"):
        figures.append(("pure-compute time of a step", result["pure_compute_s"], "s", ""))
        ratio = _bar(bar.ratio, bar.ratio_stretch, "≤ ")
        figures.append(("step time / pure-compute time", result["step_over_pure_compute"], "", ratio))
    figures += [(f"{part} in one step", seconds, "s", "") for part, seconds in result["split_s"].items() if seconds]
    figures += [(f"{lane} in one step", moved, "GB", "") for lane, moved in result["gb_moved"].items() if moved]
    common = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "command": command, "machine": machine}
    return [common | {"work": f"{work}: {name}", "figure": figure, "unit": unit, "bar": bar} for name, figure, unit, bar in figures]


def _predictions(result: dict[str, Any]) -> list[tuple[str, float, float, tuple[float, float]]]:
    """(of what, predicted, measured, accepted quotient): seconds, then bytes. 0 measured where nothing is to be seen."""
    found = [("step time", result["predicted_step_s"], result["step_s"], ACCEPTED_STEP_TIME)]
    names = (("peak VRAM", "predicted_vram_bytes", "peak_vram_bytes"), ("peak RAM", "predicted_ram_bytes", "peak_ram_bytes"))
    for name, predicted, measured in (*names, ("disk", "predicted_disk_bytes", "disk_bytes")):
        found.append((name, result[predicted], result[measured], ACCEPTED_MEMORY))
    return found


def _bar(value: float, stretch: float, sign: str = "") -> str:
    if not value:
        return ""
    return f"{sign}{value:,g}" + (f" ({stretch:,g})" if stretch else "")


def commit() -> str:
    """The short commit of this checkout; empty outside one."""
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def table(result: dict[str, Any], config: RunConfig) -> list[str]:
    """What was measured, for people: lines of text."""
    bar = bar_of(result, config)
    speed = f"{result['tokens_per_s']:,.0f} tokens/s, {result['tflops_6nd']:,.4g} TFLOP/s (6ND)"
    lines = [
        work_of(result, config),
        f"  {format_count(result['parameters'])} parameters; micro-batches of {result['micro_batch_packs']} packs, "
        f"{result['group_micro_batches']} in a group; "
        f"first step after {result['set_up_s']:.1f} s, which took {result['first_step_s']:.1f} s",
        _line("speed", speed, _bar(bar.tokens_per_s, bar.stretch)),
        _line("step", f"{_s(result['step_s'])} ({_s(result['fastest_step_s'])} to {_s(result['slowest_step_s'])})"),
        _line("matmul peak", f"{result['matmul_tflops']:,.4g} TFLOP/s, MFU {result['mfu']:.1%}"),
    ]
    if result.get("pure_compute_s"):
        ratio = f"{_s(result['pure_compute_s'])}; the step takes {result['step_over_pure_compute']:.3f} times that"
        lines.append(_line("pure compute", ratio, _bar(bar.ratio, bar.ratio_stretch, "≤ ")))
    lines += ["", f"  {'':<16}{'predicted':>12}{'measured':>12}{'quotient':>10}"]
    for name, predicted, measured, (low, high) in _predictions(result):
        told = [_s(value) if name == "step time" else format_bytes(int(value)) for value in (predicted, measured)]
        quotient = f"{predicted / measured:.3f}" if measured else "–"
        lines.append(f"  {name:<16}{told[0]:>12}{told[1] if measured else '–':>12}{quotient:>10}  bar {low:g} to {high:g}")
    lines += ["", f"  one step of {_s(result['traced_step_s'])}, by what the GPU's compute lane did or waited for"]
    shown = [(part, seconds) for part, seconds in result["split_s"].items() if seconds]
    lines += [f"  {part:<24}{_s(seconds):>10}{seconds / result['traced_step_s']:>8.1%}" for part, seconds in shown]
    lines += ["", "  moved in one step"]
    lines += [f"  {lane:<24}{moved:>8.4g} GB{moved / result['step_s']:>9.3g} GB/s" for lane, moved in result["gb_moved"].items()]
    waits = ", ".join(f"{reason} {_s(seconds)}" for reason, seconds in result["waits_s"].items())
    return [*lines, "", f"  the launching thread waited for: {waits}"]


def _line(name: str, text: str, bar: str = "") -> str:
    return f"  {name:<16}{text}" + (f"   bar {bar}" if bar else "")


def _s(seconds: float) -> str:
    return f"{seconds:.3f} s"
