"""Runs the engine over the same batches as the reference, and says how far apart the two are.

Everything is tiny: a family of `tests.families`, packs of `LENGTH` tokens, a handful of steps. What the reference and the
skeletons give is computed once per process.
"""

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from transformers import PretrainedConfig

from megatrain.data.batch import PackedBatch
from megatrain.engine.adamw import Update
from megatrain.engine.debug import Debug
from megatrain.engine.device import Device
from megatrain.engine.engine import Engine
from megatrain.models.skeleton import Skeleton
from megatrain.plan import Kind, Placement, Plan, Tier
from megatrain.precision import PRECISIONS
from tests import reference
from tests.families import FAMILIES, VOCAB_SIZE
from tests.reference import Recipe, Trained

VRAM, RAM, NVME = Tier.VRAM, Tier.RAM, Tier.NVME
ALL_VRAM, ALL_RAM, ALL_NVME = Placement(VRAM, VRAM, VRAM, VRAM), Placement(), Placement(NVME, NVME, NVME, NVME)
PLACEMENTS = [Placement(*tiers) for tiers in itertools.product((VRAM, RAM), repeat=4)]
DISK_PLACEMENTS = [
    ALL_NVME,
    *(replace(ALL_RAM, **{kind.value: NVME}) for kind in Kind),
    Placement(NVME, NVME, NVME, VRAM),  # updated on the device
    Placement(NVME, RAM, NVME, VRAM),
    Placement(VRAM, NVME, VRAM, NVME),
    Placement(VRAM, VRAM, NVME, RAM),
]
PACKS, LENGTH = 5, 24

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Cut:
    """All of a plan but the placements: one for every block, or one for each."""

    placements: Placement | tuple[Placement, ...] = ALL_RAM
    micro_batch_packs: int = 2
    group_micro_batches: int = 99
    weight_slots: int = 2
    grad_slots: int = 1
    disk_slots: int = 2
    inputs_tier: Tier = VRAM
    accumulators_tier: Tier = VRAM

    def plan(self, num_blocks: int) -> Plan:
        placements = self.placements if isinstance(self.placements, tuple) else (self.placements,) * num_blocks
        return Plan(
            placements, self.micro_batch_packs, self.group_micro_batches, self.weight_slots, self.grad_slots, self.disk_slots,
            self.inputs_tier, self.accumulators_tier,
        )  # fmt: skip


def batches(count: int, packs: int = PACKS, length: int = LENGTH, first_seed: int = 0) -> list[PackedBatch]:
    """Steps of random documents; every pack has another number of labels."""
    return [reference.random_batch(packs, length, VOCAB_SIZE, seed=first_seed + i, document_tokens=(4, 16)) for i in range(count)]


@cache
def initial_weights(family: str) -> dict[str, torch.Tensor]:
    """The state dict that engine and reference start from, exact in bfloat16: so fp32 and bf16 start from the same weights."""
    model = reference.build_model(FAMILIES[family]())
    return {name: value.bfloat16().float() if value.is_floating_point() else value for name, value in model.state_dict().items()}


@cache
def reference_run(family: str, recipe: Recipe, dtype: torch.dtype = torch.float32) -> Trained:
    """The reference from `initial_weights` over `batches(number of learning rates)`.

    In bfloat16 with SDPA, transformers' own choice, where it has no objection: its rounding differs from eager attention's.
    """
    model = reference.build_model(FAMILIES[family](), dtype=dtype)
    if dtype is not torch.float32:
        with contextlib.suppress(ValueError):
            model.set_attn_implementation("sdpa")
    with torch.no_grad():
        own = model.state_dict()
        for name, value in initial_weights(family).items():
            own[name].copy_(value)
    return reference.train(model, batches(len(recipe.learning_rates)), recipe)


@cache
def skeleton(family: str, dtype: torch.dtype = torch.float32) -> Skeleton:
    """The skeleton of a family; engines of one process share it one after the other."""
    return Skeleton(FAMILIES[family](), dtype)


