"""One module that becomes any layer of its kind, and what makes two layers differ in kind."""

import copy

import pytest
import torch
from torch import nn

from megatrain.models.template import Template, kind_key
from tests.families import FAMILIES
from tests.parity import skeleton
from tests.reference import build_model


def real_layers(family: str) -> list[nn.Module]:
    model = build_model(FAMILIES[family]())
    model.set_attn_implementation("sdpa")  # as the skeleton has it, which also decides what layers are called with
    return list(model.get_submodule(skeleton(family).layer_path))


def views_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


def arguments(family: str) -> dict[str, object]:
    positions = torch.arange(6)[None]
    [call, *_] = skeleton(family).record(torch.zeros(1, 6, dtype=torch.long), positions).calls
    return call.kwargs


def test_a_bound_template_computes_as_the_layer_itself() -> None:
    layers = real_layers("llama_untied")
    template = Template(skeleton("llama_untied").layers[0])
    hidden = torch.randn(1, 6, 64)
    for index in (3, 0, 2):
        bound = template.bind(views_of(layers[index]), index)
        assert bound is template.module
        torch.testing.assert_close(bound(hidden, **arguments("llama_untied")), layers[index](hidden, **arguments("llama_untied")))
        assert bound.self_attn.layer_idx == index


def test_nothing_is_copied_by_binding() -> None:
    layer = real_layers("deepseek_v3")[2]
    template = Template(skeleton("deepseek_v3").layers[1])
    bound = template.bind(views_of(layer), 2)
    assert {id(value) for value in views_of(bound).values()} == {id(value) for value in views_of(layer).values()}
    assert "mlp.gate.e_score_correction_bias" in dict(bound.named_buffers())


def test_a_graph_keeps_the_parameters_it_was_made_with() -> None:
    first, second = real_layers("qwen3")[:2]
    template = Template(skeleton("qwen3").layers[0])
    hidden, kwargs = torch.randn(1, 6, 64), arguments("qwen3")
    output = template.bind(views_of(first), 0)(hidden, **kwargs)
    other = template.bind(views_of(second), 1)(hidden, **kwargs)
    assert not torch.allclose(output, other)
    found = torch.autograd.grad(output.square().sum(), list(first.parameters()))
    wanted = torch.autograd.grad(first(hidden, **kwargs).square().sum(), list(first.parameters()))
    for (name, _), a, b in zip(first.named_parameters(), found, wanted, strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(other.square().sum(), list(first.parameters()))


def test_the_layer_that_a_template_is_made_from_is_left_alone() -> None:
    layer = skeleton("qwen3").layers[0]
    Template(layer).bind(views_of(real_layers("qwen3")[1]), 1)
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert layer.self_attn.layer_idx == 0


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
