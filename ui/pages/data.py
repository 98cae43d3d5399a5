"""Data: which data and whose tokenizer, the rows as conversations and as tokens, the whole in numbers, and named data sets.

What is open is a file in the workspace (ui/looks.py); the widgets ask how far it is and never wait. Their server functions
can be called by anyone who reaches the port, so each checks what it is handed and answers an error in words.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from megatrain.config import DataConfig
from megatrain.data import recipes
from megatrain.data.report import NothingTrainedError
from megatrain.errors import DataError, MegaTrainError
from ui import data_fields, data_view, draft, form, looks, presets
from ui.background import Answer
from ui.context import Context
from ui.data_fields import DATA_CARD, LOOK_KEYS
from ui.looks import LOOKS, Job, Look
from ui.planning import Planning
from ui.review_view import problem_list
from ui.words import section, text

STATIC = Path(__file__).parent.parent / "static"
SHOWN = ("model.path", "data.sequence_length", "train.global_batch_tokens", *DATA_CARD)
MORE = tuple(key for key in LOOK_KEYS if key not in SHOWN)
MAX_ROW, MAX_WORDS = 10**9, 500
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
Reply = dict[str, Any]


def build(ctx: Context) -> None:
    """The page inside the current tab, and its wiring."""
    DataPage(ctx).wire()


class DataPage:
    """The components of the page and the handlers between them. Holds no values."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.planning = ctx, Planning(ctx.workspace)
        self.form = form.Form(LOOK_KEYS, "look")
        self.loaded = gr.Textbox(visible="hidden", label="loaded")  # until the draft is in the form, the form is no draft
        with gr.Row(elem_classes="new-run data-page", equal_height=False):
            with gr.Column(scale=5, min_width=320, elem_classes="cards"):
                self._choice_card()
                self.rows = row_browser(ctx.workspace)
            with gr.Column(scale=3, min_width=320, elem_classes="look-side"):
                figure_view()
                self.saved = saved_sets(ctx.workspace)

    def _choice_card(self) -> None:
        with gr.Column(elem_classes="mt-card", elem_id="card-look"):
            gr.HTML(apply_default_css=False, value=f'<h2 class="mt-title">{text("data.card_choice")}</h2>')
            with gr.Row():
                data_fields.place_data(self.form, self.planning)
                data_fields.place_model(self.form, self.planning)
            with gr.Row():
                data_fields.place_reading(self.form)
                self.form.place("data.sequence_length", min_width=140)
                self.form.place("train.global_batch_tokens", min_width=140)
            with gr.Accordion(text("new_run.advanced"), open=False, elem_id="look-more"):
                data_fields.place_options(self.form, MORE)
            self.look = gr.Button(text("data.look"), variant="primary", elem_id="look-button")
            self.note = gr.HTML(apply_default_css=False, elem_id="look-note")

    def wire(self) -> None:
        """Events. Every change keeps the draft; Look opens what the form says."""
        fields, refresh = self.form.components, "() => MegaTrain.say('megatrain:look-again')"
        gr.on([field.change for field in fields], self.keep, [self.loaded, *fields], None, trigger_mode="always_last", **QUIET)
        self.ctx.pages["data"].select(self.load_form, None, [self.loaded, *fields], **QUIET)
        self.form["data.path"].input(self.tidy, fields, fields, **QUIET)
        self.form["model.path"].input(self.tidy, fields, fields, **QUIET)
        self.look.click(self.open, fields, self.note, **QUIET).then(None, None, None, js=refresh)
        self.saved.open(self.open_saved, fields, [self.note, *fields], **QUIET).then(None, None, None, js=refresh)
        self.saved.use(self.use, None, self.ctx.open_outputs, **QUIET)

    def load_form(self) -> list[Any]:
        """The form as it was left; for a first visit the demo."""
        return ["yes", *data_fields.with_choices(self.form, self.planning, self.form.of(looks.load_form(self.ctx.workspace)))]

    def keep(self, loaded: Any, *own: Any) -> None:
        if loaded:
            looks.save_form(self.ctx.workspace, self._whole(own))

    def tidy(self, *own: Any) -> list[Any]:
        """A pasted address becomes an id."""
        return self.form.of(form.tidy(self._whole(own)))

    def open(self, *own: Any) -> str:
        """Open what the form says, or list what has to be corrected."""
        problems = looks.open_look(self.ctx.workspace, self._whole(own))
        return problem_list(problems, text("new_run.to_correct")) if problems else ""

    def open_saved(self, event: gr.EventData, *own: Any) -> list[Any]:
        """Choose a saved data set in the form, with its own way of reading, and open it."""
        raw = named(self._whole(own), _asked(event._data, "name"))
        shown = data_fields.with_choices(self.form, self.planning, self.form.of(raw))
        return [self.open(*self.form.of(raw)), *shown]

    def use(self, event: gr.EventData) -> tuple[Any, Any]:
        """Choose a saved data set in the New run form and open that page."""
        raw = draft.load(self.ctx.workspace) or presets.initial(self.planning.machine())
        draft.save(self.ctx.workspace, named(raw, _asked(event._data, "name")))
        return self.ctx.open_page("new_run")

    def _whole(self, own: Any) -> list[Any]:
        return self.form.spread(own, looks.load_form(self.ctx.workspace))


