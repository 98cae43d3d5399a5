"""The error tree. Every error says what is wrong and where; `hint` says what to do about it.

    MegaTrainError
    ├── ConfigError         a RunConfig that cannot be used; carries every problem at once
    ├── ModelError          a model that cannot be found, read or streamed
    │   └── UnsupportedModelError   its structure is not understood; never trained wrongly
    ├── DataError           data that cannot be found, read, understood, or trains nothing
    ├── PlanError           no placement fits the limits
    ├── CheckpointError     a checkpoint that is missing, incomplete or damaged
    ├── RunError            a run that cannot be started, found or commanded
    └── TrainingError       training cannot go on
        ├── NonFiniteError      loss or gradient norm is NaN or infinite; nothing was updated
        ├── OutOfVramError      the device allocator refused
        └── DiskFullError       no space for a checkpoint or an offload file
"""


class MegaTrainError(Exception):
    """Base of every error that a user can cause or fix.

    `hint` is one sentence that says what to do; empty when nothing can be done.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class ConfigError(MegaTrainError):
    """A configuration that cannot be used. `problems` lists (key, what is wrong) for every fault found."""

    def __init__(self, problems: list[tuple[str, str]], hint: str = "") -> None:
        super().__init__("; ".join(f"{key}: {text}" for key, text in problems), hint)
        self.problems = problems


class ModelError(MegaTrainError):
    """A model that cannot be found, read or streamed."""


class UnsupportedModelError(ModelError):
    """A model whose structure the engine does not understand; it is refused by name."""


class DataError(MegaTrainError):
    """Data that cannot be found, read or understood, or that trains no token."""


class PlanError(MegaTrainError):
    """No placement fits the limits. The message says how much is missing where; `missing_bytes` the same by tier name."""

    def __init__(self, message: str, hint: str = "", missing_bytes: dict[str, int] | None = None) -> None:
        super().__init__(message, hint)
        self.missing_bytes = missing_bytes or {}


class CheckpointError(MegaTrainError):
    """A checkpoint that is missing, incomplete or damaged."""


class RunError(MegaTrainError):
    """A run that cannot be started, found or commanded."""


class TrainingError(MegaTrainError):
    """Training cannot go on; the state before the failed step is intact."""


class NonFiniteError(TrainingError):
    """Loss or gradient norm is NaN or infinite. Raised before any update of the step."""


class OutOfVramError(TrainingError):
    """The device allocator refused memory that the plan had promised."""


class DiskFullError(TrainingError):
    """No space is left for a checkpoint or an offload file."""
