"""Skeleton: a transformers causal LM without weights, cut into blocks.

The model's class is built with parameters on the meta device and real buffers; its decoder layers are replaced by stubs.
The model's own forward, run with stubs, says what every layer is called with (masks, rotary tables, per-layer inputs) and
turns final hidden states into logits, so embedding scale, soft-caps and multipliers are the model's own code.
What this cannot describe is refused by name. T: tokens, D: hidden size, V: vocabulary.
"""

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from megatrain.errors import UnsupportedModelError
from megatrain.models.attention import LARGEST_HEAD, PACKED, LayerSeen, document_boundaries, recording_with, watching_layers
from megatrain.models.blocks import BlockLayout, lay_out
from megatrain.models.meta import build_meta_model
from megatrain.models.template import LayerCall, kind_key
from megatrain.models.weights import kept_in_fp32


@dataclass
class Recording:
    """One run of the model's forward up to the last layer."""

    hidden: torch.Tensor  # [P, S, D] input of layer 0
    calls: list[LayerCall] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, int | None]] = field(default_factory=list)  # of packed attention: (boundaries, window)


class _NotPackedError(Exception):
    """The model's attention is more than documents and a window."""


class _Recorded(Exception):
    """Raised by the last stub: everything that the layers need is known."""


class _Stub(nn.Module):
    """Stands in a layer's place; attributes it lacks are the real layer's (the model's forward reads some)."""

    def __init__(self, index: int, real: nn.Module, skeleton: "Skeleton") -> None:
        super().__init__()
        self.index = index
        self.__dict__["real"] = real
        self.__dict__["skeleton"] = skeleton

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["real"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["skeleton"]._stub_called(self.index, args, kwargs)


def find_layers(model: PreTrainedModel) -> str:
    """Dotted name of the ModuleList of decoder layers."""
    found = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0 and all(isinstance(item, GradientCheckpointingLayer) for item in module)
    }
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__}: no list of decoder layers was found in it.")
    longest = max(found, key=lambda name: found[name])
    others = [name for name in found if name != longest and not name.startswith(longest + ".")]
    if others:
        raise UnsupportedModelError(f"{type(model).__name__}: more than one stack of layers ({', '.join([longest, *others])}).")
    return longest


