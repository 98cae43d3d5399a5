"""What a step means, whatever went before it: loss, norm, clipping, dropout, failures, evaluation."""

import gc
import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config

from megatrain.data.batch import IGNORE_INDEX, PackedBatch
from megatrain.engine.adamw import Update
from megatrain.engine.debug import Debug
from megatrain.engine.device import COMPUTE, Device
from megatrain.plan import Placement, Tier
from tests import reference
from tests.families import FAMILIES, VOCAB_SIZE
from tests.parity import (
    ALL_RAM,
    ALL_VRAM,
    RAM,
    VRAM,
    Cut,
    Recipe,
    assert_equal,
    assert_same_bits,
    batches,
    initial_weights,
    make_engine,
    reference_run,
    relative_errors,
    run,
    states,
    update_of,
)

STREAMED = Cut(ALL_RAM, 1, 2, weight_slots=2, inputs_tier=RAM, accumulators_tier=RAM)
RECIPE = Recipe((1e-3,) * 3)


def plain_model(family: str) -> torch.nn.Module:
    model = reference.build_model(FAMILIES[family]())
    model.load_state_dict(initial_weights(family))
    return model


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


# -- loss, norm and clipping


@pytest.mark.parametrize("cut", [Cut(ALL_VRAM, 5), STREAMED], ids=["whole", "cut"])
def test_reported_loss_is_the_mean_over_all_labels_of_the_step(cut: Cut) -> None:
    [batch] = batches(1)
    loss, _ = make_engine("gemma2", cut).train_step(batch, 0)
    log_probs = reference.logits(plain_model("gemma2"), batch).log_softmax(-1).detach().numpy()
    rows, places = np.nonzero(batch.labels != IGNORE_INDEX)
    picked = log_probs[rows, places, batch.labels[rows, places]]
    assert len(picked) == batch.trained_tokens
    assert loss == pytest.approx(-picked.astype(np.float64).mean(), rel=1e-6)


@pytest.mark.parametrize("parked", [torch.float32, torch.bfloat16], ids=str)
def test_norm_is_that_of_the_parked_gradients_in_every_layout(parked: torch.dtype) -> None:
    [batch] = batches(1)
    norms = set()
    for cut in (Cut(ALL_VRAM, 1), Cut(ALL_RAM, 1, inputs_tier=RAM), Cut(Placement(RAM, RAM, VRAM, RAM), 1), STREAMED):
        engine = make_engine("llama_untied", cut, "bf16", parked)
        _, norm = engine.train_step(batch, 0)
        norms.add(norm)
        assert norm == pytest.approx(norm_of(engine.parked_gradients()), rel=1e-6)
    assert len(norms) == 1


def test_norm_grows_with_every_micro_batch() -> None:
    """A norm of one micro-batch only would not notice that the labels of the others are other ones."""
    [batch] = batches(1)
    labels = batch.labels.copy()
    labels[-1] = np.where(labels[-1] == IGNORE_INDEX, IGNORE_INDEX, (labels[-1] + 1) % VOCAB_SIZE)
    other = PackedBatch(batch.input_ids, labels, batch.position_ids, batch.real_tokens)
    engine = make_engine("llama_tied", STREAMED)
    assert engine.train_step(batch, 0)[1] != engine.train_step(other, 1)[1]


