"""What a step contains: labels by hand, epochs, resuming, and nothing that the plan decides."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import DataConfig, EvalConfig, RunConfig, TrainConfig
from megatrain.data.batch import IGNORE_INDEX, PackedBatch
from megatrain.data.cache import CacheWriter, TokenCache, open_cache
from megatrain.data.loader import Loader, held_out_rows

X = IGNORE_INDEX


def cached(folder: Path, documents: list[tuple[list[int], list[bool]]], rows: list[int] | None = None) -> TokenCache:
    with CacheWriter(folder) as writer:
        for index, (ids, mask) in enumerate(documents):
            writer.add(ids, mask, rows[index] if rows else index + 1)
        writer.finish({})
    cache = open_cache(folder)
    assert cache is not None
    return cache


def loader(cache: TokenCache, length: int = 16, packs: int = 3, seed: int = 0, fraction: float = 0.0, max_eval: int = 64,
           pad_id: int = 0) -> Loader:  # fmt: skip
    config = RunConfig(data=DataConfig(sequence_length=length, eval_fraction=fraction), evaluation=EvalConfig(max_packs=max_eval),
                       train=TrainConfig(global_batch_tokens=packs * length, seed=seed))  # fmt: skip
    return Loader(cache, config, pad_id)


def numbered(count: int, lengths: tuple[int, ...] = (3, 5, 7, 11)) -> list[tuple[list[int], list[bool]]]:
    """Documents whose ids are all different, so a token can be followed."""
    documents, start = [], 1
    for index in range(count):
        length = lengths[index % len(lengths)]
        documents.append((list(range(start, start + length)), [False] + [True] * (length - 1)))
        start += length
    return documents


def tokens(batch: PackedBatch) -> list[int]:
    return [int(index) for line, count in zip(batch.input_ids, batch.real_tokens, strict=True) for index in line[:count]]


def epoch_tokens(made: Loader, epoch: int) -> list[int]:
    """The tokens of one epoch, by asking for its packs through the steps that hold them."""
    single = loader(made.streams[0].first.cache, made.sequence_length, packs=1, seed=made._seed)
    return [index for step in range(epoch * single.num_packs, (epoch + 1) * single.num_packs) for index in tokens(single.step_batch(step))]


def test_labels_positions_and_padding_token_by_token(tmp_path: Path) -> None:
    documents = [([11, 12, 13, 14, 15], [False, False, True, True, True]), ([21, 22, 23], [True, True, False])]
    made = loader(cached(tmp_path / "c", documents), length=10, packs=1)
    batch = made.step_batch(0)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15, 21, 22, 23, 0, 0]]
    assert batch.labels.tolist() == [[X, 13, 14, 15, X, 22, X, X, X, X]]  # shifted within each document, never across
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]]
    assert (batch.real_tokens.tolist(), batch.num_tokens, batch.trained_tokens) == ([8], 8, 4)
    assert all(array.dtype == np.int64 for array in (batch.input_ids, batch.labels, batch.position_ids))


def test_a_padding_id_that_is_the_end_token_hides_no_label(tmp_path: Path) -> None:
    made = loader(cached(tmp_path / "c", [([5, 6, 2], [False, True, True])]), length=6, packs=1, pad_id=2)
    assert made.step_batch(0).labels.tolist() == [[6, 2, X, X, X, X]]


def test_every_token_appears_once_in_every_epoch_and_in_another_order(tmp_path: Path) -> None:
    documents = numbered(50)
    made = loader(cached(tmp_path / "c", documents))
    everything = sorted(index for ids, _ in documents for index in ids)
    first, second = epoch_tokens(made, 0), epoch_tokens(made, 1)
    assert sorted(first) == sorted(second) == everything
    assert first != second


@given(st.integers(1, 7), st.integers(1, 40))
def test_the_steps_are_the_epochs_one_after_the_other(packs: int, count: int) -> None:
    lengths = tuple(len(ids) for ids, _ in numbered(count))
    cache = memory_cache(lengths)
    made, single = loader(cache, packs=packs), loader(cache, packs=1)
    steps = 2 * made.steps_per_epoch + 1
    joined = [line for step in range(steps) for line in made.step_batch(step).input_ids.tolist()]
    assert joined == [single.step_batch(index).input_ids[0].tolist() for index in range(steps * packs)]
    assert all(made.step_batch(step).num_packs == packs for step in range(steps))
    assert made.epoch(made.steps_per_epoch) >= 1 > made.epoch(made.steps_per_epoch - 1)


def memory_cache(lengths: tuple[int, ...]) -> TokenCache:
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    ids = np.arange(1, offsets[-1] + 1, dtype=np.uint32)
    return TokenCache(Path(), ids, np.ones(len(ids), np.bool_), offsets, np.arange(len(lengths), dtype=np.int64), {}, "x")


def test_a_step_asked_for_alone_is_the_step_of_the_whole_run(tmp_path: Path) -> None:
    """Resume: a new process that begins anywhere, also in the second epoch, sees what an uninterrupted run sees."""
    cache = cached(tmp_path / "c", numbered(40))
    straight = [loader_batch for loader_batch in map(loader(cache).step_batch, range(30))]
    assert straight[0].num_packs * 30 > 2 * loader(cache).num_packs
    for step in (29, 7, 0, 13):
        again = loader(open_cache(tmp_path / "c")).step_batch(step)  # type: ignore[arg-type]
        assert again.input_ids.tolist() == straight[step].input_ids.tolist()
        assert again.labels.tolist() == straight[step].labels.tolist()


def test_evaluation_between_steps_changes_nothing(tmp_path: Path) -> None:
    cache = cached(tmp_path / "c", numbered(40))
    made, other = loader(cache, fraction=0.2), loader(cache, fraction=0.2)
    kept = made.step_batch(0)
    before = kept.input_ids.tolist()
    assert made.eval_batches(2)
    assert kept.input_ids.tolist() == before
    assert made.step_batch(1).input_ids.tolist() == other.step_batch(1).input_ids.tolist()


def test_held_out_rows_are_whole_rows_and_never_trained(tmp_path: Path) -> None:
    documents = numbered(60)
    rows = [index // 2 for index in range(60)]  # two documents a row, as split texts have
    made = loader(cached(tmp_path / "c", documents, rows), fraction=0.1)
    held_out = [index for batch in made.eval_batches(2) for index in tokens(batch)]
    trained = set(epoch_tokens_of(made))
    assert made.eval_rows == 3
    assert not trained.intersection(held_out)
    assert sorted([*trained, *held_out]) == sorted(index for ids, _ in documents for index in ids)
    belongs = {index: row for (ids, _), row in zip(documents, rows, strict=True) for index in ids}
    assert len({belongs[index] for index in held_out}) == 3


def epoch_tokens_of(made: Loader) -> list[int]:
    return [index for step in range(made.steps_per_epoch) for index in tokens(made.step_batch(step))]


def test_evaluation_packs_are_limited_and_cut_into_batches(tmp_path: Path) -> None:
    made = loader(cached(tmp_path / "c", numbered(100, (16,))), fraction=0.5, max_eval=7)
    assert [batch.num_packs for batch in made.eval_batches(3)] == [3, 3, 1]
    everything = [tokens(batch) for batch in made.eval_batches(7)]
    assert [index for part in made.eval_batches(3) for index in tokens(part)] == everything[0]
    assert loader(made.streams[0].first.cache, fraction=0.0).eval_batches(3) == []


@given(st.integers(0, 500), st.floats(0, 0.5), st.integers(0, 1000))
def test_how_many_rows_are_held_out(count: int, fraction: float, seed: int) -> None:
    rows = np.arange(100, 100 + count)
    chosen = held_out_rows(rows, fraction, seed)
    assert set(chosen.tolist()) <= set(rows.tolist())
    assert len(set(chosen.tolist())) == len(chosen)
    if fraction == 0 or count < 20:
        assert len(chosen) == 0
    else:
        assert 1 <= len(chosen) <= count / 2
        assert abs(len(chosen) - fraction * count) <= 1


def test_the_fingerprint_is_that_of_the_tokens_and_of_their_order(tmp_path: Path) -> None:
    documents = numbered(40)
    made = loader(cached(tmp_path / "a", documents))
    assert loader(cached(tmp_path / "b", documents)).fingerprint == made.fingerprint
    changed = [(ids, mask) for ids, mask in documents]
    changed[3] = (changed[3][0], [False, False] + changed[3][1][2:])
    same = made.streams[0].first.cache
    others = [loader(cached(tmp_path / "c", changed)), loader(same, seed=1), loader(same, packs=4), loader(same, fraction=0.1),
              loader(same, length=20)]  # fmt: skip
    assert len({made.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_a_pack_is_cut_from_a_batch_without_copying(tmp_path: Path) -> None:
    batch = loader(cached(tmp_path / "c", numbered(30))).step_batch(0)
    part = batch.packs(1, 3)
    assert part.num_packs == 2
    assert np.shares_memory(part.input_ids, batch.input_ids)
    assert part.num_tokens == int(batch.real_tokens[1:].sum())


@pytest.mark.parametrize("fault", ["byte", "cut", "missing", "meta", "empty meta", "other layout"])
def test_a_damaged_cache_is_not_used(tmp_path: Path, fault: str) -> None:
    folder = cached(tmp_path / "c", numbered(10)).folder
    ids, meta = folder / "ids.bin", folder / "meta.json"
    {
        "byte": lambda: ids.write_bytes(b"\x07" + ids.read_bytes()[1:]),
        "cut": lambda: ids.write_bytes(ids.read_bytes()[:-4]),
        "missing": lambda: (folder / "mask.bin").unlink(),
        "meta": lambda: meta.unlink(),
        "empty meta": lambda: meta.write_text("{}"),
        "other layout": lambda: meta.write_text(meta.read_text().replace('"layout": 1', '"layout": 0')),
    }[fault]()
    assert open_cache(folder) is None
    assert cached(folder, numbered(10)).ids[0] == 1  # and is replaced when it is built again


def test_a_build_that_stops_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with CacheWriter(tmp_path / "c") as writer:
            writer.add([1, 2], [True, True], 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_two_builds_at_once_end_with_one_good_cache(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "c") as first, CacheWriter(tmp_path / "c") as second:
        for writer in (first, second):
            writer.add([1, 2], [True, True], 1)
        first.finish({"n": 1})
        second.finish({"n": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert replace(open_cache(tmp_path / "c")).details == {"n": 1}  # type: ignore[type-var]
