"""Where a model lies and what shape it has, for everything that plans: the page and the command line.

Loads no torch: a model is inspected by a process of its own, and its answer is kept in the workspace.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from megatrain.config import ModelConfig
from megatrain.errors import ModelError
from megatrain.runs.model_source import resolve_model
from megatrain.shape import ModelShape

ROOT = Path(__file__).resolve().parent.parent
INSPECT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class LocalModel:
    """A model whose weights are on this machine. `path` is what `model.path` takes."""

    name: str
    path: str
    num_bytes: int  # of its weights


def resolve(model: ModelConfig, workspace: Path) -> Path:
    """The folder with a model's configuration and tokenizer; those of a hub model are fetched into the hub's cache first.

    Weights are left for the worker. ModelError when there is no such model. `workspace` is not written to.
    """
    return resolve_model(model, weights=False)


def load_shape(folder: Path, name: str, workspace: Path) -> ModelShape:
    """The shape of the model in `folder`, from the workspace's cache or from a process that inspects it (seconds).

    ModelError when it cannot be read, or when the engine does not understand its structure.
    """
    cached = workspace / "cache" / "shapes" / f"{_fingerprint(folder)}.json"
    try:
        return replace(ModelShape.load(cached), name=name)
    except (OSError, ValueError, TypeError, KeyError):  # not there yet, or damaged: inspect again
        pass
    shape = _inspect(folder, name)
    with contextlib.suppress(OSError):  # a cache; a plan can be asked for in a workspace that cannot be written
        cached.parent.mkdir(parents=True, exist_ok=True)
        temporary = cached.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(shape.to_json(), "utf-8")
        os.replace(temporary, cached)
    return shape


def _fingerprint(folder: Path) -> str:
    """Of all that decides a shape: the model's configuration, transformers, and the code that inspects."""
    digest = hashlib.sha256(metadata.version("transformers").encode())
    for path in (folder / "config.json", *sorted((ROOT / "megatrain" / "models").glob("*.py"))):
        try:
            digest.update(path.read_bytes())
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.", "Choose the folder of a Hugging Face model.") from error
    return digest.hexdigest()[:32]


def _inspect(folder: Path, name: str) -> ModelShape:
    arguments = [sys.executable, "-m", "megatrain.models.inspect", str(folder.resolve()), "--name", name]
    quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(arguments, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=INSPECT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        text = f"Reading {name} took longer than {INSPECT_TIMEOUT_S:.0f} s."
        raise ModelError(text, "Try again when the computer is less busy.") from error
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    if "error" in answer:
        raise ModelError(answer["error"], answer.get("hint", ""))
    if done.returncode != 0 or "blocks" not in answer:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ModelError(f"{name} could not be inspected: {last[0][:300]}", "Run `python -m megatrain doctor`.")
    return ModelShape.from_json(lines[-1])


def local_models(workspace: Path) -> list[LocalModel]:
    """Models with weights on this machine: exports of this workspace's runs, then the hub's cache."""
    exports = sorted((workspace / "runs").glob("*/exports/*/config.json"))
    found = [LocalModel(f"{path.parents[2].name} · {path.parent.name}", str(path.parent), _weights_bytes(path.parent)) for path in exports]
    for folder in sorted(_hub_cache().glob("models--*")):
        sizes = [_weights_bytes(path.parent) for path in folder.glob("snapshots/*/config.json")]
        name = folder.name.removeprefix("models--").replace("--", "/")
        found.append(LocalModel(name, name, max(sizes, default=0)))
    return [model for model in found if model.num_bytes]


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _weights_bytes(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except OSError:  # a link into the cache that leads nowhere: the download did not finish
        return 0
