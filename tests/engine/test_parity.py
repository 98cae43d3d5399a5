"""The engine trains as plain transformers, autograd and torch AdamW do, wherever states live and however a step is cut."""

import pytest
import torch

from megatrain.engine.debug import Debug
from megatrain.engine.device import Device
from megatrain.plan import Placement
from tests.families import FAMILIES
from tests.parity import (
    ALL_RAM,
    ALL_VRAM,
    DISK_PLACEMENTS,
    PLACEMENTS,
    RAM,
    VRAM,
    Cut,
    Recipe,
    Trained,
    assert_close,
    assert_equal,
    batches,
    make_engine,
    reference_run,
    relative_errors,
    run,
)

RECIPE = Recipe((1e-3,) * 5, micro_batch_packs=2, eps=1e-4)  # eps: AdamW amplifies noise where gradients are near zero
ODD = (ALL_VRAM, ALL_RAM, Placement(RAM, RAM, RAM, VRAM), Placement(VRAM, RAM, VRAM, RAM), Placement(RAM, VRAM, RAM, RAM), ALL_VRAM)
CUTS = {
    "one by one, in VRAM": Cut(ALL_VRAM, 1, 1),
    "one by one, sums in RAM": Cut(ALL_RAM, 1, 1, accumulators_tier=RAM),
    "groups of two, inputs and sums in RAM": Cut(ALL_RAM, 1, 2, weight_slots=3, grad_slots=2, inputs_tier=RAM, accumulators_tier=RAM),
    "groups of two, sums in VRAM": Cut(ALL_RAM, 1, 2, inputs_tier=RAM),
    "all in one group": Cut(ALL_RAM, 1, 99, grad_slots=2, inputs_tier=RAM),
    "every block elsewhere": Cut(ODD, 1, 3, accumulators_tier=RAM),
    "every block elsewhere, one group": Cut(ODD[::-1], 1, 99, inputs_tier=RAM),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_is_plain_training(family: str) -> None:
    assert_close(run(make_engine(family), RECIPE), reference_run(family, RECIPE))


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_no_further_from_fp32_than_plain_bf16(family: str) -> None:
    exact, plain = reference_run(family, RECIPE), reference_run(family, RECIPE, torch.bfloat16)
    found = run(make_engine(family, precision="bf16", parked=torch.bfloat16), RECIPE)
    assert_no_worse(found, plain, exact)


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "mixtral", "gpt_oss"])
def test_bf16_with_gradients_parked_in_fp32(family: str) -> None:
    exact, plain = reference_run(family, RECIPE), reference_run(family, RECIPE, torch.bfloat16)
    found = run(make_engine(family, precision="bf16", parked=torch.float32), RECIPE)
    assert_no_worse(found, plain, exact, allowed_first=1.05)


def assert_no_worse(found: Trained, plain: Trained, exact: Trained, allowed: float = 1.2, allowed_first: float = 1.2) -> None:
    """Errors against fp32 are at most `allowed` times those of plain bf16 (the gradients of the first step: `allowed_first`).

    Later losses and norms, and single weights, hang on how earlier roundings fell: they are held to bf16's own resolution.
    """
    ours, theirs = (relative_errors(x.gradients, exact.gradients) for x in (found, plain))
    usual = rms(theirs)
    for name, error in ours.items():
        assert error <= allowed_first * max(theirs[name], usual), f"gradient of {name}: {error}, plain bf16 {theirs[name]}"
    ours, theirs = (relative_errors(x.weights, exact.weights) for x in (found, plain))
    assert rms(ours) <= allowed * rms(theirs)
    for name, error in ours.items():
        assert error <= 2 * max(theirs[name], rms(theirs)), f"{name}: {error}, plain bf16 {theirs[name]}"
    for name in ("losses", "grad_norms"):
        a, b, c = (getattr(x, name) for x in (found, plain, exact))
        assert abs(a[0] - c[0]) <= allowed * max(abs(b[0] - c[0]), 2**-11 * c[0])
        plain_error = max(abs(y - z) / z for y, z in zip(b, c, strict=True))
        assert max(abs(x - z) / z for x, z in zip(a, c, strict=True)) <= allowed * max(plain_error, torch.finfo(torch.bfloat16).eps)


def rms(errors: dict[str, float]) -> float:
    return (sum(error**2 for error in errors.values()) / len(errors)) ** 0.5


@pytest.mark.parametrize("family", ["llama_untied", "qwen3_moe"])
@pytest.mark.parametrize("packs", [5, 3, 1], ids=["1 micro-batch", "2 micro-batches", "5 micro-batches"])
def test_micro_batches_do_not_change_a_step(family: str, packs: int) -> None:
    counts = [(batch.packs(i, i + 1).trained_tokens) for batch in batches(5) for i in range(batch.num_packs)]
    assert max(counts) >= 1.3 * min(counts)
    whole = reference_run(family, Recipe(RECIPE.learning_rates, micro_batch_packs=5, eps=RECIPE.eps))
    assert_close(run(make_engine(family, Cut(micro_batch_packs=packs)), RECIPE), whole)


@pytest.mark.parametrize("family", ["llama_untied", "qwen3_moe"])
def test_groups_tiers_and_mixed_blocks_change_no_bit(family: str) -> None:
    short = Recipe((1e-3,) * 2)
    base = run(make_engine(family, Cut(ALL_RAM, 1)), short)
    for cut in CUTS.values():
        assert_equal(run(make_engine(family, cut), short), base)


def test_groups_of_a_tied_model_change_only_the_order_of_a_sum() -> None:
    """Head and embedding add to one gradient, group by group: the same addends in another order."""
    short = Recipe((1e-3,) * 2, eps=1e-4)
    by_size = {}
    for cut in CUTS.values():
        by_size.setdefault(min(cut.group_micro_batches, 5), []).append(run(make_engine("llama_tied", cut), short))
    for first, *others in by_size.values():
        assert_close(first, by_size[5][0], 1e-6)
        for other in others:
            assert_equal(other, first)
    assert sorted(len(runs) for runs in by_size.values()) == [1, 2, 2, 2]


@pytest.mark.parametrize(("family", "precision"), [("llama_tied", "bf16"), ("qwen3_moe", "fp32")])
def test_every_placement_gives_the_same_bits(family: str, precision: str) -> None:
    short = Recipe((1e-3,) * 2)
    parked = torch.bfloat16 if precision == "bf16" else torch.float32
    base = run(make_engine(family, Cut(ALL_VRAM), precision, parked, Device(Debug())), short)
    assert base.grad_norms[0] > 0
    for i, placement in enumerate([*PLACEMENTS, *DISK_PLACEMENTS]):
        cut = Cut(placement, disk_slots=2 + i % 2, weight_slots=2 + i % 2, grad_slots=1 + i % 2, inputs_tier=(VRAM, RAM)[i // 2 % 2])
        assert_equal(run(make_engine(family, cut, precision, parked), short), base)
