"""Models of transformers without weights: parameters on the meta device, buffers real.

Buffers hold tables that no file contains, so they are what the model's own code makes of them.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatrain.errors import UnsupportedModelError
from megatrain.models.attention import PACKED
from megatrain.models.weights import kept_in_fp32


class _LargeOnMeta(TorchFunctionMode):
    """Tensors that only a parameter can be as large as are made on meta at once, not allocated first."""

    _FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
    _LIMIT = 1 << 22  # elements; tables in buffers are smaller

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._FACTORIES and kwargs.get("device") is None:
            size = args[0] if args and not isinstance(args[0], int) else args or kwargs.get("size", ())
            if math.prod(size) > self._LIMIT:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built inside have meta parameters and real buffers (buffers hold tables that no file contains)."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def build_meta_model(config: PretrainedConfig, dtype: torch.dtype, packed: bool = False) -> PreTrainedModel:
    """The causal LM of `config` with meta parameters and real CPU buffers, in training mode, attention as it supports it.

    packed: attention over packed documents (see `attention`) where transformers says that the model could do it.

    `config` is not changed. UnsupportedModelError when transformers has no causal LM for it.
    """
    config = copy.deepcopy(config)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(
            f"transformers has no causal language model for type {config.model_type!r}.", "Choose a text generation model."
        )
    with _parameters_on_meta():
        try:
            model = _from_config(config, dtype, packed)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as error:
            reason = " ".join(str(error).split())[:200]
            message = f"transformers cannot build this {config.model_type} model: {reason}"
            raise UnsupportedModelError(message, "Check config.json.") from error
    on_meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if on_meta:
        raise UnsupportedModelError(f"{type(model).__name__}: its buffer {on_meta[0]} is too large to be a table.")
    for name, buffer in model.state_dict(keep_vars=True).items():  # some releases build these in the compute dtype
        if not isinstance(buffer, nn.Parameter) and buffer.is_floating_point() and kept_in_fp32(model, name):
            owner, _, attr = name.rpartition(".")
            model.get_submodule(owner)._buffers[attr] = buffer.float()
    model.tie_weights()
    return model.train()


def _from_config(config: PretrainedConfig, dtype: torch.dtype, packed: bool) -> PreTrainedModel:
    if packed:
        with contextlib.suppress(ValueError, KeyError, ImportError):  # some models look attention up among those of their own
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=PACKED)
            if model._supports_flash_attn and not _beyond_sdpa(model):
                return model
    try:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa")
    except (ValueError, ImportError):  # transformers refuses SDPA where it lacks something the model needs
        model = None
    if model is None or _beyond_sdpa(model):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="eager")
    return model


def _beyond_sdpa(model: PreTrainedModel) -> bool:
    """Whether attention needs what SDPA cannot do: a soft-cap on scores, or sinks. Some releases of transformers do not refuse."""
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return True
    return any(getattr(module, "attn_logit_softcapping", None) for module in model.modules() if module is not model)
