"""What only a GPU shows: parity on it, hand-overs between its streams, and memory that stays flat.

The suite runs wherever CUDA is; elsewhere it is skipped, and the fake device of this folder stands in for the streams.
"""

import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch

from megatrain.data.batch import PackedBatch
from megatrain.engine.adamw import Update
from megatrain.engine.debug import Debug
from megatrain.engine.device import CudaDevice, Device
from megatrain.engine.engine import Engine
from megatrain.errors import OutOfVramError
from megatrain.models.skeleton import Skeleton
from megatrain.plan import Placement, Plan, Tier
from megatrain.precision import PRECISIONS
from tests import reference
from tests.families import FAMILIES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VRAM, RAM, NVME = Tier.VRAM, Tier.RAM, Tier.NVME
PACKS, LENGTH, STEPS, RATE = 5, 32, 5, 1e-3
PLACEMENTS = {
    "all vram": (Placement(VRAM, VRAM, VRAM, VRAM), {}),
    "all ram": (Placement(RAM, RAM, RAM, RAM), {"inputs_tier": RAM}),
    "weights streamed, updated on the gpu": (Placement(RAM, VRAM, VRAM, VRAM), {"weight_slots": 3}),
    "weights resident, updated on the cpu": (Placement(VRAM, RAM, RAM, RAM), {"inputs_tier": RAM}),
    "moments resident, the rest streamed": (Placement(RAM, RAM, RAM, VRAM), {"grad_slots": 2}),
    "gradients and masters resident": (Placement(RAM, VRAM, VRAM, RAM), {}),
    "groups, sums resident": (Placement(VRAM, VRAM, VRAM, VRAM), {"group_micro_batches": 1}),
    "groups, sums in ram": (Placement(RAM, RAM, RAM, RAM), {"group_micro_batches": 2, "micro_batch_packs": 1, "accumulators_tier": RAM}),
    "all on disk": (Placement(NVME, NVME, NVME, NVME), {"inputs_tier": RAM}),
    "masters and moments on disk": (Placement(RAM, NVME, RAM, NVME), {"disk_slots": 2}),
    "on disk, updated on the gpu": (Placement(NVME, NVME, NVME, VRAM), {"disk_slots": 2, "group_micro_batches": 1}),
}


def plan_of(placement: Placement, blocks: int, **changes: object) -> Plan:
    plan = Plan((placement,) * blocks, micro_batch_packs=2, group_micro_batches=3, device="cuda:0")
    return dataclasses.replace(plan, **changes)


def run_engine(
    family: str, precision: str, weights: dict[str, torch.Tensor], batches: list[PackedBatch], name: str, device: Device,
    eps: float = 1e-4, compiled: bool = False,
) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(losses, norms, first gradients, last masters) of STEPS steps."""
    placement, changes = PLACEMENTS[name]
    skeleton = Skeleton(FAMILIES[family](), getattr(torch, PRECISIONS[precision].compute_dtype))
    plan = plan_of(placement, len(skeleton.layouts), **changes)
    disk = Path(tempfile.gettempdir())
    engine = Engine(skeleton, plan, PRECISIONS[precision], torch.float32, device, PACKS, LENGTH, 0, disk, compiled)
    engine.load_weights(lambda names: {name: weights[name] for name in names})
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches):
        loss, norm = engine.train_step(batch, step)
        gradients = gradients or engine.parked_gradients()
        engine.decide(Update(step + 1, RATE, min(1.0, 1.0 / norm), 0.9, 0.95, eps, 0.01))
        losses.append(loss)
        norms.append(norm)
    engine.finish()
    assert engine.compiler.problem == ""
    masters = engine.master_weights()
    engine.close()
    return losses, norms, gradients, masters


def cuda(**modes: bool) -> CudaDevice:
    return CudaDevice(torch.device("cuda", 0), Debug(**modes))


def start(family: str) -> tuple[dict[str, torch.Tensor], list[PackedBatch]]:
    config = FAMILIES[family]()
    model = reference.build_model(config)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    vocab = config.get_text_config().vocab_size
    return weights, [reference.random_batch(PACKS, LENGTH, vocab, seed=step) for step in range(STEPS)]


def reference_run(family: str, batches: list[PackedBatch], dtype: torch.dtype, eps: float = 1e-4) -> reference.Trained:
    model = reference.build_model(FAMILIES[family](), dtype=dtype).cuda()
    recipe = reference.Recipe([RATE] * STEPS, micro_batch_packs=2, eps=eps)
    return reference.train(model, batches, recipe)


def off(found: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    """Relative distance; a tensor whose norm is below `floor` is judged against that."""
    return float((found.cpu() - expected.cpu()).norm()) / max(float(expected.norm()), floor)


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert set(found) == set(expected)
    total = float(sum(value.double().square().sum() for value in expected.values()) ** 0.5)
    return max(off(found[name], expected[name], 1e-2 * total) for name in found)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("family", ["llama_tied", "llama_untied", "qwen3_moe"])
def test_fp32_equals_autograd_for_every_placement(family: str, name: str) -> None:
    weights, batches = start(family)
    expected = reference_run(family, batches, torch.float32)
    losses, norms, gradients, masters = run_engine(family, "fp32", weights, batches, name, cuda(poison=True))
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert worst(gradients, expected.gradients) <= 1e-5
    assert worst(masters, expected.weights) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_autograd_for_every_family(family: str) -> None:
    weights, batches = start(family)
    expected = reference_run(family, batches, torch.float32)
    losses, _, gradients, masters = run_engine(family, "fp32", weights, batches, "all ram", cuda())
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert worst(gradients, expected.gradients) <= 1e-5
    assert worst(masters, expected.weights) <= 1e-5


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("family", ["llama_tied", "qwen2"])
def test_compiled_layers_equal_autograd(family: str) -> None:
    weights, batches = start(family)
    exact = reference_run(family, batches, torch.float32)
    losses, norms, gradients, masters = run_engine(family, "fp32", weights, batches, "all ram", cuda(poison=True), compiled=True)
    assert losses == pytest.approx(exact.losses, rel=1e-5)
    assert norms == pytest.approx(exact.grad_norms, rel=1e-5)
    assert worst(gradients, exact.gradients) <= 1e-5
    assert worst(masters, exact.weights) <= 1e-5
    plain = reference_run(family, batches, torch.bfloat16)
    for placement in ("all ram", "all vram"):  # updated by the kernel of the CPU and by that of the GPU
        losses, _, gradients, masters = run_engine(family, "bf16", weights, batches, placement, cuda(poison=True), compiled=True)
        assert distance(gradients, exact.gradients) <= 1.2 * distance(plain.gradients, exact.gradients)
        assert distance(masters, exact.weights) <= 1.2 * distance(plain.weights, exact.weights)
        assert losses == pytest.approx(exact.losses, rel=2e-2)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative distance of all tensors together."""
    apart = sum((found[name].cpu().double() - expected[name].cpu().double()).square().sum() for name in expected)
    return float((apart / sum(value.cpu().double().square().sum() for value in expected.values())) ** 0.5)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "gemma2", "mixtral"])