class Skeleton:
    """A causal LM as blocks: embedding (block 0), decoder layers, head (last).

    `layouts[b]` places block b's parameters. `layers` are the real layer modules on meta, from which templates are made.
    """

    def __init__(self, config: PretrainedConfig, compute_dtype: torch.dtype) -> None:
        self.compute_dtype = compute_dtype
        try:
            self._cut(build_meta_model(config, compute_dtype, packed=True))
        except _NotPackedError:
            self._cut(build_meta_model(config, compute_dtype))

    def _cut(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = self.model.config
        self.packed = self.config._attn_implementation == PACKED  # layers get boundaries of documents, not masks
        self.layer_path = find_layers(self.model)
        parent_path, _, self._list_name = self.layer_path.rpartition(".")
        self._parent = self.model.get_submodule(parent_path)
        self.layers: list[nn.Module] = list(getattr(self._parent, self._list_name))
        self._recording: Recording | None = None
        self._final_hidden: torch.Tensor | None = None
        self._returns_tuple = False
        self._own_masks = "no"  # no: the model derives them from positions; one mask; or one per layer type
        self._refuse_sharing_layers()
        self._names = {id(p): name for name, p in self.model.named_parameters()}  # first name of each parameter
        self._outer: list[tuple[nn.Module, str, str]] = []  # (module, attribute, canonical name), each registration
        for module_name, module in self.model.named_modules():
            if not f"{module_name}.".startswith(f"{self.layer_path}."):
                self._outer += [(module, attr, self._names[id(p)]) for attr, p in module._parameters.items() if p is not None]
        self._meta_params = dict(self.model.named_parameters())
        setattr(self._parent, self._list_name, nn.ModuleList([_Stub(i, layer, self) for i, layer in enumerate(self.layers)]))
        self._accepts_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        self._zero_outer(torch.device("cpu"))
        self.embed_names, self.head_names = self._split_outer()
        self.tied = bool(set(self.embed_names) & set(self.head_names))
        self.layouts = self._lay_out_blocks()

    # -- structure

    def _refuse_sharing_layers(self) -> None:
        owners: dict[int, int] = {}
        for index, layer in enumerate(self.layers):
            for name, param in layer.named_parameters():
                if owners.setdefault(id(param), index) != index:
                    raise UnsupportedModelError(f"{type(self.model).__name__}: layers {owners[id(param)]} and {index} share {name}.")

    def _split_outer(self) -> tuple[list[str], list[str]]:
        """Names of the outer parameters that the layers' inputs, and that the logits, depend on."""
        output = self.model.get_output_embeddings()
        with torch.enable_grad():
            self._zero_outer(torch.device("cpu"), requires_grad=True)
            recorded = self._trial_recording()
            before = self._reached([recorded.hidden, *_tensors([(c.args, c.kwargs) for c in recorded.calls])])
            for attr, param in dict(output._parameters).items() if output is not None else ():
                if param is not None:  # a few rows stand for the vocabulary: the graph is the same
                    few = torch.zeros(1, dtype=param.dtype).expand(8, *param.shape[1:])
                    output._parameters[attr] = nn.Parameter(few, requires_grad=True)
            after = self._reached([self.logits(recorded.hidden.detach()[:, :1].requires_grad_())])
        self._zero_outer(torch.device("cpu"))
        order = dict.fromkeys(name for _, _, name in self._outer)
        lost = [name for name in order if name not in before and name not in after]
        if lost:
            raise UnsupportedModelError(f"{type(self.model).__name__}: parameters {', '.join(lost[:4])} take part in nothing.")
        return [name for name in order if name in before], [name for name in order if name in after]

    def _reached(self, roots: list[torch.Tensor]) -> set[str]:
        """Canonical names of the outer parameters in the autograd graph behind `roots`."""
        names = {id(module._parameters[attr]): name for module, attr, name in self._outer}
        seen: set[Any] = set()
        stack = [root.grad_fn for root in roots if root.grad_fn is not None]
        reached: set[str] = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable") and id(node.variable) in names:
                reached.add(names[id(node.variable)])
            stack += [parent for parent, _ in node.next_functions]
        return reached

    def _trial_recording(self) -> Recording:
        """Record a pack of two documents; finds out what this model's layers return and how it takes documents apart."""
        ids, positions = torch.zeros(1, 4, dtype=torch.long), torch.tensor([[0, 1, 0, 1]])
        own_masks = ("no",) if self.packed else ("no", "per layer type", "one")
        for self._returns_tuple, self._own_masks in itertools.product((False, True), own_masks):
            try:
                recording = self.record(ids, positions)
            except (AttributeError, TypeError, IndexError, ValueError, RuntimeError, KeyError, NotImplementedError):
                continue
            if self.packed and self._attends_in_documents(recording):
                return recording
            if not self.packed and all(_keeps_documents_apart(call) for call in recording.calls):
                return recording
        if self.packed:
            raise _NotPackedError
        raise UnsupportedModelError(
            f"{type(self.model).__name__}: its layers are not called once each, in order, on hidden states,"
            " or attention would cross the documents of a pack."
        )

    def _attends_in_documents(self, recording: Recording) -> bool:
        """Whether a layer of every kind gives its attention the mask that it got, the window that this mask means, and no more."""
        windows = {id(mask): window for mask, window in recording.masks}
        for layer, call in {kind_key(layer): (layer, call) for layer, call in zip(self.layers, recording.calls, strict=True)}.values():
            args, kwargs = _on_meta(call.with_hidden(recording.hidden), windows)
            with watching_layers() as seen, contextlib.suppress(LayerSeen, RuntimeError, TypeError, NotImplementedError):
                layer(*args, **kwargs)
            if len(seen) != 1 or windows.get(id(seen[0].mask), -1) != seen[0].window:
                return False
            if seen[0].more or seen[0].value_size > seen[0].head_size:
                return False
            if seen[0].head_size > LARGEST_HEAD or seen[0].head_size % 8:
                return False
        return True

    def _lay_out_blocks(self) -> list[BlockLayout]:
        params = self._meta_params
        buffers = dict(self.model.named_buffers())
        persistent = frozenset(self.model.state_dict().keys())
        fp32 = frozenset(name for name in params if kept_in_fp32(self.model, name))
        decay = frozenset(n for n, p in params.items() if p.ndim >= 2 and "bias" not in n and n not in self._embedding_names())
        prefix = self.layer_path + "."
        blocks: list[tuple[str, str, list[str], dict[str, torch.Tensor]]] = [("embed", "embed", self.embed_names, {})]
        kinds: dict[Any, str] = {}
        for index, layer in enumerate(self.layers):
            own = f"{prefix}{index}."
            kind = kinds.setdefault(kind_key(layer), f"layer{len(kinds)}")
            layer_buffers = {own + name: buffer for name, buffer in layer.named_buffers()}
            blocks.append((f"layer{index:03d}", kind, [own + name for name, _ in layer.named_parameters()], layer_buffers))
            persistent |= {own + name for name in layer.state_dict()}
            buffers |= layer_buffers
        blocks.append(("head", "head", [name for name in self.head_names if name not in self.embed_names], {}))
        return [
            lay_out(name, kind, {n: params[n] for n in names}, own, self.compute_dtype, fp32, decay, persistent)
            for name, kind, names, own in blocks
        ]

    def _embedding_names(self) -> set[str]:
        return {self._names_of(module)[0] for module in self.model.modules() if isinstance(module, nn.Embedding)}

    def _names_of(self, module: nn.Module) -> list[str]:
        return [name for owner, _, name in self._outer if owner is module] or [""]

    # -- binding of the outer parameters

    def _zero_outer(self, device: torch.device, requires_grad: bool = False) -> None:
        """Bind every outer parameter to zeros of its shape that take no memory."""
        made: dict[str, nn.Parameter] = {}
        for module, attr, name in self._outer:
            meta = self._meta_params[name]
            if name not in made:
                zero = torch.zeros(1, dtype=meta.dtype, device=device)
                made[name] = nn.Parameter(zero.expand(meta.shape), requires_grad=requires_grad)
            module._parameters[attr] = made[name]

    def move_buffers(self, device: torch.device) -> None:
        """Move the buffers outside the layers, and the zeros that stand for unbound parameters, to `device`."""
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        self._zero_outer(device)

    @contextlib.contextmanager
    def bound(self, params: Mapping[str, nn.Parameter], head: bool) -> Iterator[None]:
        """Inside, the embedding side (or, with `head`, the head side) of the model has these parameters.

        A tied weight is bound only on the side that is asked for: the other side sees zeros and costs nothing.
        """
        output = self.model.get_output_embeddings()
        changed: list[tuple[nn.Module, str, Any]] = []
        shared = set(self.embed_names) & set(self.head_names)
        for module, attr, name in self._outer:
            if name in params and not (name in shared and (module is output) != head):
                changed.append((module, attr, module._parameters[attr]))
                module._parameters[attr] = params[name]
        try:
            yield
        finally:
            for module, attr, value in changed:
                module._parameters[attr] = value

    # -- the model's own forward

    def _stub_called(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keyword = None if args else next(iter(kwargs))
        hidden = args[0] if args else kwargs[keyword]
        if self._final_hidden is not None:
            return self._packed(self._final_hidden if index == len(self.layers) - 1 else hidden)
        recording = self._recording
        if recording is None or not torch.is_tensor(hidden) or hidden.ndim != 3 or index != len(recording.calls):
            raise ValueError(f"layer {index} is not called on the hidden states in order")
        if index == 0:
            recording.hidden = hidden
        elif hidden.shape != recording.hidden.shape:
            raise ValueError("the layers of this model return another structure")
        rest = {name: value for name, value in kwargs.items() if name != keyword} if keyword else dict(kwargs)
        recording.calls.append(LayerCall(args[1:], rest, keyword))
        if index == len(self.layers) - 1:
            raise _Recorded
        return self._packed(hidden)

    def _packed(self, hidden: torch.Tensor) -> Any:
        return (hidden, None) if self._returns_tuple else hidden

    def record(self, input_ids: torch.Tensor, position_ids: torch.Tensor, boundaries: torch.Tensor | None = None) -> Recording:
        """Run the model up to its layers. input_ids, position_ids: [P, S] int64 on the buffers' device.

        Documents in a row are told apart by positions that restart; `boundaries` says the same (see
        `attention.document_boundaries`), and is read off the positions when it is missing. Uses the bound embedding parameters.
        """
        if self.packed:
            if boundaries is None:
                boundaries = torch.from_numpy(document_boundaries(position_ids.cpu().numpy())).to(position_ids.device)
            with recording_with(boundaries) as masks:
                recording = self._record(input_ids, position_ids)
            recording.masks = masks
            return recording
        return self._record(input_ids, position_ids)

    def _record(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Recording:
        self._recording = Recording(hidden=input_ids)
        inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if self._accepts_positions:
            inputs["position_ids"] = position_ids
        if self._own_masks != "no":
            inputs["attention_mask"] = self._masks(position_ids)
        try:
            self.model(**inputs)
        except _Recorded:
            return self._recording
        finally:
            self._recording = None
        raise UnsupportedModelError(f"{type(self.model).__name__}: its forward does not reach the last layer.")

    def _masks(self, position_ids: torch.Tensor) -> Any:
        """Masks for a model whose forward does not derive them from restarting positions."""
        if self._own_masks == "one":
            return document_mask(position_ids, None, self.compute_dtype)
        window = self.config.sliding_window
        windows = {"full_attention": None, "sliding_attention": window}
        return {kind: document_mask(position_ids, windows[kind], self.compute_dtype) for kind in set(self.config.layer_types)}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, T, D] final hidden states -> [T, V] logits by the model's own norm, head and scaling.

        Every row is handed over as a sequence of its own: what follows the layers works row by row.
        """
        rows = hidden.reshape(-1, 1, hidden.shape[-1])
        ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=hidden.device)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self._accepts_positions:
            inputs["position_ids"] = ids
        self._final_hidden = rows
        try:
            with recording_with(ids):  # nothing attends here: any tensor will do
                return self.model(**inputs).logits.squeeze(1)  # a view backwards too: an index would copy all logits
        finally:
            self._final_hidden = None


def document_mask(position_ids: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[P, 1, S, S], added to attention scores: 0 where a query may see a key of its own document, else the lowest number.

    position_ids: [P, S], restarting at 0 with each document. window: tokens that a query sees, itself included.
    """
    document = (position_ids == 0).cumsum(-1)
    place = torch.arange(position_ids.shape[1], device=position_ids.device)
    distance = place[:, None] - place[None, :]
    seen = (document[:, :, None] == document[:, None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def _keeps_documents_apart(call: LayerCall) -> bool:
    """Whether the recorded masks of two documents of two tokens hide the first from the second."""
    masks = [m for m in _tensors((call.args, call.kwargs)) if m.ndim == 4 and m.shape[-2:] == (4, 4)]
    across = [mask[..., 2, 1] for mask in masks]
    return bool(across) and all(bool((~a).all() if a.dtype == torch.bool else (a < -1e4).all()) for a in across)


def _on_meta(value: Any, but: Mapping[int, Any]) -> Any:
    """`value` with its tensors, however nested, on the meta device, those with an id in `but` left alone."""
    if torch.is_tensor(value):
        return value if id(value) in but else value.to("meta")
    if isinstance(value, dict):
        return {key: _on_meta(item, but) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_on_meta(item, but) for item in value)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor inside nested tuples, lists and dicts."""
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