@pytest.mark.parametrize("placement", [ALL_RAM, ALL_VRAM], ids=["CPU updates", "device updates"])
def test_clipping_brings_the_norm_to_the_limit(placement: Placement) -> None:
    engine = make_engine("llama_untied", Cut(placement, 1), "bf16", torch.bfloat16)
    [batch] = batches(1)
    _, norm = engine.train_step(batch, 0)
    assert norm > 0.2
    parked = engine.parked_gradients()
    engine.decide(update_of(Recipe((1e-3,), max_grad_norm=0.1), 0, norm))
    engine.finish()
    used = {}  # what AdamW saw, from its first moment
    for index, layout in enumerate(engine.layouts):
        used |= {name: view / (1 - 0.9) for name, view in layout.flat_views(engine.read_block(index)["exp_avg"]).items()}
    assert norm_of(used) == pytest.approx(0.1, rel=1e-6)
    for name, gradient in parked.items():
        torch.testing.assert_close(used[name], gradient * (0.1 / norm), rtol=1e-5, atol=1e-9)


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    [batch] = batches(1)
    labels = batch.labels.copy()
    labels[2] = IGNORE_INDEX
    batch = PackedBatch(batch.input_ids, labels, batch.position_ids, batch.real_tokens)
    kept = [0, 1, 3, 4]
    less = PackedBatch(batch.input_ids[kept], labels[kept], batch.position_ids[kept], batch.real_tokens[kept])
    whole, part = make_engine("llama_tied", Cut(micro_batch_packs=1)), make_engine("llama_tied", Cut(micro_batch_packs=1), packs=4)
    assert whole.train_step(batch, 0) == part.train_step(less, 0)
    assert_same_bits(whole.parked_gradients(), part.parked_gradients())


def test_batches_may_be_read_only() -> None:
    [batch] = batches(1)
    for array in (batch.input_ids, batch.labels, batch.position_ids):
        array.setflags(write=False)
    engine = make_engine("llama_tied")
    assert math.isfinite(engine.train_step(batch, 0)[0])


# -- one gradient per parameter and step


def test_steps_do_not_leak_into_each_other() -> None:
    first, second = batches(2)
    engine, alone = make_engine("qwen3_moe", STREAMED), make_engine("qwen3_moe", STREAMED)
    engine.train_step(first, 0)  # nothing is decided: the weights stay
    assert engine.train_step(second, 0) == alone.train_step(second, 0)
    assert_same_bits(engine.parked_gradients(), alone.parked_gradients())


def test_tied_weight_is_one_parameter_with_one_gradient() -> None:
    engine = make_engine("llama_tied")
    names = [entry.name for layout in engine.layouts for entry in layout.entries]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names
    [batch] = batches(1)
    _, norm = engine.train_step(batch, 0)
    _, gradients = reference.step_gradients(plain_model("llama_tied"), batch, 1)
    assert set(gradients) == set(names)
    assert norm == pytest.approx(norm_of(gradients), rel=1e-5)


def test_a_parameter_without_gradient_does_not_shift_the_others() -> None:
    """Two tokens do not reach all experts of every layer: the others' gradient is an explicit zero."""
    ids = np.array([[7, 11, 0, 0, 0, 0, 0, 0]])
    labels = np.full((1, 8), IGNORE_INDEX)
    labels[0, 1] = 9
    batch = PackedBatch(ids, labels, np.array([[0, 1, 0, 1, 2, 3, 4, 5]]))
    engine = make_engine("mixtral", Cut(micro_batch_packs=1), packs=1, length=8)
    engine.train_step(batches(1, 1, 8)[0], 0)  # leaves something in every slot
    engine.train_step(batch, 0)
    found = engine.parked_gradients()
    _, wanted = reference.step_gradients(plain_model("mixtral"), batch, 1)
    unhit = [name for name, value in wanted.items() if "experts" in name and bool((value.flatten(1) == 0).all(1).any())]
    assert unhit
    for name, error in relative_errors(found, wanted).items():
        assert error <= 3e-4, name  # one label: a router's gradient is small beside what cancels in it; a shift would be 1
        assert bool(((found[name] == 0) == (wanted[name] == 0)).all()) or name not in unhit


