"""The benchmark measures what it says, on a shape that a CPU trains in a second."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatrain import bench, bench_data, bench_measure, bench_picture, bench_report
from megatrain.bench_shapes import BARS, SHAPES
from megatrain.config import RunConfig
from megatrain.data import stdlib
from megatrain.data.batch import PackedBatch
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.shape import BlockShape, ModelShape

QUICK = ["--shape", "tiny", "--precision", "fp32", "--sequence-length", "64", "--tokens-per-step", "256", "--steps", "2", "--warmup", "1"]


def configuration(*more: str) -> RunConfig:
    return bench._configuration(bench._parser().parse_args([*QUICK, *more]))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """A measurement with moments on disk, so that lanes besides computation are used."""
    folder = tmp_path_factory.mktemp("bench")
    config = configuration("--offload-folder", str(folder), "--set", "memory.moments=nvme")
    return bench_measure.measure(config, bench_measure.Wanted("tiny", 2, 1, trace=folder / "step.json")), folder


def test_a_measurement_says_where_the_time_went(measured: tuple[dict, Path]) -> None:
    result, _ = measured
    assert (result["ended"], result["steps"]) == ("finished", 2)
    assert result["tokens_per_s"] == pytest.approx(256 / result["step_s"], rel=0.2), "packs are nearly full"
    parts = result["split_s"]
    assert all(parts[name] > 0 for name in ("forward", "head", "backward"))
    assert parts["waiting for optimizer"] > 0
    assert parts["waiting for disk"] > 0
    assert sum(parts.values()) == pytest.approx(result["traced_step_s"])
    assert result["pure_compute_s"] > 0
    assert result["mfu"] > 0


def test_what_was_moved_and_what_was_predicted_stand_beside_each_other(measured: tuple[dict, Path]) -> None:
    result, _ = measured
    assert result["gb_moved"]["disk_read"] == pytest.approx(result["gb_moved"]["disk_write"])
    assert result["gb_moved"]["disk_read"] * 1e9 == pytest.approx(result["disk_bytes"])
    assert result["predicted_disk_bytes"] >= result["disk_bytes"] > 8 * result["parameters"]
    shown = "\n".join(bench_report.table(result, configuration()))
    for word in ("tokens/s", "quotient", "disk_read", "waiting for disk", "pure compute"):
        assert word in shown


def test_the_trace_becomes_a_picture_that_needs_no_network(measured: tuple[dict, Path]) -> None:
    result, folder = measured
    raw = json.loads((folder / "step.json").read_text())
    assert {span["part"] for span in raw["spans"]} >= {"forward", "head", "backward", "optimizer", "disk_read", "disk_write"}
    assert all(0 <= span["start_s"] <= span["end_s"] <= raw["step_s"] for span in raw["spans"])
    moved = sum(span["num_bytes"] for span in raw["spans"] if span["lane"] == "disk_read")
    assert moved == pytest.approx(result["gb_moved"]["disk_read"] * 1e9)
    assert any(span["name"] == "layer000" for span in raw["spans"] if span["lane"] == "host"), "updates are named by their block"
    page = bench_picture.draw(folder / "step.json")
    assert page == folder / "step.html"
    assert (folder / "plotly.min.js").exists()
    assert "http" not in page.read_text().partition("<body>")[0]


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MegaTrainError, match="cannot be read"):
        bench_picture.draw(tmp_path / "missing.json")


def test_figures_are_recorded_with_their_bars(measured: tuple[dict, Path]) -> None:
    result, _ = measured
    raw = {"train": {"global_batch_tokens": 65536}, "memory": {"vram_limit_gib": 36}, "data": {"path": "synthetic"}}
    large = result | {"shape": "qwen2.5-7b"}
    rows = bench_report.rows_of(large, RunConfig.from_dict(raw), "command", "machine")
    assert rows[0]["bar"] == "10,300 (11,500)"
    assert {"date", "commit", "command", "machine", "work", "figure", "unit", "bar"} == set(rows[0])
    assert [row["bar"] for row in rows if row["work"].endswith("pure-compute time")] == ["≤ 1.06 (1.02)"]
    assert [row["bar"] for row in rows if row["work"].endswith("predicted disk / measured")] == ["0.97 to 1.1"]
    assert "10,300 (11,500)" in bench_report.report_markdown(rows)
    raw["data"]["sequence_length"] = 2048
    assert bench_report.rows_of(large, RunConfig.from_dict(raw), "command", "machine")[0]["bar"] == "", "bars are for packs of 1024"


def test_any_key_can_be_set() -> None:
    config = configuration("--set", "memory.group_micro_batches=2", "--set", "kernels=plain", "--micro-batch-packs", "2")
    assert (config.memory.micro_batch_packs, config.memory.group_micro_batches, config.kernels) == (2, 2, "plain")
    assert configuration("--context", "128").data.sequence_length == 128
    with pytest.raises(ConfigError, match="no_such"):
        configuration("--set", "memory.no_such=1")
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        configuration("--set", "kernels")


def test_the_recorded_command_measures_the_same_again() -> None:
    told = ["--shape", "tiny", "--set", "memory.offload_folder=/my disk", "--no-pure"]
    command = bench._command([*told[:2], "--record", "a.jsonl", "--machine=a b", *told[2:4], "--trace", "x.html", *told[4:]])
    assert command == "python -m megatrain bench --shape tiny --set 'memory.offload_folder=/my disk' --no-pure"


def test_model_flops_count_what_tokens_attend_to() -> None:
    blocks = (BlockShape("embed", "embed", 10), BlockShape("layer", "layer", 100), BlockShape("head", "head", 0))
    shape = ModelShape("a", "a", "a", 8, 5, 2, 2, 4, 16, 64, True, blocks)
    ids = np.zeros((1, 4), np.int64)
    batch = PackedBatch(ids, ids, np.array([[0, 1, 0, 0]]), np.array([3]))  # documents of 2 and 1 tokens, then padding
    assert bench_measure.model_flops_per_token(shape, [batch]) == 6 * 110 + 12 * 1 * 8 * (1 + 2 + 1) / 3


def test_weights_are_small_random_numbers_and_differ() -> None:
    shapes = {"a.weight": (300, 200), "b.weight": (300, 200), "norm.weight": (200,), "a.bias": (200,)}
    found = bench_data.Noise(shapes).tensors(shapes)
    assert float(found["a.weight"].float().std()) == pytest.approx(0.02, rel=0.05)
    assert not found["a.weight"].equal(found["b.weight"])
    assert found["a.weight"].equal(bench_data.Noise(shapes).tensors(["a.weight"])["a.weight"])
    assert (float(found["norm.weight"].mean()), float(found["a.bias"].abs().max())) == (1.0, 0.0)


def test_bars_are_those_of_known_shapes() -> None:
    assert {shape for shape, *_ in BARS} <= set(SHAPES)


@pytest.mark.parametrize("make", [bench_data.library, lambda config, folder: bench_data.synthetic(config, 512, folder)])
def test_packs_are_nearly_full_and_tokens_within_the_vocabulary(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = stdlib.files(stdlib.library_folder())[:100]
    monkeypatch.setattr(stdlib, "files", lambda root: some)
    config = RunConfig.from_dict({"data": {"sequence_length": 1024, "eval_fraction": 0.0}, "train": {"global_batch_tokens": 16384}})
    loader = make(config, tmp_path)
    assert loader.packing_efficiency > 0.95
    batch = loader.step_batch(3)
    assert batch.input_ids.shape == (16, 1024)
    assert 0 <= int(np.min(batch.input_ids)) <= int(np.max(batch.input_ids)) < 512


def test_documents_can_fill_their_packs(tmp_path: Path) -> None:
    loader = bench_data.synthetic(configuration("--context", "256"), 512, tmp_path, median_tokens=256)
    assert np.array_equal(loader.step_batch(0).position_ids, np.arange(256)[None])
