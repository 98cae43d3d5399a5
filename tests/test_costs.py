"""The byte and time formulas, recomputed here from the models' published sizes."""

from dataclasses import replace

import pytest

from megatrain import activation_costs, costs, timing
from megatrain.config import RunConfig
from megatrain.plan import Kind, Placement, Plan, Tier
from megatrain.precision import PRECISIONS
from megatrain.rates import Rates
from megatrain.shape import BlockShape, ModelShape
from megatrain.units import GIB
from megatrain.work import Work, group_tokens, groups, micro_batches
from tests.shapes import QWEN_1B5, QWEN_7B

ALL_VRAM = Placement(Tier.VRAM, Tier.VRAM, Tier.VRAM, Tier.VRAM)
SLACK = 256 * 16  # what alignment may add to one block of weights
GAPS = 64 * 16  # what alignment may add to one flat array, in elements
LAYER_7B = 3584 * 3584 * 2 + 3584 * 512 * 2 + 3584 + 512 * 2 + 3 * 3584 * 18944 + 2 * 3584
EDGE_7B = 152064 * 3584


def work(shape: ModelShape = QWEN_7B, device: str = "cuda:0", packs: int = 16, **changes: object) -> Work:
    train = replace(RunConfig().train, global_batch_tokens=packs * 1024)
    config = replace(RunConfig(), train=train, **{"kernels": "plain", **changes})
    return Work.of(config, shape, device)


def plan(shape: ModelShape = QWEN_7B, placement: Placement = Placement(), resident: int = 0, **changes: object) -> Plan:  # noqa: B008
    count = len(shape.blocks)
    return Plan((ALL_VRAM,) * resident + (placement,) * (count - resident), **{"micro_batch_packs": 4, "group_micro_batches": 4, **changes})


def test_parameters_are_those_of_the_published_models():
    assert QWEN_7B.num_params == 7_615_616_512
    assert QWEN_1B5.num_params == 1_543_714_304
    assert QWEN_7B.layers[0].num_params == LAYER_7B


def test_states_of_everything_in_ram():
    sums = costs.ledger(work(), plan())
    assert sums.ram["weights"] == 7_615_616_512 * 2 + 30 * SLACK
    assert sums.ram["masters"] == (7_615_616_512 + 30 * GAPS) * 2
    assert sums.ram["grads"] == (7_615_616_512 + 30 * GAPS) * 2
    assert sums.ram["moments"] == (7_615_616_512 + 30 * GAPS) * 8
    assert [sums.vram[kind.value] for kind in Kind] == [0, 0, 0, 0]
    assert sums.vram["context"] == 13 * GIB // 16
    assert sums.ram["context"] == 2 * GIB


def test_fp32_has_no_masters_beside_its_weights():
    sums = costs.ledger(work(precision="fp32"), plan())
    assert sums.ram["masters"] == 0
    assert sums.ram["weights"] == 7_615_616_512 * 4 + 30 * SLACK
    assert sums.ram["grads"] == (7_615_616_512 + 30 * GAPS) * 4


def test_buffers_of_a_streamed_model():
    job, layout = work(), plan(weight_slots=3, grad_slots=2)
    assert costs.weight_slot_bytes(job, layout) == 3 * (LAYER_7B * 2 + SLACK)
    assert costs.edge_slot_bytes(job, layout) == (EDGE_7B + 3584) * 2 + SLACK  # untied: one slot, the head's norm included
    assert costs.accumulator_bytes(job, layout) == 4 * (2 * (LAYER_7B + GAPS) + EDGE_7B + 3584 + GAPS)
    assert costs.park_ring_bytes(job, layout) == 2 * 64 * 1024**2 * 2
    assert costs.update_staging_bytes(job, layout) == 0


def test_a_tied_head_needs_both_edge_slots_at_once():
    job, layout = work(QWEN_1B5), plan(QWEN_1B5)
    embed = 151936 * 1536
    assert costs.edge_slot_bytes(job, layout) == embed * 2 + SLACK + 1536 * 2 + SLACK
    assert costs.accumulator_bytes(job, layout) == 4 * (QWEN_1B5.layers[0].num_params + GAPS + embed + GAPS + 1536 + GAPS)
    assert costs.edge_slot_bytes(job, plan(QWEN_1B5, resident=1)) == 1536 * 2 + SLACK


def test_nothing_is_streamed_when_all_is_resident():
    job, layout = work(), plan(resident=30)
    assert costs.weight_slot_bytes(job, layout) == costs.edge_slot_bytes(job, layout) == 0
    assert costs.ledger(job, layout).ram == {**dict.fromkeys(("weights", "masters", "grads", "moments", "activations", "buffers"), 0),
                                             "context": 2 * GIB}  # fmt: skip


