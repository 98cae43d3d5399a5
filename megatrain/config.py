"""RunConfig: everything the user chose for a run; repeating it repeats the run.

Frozen dataclasses whose field metadata (label, help, unit, limits, choices, advanced) feeds the page, the command line
and the documentation. Unknown keys, wrong types and impossible values are all reported at once.
"""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatrain.errors import ConfigError
from megatrain.precision import PRECISIONS

DEMO = "demo"  # the built-in model, and the built-in data


def _option(default: Any, label: str, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"label": label, "help": help, **metadata})


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    path: str = _option(DEMO, "Model", "A Hugging Face hub id, a folder with config.json and safetensors, or `demo`.")
    revision: str | None = _option(None, "Revision", "Branch, tag or commit on the hub; empty takes the newest.", advanced=True)
    from_scratch: bool = _option(False, "Start from random weights", "Ignore pre-trained weights and initialise the model anew.", advanced=True)


@dataclass(frozen=True)
class DataConfig:
    """What it is trained on."""

    path: str = _option(DEMO, "Data", "A hub id, a file (json, jsonl, csv, parquet, arrow, txt, md; also .gz or .zip), a folder of such files, a saved data set's name, or `demo`.")
    subset: str | None = _option(None, "Subset", "Configuration name of a hub dataset.", advanced=True)
    split: str = _option("train", "Split", "Split of a hub dataset.", advanced=True)
    format: str = _option("auto", "Format", "How a row is read. `auto` looks at the columns.",
                          choices=("auto", "alpaca", "sharegpt", "messages", "prompt_completion", "preference", "text"))  # fmt: skip
    text_column: str | None = _option(None, "Text column", "Column that holds plain text; empty finds it.", advanced=True)
    train_on: str = _option("assistant", "Train on", "Which tokens of a conversation have a label: all assistant turns, or every token.",
                            choices=("assistant", "everything"))  # fmt: skip
    chat_template: str | None = _option(None, "Chat template", "Empty takes the tokenizer's own; or the name of one (chatml, llama3, gemma, mistral, phi, plain), or a template in Jinja.", advanced=True)
    sequence_length: int = _option(1024, "Sequence length", "Rows are packed to this many tokens.", unit="tokens", min=16, max=1048576)
    long_rows: str = _option("cut", "Longer rows", "What becomes of rows above the sequence length. Sections of a long text file are always split.", choices=("cut", "split", "drop"), advanced=True)
    bad_lines: str = _option("stop", "Unreadable lines", "Whether a line that cannot be read ends the preparation or is counted and left out.", choices=("stop", "skip"), advanced=True)
    max_rows: int | None = _option(None, "Use at most", "Only the first rows of the data; empty uses all.", unit="rows", min=1, advanced=True)
    eval_fraction: float = _option(0.02, "Held-out share", "Share of the rows kept for evaluation and never trained on.", min=0.0, max=0.5)


@dataclass(frozen=True)
class TrainConfig:
    """How it is trained."""

    num_steps: int | None = _option(None, "Steps", "Optimizer steps; empty trains for the given epochs.", min=1, max=10_000_000)
    num_epochs: float = _option(1.0, "Epochs", "Passes over the data when no number of steps is given.", min=0.01, max=1000.0)
    global_batch_tokens: int = _option(16384, "Global batch", "Tokens per optimizer step; a multiple of the sequence length.", unit="tokens", min=16, max=2**28)
    learning_rate: float = _option(1e-5, "Learning rate", "Peak learning rate of AdamW.", min=0.0, max=1.0)
    schedule: str = _option("cosine", "Schedule", "Course of the learning rate after warm-up.", choices=("cosine", "linear", "constant"))
    warmup_steps: int = _option(10, "Warm-up", "Steps over which the learning rate rises from zero.", unit="steps", min=0)
    min_lr_ratio: float = _option(0.1, "Final share of the learning rate", "The schedule ends at this share of the peak.", min=0.0, max=1.0, advanced=True)
    weight_decay: float = _option(0.01, "Weight decay", "Decoupled decay; none on norms, biases and embeddings.", min=0.0, max=10.0, advanced=True)
    beta1: float = _option(0.9, "Beta 1", "Decay of the first moment.", min=0.0, max=0.99999, advanced=True)
    beta2: float = _option(0.95, "Beta 2", "Decay of the second moment.", min=0.0, max=0.999999, advanced=True)
    eps: float = _option(1e-8, "Epsilon", "Added to the root of the second moment.", min=0.0, max=1.0, advanced=True)
    max_grad_norm: float = _option(1.0, "Clip at gradient norm", "Gradients are scaled down to this global norm; 0 never clips.", min=0.0, advanced=True)
    seed: int = _option(0, "Seed", "Order of the data, initial weights and dropout follow from it.", min=0, max=2**31 - 1, advanced=True)