def make_engine(
    family: str | PretrainedConfig,
    cut: Cut = Cut(),  # noqa: B008 - frozen
    precision: str = "fp32",
    parked: torch.dtype = torch.float32,
    device: Device | None = None,
    weights: Tensors | None = None,
    packs: int = PACKS,
    length: int = LENGTH,
    seed: int = 0,
) -> Engine:
    """An engine that holds `weights`, by default the family's initial ones."""
    dtype = getattr(torch, PRECISIONS[precision].compute_dtype)
    own = skeleton(family, dtype) if isinstance(family, str) else Skeleton(deepcopy(family), dtype)
    device = device or Device(Debug(poison=True))
    disk = Path(tempfile.gettempdir())
    engine = Engine(own, cut.plan(len(own.layouts)), PRECISIONS[precision], parked, device, packs, length, seed, disk)
    values = initial_weights(family) if weights is None else weights  # type: ignore[arg-type]
    engine.load_weights(lambda names: {name: values[name] for name in names})
    return engine


def update_of(recipe: Recipe, step: int, norm: float) -> Update:
    """The update that the reference does at `step` (from 0)."""
    clip = min(1.0, recipe.max_grad_norm / norm) if recipe.max_grad_norm and norm else 1.0
    return Update(step + 1, recipe.learning_rates[step], clip, recipe.beta1, recipe.beta2, recipe.eps, recipe.weight_decay)


def run(
    engine: Engine, recipe: Recipe, data: Sequence[PackedBatch] | None = None, between: Callable[[int], None] = lambda step: None
) -> Trained:
    """Train, and finish. `between(step)` is called when the update of a step is decided but not carried out."""
    losses, norms, first = [], [], {}
    for step, batch in enumerate(data or batches(len(recipe.learning_rates))):
        loss, norm = engine.train_step(batch, step)
        if step == 0:
            first = engine.parked_gradients()
        engine.decide(update_of(recipe, step, norm))
        between(step)
        losses.append(loss)
        norms.append(norm)
    engine.finish()
    return Trained(losses, norms, first, engine.master_weights())


def states(engine: Engine) -> dict[str, torch.Tensor]:
    """A copy of every finished state, by block and name, parked gradients left out."""
    return {
        f"{layout.name}.{name}": value.clone() for i, layout in enumerate(engine.layouts) for name, value in engine.read_block(i).items()
    }


def relative_errors(found: Tensors, wanted: Tensors) -> dict[str, float]:
    """Relative 2-norm of the difference per tensor. Key biases have no gradient but noise (softmax does not see them):
    they are judged against the norm of all tensors of their layer."""
    assert found.keys() == wanted.keys()
    layers: dict[str, float] = {}
    for name, value in wanted.items():
        layers[_layer(name)] = layers.get(_layer(name), 0.0) + float(value.double().square().sum())
    errors = {}
    for name, value in wanted.items():
        size = layers[_layer(name)] ** 0.5 if name.endswith("k_proj.bias") else float(value.double().norm())
        difference = float((found[name].double() - value.double()).norm())
        errors[name] = difference / size if difference else 0.0
    return errors


def assert_close(found: Trained, wanted: Trained, tolerance: float = 1e-5) -> None:
    """Losses, norms, every gradient of the first step and every weight agree within a relative `tolerance`."""
    for name in ("losses", "grad_norms"):
        for step, (a, b) in enumerate(zip(getattr(found, name), getattr(wanted, name), strict=True)):
            assert abs(a - b) <= tolerance * abs(b), f"{name} of step {step}: {a} instead of {b}"
    for name in ("gradients", "weights"):
        errors = relative_errors(getattr(found, name), getattr(wanted, name))
        worst = max(errors, key=lambda key: errors[key])
        assert errors[worst] <= tolerance, f"{name}: {worst} is off by {errors[worst]}"


def assert_equal(found: Trained, wanted: Trained) -> None:
    """Every bit agrees."""
    assert found.losses == wanted.losses
    assert found.grad_norms == wanted.grad_norms
    for name in ("gradients", "weights"):
        assert_same_bits(getattr(found, name), getattr(wanted, name))


def assert_same_bits(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        same = torch.equal(found[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8))
        assert same, f"{name} differs"


def _layer(name: str) -> str:
    """The decoder layer that a parameter belongs to; empty outside the layers."""
    return next((".".join(name.split(".")[: i + 1]) for i, part in enumerate(name.split(".")) if part.isdigit()), "")
