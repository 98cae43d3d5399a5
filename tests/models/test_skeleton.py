"""A model cut into blocks: nothing lost, nothing twice, and refused by name where it cannot be described."""

import copy
import functools
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    FalconConfig,
    Gemma4TextConfig,
    GPTNeoConfig,
    PreTrainedModel,
    T5Config,
)
from transformers.models.falcon import modeling_falcon

from megatrain.engine.trainer import streamed_gradients
from megatrain.errors import UnsupportedModelError
from megatrain.models import skeleton as skeleton_module
from megatrain.models.attention import visible
from megatrain.models.check import self_check
from megatrain.models.skeleton import Recording, Skeleton, document_mask
from megatrain.models.template import LayerCall
from tests import reference
from tests.families import FAMILIES, SLIDING_WINDOW, VOCAB_SIZE
from tests.parity import batches, make_engine, skeleton
from tests.reference import build_model

KINDS = {  # layers of every kind, in the order in which the kinds first come
    **dict.fromkeys(FAMILIES, [4]),
    **dict.fromkeys(("qwen2", "gemma2", "gemma3", "cohere2", "exaone4", "gpt_oss"), [2, 2]),
    "smollm3": [3, 1],
    "qwen3_moe": [3, 1],
    "deepseek_v3": [1, 3],
}
TIED = {"llama_tied", "qwen2", "gemma2", "gemma3", "gpt2", "smollm3", "cohere2", "starcoder2"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_one_place(family: str) -> None:
    cut, model = skeleton(family), build_model(FAMILIES[family]())
    placed = [entry for layout in cut.layouts for entry in layout.entries]
    assert Counter(entry.name for entry in placed) == Counter(name for name, _ in model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {entry.name: entry.shape for entry in placed} == shapes
    assert cut.tied == (family in TIED)
    assert [layout.name for layout in cut.layouts] == ["embed", *(f"layer{i:03d}" for i in range(4)), "head"]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_one_kind_share_a_template(family: str) -> None:
    counted = Counter(layout.kind for layout in skeleton(family).layouts[1:-1])
    assert list(counted.values()) == KINDS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_decay_is_given_to_matrices_that_are_not_embeddings(family: str) -> None:
    decay = {entry.name: entry.decay for layout in skeleton(family).layouts for entry in layout.entries}
    assert decay == reference.decays(build_model(FAMILIES[family]()))


@pytest.mark.parametrize(
    ("family", "windows"), [("mistral", [8] * 4), ("phi3", [8] * 4), ("gemma2", [8, None] * 2), ("gpt_oss", [8, None] * 2)]
)
def test_windows_are_attributes_of_the_layers(family: str, windows: list[int | None]) -> None:
    """Under another attention kernel than SDPA the window is read from the layer, not from a mask."""
    layers = skeleton(family).layers
    assert [getattr(layer.self_attn, "sliding_window", skeleton(family).config.sliding_window) for layer in layers] == windows
    assert SLIDING_WINDOW == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_those_of_a_freshly_built_model(family: str) -> None:
    """Rotary tables are in no file: built on meta and filled later they would be garbage."""
    fresh = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    wanted = {name: buffer for name, buffer in fresh.named_buffers() if not name.startswith(skeleton(family).layer_path)}
    found = dict(Skeleton(FAMILIES[family](), torch.float32).model.named_buffers())
    assert found.keys() == wanted.keys()
    for name, buffer in wanted.items():
        assert torch.equal(found[name], buffer), name
    engine = make_engine(family)
    saved = set(fresh.state_dict())
    for index, layout in enumerate(engine.layouts):
        views = layout.weight_views(engine.read_block(index)["weights"])
        for entry in layout.buffers:
            assert entry.persistent == (entry.name in saved)
            if not entry.persistent:
                assert torch.equal(views[entry.name], fresh.get_buffer(entry.name)), entry.name


def test_a_persistent_buffer_of_a_layer_comes_from_the_file_and_travels_with_it() -> None:
    engine = make_engine("deepseek_v3")
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert [entry.name for entry in engine.layouts[3].buffers] == [name]
    views = engine.layouts[3].weight_views(engine.read_block(3)["weights"])
    model = build_model(FAMILIES["deepseek_v3"]())
    assert torch.equal(views[name], model.state_dict()[name].bfloat16().float())
    assert views[name].any()


def _masks(call: LayerCall, recording: Recording) -> list[torch.Tensor]:
    """[2, 1, 20, 20], what a layer was told to see, of tests with two packs of 20 tokens."""
    windows = {id(boundaries): window for boundaries, window in recording.masks}
    found = []
    for value in (*call.args, *call.kwargs.values()):
        if id(value) in windows:
            found.append(visible(value, 2, 20, windows[id(value)]))
        elif torch.is_tensor(value) and value.ndim == 4 and value.shape[-2:] == (20, 20):
            found.append(value)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_keep_the_documents_of_a_pack_apart(family: str) -> None:
    cut = skeleton(family)
    positions = torch.tensor([[*range(11), *range(3), *range(6)], [*range(20)]])
    recording = cut.record(torch.zeros(2, 20, dtype=torch.long), positions)
    assert len(recording.calls) == 4
    open_to = {window: document_mask(positions, window, torch.float32)[:, 0] == 0 for window in (None, SLIDING_WINDOW)}
    used = set()
    for layer, call in zip(cut.layers, recording.calls, strict=True):
        [mask] = _masks(call, recording)
        seen = (mask if mask.dtype == torch.bool else mask > -1e4)[:, 0]
        fits = [window for window, wanted in open_to.items() if torch.equal(seen, wanted)]
        assert fits, type(layer).__name__
        used.add(fits[0])
    sliding = {"mistral", "phi3", "starcoder2"}
    both = {"qwen2", "gemma2", "gemma3", "cohere2", "exaone4", "gpt_oss"}
    assert used == ({SLIDING_WINDOW} if family in sliding else {None, SLIDING_WINDOW} if family in both else {None})


@pytest.mark.parametrize("family", ["llama_tied", "gemma2", "gpt2", "gpt_oss"])
def test_a_pack_is_worth_its_documents_alone(family: str) -> None:
    [batch] = batches(1, packs=1)
    engine = make_engine(family, packs=1)
    packed, tokens = engine.evaluate([batch])
    alone = 0.0
    for place in reference.documents(batch, 0):
        parts = [np.zeros_like(batch.input_ids), np.full_like(batch.labels, -100), np.zeros_like(batch.position_ids)]
        length = place.stop - place.start
        for part, source in zip(parts, (batch.input_ids, batch.labels, batch.position_ids), strict=True):
            part[0, :length] = source[0, place]
        parts[2][0, length:] = np.arange(parts[2].shape[1] - length)
        loss, count = engine.evaluate([type(batch)(*parts)])
        alone += loss * count
    assert packed * tokens == pytest.approx(alone, rel=1e-5)


OWN_KERNELS = {  # models that look attention up among classes of their own, or may not be given another
    "sdpa": FalconConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, use_cache=False),
    "eager": GPTNeoConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_layers=2, num_heads=4, window_size=8, attention_types=[[["global", "local"], 1]]
    ),
}


