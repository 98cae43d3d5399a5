"""AdamW with decoupled weight decay on flat states: one fused kernel where there is one, torch's operations elsewhere.

The order of operations is that of `torch.optim.AdamW` (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2). Torch's
operations give its bits for equal gradients; the fused kernel is within its rounding. The operations work piece by piece,
which bounds their temporaries.
"""

import math
from dataclasses import dataclass

import torch

from megatrain.engine import adamw_cpu
from megatrain.engine.adamw_cpu import Scalars, States
from megatrain.engine.codecs import merge_master, split_master
from megatrain.models.blocks import BlockLayout
from megatrain.models.compiler import Compiled

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

    def scalars(self, decay: bool) -> Scalars:
        """The numbers of this update, with or without weight decay."""
        return Scalars(
            clip=self.clip,
            keep=1 - self.learning_rate * self.weight_decay if decay else 1.0,
            rate1=1 - self.beta1,
            beta2=self.beta2,
            rate2=1 - self.beta2,
            step_size=self.learning_rate / (1 - self.beta1**self.count),
            root=math.sqrt(1 - self.beta2**self.count),
            eps=self.eps,
        )


def update_block(
    layout: BlockLayout,
    weights: torch.Tensor,
    masters: torch.Tensor | None,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    update: Update,
    fused: Compiled | None = None,
) -> None:
    """Update one block in place; all tensors on one device. fused: `adamw_gpu.update_piece`, compiled, for a GPU.

    weights: bytes as BlockLayout lays them out. masters: [numel_a] int16, or None when the weights are fp32.
    grads: [numel] bf16 or fp32, kept. exp_avg, exp_avg_sq: [numel] fp32.
    """
    segment_a, segment_b = layout.segment_a(weights), layout.segment_b(weights)
    for first, last, decay in layout.decay_ranges():  # none reaches from one segment into the other
        rests = None
        if first >= layout.numel_a:
            params = segment_b[first - layout.numel_a : last - layout.numel_a]
        else:
            params = segment_a[first:last]
            rests = None if masters is None else masters[first:last]
        states = States(params, rests, grads[first:last], exp_avg[first:last], exp_avg_sq[first:last])
        scalars = update.scalars(decay)
        if weights.device.type != "cpu" and fused is not None and fused.works:
            _update_fused(states, scalars, fused)
        elif weights.device.type != "cpu" or not adamw_cpu.update_range(states, scalars):
            _update_range(states, scalars)


def _update_fused(states: States, scalars: Scalars, fused: Compiled) -> None:
    numbers = torch.tensor(scalars, dtype=torch.float32, device=states.params.device)
    for start in range(0, len(states.params), DEVICE_PIECE):
        fused(*(None if state is None else state[start : start + DEVICE_PIECE] for state in states), numbers)


def _update_range(states: States, scalars: Scalars) -> None:
    """As adamw_cpu.update_range, in torch's operations on any device."""
    on_cpu = states.params.device.type == "cpu"
    piece = _PIECE_PER_THREAD * torch.get_num_threads() if on_cpu else DEVICE_PIECE
    for start in range(0, len(states.params), piece):
        place = slice(start, start + piece)
        params, rests, grads, exp_avg, exp_avg_sq = (None if state is None else state[place] for state in states)
        gradient = grads.float()
        if scalars.clip != 1.0:
            gradient = gradient * scalars.clip
        master = params if rests is None else merge_master(params, rests)
        _adamw(master, gradient, exp_avg, exp_avg_sq, scalars)
        if rests is not None:
            split_master(master, params, rests)


def _adamw(param: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scalars: Scalars) -> None:
    if scalars.keep != 1.0:
        param.mul_(scalars.keep)
    exp_avg.lerp_(gradient, scalars.rate1)
    exp_avg_sq.mul_(scalars.beta2).addcmul_(gradient, gradient, value=scalars.rate2)
    denominator = (exp_avg_sq.sqrt() / scalars.root).add_(scalars.eps)
    param.addcdiv_(exp_avg, denominator, value=-scalars.step_size)