def test_the_park_ring_narrows_what_goes_to_ram():
    assert costs.park_ring_bytes(work(), plan(resident=29)) == 2 * 64 * 1024**2 * 2
    assert costs.park_ring_bytes(work(), plan(resident=30)) == 0
    assert costs.park_ring_bytes(work(gradient_dtype="float32"), plan()) == 0


def test_a_ring_has_no_more_slots_than_streamed_layers():
    assert costs.weight_slot_bytes(work(), plan(resident=28, weight_slots=3)) == LAYER_7B * 2 + SLACK


def test_updates_on_the_gpu_need_room_for_one_piece():
    assert costs.update_scratch_bytes(work(), plan(resident=1)) == 6 * 4 * 16 * 1024**2
    assert costs.update_scratch_bytes(work(), plan()) == 0
    assert costs.update_scratch_bytes(work(QWEN_1B5, "cpu"), plan(QWEN_1B5, resident=30)) == 0


def test_the_engine_works_in_pieces_of_the_same_size():
    from megatrain.engine import activations, adamw, gradients

    assert costs.UPDATE_PIECE_ELEMENTS == adamw.DEVICE_PIECE
    assert costs.PARK_CHUNK_ELEMENTS == gradients.PARK_ELEMENTS
    assert activation_costs.HIDDEN_SPARES == activations.POOL_SPARE


def test_activations():
    job, layout = work(), plan(inputs_tier=Tier.RAM)
    assert activation_costs.hidden_state_bytes(job, layout) == (4 + 4) * 4096 * 3584 * 2
    assert activation_costs.stored_input_bytes(job, layout) == 28 * 16384 * 3584 * 2
    assert activation_costs.logits_chunk_bytes(job, layout) == 441 * 152064 * (3 * 4 + 2 * 2)
    assert activation_costs.layer_graph_bytes(job, layout) == 4096 * (34 * 3584 + 6 * 18944) * 2
    assert activation_costs.layer_call_bytes(job, layout) == 16384 * (1024 + 2 * 128 * 2)
    assert costs.ledger(job, layout).ram["activations"] == activation_costs.stored_input_bytes(job, layout)
    in_vram = costs.ledger(job, replace(layout, inputs_tier=Tier.VRAM))
    assert in_vram.ram["activations"] == 0
    assert in_vram.vram["activations"] - costs.ledger(job, layout).vram["activations"] == activation_costs.stored_input_bytes(job, layout)


def test_layers_and_head_never_run_at_once():
    job, layout = work(), plan(inputs_tier=Tier.RAM)
    layer = activation_costs.layer_graph_bytes(job, layout) + (LAYER_7B + GAPS) * 2
    head = activation_costs.logits_chunk_bytes(job, layout) + EDGE_7B * 2
    rest = activation_costs.hidden_state_bytes(job, layout) + activation_costs.layer_call_bytes(job, layout)
    assert layer > head
    assert activation_costs.activation_bytes(job, layout) == rest + layer + layer // 6  # and what the allocator loses
    short = replace(layout, micro_batch_packs=1)
    layer = activation_costs.layer_graph_bytes(job, short) + (LAYER_7B + GAPS) * 2
    assert layer < head
    rest = activation_costs.hidden_state_bytes(job, short) + activation_costs.layer_call_bytes(job, short)
    assert activation_costs.activation_bytes(job, short) == rest + head + head // 6
    on_cpu = replace(job, on_gpu=False)
    assert activation_costs.activation_bytes(on_cpu, short) == rest + head


def test_a_fused_loss_takes_more_rows_in_no_more_memory():
    job, layout = work(), plan()
    fused = replace(job, fused=True)
    assert activation_costs.logits_chunk_bytes(fused, layout) == 4 * 441 * 152064 * 2 * 2
    assert activation_costs.logits_chunk_bytes(fused, layout) <= activation_costs.logits_chunk_bytes(job, layout)


def test_kernels_are_fused_on_a_gpu_unless_the_configuration_says_otherwise():
    def fused(kernels: str, device: str) -> bool:
        return Work.of(replace(RunConfig(), kernels=kernels), QWEN_1B5, device).fused

    assert [fused("auto", "cuda:0"), fused("plain", "cuda:0"), fused("compiled", "cpu"), fused("auto", "cpu")] == [True, False, True, False]


def test_attention_over_packed_documents_keeps_no_mask():
    packed = replace(QWEN_7B, packed_attention=True)
    rotary = 16384 * 2 * 128
    assert activation_costs.layer_call_bytes(work(packed), plan()) == rotary * 2
    assert activation_costs.layer_call_bytes(work(packed, precision="fp32"), plan()) == rotary * 4 + 4096 * 1024 * (1 + 4)


