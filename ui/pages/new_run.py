"""New run: model, data, training, precision and tiers, review; beside them the plan, always current.

The form is the only thing here that a person can lose, so every change is kept as a draft in the workspace. A handler
reads widget values, asks `ui.planning`, and returns; what takes longer is pending, and a timer asks again.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context as Building

from megatrain.config import RunConfig
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.runs.supervisor import create_run, start_worker
from ui import data_fields, draft, form, looks, plan_view, presets
from ui.context import Context
from ui.data_fields import DATA_CARD
from ui.planning import Outlook, Planning
from ui.review_view import command_line, data_facts, facts, note, problem_list, refusal, review, rows_view
from ui.words import text

# Where each option stands. What is not named here is in Advanced, so a new option of the configuration appears by itself.
MODEL_CARD = ("model.path",)
TRAINING_CARD = ("train.num_steps", "train.num_epochs", "train.learning_rate", "data.sequence_length", "train.global_batch_tokens")
TIERS_CARD = ("precision", "memory.vram_limit_gib", "memory.ram_limit_gib",
              "memory.weights", "memory.masters", "memory.grads", "memory.moments")  # fmt: skip
REVIEW_CARD = ("name", "checkpoint.every_minutes", "checkpoint.keep")
PLACED = MODEL_CARD + DATA_CARD + TRAINING_CARD + TIERS_CARD + REVIEW_CARD
ADVANCED = tuple(key for key in form.KEYS if key not in PLACED)
SECTIONS = ("model", "data", "train", "memory", "checkpoint", "evaluation")

# Two clicks within two seconds are one wish: they carry one id, and the second is answered with the first one's run.
START_JS = """(id, ...values) => {
  const last = window.megatrainStart, now = Date.now();
  const fresh = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), b => b.toString(16).padStart(2, '0')).join('');
  window.megatrainStart = last && now - last.at < 2000 ? last : {id: fresh(), at: now};
  return [window.megatrainStart.id, ...values];
}"""
PANEL_JS = """
element.addEventListener('click', event => {
  const change = event.target.closest('[data-apply]'), head = event.target.closest('[data-toggle]');
  if (change) trigger('apply', JSON.parse(change.dataset.apply));
  if (head) head.setAttribute('aria-expanded', element.classList.toggle('open'));
});
"""
CLIENT_ID = re.compile(r"[0-9a-f]{8,64}")
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def build(ctx: Context) -> None:
    """The page inside the current tab, and its wiring."""
    NewRunPage(ctx).wire()


@contextmanager
def _card(name: str) -> Iterator[None]:
    """A card with its title."""
    with gr.Column(elem_classes="mt-card", elem_id=f"card-{name}"):
        gr.HTML(apply_default_css=False, value=f'<h2 class="mt-title">{text(f"new_run.card_{name}")}</h2>')
        yield


def checked_client_id(value: Any) -> str:
    """The id that the browser made for a start; empty when it is none, then every call is a start of its own."""
    return value if isinstance(value, str) and CLIENT_ID.fullmatch(value) else ""


class NewRunPage:
    """The components of the page and the handlers between them. Holds no values."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.planning = Planning(ctx.workspace)
        self.form = form.Form()
        self.client_id = gr.Textbox(visible="hidden", label="client id")
        self.loaded = gr.Textbox(visible="hidden", label="loaded")  # until the draft is in the form, the form is no draft
        self.timer = gr.Timer(0.5, active=False)
        self.look_timer = gr.Timer(0.5, active=False)
        with gr.Row(elem_classes="new-run", equal_height=False):
            with gr.Column(scale=5, min_width=320, elem_classes="cards"):
                self._model_card()
                self._data_card()
                self._training_card()
                self._tiers_card()
                self._review_card()
            with gr.Column(scale=3, min_width=320, elem_classes="plan-side mt-sticky"):
                self.panel = gr.HTML(apply_default_css=False, elem_id="plan-panel", js_on_load=PANEL_JS)

    def _model_card(self) -> None:
        with _card("model"):
            data_fields.place_model(self.form, self.planning)
            self.facts = gr.HTML(apply_default_css=False, elem_id="model-facts")
            self.retry = gr.Button(text("new_run.retry"), size="sm", visible=False, elem_classes="inline")

    def _data_card(self) -> None:
        with _card("data"):
            data_fields.place_data(self.form, self.planning)
            with gr.Row():
                data_fields.place_reading(self.form)
            self.data_facts = gr.HTML(apply_default_css=False, elem_id="data-facts")
            with gr.Row(elem_classes="look-buttons"):
                self.look = gr.Button(text("new_run.look"), size="sm", elem_classes="inline")
                self.look_closely = gr.Button(text("new_run.look_closely"), size="sm", elem_classes="inline", elem_id="look-closely")
            self.rows = gr.HTML(apply_default_css=False, elem_id="data-rows")

    def _training_card(self) -> None:
        with _card("training"):
            names = [(text(f"new_run.preset_{name}"), name) for name in presets.PRESETS]
            self.preset = gr.Radio(names, label=text("new_run.preset"), info=text("new_run.preset_help"), value="demo", elem_id="preset")
            with gr.Row():
                self.form.place("train.num_steps", min_width=180)
                self.form.place("train.num_epochs", min_width=180)
                self.form.place("train.learning_rate", min_width=180)
            with gr.Row():
                self.form.place("data.sequence_length", min_width=180)
                self.form.place("train.global_batch_tokens", min_width=180)
            with gr.Accordion(text("new_run.advanced"), open=False):
                for name in ("", *SECTIONS):
                    self._advanced(name)

    def _advanced(self, section: str) -> None:
        """The options of one section that have no place elsewhere, three in a row."""
        keys = [key for key in ADVANCED if key.rpartition(".")[0] == section]
        if not keys:
            return
        gr.HTML(apply_default_css=False, value=f'<h4 class="section">{text("new_run.section_" + (section or "run"))}</h4>')
        data_fields.place_options(self.form, keys)

    def _tiers_card(self) -> None:
        with _card("tiers"):
            self.form.place("precision")
            self.precisions = gr.HTML(apply_default_css=False, elem_id="precision-table")
            with gr.Row():
                self.form.place("memory.vram_limit_gib", min_width=180)
                self.form.place("memory.ram_limit_gib", min_width=180)
            self.places = gr.HTML(apply_default_css=False, elem_id="places")
            with gr.Row():
                for key in TIERS_CARD[3:]:
                    self.form.place(key, min_width=140)

    def _review_card(self) -> None:
        with _card("review"):
            with gr.Row():
                self.form.place("name", min_width=200, placeholder=text("new_run.name_placeholder"))
                self.form.place("checkpoint.every_minutes", min_width=140)
                self.form.place("checkpoint.keep", min_width=140)
            self.review = gr.HTML(apply_default_css=False, elem_id="review")
            self.start = gr.Button(text("new_run.missing_reading"), interactive=False, variant="primary", elem_id="start")
            self.started = gr.HTML(apply_default_css=False, elem_id="start-note")
            with gr.Accordion(text("new_run.as_file"), open=False):
                self.yaml = gr.Code(language="yaml", label=text("new_run.yaml"), interactive=True, lines=12, max_lines=24, elem_id="yaml")
                with gr.Row():
                    self.load_yaml = gr.Button(text("new_run.load_yaml"), size="sm")
                    self.upload = gr.UploadButton(text("new_run.upload_yaml"), size="sm", file_types=[".yaml", ".yml"])
                self.yaml_note = gr.HTML(apply_default_css=False, elem_id="yaml-note")
                self.command = gr.Code(language="shell", label=text("new_run.command"), interactive=False, elem_id="command")

    def wire(self) -> None:
        """Events. Every change replans and keeps the draft; the timer asks again while something is pending."""
        fields = self.form.components
        shown: list[Any] = [self.panel, self.facts, self.retry, self.data_facts, self.precisions, self.places,
                            self.review, self.start, self.preset, self.timer]  # fmt: skip
        written = [self.yaml, self.command]
        replan = {"fn": self.replan, "inputs": [self.loaded, *fields], "outputs": shown + written, **QUIET}
        gr.on([field.change for field in fields], trigger_mode="always_last", **replan)
        for load in (Building.root_block.load, self.ctx.pages["new_run"].select):
            load(self.load_draft, None, [self.loaded, *fields], **QUIET).then(**replan)
        self.timer.tick(self.tick, fields, shown, **QUIET)
        self.form["model.path"].input(self.follow_model, fields, fields, **QUIET)
        self.preset.input(self.apply_preset, [self.preset, *fields], fields, **QUIET)
        self.panel.apply(self.apply_suggestion, fields, fields, **QUIET)
        self.retry.click(self.read_again, fields, shown, **QUIET)
        self.look.click(self.look_at_rows, fields, [self.rows, self.look_timer], **QUIET)
        self.look_timer.tick(self.look_at_rows, fields, [self.rows, self.look_timer], **QUIET)
        self.look_closely.click(self.look_on_data_page, fields, [self.rows, *self.ctx.open_outputs], **QUIET)
        self.load_yaml.click(self.fill_from_yaml, [self.yaml, *fields], [self.yaml_note, *fields], **QUIET)
        self.upload.upload(self.fill_from_file, [self.upload, *fields], [self.yaml_note, *fields], **QUIET)
        self.start.click(self.begin, [self.client_id, *fields], [self.started, *self.ctx.open_outputs], js=START_JS, **QUIET)

    def load_draft(self) -> list[Any]:
        """The form as it was left; for a first visit the demo, ready to start."""
        raw = draft.load(self.ctx.workspace) or presets.initial(self.planning.machine())
        return ["yes", *data_fields.with_choices(self.form, self.planning, raw)]

    def replan(self, loaded: Any, *raw: Any) -> list[Any]:
        """Keep the draft, and show what follows from the form's values."""
        if loaded:
            draft.save(self.ctx.workspace, raw)
        outlook = self.planning.outlook(raw)
        written = [gr.skip(), gr.skip()] if outlook.config is None else [outlook.config.to_yaml(), command_line(self.ctx.workspace)]
        return self._shown(outlook) + written

    def tick(self, *raw: Any) -> list[Any]:
        """Ask again for what was pending."""
        return self._shown(self.planning.outlook(raw))

    def read_again(self, *raw: Any) -> list[Any]:
        """Forget a failure of the model's reading and ask anew."""
        self.planning.forget_model(raw)
        return self.tick(*raw)

    def _shown(self, outlook: Outlook) -> list[Any]:
        missing = outlook.missing
        plan = outlook.fit.plan if outlook.fit else None
        return [
            plan_view.panel(outlook),
            facts(outlook),
            gr.Button(visible=outlook.model.error is not None),
            data_facts(outlook.data),
            plan_view.precisions(self.planning.fits(outlook), outlook.config.precision if outlook.config else ""),
            plan_view.places(plan),
            review(outlook),
            gr.Button(value=missing or text("new_run.start"), interactive=not missing),
            presets.recognise(outlook.raw),
            gr.Timer(active=outlook.pending),
        ]

    def follow_model(self, *raw: Any) -> list[Any]:
        """A pasted address becomes an id, and the demo's rates do not follow to another model."""
        return presets.for_model(form.tidy(raw))

    def apply_preset(self, name: Any, *raw: Any) -> list[Any]:
        return presets.apply(name, raw) if name in presets.PRESETS else list(raw)

    def apply_suggestion(self, event: gr.EventData, *raw: Any) -> list[Any]:
        """Set the option that a suggestion names; refused when it is none or its value is impossible."""
        change = event._data if isinstance(event._data, dict) else {}
        return form.with_value(raw, change.get("key"), change.get("value"))

    def look_at_rows(self, *raw: Any) -> list[Any]:
        """Five rows as the run would read them, or how far the reading is."""
        answer = self.planning.rows(raw)
        return [rows_view(answer), gr.Timer(active=answer is not None and answer.pending)]

    def look_on_data_page(self, *raw: Any) -> tuple[Any, ...]:
        """Open these data on the page Data, or say what has to be corrected first."""
        problems = looks.open_look(self.ctx.workspace, raw)
        if problems:
            return problem_list(problems, text("new_run.to_correct")), gr.skip(), gr.skip()
        return "", *self.ctx.open_page("data")

    def fill_from_yaml(self, source: Any, *raw: Any) -> list[Any]:
        """Fill the form from a written configuration; all its problems are listed, and then nothing changes."""
        try:
            config = RunConfig.from_yaml(str(source or "")[: draft.MAX_BYTES])
        except ConfigError as error:
            return [problem_list(error.problems, text("new_run.problems")), *raw]
        return [note(text("new_run.loaded")), *form.values(config)]

    def fill_from_file(self, path: Any, *raw: Any) -> list[Any]:
        """As `fill_from_yaml`, from an uploaded file; Gradio has checked that the path is an upload."""
        try:
            source = Path(str(path)).read_bytes()[: draft.MAX_BYTES].decode("utf-8")
        except (OSError, UnicodeDecodeError):
            return [problem_list([("file", text("new_run.file_unreadable"))], text("new_run.problems")), *raw]
        return self.fill_from_yaml(source, *raw)

    def begin(self, client_id: Any, *raw: Any) -> tuple[Any, ...]:
        """Create the run, start its worker, open the Monitor. Asked twice with one id, the second answer is the first run."""
        outlook = self.planning.outlook(raw)
        if outlook.config is None or outlook.missing:
            return refusal(outlook.missing), gr.skip(), gr.skip()
        try:
            store = create_run(self.ctx.workspace, outlook.config, checked_client_id(client_id))
            if store.state().state == "created":
                start_worker(store)
        except MegaTrainError as error:
            return refusal(str(error)), gr.skip(), gr.skip()
        return "", *self.ctx.open_page("monitor", store.run_id)
