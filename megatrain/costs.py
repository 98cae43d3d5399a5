"""Every byte of states and rings, each formula with its reason: what the planner predicts is what the engine allocates.

The byte ledger is the list of functions that end in `_bytes`. All but the two that describe one block take `work` (what
a step does) and `plan` (where states live and how the step is cut) and return bytes on the device, unless the name says
host. `ledger` adds them up, with those of `activation_costs`. Letters: N parameters, n tokens of a step, L layers, D
hidden size, V vocabulary, S sequence length.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatrain.activation_costs import activation_bytes, stored_input_bytes
from megatrain.plan import Kind, Placement, Plan, Tier
from megatrain.precision import Precision
from megatrain.shape import BlockShape, ModelShape
from megatrain.units import GIB
from megatrain.work import ALIGNED_PARTS, Work, block_elements, groups, micro_batches

GPU_CONTEXT_BYTES = 13 * GIB // 16  # CUDA context and kernels, as NVML counts them for a process; 0.8 GiB measured on an H200
WORKER_BYTES_GPU = 2 * GIB  # resident memory of a worker with CUDA and transformers loaded; 1.9 GiB measured on an H200 machine
WORKER_BYTES_CPU = 6 * GIB // 10  # the same without CUDA libraries
ALIGNMENT_BYTES = 256  # what each of them may lose in a buffer of weights
PAGE_BYTES = 4096
HOST_PIECES = 6  # of a block in RAM: weights, a copy of them, masters, gradients, two moments
ACCUMULATOR_BYTES = 4  # gradients are summed in fp32
PARK_CHUNK_ELEMENTS = 64 * 1024**2  # elements converted and sent down at once
UPDATE_PIECE_ELEMENTS = 16 * 1024**2  # elements that the GPU updates at once
UPDATE_TEMPORARIES = 6  # gradient, clipped gradient, merged master and its parts, denominator


# ---- states ----------------------------------------------------------------------------------------------------------
def block_weight_bytes(block: BlockShape, precision: Precision) -> int:
    """One block's flat buffer: compute weights, those kept in fp32, buffers, and the padding that alignment may add."""
    narrow = block.num_params - block.fp32_params
    return narrow * precision.weight_bytes + block.fp32_params * 4 + block.buffer_bytes + ALIGNMENT_BYTES * ALIGNED_PARTS


def state_bytes(block: BlockShape, kind: Kind, work: Work) -> int:
    """One copy of one state of one block, on whatever tier."""
    if kind is Kind.WEIGHTS:
        return block_weight_bytes(block, work.precision)
    per_parameter = {
        Kind.MASTERS: work.precision.master_bytes,
        Kind.GRADS: work.gradient_bytes,
        Kind.MOMENTS: work.precision.moment_bytes,
    }
    return block_elements(block) * per_parameter[kind]


def resident_bytes(work: Work, plan: Plan, kind: Kind, tier: Tier) -> int:
    """All blocks' homes of one kind on one tier."""
    return sum(count * state_bytes(block, kind, work) for block, placement, count in placed(work, plan) if placement.tier(kind) is tier)


def disk_home_bytes(work: Work, plan: Plan, kind: Kind) -> int:
    """All blocks' homes of one kind in the offload file, each beginning at a page (moments are two)."""
    pages = PAGE_BYTES * (2 if kind is Kind.MOMENTS else 1)
    return sum(
        count * (state_bytes(block, kind, work) + pages)
        for block, placement, count in placed(work, plan)
        if placement.tier(kind) is Tier.NVME
    )


def weight_copy_host_bytes(work: Work, plan: Plan) -> int:
    """Host copies of weights whose home is VRAM while the CPU updates them."""
    return sum(
        count * block_weight_bytes(block, work.precision)
        for block, placement, count in placed(work, plan)
        if placement.weights is Tier.VRAM and not placement.updated_on_device
    )


# ---- rings and accumulators ------------------------------------------------------------------------------------------
def weight_slot_bytes(work: Work, plan: Plan) -> int:
    """Ring of slots for streamed layers: each takes the largest of them; nothing when none is streamed."""
    edges = _edges(work)
    layers = {block_weight_bytes(block, work.precision): count for block, count in streamed(work, plan) if block not in edges}
    return min(plan.weight_slots, sum(layers.values())) * max(layers, default=0)