@dataclass(frozen=True)
class MemoryConfig:
    """What may be used of this machine; empty fields are left to the planner."""

    device: str = _option("auto", "Device", "`auto` takes the first GPU, else the CPU; or cpu, cuda:0, ...", advanced=True)
    vram_limit_gib: float | None = _option(None, "VRAM limit", "The run's whole use of the graphics card stays under this.", unit="GiB", min=0.1, max=1e6)
    ram_limit_gib: float | None = _option(None, "RAM limit", "Memory that the run may take.", unit="GiB", min=0.1, max=1e6)
    offload_folder: str | None = _option(None, "Offload folder", "Folder on a fast disk for states that do not fit in RAM.", advanced=True)
    disk_limit_gib: float | None = _option(None, "Disk limit", "Space that offloaded states may take.", unit="GiB", min=0.1, max=1e6, advanced=True)
    micro_batch_packs: int | None = _option(None, "Micro-batch", "Packs that run at once; empty takes what fits.", unit="packs", min=1, advanced=True)
    group_micro_batches: int | None = _option(None, "Group", "Micro-batches that share one pass over the weights; empty is planned.", unit="micro-batches", min=1, advanced=True)
    weights: str = _option("auto", "Compute weights in", "Tier of the compute weights.", choices=("auto", "vram", "ram", "nvme"), advanced=True)
    masters: str = _option("auto", "Master weights in", "Tier of the masters.", choices=("auto", "vram", "ram", "nvme"), advanced=True)
    grads: str = _option("auto", "Gradients in", "Tier of the parked gradients.", choices=("auto", "vram", "ram", "nvme"), advanced=True)
    moments: str = _option("auto", "Optimizer moments in", "Tier of exp_avg and exp_avg_sq.", choices=("auto", "vram", "ram", "nvme"), advanced=True)


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved, and how many of them stay."""

    every_steps: int = _option(0, "Save every", "Save after this many steps; 0 goes by time alone.", unit="steps", min=0)
    every_minutes: float = _option(30.0, "Save every", "Save when this much time has passed; 0 goes by steps alone.", unit="min", min=0.0)
    keep: int = _option(2, "Checkpoints kept", "Newest checkpoints that stay on disk.", min=1, max=1000)
    at_end: bool = _option(True, "Save at the end", "Save when the run finishes or stops.")


@dataclass(frozen=True)
class EvalConfig:
    """When the held-out loss is measured."""

    every_steps: int = _option(50, "Evaluate every", "Steps between evaluations; 0 evaluates at the end only.", unit="steps", min=0)
    max_packs: int = _option(64, "Evaluate on at most", "Packs of held-out data per evaluation.", unit="packs", min=1, advanced=True)


@dataclass(frozen=True)
class RunConfig:
    """One training run, whole. `to_yaml` writes every field; `from_yaml` refuses what it does not know."""

    name: str = _option("", "Name", "Shown in the list of runs; empty is named after model and data.")
    precision: str = _option("bf16", "Precision", "Number format of the training.", choices=tuple(PRECISIONS))
    gradient_dtype: str = _option("auto", "Parked gradients", "Format of gradients between backward and update.",
                                  choices=("auto", "bfloat16", "float32"), advanced=True)  # fmt: skip
    allow_tf32: bool = _option(False, "Allow TF32", "Faster, less exact fp32 matrix products on the GPU.", advanced=True)
    kernels: str = _option("auto", "Kernels", "Layers compiled into few fast kernels, or their plain operations. `auto` compiles on a GPU where Triton and a C compiler are found.",
                           choices=("auto", "compiled", "plain"), advanced=True)  # fmt: skip
    deterministic: bool = _option(False, "Deterministic", "Two runs of the same configuration give equal bits; slower.", advanced=True)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    @property
    def packs_per_step(self) -> int:
        """Packs of `sequence_length` tokens in one optimizer step."""
        return self.train.global_batch_tokens // self.data.sequence_length

    def compiles(self, on_gpu: bool, can_compile: bool) -> bool:
        """Whether kernels are compiled, on a machine that can or cannot; see `platform.can_compile`."""
        return self.kernels == "compiled" or self.kernels == "auto" and on_gpu and can_compile

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def save(self, path: Path) -> None:
        path.write_text(self.to_yaml(), "utf-8")

    @staticmethod
    def from_dict(raw: Any) -> "RunConfig":
        """Build and validate. ConfigError lists every unknown key, wrong type and impossible value."""
        problems: list[tuple[str, str]] = []
        config = _build(RunConfig, raw, "", problems)
        if not problems:
            problems += _conflicts(config)
        if problems:
            raise ConfigError(problems)
        return config

    @staticmethod
    def from_yaml(text: str) -> "RunConfig":
        try:
            raw = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError([("yaml", " ".join(str(error).split()))], "Correct the file and try again.") from error
        return RunConfig.from_dict({} if raw is None else raw)

    @staticmethod
    def load(path: Path) -> "RunConfig":
        try:
            return RunConfig.from_yaml(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError([(str(path), f"cannot be read: {reason}")]) from error


def options(cls: type = RunConfig, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Every leaf option by dotted key (`train.learning_rate`), in the order of the classes."""
    found: dict[str, dataclasses.Field] = {}
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(item.type):
            found |= options(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            found[prefix + item.name] = item
    return found


def _build(cls: Any, raw: Any, prefix: str, problems: list[tuple[str, str]]) -> Any:
    if not isinstance(raw, dict):
        problems.append((prefix.rstrip(".") or "configuration", f"must be a mapping of keys to values, not {type(raw).__name__}"))
        return cls()
    known = {item.name: item for item in dataclasses.fields(cls)}
    for key in (key for key in raw if key not in known):
        problems.append((f"{prefix}{key}", f"unknown key; known here: {', '.join(known)}"))
    values = {}
    for name, item in known.items():
        if name not in raw:
            continue
        if dataclasses.is_dataclass(item.type):
            values[name] = _build(item.type, raw[name], f"{prefix}{name}.", problems)
        else:
            values[name] = _checked(item, raw[name], prefix + name, problems)
    return cls(**values)


def _checked(item: dataclasses.Field, value: Any, key: str, problems: list[tuple[str, str]]) -> Any:
    allowed = typing.get_args(item.type) if isinstance(item.type, types.UnionType) else (item.type,)
    if value is None and type(None) in allowed:
        return None
    if float in allowed and isinstance(value, int | str) and not isinstance(value, bool):
        value = _number(value)  # YAML 1.1 reads 1e-5 as text
    wanted = next(kind for kind in allowed if kind is not type(None))
    if type(value) is not wanted:
        problems.append((key, f"must be {wanted.__name__}, not {value!r}"))
        return item.default
    choices, low, high = (item.metadata.get(name) for name in ("choices", "min", "max"))
    if choices and value not in choices:
        problems.append((key, f"{value!r} is not one of {', '.join(map(str, choices))}"))
    elif isinstance(value, float) and not math.isfinite(value):
        problems.append((key, f"must be a finite number, not {value}"))
    elif low is not None and value < low or high is not None and value > high:
        problems.append((key, f"{value} is outside {low} to {'any' if high is None else high}"))
    return value


def _number(value: int | str) -> Any:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return value


def _conflicts(config: RunConfig) -> list[tuple[str, str]]:
    """Values that are possible alone and not together."""
    problems = []
    length, batch = config.data.sequence_length, config.train.global_batch_tokens
    if batch % length:
        nearest = max(1, round(batch / length)) * length
        problems.append(("train.global_batch_tokens", f"{batch} is no multiple of data.sequence_length {length}; the nearest is {nearest}"))
    if config.checkpoint.every_steps == 0 and config.checkpoint.every_minutes == 0 and not config.checkpoint.at_end:
        problems.append(("checkpoint", "nothing would ever be saved: set every_steps, every_minutes or at_end"))
    memory = config.memory
    on_disk = [name for name in ("weights", "masters", "grads", "moments") if getattr(memory, name) == "nvme"]
    if on_disk and not memory.offload_folder:
        problems.append(("memory.offload_folder", f"{', '.join(on_disk)} shall be on disk: choose a folder on a fast disk"))
    packs = config.packs_per_step
    if config.memory.micro_batch_packs and packs and config.memory.micro_batch_packs > packs:
        problems.append(("memory.micro_batch_packs", f"{config.memory.micro_batch_packs} is more than the {packs} packs of a step"))
    return problems
