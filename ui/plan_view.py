"""Outlook -> HTML: the plan panel, the precision table, the map of where everything lives. Pure; every value is escaped."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from megatrain.plan import Kind, Plan, Predicted
from megatrain.precision import PRECISIONS
from megatrain.units import format_bytes, format_count, format_duration, three_digits
from ui.planning import Fit, Outlook, field_name
from ui.view import NOTHING
from ui.words import text

PARTS = ("weights", "masters", "grads", "moments", "activations", "buffers", "context", "checkpoints")


@dataclass(frozen=True)
class Bar:
    """One kind of memory: what the run needs of it, by parts, against what it may take."""

    name: str
    total: int
    others: int  # held by other programs
    reserve: int  # free, and left so
    limit: int  # what the run may take
    need: int
    parts: Mapping[str, int]

    @property
    def excess(self) -> int:
        return max(0, self.need - self.limit)


def bars(predicted: Predicted, outlook: Outlook) -> list[Bar]:
    """VRAM (when the plan uses a card), RAM and disk."""
    machine, budget = outlook.machine, outlook.budget
    assert budget is not None
    found = []
    gpu = machine.gpu(budget.device)
    if gpu is not None:
        others = gpu.total_bytes - gpu.free_bytes
        reserve, limit = budget.vram_reserve_bytes, budget.vram_bytes
        found.append(Bar("vram", gpu.total_bytes, others, reserve, limit, predicted.vram_bytes, predicted.vram_parts))
    total, others = machine.ram_total_bytes, machine.ram_total_bytes - machine.ram_available_bytes
    found.append(Bar("ram", total, others, budget.ram_reserve_bytes, budget.ram_bytes, predicted.ram_bytes, predicted.ram_parts))
    parts = {**predicted.disk_parts, "checkpoints": outlook.checkpoints_bytes}
    free = machine.disk_free_bytes  # of a large disk the rest would hide the run's share
    found.append(Bar("disk", free, 0, 0, free, predicted.disk_bytes + outlook.checkpoints_bytes, parts))
    return found


def panel(outlook: Outlook) -> str:
    """The whole plan panel."""
    tone, head, sentence = _verdict(outlook)
    body = ""
    need = outlook.fit.need if outlook.fit else None
    if need is not None and outlook.fit is not None:
        body += "".join(map(_bar, bars(need, outlook)))
        body += _suggestions(outlook)
        body += _figures(need, outlook.num_steps) if outlook.fit.plan else ""
    elif outlook.pending:
        body = '<div class="skeleton"></div>' * 3
    return (
        f'<div class="plan {tone}" role="status"><button type="button" class="plan-head" data-toggle aria-expanded="false">'
        f'<span class="dot"></span><span class="plan-title">{escape(head)}</span></button>'
        f'<div class="plan-body"><p class="plan-text">{escape(sentence)}</p>{body}</div></div>'
    )


def precisions(fits: list[Fit], chosen: str) -> str:
    """A table of the precisions: what each keeps, needs and reaches here; what does not fit is grey and says why."""
    names = ("precision", "kept", "vram", "ram", "speed", "fits")
    head = "".join(f'<th scope="col">{escape(text(f"plan.column_{name}"))}</th>' for name in names)
    found = {fit.precision: fit for fit in fits}
    rows = "".join(_precision_row(name, found.get(name), name == chosen) for name in PRECISIONS)
    return f'<div class="scroll"><table class="grid"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def places(plan: Plan | None) -> str:
    """Where weights, masters, gradients and moments live: one row a kind, one column a tier."""
    if plan is None:
        return f'<p class="quiet">{escape(text("plan.places_unknown"))}</p>'
    parts = {"vram": plan.predicted.vram_parts, "ram": plan.predicted.ram_parts, "disk": plan.predicted.disk_parts}
    tiers = [tier for tier in parts if tier == "ram" or any(parts[tier].get(kind) for kind in Kind)]
    head = "".join(f'<th scope="col">{escape(text(f"plan.{tier}"))}</th>' for tier in tiers)
    most = max([parts[tier].get(kind, 0) for tier in tiers for kind in Kind] + [1])
    rows = ""
    for kind in Kind:
        cells = "".join(_place(kind, parts[tier].get(kind, 0), most) for tier in tiers)
        rows += f'<tr><th scope="row">{_swatch(kind)}{escape(text(f"plan.part_{kind}"))}</th>{cells}</tr>'
    return f'<table class="grid places"><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _verdict(outlook: Outlook) -> tuple[str, str, str]:
    """Tone, title and sentence of the panel."""
    if outlook.config is None:
        lines = "; ".join(f"{field_name(key)}: {problem}" for key, problem in outlook.problems)
        return "bad", text("plan.invalid"), lines
    if outlook.model.error is not None:
        return "bad", text("plan.no_model"), str(outlook.model.error)
    if outlook.fit is None:
        found = "reading" if outlook.pending else "empty"
        return "wait", text(f"plan.{found}"), text(f"plan.{found}_text")
    if outlook.fit.refusal is not None:
        missing = outlook.fit.missing_bytes
        parts = [text("plan.too_much", size=format_bytes(size), tier=text(f"plan.{tier}")) for tier, size in missing.items()]
        return "bad", text("plan.no_fit_by", parts=text("plan.and").join(parts)) if parts else text("plan.no_fit"), str(outlook.fit.refusal)
    assert outlook.fit.plan is not None
    plan = outlook.fit.plan
    on_cpu = text("plan.on_cpu_disk" if plan.predicted.disk_bytes else "plan.on_cpu")
    device = on_cpu if plan.device == "cpu" else text("plan.on_gpu", device=_device_name(outlook))
    return "good", text("plan.fits"), device


def _device_name(outlook: Outlook) -> str:
    assert outlook.fit is not None
    assert outlook.fit.plan is not None
    gpu = outlook.machine.gpu(outlook.fit.plan.device)
    return outlook.fit.plan.device if gpu is None else gpu.name


def _bar(bar: Bar) -> str:
    scale = max(bar.total, bar.others + bar.need, 1)

    def share(size: int) -> str:
        return f"{100 * size / scale:.3f}%"

    parts = [(name, size) for name, size in bar.parts.items() if size > 0]
    track = f'<i class="part-others" style="width:{share(bar.others)}"></i>' if bar.others else ""
    track += "".join(f'<i class="part-{escape(name)}" style="width:{share(size)}"></i>' for name, size in parts)
    track += f'<b style="left:{share(min(scale, bar.others + bar.limit))}"></b>'
    legend = "".join(f"<li>{_swatch(name)}{escape(_part_name(name))} <span>{format_bytes(size)}</span></li>" for name, size in parts)
    for name, size in (("others", bar.others), ("reserve", bar.reserve)):
        legend += f'<li>{_swatch(name)}{escape(text(f"plan.{name}"))} <span>{format_bytes(size)}</span></li>' if size > 0 else ""
    words = text("plan.need", need=format_bytes(bar.need), limit=format_bytes(bar.limit))
    over = f" <em>{escape(text('plan.excess', size=format_bytes(bar.excess)))}</em>" if bar.excess else ""
    name = text(f"plan.{bar.name}")
    return (
        f'<section class="bar{" over" if bar.excess else ""}"><h4>{escape(name)}<span>{escape(words)}{over}</span></h4>'
        f'<div class="track" role="img" aria-label="{escape(f"{name}: {words}")}">{track}</div><ul class="legend">{legend}</ul></section>'
    )


def _figures(predicted: Predicted, num_steps: int | None) -> str:
    rows = [
        ("speed", _speed(predicted)),
        ("step", _seconds(predicted.step_s)),
        ("total", _total(predicted, num_steps)),
        ("bottleneck", text(f"plan.bottleneck_{predicted.bottleneck}") if predicted.bottleneck else ""),
    ]
    cells = "".join(f"<dt>{escape(text(f'plan.{name}'))}</dt><dd>{escape(words or text('plan.unknown'))}</dd>" for name, words in rows)
    return f'<dl class="figures">{cells}</dl>'


def _speed(predicted: Predicted) -> str:
    return text("plan.tokens_per_s", number=three_digits(predicted.tokens_per_s)) if predicted.tokens_per_s else ""


def _total(predicted: Predicted, num_steps: int | None) -> str:
    if not num_steps or not predicted.step_s:
        return ""
    return text("plan.total_of", time=format_duration(predicted.step_s * num_steps), steps=format_count(num_steps))


def _seconds(seconds: float) -> str:
    if not seconds:
        return ""
    return f"{three_digits(seconds)} s" if seconds < 60 else format_duration(seconds)


def _suggestions(outlook: Outlook) -> str:
    if outlook.fit is None or outlook.fit.plan is not None:
        return ""
    if not outlook.suggestions:
        return f'<p class="plan-text">{escape(text("plan.no_suggestion"))}</p>'
    buttons = ""
    for item in outlook.suggestions:
        price = f"<span>{escape(_speed(item.plan.predicted))}</span>"
        change = escape(json.dumps({"key": item.key, "value": item.value}), quote=True)
        buttons += f'<button type="button" class="suggestion" data-apply="{change}">{escape(item.text)}{price}</button>'
    return f'<div class="suggestions"><h4>{escape(text("plan.what_fits"))}</h4>{buttons}</div>'


def _precision_row(name: str, fit: Fit | None, chosen: bool) -> str:
    row = PRECISIONS[name]
    predicted = fit.need if fit else None
    fits = fit is not None and fit.plan is not None
    why = text("plan.yes") if fits else str(fit.refusal.message) if fit and fit.refusal else NOTHING
    cells = [
        text("plan.bytes_per_parameter", number=row.kept_bytes),
        format_bytes(predicted.vram_bytes) if predicted and predicted.vram_bytes else NOTHING,
        format_bytes(predicted.ram_bytes) if predicted else NOTHING,
        (_speed(predicted) if predicted else "") or NOTHING,
        why,
    ]
    mark = f' <span class="chosen">{escape(text("plan.chosen"))}</span>' if chosen else ""
    head = f'<th scope="row">{escape(name)}{mark}<small>{escape(row.summary)}</small></th>'
    grey = "" if fits or fit is None else ' class="grey"'
    return f"<tr{grey}>{head}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _place(kind: str, size: int, most: int) -> str:
    if not size:
        return f'<td class="none">{NOTHING}</td>'
    return f'<td><i class="part-{kind}" style="width:{100 * size / most:.2f}%"></i><span>{format_bytes(size)}</span></td>'


def _swatch(name: str) -> str:
    return f'<i class="swatch part-{escape(name)}"></i>'


def _part_name(name: str) -> str:
    return text(f"plan.part_{name}") if name in PARTS else name
