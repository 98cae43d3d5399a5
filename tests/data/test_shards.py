"""Data in several shards: the same steps whether they are all there, still being written, or gone on with after a kill."""

import json
import shutil
import time
from pathlib import Path

import pytest

from megatrain.config import RunConfig
from megatrain.data import cache, prepare
from megatrain.data.background import GrowingShards, Tokeniser
from megatrain.data.cache import open_shards
from megatrain.data.prepare import PreparationCancelled, Prepared
from megatrain.errors import DataError
from tests.data import tiny

ROWS = 3000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved(tmp_path_factory.mktemp("chatml"), tiny.CHATML)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows for six shards."""
    monkeypatch.setattr(cache, "SHARD_TOKENS", 20_000)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"row {index} " * (1 + index % 9)}) for index in range(ROWS)))
    return path


def config(path: Path, steps: int | None = None, fraction: float = 0.02) -> RunConfig:
    return RunConfig.from_dict({"data": {"path": str(path), "sequence_length": 128, "eval_fraction": fraction},
                                "train": {"global_batch_tokens": 4 * 128, "num_steps": steps}})  # fmt: skip


def steps_of(made: Prepared, count: int) -> list[list]:
    return [made.loader.step_batch(step).input_ids.tolist() for step in range(count)]


def folder_of(made: Prepared, caches: Path) -> Path:
    return caches / made.report.cache_key


def test_an_epoch_over_shards_has_every_row_once(tmp_path: Path, file: Path, model: Path) -> None:
    made = prepare.prepare(config(file, fraction=0.0), model, tmp_path / "cache")
    shards = open_shards(folder_of(made, tmp_path / "cache"))
    assert len(shards.shards) == 6
    assert shards.complete
    assert (made.report.rows_kept, made.report.complete) == (ROWS, True)
    packs = made.loader.num_packs
    for epoch in (0, 1):
        seen = sum(int(made.loader._batch([made.loader._pack_at(index)]).num_tokens) for index in range(epoch * packs, (epoch + 1) * packs))
        assert seen == made.report.tokens
    order = [made.loader._pack_at(index)[0].folder.name for index in range(2 * packs)]
    first, second = list(dict.fromkeys(order[:packs])), list(dict.fromkeys(order[packs:]))
    assert first == sorted(first)
    assert second != first
    assert sorted(second) == first


def test_training_begins_with_the_first_shard_and_sees_the_same_steps(
    tmp_path: Path, file: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare.prepare(config(file), model, tmp_path / "one")
    count = 2 * whole.loader.steps_per_epoch + 3
    wanted = steps_of(whole, count)
    monkeypatch.setattr(prepare, "STREAMED_BYTES", 1000)
    grown = prepare.prepare(config(file, steps=count), model, tmp_path / "two")
    assert grown.loader.fingerprint == whole.loader.fingerprint
    assert grown.loader.eval_rows == whole.loader.eval_rows > 0
    evaluated = [[batch.input_ids.tolist() for batch in made.loader.eval_batches(3)] for made in (grown, whole)]
    assert evaluated[0] == evaluated[1] != []
    assert steps_of(grown, count) == wanted
    assert grown.loader.num_packs == whole.loader.num_packs
    resumed = prepare.prepare(config(file, steps=count), model, tmp_path / "two", cache_key=grown.report.cache_key)
    assert resumed.loader.step_batch(count - 1).input_ids.tolist() == wanted[count - 1]


def test_a_killed_tokeniser_is_gone_on_with_and_ends_with_the_same_tokens(tmp_path: Path, file: Path, model: Path) -> None:
    whole = prepare.prepare(config(file), model, tmp_path / "one")
    folder = tmp_path / "two" / whole.report.cache_key
    tokeniser = Tokeniser(config(file).data, model, folder)
    growing = GrowingShards(open_shards(folder), tokeniser)
    while not growing.poll(2, patience_s=0.01):
        pass
    tokeniser.stop()
    for later in [*folder.glob("shard-0000[2-9]"), *folder.parent.glob("*.partial-*")]:  # it may have come further than it was asked
        shutil.rmtree(later)
    (folder / "meta.json").unlink(missing_ok=True)
    left = open_shards(folder)
    assert (len(left.shards), left.complete) == (2, False)
    again = prepare.prepare(config(file), model, tmp_path / "two")
    assert folder_of(again, tmp_path / "two") == folder
    assert again.report == whole.report
    assert again.loader.fingerprint == whole.loader.fingerprint
    assert steps_of(again, 20) == steps_of(whole, 20)


def test_a_tokeniser_that_fails_or_dies_is_an_error_with_its_words(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\nnot JSON\n')
    growing = GrowingShards(open_shards(tmp_path / "c"), Tokeniser(config(path).data, model, tmp_path / "c"))
    with pytest.raises(DataError, match="a.jsonl line 2 is not JSON"):
        growing.wait_for(1)
    assert growing.tokeniser is not None
    growing.tokeniser.stop()
    with pytest.raises(DataError, match="not complete"):
        GrowingShards(open_shards(tmp_path / "c")).wait_for(1)


def test_cancelling_before_the_first_shard_ends_the_process(
    tmp_path: Path, file: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "STREAMED_BYTES", 1000)
    started: list[Tokeniser] = []
    monkeypatch.setattr(prepare, "Tokeniser", lambda *arguments: started.append(Tokeniser(*arguments)) or started[-1])
    with pytest.raises(PreparationCancelled):
        prepare.prepare(config(file, steps=5), model, tmp_path / "cache", cancelled=lambda: True)
    assert not started[0].is_alive


def test_a_damaged_shard_is_written_again(tmp_path: Path, file: Path, model: Path) -> None:
    whole = prepare.prepare(config(file), model, tmp_path / "cache")
    shard = folder_of(whole, tmp_path / "cache") / "shard-00003"
    (shard / "ids.bin").write_bytes(b"x" + (shard / "ids.bin").read_bytes()[1:])
    again = prepare.prepare(config(file), model, tmp_path / "cache")
    assert again.loader.fingerprint == whole.loader.fingerprint
    assert steps_of(again, 80) == steps_of(whole, 80)


def test_a_tokeniser_ends_with_its_parent(tmp_path: Path, file: Path, model: Path) -> None:
    tokeniser = Tokeniser(config(file).data, model, tmp_path / "c")
    assert tokeniser._process.stdin is not None
    tokeniser._process.stdin.close()  # as the system does when the parent dies
    deadline = time.monotonic() + 60
    while tokeniser.is_alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not tokeniser.is_alive
    tokeniser.stop()
