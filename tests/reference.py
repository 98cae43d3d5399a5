"""What training should give: plain transformers, autograd and torch AdamW, with no part of the engine.

One step: the sum over all micro-batches of the cross entropy of every label, divided by the trained tokens of the whole
step; the gradient is clipped at its exact global norm, then AdamW updates fp32 weights. In bf16 the model computes in
bf16, gradients of micro-batches are summed in fp32, and the optimizer owns fp32 masters that are rounded to bf16.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatrain.data.batch import IGNORE_INDEX, PackedBatch


@dataclass(frozen=True)
class Recipe:
    """How the reference trains. One learning rate per step; `max_grad_norm` 0 never clips."""

    learning_rates: Sequence[float]
    micro_batch_packs: int = 1
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Trained:
    """What came out: per step the mean loss and the norm before clipping; the first step's gradients (fp32, unclipped)
    and the last weights (fp32 masters), by the names of `named_parameters()`."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def build_model(config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32, perturb: float = 0.05) -> PreTrainedModel:
    """The model of `config` with eager attention, in training mode.

    N(0, perturb) is added to every parameter and persistent float buffer, so that norms, biases and router corrections
    are not the identity. Non-persistent buffers stay fp32, and so do the parameters that the family keeps in fp32.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32, attn_implementation="eager")
        saved = set(model.state_dict())
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name in saved and tensor.is_floating_point():
                    tensor.add_(torch.randn_like(tensor) * perturb)
    if dtype != torch.float32:
        kept = tuple(model._keep_in_fp32_modules_strict or ())
        for name, parameter in model.named_parameters():
            if not any(re.search(part.replace("*", ".*"), name) for part in kept):
                parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
    return model.train()


def random_batch(
    num_packs: int, sequence_length: int, vocab_size: int, seed: int = 0, document_tokens: tuple[int, int] = (5, 20)
) -> PackedBatch:
    """Packs of random documents with uneven label counts: each document's first third has no label, each pack ends in padding."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((num_packs, sequence_length), np.int64)
    labels = np.full((num_packs, sequence_length), IGNORE_INDEX, np.int64)
    positions = np.zeros((num_packs, sequence_length), np.int64)
    real = np.zeros(num_packs, np.int64)
    for pack in range(num_packs):
        at, end = 0, sequence_length - int(rng.integers(0, 4))
        while end - at >= 2:
            length = min(int(rng.integers(*document_tokens)), end - at)
            tokens = rng.integers(3, vocab_size, length)
            ids[pack, at : at + length] = tokens
            positions[pack, at : at + length] = np.arange(length)
            prompt = int(rng.integers(0, max(1, length // 3)))
            labels[pack, at + prompt : at + length - 1] = tokens[prompt + 1 :]
            at += length
        positions[pack, at:] = np.arange(sequence_length - at)
        real[pack] = at
    return PackedBatch(ids, labels, positions, real)


def documents(batch: PackedBatch, pack: int) -> list[slice]:
    """Where each document of a pack lies; padding comes last, as a document of its own."""
    starts = [*np.flatnonzero(batch.position_ids[pack] == 0), batch.position_ids.shape[1]]
    return [slice(int(a), int(b)) for a, b in zip(starts, starts[1:], strict=False)]


def logits(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """Logits [P, S, V] fp32. transformers tells documents apart by `position_ids` when no mask is given; only gpt_oss
    does not hand them to its mask, so it is given masks per layer type."""
    first = next(model.parameters())
    ids, positions = (torch.from_numpy(array).to(first.device) for array in (batch.input_ids, batch.position_ids))
    mask = None
    if model.config.model_type == "gpt_oss":
        windows = {"full_attention": None, "sliding_attention": model.config.sliding_window}
        mask = {kind: document_mask(positions, window, first.dtype) for kind, window in windows.items()}
    return model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits.float()


def document_mask(positions: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[P, 1, S, S], added to attention scores: 0 where a query may see a key of its own document, else the lowest number."""
    document = (positions == 0).cumsum(-1)
    distance = torch.arange(positions.shape[1], device=positions.device)
    distance = distance[:, None] - distance[None, :]
    seen = (document[:, :, None] == document[:, None, :]) & (distance >= 0) & (distance < (window or positions.shape[1]))
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


def loss_sum(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """Sum of the cross entropy over the labels, in nats."""
    scores = logits(model, batch)
    labels = torch.from_numpy(batch.labels).to(scores.device)
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def step_gradients(model: PreTrainedModel, batch: PackedBatch, micro_batch_packs: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss of the step and its gradients in fp32, per parameter; zero where a parameter took no part."""
    total = dict.fromkeys((name for name, _ in model.named_parameters()), torch.zeros(()))
    loss = 0.0
    for start in range(0, batch.num_packs, micro_batch_packs):
        model.zero_grad(set_to_none=True)
        part = loss_sum(model, batch.packs(start, start + micro_batch_packs)) / batch.trained_tokens
        part.backward()
        loss += part.item()
        for name, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total[name] = total[name].to(grad.device) + grad.float()
    model.zero_grad(set_to_none=True)
    return loss, total


def decays(model: PreTrainedModel) -> dict[str, bool]:
    """Which parameters weight decay applies to: matrices, except embeddings (also when tied to the head) and biases of any shape."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name: parameter.ndim >= 2 and not name.endswith("bias") and id(parameter) not in embeddings
        for name, parameter in model.named_parameters()
    }


def train(model: PreTrainedModel, batches: Sequence[PackedBatch], recipe: Recipe) -> Trained:
    """Train `model` in place, one step per batch."""
    parameters = dict(model.named_parameters())
    masters = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
    decay = decays(model)
    groups = [
        {"params": [masters[name] for name in masters if decay[name] is kept], "weight_decay": recipe.weight_decay * kept}
        for kept in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, foreach=False)
    losses, norms, first = [], [], {}
    for learning_rate, batch in zip(recipe.learning_rates, batches, strict=True):
        loss, gradients = step_gradients(model, batch, recipe.micro_batch_packs)
        first = first or gradients
        norm = float(sum(gradient.double().square().sum() for gradient in gradients.values()) ** 0.5)
        scale = min(1.0, recipe.max_grad_norm / norm) if recipe.max_grad_norm and norm else 1.0
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        for name, master in masters.items():
            master.grad = gradients[name] * scale
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
        losses.append(loss)
        norms.append(norm)
    return Trained(losses, norms, first, {name: master.detach() for name, master in masters.items()})
