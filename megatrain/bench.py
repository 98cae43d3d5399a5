"""`python -m megatrain bench` measures whole training steps of a named shape: speed, peaks, and where the time goes.

The model has random weights and the real shape; documents are made in memory, so that neither hub nor tokenizer is
needed. Everything of a step counts: data, head, clipping, optimizer. A table for people goes to stdout, the last line is
JSON. Measured figures are kept as lines of assets/bench/results.jsonl, from which assets/bench/RESULTS.md is generated.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatrain.bench_data import MEDIAN_TOKENS
from megatrain.bench_picture import draw
from megatrain.bench_report import record, rows_of, table, write_report
from megatrain.bench_shapes import SHAPES
from megatrain.config import RunConfig
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.precision import PRECISIONS

_UNTOLD = ("--record", "--machine", "--trace")  # options that change no figure


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
            "micro_batch_packs": options.micro_batch_packs,
        },
        "checkpoint": {"every_minutes": 0.0, "every_steps": 10_000_000, "at_end": False},
        "evaluation": {"every_steps": 0},
    }
    for text in options.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError([("--set", f"{text!r} is not KEY=VALUE")])
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
    add("--micro-batch-packs", type=int)
    add("--learning-rate", type=float, default=3e-4)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of a configuration, e.g. memory.moments=nvme")
    add("--text", choices=("synthetic", "library"), default="synthetic", help="library: Python's own, whose loss falls")
    add("--document-tokens", type=int, default=MEDIAN_TOKENS,
        help="median of synthetic documents' lengths; from the sequence length on, every document fills a pack")  # fmt: skip
    add("--steps", type=_positive, default=8)
    add("--warmup", type=int, default=3, help="first steps that do not count")
    add("--seconds", type=float, default=3600.0, help="end after this time, whatever the number of steps")
    add("--no-pure", dest="pure", action="store_false", help="do not time a step without copies and updates")
    add("--workspace", type=Path, help="plan with the speeds measured there (doctor --measure)")
    add("--trace", type=Path, metavar="FILE.html", help="draw what a step does on every lane; its numbers go to FILE.json beside it")
    add("--trace-from", type=Path, metavar="FILE.json", help="only draw FILE.html")
    add("--record", type=Path, help="append the figures to this file of JSON lines")
    add("--machine", default="", help="name of this machine in the record")
    add("--report", action="store_true", help="only write RESULTS.md from results.jsonl")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _command(argv: Sequence[str]) -> str:
    """The command that measures the same again."""
    told: list[str] = []
    untold = False
    for word in argv:
        untold = word.split("=")[0] in _UNTOLD if word.startswith("--") else untold
        if not untold:
            told.append(shlex.quote(word))
    return " ".join(["python -m megatrain bench", *told])


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
    from megatrain.bench_measure import Wanted, measure  # loads torch

    spans_file = options.trace.with_suffix(".json") if options.trace else None
    same = ("shape", "steps", "warmup", "seconds", "text", "document_tokens", "pure", "workspace")
    result = measure(config, Wanted(trace=spans_file, **{name: getattr(options, name) for name in same}))
    print("\n".join(table(result, config)))
    if options.record:
        record(options.record, rows_of(result, config, _command(argv), options.machine or "this machine"))
    if spans_file:
        try:
            print(draw(spans_file))
        except MegaTrainError as error:
            print(error)
    print(json.dumps(result))
    return 0