def named(raw: list[Any], name: Any) -> list[Any]:
    """`raw` with a saved data set as its data. How it is read is the data set's own to say, so those options go back to their defaults."""
    own = {*recipes.SOURCE_KEYS, *recipes.SETTING_KEYS} - {"path", "weight", "max_rows"}
    plain = {f"data.{key}": form.shown(f"data.{key}", getattr(DataConfig(), key)) for key in own}
    changed = [plain.get(key, value) for key, value in zip(form.KEYS, raw, strict=True)]
    return form.with_value(changed, "data.path", name if isinstance(name, str) else None)


def row_browser(workspace: Path) -> gr.HTML:
    """What is open, one of its rows as a conversation or as tokens, and search. The page's only poll, which other widgets hear."""

    def look(request: Any) -> Reply:
        return look_reply(LOOKS.current(workspace))

    def row(request: Any) -> Reply:
        return _of_look(workspace, request, row_reply)

    def search(request: Any) -> Reply:
        return _of_look(workspace, request, search_reply)

    def act(request: Any) -> Reply:
        return _answered(lambda: carry_out(workspace, _asked(request, "action")))

    template = "<div class='look-nothing'></div><div class='look-job'></div><div class='look-open' hidden></div>"
    return _widget("data.js", template, [look, row, search, act], elem_id="row-browser")


def figure_view() -> gr.HTML:
    """The data in numbers; hears the page's poll."""
    return _widget("figures.js", "<div class='figures'></div>", [], elem_id="figure-view")


def saved_sets(workspace: Path) -> gr.HTML:
    """Named data sets: save what is open, open one, use one in a new run, delete one. Events: open({name}), use({name})."""

    def saved(request: Any) -> Reply:
        return {"saved": [described(name, workspace) for name in recipes.names(workspace)]}

    def save(request: Any) -> Reply:
        return _answered(lambda: save_reply(workspace, _asked(request, "name")))

    def delete(request: Any) -> Reply:
        return _answered(lambda: delete_set(workspace, _asked(request, "name")))

    return _widget("saved.js", "<div class='saved'></div>", [saved, save, delete], elem_id="saved-sets")


def _widget(file: str, template: str, functions: list[Callable[[Any], Reply]], **properties: Any) -> gr.HTML:
    return gr.HTML(html_template=template, js_on_load=(STATIC / file).read_text("utf-8"), server_functions=functions,
                   texts=section("data"), apply_default_css=False, elem_classes=["look-widget"], **properties)  # fmt: skip


def look_reply(look: Look | None) -> Reply:
    """What the page shows of the look: stage, progress or problem, sources, figures."""
    if look is None:
        return {"id": "", "stage": "none", "counting": {"stage": "none"}}
    opening, counting = look.opening, look.counting
    reply: Reply = {"id": look.id, "opened": look.opened_at, **_job(opening), "counting": {"stage": "none"}}
    if opening.stage == "done":
        total = sum(source["total"] for source in opening.value["sources"])
        reply |= {"sources": data_view.about(opening.value), "tokens": opening.value["has_tokenizer"], "total": total}
        reply["counting"] = _job(counting) if counting else {"stage": "running" if reply["tokens"] else "none"}
        if counting is not None and counting.stage == "done":
            reply["counting"]["figures"] = data_view.figures(counting.value, look.config)
            reply["total"] = counting.value["rows_read"]
    return reply


