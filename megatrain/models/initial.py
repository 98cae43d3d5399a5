"""Random weights to start from, a block at a time, as the model's own class would draw them.

Every maximal part of the model that lies inside the block (a decoder layer, an embedding, a norm) is copied from the
meta model, filled with NaN, and given to transformers' `_init_weights` children first, exactly in the order of
`from_config`, so that rules which look at a parent (GPT-2's scaled residual projections) apply. What is NaN afterwards
was never initialised and is refused. The values depend on seed and part, not on how the model is cut into blocks.
"""

import copy
import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from megatrain.errors import UnsupportedModelError


def initial_tensors(model: PreTrainedModel, names: Iterable[str], seed: int) -> dict[str, torch.Tensor]:
    """The named parameters and buffers with fresh values, on the CPU: floating point ones in fp32.

    `model` is the whole transformers model, its parameters on meta; it is not changed. Memory: the parts that hold the
    names. Uses and restores torch's global random state. UnsupportedModelError when the class leaves a value unset.
    """
    wanted = dict.fromkeys(names)
    found: dict[str, torch.Tensor] = {}
    for path in _parts(model, wanted):
        part = copy.deepcopy(model.get_submodule(path)).to_empty(device="cpu").float()
        digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            _initialise(model, path, part)
        prefix = f"{path}." if path else ""
        values = {prefix + name: tensor for name, tensor in [*part.named_parameters(), *part.named_buffers()]}
        found |= {name: tensor.detach() for name, tensor in values.items() if name in wanted}
    unset = [name for name, tensor in found.items() if tensor.is_floating_point() and tensor.isnan().any()]
    unset += [name for name in wanted if name not in found]
    if unset:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not say how {', '.join(unset[:4])} should be initialised.",
            "Start from pre-trained weights instead of random ones.",
        )
    return {name: found[name] for name in wanted}


def _parts(model: PreTrainedModel, names: Iterable[str]) -> Iterator[str]:
    """Dotted paths of the largest modules all of whose parameters are among `names`; together they hold every name.

    Where only some parameters of a module are (the bias of a tied head), that module.
    """
    inside = set(names)
    # A tied weight belongs to the part that is asked for: it counts as inside under any of its names.
    values = {name: tensor for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}
    chosen = {id(values[name]) for name in inside if name in values}
    seen: set[str] = set()
    for name in names:
        path = name.rpartition(".")[0]
        if name not in values:
            continue  # reported as unset
        while path and _owned(model.get_submodule(path.rpartition(".")[0]), chosen):
            path = path.rpartition(".")[0]
        if path not in seen:
            seen.add(path)
            yield path


def _owned(module: nn.Module, chosen: set[int]) -> bool:
    return all(id(parameter) in chosen for parameter in module.parameters())


@torch.no_grad()
def _initialise(model: PreTrainedModel, path: str, part: nn.Module) -> None:
    for tensor in [*part.parameters(), *part.buffers()]:
        if hasattr(tensor, "_is_hf_initialized"):
            del tensor._is_hf_initialized  # or transformers would take the empty memory for loaded weights
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.zero_()
    for name, module in _children_first(part, path):
        _init_function(model, name)(module)
    for module in part.modules():
        own = [tensor for tensor in module._parameters.values() if tensor is not None]
        reset = getattr(module, "reset_parameters", None)
        if callable(reset) and any(tensor.isnan().any() for tensor in own):
            kept = [tensor.clone() for tensor in own]
            reset()
            for tensor, before in zip(own, kept, strict=True):
                tensor.copy_(torch.where(before.isnan(), tensor, before))


def _children_first(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _init_function(model: PreTrainedModel, path: str):
    """`_init_weights` of the innermost model class around `path`: a model inside a model has its own rules."""
    owner = model
    names = path.split(".") if path else []
    for end in range(1, len(names) + 1):
        module = model.get_submodule(".".join(names[:end]))
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner._init_weights
