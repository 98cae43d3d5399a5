"""Model shapes: inspected once by a process of its own, then read from the cache; refusals come through in words."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain import shapes
from megatrain.config import ModelConfig
from megatrain.errors import ModelError
from tests.shapes import QWEN_1B5

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip


def model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes), "utf-8")
    return folder


@pytest.fixture
def inspections(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have been run; each answers with a shape."""
    seen: list[list[str]] = []

    def run(arguments: list[str], **_: Any) -> SimpleNamespace:
        seen.append(arguments)
        return SimpleNamespace(returncode=0, stdout=f"some warning\n{QWEN_1B5.to_json()}\n", stderr="")

    monkeypatch.setattr(shapes.subprocess, "run", run)
    return seen


def test_a_model_is_inspected_by_another_process_and_kept(tmp_path: Path):
    folder = model(tmp_path / "Modell äöü")
    shape = shapes.load_shape(folder, "my model", tmp_path / "workspace")
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert shape.name == "my model"
    assert [block.num_params for block in shape.blocks] == [300 * 64, layer, layer, layer, 64]
    assert shape.tied_head
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "_inspect", lambda *_: pytest.fail("inspected again"))
        assert shapes.load_shape(folder, "other name", tmp_path / "workspace").name == "other name"


def test_a_type_that_nobody_knows_is_refused_in_words(tmp_path: Path):
    with pytest.raises(ModelError, match="zork") as caught:
        shapes.load_shape(model(tmp_path / "m", model_type="zork"), "m", tmp_path)
    assert caught.value.hint


def test_another_configuration_is_inspected_again(tmp_path: Path, inspections: list[list[str]]):
    for change in ({}, {"hidden_size": 128}, {}, {"hidden_size": 128}):
        shapes.load_shape(model(tmp_path / "m", **change), "m", tmp_path)
    assert len(inspections) == 2
    assert inspections[0][1:3] == ["-m", "megatrain.models.inspect"]


def test_a_damaged_cache_is_inspected_again(tmp_path: Path, inspections: list[list[str]]):
    folder = model(tmp_path / "m")
    shape = shapes.load_shape(folder, "m", tmp_path)
    cached = next((tmp_path / "cache" / "shapes").glob("*.json"))
    for text in ("", "{", "[]", '{"name": 3}'):
        cached.write_text(text, "utf-8")
        assert shapes.load_shape(folder, "m", tmp_path) == shape
    assert len(inspections) == 5


@pytest.mark.parametrize(("answer", "text"), [
    (SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nMemoryError: no memory"), "no memory"),
    (SimpleNamespace(returncode=-9, stdout="", stderr=""), "exit code -9"),
    (SimpleNamespace(returncode=0, stdout="{not json", stderr=""), "could not be inspected"),
    (SimpleNamespace(returncode=2, stdout='{"error": "No decoder layers.", "hint": "Choose another."}', stderr=""), "No decoder layers"),
])  # fmt: skip
def test_an_inspection_that_fails_says_why(answer: SimpleNamespace, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shapes.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(ModelError, match=text):
        shapes.load_shape(model(tmp_path / "m"), "m", tmp_path)
    assert not (tmp_path / "cache").exists()


def test_an_inspection_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(arguments: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(arguments, timeout)

    monkeypatch.setattr(shapes.subprocess, "run", run)
    with pytest.raises(ModelError, match="longer than"):
        shapes.load_shape(model(tmp_path / "m"), "m", tmp_path)


def test_a_folder_without_a_model(tmp_path: Path):
    with pytest.raises(ModelError):
        shapes.resolve(ModelConfig(path=str(tmp_path)), tmp_path)
    with pytest.raises(ModelError):
        shapes.load_shape(tmp_path, "m", tmp_path)
    assert shapes.resolve(ModelConfig(path=str(model(tmp_path / "m"))), tmp_path) == tmp_path / "m"


def test_models_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub = tmp_path / "hub"
    monkeypatch.setattr(shapes, "_hub_cache", lambda: hub)
    assert shapes.local_models(tmp_path / "workspace") == []
    whole = model(hub / "models--owner--whole" / "snapshots" / "abc")
    (whole / "model.safetensors").write_bytes(b"x" * 100)
    model(hub / "models--owner--only-config" / "snapshots" / "abc")
    broken = model(hub / "models--owner--broken" / "snapshots" / "abc")
    (broken / "model.safetensors").symlink_to(hub / "nowhere")
    export = model(tmp_path / "workspace" / "runs" / "my-run" / "exports" / "step-00000100-bf16")
    (export / "model.safetensors").write_bytes(b"x" * 50)
    assert shapes.local_models(tmp_path / "workspace") == [
        shapes.LocalModel("my-run · step-00000100-bf16", str(export), 50),
        shapes.LocalModel("owner/whole", "owner/whole", 100),
    ]
