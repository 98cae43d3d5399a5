"""What the dashboard knows about a configuration before it is started: the model's shape, the plan, what is missing.

Everything here is asked from handlers, so nothing waits: what takes long is asked in the background, and `pending`
says that the page should ask again. No torch; a model is read by a process of its own.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain import planner, shapes
from megatrain.config import DEMO, RunConfig
from megatrain.errors import ConfigError, MegaTrainError, PlanError
from megatrain.hardware import Machine, read_machine
from megatrain.plan import Plan
from megatrain.precision import PRECISIONS
from megatrain.shape import ModelShape
from megatrain.units import format_bytes
from ui import form
from ui.background import Answer, Background
from ui.glance import Glance, glance, is_local
from ui.words import text

BACKGROUND = Background()
MACHINE_AGE_S = 2.0
PLENTY = 1 << 60  # bytes of a machine on which everything fits


@dataclass(frozen=True)
class Model:
    """What is known of a model that can be trained."""

    shape: ModelShape
    chat_template: bool


@dataclass(frozen=True)
class Fit:
    """One precision on this machine: its plan, or why there is none, and what it would need on a machine of any size."""

    precision: str
    plan: Plan | None
    need: Plan | None
    refusal: MegaTrainError | None


@dataclass(frozen=True)
class Outlook:
    """All that the page says about the form's present values."""

    raw: tuple[Any, ...]
    config: RunConfig | None
    problems: tuple[tuple[str, str], ...]
    machine: Machine
    model: Answer[Model]
    data: Answer[Glance] | None
    fit: Fit | None = None
    budget: planner.Budget | None = None
    suggestions: tuple[planner.Suggestion, ...] = ()

    @property
    def checkpoints_bytes(self) -> int:
        """Space of all checkpoints that stay: weights, masters and moments of each."""
        if self.config is None or self.model.value is None:
            return 0
        return self.config.checkpoint.keep * self.model.value.shape.num_params * PRECISIONS[self.config.precision].kept_bytes

    @property
    def pending(self) -> bool:
        """True while a later look at the same values may show more."""
        if self.config is None:
            return False
        return bool(self.config.model.path) and self.model.pending or self.data is not None and self.data.pending

    @property
    def num_steps(self) -> int | None:
        """Length of the run; of a run in epochs about, once the size of the data is known."""
        if self.config is None or self.config.train.num_steps is not None:
            return self.config.train.num_steps if self.config else None
        tokens = self.data.value.about_tokens if self.data and self.data.value else None
        return max(1, round(self.config.train.num_epochs * tokens / self.config.train.global_batch_tokens)) if tokens else None

    @property
    def missing(self) -> str:
        """What stands between the form and a start, in a few words; empty when nothing does."""
        if self.config is None:
            if len(self.problems) > 1:
                return text("new_run.missing_fields", count=len(self.problems))
            return text("new_run.missing_field", field=field_name(self.problems[0][0]))
        if not self.config.model.path:
            return text("new_run.missing_model")
        if not self.config.data.path:
            return text("new_run.missing_data")
        if self.model.error:
            return text("new_run.missing_model_error")
        if self.data is not None and self.data.error:
            return text("new_run.missing_data_error")
        if self.model.pending:
            return text("new_run.missing_reading")
        return "" if self.fit and self.fit.plan else text("new_run.missing_fit")


def field_name(key: str) -> str:
    """How the form calls an option; problems of several options keep their key."""
    return str(form.OPTIONS[key].metadata["label"]) if key in form.OPTIONS else key


