"""Cross entropy in chunks of rows: logits, loss and gradient of a chunk at once, nothing kept.

Only positions with a label cost anything. T: tokens, D: hidden size, V: vocabulary, C: rows of a chunk.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F

from megatrain.activation_costs import FUSED_LOSS_ROWS
from megatrain.models.compiler import Compiler

Logits = Callable[[torch.Tensor], torch.Tensor]  # [1, C, D] -> [C, V]


class ChunkedLoss:
    """The loss of final hidden states under a model's own head.

    chunk_rows: C of a chunk as separate operations compute it; fused, FUSED_LOSS_ROWS as many take no more memory.
    """

    def __init__(self, logits: Logits, chunk_rows: int, compiler: Compiler) -> None:
        self._logits = logits
        self._chunk_rows = chunk_rows
        self._score = compiler.compiled(loss_and_gradient, dynamic=True)

    def evaluate(self, hidden: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Sum of the cross entropy over the labelled rows, fp32 scalar, without gradient.

        hidden: [T, D]. labels: [T] int64. rows: [R] int64, the positions that have a label.
        """
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.no_grad():
            for part in self._chunks(rows):
                total += self._score(self._logits(hidden[part][None]), labels[part], total.new_ones(()))[0]
        return total

    def backward(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        rows: torch.Tensor,
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
        factor = torch.full_like(total, scale)
        hidden_grad.zero_()
        for part in self._chunks(rows):
            with torch.enable_grad():
                chunk = hidden[part].requires_grad_()
                logits = self._logits(chunk[None])
            loss, gradient = self._score(logits.detach(), labels[part], factor)
            found = torch.autograd.grad(logits, [chunk, *params], gradient, allow_unused=True)
            total += loss
            hidden_grad[part] = found[0]
            _accumulate(grads, found[1:])
            del logits, gradient, found  # or they would live on beside those of the next chunk
        return total

    def _chunks(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """`rows` in pieces, which become shorter when compiling fails at the first; none when there are none."""
        while rows.numel():
            count = self._chunk_rows * (FUSED_LOSS_ROWS if self._score.works else 1)
            yield rows[:count]
            rows = rows[count:]


def _accumulate(sums: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None]) -> None:
    for total, new in zip(sums, found, strict=True):
        if new is not None:
            total.add_(new)


def loss_and_gradient(logits: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross entropy (fp32 scalar) of logits [C, V] for labels [C]; gradient of `scale` times it, [C, V] as the logits."""
    scores = F.log_softmax(logits, -1, dtype=torch.float32)
    loss = -scores.gather(-1, labels[:, None]).sum()
    columns = torch.arange(logits.shape[-1], device=logits.device)
    probabilities = scores.exp_()
    return loss, torch.where(columns == labels[:, None], probabilities - 1, probabilities).mul_(scale).to(logits.dtype)