def test_scores_and_masks_of_numbers_count_where_attention_keeps_them():
    eager = replace(QWEN_1B5, eager_attention=True)
    layout = plan(QWEN_1B5)
    scores = activation_costs.layer_graph_bytes(work(eager), layout) - activation_costs.layer_graph_bytes(work(QWEN_1B5), layout)
    assert scores == 4096 * 6 * 12 * 1024 * 2
    masks = activation_costs.layer_call_bytes(work(eager), layout) - activation_costs.layer_call_bytes(work(QWEN_1B5), layout)
    assert masks == 16384 * 1024 * (2 - 1)


def test_layers_of_two_kinds_have_a_mask_each():
    blocks = tuple(replace(block, kind=f"kind{index % 3}") for index, block in enumerate(QWEN_1B5.blocks))
    mixed = activation_costs.layer_call_bytes(work(replace(QWEN_1B5, blocks=blocks)), plan(QWEN_1B5))
    assert mixed == 2 * activation_costs.layer_call_bytes(work(QWEN_1B5), plan(QWEN_1B5))


@pytest.mark.parametrize(("vocab", "rows"), [(300, 4096), (32000, 2097), (152064, 441), (2_000_000, 64)])
def test_loss_chunks(vocab: int, rows: int):
    assert activation_costs.loss_chunk_rows(vocab) == rows


def test_groups_keep_one_fp32_sum_for_every_parameter():
    job = work(packs=32)
    layout = plan(resident=30, group_micro_batches=2)
    assert (micro_batches(job, layout), groups(job, layout)) == (8, 4)
    assert costs.accumulator_bytes(job, layout) == 4 * (7_615_616_512 + 30 * GAPS)
    assert activation_costs.stored_input_bytes(job, layout) == 28 * 2 * 4096 * 3584 * 2
    in_ram = replace(layout, accumulators_tier=Tier.RAM)
    assert costs.accumulator_host_bytes(job, in_ram) == 4 * (7_615_616_512 + 30 * GAPS)
    assert costs.accumulator_bytes(job, in_ram) == 4 * (LAYER_7B + GAPS + EDGE_7B + 3584 + GAPS)


def test_a_short_last_micro_batch_has_the_room_of_a_whole_one():
    job, layout = work(packs=10), plan(micro_batch_packs=4, group_micro_batches=8)
    assert micro_batches(job, layout) == 3
    assert group_tokens(job, layout) == 12 * 1024


def test_the_cpu_needs_a_copy_of_weights_that_it_updates_and_that_live_in_vram():
    layout = plan(placement=Placement(weights=Tier.VRAM))
    assert costs.ledger(work(), layout).ram["weights"] == 7_615_616_512 * 2 + 30 * SLACK
    assert costs.ledger(work(), layout).vram["weights"] == 7_615_616_512 * 2 + 30 * SLACK


def test_states_that_rest_elsewhere_are_staged_one_block_at_a_time():
    head = EDGE_7B + 3584 + GAPS
    from_ram = plan(placement=Placement(Tier.RAM, Tier.RAM, Tier.VRAM, Tier.VRAM))
    assert costs.update_staging_bytes(work(), from_ram) == head * 2
    assert costs.update_staging_host_bytes(work(), from_ram) == 0
    from_vram = plan(placement=Placement(Tier.VRAM, Tier.VRAM, Tier.VRAM, Tier.RAM))
    assert costs.update_staging_host_bytes(work(), from_vram) == head * 2 + head * 2
    assert costs.update_staging_bytes(work(), from_vram) == 0


def test_pieces_of_host_memory_begin_at_pages():
    assert costs.page_padding_host_bytes(work(), plan(resident=30)) == 0
    assert costs.page_padding_host_bytes(work(), plan(inputs_tier=Tier.RAM)) == 4096 * (6 * 30 + 28 * 4)
    assert costs.ledger(work(), plan()).ram["buffers"] == 4096 * 6 * 30


def test_without_a_gpu_everything_is_ram():
    job, layout = work(QWEN_1B5, "cpu"), plan(QWEN_1B5, resident=30)
    sums = costs.ledger(job, layout)
    assert sums.vram == {}
    assert sums.vram_bytes == 0
    assert sums.ram["weights"] == 1_543_714_304 * 2 + 30 * SLACK
    assert sums.ram["context"] == int(0.6 * GIB)
    split = costs.ledger(job, plan(QWEN_1B5, placement=Placement(), resident=1))
    assert split.ram["moments"] == sums.ram["moments"]


def test_fp32_parameters_and_buffers_travel_with_their_block():
    block = BlockShape("layer000", "layer0", 1000, fp32_params=10, buffer_bytes=77)
    assert costs.block_weight_bytes(block, PRECISIONS["bf16"]) == 990 * 2 + 10 * 4 + 77 + SLACK


