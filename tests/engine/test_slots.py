"""Rings of weight slots: what is copied, what stays, what is replaced."""

import pytest
import torch

from megatrain.engine.debug import Debug
from megatrain.engine.device import H2D, Buffer, Device, Event
from megatrain.engine.schedule import split_groups
from megatrain.engine.slots import WeightCache
from megatrain.plan import Placement
from tests.parity import ALL_RAM, ALL_VRAM, RAM, VRAM, Cut, Recipe, batches, make_engine, run


class CountsLoads(Device):
    """Notes which block's weights go up."""

    def __init__(self) -> None:
        super().__init__(Debug())
        self.loads: list[str] = []

    def copy(self, lane: str, target: Buffer, source: Buffer, target_part: slice | None = None, source_part: slice | None = None) -> Event:
        if lane == H2D and source.name.startswith("weights of"):
            self.loads.append(source.name.removeprefix("weights of "))
        return super().copy(lane, target, source, target_part, source_part)


def cache_of(family: str, cut: Cut) -> tuple[WeightCache, CountsLoads, list[str]]:
    device = CountsLoads()
    engine = make_engine(family, cut, device=device)
    return engine._cache, device, [layout.name for layout in engine.layouts]


def test_a_block_in_a_slot_is_not_copied_again() -> None:
    cache, device, names = cache_of("llama_untied", Cut(weight_slots=2))
    first = cache.acquire(1)
    assert cache.acquire(1) is first
    cache.acquire(2)
    assert cache.acquire(1) is first
    assert device.loads == [names[1], names[2]]


def test_the_slot_used_longest_ago_is_replaced() -> None:
    cache, device, names = cache_of("llama_untied", Cut(weight_slots=3))
    for block in (1, 2, 3, 1, 4, 1, 3, 2):
        cache.acquire(block)
    assert device.loads == [names[block] for block in (1, 2, 3, 4, 2)]


def test_an_update_makes_the_slot_stale() -> None:
    cache, device, names = cache_of("llama_untied", Cut())
    cache.acquire(1)
    cache.stale(1)
    cache.acquire(1)
    assert device.loads == [names[1]] * 2


@pytest.mark.parametrize(("family", "loads"), [("llama_untied", [0, 5, 0]), ("llama_tied", [0, 5])])
def test_embedding_and_head_share_a_slot_when_untied(family: str, loads: list[int]) -> None:
    cache, device, names = cache_of(family, Cut())
    for block in (0, 5, 0):
        cache.acquire(block)
    assert device.loads == [names[block] for block in loads]
    cache.acquire(1)
    assert device.loads[-1] == names[1]


def test_blocks_that_live_in_vram_are_used_where_they_are() -> None:
    placements = (ALL_VRAM, ALL_RAM, ALL_VRAM, ALL_RAM, ALL_RAM, ALL_VRAM)
    device = CountsLoads()
    engine = make_engine("llama_untied", Cut(placements), device=device)
    bound = engine._cache.acquire(2)
    assert bound.buffer is engine.store.blocks[2].weights
    assert device.loads == []
    for name, view in bound.params.items():
        assert view.untyped_storage().data_ptr() == bound.buffer.tensor.untyped_storage().data_ptr(), name


def test_parameters_are_views_of_the_slot_and_hold_the_weights() -> None:
    engine = make_engine("deepseek_v3", Cut())
    masters = engine.master_weights()
    for block in (0, 1, 2, 3, 5):
        bound = engine._cache.acquire(block)
        trained = {entry.name for entry in engine.layouts[block].entries}
        for name, view in bound.params.items():
            assert view.untyped_storage().data_ptr() == bound.buffer.tensor.untyped_storage().data_ptr()
            assert isinstance(view, torch.nn.Parameter) is (name in trained)
            if name in trained:
                assert torch.equal(view, masters[name])
        assert trained <= bound.params.keys()
    assert any("e_score_correction_bias" in name for name in engine._cache.acquire(2).params)


@pytest.mark.parametrize("residents", [(), (2,), (1, 2, 3, 4)])
@pytest.mark.parametrize(("group", "packs"), [(99, 1), (2, 1), (1, 2)])
def test_weights_go_up_twice_a_group_less_what_stays(residents: tuple[int, ...], group: int, packs: int) -> None:
    """What is in a slot when backward, or the next group's forward pass, begins is not loaded again."""
    placements = tuple(Placement(VRAM, RAM, RAM, VRAM) if block in residents else ALL_RAM for block in range(6))
    device = CountsLoads()
    engine = make_engine("llama_untied", Cut(placements, packs, group), device=device)
    run(engine, Recipe((1e-3,)))
    device.loads.clear()
    engine.train_step(batches(1)[0], 1)
    layers = [name for name in device.loads if name.startswith("layer")]
    streamed = [block for block in range(1, 5) if block not in residents]
    groups = len(split_groups(5, packs, group))
    stays = min(2, len(streamed))  # what lies in the two slots when the direction turns
    assert len(layers) == 2 * groups * len(streamed) - groups * stays - (groups - 1) * stays
