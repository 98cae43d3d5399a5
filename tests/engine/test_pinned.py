"""The host arena: exact size, pieces that do not touch, no growth."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.engine.pinned import HostArena, arena_bytes
from tests.parity import ALL_RAM, RAM, Cut, make_engine

PAGE = 4096


@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([torch.uint8, torch.int16, torch.bfloat16, torch.float32])), max_size=12))
def test_pieces_lie_apart_on_pages_and_fill_the_arena(wanted: list[tuple[int, torch.dtype]]) -> None:
    sizes = [numel * dtype.itemsize for numel, dtype in wanted]
    arena = HostArena(sizes, pin=False)
    assert arena.num_bytes == sum(-(-size // PAGE) * PAGE for size in sizes)
    pieces = [arena.take(numel, dtype) for numel, dtype in wanted]
    for number, piece in enumerate(pieces):
        assert not piece.view(torch.uint8).any()
        piece.view(torch.uint8).fill_(number + 1)
    for number, (piece, (numel, dtype)) in enumerate(zip(pieces, wanted, strict=True)):
        assert piece.dtype is dtype
        assert piece.shape == (numel,)
        assert piece.data_ptr() % PAGE == 0 or not numel
        assert bool((piece.view(torch.uint8) == number + 1).all())


def test_what_was_not_announced_is_refused() -> None:
    arena = HostArena([8, 16], pin=False)
    with pytest.raises(MemoryError, match="piece 0"):
        arena.take(3, torch.float32)
    arena.take(2, torch.float32)
    arena.take(8, torch.bfloat16)
    with pytest.raises(MemoryError, match="piece 2"):
        arena.take(0, torch.uint8)


@pytest.mark.parametrize("cut", [Cut(), Cut(ALL_RAM, 1, 1, inputs_tier=RAM, accumulators_tier=RAM), Cut(ALL_RAM, 2, 2, inputs_tier=RAM)])
def test_an_engine_takes_all_it_announced(cut: Cut) -> None:
    engine = make_engine("llama_tied", cut, "bf16", torch.bfloat16)
    for arena in (engine.store.pinned, engine.store.plain):
        assert arena._taken == len(arena._sizes)
        assert arena._used == arena.num_bytes
        assert not arena.pinned
        assert not arena.refusal
    moments = sum(2 * arena_bytes(4 * layout.numel) for layout in engine.layouts)
    assert engine.store.plain.num_bytes == moments + sum(arena_bytes(2 * layout.numel_a) for layout in engine.layouts)


class FakeRuntime:
    """cudart whose registration fails from the `grants`-th range on."""

    def __init__(self, grants: int) -> None:
        self.grants, self.held, self.released = grants, [], []

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:  # noqa: N802
        if len(self.held) >= self.grants:
            return 304
        self.held.append((address, length))
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.released.append(address)


@pytest.mark.parametrize(("grants", "pinned"), [(9, True), (2, False)])
def test_a_refusal_leaves_pageable_memory_and_says_so(grants: int, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(grants)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("megatrain.engine.pinned._RANGE_BYTES", 2 * PAGE)
    monkeypatch.setattr("megatrain.engine.pinned._THREADS", 1)
    made = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: made(1) if kwargs.get("device") == "cuda" else made(*args, **kwargs))
    arena = HostArena([PAGE, PAGE, 3 * PAGE, 10, 10], pin=True)
    assert [length for _, length in runtime.held] == [2 * PAGE, 3 * PAGE, 2 * PAGE][:grants]
    assert arena.pinned is pinned
    assert ("pinned memory" in arena.refusal) is not pinned
    arena.take(PAGE, torch.uint8).fill_(1)
    arena.close()
    assert sorted(runtime.released) == sorted(address for address, _ in runtime.held)
