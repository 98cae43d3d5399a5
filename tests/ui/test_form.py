"""The form holds every option once, and nothing is lost or invented on the way there and back."""

import string

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatrain.config import RunConfig, options
from megatrain.errors import ConfigError
from ui import draft, form, presets
from ui.texts.en import TEXTS

PLAIN = st.text(string.printable, max_size=40).map(str.strip)


def possible(key, item):
    """Values that the option takes."""
    kind, optional = form.value_type(item)
    low, high = item.metadata.get("min"), item.metadata.get("max")
    if "choices" in item.metadata:
        found = st.sampled_from(item.metadata["choices"])
    elif kind is bool:
        found = st.booleans()
    elif kind is int:
        found = st.integers(low, high if high is not None else 10**9)
    elif kind is float:
        found = st.floats(low, high, allow_nan=False, allow_infinity=False)
    else:
        found = PLAIN.filter(lambda words: words == form.cleaned(key, words))  # what is tidied is tested below
    return found | st.none() if optional else found


def nested(values):
    tree = {}
    for key, value in values.items():
        *path, name = key.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    return tree


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(st.fixed_dictionaries({key: possible(key, item) for key, item in options().items()}))
def test_round_trip(chosen):
    length = min(chosen["data.sequence_length"], 4096)
    chosen |= {"data.sequence_length": length, "train.global_batch_tokens": 8 * length, "checkpoint.at_end": True,
               "memory.micro_batch_packs": None, "memory.offload_folder": "/fast"}  # fmt: skip
    config = RunConfig.from_dict(nested(chosen))
    assert form.config(form.values(config)) == config


@pytest.mark.parametrize("key", form.KEYS)
def test_every_option_alone_survives(key):
    item = form.OPTIONS[key]
    kind, optional = form.value_type(item)
    choices = item.metadata.get("choices")
    others = {bool: not item.default, int: 48, float: 0.125, str: "owner/name"}
    value = next(choice for choice in choices if choice != item.default) if choices else others[kind]
    if key in ("data.sequence_length", "memory.micro_batch_packs"):
        value = 16  # divides the batch, and is no more than a step has
    if key == "train.global_batch_tokens":
        value = 2048
    raw = form.with_value(form.values(RunConfig()), key, value)
    assert form.at(form.config(raw), key) == value
    assert form.changed(form.config(raw)) == [key]
    if optional:
        assert form.at(form.config(form.with_value(raw, key, None)), key) is None


def test_every_option_has_a_widget_with_label_and_help():
    placed = form.Form()
    for key in form.KEYS:
        placed.place(key)
    assert len(placed.components) == len(options())
    for key, component in zip(form.KEYS, placed.components, strict=True):
        assert component.label.startswith(form.OPTIONS[key].metadata["label"])
        assert component.info.startswith(form.OPTIONS[key].metadata["help"])
    with pytest.raises(ValueError, match="already"):
        placed.place(form.KEYS[0])


def test_a_form_that_lacks_an_option_is_refused():
    placed = form.Form()
    placed.place("name")
    with pytest.raises(ValueError, match="precision"):
        _ = placed.components


def test_every_choice_has_a_text():
    choices = {f"{key}.{choice}" for key, item in form.OPTIONS.items() for choice in item.metadata.get("choices", ())}
    assert choices == set(TEXTS["choice"])


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("train.learning_rate", " 1e-5 ", 1e-5),
        ("train.global_batch_tokens", "16,384", 16384),
        ("train.global_batch_tokens", "16384.0", 16384),
        ("train.num_steps", "", None),
        ("memory.ram_limit_gib", "12", 12.0),
        ("data.subset", "  ", None),
        ("model.path", "https://huggingface.co/Qwen/Qwen2.5-0.5B/tree/main", "Qwen/Qwen2.5-0.5B"),
        ("data.path", "https://huggingface.co/datasets/tatsu-lab/alpaca?row=3", "tatsu-lab/alpaca"),
    ],
)
def test_what_people_write_is_understood(key, written, read):
    raw = [written if key == name else value for name, value in zip(form.KEYS, form.values(RunConfig()), strict=True)]
    assert form.at(form.config(raw), key) == read


def test_all_problems_at_once():
    wrong = {"train.learning_rate": "quick", "data.sequence_length": "", "train.beta1": "7", "precision": "int3", "checkpoint.keep": "1.5"}
    raw = [wrong.get(key, value) for key, value in zip(form.KEYS, form.values(RunConfig()), strict=True)]
    with pytest.raises(ConfigError) as caught:
        form.config(raw)
    assert {key for key, _ in caught.value.problems} == set(wrong)


def test_a_call_with_too_few_values_is_refused():
    with pytest.raises(ConfigError):
        form.config(["demo"])


@pytest.mark.parametrize(
    ("key", "value"), [("no.such", 1), (None, 1), ("precision", "int3"), ("deterministic", "yes"), ("train.seed", [1])]
)
def test_a_change_that_makes_no_sense_is_ignored(key, value):
    raw = form.values(RunConfig())
    assert form.with_value(raw, key, value) == raw


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.sampled_from(["model", "train", "path", "seed", "x"])


class TestDraft:
    @settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner)))
    @example({"model": {"path": 3}, "train": "text", "precision": "no"})
    def test_anything_loads(self, tmp_path, content):
        (tmp_path / draft.NAME).write_text(yaml.safe_dump(content), "utf-8")
        raw = draft.load(tmp_path)
        assert len(raw) == len(form.KEYS)

    def test_unfinished_values_come_back(self, tmp_path):
        raw = form.values(RunConfig())
        raw[form.KEYS.index("train.learning_rate")] = "1e"
        raw[form.KEYS.index("name")] = "ünï 日本"
        draft.save(tmp_path, raw)
        assert draft.load(tmp_path) == raw

    def test_nothing_is_no_draft(self, tmp_path):
        assert draft.load(tmp_path) is None
        (tmp_path / draft.NAME).write_bytes(b"\xff\xfe: [")
        assert draft.load(tmp_path) is None

    def test_a_disk_that_refuses_costs_nothing_else(self, tmp_path):
        (tmp_path / "file").write_text("")
        draft.save(tmp_path / "file", form.values(RunConfig()))

    def test_settings_of_a_run_without_its_name(self, tmp_path):
        config = RunConfig.from_dict({"name": "first", "train": {"seed": 7}})
        draft.save_config(tmp_path, config)
        assert form.config(draft.load(tmp_path)) == RunConfig.from_dict({"train": {"seed": 7}})


class TestPresets:
    @pytest.mark.parametrize("name", presets.PRESETS)
    def test_applied_is_recognised_and_possible(self, name):
        raw = presets.apply(name, form.values(RunConfig()))
        assert presets.recognise(raw) == name
        form.config(raw)

    def test_one_changed_field_is_no_preset(self):
        raw = form.with_value(presets.apply("demo", form.values(RunConfig())), "train.num_steps", 61)
        assert presets.recognise(raw) is None

    def test_rates_of_the_demo_do_not_reach_another_model(self):
        raw = form.with_value(presets.apply("demo", form.values(RunConfig())), "model.path", "owner/name")
        assert form.config(presets.for_model(raw)).train.learning_rate < 1e-4
        back = form.with_value(presets.for_model(raw), "model.path", "demo")
        assert presets.recognise(presets.for_model(back)) == "demo"

    def test_what_was_set_by_hand_stays(self):
        raw = form.with_value(presets.apply("demo", form.values(RunConfig())), "train.num_steps", 61)
        raw = form.with_value(raw, "model.path", "owner/name")
        assert presets.for_model(raw) == raw
