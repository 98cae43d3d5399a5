"""AdamW with decoupled weight decay on flat states: one fused kernel on the CPU, torch's operations elsewhere.

The order of operations is that of `torch.optim.AdamW` (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2). Torch's
operations give its bits for equal gradients; the fused kernel is within its rounding. The operations work piece by piece,
which bounds their temporaries.
"""

import math
from dataclasses import dataclass

import torch

from megatrain.engine import adamw_cpu
from megatrain.engine.codecs import merge_master, split_master
from megatrain.models.blocks import BlockLayout

_PIECE_PER_THREAD = 1 << 17  # elements: what a CPU core's cache holds of all states
DEVICE_PIECE = 1 << 24  # on the GPU: what its temporaries may take


@dataclass(frozen=True)
class Update:
    """One decided optimizer step. `count` starts at 1; `clip` scales every gradient."""

    count: int
    learning_rate: float
    clip: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def scalars(self, decay: bool) -> tuple[float, float, float, float, float, float, float, float]:
        """What the update of one element takes: clip, keep, rate1, beta2, rate2, step_size, root, eps."""
        keep = 1 - self.learning_rate * self.weight_decay if decay else 1.0
        step_size = self.learning_rate / (1 - self.beta1**self.count)
        root = math.sqrt(1 - self.beta2**self.count)
        return self.clip, keep, 1 - self.beta1, self.beta2, 1 - self.beta2, step_size, root, self.eps


def update_block(
    layout: BlockLayout,
    weights: torch.Tensor,
    masters: torch.Tensor | None,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    update: Update,
) -> None:
    """Update one block in place; all tensors on one device.

    weights: bytes as BlockLayout lays them out. masters: [numel_a] int16, or None when the weights are fp32.
    grads: [numel] bf16 or fp32, kept. exp_avg, exp_avg_sq: [numel] fp32.
    """
    segment_a, segment_b = layout.segment_a(weights), layout.segment_b(weights)
    for first, last, decay in layout.decay_ranges():
        in_a = first < layout.numel_a
        place = slice(first, last) if in_a else slice(first - layout.numel_a, last - layout.numel_a)
        params, rests = (segment_a[place], masters[place] if masters is not None else None) if in_a else (segment_b[place], None)
        states = grads[first:last], exp_avg[first:last], exp_avg_sq[first:last]
        scalars = update.scalars(decay)
        if weights.device.type != "cpu" or not adamw_cpu.update_range(params, rests, *states, scalars):
            _update_range(params, rests, *states, scalars)


def _update_range(
    params: torch.Tensor,
    rests: torch.Tensor | None,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: tuple[float, ...],
) -> None:
    """As adamw_cpu.update_range, in torch's operations."""
    clip, *numbers = scalars
    piece = _PIECE_PER_THREAD * torch.get_num_threads() if params.device.type == "cpu" else DEVICE_PIECE
    for start in range(0, len(params), piece):
        place = slice(start, start + piece)
        gradient = grads[place].float()
        if clip != 1.0:
            gradient = gradient * clip
        master = params[place] if rests is None else merge_master(params[place], rests[place])
        _adamw(master, gradient, exp_avg[place], exp_avg_sq[place], *numbers)
        if rests is not None:
            split_master(master, params[place], rests[place])


def _adamw(
    param: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    keep: float,
    rate1: float,
    beta2: float,
    rate2: float,
    step_size: float,
    root: float,
    eps: float,
) -> None:
    if keep != 1.0:
        param.mul_(keep)
    exp_avg.lerp_(gradient, rate1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=rate2)
    denominator = (exp_avg_sq.sqrt() / root).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-step_size)
