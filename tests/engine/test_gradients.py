"""The norm's sum of squares, and where accumulators live between groups."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.engine import gradients
from megatrain.engine.gradients import edge_accumulator_sizes, sum_of_squares
from tests.parity import ALL_RAM, RAM, Cut, assert_same_bits, batches, make_engine


@given(st.sampled_from([0, 1, 15, 17, 255, 256, 257, 4095, 12_345, 70_000]), st.floats(1e-6, 1e6), st.integers(0, 100))
def test_sum_of_squares_against_fp64(length: int, scale: float, seed: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed)) * scale
    wanted = float(values.double().square().sum())
    assert sum_of_squares(values).dtype == torch.float64
    assert float(sum_of_squares(values)) == pytest.approx(wanted, rel=1e-6)
    rounded = values.bfloat16()
    assert float(sum_of_squares(rounded)) == pytest.approx(float(rounded.double().square().sum()), rel=1e-6)


def test_many_equal_addends_do_not_drift() -> None:
    values = torch.full((3_000_001,), 1e-3)
    assert float(sum_of_squares(values)) == pytest.approx(3_000_001 * float(values[0].double()) ** 2, rel=1e-6)


@pytest.mark.parametrize("place", [0, 4096, 5000])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_bad_value_shows(place: int, value: float) -> None:
    values = torch.zeros(5001)
    values[place] = value
    assert not torch.isfinite(sum_of_squares(values))


def test_tied_models_keep_two_edge_accumulators() -> None:
    for family in ("llama_tied", "llama_untied"):
        engine = make_engine(family)
        sizes = [engine.layouts[0].numel, engine.layouts[-1].numel]
        tied = engine.skeleton.tied
        assert edge_accumulator_sizes(engine.layouts, tied) == (sizes if tied else [max(sizes)])


@pytest.mark.parametrize("parked", [torch.float32, torch.bfloat16], ids=str)
def test_parking_in_pieces_changes_no_gradient(parked: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    [batch] = batches(1)
    cut = Cut(ALL_RAM, 1, 2, accumulators_tier=RAM)
    whole = make_engine("llama_untied", cut, "bf16", parked)
    _, norm = whole.train_step(batch, 0)
    monkeypatch.setattr(gradients, "PARK_ELEMENTS", 1000)  # many pieces a block, the last one short
    pieces = make_engine("llama_untied", cut, "bf16", parked)
    assert pieces.train_step(batch, 0)[1] == pytest.approx(norm, rel=1e-6)
    assert_same_bits(pieces.parked_gradients(), whole.parked_gradients())
