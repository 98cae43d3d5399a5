"""AdamW on the GPU in one visit per parameter, compiled. Within rounding of torch's operations (see `adamw`)."""

import torch

from megatrain.engine.codecs import merge_master, split_master


def update_piece(
    params: torch.Tensor,
    rests: torch.Tensor | None,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    """Update n parameters in place: to be compiled, or it visits memory many times.

    params: [n] fp32, or bf16 halves beside rests [n] int16. grads: [n] bf16 or fp32, kept. exp_avg, exp_avg_sq: [n] fp32.
    scalars: [8] fp32 on the same device, the fields of `adamw_cpu.Scalars`: a number would be compiled in.
    """
    clip, keep, rate1, beta2, rate2, step_size, root, eps = scalars.unbind()
    gradient = grads.float() * clip
    first = exp_avg + rate1 * (gradient - exp_avg)
    second = exp_avg_sq * beta2 + rate2 * gradient * gradient
    master = params if rests is None else merge_master(params, rests)
    master = master * keep - step_size * first / (second.sqrt() / root + eps)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    if rests is None:
        params.copy_(master)
    else:
        split_master(master, params, rests)
