"""Outlook -> HTML for the cards: model facts, rows of the data, problems, the review before a start. Pure; all escaped."""

import shlex
from collections.abc import Iterable
from html import escape
from pathlib import Path

from megatrain.config import DEMO
from megatrain.units import format_bytes, format_count, format_duration
from ui.background import Answer
from ui.glance import Glance
from ui.planning import Outlook, field_name
from ui.words import text

LOOK_CHARACTERS = 600  # of one field of a row; the rest is cut with an ellipsis
HIGH_RATE = 1e-4  # above it, full fine-tuning of a pre-trained model usually forgets what it knew


def note(words: str, tone: str = "ok") -> str:
    """One line under a button."""
    return f'<p class="note mt-{tone}">{escape(words)}</p>' if words else ""


def refusal(words: str) -> str:
    """Why a start was refused."""
    return note(words, "bad")


def problem_list(problems: Iterable[tuple[str, str]], title: str) -> str:
    """Every problem of a configuration, by the key as it stands in the file, or by the field's name."""
    items = "".join(f"<li><code>{escape(key)}</code> {escape(words)}</li>" for key, words in problems)
    return f'<div class="note mt-bad" role="alert"><p>{escape(title)}</p><ul>{items}</ul></div>'


def facts(outlook: Outlook) -> str:
    """What is known of the model: architecture, size, context, head, chat template; or why it cannot be used."""
    if outlook.config is None or not outlook.config.model.path:
        return ""
    if outlook.model.error is not None:
        error = outlook.model.error
        return f'<div class="note mt-bad" role="alert"><p>{escape(error.message)}</p><p>{escape(error.hint)}</p></div>'
    model = outlook.model.value
    if model is None:
        return f'<div class="facts skeleton" aria-label="{escape(text("plan.reading"))}"></div>'
    shape = model.shape
    rows = [
        ("architecture", shape.architecture),
        ("parameters", text("new_run.parameters", number=format_count(shape.num_params), layers=len(shape.layers))),
        ("context", text("new_run.tokens", number=format_count(shape.max_positions)) if shape.max_positions else text("plan.unknown")),
        ("head", text("new_run.tied" if shape.tied_head else "new_run.untied")),
        ("template", text("new_run.template_yes" if model.chat_template else "new_run.template_no")),
    ]
    return _facts(rows)


def data_facts(answer: Answer[Glance] | None) -> str:
    """Format, rows and tokens of the data as far as a glance tells."""
    if answer is None:
        return ""
    if answer.error is not None:
        return f'<div class="note mt-bad" role="alert"><p>{escape(answer.error.message)}</p><p>{escape(answer.error.hint)}</p></div>'
    glance = answer.value
    if glance is None:
        return f'<div class="facts skeleton" aria-label="{escape(text("new_run.reading_rows"))}"></div>'
    rows = [("format", text(f"choice.data.format.{glance.format}")), ("columns", ", ".join(glance.columns))]
    if glance.num_rows:
        rows.append(("rows", format_count(glance.num_rows)))
    if glance.about_tokens:
        rows.append(("tokens", text("new_run.about_tokens", number=format_count(glance.about_tokens))))
    return _facts(rows)


def rows_view(answer: Answer[Glance] | None) -> str:
    """Five rows as they are read: who says what, or the text."""
    if answer is None or answer.error is not None or answer.value is None:
        return data_facts(answer)
    return f'<ol class="rows">{"".join(map(_row, answer.value.rows))}</ol>'


def review(outlook: Outlook) -> str:
    """What will be saved, what deserves a second look, and what is missing, in words."""
    lines = [(words, "idle") for words in (checkpoint_words(outlook),) if words]
    lines += [(words, "warn") for words in warnings(outlook)]
    found = "".join(note(words, tone) for words, tone in lines)
    if outlook.problems:
        found += problem_list([(field_name(key), words) for key, words in outlook.problems], text("new_run.to_correct"))
    return found


def checkpoint_words(outlook: Outlook) -> str:
    """When checkpoints are written, and what they take of the disk: `Saved every 30 min and at the end; ...`."""
    if outlook.config is None:
        return ""
    config = outlook.config.checkpoint
    moments = []
    if config.every_steps:
        moments.append(text("new_run.save_steps", steps=config.every_steps))
    if config.every_minutes:
        moments.append(text("new_run.save_minutes", time=format_duration(60 * config.every_minutes)))
    if config.at_end:
        moments.append(text("new_run.save_end"))
    words = text("new_run.saved", moments=text("new_run.and").join(moments))
    if outlook.model.value is None:
        return words
    size, free = format_bytes(outlook.checkpoints_bytes), format_bytes(outlook.machine.disk_free_bytes)
    return words + " " + text("new_run.kept", keep=config.keep, size=size, free=free)


def warnings(outlook: Outlook) -> list[str]:
    """What may be meant, and usually is not."""
    config = outlook.config
    found: list[str] = []
    if config is None:
        return found
    keep = config.checkpoint.keep
    room = outlook.checkpoints_bytes * (keep + 1) // keep  # the newest is whole before the oldest goes
    if outlook.fit and outlook.fit.plan and outlook.machine.offload_on_workspace_disk:
        room += outlook.fit.plan.predicted.disk_bytes
    if room > outlook.machine.disk_free_bytes:
        found.append(text("new_run.warn_disk", size=format_bytes(room), free=format_bytes(outlook.machine.disk_free_bytes)))
    if config.model.path != DEMO and not config.model.from_scratch and config.train.learning_rate > HIGH_RATE:
        found.append(text("new_run.warn_rate", rate=f"{config.train.learning_rate:g}"))
    model = outlook.model.value
    if model is not None and model.shape.max_positions and config.data.sequence_length > model.shape.max_positions:
        found.append(text("new_run.warn_context", length=config.data.sequence_length, context=model.shape.max_positions))
    if config.train.num_steps is not None and config.train.warmup_steps > config.train.num_steps:
        found.append(text("new_run.warn_warmup", warmup=config.train.warmup_steps, steps=config.train.num_steps))
    return found


def command_line(workspace: Path) -> str:
    """How the same run is started without the page, from the YAML saved as run.yaml."""
    return f"python -m megatrain train run.yaml --workspace {shlex.quote(str(workspace))}"


def _facts(rows: list[tuple[str, str]]) -> str:
    cells = "".join(f"<div><dt>{escape(text(f'new_run.fact_{name}'))}</dt><dd>{escape(words)}</dd></div>" for name, words in rows)
    return f'<dl class="facts">{cells}</dl>'


def _row(turns: tuple[tuple[str, str], ...]) -> str:
    cells = "".join(f"<p><b>{escape(text(f'new_run.role_{who}'))}</b> {escape(_cut(words))}</p>" for who, words in turns)
    return f"<li>{cells}</li>"


def _cut(words: str) -> str:
    return words if len(words) <= LOOK_CHARACTERS else words[:LOOK_CHARACTERS] + " …"