def edge_slot_bytes(work: Work, plan: Plan) -> int:
    """Slots of embedding and head as far as they are streamed.

    A tied head computes with the embedding's weights, so both are needed at once; untied, one slot serves one after the other.
    """
    edges = _edges(work)
    sizes = [block_weight_bytes(block, work.precision) for block, _ in streamed(work, plan) if block in edges]
    return sum(sizes) if work.shape.tied_head else max(sizes, default=0)


def accumulator_bytes(work: Work, plan: Plan) -> int:
    """fp32 sums of gradients on the device: all parameters' when groups share them there, else the ring and the edge's."""
    if groups(work, plan) > 1 and plan.accumulators_tier is Tier.VRAM:
        return ACCUMULATOR_BYTES * work.all_elements
    return ACCUMULATOR_BYTES * (plan.grad_slots * work.largest_layer + edge_accumulator_elements(work.shape))


def edge_accumulator_elements(shape: ModelShape) -> int:
    """Elements of the accumulator of embedding and head: tied, both live through the whole backward; untied, one after the other."""
    embed, head = block_elements(shape.blocks[0]), block_elements(shape.blocks[-1])
    return embed + head if shape.tied_head else max(embed, head)


def accumulator_host_bytes(work: Work, plan: Plan) -> int:
    """fp32 sums of gradients that rest in RAM between groups."""
    several = groups(work, plan) > 1 and plan.accumulators_tier is Tier.RAM
    return ACCUMULATOR_BYTES * work.all_elements if several else 0


def park_ring_bytes(work: Work, plan: Plan) -> int:
    """Two chunks in which fp32 sums become narrower gradients on their way to RAM."""
    if work.gradient_dtype == "float32" or all(placement.grads is Tier.VRAM for _, placement in plan.placement_runs):
        return 0
    return 2 * min(work.largest_block, PARK_CHUNK_ELEMENTS) * work.gradient_bytes


def update_staging_bytes(work: Work, plan: Plan) -> int:
    """Device copies of states that rest elsewhere while the device updates their block: one of the largest for each kind.

    Weights have their slot already.
    """
    outside = (Tier.RAM, Tier.NVME)
    return _staging(work, plan, lambda placement: placement.updated_on_device, outside, (Kind.MASTERS, Kind.GRADS))


def update_scratch_bytes(work: Work, plan: Plan) -> int:
    """fp32 temporaries of an update on the GPU, which works on a piece at a time; on the CPU pieces are small."""
    if not work.on_gpu or not any(placement.updated_on_device for _, placement in plan.placement_runs):
        return 0
    return UPDATE_TEMPORARIES * 4 * min(work.largest_block, UPDATE_PIECE_ELEMENTS)


def update_staging_host_bytes(work: Work, plan: Plan) -> int:
    """Host copies of states that rest in VRAM while the CPU updates their block; its weights have a copy for good."""
    return _staging(work, plan, lambda placement: not placement.updated_on_device, (Tier.VRAM,), (Kind.MASTERS, Kind.GRADS))


def disk_slot_host_bytes(work: Work, plan: Plan) -> int:
    """Rings of host memory through which states on disk are used: slots of the largest block of each kind."""
    largest = (
        max((state_bytes(block, kind, work) for block, placement, _ in placed(work, plan) if placement.tier(kind) is Tier.NVME), default=0)
        for kind in Kind
    )
    return sum(plan.disk_slots * (size + 2 * PAGE_BYTES) for size in largest if size)


def disk_copy_host_bytes(work: Work, plan: Plan) -> int:
    """What a checkpoint reads back from disk at once: the states of one block, without gradients."""
    kept = (Kind.WEIGHTS, Kind.MASTERS, Kind.MOMENTS)
    blocks = placed(work, plan)
    return max(sum(state_bytes(block, kind, work) for kind in kept if place.tier(kind) is Tier.NVME) for block, place, _ in blocks)


def page_padding_host_bytes(work: Work, plan: Plan) -> int:
    """What is lost because every piece of host memory begins at a page: states, sums between groups, stored inputs."""
    blocks, layers = len(work.shape.blocks), len(work.shape.layers)
    inputs = layers * min(plan.group_micro_batches, micro_batches(work, plan)) if plan.inputs_tier is Tier.RAM else 0
    sums = blocks if groups(work, plan) > 1 and plan.accumulators_tier is Tier.RAM else 0
    states = any(placement.tier(kind) is Tier.RAM for _, placement in plan.placement_runs for kind in Kind)
    return PAGE_BYTES * (inputs + sums + (HOST_PIECES * blocks if states else 0))


