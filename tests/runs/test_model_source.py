"""Finding a model: demo, folder, hub. The hub is a small server on this computer, asked by a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.config import ModelConfig
from megatrain.errors import ModelError
from megatrain.runs import model_source
from megatrain.runs.model_source import hub_id, resolve_model
from tests.runs.hub_server import HubServer

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w" * (3 << 20), "pytorch_model.bin": b"evil",
         "README.md": b"x", "chat_template.jinja": b"x", "onnx/model.safetensors": b"big", "modeling_x.py": b"evil"}  # fmt: skip
ASK = """
import json, sys
from megatrain.config import ModelConfig
from megatrain.errors import MegaTrainError
from megatrain.runs.model_source import CancelledError, resolve_model
phases = []
options = json.loads(sys.argv[1])
stop = options.pop("stop", False)
weights = options.pop("weights", True)
try:
    path = resolve_model(ModelConfig(**options), lambda phase: phases.append((phase.done, phase.total)), lambda: stop, weights)
    answer = {"path": str(path), "phases": phases}
except MegaTrainError as error:
    answer = {"error": error.message, "hint": error.hint}
except CancelledError as error:
    answer = {"cancelled": str(error)}
answer["torch"] = "torch" in sys.modules
print(json.dumps(answer))
"""


@pytest.fixture
def hub():
    servers = []

    def start(**options):
        servers.append(HubServer(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def ask(address: str, cache: Path, **options) -> dict:
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache), "PYTHONPATH": str(ROOT),
                   "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", ASK, json.dumps(options)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert not answer["torch"]
    return answer


def test_a_hub_model_comes_with_progress_and_without_pickles_or_programs(hub, tmp_path):
    server = hub(models={"owner/model": FILES})
    answer = ask(server.address, tmp_path, path="owner/model")
    names = {path.relative_to(answer["path"]).as_posix() for path in Path(answer["path"]).rglob("*")}
    assert names == {"config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"}
    done, total = answer["phases"][-1]
    assert done == total == (3 << 20) + 5
    assert not any("bin" in request or ".py" in request for request in server.requests)
    server.close()  # the hub is gone, the copy stays
    assert ask(server.address, tmp_path, path="owner/model")["path"] == answer["path"]


def test_planning_needs_no_weights(hub, tmp_path):
    server = hub(models={"owner/model": FILES})
    answer = ask(server.address, tmp_path, path="https://huggingface.co/owner/model", weights=False)
    assert not list(Path(answer["path"]).glob("*.safetensors"))
    answer = ask(server.address, tmp_path, path="owner/model", from_scratch=True)
    assert not list(Path(answer["path"]).glob("*.safetensors"))


@pytest.mark.parametrize(("options", "error", "hint"), [
    ({"path": "owner/gated"}, "asks for permission first", "hf auth login"),
    ({"path": "owner/nothing"}, "is not on the hub, or it is private", "Check the name"),
    ({"path": "owner/pickle"}, "keeps its weights as pickles", "safetensors"),
    ({"path": "owner/model", "revision": "v9"}, "no revision 'v9'", "tree/main"),
])  # fmt: skip
def test_refusals_are_explained(hub, tmp_path, options, error, hint):
    pickled = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    server = hub(models={"owner/model": FILES, "owner/gated": FILES, "owner/pickle": pickled}, gated=("owner/gated",))
    answer = ask(server.address, tmp_path, **options)
    assert error in answer["error"]
    assert hint in answer["hint"]


def test_without_a_connection_the_reason_is_said(tmp_path):
    answer = ask("http://127.0.0.1:9", tmp_path, path="owner/model")
    assert "cannot be reached" in answer["error"]


def test_a_download_can_be_stopped(hub, tmp_path):
    big = FILES | {"model.safetensors": b"w" * (30 << 20)}
    server = hub(models={"owner/model": big}, slow=True)
    answer = ask(server.address, tmp_path, path="owner/model", stop=True)
    assert "stopped after" in answer["cancelled"]


def test_folders(tmp_path):
    folder = tmp_path / "Modell ü"
    with pytest.raises(ModelError, match="no folder"):
        resolve_model(ModelConfig(path=str(folder)))
    folder.mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(ModelConfig(path=str(folder)))
    (folder / "config.json").write_text("{}", "utf-8")
    with pytest.raises(ModelError, match="no weights"):
        resolve_model(ModelConfig(path=str(folder)))
    assert resolve_model(ModelConfig(path=str(folder), from_scratch=True)) == folder
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="pickles"):
        resolve_model(ModelConfig(path=str(folder)))
    (folder / "model.safetensors").write_bytes(b"x")
    assert resolve_model(ModelConfig(path=str(folder))) == folder


@pytest.mark.parametrize("path", ["../../etc", "a/b/c", "x y", "", "C:\\models\\x", "owner/../x"])
def test_what_is_neither_folder_nor_hub_id_is_refused_without_asking_anybody(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_source, "_fetch", lambda *args: pytest.fail("asked the hub"))
    with pytest.raises(ModelError):
        resolve_model(ModelConfig(path=path))


def test_pasted_addresses_are_hub_ids():
    for text in ("Qwen/Qwen3-0.6B", " https://huggingface.co/Qwen/Qwen3-0.6B ", "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main",
                 "https://hf.co/Qwen/Qwen3-0.6B?x=1"):  # fmt: skip
        assert hub_id(text) == "Qwen/Qwen3-0.6B"
