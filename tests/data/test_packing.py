"""Packing as properties: nothing lost, nothing doubled, nothing too long, the same again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data.packing import cut_conversation, hash_order, pack_documents, split_text

LENGTHS = st.integers(1, 64).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size), max_size=80)))


@given(LENGTHS, st.integers(0, 2**31 - 1))
def test_every_document_is_in_one_pack_and_no_pack_is_too_long(case: tuple[int, list[int]], seed: int) -> None:
    size, lengths = case
    array = np.array(lengths, np.int64)
    packs = pack_documents(array, size, seed)
    assert sorted(packs.documents.tolist()) == list(range(len(lengths)))
    used = [int(array[packs[index]].sum()) for index in range(len(packs))]
    assert all(0 < total <= size for total in used)
    assert sum(used[index] + used[other] <= size for index in range(len(used)) for other in range(index)) == 0  # no two would fit in one
    again = pack_documents(array, size, seed)
    assert again.documents.tolist() == packs.documents.tolist()
    assert again.starts.tolist() == packs.starts.tolist()


def test_the_waste_on_mixed_lengths_is_below_one_percent() -> None:
    lengths = np.minimum(1024, 1 + np.random.default_rng(0).lognormal(5.5, 1.0, 5000)).astype(np.int64)
    assert lengths.sum() / (len(pack_documents(lengths, 1024, 0)) * 1024) > 0.99


def test_lengths_that_cannot_be_packed_are_an_error_of_ours() -> None:
    for bad in ([0], [5]):
        with pytest.raises(ValueError, match="within 1..4"):
            pack_documents(np.array(bad), 4, 0)


@given(st.integers(0, 300), st.integers(0, 2**31 - 1), st.integers(0, 10**6))
def test_an_order_is_a_permutation_that_follows_from_its_seeds(count: int, seed: int, epoch: int) -> None:
    order = hash_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == hash_order(count, seed, epoch).tolist()
    if count > 20:
        assert order.tolist() != hash_order(count, seed, epoch + 1).tolist()
        assert order.tolist() != hash_order(count, seed + 1, epoch).tolist()


def test_an_order_never_changes_with_a_library() -> None:
    assert hash_order(10, 1, 2).tolist() == [8, 7, 5, 6, 1, 4, 3, 0, 2, 9]


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 70))
def test_a_split_text_keeps_every_token_once(mask: list[bool], size: int) -> None:
    pieces = split_text(list(range(len(mask))), mask, size)
    assert [index for ids, _ in pieces for index in ids] == list(range(len(mask)))
    assert [flag for _, flags in pieces for flag in flags] == mask
    assert all(1 <= len(ids) <= size for ids, _ in pieces)


@given(st.lists(st.booleans(), min_size=2, max_size=60), st.integers(1, 59), st.booleans())
def test_a_cut_row_is_a_window_of_it(mask: list[bool], size: int, keep_first: bool) -> None:
    size = min(size, len(mask) - 1)
    ids, kept = cut_conversation(list(range(len(mask))), mask, size, keep_first)
    assert len(ids) == len(kept) == size
    inner = ids[1:] if keep_first else ids
    assert inner == list(range(inner[0], inner[0] + len(inner))) if inner else True
    assert all(flag == mask[index] for index, flag in zip(inner, kept[len(ids) - len(inner) :], strict=True))


def cut(prompt: int, answer: int, size: int = 100) -> tuple[int, int]:
    """(prompt tokens, answer tokens) that are kept of a row."""
    _, mask = cut_conversation(list(range(prompt + answer)), [False] * prompt + [True] * answer, size, keep_first=False)
    return size - sum(mask), sum(mask)


def test_the_answer_is_kept_before_the_prompt_and_the_question_before_the_end_of_a_long_answer() -> None:
    assert cut(prompt=500, answer=30) == (70, 30)
    assert cut(prompt=80, answer=90) == (10, 90)
    assert cut(prompt=20, answer=900) == (20, 80)
    assert cut(prompt=500, answer=900) == (0, 100)


def test_the_bos_token_stays_in_front() -> None:
    ids, mask = cut_conversation([1, *range(10, 30)], [False] * 18 + [True] * 3, 8, keep_first=True)
    assert ids == [1, *range(23, 30)]
    assert mask == [False] * 5 + [True] * 3