DEVICE_BUFFERS = (
    weight_slot_bytes, edge_slot_bytes, accumulator_bytes, park_ring_bytes, update_staging_bytes, update_scratch_bytes,
)  # fmt: skip
HOST_BUFFERS = (
    accumulator_host_bytes, update_staging_host_bytes, disk_slot_host_bytes, disk_copy_host_bytes, page_padding_host_bytes,
)  # fmt: skip


# ---- the sum ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ledger:
    """Peak bytes by part: weights, masters, grads, moments, activations, buffers, context. Without a GPU all but the disk is RAM."""

    vram: dict[str, int]
    ram: dict[str, int]
    disk: dict[str, int]  # by kind of state

    @property
    def vram_bytes(self) -> int:
        return sum(self.vram.values())

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())


def ledger(work: Work, plan: Plan) -> Ledger:
    """Everything that a run of `plan` allocates, at its peak."""
    device = {kind.value: resident_bytes(work, plan, kind, Tier.VRAM) for kind in Kind}
    host = {kind.value: resident_bytes(work, plan, kind, Tier.RAM) for kind in Kind}
    inputs = stored_input_bytes(work, plan)
    device["activations"] = activation_bytes(work, plan) + (inputs if plan.inputs_tier is Tier.VRAM else 0)
    device["buffers"] = sum(part(work, plan) for part in DEVICE_BUFFERS)
    device["context"] = GPU_CONTEXT_BYTES if work.on_gpu else 0
    host["weights"] += weight_copy_host_bytes(work, plan)
    host["activations"] = inputs if plan.inputs_tier is Tier.RAM else 0
    host["buffers"] = sum(part(work, plan) for part in HOST_BUFFERS)
    host["context"] = WORKER_BYTES_GPU if work.on_gpu else WORKER_BYTES_CPU
    disk = {kind.value: size for kind in Kind if (size := disk_home_bytes(work, plan, kind))}
    if work.on_gpu:
        return Ledger(device, host, disk)
    return Ledger({}, {part: device[part] + host[part] for part in device}, disk)


def checkpoint_bytes(shape: ModelShape, precision: Precision) -> int:
    """One checkpoint on disk: weights, masters and moments of every parameter, buffers."""
    return shape.num_params * precision.kept_bytes + sum(block.buffer_bytes for block in shape.blocks)


# ---- helpers ---------------------------------------------------------------------------------------------------------
def placed(work: Work, plan: Plan) -> list[tuple[BlockShape, Placement, int]]:
    """(block, placement, how many in a row), so that a formula need not visit every layer. Kept with the plan: all formulas ask."""
    known = plan.__dict__.get("_placed")
    if known is None or known[0] is not work:
        known = plan.__dict__["_placed"] = work, list(_placed(work, plan))
    return known[1]


def _placed(work: Work, plan: Plan) -> Iterator[tuple[BlockShape, Placement, int]]:
    blocks, placements = iter(work.block_runs), iter(plan.placement_runs)
    (block_end, block), (placement_end, placement), start = next(blocks), next(placements), 0
    while True:
        end = min(block_end, placement_end)
        yield block, placement, end - start
        if end == len(plan.placements):
            return
        if end == block_end:
            block_end, block = next(blocks)
        if end == placement_end:
            placement_end, placement = next(placements)
        start = end


def _edges(work: Work) -> tuple[BlockShape, BlockShape]:
    return work.shape.blocks[0], work.shape.blocks[-1]


def streamed(work: Work, plan: Plan) -> list[tuple[BlockShape, int]]:
    """(block, how many in a row) of those whose weights are not in VRAM."""
    return [(block, count) for block, placement, count in placed(work, plan) if placement.weights is not Tier.VRAM]


def _staging(work: Work, plan: Plan, updated_here: Callable[[Placement], bool], away: tuple[Tier, ...], kinds: tuple[Kind, ...]) -> int:
    updated = [(block, placement) for block, placement, _ in placed(work, plan) if updated_here(placement)]
    return sum(
        max((state_bytes(block, kind, work) for block, placement in updated if placement.tier(kind) in away), default=0)
        for kind in kinds
    )
