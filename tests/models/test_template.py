"""One module that becomes any layer of its kind, and what makes two layers differ in kind."""

import copy

import pytest
import torch
from torch import nn

from megatrain.models.attention import PACKED
from megatrain.models.compiler import Compiler
from megatrain.models.template import LayerCall, Template, draws_noise, kind_key
from tests.families import FAMILIES
from tests.parity import skeleton
from tests.reference import build_model


def real_layers(family: str) -> list[nn.Module]:
    model = build_model(FAMILIES[family]())
    model.set_attn_implementation(PACKED)  # as the skeleton has it, which also decides what layers are called with
    return list(model.get_submodule(skeleton(family).layer_path))


def views_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


def call_of(family: str, layer: int = 0) -> LayerCall:
    positions = torch.arange(6)[None]
    return skeleton(family).record(torch.zeros(1, 6, dtype=torch.long), positions).calls[layer]


def gradients(layer: nn.Module, family: str, hidden: torch.Tensor) -> list[torch.Tensor]:
    args, kwargs = call_of(family).with_hidden(hidden.requires_grad_())
    output = layer(*args, **kwargs)
    return list(torch.autograd.grad(output, [hidden, *layer.parameters()], torch.ones_like(output)))


@pytest.mark.parametrize("family", ["llama_untied", "deepseek_v3"])
def test_a_template_computes_as_the_layers_themselves(family: str) -> None:
    layers = real_layers(family)
    template = Template(skeleton(family).layers[2], Compiler(enabled=False))
    hidden = torch.randn(1, 6, 64)
    for index in (3, 2):
        views = views_of(layers[index])
        args, kwargs = call_of(family).with_hidden(hidden)
        with torch.no_grad():
            expected = layers[index](*args, **kwargs)
        torch.testing.assert_close(template.forward(views, index, call_of(family), hidden), expected)
        leaf, others = hidden.clone().requires_grad_(), list(layers[index].parameters())
        found = template.backward(views, index, call_of(family), leaf, others, torch.ones_like(hidden))
        for new, wanted in zip(found, gradients(layers[index], family, hidden.clone()), strict=True):
            torch.testing.assert_close(new, wanted)
        assert template.module.self_attn.layer_idx == index


def test_the_layer_that_a_template_is_made_from_is_left_alone() -> None:
    layer = skeleton("qwen3").layers[0]
    template = Template(layer, Compiler(enabled=False))
    template.forward(views_of(real_layers("qwen3")[1]), 1, call_of("qwen3"), torch.randn(1, 6, 64))
    assert all(parameter.is_meta for parameter in (*layer.parameters(), *template.module.parameters()))
    assert layer.self_attn.layer_idx == 0


def test_dropout_that_is_not_zero_is_seen() -> None:
    assert not draws_noise(skeleton("llama_untied").layers[0])
    layer = copy.deepcopy(skeleton("gpt2").layers[0])
    assert not draws_noise(layer)
    layer.mlp.dropout.p = 0.1
    assert draws_noise(layer)
    layer = copy.deepcopy(skeleton("llama_untied").layers[0])
    layer.self_attn.attention_dropout = 0.1
    assert draws_noise(layer)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.self_attn, "sliding_window", 4),
        lambda layer: setattr(layer.self_attn, "attention_type", "sliding_attention"),
        lambda layer: setattr(layer.self_attn, "scaling", layer.self_attn.scaling * 2),
        lambda layer: setattr(layer.self_attn, "is_causal", False),
        lambda layer: setattr(layer, "sizes", (1, 2)),
        lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.1),
        lambda layer: setattr(layer.mlp, "up_proj", nn.Linear(64, 97, bias=False, device="meta")),
        lambda layer: layer.register_buffer("table", torch.zeros(3)),
        lambda layer: setattr(layer.mlp, "up_proj", nn.Linear(64, 96, bias=False, device="meta", dtype=torch.bfloat16)),
    ],
)
def test_whatever_changes_what_a_layer_computes_changes_its_kind(change) -> None:
    layer = skeleton("llama_untied").layers[0]
    other = copy.deepcopy(layer)
    assert kind_key(other) == kind_key(layer)
    change(other)
    assert kind_key(other) != kind_key(layer)


def test_the_number_of_a_layer_and_its_mode_do_not() -> None:
    first, second = (copy.deepcopy(layer) for layer in skeleton("llama_untied").layers[:2])
    assert first.self_attn.layer_idx != second.self_attn.layer_idx
    first.eval()
    assert kind_key(first) == kind_key(second)
