"""Several sources with weights: what an epoch holds, exact resuming, and the files that describe a data set."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import DataConfig, RunConfig, TrainConfig
from megatrain.data import recipes
from megatrain.data.background import GrowingShards
from megatrain.data.cache import Shards, TokenCache
from megatrain.data.loader import Loader
from megatrain.data.prepare import prepare
from megatrain.data.recipes import Recipe
from megatrain.errors import DataError
from megatrain.runs.preparation import _own_data_set
from tests.data import tiny


def source(count: int, first: int) -> GrowingShards:
    """`count` documents that fill a pack each, the ids of document d all first + d."""
    ids = np.repeat(np.arange(first, first + count, dtype=np.uint32), 16)
    offsets = np.arange(count + 1, dtype=np.int64) * 16
    cache = TokenCache(Path("x"), ids, np.ones(len(ids), np.bool_), offsets, np.arange(count, dtype=np.int64), {}, f"{count} {first}")
    return GrowingShards(Shards(Path("x"), [cache], True))


def loader(parts: list[tuple[GrowingShards, float]], packs: int = 1, seed: int = 0, fraction: float = 0.0) -> Loader:
    config = RunConfig(data=DataConfig(sequence_length=16, eval_fraction=fraction),
                       train=TrainConfig(global_batch_tokens=16 * packs, seed=seed))  # fmt: skip
    return Loader(parts, config, 0)


def packs_of(made: Loader, first: int, last: int) -> list[int]:
    return [int(line[0]) for step in range(first, last) for line in made.step_batch(step).input_ids]


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0])), min_size=2, max_size=3), st.integers(0, 5))
def test_an_epoch_has_of_each_source_its_weight_and_every_pack_comes_equally_often(sizes: list[tuple[int, float]], seed: int) -> None:
    made = loader([(source(count, 100 * number), weight) for number, (count, weight) in enumerate(sizes, 1)], seed=seed)
    epochs = 4
    seen = packs_of(made, 0, epochs * made.num_packs)
    for number, (count, weight) in enumerate(sizes, 1):
        wanted = max(1, round(count * weight))
        per_epoch = [sum(100 * number <= pack < 100 * number + 100 for pack in seen[e * made.num_packs : (e + 1) * made.num_packs])
                     for e in range(epochs)]  # fmt: skip
        assert per_epoch == [wanted] * epochs
        times = Counter(pack for pack in seen if 100 * number <= pack < 100 * number + 100)
        counts = [times[100 * number + index] for index in range(count)]
        assert max(counts) - min(counts) <= 1  # half of the rows means another half next time


def test_a_mixture_goes_on_exactly_from_any_step() -> None:
    def parts() -> list[tuple[GrowingShards, float]]:
        return [(source(7, 100), 2.0), (source(5, 200), 0.5)]

    straight = [batch.input_ids.tolist() for batch in map(loader(parts(), packs=3).step_batch, range(40))]
    for step in (39, 0, 17, 5):
        assert loader(parts(), packs=3).step_batch(step).input_ids.tolist() == straight[step]
    prints = {loader(parts()).fingerprint, loader([(source(7, 100), 1.0), (source(5, 200), 0.5)]).fingerprint,
              loader([(source(7, 100), 2.0)]).fingerprint, loader([(source(7, 100), 1.0)]).fingerprint}  # fmt: skip
    assert len(prints) == 4


def test_each_source_holds_out_rows_of_its_own() -> None:
    made = loader([(source(40, 100), 1.0), (source(60, 200), 2.0)], fraction=0.1)
    held_out = {int(line[0]) for batch in made.eval_batches(4) for line in batch.input_ids}
    assert made.eval_rows == len(held_out) == 4 + 6
    assert not held_out.intersection(packs_of(made, 0, 3 * made.num_packs))


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": tiny.chat(f"Q{n}", f"A{n}" * 20)}) for n in range(30)))
    (tmp_path / "texts.csv").write_text("words,n\n" + "\n".join(f"word{n} and more,{n}" for n in range(50)) + '\n"",1\n')
    path = tmp_path / "mixed.yaml"
    path.write_text("sources:\n- path: chats.jsonl\n  weight: 2\n- {path: texts.csv, weight: 0.5, format: text, text_column: words}\n"
                    "settings:\n  train_on: everything\n")  # fmt: skip
    return path


def run_config(path: Path | str, **data) -> RunConfig:
    return RunConfig.from_dict({"data": {"path": str(path), "sequence_length": 64, "eval_fraction": 0.0, **data},
                                "train": {"global_batch_tokens": 128}})  # fmt: skip


def test_a_mixture_is_tokenised_by_source_and_reported_as_one(tmp_path: Path, mixture: Path) -> None:
    model = tiny.saved(tmp_path / "model", tiny.CHATML)
    made = prepare(run_config(mixture), model, tmp_path / "cache")
    report = made.report
    assert (report.format, report.source) == ("messages, text", "chats.jsonl, texts.csv")
    assert (report.rows_read, report.rows_kept, report.dropped) == (81, 80, {"column `words` is empty": 1})
    assert [found["name"] for found in report.sources] == ["chats.jsonl", "texts.csv"]
    assert [found["weight"] for found in report.sources] == [2.0, 0.5]
    assert sum(found["share"] for found in report.sources) == pytest.approx(1)
    assert sum(found["packs"] for found in report.sources) == made.loader.num_packs == report.num_packs
    assert report.tokens - report.trained_tokens == 80  # the file's settings: every token but each row's first
    assert len(list((tmp_path / "cache").iterdir())) == 2
    mixture.write_text(mixture.read_text().replace("weight: 2", "weight: 1"))
    other = prepare(run_config(mixture), model, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert other.loader.fingerprint != made.loader.fingerprint
    (tmp_path / "chats.jsonl").unlink()  # a resume asks for the tokens, not for the rows
    resumed = prepare(run_config(mixture), model, tmp_path / "cache", cache_key=report.cache_key)
    assert resumed.loader.fingerprint == other.loader.fingerprint


def test_what_a_run_sets_itself_goes_before_the_settings_of_the_data_set(mixture: Path) -> None:
    (first, second) = recipes.parts(DataConfig(path=str(mixture), long_rows="drop", max_rows=7))
    assert (first.config.path, first.weight) == (str(mixture.parent / "chats.jsonl"), 2.0)
    assert (first.config.train_on, first.config.long_rows, first.config.max_rows) == ("everything", "drop", 7)
    assert (second.config.format, second.config.text_column) == ("text", "words")
    assert recipes.parts(DataConfig(path="owner/name"))[0].config == DataConfig(path="owner/name")


def test_data_sets_are_saved_found_and_deleted_by_name(tmp_path: Path) -> None:
    recipe = Recipe([{"path": "a.jsonl", "weight": 2.0}, {"path": "owner/b", "split": "test"}], {"train_on": "everything"})
    path = recipes.save("My-data_1", recipe, tmp_path)
    assert path == tmp_path / "datasets" / "My-data_1.yaml"
    assert recipes.load(path) == recipe
    assert recipes.names(tmp_path) == ["My-data_1"]
    assert recipes.located(DataConfig(path="My-data_1"), tmp_path).path == str(path.absolute())
    assert recipes.located(DataConfig(path="owner/b"), tmp_path).path == "owner/b"
    recipes.delete("My-data_1", tmp_path)
    assert recipes.names(tmp_path) == []
    with pytest.raises(DataError, match="There is no data set"):
        recipes.delete("../My-data_1", tmp_path)


@pytest.mark.parametrize("name", ["", "../x", "a b", "demo", "x" * 41, ".hidden"])
def test_names_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="cannot be the name"):
        recipes.save(name, Recipe([{"path": "a"}]), tmp_path)


@pytest.mark.parametrize(("text", "words"), [
    ("sources: [", "is not YAML"), ("", "`sources` must be a list"), ("sources: []", "at least one source"),
    ("sources: [{weight: 1}]", "source 1: needs a `path`"), ("sources: [{path: a, weigth: 1}]", "source 1: unknown key `weigth`"),
    ("sources: [{path: a, weight: 0}]", "between 0.001 and 1000"), ("sources: [{path: a, weight: .nan}]", "between 0.001 and 1000"),
    ("sources: [{path: a, format: best}]", "`format` cannot be 'best'"), ("sources: [{path: a, max_rows: many}]", "`max_rows` cannot be"),
    ("sources: [{path: other.yaml}]", "cannot hold another one"), ("sources: [{path: a}]\nseed: 1", "unknown key `seed`"),
    ("sources: [{path: a}]\nsettings: {learning_rate: 1}", "unknown key `learning_rate`"),
])  # fmt: skip
def test_what_is_wrong_in_a_data_set_is_named(text: str, words: str) -> None:
    with pytest.raises(DataError) as error:
        recipes.parse(text, "a.yaml")
    assert words in error.value.message


def test_a_run_keeps_the_data_set_as_it_was_at_its_first_start(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "a.jsonl").write_text("")
    recipes.save("mine", Recipe([{"path": "a.jsonl", "weight": 2.0}]), tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    first = _own_data_set(DataConfig(path="mine"), tmp_path, run)
    assert first.path == str(run / "dataset.yaml")
    recipes.save("mine", Recipe([{"path": "other"}]), tmp_path)
    again = _own_data_set(DataConfig(path="mine"), tmp_path, run)
    assert recipes.parts(again) == recipes.parts(first)
    assert recipes.parts(first)[0].config.path == str(tmp_path / "datasets" / "a.jsonl")
    assert _own_data_set(DataConfig(path="owner/name"), tmp_path, run) == DataConfig(path="owner/name")
    recipes.save("yours", Recipe([{"path": "owner/name"}]), tmp_path)
    assert recipes.parts(_own_data_set(DataConfig(path="yours"), tmp_path, run))[0].config.path == "owner/name"
