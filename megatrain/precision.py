"""The precision table: what each name keeps per parameter. Planner, engine, page and documentation share it."""

from dataclasses import dataclass

from megatrain.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "uint8": 1, "int8": 1, "int32": 4, "int64": 8, "bool": 1}


@dataclass(frozen=True)
class Precision:
    """Types of the states that a block owns. Names are torch dtype names, so that torch need not be loaded."""

    name: str
    compute_dtype: str  # the weights that forward and backward use, streamed to the device
    master_rest_dtype: str | None  # what turns compute weights into exact fp32 masters; None: they are the masters
    moment_dtype: str  # exp_avg and exp_avg_sq, each
    default_gradient_dtype: str  # parked gradients, unless the configuration says otherwise
    summary: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of one compute weight."""
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def master_bytes(self) -> int:
        """Bytes per parameter kept beside the compute weight to make the master exact."""
        return DTYPE_BYTES[self.master_rest_dtype] if self.master_rest_dtype else 0

    @property
    def moment_bytes(self) -> int:
        """Bytes per parameter of both moments together."""
        return 2 * DTYPE_BYTES[self.moment_dtype]

    @property
    def kept_bytes(self) -> int:
        """Bytes per parameter kept between steps, gradients excluded."""
        return self.weight_bytes + self.master_bytes + self.moment_bytes


PRECISIONS = {
    "fp32": Precision("fp32", "float32", None, "float32", "float32", "Exact reference: everything in 32 bits."),
    "bf16": Precision("bf16", "bfloat16", "int16", "float32", "bfloat16",
                      "Full quality: computes in bfloat16, keeps exact 32-bit master weights."),
}  # fmt: skip


def precision_named(name: str) -> Precision:
    """The table row called `name`; ConfigError when there is none."""
    if name not in PRECISIONS:
        raise ConfigError([("precision", f"unknown precision {name!r}")], f"Choose one of: {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]