def _job(job: Job) -> Reply:
    reply: Reply = {"stage": job.stage, "progress": "", "fraction": None}
    if job.stage == "running" and job.done:
        reply["progress"] = data_view.progress(job.done, job.total, job.unit)
        reply["fraction"] = min(1.0, job.done / job.total) if job.total else None
    if job.error is not None:
        reply |= _words(job.error) | {"nothing_trained": isinstance(job.error, NothingTrainedError)}
    return reply


def row_reply(look: Look, request: Any) -> Reply:
    """One row: as a conversation and as it was found, or with `tokens` as the model sees it."""
    number, whole = _row_number(request, "number"), _asked(request, "whole") is True
    if _asked(request, "tokens") is True:
        return _pending_or(look.tokens(number), lambda found: data_view.tokens(found, whole))

    def shown(found: Reply) -> Reply:
        if not found["rows"]:
            raise DataError(text("data.no_row", row=f"{number:,}"), text("data.no_row_hint"))
        return {**data_view.row(found["rows"][0], whole), "more": found["more"]}

    return _pending_or(look.row(number), shown)


def search_reply(look: Look, request: Any) -> Reply:
    """Rows that hold a text, from row `start` on."""
    words = _asked(request, "words")
    if not isinstance(words, str) or not words.strip() or len(words) > MAX_WORDS:
        raise DataError(text("data.search_what", most=MAX_WORDS))
    return _pending_or(look.search(words.strip(), _row_number(request, "start")), lambda found: data_view.hits(found, words.strip()))


def carry_out(workspace: Path, action: Any) -> Reply:
    """Do what a button says: cancel what takes long, count again, or close the data."""
    if action == "cancel":
        LOOKS.cancel(workspace)
    elif action == "count":
        LOOKS.count(workspace)
    elif action == "close":
        LOOKS.close(workspace)
    else:
        raise DataError(text("runs.unknown_action"))
    return {}


def delete_set(workspace: Path, name: Any) -> Reply:
    recipes.delete(name if isinstance(name, str) else "", workspace)
    return {}


def save_reply(workspace: Path, name: Any) -> Reply:
    """What is open is saved under a name; not what the form says and nobody has looked at yet."""
    look = LOOKS.current(workspace)
    if look is None:
        raise DataError(text("data.nothing_open"), text("data.nothing_open_hint"))
    known = name.strip() if isinstance(name, str) else ""
    replaced = recipes.find(known, workspace) is not None
    try:
        recipes.save(known, recipes.recipe_of(look.config.data, workspace), workspace)
    except OSError as error:
        raise DataError(text("data.cannot_write", folder=workspace, reason=error.strerror or error)) from error
    return {"said": text("data.replaced" if replaced else "data.saved", name=known), "name": known}


def described(name: str, workspace: Path) -> Reply:
    """A saved data set in one line, or why it cannot be read."""
    try:
        path = recipes.find(name, workspace)
        sources = recipes.load(path).sources if path else []
    except MegaTrainError as error:
        return {"name": name, "words": data_view.visible(str(error)), "damaged": True}
    parts = [Path(source["path"]).name + (f" × {source['weight']:g}" if source.get("weight", 1) != 1 else "") for source in sources]
    return {"name": name, "words": data_view.visible(", ".join(parts)), "damaged": False}


def _of_look(workspace: Path, request: Any, reply: Callable[[Look, Any], Reply]) -> Reply:
    """The answer for the look that the page means; {"again"} when another one is open by now."""
    look = LOOKS.current(workspace)
    if look is None or look.id != _asked(request, "id"):
        return {"again": True}
    return _answered(lambda: reply(look, request))


def _pending_or(answer: Answer[Reply], shown: Callable[[Reply], Reply]) -> Reply:
    if answer.error is not None:
        raise answer.error
    return {"pending": True} if answer.value is None else shown(answer.value)


def _answered(work: Callable[[], Any]) -> Reply:
    """The answer, or the reason in words: a server function that raises says nothing to the page."""
    try:
        return work()
    except MegaTrainError as error:
        return _words(error)
    except OSError as error:
        return {"error": str(error), "hint": ""}


def _words(error: MegaTrainError) -> Reply:
    """What happened and what to do; an error may name what stands in a row."""
    return {"error": data_view.visible(error.message), "hint": data_view.visible(error.hint)}


def _row_number(request: Any, key: str) -> int:
    number = _asked(request, key)
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_ROW:
        raise DataError(text("data.no_row", row=str(number)[:20]), text("data.no_row_hint"))
    return number


def _asked(request: object, key: str) -> Any:
    return request.get(key) if isinstance(request, dict) else None