def test_bf16_is_as_close_to_fp32_as_plain_bf16(family: str, name: str) -> None:
    weights, batches = start(family)
    exact = reference_run(family, batches, torch.float32)
    plain = reference_run(family, batches, torch.bfloat16)
    losses, _, gradients, masters = run_engine(family, "bf16", weights, batches, name, cuda())
    assert distance(gradients, exact.gradients) <= 1.2 * distance(plain.gradients, exact.gradients)
    assert distance(masters, exact.weights) <= 1.2 * distance(plain.weights, exact.weights)
    assert losses == pytest.approx(exact.losses, rel=2e-2)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_overlap_changes_no_bit(precision: str, name: str) -> None:
    """Poisoned slots and random delays at every hand-over against the mode that waits after every operation."""
    weights, batches = start("llama_tied")
    blocking = run_engine("llama_tied", precision, weights, batches, name, cuda(sync=True))
    for modes in ({}, {"poison": True}, {"poison": True, "delay": True}):
        overlapped = run_engine("llama_tied", precision, weights, batches, name, cuda(**modes))
        assert overlapped[:2] == blocking[:2]
        for found, expected in zip(overlapped[2:], blocking[2:], strict=True):
            assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_placements_updated_by_the_same_side_are_bit_equal(precision: str) -> None:
    weights, batches = start("llama_untied")
    runs = {name: run_engine("llama_untied", precision, weights, batches, name, cuda()) for name in PLACEMENTS}
    on_gpu = ["all vram", "weights streamed, updated on the gpu", "moments resident, the rest streamed"]
    on_cpu = [
        "all ram", "weights resident, updated on the cpu", "gradients and masters resident", "all on disk", "masters and moments on disk",
    ]  # fmt: skip
    for side in (on_gpu, on_cpu):
        first = runs[side[0]]
        for name in side[1:]:
            assert runs[name][:2] == first[:2], name
            assert all(torch.equal(runs[name][3][key], first[3][key]) for key in first[3]), name


def test_reserved_memory_is_flat() -> None:
    weights, batches = start("llama_tied")
    skeleton = Skeleton(FAMILIES["llama_tied"](), torch.bfloat16)
    plan = plan_of(Placement(), len(skeleton.layouts), inputs_tier=RAM)
    engine = Engine(skeleton, plan, PRECISIONS["bf16"], torch.bfloat16, cuda(), PACKS, LENGTH)
    engine.load_weights(lambda names: {name: weights[name] for name in names})
    reserved = []
    for step in range(60):
        _, norm = engine.train_step(batches[step % STEPS], step)
        engine.decide(Update(step + 1, RATE, min(1.0, 1.0 / norm), 0.9, 0.95, 1e-8, 0.01))
        reserved.append((torch.cuda.memory_reserved(), torch.cuda.memory_allocated()))
    engine.close()
    assert reserved[10][0] == reserved[-1][0]
    assert reserved[10][1] == reserved[-1][1]


def test_a_limit_is_kept() -> None:
    device = cuda()
    device.limit_memory(torch.cuda.memory_reserved() + (256 << 20))
    try:
        with pytest.raises(OutOfVramError):
            device.empty(1 << 29, torch.uint8, "more than is allowed")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        device.close()