@pytest.mark.parametrize("kernel", OWN_KERNELS)
def test_a_model_that_knows_no_other_attention_than_its_own_keeps_it(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_falcon.FalconPreTrainedModel, "_supports_flash_attn", False)  # it may have the common one
    cut = Skeleton(OWN_KERNELS[kernel], torch.float32)
    assert (cut.packed, cut.config._attn_implementation) == (False, kernel)
    assert not self_check(OWN_KERNELS[kernel], ["layer0"] * 2, streamed_gradients)


def handing_to_attention(**more: object):
    """A change of a model: its layers call attention with `more`."""

    def change(model: PreTrainedModel) -> None:
        for layer in model.model.layers:
            layer.self_attn.forward = functools.partial(layer.self_attn.forward, **more)

    return change


BEYOND = [{"softcap": 5.0}, {"s_aux": torch.zeros(4)}, {"position_bias": torch.zeros(1, 4, 4, 4)}, {"is_causal": False}]


@pytest.mark.parametrize("more", BEYOND, ids=lambda more: next(iter(more)))
def test_attention_that_is_called_with_more_than_a_window_gets_masks(more: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, handing_to_attention(**more))
    assert not Skeleton(FAMILIES["llama_tied"](), torch.float32).packed


@pytest.mark.parametrize("more", [{"softcap": None}, {"output_attentions": False}, {"is_causal": True}])
def test_what_changes_nothing_leaves_attention_packed(more: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, handing_to_attention(**more))
    assert Skeleton(FAMILIES["llama_tied"](), torch.float32).packed


def test_a_model_that_looks_ahead_is_refused_by_the_self_check() -> None:
    config = FAMILIES["llama_tied"]()
    config.is_causal = False
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot be streamed"):
        self_check(config, ["layer0"] * 4, streamed_gradients)


def test_values_wider_than_queries_get_masks() -> None:
    """The kernels want heads of one size: narrower values are padded, queries are not."""
    sizes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 32}
    narrow, wide = FAMILIES["deepseek_v3"](), FAMILIES["deepseek_v3"]()
    for name, value in sizes.items():
        setattr(wide, name, value)
    wide.qk_head_dim = 16
    assert Skeleton(narrow, torch.float32).packed
    assert not Skeleton(wide, torch.float32).packed


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere2", "gpt2"])
def test_logits_have_the_models_own_scaling(family: str) -> None:
    """Soft-cap, logit scale and final norm are the model's code."""
    cut, model = skeleton(family), build_model(FAMILIES[family]()).eval()
    parameters = dict(model.named_parameters())
    hidden = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0))
    captured = {}
    last = model.get_submodule(cut.layer_path)[-1]
    last.register_forward_hook(lambda module, args, output: (hidden, *output[1:]) if isinstance(output, tuple) else hidden)
    with torch.no_grad():
        wanted = model(input_ids=torch.zeros(1, 7, dtype=torch.long), use_cache=False).logits[0]
        with cut.bound({name: parameters[name] for name in cut.head_names}, head=True):
            captured["logits"] = cut.logits(hidden)
    torch.testing.assert_close(captured["logits"], wanted, rtol=1e-5, atol=1e-5)


