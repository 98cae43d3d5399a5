"""Plans keep their promises: never over a limit, never larger for a smaller limit, the same for the same question."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain import costs, planner
from megatrain.config import RunConfig
from megatrain.errors import ConfigError, PlanError
from megatrain.fitting import Problem
from megatrain.hardware import Machine
from megatrain.plan import Kind, Plan, Tier
from megatrain.shape import ModelShape
from megatrain.units import GIB
from megatrain.work import Work
from tests.shapes import H200, QWEN_1B5, QWEN_7B, SMALL, decoder, machine


def config(packs: int = 16, **changes: Any) -> RunConfig:
    """The default configuration with `packs` packs a step; `memory__x=...` changes memory.x, and so on."""
    raw = RunConfig().to_dict()
    raw["train"]["global_batch_tokens"] = packs * raw["data"]["sequence_length"]
    if any(value == "nvme" for value in changes.values()):
        changes["memory__offload_folder"] = "/fast"
    for key, value in changes.items():
        room, _, name = key.rpartition("__")
        (raw[room] if room else raw)[name] = value
    return RunConfig.from_dict(raw)


def letters(plan: Plan) -> list[str]:
    """Per block the tiers of weights, masters, grads, moments: `vvvv`, `rrrr`, ..."""
    return ["".join(placement.tier(kind)[0] for kind in Kind) for placement in plan.placements]


SHAPES = st.sampled_from([QWEN_7B, QWEN_1B5, SMALL, decoder("untied", 512, 1500, 3, 8, 8, 1000, tied=False)])
TIERS = st.sampled_from(["auto", "auto", "auto", "vram", "ram", "nvme"])
CONFIGS = st.builds(
    config,
    packs=st.sampled_from([1, 3, 10, 16, 64]),
    precision=st.sampled_from(["bf16", "fp32"]),
    gradient_dtype=st.sampled_from(["auto", "float32"]),
    memory__weights=TIERS,
    memory__masters=TIERS,
    memory__grads=TIERS,
    memory__moments=TIERS,
    memory__micro_batch_packs=st.sampled_from([None, None, None, 1]),
    memory__group_micro_batches=st.sampled_from([None, None, None, 1, 2]),
    memory__offload_folder=st.sampled_from([None, "/fast"]),
)
MACHINES = st.builds(
    machine, vram_gib=st.sampled_from([0, 8, 24, 139]), ram_gib=st.sampled_from([16, 64, 128]), disk_gib=st.sampled_from([2, 40, 500])
)


def attempt(configuration: RunConfig, shape: ModelShape, computer: Machine) -> Plan | None:
    try:
        return planner.plan(configuration, shape, computer)
    except PlanError:
        return None


def refusal(configuration: RunConfig, shape: ModelShape, computer: Machine) -> PlanError | None:
    try:
        planner.plan(configuration, shape, computer)
    except PlanError as error:
        return error
    return None


@settings(max_examples=60)
@given(CONFIGS, SHAPES, MACHINES)
def test_a_plan_is_whole_and_within_what_may_be_used(configuration: RunConfig, shape: ModelShape, computer: Machine):
    plan = attempt(configuration, shape, computer)
    if plan is None:
        return
    predicted, limits = plan.predicted, planner.budget(configuration, computer)
    assert predicted.vram_bytes == sum(predicted.vram_parts.values()) <= limits.vram_bytes
    assert predicted.ram_bytes == sum(predicted.ram_parts.values()) <= limits.ram_bytes
    assert predicted.disk_bytes == sum(predicted.disk_parts.values()) <= limits.disk_bytes
    assert limits.ram_bytes < computer.ram_available_bytes
    assert limits.disk_bytes <= max(0, computer.offload_free_bytes - 4 * GIB)
    assert len(plan.placements) == len(shape.blocks)
    for kind in Kind:
        wanted = getattr(configuration.memory, kind.value)
        assert wanted == "auto" or all(placement.tier(kind) == wanted for placement in plan.placements)
    assert plan.micro_batch_packs == (configuration.memory.micro_batch_packs or plan.micro_batch_packs)
    sums = costs.ledger(Work.of(configuration, shape, plan.device), plan)
    assert (sums.vram, sums.ram, sums.disk) == (predicted.vram_parts, predicted.ram_parts, predicted.disk_parts)
    assert predicted.step_s > 0
    assert predicted.bottleneck in ("compute", "h2d", "d2h", "optimizer", "disk")
    assert Plan.from_json(plan.to_json()) == plan
    assert planner.plan(configuration, shape, computer) == plan


@settings(max_examples=50)
@given(CONFIGS, SHAPES, st.sampled_from([16, 64, 128]), st.floats(0.5, 140), st.floats(0.3, 1.0))
def test_a_smaller_limit_never_gives_a_larger_use(configuration: RunConfig, shape: ModelShape, ram_gib: int, limit: float, share: float):
    computer = machine(139, ram_gib, H200)
    wide = attempt(replace(configuration, memory=replace(configuration.memory, vram_limit_gib=limit)), shape, computer)
    tight = attempt(replace(configuration, memory=replace(configuration.memory, vram_limit_gib=limit * share)), shape, computer)
    if tight is None:
        return
    assert wide is not None
    assert tight.predicted.vram_bytes <= wide.predicted.vram_bytes
    assert tight.predicted.vram_bytes <= limit * share * GIB


@settings(max_examples=50)
@given(CONFIGS, SHAPES, MACHINES)
def test_a_refusal_says_what_is_missing_and_without_a_disk_exactly(configuration: RunConfig, shape: ModelShape, computer: Machine):
    error = refusal(configuration, shape, computer)
    if error is None:
        assert planner.suggestions(configuration, shape, computer) == []
        return
    assert shape.name in error.message
    assert error.hint
    assert error.missing_bytes
    assert min(error.missing_bytes.values()) > 0
    assert refusal(configuration, shape, with_more(computer, error.missing_bytes)) is None
    if configuration.memory.offload_folder:
        return  # one tier can stand in for another: less of one is enough with more of the other
    for tier, short in error.missing_bytes.items():
        assert refusal(configuration, shape, with_more(computer, {**error.missing_bytes, tier: short - 1})) is not None


def with_more(computer: Machine, more: dict[str, int]) -> Machine:
    """The same computer with more memory free; the reserves follow its totals, which stay."""
    cards = tuple(replace(gpu, free_bytes=gpu.free_bytes + more.get("vram", 0)) for gpu in computer.gpus)
    ram, disk = computer.ram_available_bytes + more.get("ram", 0), computer.offload_free_bytes + more.get("disk", 0)
    return replace(computer, gpus=cards, ram_available_bytes=ram, offload_free_bytes=disk)


@settings(max_examples=25)
@given(CONFIGS, SHAPES, MACHINES)
def test_every_suggestion_is_a_plan_that_fits(configuration: RunConfig, shape: ModelShape, computer: Machine):
    for suggestion in planner.suggestions(configuration, shape, computer):
        raw = configuration.to_dict()
        *room, name = suggestion.key.split(".")
        (raw[room[0]] if room else raw)[name] = suggestion.value
        changed = RunConfig.from_dict(raw)  # a value that the configuration takes
        assert planner.plan(changed, shape, computer) == suggestion.plan
        assert suggestion.text.endswith(".")


def test_a_batch_with_too_many_zeros_is_planned_at_once():
    error = refusal(config(2**17), QWEN_1B5, machine(24, 64))
    assert error is not None
    assert "per group" in error.hint
    with pytest.raises(ConfigError, match="outside"):
        config(2**20)


@pytest.mark.parametrize("packs", [1, 2, 7, 12, 60, 97])
def test_micro_batches_come_in_every_useful_size(packs: int):
    problem = Problem.of(config(packs, kernels="plain"), QWEN_1B5, machine(24, 64))
    every = {-(-packs // count) for count in range(1, packs + 1)}
    assert problem.micro_batch_sizes() == sorted((size for size in every if size <= 16), reverse=True)


@pytest.mark.parametrize(
    ("packs", "sizes"),
    [(64, [16, 8, 4, 2, 1]), (13, [13, 7, 5, 4, 3, 2, 1]), (24, [12, 8, 6, 4, 3, 2, 1]), (7, [7, 4, 3, 2, 1])],
)
def test_compiled_micro_batches_are_equal_where_that_costs_little(packs: int, sizes: list[int]):
    fused = Problem.of(config(packs=packs), QWEN_7B, machine(139, 128, H200))
    assert fused.micro_batch_sizes() == sizes


def test_where_nothing_can_be_compiled_plans_are_for_plain_operations():
    able = machine(24, 64)
    unable = replace(able, can_compile=False)

    def use(where: Machine, **changes: Any) -> int:
        return planner.plan(config(memory__micro_batch_packs=16, **changes), QWEN_1B5, where).predicted.vram_parts["activations"]

    assert use(unable) == use(able, kernels="plain") > use(able)
    assert use(unable, kernels="compiled") == use(able)


# ---- what is preferred -----------------------------------------------------------------------------------------------
def test_everything_stays_in_vram_when_it_fits():
    plan = planner.plan(config(), QWEN_1B5, machine(139, 125, H200))
    assert letters(plan) == ["vvvv"] * 30
    assert plan.inputs_tier is Tier.VRAM
    assert plan.predicted.ram_parts["weights"] == 0


def test_the_first_blocks_stay_in_vram_and_the_rest_in_ram():
    plan = planner.plan(config(packs=64, memory__vram_limit_gib=36.0), QWEN_7B, machine(139, 128, H200))
    placed = letters(plan)
    resident = placed.count("vvvv")
    assert 0 < resident < 30
    assert placed[:resident] == ["vvvv"] * resident
    assert set(placed[resident:]) <= {"vrrr", "rrrr"}
    assert plan.inputs_tier is Tier.RAM  # hidden behind compute, and the VRAM serves states
    assert plan.group_micro_batches == 4  # one pass over streamed weights for the whole step
    assert 35 * GIB < plan.predicted.vram_bytes <= 36 * GIB


def test_seven_billion_parameters_train_within_ten_gib():
    plan = planner.plan(config(packs=64, memory__vram_limit_gib=10.0), QWEN_7B, machine(139, 128, H200))
    assert plan.predicted.vram_bytes <= 10 * GIB
    assert plan.micro_batch_packs * 1024 >= 2048


def test_a_third_slot_is_taken_when_there_is_room():
    with pytest.raises(PlanError) as caught:
        planner.plan(config(memory__vram_limit_gib=1.0), QWEN_1B5, machine(139, 128, H200))
    least = 1.0 + caught.value.missing_bytes["vram"] / GIB
    tight = planner.plan(config(memory__vram_limit_gib=least), QWEN_1B5, machine(139, 128, H200))
    roomy = planner.plan(config(memory__vram_limit_gib=8.0), QWEN_1B5, machine(139, 128, H200))
    assert (tight.weight_slots, tight.grad_slots) == (2, 1)
    assert (roomy.weight_slots, roomy.grad_slots) == (3, 2)


def test_resident_weights_run_in_groups_of_one_micro_batch():
    plan = planner.plan(config(packs=64), QWEN_1B5, machine(139, 125, H200))
    assert (plan.micro_batch_packs, plan.group_micro_batches, plan.accumulators_tier) == (16, 1, Tier.VRAM)


def test_without_room_for_all_sums_resident_weights_run_in_one_group():
    need = planner.plan(config(packs=64), QWEN_1B5, machine(139, 125, H200)).predicted.vram_bytes
    plan = planner.plan(config(packs=64, memory__vram_limit_gib=(need - GIB) / GIB), QWEN_1B5, machine(139, 125, H200))
    assert plan.group_micro_batches in (1, 4)
    assert set(letters(plan)) == {"vvvv"}
    assert plan.predicted.vram_bytes <= need - GIB


def test_micro_batches_are_even_and_bounded():
    plan = planner.plan(config(packs=34), QWEN_1B5, machine(139, 125, H200))
    assert plan.micro_batch_packs == 12  # three of 12, 12 and 10 instead of 16, 16 and 2
    on_cpu = planner.plan(config(packs=10), SMALL, machine(0, 64))
    assert on_cpu.micro_batch_packs * 1024 <= 4096


def test_a_pack_longer_than_the_usual_micro_batch_runs_alone():
    long = config(data__sequence_length=32768, train__global_batch_tokens=65536)
    assert planner.plan(long, SMALL, machine(24, 64)).micro_batch_packs == 1


def test_without_a_gpu_everything_is_on_the_device_that_computes():
    plan = planner.plan(config(), SMALL, machine(0, 16))
    assert plan.device == "cpu"
    assert letters(plan) == ["vvvv"] * 8
    assert plan.predicted.vram_bytes == 0
    assert plan.predicted.vram_parts == {}


def test_explicit_tiers_without_a_gpu_stream_all_the_same():
    plan = planner.plan(config(memory__weights="ram", memory__moments="ram"), SMALL, machine(0, 16))
    assert letters(plan) == ["rrrr"] * 8
    assert plan.weight_slots == 3


def test_explicit_groups_keep_their_sums_in_ram_when_vram_is_short():
    small = planner.plan(config(packs=64, memory__group_micro_batches=1, memory__vram_limit_gib=7.0), QWEN_1B5, machine(24, 64))
    assert (small.group_micro_batches, small.accumulators_tier) == (1, Tier.RAM)
    roomy = planner.plan(config(packs=64, memory__group_micro_batches=1), QWEN_1B5, machine(24, 64))
    assert roomy.accumulators_tier is Tier.VRAM


def test_a_faster_card_gives_a_shorter_step():
    slow = planner.plan(config(memory__vram_limit_gib=8.0), QWEN_1B5, machine(24, 64))
    fast = planner.plan(config(memory__vram_limit_gib=8.0), QWEN_1B5, machine(139, 64, H200))
    assert fast.predicted.step_s < slow.predicted.step_s
    assert fast.predicted.tokens_per_s == pytest.approx(16384 / fast.predicted.step_s)


# ---- devices and limits ----------------------------------------------------------------------------------------------
def test_the_second_card_can_be_chosen():
    computer = machine(24, 64, gpus=2)
    busy = replace(computer, gpus=(replace(computer.gpus[0], free_bytes=0), computer.gpus[1]))
    assert planner.plan(config(memory__device="cuda:1"), QWEN_1B5, busy).device == "cuda:1"
    with pytest.raises(PlanError, match="VRAM"):
        planner.plan(config(), QWEN_1B5, busy)


def test_a_device_that_is_not_here_is_refused_by_name():
    with pytest.raises(ConfigError, match="cuda:3") as caught:
        planner.plan(config(memory__device="cuda:3"), SMALL, machine(24))
    assert "cuda:0" in caught.value.hint


def test_a_card_that_torch_cannot_use_is_not_planned_with():
    blind = replace(machine(24), torch_cuda=None)
    assert planner.plan(config(), SMALL, blind).device == "cpu"
    with pytest.raises(ConfigError, match="PyTorch cannot use it"):
        planner.plan(config(memory__device="cuda:0"), SMALL, blind)


def test_a_sequence_longer_than_the_models_positions_is_refused():
    long = config(data__sequence_length=65536, train__global_batch_tokens=65536)
    with pytest.raises(ConfigError, match="32768 positions"):
        planner.plan(long, SMALL, machine(24))


def test_what_others_hold_is_not_planned_with():
    computer = machine(24, 64)
    held = replace(computer, gpus=(replace(computer.gpus[0], free_bytes=6 * GIB),), ram_available_bytes=30 * GIB)
    limits = planner.budget(config(), held)
    assert limits.vram_bytes < 6 * GIB
    assert limits.ram_bytes == 30 * GIB - limits.ram_reserve_bytes
    assert limits.ram_reserve_bytes == 64 * GIB * 8 // 100
    assert planner.budget(config(), machine(0, 16)).ram_reserve_bytes == 2 * GIB


def test_limits_above_what_is_free_change_nothing():
    assert planner.budget(config(memory__vram_limit_gib=1000.0, memory__ram_limit_gib=1000.0), machine(24, 64)) == planner.budget(
        config(), machine(24, 64)
    )


def test_suggestions_name_the_limit_that_is_enough():
    tight = config(memory__vram_limit_gib=3.0)
    with pytest.raises(PlanError) as caught:
        planner.plan(tight, QWEN_1B5, machine(24, 64))
    first = planner.suggestions(tight, QWEN_1B5, machine(24, 64))[0]
    assert first.key == "memory.vram_limit_gib"
    assert caught.value.hint == first.text == f"Raise the VRAM limit to {first.value} GiB."
    assert 3.0 < first.value < 5.0


def test_changes_of_the_training_come_after_those_that_leave_it_alone():
    full = config(packs=64, precision="fp32", memory__ram_limit_gib=20.0)
    keys = [suggestion.key for suggestion in planner.suggestions(full, QWEN_1B5, machine(8, 64))]
    assert keys[0].startswith("memory.")
    assert keys == sorted(keys, key=lambda key: not key.startswith("memory."))


def test_nothing_is_suggested_when_nothing_helps():
    assert planner.suggestions(config(), QWEN_7B, machine(8, 16)) == []
    with pytest.raises(PlanError, match="lacks .* of RAM") as caught:
        planner.plan(config(), QWEN_7B, machine(8, 16))
    assert "smaller model" in caught.value.hint


def test_a_hundred_layers_are_planned_in_milliseconds():
    """Counted, not timed: the search may look at a few hundred plans, whatever the number of layers."""
    deep = decoder("deep", 8192, 49152, 100, 64, 8, 152064, tied=False)
    looked = 0
    original = costs.ledger

    def counting(*arguments: Any) -> Any:
        nonlocal looked
        looked += 1
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "ledger", counting)
        planner.plan(config(packs=1024), deep, machine(80, 4000))
    assert looked < 300
