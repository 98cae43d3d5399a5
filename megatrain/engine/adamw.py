"""AdamW with decoupled weight decay on flat states, the same operations on CPU and GPU.

The order of operations is that of `torch.optim.AdamW` (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2), so that
equal gradients give equal bits. Works piece by piece, so that a piece stays in the CPU's cache.
"""

import math
from dataclasses import dataclass

import torch

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
    piece = _PIECE_PER_THREAD * torch.get_num_threads() if weights.device.type == "cpu" else DEVICE_PIECE
    for first, last, decay in layout.decay_ranges():
        for start in range(first, last, piece):
            stop = min(start + piece, last)
            gradient = grads[start:stop].float()
            if update.clip != 1.0:
                gradient = gradient * update.clip
            moments = exp_avg[start:stop], exp_avg_sq[start:stop]
            weight_decay = update.weight_decay if decay else 0.0
            if start >= layout.numel_a:
                _adamw(segment_b[start - layout.numel_a : stop - layout.numel_a], gradient, *moments, weight_decay, update)
            elif masters is None:
                _adamw(segment_a[start:stop], gradient, *moments, weight_decay, update)
            else:
                master = merge_master(segment_a[start:stop], masters[start:stop])
                _adamw(master, gradient, *moments, weight_decay, update)
                split_master(master, segment_a[start:stop], masters[start:stop])


def _adamw(
    param: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, weight_decay: float, update: Update
) -> None:
    if weight_decay:
        param.mul_(1 - update.learning_rate * weight_decay)
    exp_avg.lerp_(gradient, 1 - update.beta1)
    exp_avg_sq.mul_(update.beta2).addcmul_(gradient, gradient, value=1 - update.beta2)
    step_size = update.learning_rate / (1 - update.beta1**update.count)
    root = math.sqrt(1 - update.beta2**update.count)
    denominator = (exp_avg_sq.sqrt() / root).add_(update.eps)
    param.addcdiv_(exp_avg, denominator, value=-step_size)
