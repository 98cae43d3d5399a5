"""What one optimizer step computes, and how a plan cuts it: counts of elements, tokens, micro-batches and groups."""

from dataclasses import dataclass
from functools import cached_property

from megatrain.config import RunConfig
from megatrain.plan import Plan
from megatrain.precision import DTYPE_BYTES, Precision, precision_named
from megatrain.shape import BlockShape, ModelShape

ALIGNED_PARTS = 16  # parameters and buffers of a block that alignment may push back; an upper bound for usual layers
ALIGNMENT_ELEMENTS = 64  # what each of them may lose in an array of gradients, masters or moments


@dataclass(frozen=True)
class Work:
    """What one optimizer step computes. It does not depend on the plan."""

    shape: ModelShape
    precision: Precision
    gradient_dtype: str  # of parked gradients
    sequence_length: int
    packs_per_step: int
    on_gpu: bool
    fused: bool = False  # layers and loss are compiled into few kernels

    @staticmethod
    def of(config: RunConfig, shape: ModelShape, device: str, can_compile: bool = True) -> "Work":
        """The work of `config` on `device` ("cpu" or "cuda:N") of a machine that can compile kernels or cannot."""
        precision = precision_named(config.precision)
        gradient = precision.default_gradient_dtype if config.gradient_dtype == "auto" else config.gradient_dtype
        on_gpu = device != "cpu"
        fused = config.compiles(on_gpu, can_compile)
        return Work(shape, precision, gradient, config.data.sequence_length, config.packs_per_step, on_gpu, fused)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one parked gradient element."""
        return DTYPE_BYTES[self.gradient_dtype]

    @cached_property
    def largest_layer(self) -> int:
        """Elements of the largest decoder layer."""
        return max(map(block_elements, self.shape.layers), default=0)

    @cached_property
    def largest_block(self) -> int:
        """Elements of the largest block."""
        return max(map(block_elements, self.shape.blocks))

    @cached_property
    def all_elements(self) -> int:
        """Elements of all blocks together."""
        return sum(map(block_elements, self.shape.blocks))

    @property
    def step_tokens(self) -> int:
        """n: tokens of a step, padding included."""
        return self.packs_per_step * self.sequence_length

    @cached_property
    def block_runs(self) -> tuple[tuple[int, BlockShape], ...]:
        """(end, block) of every stretch of blocks of equal sizes; embedding and head stand alone."""
        runs: list[tuple[int, BlockShape]] = []
        last = len(self.shape.blocks)
        for end, block in enumerate(self.shape.blocks, 1):
            same = 2 < end < last and _sizes(runs[-1][1]) == _sizes(block)
            runs[len(runs) - same :] = [(end, block)]
        return tuple(runs)


def micro_batches(work: Work, plan: Plan) -> int:
    """Micro-batches of a step; the last may hold fewer packs."""
    return -(-work.packs_per_step // plan.micro_batch_packs)


def groups(work: Work, plan: Plan) -> int:
    """Groups of a step; the last may hold fewer micro-batches."""
    return -(-micro_batches(work, plan) // plan.group_micro_batches)


def micro_batch_tokens(work: Work, plan: Plan) -> int:
    return plan.micro_batch_packs * work.sequence_length


def group_tokens(work: Work, plan: Plan) -> int:
    """Tokens whose layer inputs are stored at once; every micro-batch has room for as many as the largest."""
    return min(plan.group_micro_batches, micro_batches(work, plan)) * micro_batch_tokens(work, plan)


def block_elements(block: BlockShape) -> int:
    """Elements of a flat array of gradients, masters or moments, with the gaps that alignment may leave."""
    return block.num_params + ALIGNMENT_ELEMENTS * ALIGNED_PARTS


def _sizes(block: BlockShape) -> tuple[int, int, int]:
    return block.num_params, block.fp32_params, block.buffer_bytes
