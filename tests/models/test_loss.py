"""The chunked loss equals the plain one, whatever the chunk, and adds up in fp32."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megatrain.activation_costs import FUSED_LOSS_ROWS
from megatrain.models.compiler import Compiler
from megatrain.models.loss import ChunkedLoss

TOKENS, WIDTH, VOCAB = 128, 32, 50


class Head(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.norm = nn.Parameter(torch.randn(WIDTH, generator=generator).to(dtype))
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=generator).to(dtype))
        self.calls: list[int] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.shape[0] == 1
        self.calls.append(hidden.shape[1])
        return 5 * torch.tanh((hidden * self.norm) @ self.weight.T / 5)[0]


def data(labelled: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    rows = torch.randperm(TOKENS, generator=generator)[:labelled].sort().values
    labels = torch.full((TOKENS,), -100)
    labels[rows] = torch.randint(0, VOCAB, (labelled,), generator=generator)
    return hidden, labels, rows


def chunked(head: Head, rows: int) -> ChunkedLoss:
    return ChunkedLoss(head, rows, Compiler(enabled=False))


def backward(head: Head, hidden: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor, chunk: int, scale: float = 1.0):
    grads = [torch.zeros(p.shape) for p in head.parameters()]
    hidden_grad = torch.full_like(hidden, float("nan"))
    loss = chunked(head, chunk).backward(hidden, labels, rows, scale, list(head.parameters()), grads, hidden_grad)
    return loss, grads, hidden_grad


@pytest.mark.parametrize("labelled", [128, 65, 1])
@pytest.mark.parametrize("chunk", [1, 2, 64, 1000])
def test_equals_autograd_through_all_logits(labelled: int, chunk: int) -> None:
    head, (hidden, labels, rows) = Head(), data(labelled)
    kept = hidden.clone()
    loss, grads, hidden_grad = backward(head, hidden, labels, rows, chunk, scale=0.25)
    assert head.calls == [len(part) for part in rows.split(chunk)]
    assert torch.equal(hidden, kept)
    leaf = hidden.clone().requires_grad_()
    wanted = F.cross_entropy(Head()(hidden[None]), labels, reduction="sum").detach()
    found = torch.autograd.grad(0.25 * F.cross_entropy(head(leaf[None]), labels, reduction="sum"), [leaf, *head.parameters()])
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    for a, b in zip((hidden_grad, *grads), found, strict=True):
        assert float((a - b).norm()) <= 1e-6 * float(b.norm())
    assert not hidden_grad[labels == -100].any()
    assert float(chunked(head, chunk).evaluate(hidden, labels, rows)) == pytest.approx(float(wanted), rel=1e-6)


def test_one_chunk_or_64_give_the_same_weight_gradient_in_bf16() -> None:
    """Summed in bf16 over chunks it would drift with their number."""
    head, (hidden, labels, rows) = Head(torch.bfloat16), data(128)
    exact = Head()
    with torch.no_grad():
        for target, source in zip(exact.parameters(), head.parameters(), strict=True):
            target.copy_(source)
    hidden = hidden.bfloat16()
    wanted = backward(exact, hidden.float(), labels, rows, 128)[1][1]
    errors = []
    for chunk in (128, 2):
        grads = backward(head, hidden, labels, rows, chunk)[1]
        assert grads[1].dtype == torch.float32
        errors.append(float((grads[1] - wanted).norm() / wanted.norm()))
    assert errors[1] <= 1.2 * errors[0] <= 0.02


def test_gradients_are_added_to_what_is_there() -> None:
    head, (hidden, labels, rows) = Head(), data(40)
    _, once, _ = backward(head, hidden, labels, rows, 16)
    twice = [value.clone() for value in once]
    chunked(head, 16).backward(hidden, labels, rows, 1.0, list(head.parameters()), twice, torch.empty_like(hidden))
    for a, b in zip(twice, once, strict=True):
        torch.testing.assert_close(a, 2 * b)


def test_without_labels_nothing_is_computed() -> None:
    head, (hidden, labels, rows) = Head(), data(0)
    loss, grads, hidden_grad = backward(head, hidden, labels, rows, 16)
    assert float(loss) == 0
    assert not any(grad.any() for grad in grads)
    assert not hidden_grad.any()
    assert float(chunked(head, 16).evaluate(hidden, labels, rows)) == 0
    assert head.calls == []


def test_fused_chunks_are_longer_and_worth_the_same() -> None:
    head, (hidden, labels, rows) = Head(), data(100)
    compiler = Compiler(enabled=True, backend="aot_eager")
    grads = [torch.zeros(p.shape) for p in head.parameters()]
    hidden_grad = torch.empty_like(hidden)
    loss = ChunkedLoss(head, 10, compiler).backward(hidden, labels, rows, 0.5, list(head.parameters()), grads, hidden_grad)
    assert compiler.problem == ""
    assert head.calls == [10 * FUSED_LOSS_ROWS, 10 * FUSED_LOSS_ROWS, 20]
    wanted = backward(Head(), hidden, labels, rows, 10, scale=0.5)
    for found, other in zip((loss, *grads, hidden_grad), (wanted[0], *wanted[1], wanted[2]), strict=True):
        assert float((found - other).norm()) <= 1e-6 * float(other.norm())


@pytest.mark.parametrize("score", [lambda loss, *data: loss.evaluate(*data), None], ids=["evaluate", "backward"])
def test_where_compiling_fails_chunks_are_short_again(score: Callable[..., torch.Tensor] | None) -> None:
    """The plain operations take more memory for a row."""

    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no compiler here")

    head, (hidden, labels, rows) = Head(), data(100)
    loss = ChunkedLoss(head, 10, Compiler(enabled=True, backend=broken))  # type: ignore[arg-type]
    if score is not None:
        score(loss, hidden, labels, rows)
    else:
        grads = [torch.zeros(p.shape) for p in head.parameters()]
        loss.backward(hidden, labels, rows, 1.0, list(head.parameters()), grads, torch.empty_like(hidden))
    assert head.calls == [10 * FUSED_LOSS_ROWS, 10, 10, 10, 10, 10, 10]
