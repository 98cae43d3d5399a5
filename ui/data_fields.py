"""The fields that say which data is read and how, and with whose tokenizer: the pages New run and Data have the same ones."""

from collections.abc import Sequence
from typing import Any

import gradio as gr

from megatrain.config import DEMO
from megatrain.data import recipes
from ui import form
from ui.planning import Planning
from ui.words import text

DATA_CARD = ("data.path", "data.format", "data.train_on")
# Everything that decides what a look at the data shows.
LOOK_KEYS = ("model.path", "model.revision", *(key for key in form.KEYS if key.startswith("data.")),
             "train.global_batch_tokens", "train.seed")  # fmt: skip


def place_model(page: form.Form, planning: Planning) -> None:
    """The model's field, with the models of this machine to choose from."""
    page.place("model.path", choices=planning.model_choices(), allow_custom_value=True, filterable=True, min_width=280)


def place_data(page: form.Form, planning: Planning) -> None:
    """Which data, with the demo and the saved data sets to choose from."""
    page.place("data.path", choices=data_choices(planning), allow_custom_value=True, min_width=280)


def place_reading(page: form.Form) -> None:
    """How a row is read, and what of it is trained."""
    page.place("data.format", min_width=140)
    page.place("data.train_on", min_width=140)


def place_options(page: form.Form, keys: Sequence[str]) -> None:
    """Options that need no explanation of their place, three in a row."""
    with gr.Row(elem_classes="options"):
        for key in keys:
            page.place(key, min_width=200)


def data_choices(planning: Planning) -> list[tuple[str, str]]:
    """What the data field offers: the demo, then the saved data sets."""
    saved = [(text("new_run.saved_data", name=name), name) for name in recipes.names(planning.workspace)]
    return [(text("new_run.demo_data"), DEMO), *saved]


def with_choices(page: form.Form, planning: Planning, own: Sequence[Any]) -> list[Any]:
    """Values for the form's widgets; those of model and data also get what there is to choose from now."""
    choices = {"model.path": planning.model_choices(), "data.path": data_choices(planning)}
    return [gr.Dropdown(choices=choices[key], value=value) if key in choices else value
            for key, value in zip(page.keys, own, strict=True)]  # fmt: skip
