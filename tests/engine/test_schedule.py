"""Properties of the list of operations, for any number of layers, micro-batches and groups."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatrain.engine.schedule import Do, Op, forward_ops, split_groups, step_ops

LAYERS = st.integers(1, 6)
GROUPS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def ops_of(num_layers: int, groups: list[int], tied: bool) -> list[tuple[int, Op]]:
    return list(step_ops(num_layers, [range(size) for size in groups], tied))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_groups_cover_every_pack_once_in_order(num_packs: int, micro_batch_packs: int, group_micro_batches: int) -> None:
    groups = split_groups(num_packs, micro_batch_packs, group_micro_batches)
    cuts = [cut for group in groups for cut in group]
    assert [pack for start, stop in cuts for pack in range(start, stop)] == list(range(num_packs))
    assert all(stop - start == micro_batch_packs for start, stop in cuts[:-1])
    assert all(len(group) == group_micro_batches for group in groups[:-1])
    assert all(groups)


@given(LAYERS, GROUPS, st.booleans())
def test_every_computation_happens_once_a_group_and_micro_batch(num_layers: int, groups: list[int], tied: bool) -> None:
    counted = Counter((group, op) for group, op in ops_of(num_layers, groups, tied))
    for group, size in enumerate(groups):
        for m in range(size):
            for do, blocks in (
                (Do.EMBED, [0]), (Do.LAYER, range(1, num_layers + 1)), (Do.HEAD, [num_layers + 1]),
                (Do.FETCH, range(1, num_layers + 1)), (Do.LAYER_BACKWARD, range(1, num_layers + 1)), (Do.EMBED_BACKWARD, [0]),
            ):  # fmt: skip
                for block in blocks:
                    assert counted[group, Op(do, block, m)] == 1
    moved = 2 * (num_layers + 2) + 2 * (num_layers + 1) + 1  # opened and closed; loaded
    prefetched = len(groups) * num_layers + (len(groups) - 1) * (num_layers + 1)  # backward; forward without updates
    assert sum(counted.values()) == sum(groups) * (3 + 3 * num_layers) + len(groups) * moved + prefetched + num_layers + 2


@given(LAYERS, GROUPS, st.booleans())
def test_layer_major_inside_a_group(num_layers: int, groups: list[int], tied: bool) -> None:
    ops = ops_of(num_layers, groups, tied)
    for group, size in enumerate(groups):
        forward = [(op.block, op.m) for g, op in ops if g == group and op.do is Do.LAYER]
        backward = [(op.block, op.m) for g, op in ops if g == group and op.do is Do.LAYER_BACKWARD]
        assert forward == [(layer, m) for layer in range(1, num_layers + 1) for m in range(size)]
        assert backward == [(layer, m) for layer in range(num_layers, 0, -1) for m in range(size)]
    assert [group for group, _ in ops] == sorted(group for group, _ in ops)


@given(LAYERS, GROUPS, st.booleans())
def test_updates_come_once_and_before_the_first_load(num_layers: int, groups: list[int], tied: bool) -> None:
    updated: set[int] = set()
    for group, op in ops_of(num_layers, groups, tied):
        if op.do is Do.UPDATE:
            assert group == 0
            assert op.block not in updated
            updated.add(op.block)
        elif op.do is Do.LOAD:
            assert op.block in updated
    assert updated == set(range(num_layers + 2))


@given(LAYERS, GROUPS, st.booleans())
def test_blocks_are_loaded_accumulators_open_and_inputs_fetched_before_their_use(num_layers: int, groups: list[int], tied: bool) -> None:
    head = num_layers + 1
    loaded: set[int] = set()
    opened: set[int] = set()
    fetched: set[tuple[int, int]] = set()
    last_group = -1
    for group, op in ops_of(num_layers, groups, tied):
        if group != last_group:
            assert not opened
            loaded, fetched, last_group = set(), set(), group
        if op.do is Do.LOAD:
            loaded.add(op.block)
        elif op.do is Do.FETCH:
            fetched.add((op.block, op.m))
        elif op.do is Do.OPEN:
            assert op.block not in opened
            opened.add(op.block)
        elif op.do is Do.CLOSE:
            opened.remove(op.block)
        elif op.do not in (Do.UPDATE, Do.PREFETCH):
            assert op.block in loaded
            if op.do in (Do.HEAD, Do.LAYER_BACKWARD, Do.EMBED_BACKWARD):
                assert op.block in opened
            if op.do is Do.HEAD and tied:
                assert 0 in opened
            if op.do is Do.LAYER_BACKWARD:
                assert (op.block, op.m) in fetched
                assert head not in opened, "an untied model has one slot for embedding and head"
    assert not opened


@given(LAYERS, GROUPS, st.booleans())
def test_a_block_is_loaded_when_the_device_has_the_whole_block_before_it_to_do(num_layers: int, groups: list[int], tied: bool) -> None:
    """Loading a block may wait for its update or for the disk: the device must have something to do meanwhile."""
    ops = ops_of(num_layers, groups, tied)
    for group, size in enumerate(groups):
        mine = [op for g, op in ops if g == group]
        for layer in range(2, num_layers + 1):
            load = mine.index(Op(Do.LOAD, layer))
            assert mine.index(Op(Do.LAYER, layer - 1, size - 1)) < load < mine.index(Op(Do.LAYER, layer, 0))
        for layer in range(1, num_layers):
            load = len(mine) - 1 - mine[::-1].index(Op(Do.LOAD, layer))
            before = mine.index(Op(Do.LAYER_BACKWARD, layer + 1, size - 1))
            assert before < load < mine.index(Op(Do.LAYER_BACKWARD, layer, 0))


@given(LAYERS, GROUPS, st.booleans())
def test_weights_are_asked_for_one_block_before_they_are_loaded(num_layers: int, groups: list[int], tied: bool) -> None:
    """Where no update brings them: the disk has the time of a block's computation."""
    for group in range(len(groups)):
        moves = [op for g, op in ops_of(num_layers, groups, tied) if g == group and op.do in (Do.LOAD, Do.PREFETCH)]
        for position, op in enumerate(moves):
            if op.do is Do.PREFETCH:
                assert moves[position - 1].do is Do.LOAD
                assert moves[position + 1] == Op(Do.LOAD, op.block)


@given(LAYERS, GROUPS, st.booleans())
def test_loads_are_two_a_group(num_layers: int, groups: list[int], tied: bool) -> None:
    """Every layer goes up once for forward and once for backward, embedding and head as the schedule needs them."""
    loads = Counter((group, op.block) for group, op in ops_of(num_layers, groups, tied) if op.do is Do.LOAD)
    for group in range(len(groups)):
        assert [loads[group, block] for block in range(num_layers + 2)] == [2] * (num_layers + 1) + [1]


@given(LAYERS, st.integers(1, 4), st.booleans())
def test_evaluation_is_the_forward_pass_alone(num_layers: int, size: int, tied: bool) -> None:
    ops = list(forward_ops(num_layers, range(size), tied, update=False, keep=False))
    assert {op.do for op in ops} == {Do.LOAD, Do.PREFETCH, Do.EMBED, Do.LAYER, Do.HEAD}
    training = [op for op in forward_ops(num_layers, range(size), tied, update=True, keep=True) if op.do not in (Do.UPDATE, Do.OPEN)]
    assert [op for op in ops if op.do is not Do.PREFETCH] == training
