"""Weights of a Hugging Face folder, block by block.

A name in the files is not always a name in the model: fused experts, renamed modules, a missing `model.` prefix.
transformers' own conversion mapping says how, and is applied to just the files' tensors that a block needs.
Everything that can be told from the headers (missing, misshapen, quantized) is told before a single weight is read.
"""

import copy
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from megatrain.errors import ModelError
from megatrain.models.tensorfile import Place, TensorFile

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class _Group:
    """Tensors of the files that together give one or more tensors of the model."""

    first: str  # the name that transformers gives the result
    keys: list[str] = field(default_factory=list)  # in transformers' order: experts by number
    patterns: list[str | None] = field(default_factory=list)  # which source of the converter each key is
    converter: WeightConverter | None = None  # None: the tensor as it is


class WeightSource:
    """The weights of `folder`, named as in `model`.

    `model` is the transformers model with its tied weights tied; its parameters may be on meta and are never touched.
    `notices` are sentences for the user, e.g. which tensors of the files the model has no place for.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Reads headers only. ModelError when the folder does not hold every weight of the model, or cannot be trained from."""
        self.folder, self.model = folder, model
        self.notices: list[str] = []
        _refuse_quantized(folder)
        self._files = _open_files(folder)
        self._expected: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        self._aliases = _aliases(self._expected)
        self._groups = self._group_keys()
        self._check_shapes()
        self._check_missing()
        self._check_ties()

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The named parameters and buffers on the CPU, in the files' dtype. Buffers that no file contains are left out.

        Memory: the tensors asked for, once more while fused ones are put together.
        """
        wanted = dict.fromkeys(names)
        found: dict[str, torch.Tensor] = {}
        for name in wanted:
            if name in found or name not in self._expected:
                continue
            stored = self._stored_name(name)
            if stored is None:
                continue
            group = self._groups[stored]
            converted = self._convert(group, [self._files[key].read(key) for key in group.keys])
            if stored not in converted:
                raise ModelError(f"{self._where(group)}: nothing in it gives {stored}.")
            found |= {other: tensor for other, tensor in converted.items() if other in wanted}
            found[name] = converted[stored]
        return {name: found[name].contiguous() for name in wanted if name in found}

    def _stored_name(self, name: str) -> str | None:
        """The name under which the files hold the parameter called `name`: for a tied one either of its names."""
        return next((alias for alias in [name, *self._aliases.get(name, ())] if alias in self._groups), None)

    def _group_keys(self) -> dict[str, _Group]:
        """Every name of the model that the files give -> where it comes from."""
        mapping = get_model_conversion_mapping(self.model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, expected = self.model.base_model_prefix, self._expected
        groups: dict[str, _Group] = {}
        unexpected: list[str] = []
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
            if name not in expected and key in expected:
                name, pattern = rename_source_key(key, [], [], prefix, expected)
            if name not in expected:
                unexpected.append(key)
                continue
            group = groups.setdefault(name, _Group(name))
            group.keys.append(key)
            group.patterns.append(pattern)
            if pattern is not None:
                group.converter = by_pattern[pattern]
        for group in list(groups.values()):
            for target in group.converter.target_patterns[1:] if group.converter else ():
                groups[group.first.replace(group.converter.target_patterns[0], target)] = group
        self._note_unexpected(unexpected)
        return groups

    def _note_unexpected(self, keys: list[str]) -> None:
        ignored = [*(self.model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
        extra = [key for key in keys if not any(re.search(pattern, key) for pattern in ignored)]
        if extra:
            self.notices.append(f"{len(extra)} tensors in {self.folder} have no place in the model and are not used: {_some(extra)}.")

    def _convert(self, group: _Group, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors that the group's tensors give."""
        if group.converter is None:
            return {group.first: tensors[0]}
        converter = copy.deepcopy(group.converter)
        for key, pattern, tensor in zip(group.keys, group.patterns, tensors, strict=True):
            converter.add_tensor(group.first, key, pattern, tensor)
        try:
            made = converter.convert(group.first, model=self.model, config=self.model.config)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            raise ModelError(f"{self._where(group)}: {_some(group.keys)} cannot be put together as {group.first}: {error}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _check_shapes(self) -> None:
        """Every group is converted on meta tensors, which have a shape and no memory."""
        seen: set[int] = set()
        for group in self._groups.values():
            if id(group) in seen:
                continue
            seen.add(id(group))
            if group.converter is None and len(group.keys) > 1:
                raise ModelError(f"{self._where(group)}: {_some(group.keys)} all claim to be {group.first}.")
            places = [self._files[key].places[key] for key in group.keys]
            for key, place in zip(group.keys, places, strict=True):
                self._check_dtype(group.first, key, place)
            for name, tensor in self._convert(group, [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in places]).items():
                if name in self._expected and tensor.shape != self._expected[name].shape:
                    raise ModelError(
                        f"{self._where(group)}: {name} is {list(tensor.shape)}, the model wants {list(self._expected[name].shape)}.",
                        "config.json and the weights do not belong together.",
                    )

    def _check_dtype(self, name: str, key: str, place: Place) -> None:
        if self._expected[name].is_floating_point() and place.dtype not in _FLOATS:
            raise ModelError(
                f"{self._files[key].path}: {key} is stored as {str(place.dtype).removeprefix('torch.')}, not as floating point numbers.",
                "Quantized weights cannot be trained in full; choose the bf16 version of the model.",
            )

    def _check_missing(self) -> None:
        ignored = self.model._keys_to_ignore_on_load_missing or ()
        missing = [
            name for name in self._expected if self._stored_name(name) is None and not any(re.search(pattern, name) for pattern in ignored)
        ]
        if missing:
            raise ModelError(f"{self.folder} lacks {len(missing)} weights of the model: {_some(missing)}.", "Download the model again.")

    def _check_ties(self) -> None:
        """Names of one tied parameter may all be in the files, if they hold the same values."""
        for name, others in self._aliases.items():
            for other in others:
                if name in self._groups and other in self._groups and name < other and not self._equal(name, other):
                    raise ModelError(
                        f"{self.folder}: config.json says that {name} and {other} are one weight, but the files hold two different ones.",
                        'Set "tie_word_embeddings": false in config.json to train both.',
                    )

    def _equal(self, one: str, two: str) -> bool:
        first, second = (self._groups[name].keys[0] for name in (one, two))
        places = [self._files[key].places[key] for key in (first, second)]
        if places[0].dtype != places[1].dtype or self._groups[one].converter or self._groups[two].converter:
            pair = [self.tensors([name])[name] for name in (one, two)]
            return torch.equal(pair[0].double(), pair[1].double())
        chunks = zip(self._files[first].chunks(first), self._files[second].chunks(second), strict=True)
        return all(a == b for a, b in chunks)

    def _where(self, group: _Group) -> str:
        return ", ".join(sorted({str(self._files[key].path) for key in group.keys}))


def kept_in_fp32(model: PreTrainedModel, name: str) -> bool:
    """Whether transformers keeps `name` in fp32 when the model is loaded in bf16 (routers of some families); its own matching rule."""
    return any(re.search(part.replace("*", ".*"), name) for part in model._keep_in_fp32_modules_strict or ())


def _aliases(expected: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Name -> other names of the same parameter. Tying is read off the objects, not off the configuration."""
    by_identity: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        by_identity.setdefault(id(tensor), []).append(name)
    return {name: [n for n in names if n != name] for names in by_identity.values() if len(names) > 1 for name in names}


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _refuse_quantized(folder: Path) -> None:
    try:
        raw = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return  # whoever built the model has read it; here only the marker matters
    if isinstance(raw, dict) and raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "some format")
        raise ModelError(
            f"The weights in {folder} are quantized ({method}) and cannot be trained in full.", "Choose the bf16 version of the model."
        )


def _open_files(folder: Path) -> dict[str, TensorFile]:
    """Tensor name -> the open file that holds it, for the folder's only safetensors file or all of its shards."""
    index = folder / INDEX
    if index.is_file():
        return _open_shards(folder, index)
    singles = sorted(folder.glob("*.safetensors")) if not (folder / SINGLE).is_file() else [folder / SINGLE]
    singles = [path for path in singles if not path.name.startswith("adapter_")]
    if len(singles) == 1:
        file = TensorFile(singles[0])
        return dict.fromkeys(file.places, file)
    if singles:
        raise ModelError(f"{folder} holds {len(singles)} safetensors files and no {INDEX}.", "Download the model again.")
    if any(True for pattern in _PICKLES for _ in folder.glob(pattern)):
        raise ModelError(
            f"{folder} holds its weights as a Python pickle, which can run any code when it is read; it is not opened.",
            "Convert it to safetensors: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder).",
        )
    if (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"{folder} is an adapter, not a whole model.", "Merge it into its base model first, or choose the base model.")
    raise ModelError(f"{folder} holds no safetensors weights.", "Choose a folder with model.safetensors, or start from random weights.")


def _open_shards(folder: Path, index: Path) -> dict[str, TensorFile]:
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        shards = {shard: folder / shard for shard in sorted(set(weight_map.values())) if shard == Path(shard).name}
        strange = sorted(set(weight_map.values()) - shards.keys())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error}", "Download it again.") from error
    if strange:
        raise ModelError(f"{index} names {strange[0]!r}, which is not a file of this folder.")
    absent = [shard for shard, path in shards.items() if not path.is_file()]
    if absent:
        raise ModelError(f"{folder} lacks {_some(absent)}, which {INDEX} names.", "Download the model again.")
    files = {shard: TensorFile(path) for shard, path in shards.items()}
    for key, shard in weight_map.items():
        if key not in files[shard].places:
            raise ModelError(f"{files[shard].path} does not hold {key}, though {INDEX} says so.", "Download the model again.")
    return {key: files[shard] for key, shard in weight_map.items()}
