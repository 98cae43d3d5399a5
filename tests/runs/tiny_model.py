"""A random Llama of a few thousand parameters with a tokenizer of its own, and rows to train it on, as files."""

import json
from pathlib import Path


def write_model(folder: Path) -> Path:
    """A Hugging Face folder: config, safetensors, byte-level tokenizer with end token."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.train_from_iterator([], trainers.BpeTrainer(vocab_size=258, special_tokens=["<end>"], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
                         eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int = 120) -> Path:
    """Rows of prompt and completion that a small model can learn."""
    rows = [{"prompt": f"Count to {n % 7}: ", "completion": " ".join(map(str, range(n % 7 + 1)))} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path
