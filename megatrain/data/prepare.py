"""RunConfig + tokenizer -> Loader and DataReport. Rows are tokenised once and found again by the content they came from.

Rows are read, checked, encoded and written in small batches, so memory does not grow with the data.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.config import DataConfig, RunConfig
from megatrain.data.cache import CacheWriter, TokenCache, open_cache
from megatrain.data.chat import Encoded, Encoder, load_tokenizer
from megatrain.data.files import Row
from megatrain.data.formats import BadRow, Example, detect, read_row
from megatrain.data.hub import HubSource
from megatrain.data.loader import Loader
from megatrain.data.packing import cut_conversation, split_text
from megatrain.data.report import DataReport, Tally
from megatrain.data.sources import Source, open_source
from megatrain.engine.events import Phase
from megatrain.errors import DataError

ENCODING = 1  # raised when the same row would give other tokens than before
_BATCH_ROWS, _BATCH_CHARACTERS = 64, 1 << 20
_SNIFFED_ROWS = 20
_REPORT_S = 0.5
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt",
                    "*.tiktoken", "*.model", "additional_chat_templates/*", "config.json")  # fmt: skip


class PreparationCancelled(DataError):
    """The caller asked to stop. Nothing of the unfinished work is left on disk."""


@dataclass(frozen=True)
class Prepared:
    """Data that is ready to be trained on."""

    loader: Loader
    report: DataReport


def prepare(
    config: RunConfig,
    tokenizer_folder: Path,
    cache_folder: Path,
    progress: Callable[[Phase], None] = lambda phase: None,
    cancelled: Callable[[], bool] = lambda: False,
    cache_key: str = "",
) -> Prepared:
    """The loader of a run and the report on its rows. DataError when no token would be trained.

    `cache_key`, from the report of a run that is resumed, names the tokens of that run: while they are in the cache
    they are used as they are, and the source is not asked, which may have changed since or be out of reach.
    """
    cache = open_cache(cache_folder / cache_key) if cache_key else None
    if cache is None:
        source = open_source(config.data)
        if isinstance(source, HubSource):
            progress(Phase("download"))
        cache_key = _cache_key(config.data, source, tokenizer_folder)
        cache = open_cache(cache_folder / cache_key)
        if cache is None:
            _tokenise(config.data, source, tokenizer_folder, cache_folder / cache_key, progress, cancelled)
            cache = open_cache(cache_folder / cache_key)
        if cache is None:
            raise DataError(f"The tokens in {cache_folder} were damaged while they were written.", "Check the disk, then start again.")
    progress(Phase("tokenise", cache.details["rows_read"], cache.details["rows_read"], "rows"))
    return _prepared(config, cache, cache_key)


def _prepared(config: RunConfig, cache: TokenCache, cache_key: str) -> Prepared:
    details = dict(cache.details)
    loader = Loader(cache, config, details.pop("pad_id"))
    report = replace(DataReport.from_dict(details), eval_rows=loader.eval_rows, num_packs=loader.num_packs,
                     packing_efficiency=loader.packing_efficiency, cache_key=cache_key)  # fmt: skip
    return Prepared(loader, report)


def _cache_key(config: DataConfig, source: Source, tokenizer_folder: Path) -> str:
    """Names the tokens by everything that decides them: rows, how they are read, the tokenizer and its template."""
    files = sorted({path for pattern in _TOKENIZER_FILES for path in tokenizer_folder.glob(pattern) if path.is_file()})
    tokenizer = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    settings = [config.format, config.text_column, config.train_on, config.sequence_length, config.max_rows, config.bad_lines]
    return hashlib.sha256(json.dumps([ENCODING, source.version(), settings, tokenizer]).encode()).hexdigest()[:32]


def _tokenise(config: DataConfig, source: Source, tokenizer_folder: Path, folder: Path, progress: Callable[[Phase], None],
              cancelled: Callable[[], bool]) -> None:  # fmt: skip
    total = min(source.total or config.max_rows or 0, config.max_rows or source.total)
    progress(Phase("tokenise", 0, total, "rows"))
    encoder = Encoder(load_tokenizer(tokenizer_folder), config.train_on)
    format, rows = _chosen_format(config, source, enumerate(itertools.islice(source.rows(), config.max_rows), 1))
    tally, reported = Tally(), time.monotonic()
    with CacheWriter(folder) as writer:
        for batch in _batches(rows):
            if cancelled():
                raise PreparationCancelled("The preparation of the data was stopped.")
            _encode_batch(batch, config, format, encoder, tally, writer)
            if time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                progress(Phase("tokenise", tally.read, max(total, tally.read) if total else 0, "rows"))
        if not tally.read:
            raise DataError(f"There is no row in {source.name}.", "Check that it is the right file and that it is not empty.")
        if not tally.trained_tokens:
            raise DataError(f"None of the {tally.read} rows of {source.name} gives a token to train on. {tally.problem()}",
                            "Correct the rows, or set data.format.")  # fmt: skip
        writer.finish(_details(format, source, encoder, tally))


def _details(format: str, source: Source, encoder: Encoder, tally: Tally) -> dict[str, Any]:
    notes = [*source.notes, *(f"{count} rows: {note}." for note, count in encoder.notes.items())]
    if encoder.end_id is None:
        notes.append("The tokenizer has no end token, so the model does not learn where a text ends.")
    if encoder.used_template == "fallback":
        notes.append("The tokenizer has no chat template; conversations are written with the built-in one (### User, ### Assistant).")
    report = DataReport(format, source.name, tally.read, tally.kept, tally.cut, dict(tally.dropped), tally.examples, tally.tokens,
                        tally.trained_tokens, tally.largest_id, template=encoder.used_template, notes=notes)  # fmt: skip
    return {**report.to_dict(), "pad_id": encoder.pad_id}


def _chosen_format(config: DataConfig, source: Source, rows: Iterator[tuple[int, Row]]) -> tuple[str, Iterator[tuple[int, Row]]]:
    """The configured format, or the one that the first rows fit; and all rows, these included."""
    if config.format != "auto":
        return config.format, rows
    first = list(itertools.islice(rows, _SNIFFED_ROWS))
    usable = [row.values for _, row in first if not row.problem]
    if not usable:
        return "text", iter(first) if not first else itertools.chain(first, rows)
    try:
        return detect(usable, config.text_column), itertools.chain(first, rows)
    except DataError as error:
        raise DataError(f"{source.name}: {error.message}", error.hint) from error


def _batches(rows: Iterator[tuple[int, Row]]) -> Iterator[list[tuple[int, Row]]]:
    """Rows in lists that are short in rows and in characters."""
    batch: list[tuple[int, Row]] = []
    characters = 0
    for number, row in rows:
        batch.append((number, row))
        characters += sum(len(value) for value in row.values.values() if isinstance(value, (str, list)))
        if len(batch) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_batch(batch: list[tuple[int, Row]], config: DataConfig, format: str, encoder: Encoder, tally: Tally,
                  writer: CacheWriter) -> None:  # fmt: skip
    examples: list[tuple[int, Row, Example]] = []
    refused: list[tuple[int, Row, BadRow]] = []
    for number, row in batch:
        try:
            examples.append((number, row, read_row(row, format, config.text_column)))
        except BadRow as reason:
            refused.append((number, row, reason))
    for (number, row, _), result in zip(examples, encoder.encode_all(example for _, _, example in examples), strict=True):
        if isinstance(result, BadRow):
            refused.append((number, row, result))
            continue
        documents, was_cut = _fitted(result, config.sequence_length, encoder)
        if not documents:
            refused.append((number, row, BadRow("there is no token to train on")))
            continue
        for ids, mask in documents:
            writer.add(ids, mask, number)
            tally.tokens += len(ids)
            tally.trained_tokens += sum(mask[1:])
            tally.largest_id = max(tally.largest_id, *ids)
        tally.kept += 1
        tally.cut += was_cut
    for number, row, fault in sorted(refused, key=lambda item: item[0]):
        tally.drop(str(fault), number, row.place, row.values)
    tally.read += len(batch)


def _fitted(encoded: Encoded, sequence_length: int, encoder: Encoder) -> tuple[list[tuple[list[int], list[bool]]], bool]:
    """The documents of at most S tokens that a row becomes, those without a label left out; and whether it lost tokens."""
    ids, mask = encoded.ids, encoded.mask
    if len(ids) <= sequence_length:
        documents, was_cut = [(ids, mask)], False
    elif encoded.is_text:
        documents, was_cut = split_text(ids, mask, sequence_length), False
    else:
        keep_first = bool(encoder.start_ids) and ids[:1] == encoder.start_ids[:1]
        documents, was_cut = [cut_conversation(ids, mask, sequence_length, keep_first)], True
    return [(ids, mask) for ids, mask in documents if any(mask[1:])], was_cut
