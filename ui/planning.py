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

from megatrain import fitting, planner, shapes
from megatrain.config import DEMO, RunConfig
from megatrain.data.recipes import located
from megatrain.errors import ConfigError, MegaTrainError, PlanError
from megatrain.hardware import Machine, read_machine, with_offload
from megatrain.plan import Plan, Predicted
from megatrain.precision import PRECISIONS
from megatrain.shape import ModelShape
from megatrain.units import format_bytes
from ui import form
from ui.background import Answer, Background
from ui.glance import Glance, glance, is_local
from ui.words import text

BACKGROUND = Background()
MACHINE_AGE_S = 2.0


@dataclass(frozen=True)
class Model:
    """What is known of a model that can be trained."""

    shape: ModelShape
    chat_template: bool


@dataclass(frozen=True)
class Fit:
    """One precision on this machine: its plan, or why there is none; what it needs, or at least would need."""

    precision: str
    plan: Plan | None
    need: Predicted | None
    refusal: MegaTrainError | None

    @property
    def missing_bytes(self) -> dict[str, int]:
        """How much more it needs, by tier."""
        return self.refusal.missing_bytes if isinstance(self.refusal, PlanError) else {}


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
    budget: fitting.Budget | None = None
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
        if self.fit is None or self.fit.plan is not None:
            return ""
        parts = [text("plan.too_much", size=format_bytes(size), tier=text(f"plan.{tier}")) for tier, size in self.fit.missing_bytes.items()]
        return text("plan.no_fit_by", parts=text("plan.and").join(parts)) if parts else text("new_run.missing_fit")


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
        data = located(config.data, self.workspace)
        if not config.data.path or not (look or is_local(data) or BACKGROUND.knows(question)):
            return None
        return BACKGROUND.ask(question, lambda: glance(data))

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
            machine = with_offload(machine, self.workspace, config.memory.offload_folder)
        except ConfigError as error:
            return Outlook(tuple(raw), None, tuple(error.problems), machine, Answer(), None)
        model, data = self.model(config) if config.model.path else Answer(), self.data(config, look=False)
        if model.value is None:
            return Outlook(tuple(raw), config, (), machine, model, data)
        fit = fit_of(config, model.value.shape, machine)
        if fit.need is None:
            return Outlook(tuple(raw), config, (), machine, model, data, fit)
        helpful = () if fit.plan else tuple(planner.suggestions(config, model.value.shape, machine))
        return Outlook(tuple(raw), config, (), machine, model, data, fit, fitting.budget(config, machine), helpful)

    def fits(self, outlook: Outlook) -> list[Fit]:
        """Every precision with the rest of the configuration unchanged."""
        if outlook.config is None or outlook.model.value is None:
            return []
        return [fit_of(replace(outlook.config, precision=name), outlook.model.value.shape, outlook.machine) for name in PRECISIONS]


def fit_of(config: RunConfig, shape: ModelShape, machine: Machine) -> Fit:
    """The plan of `config`; when it does not fit, the least that it would need."""
    try:
        plan = planner.plan(config, shape, machine)
    except PlanError as error:
        sums = fitting.least(fitting.Problem.of(config, shape, machine))
        need = Predicted(
            vram_bytes=sums.vram_bytes, ram_bytes=sums.ram_bytes, disk_bytes=sums.disk_bytes,
            vram_parts=sums.vram, ram_parts=sums.ram, disk_parts=sums.disk,
        )  # fmt: skip
        return Fit(config.precision, None, need, error)
    except ConfigError as error:  # an option that this model or machine does not have
        return Fit(config.precision, None, None, error)
    return Fit(config.precision, plan, plan.predicted, None)


def has_chat_template(folder: Path) -> bool:
    """Whether the model's folder says how a conversation is written."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return "chat_template" in json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
