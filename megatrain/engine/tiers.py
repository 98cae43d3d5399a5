"""StateStore: the home of every state of every block, as the plan places it.

A block updated on the host keeps a host copy of its compute weights also when their home is VRAM: that copy is what the
CPU updates. Everything is allocated before step 0 and nothing after; `extra_pinned` announces the pinned pieces (bytes)
that others take with `host_buffer` afterwards, in that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatrain.engine.device import D2H, H2D, Buffer, Device
from megatrain.engine.pinned import HostArena
from megatrain.models.blocks import BlockLayout
from megatrain.plan import Kind, Placement, Plan, Tier
from megatrain.precision import Precision

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class BlockStates:
    """The states of one block. `weights` are bytes (BlockLayout's sections); the others flat arrays."""

    layout: BlockLayout
    placement: Placement
    weights: Buffer
    host_weights: Buffer | None  # where the CPU updates the weights; the home itself when that is RAM
    masters: Buffer | None  # int16 [numel_a]; None: the compute weights are the masters
    grads: Buffer  # parked gradients [numel]
    exp_avg: Buffer  # fp32 [numel]
    exp_avg_sq: Buffer  # fp32 [numel]

    def buffer(self, name: str) -> Buffer | None:
        return getattr(self, name)

    def tier(self, name: str) -> Tier:
        return self.placement.tier(Kind.MOMENTS if name in MOMENTS else Kind(name))


class StateStore:
    """All blocks' states. `blocks[b]` belongs to `layouts[b]`."""

    def __init__(
        self,
        layouts: list[BlockLayout],
        plan: Plan,
        precision: Precision,
        gradient_dtype: torch.dtype,
        device: Device,
        extra_pinned: Sequence[int] = (),
    ) -> None:
        self.device = device
        self.gradient_dtype = gradient_dtype
        self._has_masters = precision.master_rest_dtype is not None
        on_gpu = device.torch_device.type == "cuda"
        specs = [self._specs(layout, placement) for layout, placement in zip(layouts, plan.placements, strict=True)]
        sizes: dict[bool, list[int]] = {True: [], False: []}
        for spec in specs:
            for numel, dtype, tier, touched in spec.values():
                if tier is not Tier.VRAM:
                    sizes[touched].append(numel * dtype.itemsize)
        self.pinned = HostArena([*sizes[True], *extra_pinned], pin=on_gpu)
        self.plain = HostArena(sizes[False], pin=False)
        self.blocks = [
            self._allocate(layout, placement, spec) for layout, placement, spec in zip(layouts, plan.placements, specs, strict=True)
        ]

    def _specs(self, layout: BlockLayout, placement: Placement) -> dict[str, tuple[int, torch.dtype, Tier, bool]]:
        """name -> (elements, dtype, tier, whether the copy engines touch it)."""
        on_device = placement.updated_on_device
        specs = {
            "weights": (layout.weight_bytes, torch.uint8, placement.weights, True),
            "grads": (layout.numel, self.gradient_dtype, placement.grads, True),
            "exp_avg": (layout.numel, torch.float32, placement.moments, on_device),
            "exp_avg_sq": (layout.numel, torch.float32, placement.moments, on_device),
        }
        if self._has_masters:
            specs["masters"] = (layout.numel_a, torch.int16, placement.masters, on_device)
        if placement.weights is Tier.VRAM and not on_device:
            specs["host_weights"] = (layout.weight_bytes, torch.uint8, Tier.RAM, True)
        return specs

    def _allocate(self, layout: BlockLayout, placement: Placement, specs: dict[str, tuple[int, torch.dtype, Tier, bool]]) -> BlockStates:
        made: dict[str, Buffer | None] = {}
        for name, (numel, dtype, tier, touched) in specs.items():
            label = f"{name} of {layout.name}"
            if tier is Tier.VRAM:
                made[name] = self.device.empty(numel, dtype, label)
                made[name].tensor.zero_()  # type: ignore[union-attr]
            else:
                made[name] = self.host_buffer(numel, dtype, label, touched)
        if "host_weights" not in made:
            made["host_weights"] = None if placement.weights is Tier.VRAM else made["weights"]
        return BlockStates(layout, placement, masters=made.pop("masters", None), **made)  # type: ignore[arg-type]

    def host_buffer(self, numel: int, dtype: torch.dtype, name: str, touched_by_copies: bool) -> Buffer:
        """A piece of the pinned arena (or of the plain one), zeroed."""
        return Buffer((self.pinned if touched_by_copies else self.plain).take(numel, dtype), name)

    def publish_weights(self, index: int) -> None:
        """Copy freshly updated host weights to the home of a block whose home is VRAM."""
        block = self.blocks[index]
        if block.host_weights is not None and block.host_weights is not block.weights:
            self.device.copy(H2D, block.weights, block.host_weights)

    def fetch_weights(self, index: int) -> None:
        """The reverse: bring host weights up to date with the home."""
        block = self.blocks[index]
        if block.host_weights is not None and block.host_weights is not block.weights:
            self.device.copy(D2H, block.host_weights, block.weights)

    def close(self) -> None:
        self.pinned.close()
        self.plain.close()
