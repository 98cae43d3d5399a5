"""GradientFlow: fp32 accumulators on the device, the exact norm, and parking.

A block's gradient is accumulated in fp32 over the micro-batches of a step. Layers take turns in a ring of accumulators;
with several groups of micro-batches every block has an accumulator of its own between groups. When a block's gradient is
complete it is rounded to the parked type, its squares are summed from the rounded values, and it is sent home.
"""

import torch

from megatrain.engine.device import COMPUTE, D2H, DISK_WRITE, H2D, Buffer, Device
from megatrain.engine.tiers import StateStore
from megatrain.models.blocks import BlockLayout
from megatrain.plan import Plan, Tier

PARK_ELEMENTS = 1 << 26  # largest piece that is rounded and sent at once
_NORM_ROW = 256  # squares are summed in fp32 over this many elements, then in fp64: more would cost the sixth digit


def edge_accumulator_sizes(layouts: list[BlockLayout], tied: bool) -> list[int]:
    """Elements of the accumulators of embedding and head: one each when tied, one for both when not."""
    sizes = [layouts[0].numel, layouts[-1].numel]
    return sizes if tied else [max(sizes)]


class GradientFlow:
    """Accumulators, parking and norm of one step at a time."""

    def __init__(self, store: StateStore, plan: Plan, tied: bool, num_groups: int, device: Device) -> None:
        self._store = store
        self._device = device
        layouts = [block.layout for block in store.blocks]
        self._last = len(layouts) - 1
        self._tied = tied
        self._homes: list[Buffer] | None = None  # accumulators between groups
        self._homes_on_device = plan.accumulators_tier is Tier.VRAM
        if num_groups > 1:
            if self._homes_on_device:
                self._homes = [device.empty(layout.numel, torch.float32, f"accumulator of {layout.name}") for layout in layouts]
            else:
                self._homes = [store.host_buffer(x.numel, torch.float32, f"accumulator of {x.name}", True) for x in layouts]
        self._ring: list[Buffer] = []
        self._edge_ring: list[Buffer] = []
        if self._homes is None or not self._homes_on_device:
            largest = max(layout.numel for layout in layouts[1:-1])
            self._ring = [device.empty(largest, torch.float32, f"gradient slot {i}") for i in range(plan.grad_slots)]
            sizes = edge_accumulator_sizes(layouts, tied)
            self._edge_ring = [device.empty(size, torch.float32, f"edge gradient slot {i}") for i, size in enumerate(sizes)]
        self._turn = 0
        park = 0
        if any(block.placement.grads is not Tier.VRAM for block in store.blocks) and store.gradient_dtype is not torch.float32:
            park = min(PARK_ELEMENTS, max(layout.numel for layout in layouts))
        self._park = [device.empty(park, store.gradient_dtype, f"park slot {i}") for i in range(2 if park else 0)]
        self._park_turn = 0
        self._open: dict[int, Buffer] = {}
        self.square_sum = device.empty(1, torch.float64, "sum of squared gradients")

    def start_step(self) -> None:
        """Forget the last step's norm, and what a step that broke off left open."""
        self._open.clear()
        self._device.launch(COMPUTE, self.square_sum.tensor.zero_, writes=[self.square_sum])

    def open(self, index: int, first_group: bool) -> Buffer:
        """The fp32 accumulator [numel] of a block on the device: zero in the first group, the sum so far later."""
        if index in self._open:
            return self._open[index]
        home = self._homes[index] if self._homes is not None else None
        accumulator = home if home is not None and self._homes_on_device else self._slot_for(index)
        numel = self._store.blocks[index].layout.numel
        part = accumulator.tensor[:numel]
        if first_group:
            self._device.launch(COMPUTE, part.zero_, writes=[accumulator])
        elif home is not None and home is not accumulator:
            self._device.copy(H2D, accumulator, home, target_part=slice(0, numel))
        self._open[index] = accumulator
        return accumulator

    def views(self, index: int) -> dict[str, torch.Tensor]:
        """The open accumulator of a block as one fp32 view per parameter."""
        return self._store.blocks[index].layout.flat_views(self._open[index].tensor)

    def close(self, index: int, last_group: bool) -> None:
        """The group's part of this block's gradient is complete; after the last group it is parked."""
        accumulator = self._open.pop(index)
        if last_group:
            self._park_gradient(index, accumulator)
        elif self._homes is not None and self._homes[index] is not accumulator:
            part = slice(0, self._store.blocks[index].layout.numel)
            self._device.copy(D2H, self._homes[index], accumulator, source_part=part)
        if last_group or self._homes is None or self._homes[index] is not accumulator:
            self._device.release(D2H, accumulator)

    def _slot_for(self, index: int) -> Buffer:
        if index in (0, self._last):
            return self._edge_ring[1 if self._tied and index else 0]
        self._turn = (self._turn + 1) % len(self._ring)
        return self._ring[self._turn]

    def _park_gradient(self, index: int, accumulator: Buffer) -> None:
        block = self._store.blocks[index]
        on_device = block.placement.grads is Tier.VRAM
        home, numel = block.grads if on_device else self._store.host_target(index, "grads"), block.layout.numel
        for start in range(0, numel, PARK_ELEMENTS):
            part = slice(start, min(start + PARK_ELEMENTS, numel))
            if on_device:
                self._device.launch(
                    COMPUTE,
                    _round_and_sum(accumulator.tensor[part], home.tensor[part], self.square_sum.tensor),
                    reads=[accumulator], writes=[home, self.square_sum],
                )  # fmt: skip
            elif self._store.gradient_dtype is torch.float32:
                source = accumulator.tensor[part]
                self._device.launch(
                    COMPUTE, _round_and_sum(source, None, self.square_sum.tensor), reads=[accumulator], writes=[self.square_sum]
                )
                self._device.copy(D2H, home, accumulator, target_part=part, source_part=part)
            else:
                self._park_turn = (self._park_turn + 1) % len(self._park)
                slot = self._park[self._park_turn]
                length = slice(0, part.stop - part.start)
                work = _round_and_sum(accumulator.tensor[part], slot.tensor[length], self.square_sum.tensor)
                self._device.launch(COMPUTE, work, reads=[accumulator], writes=[slot, self.square_sum])
                self._device.copy(D2H, home, slot, target_part=part, source_part=length)
                self._device.release(D2H, slot)
        self._store.keep(index, "grads")
        self._store.release(DISK_WRITE, index, "grads")


def _round_and_sum(gradient: torch.Tensor, target: torch.Tensor | None, total: torch.Tensor):  # type: ignore[no-untyped-def]
    """Work that rounds `gradient` into `target` (if any) and adds the squares of what is parked to `total`."""

    def work() -> None:
        parked = gradient
        if target is not None:
            parked = target.copy_(gradient)
        total.add_(sum_of_squares(parked))

    return work


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a flat tensor, fp64 scalar on its device; in an order that depends on its length only."""
    whole = values.numel() // _NORM_ROW * _NORM_ROW
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for part in (values[:whole].view(-1, _NORM_ROW), values[whole:].view(1, -1)):
        if part.numel():
            total = total + torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).double().square().sum()
    return total
