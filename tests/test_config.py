"""RunConfig: what is written is read back, and everything wrong is reported at once."""

import dataclasses
import math
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config import RunConfig, options
from megatrain.errors import ConfigError


def values(key: str, item: dataclasses.Field) -> st.SearchStrategy[Any]:
    """Every value that an option may take."""
    allowed = typing.get_args(item.type) if isinstance(item.type, types.UnionType) else (item.type,)
    kind = next(kind for kind in allowed if kind is not type(None))
    low, high = item.metadata.get("min"), item.metadata.get("max")
    if item.metadata.get("choices"):
        found: st.SearchStrategy[Any] = st.sampled_from(item.metadata["choices"])
    elif kind is bool:
        found = st.booleans()
    elif kind is int:
        found = st.integers(low if low is not None else -(2**31), high if high is not None else 2**31)
    elif kind is float:
        found = st.floats(low, high, allow_nan=False, allow_infinity=False)
    else:
        found = st.text(max_size=40)
    return st.one_of(st.none(), found) if type(None) in allowed else found


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Configurations without conflicts, any option at any value."""
    raw = RunConfig().to_dict()
    for key, item in options().items():
        *room, name = key.split(".")
        (raw[room[0]] if room else raw)[name] = draw(values(key, item))
    packs = draw(st.integers(1, 100))
    raw["train"]["global_batch_tokens"] = packs * raw["data"]["sequence_length"]
    raw["memory"]["micro_batch_packs"] = draw(st.one_of(st.none(), st.integers(1, packs)))
    raw["checkpoint"]["at_end"] = True
    raw["memory"]["offload_folder"] = raw["memory"]["offload_folder"] or "/fast"
    return RunConfig.from_dict(raw)


@settings(max_examples=50)
@given(configs())
def test_what_is_written_is_read_back(config: RunConfig):
    assert RunConfig.from_yaml(config.to_yaml()) == config
    assert RunConfig.from_dict(config.to_dict()) == config


def test_a_file_is_read_back(tmp_path: Path):
    config = dataclasses.replace(RunConfig(), name="Überraschung – 한국어")
    config.save(tmp_path / "run.yaml")
    assert RunConfig.load(tmp_path / "run.yaml") == config


def test_defaults_are_possible_and_an_empty_file_means_them():
    assert RunConfig.from_yaml("") == RunConfig.from_yaml("{}") == RunConfig.from_dict(RunConfig().to_dict()) == RunConfig()


@pytest.mark.parametrize("key", options())
def test_every_option_explains_itself_and_its_default_is_allowed(key: str):
    item = options()[key]
    label, help_text = item.metadata["label"], item.metadata["help"]
    assert label
    assert label[0].isupper()
    assert help_text.endswith(".")
    choices = item.metadata.get("choices")
    assert choices is None or item.default in choices
    low, high = item.metadata.get("min"), item.metadata.get("max")
    if item.default is not None and low is not None:
        assert low <= item.default <= (math.inf if high is None else high)


def problems(text: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(text)
    return dict(caught.value.problems)


def test_all_problems_are_reported_at_once():
    found = problems("""
        colour: blue
        precision: fp7
        deterministic: 1
        data: {sequence_length: 3, path: 5}
        train: {learning_rate: fast, num_steps: 2.5, warmup: 3}
        memory: [1, 2]
    """)
    assert set(found) == {
        "colour", "precision", "deterministic", "data.sequence_length", "data.path", "train.learning_rate", "train.num_steps",
        "train.warmup", "memory",
    }  # fmt: skip
    assert "unknown key" in found["colour"]
    assert "fp32, bf16" in found["precision"]
    assert "16 to 1048576" in found["data.sequence_length"]
    assert "warmup_steps" in found["train.warmup"]


def test_the_message_names_every_problem():
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml("{colour: blue, precision: fp7}")
    assert "colour" in str(caught.value)
    assert "fp7" in str(caught.value)


def test_numbers_as_people_write_them():
    """YAML 1.1 reads 1e-5 as text; a whole number stands for a real one."""
    config = RunConfig.from_yaml("train: {learning_rate: 1e-5, num_epochs: 2, max_grad_norm: 1}")
    assert config.train.learning_rate == 1e-5
    assert config.train.num_epochs == 2.0
    assert isinstance(config.train.num_epochs, float)


@pytest.mark.parametrize("text", [
    "train: {learning_rate: .nan}", "train: {learning_rate: nan}", "train: {seed: true}", "train: {seed: 1.0}",
    "train: {learning_rate: true}", f"train: {{learning_rate: 1{'0' * 400}}}",
    "deterministic: 'yes'", "train: {seed: '7'}", "train: {num_epochs: .inf}", "train: {learning_rate: -1}", "name: null", "train: null",
    "data: {format: Alpaca}", "train: {max_grad_norm: .inf}", "checkpoint: {every_minutes: .inf}", "train: {max_grad_norm: 1e999}",
    "memory: {vram_limit_gib: .inf}",
])  # fmt: skip
def test_wrong_values_are_refused(text: str):
    assert len(problems(text)) == 1


@pytest.mark.parametrize("text", ["- a\n- b", "just words", "7", "a: [", "\t: x", "a: b: c", "{1: 2}", "a: !!python/object:os.system x"])
def test_what_is_no_configuration_is_refused(text: str):
    assert problems(text)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.yaml", tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            RunConfig.load(path)


# ---- values that are possible alone and not together -----------------------------------------------------------------
def test_a_step_is_a_whole_number_of_packs():
    found = problems("{data: {sequence_length: 1000}, train: {global_batch_tokens: 4200}}")
    assert "nearest is 4000" in found["train.global_batch_tokens"]
    assert "nearest is 1000" in problems("{data: {sequence_length: 1000}, train: {global_batch_tokens: 100}}")["train.global_batch_tokens"]
    assert RunConfig.from_yaml("{data: {sequence_length: 1000}, train: {global_batch_tokens: 4000}}").packs_per_step == 4


def test_something_is_saved_at_some_time():
    assert "checkpoint" in problems("checkpoint: {every_steps: 0, every_minutes: 0, at_end: false}")
    assert RunConfig.from_yaml("checkpoint: {every_steps: 5, every_minutes: 0, at_end: false}")


def test_a_micro_batch_is_no_larger_than_the_step():
    assert "16 packs" in problems("memory: {micro_batch_packs: 17}")["memory.micro_batch_packs"]
    assert RunConfig.from_yaml("memory: {micro_batch_packs: 16}")


def test_options_are_named_by_dotted_keys():
    names = list(options())
    assert names[0] == "name"
    assert "train.learning_rate" in names
    assert len(names) == len(set(names))
    flat = {f"{room}.{name}" for room, value in RunConfig().to_dict().items() if isinstance(value, dict) for name in value}
    assert flat == {name for name in names if "." in name}


def test_yaml_is_plain(tmp_path: Path):
    """Any YAML reader understands it: no Python types."""
    assert yaml.safe_load(RunConfig().to_yaml()) == RunConfig().to_dict()
    assert "!!" not in RunConfig().to_yaml()
