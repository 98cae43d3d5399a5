"""Plan: where every state of every block lives and how a step is cut. Made by the planner, carried out by the engine.

A plan never changes what a step contains; it is saved with the run and reused on resume.
"""

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property


class Tier(StrEnum):
    """Where a state lives. RAM is pinned where the copy engines touch it."""

    VRAM = "vram"
    RAM = "ram"
    NVME = "nvme"


class Kind(StrEnum):
    """The states a block can own."""

    WEIGHTS = "weights"  # compute weights and buffers
    MASTERS = "masters"  # what turns compute weights into exact fp32 masters
    GRADS = "grads"  # parked gradients, between backward and update
    MOMENTS = "moments"  # exp_avg and exp_avg_sq


@dataclass(frozen=True)
class Placement:
    """The tier of each state of one block. The block is updated on the device iff its moments are in VRAM."""

    weights: Tier = Tier.RAM
    masters: Tier = Tier.RAM
    grads: Tier = Tier.RAM
    moments: Tier = Tier.RAM

    def tier(self, kind: Kind) -> Tier:
        return getattr(self, kind.value)

    @property
    def updated_on_device(self) -> bool:
        return self.moments is Tier.VRAM


@dataclass(frozen=True)
class Predicted:
    """What the planner expects. Bytes are peaks; the parts of each tier add up to its total."""

    vram_bytes: int = 0
    ram_bytes: int = 0
    disk_bytes: int = 0
    vram_parts: dict[str, int] = field(default_factory=dict)  # weights, masters, grads, moments, activations, buffers, context
    ram_parts: dict[str, int] = field(default_factory=dict)
    disk_parts: dict[str, int] = field(default_factory=dict)
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    bottleneck: str = ""  # compute | h2d | d2h | optimizer | disk


@dataclass(frozen=True)
class Plan:
    """Placements (one per block, ModelShape's order) and the cut of a step."""

    placements: tuple[Placement, ...]
    micro_batch_packs: int  # packs per micro-batch
    group_micro_batches: int  # micro-batches per group; layer-major inside a group
    weight_slots: int = 2  # ring of device slots for streamed layers
    grad_slots: int = 1  # ring of fp32 device accumulators for layers whose gradients are not accumulated at home
    disk_slots: int = 3  # ring of host slots for each kind of state that some block keeps on disk
    inputs_tier: Tier = Tier.VRAM  # stored layer inputs
    accumulators_tier: Tier = Tier.VRAM  # fp32 gradients between groups, when there are several
    device: str = "cpu"
    predicted: Predicted = field(default_factory=Predicted)

    @cached_property
    def placement_runs(self) -> tuple[tuple[int, Placement], ...]:
        """(end, placement) of every stretch of equal placements, in order: a plan has few, however many blocks there are."""
        runs: list[tuple[int, Placement]] = []
        for end, placement in enumerate(self.placements, 1):
            same = runs and (runs[-1][1] is placement or runs[-1][1] == placement)
            runs[len(runs) - bool(same) :] = [(end, placement)]
        return tuple(runs)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Plan":
        raw = json.loads(text)
        placements = tuple(Placement(**{k: Tier(v) for k, v in p.items()}) for p in raw.pop("placements"))
        predicted = Predicted(**raw.pop("predicted"))
        inputs, sums = Tier(raw.pop("inputs_tier")), Tier(raw.pop("accumulators_tier"))
        return Plan(placements=placements, predicted=predicted, inputs_tier=inputs, accumulators_tier=sums, **raw)
