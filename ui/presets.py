"""Named starting points for the training options. Each sets the same fields, so one can be told from the values."""

from collections.abc import Sequence
from typing import Any

from megatrain.config import DEMO, RunConfig
from megatrain.hardware import Machine
from megatrain.precision import PRECISIONS
from ui import form

FIELDS = (
    "train.num_steps", "train.num_epochs", "train.learning_rate", "train.schedule", "train.warmup_steps",
    "data.sequence_length", "train.global_batch_tokens", "evaluation.every_steps",
)  # fmt: skip

# The demo model is small and learns from scratch-like rates; the others are for pre-trained models, where a rate
# above a few 1e-5 costs what the model already knows.
PRESETS: dict[str, tuple[Any, ...]] = {
    "demo": (60, 1.0, 1e-3, "cosine", 5, 256, 4096, 10),
    "quick": (20, 1.0, 1e-5, "cosine", 2, 1024, 16384, 10),
    "careful": (None, 1.0, 5e-6, "cosine", 20, 2048, 32768, 50),
    "style": (None, 2.0, 1e-5, "cosine", 10, 1024, 16384, 25),
    "facts": (None, 4.0, 2e-5, "linear", 10, 1024, 16384, 50),
}
FOR_MODELS = "style"  # what a model other than the demo starts from


def apply(name: str, raw: Sequence[Any]) -> list[Any]:
    """`raw` widget values with the fields of preset `name` set."""
    chosen = {key: form.shown(key, value) for key, value in zip(FIELDS, PRESETS[name], strict=True)}
    return [chosen.get(key, value) for key, value in zip(form.KEYS, raw, strict=True)]


def recognise(raw: Sequence[Any]) -> str | None:
    """The preset whose values the form holds, or None."""
    now = {key: form.cleaned(key, value) for key, value in zip(form.KEYS, raw, strict=True)}
    return next((name for name, wanted in PRESETS.items() if tuple(now[key] for key in FIELDS) == wanted), None)


def for_model(raw: Sequence[Any]) -> list[Any]:
    """`raw` after the model was changed: the demo's rates never reach a real model, nor a real model's the demo.

    Only untouched values follow; what a person has set by hand stays.
    """
    path = str(raw[form.KEYS.index("model.path")] or "").strip()
    now = recognise(raw)
    if path and path != DEMO and now == "demo":
        return apply(FOR_MODELS, raw)
    if path == DEMO and now == FOR_MODELS:
        return apply("demo", raw)
    return list(raw)


def initial(machine: Machine) -> list[Any]:
    """The form of a person who has chosen nothing yet: the demo, ready to start, in the faster precision of this machine."""
    raw = apply("demo", form.values(RunConfig()))
    rates = machine.rates.compute_flops_per_s
    fast = max(PRECISIONS, key=lambda name: (rates.get(PRECISIONS[name].compute_dtype, 0.0), name == "bf16"))
    return form.with_value(raw, "precision", fast)
