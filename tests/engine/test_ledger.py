"""What the planner's ledger promises is what the engine takes: never less, and no more than alignment explains."""

import itertools
from functools import cache
from pathlib import Path

import pytest
import torch

from megatrain import activation_costs, costs
from megatrain.engine.debug import Debug
from megatrain.engine.device import Buffer, Device
from megatrain.engine.engine import Engine
from megatrain.models.inspect import model_shape
from megatrain.models.skeleton import Skeleton
from megatrain.plan import Placement, Plan, Tier
from megatrain.precision import PRECISIONS
from megatrain.work import ALIGNED_PARTS, ALIGNMENT_ELEMENTS, Work, micro_batch_tokens
from tests.families import FAMILIES
from tests.parity import DISK_PLACEMENTS

PLACEMENTS = [Placement(*tiers) for tiers in itertools.product((Tier.VRAM, Tier.RAM), repeat=4)] + DISK_PLACEMENTS
PACKS, LENGTH = 6, 32
SCALARS = 64  # loss and norm sums
CUTS = [
    {},
    {"weight_slots": 3, "grad_slots": 2, "inputs_tier": Tier.RAM},
    {"micro_batch_packs": 4, "group_micro_batches": 1},
    {"group_micro_batches": 2, "accumulators_tier": Tier.RAM, "inputs_tier": Tier.RAM},
]


class CountingDevice(Device):
    """Adds up what the engine asks of the device."""

    def __init__(self) -> None:
        super().__init__(Debug())
        self.taken = 0

    def empty(self, num_elements: int, dtype: torch.dtype, name: str) -> Buffer:
        self.taken += num_elements * dtype.itemsize
        return super().empty(num_elements, dtype, name)


@cache
def skeleton(family: str, precision: str) -> Skeleton:
    config = FAMILIES[family]()
    config.vocab_size = 8000  # blocks of half a million parameters, beside which alignment is small
    if family.startswith("llama"):
        config.intermediate_size = 2048
    return Skeleton(config, getattr(torch, PRECISIONS[precision].compute_dtype))


def alignment_slack(work: Work, plan: Plan) -> int:
    """The most that gaps between parameters can make of all homes, slots and sums together."""
    copies = len(work.shape.blocks) + plan.weight_slots + plan.grad_slots + 2
    gaps = ALIGNED_PARTS * ALIGNMENT_ELEMENTS
    return copies * (ALIGNED_PARTS * costs.ALIGNMENT_BYTES + gaps * (4 + 2 + 4 + 8 + 4))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["llama_tied", "llama_untied", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("cut", CUTS, ids=range(len(CUTS)))
def test_the_engine_takes_what_the_ledger_says(family: str, precision: str, cut: dict, tmp_path: Path):
    model = skeleton(family, precision)
    row = PRECISIONS[precision]
    shape = model_shape(model, family)
    work = Work(shape, row, row.default_gradient_dtype, LENGTH, PACKS, on_gpu=True)
    for placement in PLACEMENTS:
        placements = (placement,) * (len(shape.blocks) - 1) + (Placement(),)
        plan = Plan(placements, **{"micro_batch_packs": 2, "group_micro_batches": 3, **cut})
        device = CountingDevice()
        engine = Engine(model, plan, row, getattr(torch, work.gradient_dtype), device, PACKS, LENGTH, offload_folder=tmp_path)
        try:
            on_host = engine.store.pinned.num_bytes + engine.store.plain.num_bytes
            on_disk = engine.store.disk.num_bytes if engine.store.disk else 0
        finally:
            engine.close()
        sums = costs.ledger(work, plan)
        hidden = activation_costs.hidden_state_bytes(work, plan)
        on_demand = activation_costs.activation_bytes(work, plan) - hidden + costs.update_scratch_bytes(work, plan)
        promised = sums.vram_bytes - sums.vram["context"] - on_demand
        spare_hidden = activation_costs.HIDDEN_SPARES * micro_batch_tokens(work, plan) * shape.hidden_size * row.weight_bytes
        slack = alignment_slack(work, plan)
        assert device.taken - SCALARS <= promised <= device.taken + slack + spare_hidden, (placement, cut)
        host = sums.ram_bytes - sums.ram["context"] - costs.update_staging_host_bytes(work, plan) - costs.disk_copy_host_bytes(work, plan)
        paging = costs.page_padding_host_bytes(work, plan) + plan.disk_slots * 10 * costs.PAGE_BYTES
        assert on_host <= host <= on_host + slack + paging, (placement, cut)
        assert on_disk <= sums.disk_bytes <= on_disk + slack + len(shape.blocks) * 6 * costs.PAGE_BYTES, (placement, cut)

