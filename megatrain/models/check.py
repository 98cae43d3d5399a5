"""Self-check at job start: a small copy of the model, with layers of every kind, streamed and compared with autograd.

The copy keeps everything about the model's structure (layer types, biases, soft-caps, multipliers, rope) and shrinks its
widths. Every gradient is compared: families that share keys and values give the right loss with wrong gradients.
"""

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatrain.data.batch import IGNORE_INDEX, PackedBatch
from megatrain.errors import UnsupportedModelError
from megatrain.models.skeleton import Skeleton

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    # (skeleton, weights by name, packed batch) -> (mean loss, gradients by name): the engine, handed in from above
    Streamed = Callable[[Skeleton, Mapping[str, torch.Tensor], PackedBatch], tuple[float, Mapping[str, torch.Tensor]]]

_VOCAB, _LENGTH = 160, 24
_TOLERANCE = 1e-3  # relative norm in fp32; a wrong structure is off by tens of percent, rounding by 1e-6
_SMALL = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "intermediate_size_mlp": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "head_dim": 16,
    "vocab_size": _VOCAB, "vocab_size_per_layer_input": _VOCAB, "hidden_size_per_layer_input": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "qk_head_dim": 24,
    "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "laurel_rank": 8, "global_head_dim": 16,
}  # fmt: skip


def layers_to_check(kinds: list[str]) -> int:
    """Fewest leading layers among which every kind stands twice (or as often as it occurs)."""
    wanted = {kind: min(2, kinds.count(kind)) for kind in kinds}
    for count in range(1, len(kinds) + 1):
        if all(kinds[:count].count(kind) >= number for kind, number in wanted.items()):
            return count
    return len(kinds)


def small_config(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """`config` with small widths and its first `num_layers` layers. Raises whatever the config class finds impossible."""
    raw = copy.deepcopy(config.to_dict())
    depth = next(name for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if name in raw)
    full, heads = raw[depth], raw.get("num_attention_heads")
    for name, value in list(raw.items()):
        if isinstance(value, list) and len(value) == full:
            raw[name] = value[:num_layers]
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            raw[name] = 0.0
        elif name in _SMALL and value is not None:
            raw[name] = _SMALL[name]
        elif name == "num_key_value_heads" and value is not None:
            raw[name] = 4 if value == heads else min(value, 2)
    raw[depth] = num_layers
    if raw.get("qk_rope_head_dim"):  # multi-head latent attention: rotary tables have the width of the rotary part
        raw["head_dim"] = raw["qk_rope_head_dim"]
    _shorten_rope(raw)
    return type(config).from_dict(raw)


def _shorten_rope(raw: dict[str, Any]) -> None:
    """Frequency factors come one per pair of channels; there are fewer channels now."""
    pairs = raw["head_dim"] // 2 if raw.get("head_dim") else 8
    for value in raw.values():
        if isinstance(value, dict):
            for key in ("short_factor", "long_factor"):
                if isinstance(value.get(key), list):
                    value[key] = value[key][:pairs]


def self_check(config: PretrainedConfig, kinds: list[str], streamed: "Streamed") -> str:
    """UnsupportedModelError when streaming does not give autograd's gradients. Returns a notice when it could not be tried.

    kinds: the template kind of every layer. streamed: runs the engine on a skeleton; see `Streamed`.
    """
    try:
        small = small_config(config.get_text_config(), layers_to_check(kinds))
        model, batch = _random_model(small), _two_documents_a_pack(3)
        loss, gradients = _autograd(model, batch)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, StopIteration) as error:
        reason = " ".join(str(error).split())[:200]
        return f"The self-check was skipped: no small copy of {config.model_type} could be made ({reason})."
    name = type(model).__name__
    try:
        found_loss, found = streamed(Skeleton(small, torch.float32), dict(model.state_dict()), batch)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(f"{name} cannot be streamed: {reason}") from error
    if not abs(found_loss - loss) <= _TOLERANCE * abs(loss):
        raise UnsupportedModelError(f"{name} cannot be streamed: the loss is {found_loss:.5f} and should be {loss:.5f}.")
    for parameter, expected in gradients.items():
        floor = 1e-3 * max(float(g.norm()) for g in gradients.values())
        error = float((found[parameter] - expected).norm()) / max(float(expected.norm()), floor)
        if not error <= _TOLERANCE:
            raise UnsupportedModelError(f"{name} cannot be streamed: the gradient of {parameter} is off by {100 * error:.1f} %.")
    return ""


def _random_model(config: PretrainedConfig) -> PreTrainedModel:
    """With eager attention, transformers' own reference: the engine may have chosen another kernel."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager")
        saved = set(model.state_dict())
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name in saved and tensor.is_floating_point():
                    tensor.add_(torch.randn_like(tensor) * 0.05)
    return model.train()


def _two_documents_a_pack(packs: int) -> PackedBatch:
    rng = np.random.default_rng(0)
    ids = rng.integers(3, _VOCAB, (packs, _LENGTH))
    positions, labels = np.zeros_like(ids), np.full_like(ids, IGNORE_INDEX)
    for row in range(packs):
        cut = 9 + row
        for start, stop in ((0, cut), (cut, _LENGTH)):
            positions[row, start:stop] = np.arange(stop - start)
            labels[row, start + row : stop - 1] = ids[row, start + row + 1 : stop]
    return PackedBatch(ids, labels, positions)


def _autograd(model: PreTrainedModel, batch: PackedBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss and gradients of plain transformers, one document at a time."""
    total = torch.zeros(())
    for row in range(batch.num_packs):
        starts = [*np.flatnonzero(batch.position_ids[row] == 0), batch.position_ids.shape[1]]
        for start, stop in zip(starts, starts[1:], strict=False):
            ids, labels = (torch.from_numpy(array[row, start:stop].copy()) for array in (batch.input_ids, batch.labels))
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
            total = total + F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    loss = total / batch.trained_tokens
    loss.backward()
    return float(loss.detach()), {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