def test_a_tied_weight_is_bound_on_one_side_only() -> None:
    cut = skeleton("llama_tied")
    weight = nn.Parameter(torch.randn(VOCAB_SIZE, 64))
    embedding, head = cut.model.get_input_embeddings(), cut.model.get_output_embeddings()
    for is_head, bound, other in ((False, embedding, head), (True, head, embedding)):
        with cut.bound({"model.embed_tokens.weight": weight}, head=is_head):
            assert bound.weight is weight
            assert other.weight is not weight
            assert not other.weight.any()
        assert bound.weight is not weight


def test_the_configuration_is_left_alone() -> None:
    config = FAMILIES["mixtral"]()
    config.output_router_logits = True
    before = copy.deepcopy(config.to_dict())
    cut = Skeleton(config, torch.bfloat16)
    assert config.to_dict() == before
    assert cut.model.config is not config
    assert all(parameter.is_meta for layer in cut.layers for parameter in layer.parameters())


# -- refusals


def test_a_model_without_a_list_of_layers_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="CTRLLMHeadModel: no list of decoder layers"):
        Skeleton(CTRLConfig(vocab_size=160, n_embd=64, dff=96, n_layer=2, n_head=4), torch.float32)


def test_what_is_no_causal_model_is_refused_by_type() -> None:
    with pytest.raises(UnsupportedModelError, match="no causal language model for type 't5'"):
        Skeleton(T5Config(), torch.float32)


def changed(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Let the model that a skeleton is made from be changed before it is cut."""
    build = skeleton_module.build_meta_model

    def build_and_change(config, dtype, packed=False) -> PreTrainedModel:
        model = build(config, dtype, packed)
        change(model)
        return model

    monkeypatch.setattr(skeleton_module, "build_meta_model", build_and_change)


def test_layers_that_share_a_parameter_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(model: PreTrainedModel) -> None:
        model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight

    changed(monkeypatch, share)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM: layers 0 and 2 share mlp\.up_proj\.weight"):
        Skeleton(FAMILIES["llama_tied"](), torch.float32)


def test_two_stacks_of_layers_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(model: PreTrainedModel) -> None:
        model.encoder_layers = nn.ModuleList([copy.deepcopy(model.model.layers[0])])

    changed(monkeypatch, add)
    with pytest.raises(UnsupportedModelError, match=r"more than one stack of layers \(model.layers, encoder_layers\)"):
        Skeleton(FAMILIES["llama_tied"](), torch.float32)


def test_a_parameter_that_takes_part_in_nothing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(model: PreTrainedModel) -> None:
        model.forgotten = nn.Linear(2, 2, bias=False, device="meta")

    changed(monkeypatch, add)
    with pytest.raises(UnsupportedModelError, match=r"parameters forgotten\.weight take part in nothing"):
        Skeleton(FAMILIES["llama_tied"](), torch.float32)


def test_layers_called_out_of_order_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(model: PreTrainedModel) -> None:
        forward = model.model.forward

        def reversed_forward(*args, **kwargs):
            layers = model.model.layers
            if all(hasattr(layer, "index") for layer in layers):  # the skeleton's stubs
                model.model.layers = nn.ModuleList(reversed(list(layers)))
            try:
                return forward(*args, **kwargs)
            finally:
                model.model.layers = layers

        model.model.forward = reversed_forward

    changed(monkeypatch, turn)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM: its layers are not called once each, in order"):
        Skeleton(FAMILIES["llama_tied"](), torch.float32)


def test_layers_that_hand_keys_and_values_on_are_refused_by_the_self_check() -> None:
    """The loss is right and the gradients are not: the last two layers attend to what earlier ones computed."""
    config = Gemma4TextConfig(
        vocab_size=VOCAB_SIZE, vocab_size_per_layer_input=VOCAB_SIZE, hidden_size=64, hidden_size_per_layer_input=16,
        intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=16,
        num_kv_shared_layers=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0,
        max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    kinds = [layout.kind for layout in Skeleton(config, torch.float32).layouts[1:-1]]
    with pytest.raises(UnsupportedModelError, match="Gemma4ForCausalLM cannot be streamed: the gradient of"):
        self_check(config, kinds, streamed_gradients)
