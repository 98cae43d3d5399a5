"""The benchmark measures what it says, on a shape that a CPU trains in a second."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatrain import bench, bench_data, bench_picture, bench_report
from megatrain.bench_shapes import BARS, SHAPES
from megatrain.config import RunConfig
from megatrain.errors import ConfigError

QUICK = ["--shape", "tiny", "--precision", "fp32", "--sequence-length", "64", "--tokens-per-step", "256", "--steps", "4", "--warmup", "1"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("bench")
    options = bench._parser().parse_args([*QUICK, "--trace", str(folder / "step.json")])
    return bench.measure(bench._configuration(options), "tiny", options), folder


def test_a_measurement_says_where_the_time_went(measured: tuple[dict, Path]) -> None:
    result, _ = measured
    assert (result["ended"], result["steps"]) == ("finished", 4)
    assert result["tokens_per_s"] == pytest.approx(256 / result["step_s"], rel=0.2), "packs are nearly full"
    parts = result["split_s"]
    assert {"forward", "head", "backward", "optimizer"} <= set(parts)
    assert all(seconds >= 0 for seconds in parts.values())
    assert result["pure_compute_s"] > 0
    assert 0 < result["mfu"] < 1


def test_the_trace_becomes_a_picture_that_needs_no_network(measured: tuple[dict, Path]) -> None:
    _, folder = measured
    raw = json.loads((folder / "step.json").read_text())
    assert {span["part"] for span in raw["spans"]} >= {"forward", "head", "backward", "optimizer"}
    assert all(0 <= span["start_s"] <= span["end_s"] for span in raw["spans"])
    page = bench_picture.draw(folder / "step.json")
    assert page == folder / "step.html"
    assert (folder / "plotly.min.js").exists()
    assert "http" not in page.read_text().partition("<body>")[0]


def test_figures_are_recorded_with_their_bars(measured: tuple[dict, Path]) -> None:
    result, _ = measured
    config = RunConfig.from_dict({"train": {"global_batch_tokens": 65536}, "memory": {"vram_limit_gib": 36}, "data": {"path": "synthetic"}})
    rows = bench_report.rows_of(result | {"shape": "qwen2.5-7b"}, config, "command", "machine")
    assert rows[0]["bar"] == "10,300 (11,500)"
    assert {"date", "commit", "command", "machine", "work", "figure", "unit", "bar"} == set(rows[0])
    assert [row["bar"] for row in rows if row["work"].endswith("pure-compute time")] == ["≤ 1.06"]
    assert "10,300 (11,500)" in bench_report.report_markdown(rows)


def test_any_key_can_be_set() -> None:
    options = bench._parser().parse_args([*QUICK, "--set", "memory.micro_batch_packs=2", "--set", "kernels=plain"])
    config = bench._configuration(options)
    assert (config.memory.micro_batch_packs, config.kernels) == (2, "plain")
    with pytest.raises(ConfigError, match="no_such"):
        bench._configuration(bench._parser().parse_args(["--set", "memory.no_such=1"]))


def test_bars_are_those_of_known_shapes() -> None:
    assert {shape for shape, *_ in BARS} <= set(SHAPES)


@pytest.mark.parametrize("make", [bench_data.library, lambda config: bench_data.synthetic(config, 512)])
def test_packs_are_nearly_full_and_tokens_within_the_vocabulary(make) -> None:
    config = RunConfig.from_dict({"data": {"sequence_length": 1024, "eval_fraction": 0.0}, "train": {"global_batch_tokens": 16384}})
    loader = make(config)
    assert loader.packing_efficiency > 0.95
    batch = loader.step_batch(3)
    assert batch.input_ids.shape == (16, 1024)
    assert 0 <= int(np.min(batch.input_ids)) <= int(np.max(batch.input_ids)) < 512
