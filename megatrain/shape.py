"""ModelShape: all that the planner and the page need to know of a model, without torch. To and from JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class BlockShape:
    """One streamed block: `embed`, a decoder layer, or `head`.

    `num_params` counts trained elements that this block owns (a tied head owns none of the embedding's).
    `fp32_params` of them are kept in fp32 even when the compute dtype is narrower.
    `buffer_bytes` travel with the block but are not trained.
    `linear_params` take part in matrix products of every token (for FLOPs; active experts only).
    `kind` names the template: blocks of equal kind share one.
    """

    name: str
    kind: str
    num_params: int
    fp32_params: int = 0
    buffer_bytes: int = 0
    linear_params: int = 0


@dataclass(frozen=True)
class ModelShape:
    """A causal LM as the planner sees it. Sizes in elements, lengths in tokens."""

    name: str  # what the user asked for: hub id or folder name
    model_type: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # widest activation inside a layer, per token (active experts summed)
    max_positions: int
    tied_head: bool
    blocks: tuple[BlockShape, ...]  # blocks[0] is the embedding, blocks[-1] the head
    eager_attention: bool = False  # its score matrix is kept: soft-caps or sinks, which fused kernels lack
    packed_attention: bool = False  # it attends inside documents by where they begin; no mask is kept

    @property
    def num_params(self) -> int:
        """Trained parameters, each counted once."""
        return sum(block.num_params for block in self.blocks)

    @property
    def layers(self) -> tuple[BlockShape, ...]:
        """The decoder layers, in order."""
        return self.blocks[1:-1]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "ModelShape":
        raw = json.loads(text)
        return ModelShape(**{**raw, "blocks": tuple(BlockShape(**block) for block in raw["blocks"])})

    @staticmethod
    def load(path: Path) -> "ModelShape":
        return ModelShape.from_json(path.read_text("utf-8"))
