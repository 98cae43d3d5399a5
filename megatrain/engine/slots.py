"""WeightCache: device copies of the compute weights of streamed blocks, in rings of slots.

Decoder layers share a ring; embedding and head have slots of their own (one shared slot when the head is untied, since
they are never needed together). A block that is still in its slot is not copied again; an update of the block makes its
slot stale. Blocks whose home is VRAM are used where they are.
"""

import torch
from torch import nn

from megatrain.engine.device import H2D, Buffer, Device
from megatrain.engine.tiers import StateStore
from megatrain.models.blocks import BlockLayout
from megatrain.plan import Plan, Tier

_BYTES = torch.uint8


class Slot:
    """Device memory for the weights of one block at a time."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.block: int | None = None
        self.fresh = False  # holds the block's newest weights
        self.used = 0  # for least-recently-used replacement


class BoundWeights:
    """A block's weights on the device: the buffer to name in launches, and parameters that are views of it."""

    def __init__(self, buffer: Buffer, params: dict[str, nn.Parameter]) -> None:
        self.buffer = buffer
        self.params = params


def edge_slot_sizes(layouts: list[BlockLayout], plan: Plan, tied: bool) -> list[int]:
    """Bytes of the slots for embedding and head: one each when tied, one for both when not; none for residents."""
    streamed = [layouts[i].weight_bytes for i in (0, -1) if plan.placements[i].weights is not Tier.VRAM]
    return streamed if tied or not streamed else [max(streamed)]


class WeightCache:
    """Gives the engine a block's weights on the device. Blocks are numbered as in the store."""

    def __init__(self, store: StateStore, plan: Plan, tied: bool, device: Device) -> None:
        self._store = store
        self._device = device
        self._clock = 0
        layouts = [block.layout for block in store.blocks]
        self._last = len(layouts) - 1
        streamed = [b.layout.weight_bytes for b in store.blocks[1:-1] if b.placement.weights is not Tier.VRAM]
        num_slots = min(plan.weight_slots, len(streamed))
        self._layer_ring = [Slot(device.empty(max(streamed), _BYTES, f"weight slot {i}")) for i in range(num_slots)]
        sizes = edge_slot_sizes(layouts, plan, tied)
        self._edge_ring = [Slot(device.empty(size, _BYTES, f"edge slot {i}")) for i, size in enumerate(sizes)]
        self._bound: dict[tuple[int, int], BoundWeights] = {}

    def acquire(self, index: int) -> BoundWeights:
        """The newest weights of a block on the device, loading them if they are not there."""
        block = self._store.blocks[index]
        if block.placement.weights is Tier.VRAM:
            return self._bind(block.weights, index)
        slot = self._slot_for(index)
        if not (slot.block == index and slot.fresh):
            part = slice(0, block.layout.weight_bytes)
            source = self._store.in_host(index, "weights", renew=False)
            self._device.copy(H2D, slot.buffer, source, target_part=part, source_part=part)
            slot.block, slot.fresh = index, True
        self._clock += 1
        slot.used = self._clock
        return self._bind(slot.buffer, index)

    def prefetch(self, index: int) -> None:
        """Have the weights of a block in host memory soon, if they are on disk and on no slot of the device."""
        if self._store.blocks[index].placement.weights is Tier.NVME and not self._is_fresh(index):
            self._store.in_host(index, "weights", renew=False)

    def stale(self, index: int) -> None:
        """The home of this block has newer weights than any slot."""
        for slot in [*self._layer_ring, *self._edge_ring]:
            if slot.block == index:
                slot.fresh = False

    def release(self, lane: str, index: int) -> None:
        """The slot of a streamed block may be written again; in the debug mode it is poisoned, and loaded anew when needed."""
        if not self._device.debug.poison:
            return
        for slot in [*self._layer_ring, *self._edge_ring]:
            if slot.block == index:
                self._device.release(lane, slot.buffer)
                slot.fresh = False

    def _is_fresh(self, index: int) -> bool:
        return any(slot.block == index and slot.fresh for slot in [*self._layer_ring, *self._edge_ring])

    def _slot_for(self, index: int) -> Slot:
        ring = self._edge_ring if index in (0, self._last) else self._layer_ring
        for slot in ring:
            if slot.block == index:
                return slot
        fitting = [slot for slot in ring if slot.buffer.tensor.numel() >= self._store.blocks[index].layout.weight_bytes]
        if ring is self._edge_ring and len(ring) == 2:
            return ring[0] if index == 0 else ring[1]
        return min(fitting, key=lambda slot: slot.used)

    def _bind(self, buffer: Buffer, index: int) -> BoundWeights:
        key = (id(buffer), index)
        if key not in self._bound:
            layout = self._store.blocks[index].layout
            views = layout.weight_views(buffer.tensor)
            trained = {entry.name for entry in layout.entries}
            params = {name: nn.Parameter(view, requires_grad=True) if name in trained else view for name, view in views.items()}
            self._bound[key] = BoundWeights(buffer, params)  # type: ignore[arg-type]
        return self._bound[key]
