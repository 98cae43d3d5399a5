"""Templates: one layer module per kind, whose parameters are views of the slot that a block was streamed to.

Layers share a template only if class, parameters, buffers and every scalar attribute agree: windows, rope kinds and
layer types live in attributes.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_PER_LAYER = {"layer_idx", "layer_id", "layer_number"}  # numbers of a layer; set anew at every binding
_SCALARS = (int, float, str, bool, type(None))


def kind_key(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for two layers iff they may share a template."""
    params = tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())
    buffers = tuple((name, tuple(b.shape), b.dtype) for name, b in layer.named_buffers())
    scalars = []
    for module_name, module in layer.named_modules():
        for attr, value in module.__dict__.items():
            if attr in _PER_LAYER or attr == "training" or attr.startswith("_"):
                continue
            if isinstance(value, _SCALARS) or isinstance(value, (tuple, list)) and all(isinstance(item, _SCALARS) for item in value):
                scalars.append((f"{module_name}.{attr}", str(value)))
    return (type(layer), params, buffers, tuple(sorted(scalars)))


class Template:
    """One layer module that becomes any layer of its kind by binding.

    Binding replaces entries of the modules' parameter tables; nothing is copied, and a graph made under one binding
    keeps the parameters it was made with.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.module = copy.deepcopy(layer)
        self._params = [(m, attr, f"{name}.{attr}".lstrip(".")) for name, m in self.module.named_modules() for attr in m._parameters]
        self._params = [item for item in self._params if item[0]._parameters[item[1]] is not None]
        self._buffers = [(m, attr, f"{name}.{attr}".lstrip(".")) for name, m in self.module.named_modules() for attr in m._buffers]
        self._buffers = [item for item in self._buffers if item[0]._buffers[item[1]] is not None]
        self._numbered = [(m, attr) for m in self.module.modules() for attr in _PER_LAYER if attr in m.__dict__]

    def bind(self, views: Mapping[str, torch.Tensor], layer_index: int) -> nn.Module:
        """The module as layer `layer_index` with these parameters and buffers, by name inside the layer."""
        for module, attr, name in self._params:
            module._parameters[attr] = views[name]  # type: ignore[assignment]
        for module, attr, name in self._buffers:
            module._buffers[attr] = views[name]
        for module, attr in self._numbered:
            module.__dict__[attr] = layer_index
        return self.module
