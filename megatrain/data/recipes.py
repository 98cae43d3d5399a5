"""Named data sets: which rows, from where, in what mixture, and how they are read. One YAML file each.

    sources:
      - path: chats.jsonl        # as data.path: a file, a folder, a hub id, `demo`; relative to this file if it is there
        weight: 2                # passes over this source in one epoch: 2 is every row twice, 0.5 half of the rows
      - path: owner/name         # besides: subset, split, format, text_column, max_rows
        weight: 0.5
    settings:                    # optional: train_on, chat_template, long_rows, bad_lines
      train_on: everything

They live in `workspace/datasets/NAME.yaml`. A run names one by `data.path: NAME`, or by the path of such a file; what its own
configuration sets otherwise than by default goes before the file's settings.
"""

import dataclasses
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megatrain.config import DEMO, DataConfig
from megatrain.errors import DataError
from megatrain.platform import replace_file

SOURCE_KEYS = ("path", "weight", "subset", "split", "format", "text_column", "max_rows")
SETTING_KEYS = ("train_on", "chat_template", "long_rows", "bad_lines")
SUFFIXES = (".yaml", ".yml")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_FIELDS = {item.name: item for item in dataclasses.fields(DataConfig)}


@dataclass(frozen=True)
class Part:
    """One source of a data set: how it is read, and how many passes over it make an epoch."""

    config: DataConfig
    weight: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """A data set as its file describes it, checked."""

    sources: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)

    def placed_in(self, folder: Path) -> "Recipe":
        """The same with paths that hold wherever the file is copied to; relative ones are looked for in `folder`."""
        return replace(self, sources=[{**source, "path": _placed(source["path"], folder)} for source in self.sources])

    def to_yaml(self) -> str:
        whole: dict[str, Any] = {"sources": self.sources} | ({"settings": self.settings} if self.settings else {})
        return yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)


def parts(config: DataConfig) -> list[Part]:
    """The sources of `config`: itself, or those of the file that it names."""
    path = Path(config.path.strip()).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        return [Part(config)]
    recipe = load(path)
    plain = DataConfig()
    settings = {key: value for key, value in recipe.settings.items() if getattr(config, key) == getattr(plain, key)}
    made = []
    for source in recipe.sources:
        reading = {key: value for key, value in source.items() if key not in ("path", "weight")}
        where = _placed(source["path"], path.parent)
        reading = {"subset": None, "split": plain.split, "format": plain.format, "text_column": None, "max_rows": config.max_rows} | reading
        made.append(Part(replace(config, path=where, **reading, **settings), float(source.get("weight", 1.0))))
    return made


def recipe_of(config: DataConfig, workspace: Path) -> Recipe:
    """What `config` reads, to be saved under a name: its sources, and the settings that are not the defaults."""
    plain = DataConfig()
    own = {key: getattr(config, key) for key in SETTING_KEYS if getattr(config, key) != getattr(plain, key)}
    file = file_of(config, workspace)
    if file is not None:
        known = load(file).placed_in(file.parent)
        return replace(known, settings=known.settings | own)
    reading = {key: getattr(config, key) for key in SOURCE_KEYS if key not in ("path", "weight")}
    changed = {key: value for key, value in reading.items() if value != getattr(plain, key)}
    return Recipe([{"path": config.path.strip(), **changed}], own).placed_in(Path.cwd())


def _placed(text: str, folder: Path) -> str:
    beside = folder / Path(text).expanduser()
    return str(beside.absolute()) if text != DEMO and beside.exists() else text


def load(path: Path) -> Recipe:
    """The data set in a file. DataError names what is wrong in it."""
    try:
        return parse(path.read_text("utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.", "Check the file, or choose another data set.") from error


def parse(text: str, name: str) -> Recipe:
    """The data set that a text describes."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError(f"{name} is not YAML: {' '.join(str(error).split())}", "Correct the file.") from error
    problems: list[str] = []
    raw = raw if isinstance(raw, dict) else {}
    problems += [f"unknown key `{key}`" for key in raw if key not in ("sources", "settings")]
    sources, settings = raw.get("sources"), raw.get("settings") or {}
    if not isinstance(sources, list) or not sources:
        problems.append("`sources` must be a list with at least one source")
        sources = []
    for number, source in enumerate(sources, 1):
        problems += [f"source {number}: {problem}" for problem in _source_problems(source)]
    problems += _problems(settings, SETTING_KEYS) if isinstance(settings, dict) else ["`settings` must be keys and values"]
    if problems:
        raise DataError(f"{name} is no data set: {'; '.join(problems)}.", f"A source has {', '.join(SOURCE_KEYS)}.")
    return Recipe(sources, settings)


def _source_problems(source: Any) -> list[str]:
    if not isinstance(source, dict) or not isinstance(source.get("path"), str) or not source["path"].strip():
        return ["needs a `path`"]
    problems = _problems(source, SOURCE_KEYS)
    weight = source.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight) or not 0.001 <= weight <= 1000:
        problems.append("`weight` must be a number between 0.001 and 1000")
    if Path(source["path"]).suffix.lower() in SUFFIXES:
        problems.append("a data set cannot hold another one")
    return problems


def _problems(values: dict[str, Any], known: tuple[str, ...]) -> list[str]:
    problems = []
    for key, value in values.items():
        if key not in known:
            problems.append(f"unknown key `{key}`")
        elif key in _FIELDS and value is not None:
            choices = _FIELDS[key].metadata.get("choices")
            wanted = int if key == "max_rows" else str
            if type(value) is not wanted or (choices and value not in choices) or (isinstance(value, int) and value < 1):
                problems.append(f"`{key}` cannot be {value!r}" + (f"; it is one of {', '.join(choices)}" if choices else ""))
    return problems


def folder_of(workspace: Path) -> Path:
    return workspace / "datasets"


def names(workspace: Path) -> list[str]:
    """The saved data sets, in alphabetical order."""
    return sorted(path.stem for path in folder_of(workspace).glob("*.yaml") if _NAME.fullmatch(path.stem))


def find(name: str, workspace: Path) -> Path | None:
    """The file of a saved data set; None when `name` is none."""
    path = folder_of(workspace) / f"{name.strip()}.yaml"
    return path if _NAME.fullmatch(name.strip()) and path.is_file() else None


def file_of(config: DataConfig, workspace: Path) -> Path | None:
    """The file of the data set that `config` names, by its name or by its path; None when it names something else."""
    path = Path(config.path.strip()).expanduser()
    return path if path.suffix.lower() in SUFFIXES else find(config.path, workspace)


def located(config: DataConfig, workspace: Path) -> DataConfig:
    """`config` with the file in place of a saved data set's name."""
    path = file_of(config, workspace)
    return replace(config, path=str(path.absolute())) if path else config


def save(name: str, recipe: Recipe, workspace: Path) -> Path:
    """The data set is in the workspace under this name, in place of one that had it. DataError for a name or content that cannot be."""
    if not _NAME.fullmatch(name) or name.lower() == DEMO:
        raise DataError(f"`{name[:60]}` cannot be the name of a data set.", "Take up to 40 letters, digits, hyphens and underscores.")
    parse(recipe.to_yaml(), name)
    path = folder_of(workspace) / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".yaml.new")
    new.write_text(recipe.to_yaml(), "utf-8")
    replace_file(new, path)
    return path


def delete(name: str, workspace: Path) -> None:
    path = find(name, workspace)
    if path is None:
        raise DataError(f"There is no data set `{name[:60]}`.", f"There are {', '.join(names(workspace)) or 'none'}.")
    path.unlink()