def test_blocks_of_unequal_sizes_are_each_counted():
    """Neighbours of equal size are summed at once; a dense first layer, or one layer placed apart, is not lost."""
    sizes = {"embed": 500, "l0": 100, "l1": 300, "l2": 300, "l3": 300, "l4": 300, "head": 7}
    shape = replace(QWEN_1B5, blocks=tuple(BlockShape(name, name, size) for name, size in sizes.items()))
    apart = Placement(weights=Tier.VRAM)
    layout = Plan((ALL_VRAM, Placement(), Placement(), apart, Placement(), ALL_VRAM, Placement()), 4, 4)
    job = work(shape)
    moments = costs.ledger(job, layout)
    assert moments.vram["moments"] == (500 + 300 + 2 * GAPS) * 8
    assert moments.ram["moments"] == (100 + 3 * 300 + 7 + 5 * GAPS) * 8
    assert moments.vram["weights"] == (500 + 300 + 300) * 2 + 3 * SLACK
    assert costs.weight_slot_bytes(job, layout) == 2 * (300 * 2 + SLACK)


RATES = Rates({"bfloat16": 100e12, "float32": 20e12}, 25e9, 25e9, 20e9, 800e9, 50e9)


def test_a_large_step_is_limited_by_compute_with_full_recompute():
    job, layout = work(packs=256), plan(micro_batch_packs=16, group_micro_batches=16, inputs_tier=Tier.RAM)
    times = timing.step_times(job, layout, RATES)
    tokens = 256 * 1024
    layers = 28 * (LAYER_7B - 3584 - 512 * 2 - 2 * 3584)
    attention = 28 * 3584 * 1024
    flops = tokens * (8 * (layers + attention) + 6 * EDGE_7B)
    assert times.bottleneck == "compute"
    assert times.step_s == pytest.approx(flops / 100e12, rel=1e-9)


def test_a_small_step_waits_for_the_optimizer_in_forward_and_for_the_bus_in_backward():
    job, layout = work(packs=1), plan(micro_batch_packs=1, group_micro_batches=1)
    times = timing.step_times(job, layout, RATES)
    update = 7_615_616_512 * (26 + 2) / 50e9
    weights = (7_615_616_512 * 2 + 30 * SLACK) / 20e9
    gradients = (7_615_616_512 + 30 * GAPS) * 2 / 20e9
    assert times.bottleneck == "optimizer"
    assert times.step_s == pytest.approx(update + max(weights, gradients), rel=1e-9)


def test_starting_kernels_takes_time_however_small_the_layers_are():
    job, layout = work(QWEN_1B5, packs=8), plan(QWEN_1B5, resident=30, micro_batch_packs=1, group_micro_batches=8)
    slow_start = replace(RATES, layer_overhead_s=10.0)
    assert timing.step_times(job, layout, slow_start).lanes["compute"] == pytest.approx(10.0 * 28 * 8, rel=0.01)


def test_without_a_gpu_nothing_overlaps():
    job, layout = work(QWEN_1B5, "cpu", packs=1), plan(QWEN_1B5, resident=30, micro_batch_packs=1, group_micro_batches=1)
    times = timing.step_times(job, layout, RATES)
    assert times.lanes["compute"] > 0
    assert times.lanes["h2d"] == times.lanes["d2h"] == 0
    assert times.lanes["optimizer"] == pytest.approx(1_543_714_304 * 26 / 800e9)
    assert times.step_s == pytest.approx(sum(times.lanes.values()))


def test_updates_move_only_what_rests_elsewhere():
    """Weights that the CPU updates go up once more; a device-updated block brings its states up and takes them back."""
    pack = {"micro_batch_packs": 1, "group_micro_batches": 1}
    slow_bus = replace(RATES, h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6, duplex_bytes_per_s=1e6)
    resident = timing.step_times(work(packs=1), plan(placement=Placement(weights=Tier.VRAM), **pack), slow_bus)
    weights, grads = 7_615_616_512 * 2 + 30 * SLACK, (7_615_616_512 + 30 * GAPS) * 2
    assert resident.lanes["h2d"] == pytest.approx(weights / 1e6)
    assert resident.lanes["d2h"] == pytest.approx(grads / 1e6)
    staged = timing.step_times(work(packs=1), plan(placement=Placement(Tier.VRAM, Tier.RAM, Tier.VRAM, Tier.VRAM), **pack), slow_bus)
    masters = grads  # as large, and both ways at once
    assert staged.lanes["h2d"] + staged.lanes["d2h"] == pytest.approx(masters / 1e6, rel=1e-6)


def test_a_checkpoint_is_all_that_is_kept():
    assert costs.checkpoint_bytes(QWEN_7B, PRECISIONS["bf16"]) == 7_615_616_512 * 12
    assert costs.checkpoint_bytes(QWEN_7B, PRECISIONS["fp32"]) == 7_615_616_512 * 12
