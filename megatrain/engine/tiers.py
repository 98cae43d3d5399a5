"""StateStore: the home of every state of every block, as the plan places it.

A block updated on the host keeps a host copy of its compute weights also when their home is VRAM: that copy is what the
CPU updates. Everything is allocated before step 0 and nothing after; `extra_pinned` announces the pinned pieces (bytes)
that others take with `host_buffer` afterwards, in that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.engine.device import H2D, Buffer, Device
from megatrain.engine.nvme import DiskState, DiskTier, disk_bytes
from megatrain.engine.pinned import HostArena
from megatrain.errors import PlanError
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
    host_weights: Buffer | None  # where the CPU updates the weights; the home itself when that is RAM, None when it is the disk
    masters: Buffer | None  # int16 [numel_a]; None: the compute weights are the masters
    grads: Buffer  # parked gradients [numel]
    exp_avg: Buffer  # fp32 [numel]
    exp_avg_sq: Buffer  # fp32 [numel]

    def buffer(self, name: str) -> Buffer | None:
        return getattr(self, name)

    def tier(self, name: str) -> Tier:
        return self.placement.tier(_kind(name))


@dataclass(frozen=True)
class _Spec:
    """One state before it is allocated. `touched`: the copy engines touch it where it is in host memory."""

    numel: int
    dtype: torch.dtype
    tier: Tier
    touched: bool

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class StateStore:
    """All blocks' states. `blocks[b]` belongs to `layouts[b]`. `disk` holds those on disk; None when there are none."""

    def __init__(
        self,
        layouts: list[BlockLayout],
        plan: Plan,
        precision: Precision,
        gradient_dtype: torch.dtype,
        device: Device,
        extra_pinned: Sequence[int] = (),
        offload_folder: Path | None = None,
    ) -> None:
        self.device = device
        self.gradient_dtype = gradient_dtype
        self._has_masters = precision.master_rest_dtype is not None
        on_gpu = device.torch_device.type == "cuda"
        specs = [self._specs(layout, placement) for layout, placement in zip(layouts, plan.placements, strict=True)]
        names = ("weights", "grads", *MOMENTS, *(("masters",) if self._has_masters else ()))
        slots = {name: _slot_elements(specs, name) for name in names}
        sizes: dict[bool, list[int]] = {True: [], False: []}
        for spec in (spec for of_block in specs for spec in of_block.values() if spec.tier is Tier.RAM):
            sizes[spec.touched].append(spec.num_bytes)
        for name, numel in slots.items():
            if numel:
                sizes[_slot_touched(specs, name)] += [numel * specs[0][name].dtype.itemsize] * plan.disk_slots
        self.pinned = HostArena([*sizes[True], *extra_pinned], pin=on_gpu)
        self.plain = HostArena(sizes[False], pin=False)
        self._offset = 0
        self.blocks = [
            self._allocate(layout, placement, spec) for layout, placement, spec in zip(layouts, plan.placements, specs, strict=True)
        ]
        self.disk = self._disk_tier(specs, slots, plan, offload_folder)

    def _specs(self, layout: BlockLayout, placement: Placement) -> dict[str, _Spec]:
        on_device = placement.updated_on_device
        specs = {
            "weights": _Spec(layout.weight_bytes, torch.uint8, placement.weights, True),
            "grads": _Spec(layout.numel, self.gradient_dtype, placement.grads, True),
            "exp_avg": _Spec(layout.numel, torch.float32, placement.moments, on_device),
            "exp_avg_sq": _Spec(layout.numel, torch.float32, placement.moments, on_device),
        }
        if self._has_masters:
            specs["masters"] = _Spec(layout.numel_a, torch.int16, placement.masters, on_device)
        if placement.weights is Tier.VRAM and not on_device:
            specs["host_weights"] = _Spec(layout.weight_bytes, torch.uint8, Tier.RAM, True)
        return specs

    def _allocate(self, layout: BlockLayout, placement: Placement, specs: dict[str, _Spec]) -> BlockStates:
        made: dict[str, Buffer | None] = {}
        for name, spec in specs.items():
            label = f"{name} of {layout.name}"
            if spec.tier is Tier.VRAM:
                made[name] = self.device.empty(spec.numel, spec.dtype, label)
                made[name].tensor.zero_()  # type: ignore[union-attr]
            elif spec.tier is Tier.RAM:
                made[name] = self.host_buffer(spec.numel, spec.dtype, label, spec.touched)
            else:
                made[name] = DiskState(spec.numel, spec.dtype, label, self._offset)
                self._offset += disk_bytes(spec.num_bytes)
        if "host_weights" not in made:
            made["host_weights"] = made["weights"] if placement.weights is Tier.RAM else None
        return BlockStates(layout, placement, masters=made.pop("masters", None), **made)  # type: ignore[arg-type]

    def _disk_tier(self, specs: list[dict[str, _Spec]], slots: dict[str, int], plan: Plan, folder: Path | None) -> DiskTier | None:
        if not any(slots.values()):
            return None
        if folder is None:
            raise PlanError("The plan keeps states on disk, but there is no offload folder.", "Choose a folder on a fast disk.")
        homes = {
            name: {i: home for i, block in enumerate(self.blocks) if isinstance(home := block.buffer(name), DiskState)}
            for name in slots
            if slots[name]
        }
        rings = {
            name: [
                self.host_buffer(slots[name], specs[0][name].dtype, f"disk slot {i} of {name}", _slot_touched(specs, name))
                for i in range(plan.disk_slots)
            ]
            for name in homes
        }
        return DiskTier(folder, homes, rings, self.device)

    def host_buffer(self, numel: int, dtype: torch.dtype, name: str, touched_by_copies: bool) -> Buffer:
        """A piece of the pinned arena (or of the plain one), zeroed."""
        return Buffer((self.pinned if touched_by_copies else self.plain).take(numel, dtype), name)

    # -- states in host memory, wherever their home outside VRAM is

    def in_host(self, index: int, name: str, renew: bool = True) -> Buffer:
        """Host memory that holds this state (it may be longer): its home in RAM, or a slot into which it is read from disk."""
        if self.blocks[index].tier(name) is Tier.NVME:
            return self._on_disk.load(name, index, renew)
        block = self.blocks[index]
        return block.host_weights if name == "weights" else block.buffer(name)  # type: ignore[return-value]

    def host_target(self, index: int, name: str) -> Buffer:
        """Host memory that this state is to be written to, whole; then `keep` brings it home."""
        if self.blocks[index].tier(name) is Tier.NVME:
            return self._on_disk.target(name, index)
        return self.blocks[index].buffer(name)  # type: ignore[return-value]

    def keep(self, index: int, name: str) -> None:
        """What was launched on the host memory of this state is brought to its home, if that is the disk."""
        if self.blocks[index].tier(name) is Tier.NVME:
            self._on_disk.save(name, index)

    def release(self, lane: str, index: int, name: str) -> None:
        """Nobody needs this state in host memory before it is asked for again."""
        if self.blocks[index].tier(name) is Tier.NVME:
            self._on_disk.release(lane, name, index)

    @property
    def _on_disk(self) -> DiskTier:
        if self.disk is None:
            raise RuntimeError("no state lives on disk")
        return self.disk

    # -- whole states, between steps

    def get(self, index: int, name: str) -> torch.Tensor | None:
        """A state on the CPU, None when the block has none of this name. What lives in RAM is returned as it is, not copied."""
        buffer = self.blocks[index].buffer(name)
        if isinstance(buffer, DiskState):
            return self._on_disk.get(name, index)
        return None if buffer is None else buffer.tensor.cpu()

    def set(self, index: int, name: str, value: torch.Tensor) -> None:
        """Overwrite a state, and the host copy of weights. Nothing may be pending."""
        block = self.blocks[index]
        buffer = block.buffer(name)
        if buffer is None:
            raise ValueError(f"{block.layout.name} has no state {name}")
        if isinstance(buffer, DiskState):
            self._on_disk.set(name, index, value)
            return
        buffer.tensor.copy_(value)
        if name == "weights" and block.host_weights is not None and block.host_weights is not buffer:
            block.host_weights.tensor.copy_(value)

    def publish_weights(self, index: int) -> None:
        """Copy freshly updated host weights to the home of a block whose home is VRAM."""
        block = self.blocks[index]
        if block.host_weights is not None and block.host_weights is not block.weights:
            self.device.copy(H2D, block.weights, block.host_weights)

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
        self.pinned.close()
        self.plain.close()


def _kind(name: str) -> Kind:
    return Kind.MOMENTS if name in MOMENTS else Kind(name)


def _slot_elements(specs: list[dict[str, _Spec]], name: str) -> int:
    """Elements of one slot for this kind of state: the largest on disk, up to where its last request ends; 0 when none is."""
    found = [spec for of_block in specs if (spec := of_block[name]).tier is Tier.NVME]
    return max((disk_bytes(spec.num_bytes) // spec.dtype.itemsize for spec in found), default=0)


def _slot_touched(specs: list[dict[str, _Spec]], name: str) -> bool:
    return any(spec.touched for of_block in specs if (spec := of_block[name]).tier is Tier.NVME)
