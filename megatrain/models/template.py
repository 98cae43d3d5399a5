"""Templates: one layer module per kind, whose parameters are views of the slot that a block was streamed to.

Layers share a template only if class, parameters, buffers and every scalar attribute agree: windows, rope kinds and
layer types live in attributes. A layer's backward is one function, recompute included: compiled as a whole, it never
computes again what only the layer's output needs (its last matrix product).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from megatrain.models.compiler import Compiler

_PER_LAYER = {"layer_idx", "layer_id", "layer_number"}  # numbers of a layer; set anew at every binding
_SCALARS = (int, float, str, bool, type(None))


@dataclass
class LayerCall:
    """What one layer is called with, hidden states left out. `args` are the positional ones after them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_keyword: str | None  # name under which the hidden states are passed; None: first positional

    def with_hidden(self, hidden: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments."""
        if self.hidden_keyword is None:
            return (hidden, *self.args), self.kwargs
        return self.args, {**self.kwargs, self.hidden_keyword: hidden}


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
    """Forward and backward of the layers of one kind. `views`: a layer's parameters and buffers by name inside it."""

    def __init__(self, layer: nn.Module, compiler: Compiler) -> None:
        self.module = copy.deepcopy(layer)
        self._numbered = [(module, attr) for module in self.module.modules() for attr in _PER_LAYER if attr in module.__dict__]
        self._forward: Callable[..., torch.Tensor] = _forward
        self._backward: Callable[..., Sequence[torch.Tensor | None]] = _backward
        if compiler.enabled and not draws_noise(layer):  # compiled kernels draw other noise in recompute than in forward
            self._forward = compiler.compiled(_forward, dynamic=False)
            self._backward = compiler.compiled(_backward, dynamic=False)

    def forward(self, views: Mapping[str, torch.Tensor], layer_index: int, call: LayerCall, hidden: torch.Tensor) -> torch.Tensor:
        """[P, S, D] output of layer `layer_index`, without gradient."""
        self._number(layer_index)
        return self._forward(self.module, dict(views), *call.with_hidden(hidden))

    def backward(
        self,
        views: Mapping[str, torch.Tensor],
        layer_index: int,
        call: LayerCall,
        hidden: torch.Tensor,
        others: Sequence[torch.Tensor],
        gradient: torch.Tensor,
    ) -> Sequence[torch.Tensor | None]:
        """Gradients of `hidden` and of `others` (leaves among views and arguments) for the output's gradient [P, S, D]."""
        self._number(layer_index)
        return self._backward(self.module, dict(views), *call.with_hidden(hidden), [hidden, *others], gradient)

    def _number(self, layer_index: int) -> None:
        for module, attr in self._numbered:
            module.__dict__[attr] = layer_index


def _forward(module: nn.Module, views: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return _output(functional_call(module, views, args, kwargs))


def _backward(
    module: nn.Module,
    views: dict[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: list[torch.Tensor],
    gradient: torch.Tensor,
) -> Sequence[torch.Tensor | None]:
    with torch.enable_grad():
        output = _output(functional_call(module, views, args, kwargs))
    return torch.autograd.grad(output, wanted, gradient, allow_unused=True)


def _output(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def draws_noise(layer: nn.Module) -> bool:
    """Whether a layer in training draws random numbers: some dropout in it is not zero."""
    return any(
        isinstance(value, float) and value > 0 and (name == "p" or "drop" in name)
        for module in layer.modules()
        for name, value in module.__dict__.items()
    )