class Planning:
    """Answers for one workspace."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self._machine: tuple[float, Machine] | None = None

    def machine(self) -> Machine:
        """This machine, read at most every two seconds."""
        now = time.monotonic()
        if self._machine is None or now - self._machine[0] > MACHINE_AGE_S:
            self._machine = now, read_machine(self.workspace)
        return self._machine[1]

    def model_choices(self) -> list[tuple[str, str]]:
        """What the model field offers: the demo, then the models found on this machine, with their size."""
        found = [(text("new_run.demo_model"), DEMO)]
        for model in shapes.local_models(self.workspace):
            found.append((text("new_run.local_model", name=model.name, size=format_bytes(model.num_bytes)), model.path))
        return found

    def model(self, config: RunConfig) -> Answer[Model]:
        """The model's shape, read in the background by a process of its own."""
        return BACKGROUND.ask(self._model_question(config), lambda: self._read_model(config))

    def forget_model(self, raw: Sequence[Any]) -> None:
        """Read the model again: a folder was completed, a token was entered."""
        with contextlib.suppress(ConfigError):
            BACKGROUND.forget(self._model_question(form.config(raw)))

    def data(self, config: RunConfig, look: bool) -> Answer[Glance] | None:
        """A glance at the data. Without `look` only at what lies on this machine; None when nobody has looked yet."""
        question = ("data", config.data)
        if not config.data.path or not (look or is_local(config.data) or BACKGROUND.knows(question)):
            return None
        return BACKGROUND.ask(question, lambda: glance(config.data))

    def rows(self, raw: Sequence[Any]) -> Answer[Glance] | None:
        """The same because somebody asked to see rows."""
        try:
            return self.data(form.config(raw), look=True)
        except ConfigError as error:
            return Answer(error=error)

    def _model_question(self, config: RunConfig) -> tuple[Any, ...]:
        return "model", self.workspace, config.model

    def _read_model(self, config: RunConfig) -> Model:
        folder = shapes.resolve(config.model, self.workspace)
        return Model(shapes.load_shape(folder, config.model.path, self.workspace), has_chat_template(folder))

    def outlook(self, raw: Sequence[Any]) -> Outlook:
        """Everything known about the form's values now."""
        machine = self.machine()
        try:
            config = form.config(raw)
        except ConfigError as error:
            return Outlook(tuple(raw), None, tuple(error.problems), machine, Answer(), None)
        model, data = self.model(config) if config.model.path else Answer(), self.data(config, look=False)
        if model.value is None:
            return Outlook(tuple(raw), config, (), machine, model, data)
        fit = fit_of(config, model.value.shape, machine)
        if fit.need is None:
            return Outlook(tuple(raw), config, (), machine, model, data, fit)
        helpful = () if fit.plan else tuple(planner.suggestions(config, model.value.shape, machine))
        return Outlook(tuple(raw), config, (), machine, model, data, fit, planner.budget(config, machine), helpful)

    def fits(self, outlook: Outlook) -> list[Fit]:
        """Every precision with the rest of the configuration unchanged."""
        if outlook.config is None or outlook.model.value is None:
            return []
        return [fit_of(replace(outlook.config, precision=name), outlook.model.value.shape, outlook.machine) for name in PRECISIONS]


def fit_of(config: RunConfig, shape: ModelShape, machine: Machine) -> Fit:
    """The plan of `config`; when it does not fit, also what it would need."""
    try:
        plan = planner.plan(config, shape, machine)
    except PlanError as error:
        return Fit(config.precision, None, _need(config, shape, machine), error)
    except ConfigError as error:
        return Fit(config.precision, None, None, error)
    return Fit(config.precision, plan, plan, None)


def _need(config: RunConfig, shape: ModelShape, machine: Machine) -> Plan | None:
    """The plan with RAM and disk without end and no limits; if the card itself is too small, also with VRAM without end."""
    memory = replace(config.memory, vram_limit_gib=None, ram_limit_gib=None, disk_limit_gib=None)
    roomy = replace(machine, ram_total_bytes=PLENTY, ram_available_bytes=PLENTY, disk_free_bytes=PLENTY)
    gpus = tuple(replace(gpu, total_bytes=PLENTY, free_bytes=PLENTY) for gpu in machine.gpus)
    for place in (roomy, replace(roomy, gpus=gpus)):
        try:
            return planner.plan(replace(config, memory=memory), shape, place)
        except MegaTrainError:
            continue  # refused for another reason than room; the refusal on the real machine says which
    return None


def has_chat_template(folder: Path) -> bool:
    """Whether the model's folder says how a conversation is written."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return "chat_template" in json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
