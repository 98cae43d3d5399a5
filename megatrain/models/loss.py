"""Cross entropy in chunks of rows: logits, loss and gradient of a chunk at once, nothing kept.

Only positions with a label cost anything. T: tokens, D: hidden size, V: vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

Logits = Callable[[torch.Tensor], torch.Tensor]  # [1, C, D] -> [C, V]


def chunked_loss(logits: Logits, hidden: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor, chunk_rows: int) -> torch.Tensor:
    """Sum of the cross entropy over the labelled rows, fp32 scalar, without gradient.

    hidden: [T, D]. labels: [T] int64. rows: [R] int64, the positions that have a label.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    with torch.no_grad():
        for part in _chunks(rows, chunk_rows):
            total += F.cross_entropy(logits(hidden[part][None]).float(), labels[part], reduction="sum")
    return total


def chunked_loss_backward(
    logits: Logits,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    rows: torch.Tensor,
    chunk_rows: int,
    scale: float,
    params: Sequence[torch.nn.Parameter],
    grads: Sequence[torch.Tensor],
    hidden_grad: torch.Tensor,
) -> torch.Tensor:
    """Sum of the cross entropy (unscaled, fp32 scalar); gradients of `scale` times it.

    hidden: [T, D], not changed. rows: [R] int64, the positions that have a label. grads[i] (fp32, shape of params[i])
    is added to: chunks accumulate in fp32. hidden_grad: [T, D], overwritten, zero where there is no label.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    hidden_grad.zero_()
    for part in _chunks(rows, chunk_rows):
        with torch.enable_grad():
            chunk = hidden[part].requires_grad_()
            loss = F.cross_entropy(logits(chunk[None]).float(), labels[part], reduction="sum")
            found = torch.autograd.grad(loss * scale, [chunk, *params], allow_unused=True)
        total += loss.detach()
        hidden_grad[part] = found[0]
        for grad, new in zip(grads, found[1:], strict=True):
            if new is not None:
                grad.add_(new)
    return total


def _chunks(rows: torch.Tensor, chunk_rows: int) -> Sequence[torch.Tensor]:
    """`rows` in pieces; none when there are none (splitting an empty tensor gives one empty piece)."""
    return rows.split(chunk_rows) if rows.numel() else ()
