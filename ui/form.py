"""RunConfig <-> widgets, both made from the options' own metadata (label, help, unit, limits, choices).

A `Form` owns one widget per option. Pages place widgets with `place(key)`; `values` and `config` are the two directions,
over plain lists in the order of `options()`, which is also the order of `components` and thus of a handler's arguments.
"""

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from megatrain.config import RunConfig, options
from megatrain.errors import ConfigError
from ui.words import section, text

OPTIONS = options()
KEYS = tuple(OPTIONS)
# What people paste from the browser: https://huggingface.co/datasets/owner/name/tree/main -> owner/name
HUB_ADDRESS = re.compile(r"^https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([^/?#\s]+/[^/?#\s]+)(?:[/?#].*)?$")

GROUPED = re.compile(r"\d{1,3}(,\d{3})+")


def value_type(item: dataclasses.Field) -> tuple[type, bool]:
    """The plain type of an option, and whether it may be empty."""
    allowed = typing.get_args(item.type) if isinstance(item.type, types.UnionType) else (item.type,)
    return next(kind for kind in allowed if kind is not type(None)), type(None) in allowed


def info(item: dataclasses.Field) -> str:
    """The help of an option with its limits, as the widget shows it."""
    low, high = item.metadata.get("min"), item.metadata.get("max")
    kind, _ = value_type(item)
    limits = ""
    if kind in (int, float) and low is not None and high is not None:
        limits = text("form.between", low=plain(low), high=plain(high))
    elif kind in (int, float) and low:
        limits = text("form.at_least", low=plain(low))
    return f"{item.metadata['help']} {limits}".rstrip()


def label(key: str) -> str:
    """The label of an option, with its unit."""
    metadata = OPTIONS[key].metadata
    return f"{metadata['label']} ({metadata['unit']})" if "unit" in metadata else metadata["label"]


def plain(number: float) -> str:
    """A limit or default as people write it: 1048576 -> 1,048,576; 1e-08 stays."""
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def widget(key: str, **overrides: Any) -> gr.components.Component:
    """A new widget for one option, holding its default. `overrides` go to the component.

    Numbers are text fields: gr.Number turns an empty value into 0 when it appears, and shows 1e-5 as 0.00001. Limits are
    ours to report, all at once.
    """
    item = OPTIONS[key]
    kind, optional = value_type(item)
    common = {"label": label(key), "info": info(item), "value": shown(key, item.default), "interactive": True, **overrides}
    if "choices" in overrides:
        return gr.Dropdown(**common)
    if "choices" in item.metadata:
        names = [(text(f"choice.{key}.{choice}"), choice) for choice in item.metadata["choices"]]
        return gr.Dropdown(choices=names, **common)
    if kind is bool:
        return gr.Checkbox(**common)
    if kind in (int, float):
        common = {"placeholder": section("form").get(f"empty.{key}", text("form.planned")) if optional else "", **common}
    return gr.Textbox(max_lines=1, max_length=4096, **common)


def shown(key: str, value: Any) -> Any:
    """An option's value as its widget holds it: numbers as the shortest text that reads back equal, None as empty text."""
    kind, _ = value_type(OPTIONS[key])
    if value is None:
        return ""
    if kind in (int, float) and isinstance(value, int | float):
        mantissa, mark, exponent = repr(value).partition("e")
        return mantissa.removesuffix(".0") + (f"e{int(exponent)}" if mark else "")
    return value


class Form:
    """The widgets of one page, for `keys`. Each is placed exactly once; `components` refuses a form that is not whole.

    `prefix` begins the elements' ids, which are unique through all pages.
    """

    def __init__(self, keys: Sequence[str] = KEYS, prefix: str = "option") -> None:
        self.keys, self._prefix = tuple(keys), prefix
        self._placed: dict[str, gr.components.Component] = {}

    def place(self, key: str, **overrides: Any) -> gr.components.Component:
        """Create the widget of `key` here, in the current Gradio context."""
        if key in self._placed:
            raise ValueError(f"{key} is already in the form")
        self._placed[key] = widget(key, **{"elem_id": f"{self._prefix}-{key.replace('.', '-')}", **overrides})
        return self._placed[key]

    def __getitem__(self, key: str) -> gr.components.Component:
        return self._placed[key]

    @property
    def components(self) -> list[gr.components.Component]:
        """All widgets in the order of `keys`."""
        missing = [key for key in self.keys if key not in self._placed]
        if missing:
            raise ValueError(f"the form lacks {', '.join(missing)}")
        return [self._placed[key] for key in self.keys]

    def of(self, raw: Sequence[Any]) -> list[Any]:
        """What this form's widgets show of values for all KEYS."""
        shown = dict(zip(KEYS, raw, strict=True))
        return [shown[key] for key in self.keys]

    def spread(self, own: Sequence[Any], raw: Sequence[Any]) -> list[Any]:
        """`raw` for all KEYS with this form's values in it."""
        changed = dict(zip(self.keys, own, strict=True))
        return [changed.get(key, value) for key, value in zip(KEYS, raw, strict=True)]


