"""How long a step should take: FLOPs, bytes on the bus and memory traffic against measured or estimated rates.

Letters: N parameters, n tokens of a step, L layers, H heads' width together, S sequence length.
"""

from dataclasses import dataclass

from megatrain import costs
from megatrain.plan import Kind, Plan, Tier
from megatrain.rates import Rates
from megatrain.work import Work, groups, micro_batches

FUSED_SPEED = 1.18  # a compiled layer against its plain operations, which rates are measured with: 653 and 554 TFLOP/s on an H200
BACKWARD = 3.0  # recompute and backward of a layer, in units of its forward
FUSED_BACKWARD = 2.75  # the same without the product that only the layer's output needs: 32.1 and 11.7 ms for Qwen2.5-7B


@dataclass(frozen=True)
class StepTimes:
    """Predicted seconds of one step. `lanes` says how long each of compute, h2d, d2h, optimizer and disk set the pace."""

    lanes: dict[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.lanes.values())

    @property
    def bottleneck(self) -> str:
        return max(self.lanes, key=lambda lane: self.lanes[lane])


def forward_flops(work: Work) -> tuple[float, float]:
    """(layers, head) of a step's forward: 2 per weight and token, and attention's 2·L·H·S per token (causal, full documents)."""
    layers, attention_width = work.shape.layers, work.shape.num_heads * work.shape.head_dim
    attention = 2 * len(layers) * attention_width * work.sequence_length
    per_token = 2 * sum(layer.linear_params for layer in layers) + attention
    return float(per_token * work.step_tokens), float(2 * work.shape.blocks[-1].linear_params * work.step_tokens)


def optimizer_traffic_bytes(work: Work) -> int:
    """Memory traffic per parameter of one fused update: all kept states read and written, the gradient read."""
    return 2 * work.precision.kept_bytes + work.gradient_bytes


def step_times(work: Work, plan: Plan, rates: Rates) -> StepTimes:
    """Forward and backward last as long as their slowest lane; updates run inside the forward, which is their only window.

    Weights cross the bus twice per group, gradients once per step; the head is not recomputed. A disk reads and writes one
    after the other. Without a GPU nothing overlaps and lanes add up.
    """
    layers, head = (count / rates.compute_flops_per_s[work.precision.compute_dtype] for count in forward_flops(work))
    layers /= FUSED_SPEED if work.fused else 1.0
    layers = max(layers, rates.layer_overhead_s / 4 * len(work.shape.layers) * micro_batches(work, plan))
    once = sum(count * costs.block_weight_bytes(block, work.precision) for block, count in costs.streamed(work, plan))
    weights = once * groups(work, plan)
    inputs = len(work.shape.layers) * work.step_tokens * work.shape.hidden_size * work.precision.weight_bytes
    inputs = inputs if plan.inputs_tier is Tier.RAM else 0
    sums = costs.accumulator_host_bytes(work, plan) * (groups(work, plan) - 1)
    on_device = sum(count * block.num_params for block, placement, count in costs.placed(work, plan) if placement.updated_on_device)
    on_host = work.shape.num_params - on_device
    up, down = _update_transfers(work, plan)

    def on_disk(kind: Kind) -> int:
        return costs.disk_home_bytes(work, plan, kind)

    forward = {
        "compute": layers + head,
        "h2d": weights + up,
        "d2h": down + inputs,
        "optimizer": on_host * (optimizer_traffic_bytes(work) + work.precision.weight_bytes) / rates.host_bytes_per_s,
        "disk": _disk_s(rates, *_update_disk_bytes(work, plan)),
    }
    backward = {
        "compute": (FUSED_BACKWARD if work.fused else BACKWARD) * layers + 2 * head,
        "h2d": weights + inputs + sums,
        "d2h": costs.resident_bytes(work, plan, Kind.GRADS, Tier.RAM) + on_disk(Kind.GRADS) + sums,
        "disk": _disk_s(rates, on_disk(Kind.WEIGHTS) * (2 * groups(work, plan) - 1), on_disk(Kind.GRADS)),
    }
    lanes = {"compute": 0.0, "h2d": 0.0, "d2h": 0.0, "optimizer": on_device * optimizer_traffic_bytes(work) / rates.device_bytes_per_s}
    lanes["disk"] = 0.0
    for phase in (forward, backward):
        both = phase["h2d"] > 0 and phase["d2h"] > 0 and work.on_gpu
        phase["h2d"] /= rates.duplex_bytes_per_s if both else rates.h2d_bytes_per_s
        phase["d2h"] /= rates.duplex_bytes_per_s if both else rates.d2h_bytes_per_s
        slowest = max(phase, key=lambda lane: phase[lane])
        for lane in [slowest] if work.on_gpu else phase:
            lanes[lane] += phase[lane]
    return StepTimes(lanes)


def _update_transfers(work: Work, plan: Plan) -> tuple[int, int]:
    """(up, down) bytes that a step's updates move over the bus: states that do not rest on the side where their block is updated."""
    up = down = 0
    for block, placement, count in costs.placed(work, plan):
        on_device = placement.updated_on_device
        for kind in Kind:
            away = (placement.tier(kind) is Tier.VRAM) != on_device
            moved = count * costs.state_bytes(block, kind, work) if away else 0
            to_update, back = (moved, 0 if kind is Kind.GRADS else moved)
            if kind is Kind.WEIGHTS and not on_device:
                to_update = 0  # the host has a copy of them
            up, down = (up + to_update, down + back) if on_device else (up + back, down + to_update)
    return up, down


def _update_disk_bytes(work: Work, plan: Plan) -> tuple[int, int]:
    """(read, written) bytes of a step's updates: every state on disk is read, and all but gradients are written back."""
    read = {kind: costs.disk_home_bytes(work, plan, kind) for kind in Kind}
    return sum(read.values()), sum(read.values()) - read[Kind.GRADS]


def _disk_s(rates: Rates, read: int, written: int) -> float:
    return read / rates.disk_read_bytes_per_s + written / rates.disk_write_bytes_per_s
