"""Weights in and out: every family, ties, shards, and files that are damaged, missing or of another kind."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.errors import DiskFullError, ModelError
from megatrain.models import tensorfile
from megatrain.models.meta import build_meta_model
from megatrain.models.save import save_pretrained_folder
from megatrain.models.tensorfile import TensorFile
from megatrain.models.weights import WeightSource
from tests.families import FAMILIES, VOCAB_SIZE
from tests.reference import build_model


def meta(family: str, **changes: object) -> PreTrainedModel:
    config = FAMILIES[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    return build_meta_model(config, torch.float32)


def saved(family: str, folder: Path, **options: object) -> PreTrainedModel:
    """A random model of the family, saved by transformers itself."""
    model = build_model(FAMILIES[family]()).eval()
    model.save_pretrained(folder, **options)
    return model


def stream(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            yield name, tensor.detach()
        seen.add(id(tensor))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_read_one_by_one_are_the_models(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path, max_shard_size="120KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    source = WeightSource(tmp_path, meta(family))
    state = model.state_dict()
    layers = {name.split(".")[2] for name in state if ".layers." in name or ".h." in name}
    for layer in layers:
        names = [name for name in state if f".{layer}." in name]
        found = source.tensors(names)
        assert list(found) == names
        assert all(torch.equal(found[name], state[name]) for name in names)
    outer = [name for name in state if ".layers." not in name and ".h." not in name]
    assert all(torch.equal(tensor, state[name]) for name, tensor in source.tensors(outer).items())
    assert source.notices == []


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_loads_in_transformers_with_equal_logits(family: str, tmp_path: Path) -> None:
    model = build_model(FAMILIES[family]()).eval()
    skeleton = meta(family)
    result = save_pretrained_folder(tmp_path / "out", skeleton, model.config, stream(model), torch.float32, max_shard_bytes=100_000)
    assert result.problems(tmp_path / "out") == []
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True, attn_implementation="eager")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.randint(3, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = {name: tensor for path in result.files for name, tensor in load_file(path).items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert config["dtype"] == "float32"


@pytest.mark.parametrize("family", ["llama_tied", "deepseek_v3"])
def test_bf16_is_written_as_bf16_except_what_the_family_keeps_in_fp32(family: str, tmp_path: Path) -> None:
    model = build_model(FAMILIES[family](), dtype=torch.bfloat16).eval()
    result = save_pretrained_folder(tmp_path / "out", meta(family), model.config, stream(model), torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(loaded.state_dict()[name], tensor)
    kept = [n for n, place in TensorFile(result.files[0]).places.items() if place.dtype is torch.float32]
    assert bool(kept) == (family == "deepseek_v3")


# Tied weights ---------------------------------------------------------------------------------------------------------


def test_tied_weight_is_stored_once_and_found_by_both_names(tmp_path: Path) -> None:
    model = saved("llama_tied", tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    found = WeightSource(tmp_path, meta("llama_tied")).tensors(["lm_head.weight", "model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight)
    assert torch.equal(found["model.embed_tokens.weight"], model.lm_head.weight)


def rewrite(folder: Path, change: object) -> None:
    """Change the tensors of a one-file folder by `change(dict)`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def test_file_that_has_only_the_head_of_a_tied_pair(tmp_path: Path) -> None:
    model = saved("llama_tied", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    found = WeightSource(tmp_path, meta("llama_tied")).tensors(["model.embed_tokens.weight"])
    assert torch.equal(found["model.embed_tokens.weight"], model.lm_head.weight)


def test_tied_configuration_with_an_equal_second_copy(tmp_path: Path) -> None:
    saved("llama_tied", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    WeightSource(tmp_path, meta("llama_tied"))


def test_tied_configuration_with_another_head_is_refused_and_untied_as_the_hint_says(tmp_path: Path) -> None:
    model = saved("llama_tied", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ModelError, match="two different ones.*tie_word_embeddings"):
        WeightSource(tmp_path, meta("llama_tied"))
    found = WeightSource(tmp_path, meta("llama_tied", tie_word_embeddings=False)).tensors(["lm_head.weight", "model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight + 1)
    assert torch.equal(found["model.embed_tokens.weight"], model.lm_head.weight)


def test_untied_configuration_without_a_head_is_refused(tmp_path: Path) -> None:
    saved("llama_untied", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 weights of the model: lm_head\.weight"):
        WeightSource(tmp_path, meta("llama_untied"))


def test_untied_round_trip_keeps_both(tmp_path: Path) -> None:
    model = saved("llama_untied", tmp_path / "in")
    source = WeightSource(tmp_path / "in", meta("llama_untied"))
    tensors = source.tensors(model.state_dict())
    save_pretrained_folder(tmp_path / "out", meta("llama_untied"), model.config, tensors.items(), torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


# Names ----------------------------------------------------------------------------------------------------------------


def test_base_model_file_without_prefix(tmp_path: Path) -> None:
    model = saved("gpt2", tmp_path)
    rewrite(tmp_path, lambda tensors: [tensors.update({key.removeprefix("transformer."): tensors.pop(key)}) for key in list(tensors)])
    found = WeightSource(tmp_path, meta("gpt2")).tensors(["transformer.h.2.attn.c_attn.weight", "lm_head.weight"])
    assert torch.equal(found["transformer.h.2.attn.c_attn.weight"], model.transformer.h[2].attn.c_attn.weight)
    assert torch.equal(found["lm_head.weight"], model.transformer.wte.weight)


def test_unexpected_tensors_are_told_once_and_old_tables_not_at_all(tmp_path: Path) -> None:
    saved("llama_tied", tmp_path)
    extra = {"model.extra.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    source = WeightSource(tmp_path, meta("llama_tied"))
    assert len(source.notices) == 1
    assert "1 tensors" in source.notices[0]
    assert "model.extra.weight" in source.notices[0]


def test_buffers_that_no_file_holds_are_left_out(tmp_path: Path) -> None:
    saved("llama_tied", tmp_path)
    assert WeightSource(tmp_path, meta("llama_tied")).tensors(["model.rotary_emb.inv_freq"]) == {}


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.mlp.experts.3.up_proj.weight"))
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.experts"):
        WeightSource(tmp_path, meta("qwen3_moe"))


# Files that cannot be used --------------------------------------------------------------------------------------------


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    saved("llama_tied", tmp_path)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight is \[160, 64\], the model wants \[200, 64\]"):
        WeightSource(tmp_path, meta("llama_tied", vocab_size=200))
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 weights of the model: model\.layers\.1\.mlp\.up_proj\.weight"):
        WeightSource(tmp_path, meta("llama_tied"))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    saved("llama_tied", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as float8_e4m3fn.*bf16 version"):
        WeightSource(tmp_path, meta("llama_tied"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ModelError, match=r"quantized \(mxfp4\)"):
        WeightSource(tmp_path, meta("llama_tied"))


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="pickle.*Convert it to safetensors"):
        WeightSource(tmp_path, meta("llama_tied"))


def test_folder_without_weights_and_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no safetensors weights"):
        WeightSource(tmp_path, meta("llama_tied"))
    save_file({"lora": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="adapter"):
        WeightSource(tmp_path, meta("llama_tied"))


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1, -4000])
def test_truncated_file_is_named(kept: int, tmp_path: Path) -> None:
    saved("llama_tied", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        WeightSource(tmp_path, meta("llama_tied"))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]},
        {"dtype": "F32", "shape": [2]},
        "text",
    ],
)
def test_damaged_header_is_named(entry: object, tmp_path: Path) -> None:
    text = json.dumps({"w": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ModelError, match=r"model\.safetensors has a damaged header"):
        TensorFile(tmp_path / "model.safetensors")


def test_git_lfs_pointer_and_longer_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(ModelError, match="Git LFS"):
        TensorFile(tmp_path / "model.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelError, match="longer than its header says"):
        TensorFile(tmp_path / "model.safetensors")


def test_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(100)}, tmp_path / "model.safetensors")
    file = TensorFile(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(ModelError, match="truncated"):
        file.read("w")


@pytest.mark.parametrize("fault", ["shard", "key", "path", "json"])
def test_index_that_does_not_fit_its_files(fault: str, tmp_path: Path) -> None:
    saved("llama_tied", tmp_path, max_shard_size="120KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    if fault == "shard":
        sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    elif fault == "key":
        index["weight_map"]["model.more.weight"] = sorted(tmp_path.glob("*.safetensors"))[0].name
    elif fault == "path":
        index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    path.write_text("{" if fault == "json" else json.dumps(index))
    messages = {
        "shard": "lacks model-00002",
        "key": "does not hold model.more.weight",
        "path": "not a file of this",
        "json": "cannot be read",
    }
    with pytest.raises(ModelError, match=messages[fault]):
        WeightSource(tmp_path, meta("llama_tied"))


# Writing --------------------------------------------------------------------------------------------------------------


def test_writer_refuses_what_is_missing_double_or_unknown_and_leaves_nothing(tmp_path: Path) -> None:
    model = build_model(FAMILIES["llama_tied"]())
    tensors = list(stream(model))
    for given, message in [
        (tensors[:-1], "were not given"),
        ([*tensors, tensors[0]], "twice"),
        ([("x", tensors[0][1])], "not in the model"),
    ]:
        with pytest.raises(ModelError, match=message):
            save_pretrained_folder(tmp_path / "out", meta("llama_tied"), model.config, given, torch.float32)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        save_pretrained_folder(tmp_path / "out", meta("llama_tied"), model.config, tensors, torch.float32)


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(FAMILIES["llama_tied"]())
    original = tensorfile.platform.write_at

    def full(descriptor: int, buffer: memoryview, offset: int) -> None:
        if offset > 100_000:
            raise OSError(28, "No space left on device")
        original(descriptor, buffer, offset)

    monkeypatch.setattr(tensorfile.platform, "write_at", full)
    with pytest.raises(DiskFullError, match=r"model\.safetensors"):
        save_pretrained_folder(tmp_path / "out", meta("llama_tied"), model.config, stream(model), torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_changed_bytes_are_found_when_read_back(tmp_path: Path) -> None:
    model = build_model(FAMILIES["llama_tied"]())
    result = save_pretrained_folder(tmp_path / "out", meta("llama_tied"), model.config, stream(model), torch.float32)
    content = bytearray(result.files[0].read_bytes())
    content[-1] ^= 1
    result.files[0].write_bytes(content)
    assert result.problems(tmp_path / "out") == ["model.norm.weight reads back differently"]