def values(config: RunConfig) -> list[Any]:
    """What the widgets show for `config`, in the order of KEYS."""
    return [shown(key, at(config, key)) for key in KEYS]


def config(raw: Sequence[Any]) -> RunConfig:
    """The configuration that the widgets hold. ConfigError lists every problem, by key."""
    nested, problems = nest(raw)
    try:
        made = RunConfig.from_dict(nested)
    except ConfigError as error:
        known = {key for key, _ in problems}
        raise ConfigError(problems + [problem for problem in error.problems if problem[0] not in known]) from error
    if problems:
        raise ConfigError(problems)
    return made


def nest(raw: Sequence[Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Widget values as the mapping that RunConfig.from_dict reads, without the empty fields that must not be empty.

    Those are returned as problems (key, text). A number without a fraction becomes an int where an int is wanted.
    """
    if len(raw) != len(KEYS):
        raise ConfigError([("form", f"{len(raw)} values came where {len(KEYS)} are needed")], text("form.reload"))
    nested: dict[str, Any] = {}
    problems = []
    for key, value in zip(KEYS, raw, strict=True):
        found = cleaned(key, value)
        if found is None and not value_type(OPTIONS[key])[1]:
            problems.append((key, text("form.empty")))
            continue
        place = nested
        *sections, name = key.split(".")
        for part in sections:
            place = place.setdefault(part, {})
        place[name] = found
    return nested, problems


def tidy(raw: Sequence[Any]) -> list[Any]:
    """Widget values as they are understood: without surrounding space, an address of the hub as its id."""
    return [shown(key, cleaned(key, value)) for key, value in zip(KEYS, raw, strict=True)]


def with_value(raw: Sequence[Any], key: Any, value: Any) -> list[Any]:
    """`raw` with one option set; unchanged when `key` is no option or `value` is impossible for it."""
    if not isinstance(key, str) or key not in OPTIONS or _showable(key, value) != value:
        return list(raw)
    return [shown(key, value) if key == name else old for name, old in zip(KEYS, raw, strict=True)]


def lenient(nested: Any) -> list[Any]:
    """Widget values from a mapping that may be incomplete or wrong (a draft): what cannot be shown becomes the default."""
    return [shown(key, _showable(key, _lookup(nested, key))) for key in KEYS]


def at(config: RunConfig, key: str) -> Any:
    """The value of a dotted key."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def changed(config: RunConfig) -> list[str]:
    """Keys whose value is not the default."""
    return [key for key in KEYS if at(config, key) != OPTIONS[key].default]


def cleaned(key: str, value: Any) -> Any:
    """One widget's value as the configuration has it: no space around text, numbers read, empty as None where nothing is meant.

    What is no number stays text, so that the configuration says what is wrong with it.
    """
    kind, optional = value_type(OPTIONS[key])
    if isinstance(value, str):
        value = value.strip()
        if key in ("model.path", "data.path"):
            return HUB_ADDRESS.sub(r"\1", value)
        if kind in (int, float):
            value = _number(value)
        if value == "" and (optional or kind in (int, float)):
            return None
    if kind is int and isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


def _number(written: str) -> Any:
    """`4096`, `4,096`, `1e-5`, `0.5`; other text as it is."""
    if GROUPED.fullmatch(written):
        written = written.replace(",", "")
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(written)
    return written


def _lookup(nested: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(nested, Mapping) or name not in nested:
            return OPTIONS[key].default
        nested = nested[name]
    return nested


def _showable(key: str, value: Any) -> Any:
    kind, optional = value_type(OPTIONS[key])
    choices = OPTIONS[key].metadata.get("choices")
    if value is None:
        return None if optional else OPTIONS[key].default
    wanted = (int, float, str) if kind in (int, float) else (kind,)  # a number may have been left half-written
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        return OPTIONS[key].default
    return value if not choices or value in choices else OPTIONS[key].default
