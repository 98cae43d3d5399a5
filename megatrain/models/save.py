"""A Hugging Face folder written as a stream: the model is never whole in memory.

Names and layouts on disk are those of the original release (experts one by one, for instance), by transformers' own
conversion run backwards, a layer at a time. All that depends on shapes is settled on meta tensors first, so every shard
gets its header at once and tensors may come in any order.
"""

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

from megatrain import platform
from megatrain.errors import ModelError, UnsupportedModelError
from megatrain.models.tensorfile import TensorFile, TensorFileWriter, bytes_of, disk_errors
from megatrain.models.weights import INDEX, SINGLE, kept_in_fp32

MAX_SHARD_BYTES = 5_000_000_000
_LAYER = re.compile(r"^(.*?\.\d+)\.")
Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Saved:
    """What was written: the weight files, and the sha256 of every tensor's bytes by its name on disk."""

    files: list[Path]
    num_bytes: int
    checksums: dict[str, str]

    def problems(self, folder: Path) -> list[str]:
        """Reads every tensor in `folder` again; says which differ from what was written."""
        found: dict[str, str] = {}
        for written in self.files:
            file = TensorFile(folder / written.name)
            for name in file.places:
                digest = hashlib.sha256()
                for piece in file.chunks(name):
                    digest.update(piece)
                found[name] = digest.hexdigest()
        return sorted(
            f"{name} reads back differently" for name in self.checksums.keys() | found if self.checksums.get(name) != found.get(name)
        )


def saved_dtype(model: PreTrainedModel, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `name` is saved: `dtype`, but fp32 for what the family always keeps so, and no change of integers."""
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if kept_in_fp32(model, name) else dtype


def save_pretrained_folder(
    target: Path,
    model: PreTrainedModel,
    config: PretrainedConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    complete: Callable[[Path], None] = lambda folder: None,
) -> Saved:
    """`target` is a new folder that `AutoModelForCausalLM.from_pretrained` loads: shards, index, config, generation config.

    `model` may be on meta; `tensors` yields each of its parameters and persistent buffers once (of a tied weight, any one
    name), on the CPU. Best a layer at a time: what a layer's conversion needs is held until it is there.
    `complete(folder)` adds more files last. `target` appears by renaming when all is written.
    ModelError when tensors are missing or `target` exists; DiskFullError.
    """
    if target.exists():
        raise ModelError(f"{target} exists already.", "Choose another folder, or remove it first.")
    work = target.with_name(f".tmp-{target.name}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        with disk_errors(work, ModelError):
            work.mkdir(parents=True)
            _write_configs(work, model, config, dtype)
        saved = _Saver(work, model, dtype, max_shard_bytes).save(tensors)
        with disk_errors(target, ModelError):
            complete(work)
            platform.flush_folder(work)
            platform.replace_file(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return Saved([target / path.name for path in saved.files], saved.num_bytes, saved.checksums)


def _write_configs(folder: Path, model: PreTrainedModel, config: PretrainedConfig, dtype: torch.dtype) -> None:
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


class _Saver:
    """Settles names, shards and places on meta tensors, then puts the real ones there."""

    def __init__(self, folder: Path, model: PreTrainedModel, dtype: torch.dtype, max_shard_bytes: int) -> None:
        self.folder, self.model, self.dtype = folder, model, dtype
        self.names: dict[str, str] = {}  # every name in the model -> the first name of that tensor
        first: dict[int, str] = {}
        self.expected: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            self.names[name] = first.setdefault(id(tensor), name)
            if self.names[name] == name:
                self.expected[name] = tensor
        self.groups = _by_layer(self.expected)
        self.outputs = {group: self._specs(names) for group, names in self.groups.items()}
        self._check_whole()
        self.shard_of, self.shards = _shards(self.outputs, max_shard_bytes)

    def _specs(self, names: list[str]) -> Specs:
        reverted = self._revert({name: torch.empty(self.expected[name].shape, dtype=self._dtype(name), device="meta") for name in names})
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in reverted.items()}

    def _revert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return revert_weight_conversion(self.model, tensors)

    def _dtype(self, name: str) -> torch.dtype:
        return saved_dtype(self.model, name, self.expected[name], self.dtype)

    def _check_whole(self) -> None:
        """A layer at a time gives what the whole model at once would."""
        whole = self._specs(list(self.expected))
        parts = {name: spec for specs in self.outputs.values() for name, spec in specs.items()}
        if whole != parts:
            raise UnsupportedModelError(f"{type(self.model).__name__}: its weights cannot be converted a layer at a time.")

    def save(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Saved:
        group_of = {name: group for group, names in self.groups.items() for name in names}
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        done: set[str] = set()
        checksums: dict[str, str] = {}
        writers: dict[str, TensorFileWriter] = {}
        try:
            for shard, specs in self.shards.items():
                writers[shard] = TensorFileWriter(self.folder / shard, specs, ModelError, {"format": "pt"})
            for given, tensor in tensors:
                name = self.names.get(given, "")
                if name not in group_of or name in done:
                    raise ModelError(f"{given} is not in the model, or came twice.")
                done.add(name)
                group = group_of[name]
                waiting.setdefault(group, {})[name] = tensor.to(self._dtype(name))
                if len(waiting[group]) == len(self.groups[group]):
                    for output, value in self._revert(waiting.pop(group)).items():
                        value = value.contiguous()
                        writers[self.shard_of[output]].write(output, value)
                        checksums[output] = hashlib.sha256(bytes_of(value)).hexdigest()
            lost = [name for name in group_of if name not in done]
            if lost:
                raise ModelError(f"{len(lost)} weights of the model were not given: {', '.join(lost[:4])}.")
            for writer in writers.values():
                writer.close()
        finally:
            for writer in writers.values():
                writer.abandon()
        self._write_index()
        return Saved([self.folder / shard for shard in self.shards], sum(w.num_bytes for w in writers.values()), checksums)

    def _write_index(self) -> None:
        if len(self.shards) == 1:
            return
        size = sum(shape_bytes(spec) for specs in self.shards.values() for spec in specs.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(self.shard_of.items()))}
        with disk_errors(self.folder / INDEX, ModelError):
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def shape_bytes(spec: tuple[torch.dtype, tuple[int, ...]]) -> int:
    """Bytes of a tensor of this dtype and shape."""
    return torch.Size(spec[1]).numel() * spec[0].itemsize


def _by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """What is converted together: a layer's tensors (`model.layers.7`); anything else by itself."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=dot_natural_key):
        match = _LAYER.match(name)
        groups.setdefault(match[1] if match else name, []).append(name)
    return groups


def _shards(outputs: dict[str, Specs], max_bytes: int) -> tuple[dict[str, str], dict[str, Specs]]:
    """Tensors in order, a new file where the next would pass `max_bytes` (a tensor larger than that has its own)."""
    shards: list[Specs] = [{}]
    filled = 0
    for specs in outputs.values():
        for name, spec in specs.items():
            if shards[-1] and filled + shape_bytes(spec) > max_bytes:
                shards.append({})
                filled = 0
            shards[-1][name] = spec
            filled += shape_bytes(spec)
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return {name: file for file, specs in zip(files, shards, strict=True) for name in specs}, dict(zip(files, shards, strict=True))