def test_tensors_that_reach_every_layer_bring_their_gradient_back() -> None:
    """Gemma 4's layers each receive their part of a second embedding."""
    from transformers import Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=VOCAB_SIZE, vocab_size_per_layer_input=VOCAB_SIZE, hidden_size=64, hidden_size_per_layer_input=16,
        intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=16,
        num_kv_shared_layers=0, sliding_window=8, layer_types=["sliding_attention", "full_attention"], pad_token_id=0,
        max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    model = reference.build_model(config)
    engine = make_engine(config, STREAMED, weights=model.state_dict())
    [batch] = batches(1)
    loss, wanted = reference.step_gradients(model, batch, 1)
    assert engine.train_step(batch, 0)[0] == pytest.approx(loss, rel=1e-5)
    found = engine.parked_gradients()
    assert any("per_layer" in name and float(value.norm()) > 0 for name, value in found.items())
    for name, error in relative_errors(found, wanted).items():
        assert error <= 1e-5, name


# -- failures


@pytest.mark.parametrize("placement", [ALL_RAM, ALL_VRAM], ids=["RAM", "VRAM"])
@pytest.mark.parametrize(("value", "parked"), [(math.inf, torch.float32), (3.4e38, torch.bfloat16)], ids=["infinite", "too large for bf16"])
def test_one_infinite_gradient_shows_in_the_norm_and_changes_no_state(placement: Placement, value: float, parked: torch.dtype) -> None:
    engine = make_engine("llama_untied", Cut(placement, 1), "bf16", parked)
    before = states(engine)
    gradients = engine._runner._gradients
    close = gradients.close

    def spoil_then_close(index: int, last_group: bool) -> None:
        if index == 2:
            accumulator = gradients._open[index]
            engine.device.launch(COMPUTE, lambda: accumulator.tensor[5:6].fill_(value), writes=[accumulator])
        close(index, last_group)

    gradients.close = spoil_then_close
    loss, norm = engine.train_step(batches(1)[0], 0)
    assert math.isfinite(loss)
    assert not math.isfinite(norm)
    engine.finish()
    assert_same_bits(states(engine), before)
    gradients.close = close
    short = Recipe((1e-3,) * 2)
    assert_equal(run(engine, short), run(make_engine("llama_untied", Cut(placement, 1), "bf16", parked), short))


class Breaks(Device):
    """Fails once, at the launch with number `at` that follows `arm`."""

    def __init__(self) -> None:
        super().__init__(Debug(poison=True))
        self.left = -1

    def arm(self, at: int) -> None:
        self.left = at

    def _submit(self, lane, work, before):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("injected")
        return super()._submit(lane, work, before)


