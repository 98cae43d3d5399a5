"""The split of a master into a bf16 half and a 16-bit rest is exact, and its half is the master rounded."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.engine.codecs import merge_master, split_master

RESTS = torch.arange(1 << 16, dtype=torch.int32)
HIGHS = [0x0000, 0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0001, 0x8000, 0x0080, 0x7F7E, 0x007F, 0x4049, 0xC2F7]


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half, rest = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split_master(master, half, rest)
    return half, rest


def test_every_rest_comes_back_to_the_bit() -> None:
    """All 65,536 low halves, ties included, over ordinary, denormal, zero, negative and very large numbers."""
    for high in HIGHS:
        signed = high - (1 << 16) if high >= 1 << 15 else high
        master = ((signed << 16) + RESTS).view(torch.float32)
        half, rest = split(master)
        assert torch.equal(merge_master(half, rest).view(torch.int32), master.view(torch.int32)), hex(high)


def test_half_is_the_nearest_and_ties_go_up() -> None:
    master = ((0x3F80 << 16) + RESTS).view(torch.float32)
    half, rest = split(master)
    nearest = master.bfloat16()
    tie = int((RESTS == 0x8000).nonzero())
    same = torch.ones_like(RESTS, dtype=torch.bool)
    same[tie] = False
    assert torch.equal(half[same], nearest[same])
    assert half[tie].item() == torch.tensor(0x3F81, dtype=torch.int16).view(torch.bfloat16).item() > nearest[tie].item()
    assert int(rest[tie]) == -0x8000
    assert bool((RESTS[RESTS < 0x8000] == rest[RESTS < 0x8000]).all())


def test_a_number_that_bf16_holds_has_no_rest() -> None:
    values = torch.randn(1000).bfloat16()
    half, rest = split(values.float())
    assert torch.equal(half, values)
    assert not rest.any()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126), max_size=40))
def test_any_finite_master_comes_back(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    kept = master.clone()
    assert torch.equal(merge_master(*split(master)).view(torch.int32), kept.view(torch.int32))
    assert torch.equal(master, kept)


def test_halves_in_the_middle_of_a_buffer_are_written_in_place() -> None:
    half, rest = torch.zeros(9, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.int16)
    split_master(torch.full((3,), 1.2345), half[3:6], rest[3:6])
    assert merge_master(half, rest).tolist()[2:7] == [0, *[torch.tensor(1.2345).item()] * 3, 0]
