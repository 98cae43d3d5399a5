"""The order of a step, as a pure list of operations.

Layer-major inside a group: every micro-batch of the group passes a layer before the next layer is loaded. Backward goes
the same way in reverse, recomputing one layer at a time. A block is loaded one block ahead of its use (and read from disk
another block ahead), a stored input one micro-batch ahead. Several groups follow one another; only in the first are
blocks updated before their first use, only after the last are gradients parked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Do(Enum):
    """What an operation does."""

    UPDATE = "update"  # carry out the pending update of a block
    LOAD = "load"  # have a block's weights on the device
    PREFETCH = "prefetch"  # have a block's weights in host memory soon
    EMBED = "embed"
    LAYER = "layer"
    HEAD = "head"  # loss, and in training the gradient of head and final hidden states
    OPEN = "open"  # have a block's fp32 accumulator on the device
    FETCH = "fetch"  # bring a stored layer input back
    LAYER_BACKWARD = "layer backward"
    EMBED_BACKWARD = "embed backward"
    CLOSE = "close"  # a block's gradient of this group is complete


@dataclass(frozen=True)
class Op:
    """One operation: on block `block` (0 embedding, 1.. layers, last head) and micro-batch `m` of the group."""

    do: Do
    block: int = 0
    m: int = 0


def split_groups(num_packs: int, micro_batch_packs: int, group_micro_batches: int) -> list[list[tuple[int, int]]]:
    """Cut a step into groups of micro-batches, each a range of packs; the last of either may be smaller."""
    cuts = [(start, min(start + micro_batch_packs, num_packs)) for start in range(0, num_packs, micro_batch_packs)]
    return [cuts[start : start + group_micro_batches] for start in range(0, len(cuts), group_micro_batches)]


def forward_ops(num_layers: int, micro_batches: Sequence[int], tied: bool, update: bool, keep: bool) -> Iterator[Op]:
    """From token ids to the loss. `update`: blocks have a pending update. `keep`: backward follows (else the head has no gradient)."""
    head = num_layers + 1

    def ready(block: int) -> Iterator[Op]:
        if update:
            yield Op(Do.UPDATE, block)
        yield Op(Do.LOAD, block)
        if not update and block < head:  # an update reads what it needs by itself
            yield Op(Do.PREFETCH, block + 1)

    yield from ready(0)
    for m in micro_batches:
        yield Op(Do.EMBED, 0, m)
    yield from ready(1)
    for layer in range(1, head):
        for m in micro_batches:
            yield Op(Do.LAYER, layer, m)
        yield from ready(layer + 1)  # last, when the device has work: loading may wait for an update or for the disk
    if keep:
        yield Op(Do.OPEN, head)
        if tied:
            yield Op(Do.OPEN, 0)
    for m in micro_batches:
        yield Op(Do.HEAD, head, m)


def backward_ops(num_layers: int, micro_batches: Sequence[int], tied: bool) -> Iterator[Op]:
    """From the gradient of the final hidden states to every block's gradient."""
    head = num_layers + 1

    def load(block: int) -> Iterator[Op]:
        yield Op(Do.LOAD, block)
        if block:
            yield Op(Do.PREFETCH, block - 1)

    yield Op(Do.CLOSE, head)
    order = [(layer, m) for layer in range(num_layers, 0, -1) for m in micro_batches]
    yield from load(num_layers)
    for layer, m in order[:1]:
        yield Op(Do.FETCH, layer, m)
    for position, (layer, m) in enumerate(order):
        if m == micro_batches[0]:
            yield Op(Do.OPEN, layer)
        if position + 1 < len(order):
            yield Op(Do.FETCH, *order[position + 1])
        yield Op(Do.LAYER_BACKWARD, layer, m)
        if m == micro_batches[-1]:
            yield from load(layer - 1)
            yield Op(Do.CLOSE, layer)
    if not tied:
        yield Op(Do.OPEN, 0)
    for m in micro_batches:
        yield Op(Do.EMBED_BACKWARD, 0, m)
    yield Op(Do.CLOSE, 0)


def step_ops(num_layers: int, groups: Sequence[Sequence[object]], tied: bool) -> Iterator[tuple[int, Op]]:
    """A whole training step: (group, operation)."""
    for group, micro_batches in enumerate(groups):
        numbers = range(len(micro_batches))
        for op in forward_ops(num_layers, numbers, tied, update=group == 0, keep=True):
            yield group, op
        for op in backward_ops(num_layers, numbers, tied):
            yield group, op