@pytest.mark.parametrize("cut", [STREAMED, Cut(ALL_VRAM, 1, 1), Cut(Placement(RAM, RAM, RAM, VRAM), 2)], ids=["streamed", "VRAM", "mixed"])
def test_a_step_that_broke_off_leaves_nothing_behind(cut: Cut) -> None:
    device = Breaks()
    engine = make_engine("llama_untied", cut, device=device)
    plain = make_engine("llama_untied", cut)
    data = batches(3)
    count = Counting()
    make_engine("llama_untied", cut, device=count).train_step(data[0], 0)
    for at in np.linspace(count.launches // 4, count.launches - 2, 4).astype(int):
        device.arm(int(at))
        with pytest.raises(RuntimeError, match="injected"):
            engine.train_step(data[0], 0)
        assert engine.train_step(data[1], 0) == plain.train_step(data[1], 0), at
        assert_same_bits(engine.parked_gradients(), plain.parked_gradients())
    assert_equal(run(engine, RECIPE), run(plain, RECIPE))


class Counting(Device):
    launches = 0

    def _submit(self, lane, work, before):
        self.launches += 1
        return super()._submit(lane, work, before)


# -- evaluation


@pytest.mark.parametrize("cut", [STREAMED, Cut(ALL_VRAM, 1, 1), Cut(Placement(VRAM, RAM, RAM, RAM), 2)], ids=["streamed", "VRAM", "CPU"])
def test_evaluation_sees_finished_weights_and_disturbs_nothing(cut: Cut) -> None:
    held_out = [*batches(2, packs=2, first_seed=50), *batches(1, packs=1, first_seed=60)]
    engine = make_engine("gemma2", cut)
    seen = []
    undisturbed = run(make_engine("gemma2", cut), RECIPE)
    found = run(engine, RECIPE, between=lambda step: seen.append(engine.evaluate(held_out)))
    assert_equal(found, undisturbed)
    for steps, (loss, tokens) in enumerate(seen, 1):
        weights = reference_run("gemma2", Recipe((1e-3,) * steps)).weights
        model = plain_model("gemma2")
        model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            total = sum(float(reference.loss_sum(model, batch)) for batch in held_out)
        assert tokens == sum(batch.trained_tokens for batch in held_out)
        assert loss == pytest.approx(total / tokens, rel=1e-4)
    assert len({loss for loss, _ in seen}) == 3


def test_evaluation_takes_batches_larger_than_a_step() -> None:
    [batch] = batches(1, packs=7)
    for cut in (STREAMED, Cut(ALL_RAM, 1, 99), Cut(ALL_RAM, 1, 99, inputs_tier=RAM)):
        loss, tokens = make_engine("llama_tied", cut, packs=2).evaluate([batch])
        assert loss == pytest.approx(float(reference.loss_sum(plain_model("llama_tied"), batch).detach()) / tokens, rel=1e-5)


def test_gradients_survive_an_evaluation_before_the_decision() -> None:
    [batch] = batches(1)
    engine = make_engine("llama_tied", STREAMED)
    engine.train_step(batch, 0)
    before = engine.parked_gradients()
    engine.evaluate(batches(1, packs=2, first_seed=9))
    assert_same_bits(engine.parked_gradients(), before)


# -- dropout


def noisy_config() -> GPT2Config:
    config = FAMILIES["gpt2"]()
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.1
    return config


class RecordsSeeds(Device):
    def __init__(self) -> None:
        super().__init__(Debug(poison=True))
        self.seeds: list[int] = []

    def seed(self, value: int) -> None:
        self.seeds.append(value)
        super().seed(value)


def test_recompute_draws_the_noise_of_the_forward_pass() -> None:
    """Autograd without recompute, its layers seeded as the engine seeded them, gives the same gradients."""
    device = RecordsSeeds()
    model = reference.build_model(noisy_config())
    engine = make_engine(noisy_config(), Cut(ALL_RAM, 5, inputs_tier=RAM), device=device, weights=model.state_dict(), seed=3)
    [batch] = batches(1)
    loss, _ = engine.train_step(batch, 4)
    found = engine.parked_gradients()
    forward, backward = device.seeds[:5], device.seeds[5:]
    assert backward == forward[::-1]
    assert len(set(forward)) == 5

    model.set_attn_implementation("sdpa")
    for layer, value in zip(model.transformer.h, forward[1:], strict=True):
        layer.register_forward_pre_hook(lambda module, args, value=value: torch.manual_seed(value) and None)
    torch.manual_seed(forward[0])
    wanted_loss, wanted = reference.step_gradients(model, batch, 5)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    for name, error in relative_errors(found, wanted).items():
        assert error <= 1e-5, name
    quiet = make_engine("gpt2", Cut(ALL_RAM, 5), weights=engine.master_weights())
    assert abs(quiet.train_step(batch, 4)[0] - loss) > 1e-4 * loss


def test_noise_differs_between_steps_and_micro_batches_and_repeats_with_the_seed() -> None:
    weights = reference.build_model(noisy_config()).state_dict()
    cuts = {"together": Cut(ALL_VRAM, 1), "grouped": Cut(ALL_RAM, 1, 2, inputs_tier=RAM, accumulators_tier=RAM)}
    engines = {name: make_engine(noisy_config(), cut, weights=weights, seed=3) for name, cut in cuts.items()}
    [batch] = batches(1)
    same = PackedBatch(*(np.repeat(array[:1], 5, axis=0) for array in (batch.input_ids, batch.labels, batch.position_ids)))
    losses = {name: [engine.train_step(same, step)[0] for step in (0, 1, 0)] for name, engine in engines.items()}
    first, second, again = losses["together"]
    assert first == again != second
    assert losses["grouped"] == losses["together"]
    other = make_engine(noisy_config(), cuts["together"], weights=weights, seed=4)
    assert other.train_step(same, 0)[0] != first
    one = make_engine(noisy_config(), cuts["together"], weights=weights, seed=3, packs=1)
    assert one.train_step(same.packs(0, 1), 0)[0] != pytest.approx(first, rel=1e-6), "every micro-batch drew the same noise"
    assert len({engine.evaluate([same])[0] for engine in (*engines.values(), other)}) == 1, "evaluation draws no noise"


# -- precision


def test_masters_move_where_bf16_weights_would_stand_still() -> None:
    engine = make_engine("llama_tied", Cut(ALL_RAM, 5), "bf16", torch.bfloat16)
    before = {name: value.clone() for name, value in engine.master_weights().items()}
    run(engine, Recipe((1e-6,) * 20))
    after = engine.master_weights()
    total = sum(value.numel() for value in before.values())
    moved = sum(int((after[name] != value).sum()) for name, value in before.items())
    visible = sum(int((after[name].bfloat16() != value.bfloat16()).sum()) for name, value in before.items())
    assert moved > 0.99 * total
    assert visible < 0.5 * total


def test_default_eps_differs_no_more_than_plain_training_from_itself() -> None:
    """With eps 1e-8, AdamW amplifies noise where gradients are near zero: the reference differs from itself when it adds
    in another order, as SDPA does."""
    recipe = Recipe((1e-3,) * 5, micro_batch_packs=5)
    wanted = reference_run("llama_untied", recipe).weights
    model = plain_model("llama_untied")
    model.set_attn_implementation("sdpa")
    noise = relative_errors(reference.train(model, batches(5), recipe).weights, wanted)
    ours = relative_errors(run(make_engine("llama_untied", Cut(micro_batch_packs=2)), recipe).weights, wanted)
    assert max(ours.values()) <= 2 * max(noise.values())
    assert sum(ours.values()) <= 2 * sum(noise.values())


def test_states_have_the_types_that_the_precision_names() -> None:
    engine = make_engine("gpt_oss", STREAMED, "bf16", torch.bfloat16)
    run(engine, Recipe((1e-3,)))
    for index, layout in enumerate(engine.layouts):
        block, held = engine.store.blocks[index], engine.read_block(index)
        assert {name: value.dtype for name, value in held.items()} == {
            "weights": torch.uint8, "masters": torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32,
        }  # fmt: skip
        assert layout.segment_a(held["weights"]).dtype == torch.bfloat16
        assert block.grads.tensor.dtype == torch.bfloat16


# -- memory


def test_no_tensor_is_left_over_by_a_step() -> None:
    engine = make_engine("llama_tied", STREAMED, packs=2, length=8)
    [batch] = batches(1, packs=2, length=8)

    def train(steps: int) -> int:
        for step in range(steps):
            engine.train_step(batch, step)
            engine.decide(Update(1, 1e-4, 1.0, 0.9, 0.95, 1e-8, 0.0))
            if step % 10 == 0:
                engine.evaluate([batch])
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    train(2)
    before = train(1)
    assert train(47) <= before


@pytest.mark.parametrize("inputs_tier", [VRAM, RAM])
def test_rings_may_be_larger_than_the_model(inputs_tier: Tier) -> None:
    large = Cut(ALL_RAM, 9, 9, weight_slots=9, grad_slots=9, inputs_tier=inputs_tier)
    assert_equal(run(make_engine("llama_tied", large), RECIPE), run(make_engine("llama_tied", Cut(ALL_RAM, 5)), RECIPE))
