"""Random weights a block at a time are distributed as transformers' own, and repeat."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.errors import UnsupportedModelError
from megatrain.models.initial import initial_tensors
from megatrain.models.meta import build_meta_model
from tests.families import FAMILIES


def meta(family: str) -> PreTrainedModel:
    return build_meta_model(FAMILIES[family](), torch.bfloat16)


def moments(tensor: torch.Tensor) -> tuple[float, float]:
    return tensor.float().mean().item(), tensor.float().std(correction=0).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_distribution_is_that_of_from_config(family: str) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    names = [name for name, _ in theirs.named_parameters()] + [n for n, _ in theirs.named_buffers() if n in theirs.state_dict()]
    model = meta(family)
    found: dict[str, torch.Tensor] = {}
    blocks: dict[str, list[str]] = {}
    for name in names:  # a decoder layer each, and everything else by itself
        blocks.setdefault(".".join(name.split(".")[:3]), []).append(name)
    for block in blocks.values():
        found |= initial_tensors(model, block, seed=1)
    assert sorted(found) == sorted(names)
    for name in names:
        expected = theirs.state_dict()[name]
        assert found[name].shape == expected.shape
        assert found[name].dtype == torch.float32
        (mean, std), (their_mean, their_std) = moments(found[name]), moments(expected)
        assert (std > 0) == (their_std > 0), name
        if expected.numel() >= 64:  # fewer numbers have no deviation worth comparing
            tolerance = 5 * their_std / expected.numel() ** 0.5
            assert abs(mean - their_mean) <= 2 * tolerance, name
            assert abs(std - their_std) <= 1.5 * tolerance, name


def test_gpt2_scales_residual_projections_with_depth() -> None:
    model = meta("gpt2")
    names = [name for name, _ in model.named_parameters() if ".h.1." in name]
    found = initial_tensors(model, names, seed=0)
    for part, std in (("attn.c_proj", 0.02 / 8**0.5), ("mlp.c_proj", 0.02 / 8**0.5), ("attn.c_attn", 0.02), ("mlp.c_fc", 0.02)):
        assert found[f"transformer.h.1.{part}.weight"].std().item() == pytest.approx(std, rel=0.05)
        assert not found[f"transformer.h.1.{part}.bias"].any()


def test_seed_and_part_decide_not_the_cut() -> None:
    model = meta("llama_untied")
    layer = [name for name, _ in model.named_parameters() if ".layers.2." in name]
    torch.manual_seed(3)
    one = initial_tensors(model, layer, seed=7)
    state = torch.get_rng_state()
    torch.rand(5)
    two = initial_tensors(model, [*layer, "lm_head.weight"], seed=7)
    assert all(torch.equal(one[name], two[name]) for name in layer)
    assert not torch.equal(one[layer[0]], initial_tensors(model, layer, seed=8)[layer[0]])
    other = initial_tensors(model, [name.replace(".layers.2.", ".layers.3.") for name in layer], seed=7)
    assert not torch.equal(one["model.layers.2.mlp.up_proj.weight"], other["model.layers.3.mlp.up_proj.weight"])
    torch.manual_seed(3)
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_tied_head_is_initialised_as_the_embedding() -> None:
    found = initial_tensors(meta("llama_tied"), ["model.embed_tokens.weight"], seed=0)["model.embed_tokens.weight"]
    assert not found[0].any()  # the padding token's row
    assert found.std().item() == pytest.approx(0.02, rel=0.05)


def test_weights_that_the_class_never_initialises_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta("llama_tied")
    monkeypatch.setattr(type(model), "_init_weights", lambda self, module: None)
    monkeypatch.setattr(type(model.model), "_init_weights", lambda self, module: None)
    linear = initial_tensors(model, ["model.layers.0.mlp.up_proj.weight"], seed=0)
    assert linear["model.layers.0.mlp.up_proj.weight"].std() > 0  # nn.Linear says itself how it starts
    with pytest.raises(UnsupportedModelError, match=r"does not say how model\.norm\.weight"):
        initial_tensors(model, ["model.norm.weight"], seed=0)
    with pytest.raises(UnsupportedModelError, match=r"model\.no\.such\.thing"):
        initial_tensors(model, ["model.no.such.thing"], seed=0)
