"""The reference itself: documents of a pack do not see each other, and micro-batches do not change a step."""

import pytest
import torch

from tests.families import FAMILIES, VOCAB_SIZE
from tests.reference import Recipe, build_model, decays, documents, logits, random_batch, step_gradients, train


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_isolated(family: str) -> None:
    model = build_model(FAMILIES[family]()).eval()
    batch = random_batch(2, 48, VOCAB_SIZE, seed=1, document_tokens=(10, 25))
    assert len(documents(batch, 0)) >= 3
    with torch.no_grad():
        packed = logits(model, batch)
        for pack in range(batch.num_packs):
            for place in documents(batch, pack):
                ids = torch.from_numpy(batch.input_ids[pack : pack + 1, place])
                alone = model(input_ids=ids, use_cache=False).logits
                torch.testing.assert_close(packed[pack : pack + 1, place], alone, rtol=1e-4, atol=1e-5)


def test_micro_batches_do_not_change_the_step() -> None:
    batch = random_batch(4, 32, VOCAB_SIZE, seed=2)
    one, two = (step_gradients(build_model(FAMILIES["gemma2"]()), batch, packs) for packs in (4, 1))
    assert one[0] == pytest.approx(two[0], rel=1e-6)
    for name, gradient in one[1].items():
        torch.testing.assert_close(two[1][name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_lowers_the_loss_and_keeps_the_tie(dtype: torch.dtype) -> None:
    model = build_model(FAMILIES["llama_tied"](), dtype=dtype)
    batch = random_batch(2, 32, VOCAB_SIZE)
    result = train(model, [batch] * 5, Recipe([3e-3] * 5, max_grad_norm=0.5))
    assert result.losses[-1] < result.losses[0] - 0.1
    assert "lm_head.weight" not in result.weights
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(weight.dtype == torch.float32 for weight in result.weights.values())


def test_weight_decay_spares_norms_biases_and_embeddings() -> None:
    spared = {name for name, kept in decays(build_model(FAMILIES["gpt_oss"]())).items() if not kept}
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.sinks"} <= spared
    assert {"model.layers.0.mlp.experts.gate_up_proj_bias", "model.layers.0.self_attn.q_proj.bias"} <= spared
    assert "lm_head.weight" not in spared
