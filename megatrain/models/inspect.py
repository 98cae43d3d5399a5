"""HF model folder -> ModelShape, without reading weights. Also a program, so that the dashboard loads no torch."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from megatrain.errors import MegaTrainError, ModelError
from megatrain.models.blocks import BlockLayout
from megatrain.models.skeleton import Skeleton
from megatrain.shape import BlockShape, ModelShape


def read_config(folder: Path) -> PretrainedConfig:
    """config.json of a model folder. ModelError when it is missing, unreadable or of an unknown type."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json.", "Choose a folder that holds a Hugging Face model.")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"config.json in {folder} cannot be used: {reason}", "Check the model type, or update transformers.") from error


def model_shape(skeleton: Skeleton, name: str) -> ModelShape:
    """What the planner needs to know of a skeleton."""
    config = skeleton.config.get_text_config()
    heads = _first(config, ("num_attention_heads", "n_head", "n_heads"), 1)
    hidden = _first(config, ("hidden_size", "n_embd", "d_model"), 0)
    experts = _first(config, ("num_experts", "num_local_experts", "n_routed_experts"), 1)
    active = _first(config, ("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 1)
    return ModelShape(
        name=name,
        model_type=config.model_type,
        architecture=type(skeleton.model).__name__,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        num_heads=heads,
        num_kv_heads=_first(config, ("num_key_value_heads",), heads),
        head_dim=_first(config, ("head_dim",), hidden // heads),
        intermediate_size=_widest(skeleton, active),
        max_positions=_first(config, ("max_position_embeddings", "n_positions", "seq_length"), 0),
        tied_head=skeleton.tied,
        blocks=tuple(_block_shape(skeleton, layout, experts, active) for layout in skeleton.layouts),
        eager_attention=skeleton.model.config._attn_implementation == "eager",
        packed_attention=skeleton.packed,
    )


def _first(config: PretrainedConfig, names: tuple[str, ...], otherwise: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return otherwise


def _widest(skeleton: Skeleton, active_experts: int) -> int:
    """Widest activation inside a layer, per token: the feed-forward's, active experts together."""
    widest = 0
    for layout in skeleton.layouts[1:-1]:
        for entry in layout.entries:
            if len(entry.shape) == 2 and ("mlp" in entry.name or "feed_forward" in entry.name):
                widest = max(widest, max(entry.shape))
            elif len(entry.shape) == 3:
                widest = max(widest, max(entry.shape[1:]) * active_experts)
    return widest


def _block_shape(skeleton: Skeleton, layout: BlockLayout, experts: int, active: int) -> BlockShape:
    linear = 0
    for entry in layout.entries:
        if len(entry.shape) == 2 and layout.name != "embed":
            linear += entry.numel
        elif len(entry.shape) == 3 and entry.shape[0] == experts:
            linear += entry.numel * active // experts
    if layout.name == "head" and skeleton.tied:
        linear += sum(entry.numel for entry in skeleton.layouts[0].entries if entry.name in skeleton.head_names)
    return BlockShape(
        name=layout.name,
        kind=layout.kind,
        num_params=sum(entry.numel for entry in layout.entries),
        fp32_params=sum(entry.numel for entry in layout.entries if entry.segment == "b"),
        buffer_bytes=sum(buffer.num_bytes for buffer in layout.buffers),
        linear_params=linear,
    )


def inspect_model(folder: Path, name: str) -> ModelShape:
    """The shape of the model in `folder`, as the bf16 precision lays it out. ModelError or UnsupportedModelError."""
    return model_shape(Skeleton(read_config(folder), torch.bfloat16), name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatrain.models.inspect", description="Print a model's shape as JSON.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default=None, help="how the model is called; the folder's name by default")
    args = parser.parse_args(argv)
    answer: dict[str, Any]
    try:
        print(inspect_model(args.folder, args.name or args.folder.name).to_json())
    except MegaTrainError as error:
        answer = {"error": error.message, "hint": error.hint}
        print(json.dumps(answer))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
