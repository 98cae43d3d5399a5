"""Rows of one source -> shards of tokens on disk. Also a process of its own: `python -m megatrain.data.tokenise REQUEST`.

Rows are read, checked, encoded and written in batches, so memory does not grow with the data. What was counted so far is
kept with each shard: a build that ended early, for whatever reason, is gone on with by the next one.

The process takes a JSON request and prints JSON lines: {"done", "total"} as it goes on, at last {"finished": true} or
{"error", "hint"}. It ends when its standard input is closed, so it never outlives the process that asked for it.
"""

import argparse
import gc
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.config import DataConfig
from megatrain.data import cache as shards
from megatrain.data.adapt import CONTROL_TOKENS_ESCAPED
from megatrain.data.cache import CacheWriter
from megatrain.data.chat import Encoded, Encoder, load_tokenizer
from megatrain.data.files import Row
from megatrain.data.formats import PREFERENCE_NOTE, BadRow, Example, Text, detect, read_row
from megatrain.data.packing import cut_conversation, split_text
from megatrain.data.report import CUT, SPLIT, DataReport, NothingTrainedError, Tally
from megatrain.data.sources import Source, open_source
from megatrain.data.torchless import hide_torch
from megatrain.engine.events import Phase
from megatrain.errors import DataError

_BATCH_ROWS, _BATCH_CHARACTERS = 512, 1 << 21  # the tokenizer is a quarter slower in batches of 64
SNIFFED_ROWS = 20
_REPORT_S = 0.5
Documents = list[tuple[list[int], list[bool]]]


class PreparationCancelled(DataError):
    """The caller asked to stop. No unfinished shard is left on disk."""


@dataclass
class Build:
    """One source on its way into the cache folder `folder`. `run` ends with the whole cache."""

    config: DataConfig
    source: Source
    tokenizer_folder: Path
    folder: Path
    progress: Callable[[Phase], None] = lambda phase: None
    cancelled: Callable[[], bool] = lambda: False
    shard_tokens: int = 0  # 0: as usual

    def run(self) -> None:
        """The cache is whole. Python looks for garbage less often meanwhile: the lists of a batch are long, and none is a cycle."""
        thresholds = gc.get_threshold()
        gc.set_threshold(50_000, 20, 50)
        try:
            self._run()
        finally:
            gc.set_threshold(*thresholds)

    def _run(self) -> None:
        config, source = self.config, self.source
        self.progress(Phase("tokenise", 0, self._total(0), "rows"))
        self._rest: tuple[list[int], list[bool]] = [], []  # of the text whose sections are being read
        self.encoder = Encoder(load_tokenizer(self.tokenizer_folder), config.train_on, config.chat_template)
        with CacheWriter(self.folder, self.shard_tokens or shards.SHARD_TOKENS) as writer:
            self.tally = self._restored(writer.known.details)
            skipped = self.tally.read
            self.format, rows = chosen_format(config, source, enumerate(itertools.islice(source.rows(), config.max_rows), 1))
            reported = time.monotonic()
            for batch in _batches(itertools.islice(rows, skipped, None)):
                if self.cancelled():
                    raise PreparationCancelled("The preparation of the data was stopped.")
                if writer.is_full:
                    self._flush(writer)
                    writer.end_shard(self._details())
                self._encode_batch(batch, writer)
                if time.monotonic() - reported > _REPORT_S:
                    reported = time.monotonic()
                    self.progress(Phase("tokenise", self.tally.read, self._total(self.tally.read), "rows"))
            self._flush(writer)
            self._refuse_nothing()
            writer.finish(self._details(complete=True))

    def _total(self, read: int) -> int:
        """Rows in all, guessed from how much of the files is read where nothing says it; 0 while there is nothing to go by."""
        total = min(self.source.total or self.config.max_rows or 0, self.config.max_rows or self.source.total)
        share = getattr(self.source, "share_read", 0.0)
        if not total and share:
            total = round(read / share)
        return max(total, read) if total else 0

    def _refuse_nothing(self) -> None:
        name = self.source.name
        if not self.tally.read:
            raise DataError(f"There is no row in {name}.", "Check that it is the right file and that it is not empty.")
        if not self.tally.trained_tokens:
            raise NothingTrainedError(f"None of the {self.tally.read} rows of {name} gives a token to train on. {self.tally.problem()}",
                                      "Correct the rows, or set data.format.")  # fmt: skip

    def _restored(self, details: dict[str, Any]) -> Tally:
        """The counts up to the last shard that an earlier build finished."""
        state = details.get("state")
        if not state:
            return Tally()
        self.encoder.notes.update(state["notes"])
        self.encoder.used_template = state["template"]
        return Tally.from_dict(state["tally"])

    def _details(self, complete: bool = False) -> dict[str, Any]:
        """The report on everything so far, and what the next build needs to go on."""
        encoder, tally, source = self.encoder, self.tally, self.source
        notes = [*source.notes, *(f"{count} rows: {note}." for note, count in encoder.notes.items())]
        if self.format == "preference":
            notes.append(PREFERENCE_NOTE)
        if encoder.end_id is None:
            notes.append("The tokenizer has no end token, so the model does not learn where a text ends.")
        if encoder.used_template == "fallback":
            notes.append("The tokenizer has no chat template; conversations are written with the built-in one (### User, ### Assistant).")
        notes += encoder.template_notes()
        report = DataReport(
            self.format, source.name, tally.read, tally.kept, tally.cut, dict(tally.dropped), tally.examples, tally.tokens,
            tally.trained_tokens, tally.largest_id, template=encoder.used_template, notes=notes, rows_split=tally.split,
            length_histogram=tally.histogram(), longest_row=tally.longest, rows_escaped=encoder.notes[CONTROL_TOKENS_ESCAPED],
            chat_template=encoder.template.text or "" if encoder.used_template == "chosen" else "", complete=complete)  # fmt: skip
        state = {"tally": tally.to_dict(), "notes": dict(encoder.notes), "template": encoder.used_template}
        share = 1.0 if complete else getattr(source, "share_read", 0.0)
        return {**report.to_dict(), "pad_id": encoder.pad_id, "share_read": share, **({} if complete else {"state": state})}

    def _encode_batch(self, batch: list[tuple[int, Row]], writer: CacheWriter) -> None:
        tally = self.tally
        examples: list[tuple[int, Row, Example]] = []
        refused: list[tuple[int, Row, BadRow]] = []
        for number, row in batch:
            try:
                examples.append((number, row, read_row(row, self.format, self.config.text_column)))
            except BadRow as reason:
                refused.append((number, row, reason))
        results = self.encoder.encode_all(example for _, _, example in examples)
        for (number, row, example), result in zip(examples, results, strict=True):
            if isinstance(result, Encoded):
                tally.length(len(result.ids))
                try:
                    documents, change = fitted(result, example, self.config, self.encoder)
                    documents = self._joined(writer, example, result, documents)
                    self._add(writer, result, documents, number)
                    tally.kept += 1
                except BadRow as reason:
                    refused.append((number, row, reason))
                    continue
                tally.cut, tally.split = tally.cut + (change == CUT), tally.split + (change == SPLIT)
                if change:
                    tally.show(change, number, row.place, row.values)
            else:
                refused.append((number, row, result))
        for number, row, fault in sorted(refused, key=lambda item: item[0]):
            tally.drop(str(fault), number, row.place, row.values)
        tally.read += len(batch)

    def _joined(self, writer: CacheWriter, example: Example, encoded: Encoded, documents: Documents) -> Documents:
        """The documents of a section of a long text, cut anew with what was left over of the section before."""
        if not isinstance(example, Text) or (example.begins and example.ends):
            self._flush(writer)
            return documents
        if example.begins:
            self._flush(writer)
        ids, mask = self._rest[0] + encoded.ids, self._rest[1] + encoded.mask
        whole = len(ids) if example.ends else len(ids) - len(ids) % self.config.sequence_length
        self._rest = ids[whole:], mask[whole:]
        return [(ids, mask) for ids, mask in split_text(ids[:whole], mask[:whole], self.config.sequence_length) if any(mask[1:])]

    def _flush(self, writer: CacheWriter) -> None:
        """What is left over of a text becomes a document of its own."""
        ids, mask = self._rest
        self._rest = [], []
        if any(mask[1:]):
            self._add(writer, Encoded(ids, mask), [(ids, mask)], self.tally.read)

    def _add(self, writer: CacheWriter, encoded: Encoded, documents: Documents, number: int) -> None:
        row_ids, row_mask = np.asarray(encoded.ids, np.uint32), np.asarray(encoded.mask, np.bool_)
        whole = hashlib.blake2b(row_ids.tobytes(), digest_size=8)
        whole.update(row_mask.tobytes())
        row_hash = int.from_bytes(whole.digest(), "little")
        for ids, mask in documents:
            is_whole = ids is encoded.ids
            id_array = row_ids if is_whole else np.asarray(ids, np.uint32)
            mask_array = row_mask if is_whole else np.asarray(mask, np.bool_)
            writer.add(id_array, mask_array, number, row_hash)
            self.tally.tokens += len(ids)
            self.tally.trained_tokens += int(np.count_nonzero(mask_array[1:]))
            self.tally.largest_id = max(self.tally.largest_id, int(id_array.max()))


def fitted(encoded: Encoded, example: Example, config: DataConfig, encoder: Encoder) -> tuple[Documents, str]:
    """The documents of at most S tokens that a row becomes, those without a label left out, and CUT, SPLIT or nothing.

    BadRow when nothing is left, or when the row is too long and such rows are to be left out.
    """
    ids, mask, length, change = encoded.ids, encoded.mask, config.sequence_length, ""
    is_section = isinstance(example, Text) and not (example.begins and example.ends)
    if len(ids) <= length:
        documents = [(ids, mask)]
    elif config.long_rows == "drop" and not is_section:
        raise BadRow("the row is longer than the sequence length")
    elif encoded.is_text or config.long_rows == "split":
        documents, change = split_text(ids, mask, length), "" if is_section else SPLIT
    else:
        keep_first = bool(encoder.start_ids) and ids[:1] == encoder.start_ids[:1]
        documents, change = [cut_conversation(ids, mask, length, keep_first)], CUT
    documents = [(ids, mask) for ids, mask in documents if any(mask[1:])]
    if not documents:
        raise BadRow("there is no token to train on")
    return documents, change


def chosen_format(config: DataConfig, source: Source, rows: Iterator[tuple[int, Row]]) -> tuple[str, Iterator[tuple[int, Row]]]:
    """The configured format, or the one that the first rows fit; and all rows, these included."""
    if config.format != "auto":
        return config.format, rows
    first = list(itertools.islice(rows, SNIFFED_ROWS))
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


def _end_with_parent() -> None:
    """The parent holds the other end of standard input: when that closes, nobody waits for the work any more."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def request(config: DataConfig, tokenizer_folder: Path, folder: Path) -> str:
    """What the process is started with."""
    return json.dumps({"config": asdict(config), "tokenizer": str(tokenizer_folder), "folder": str(folder),
                       "shard_tokens": shards.SHARD_TOKENS})  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatrain.data.tokenise", description="Tokenise one source into a cache folder.")
    parser.add_argument("request", help="JSON with config (DataConfig), tokenizer and folder")
    asked = json.loads(parser.parse_args(argv).request)
    _end_with_parent()

    def say(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    config = DataConfig(**asked["config"])
    try:
        Build(config, open_source(config), Path(asked["tokenizer"]), Path(asked["folder"]),
              lambda phase: say(done=phase.done, total=phase.total), shard_tokens=asked["shard_tokens"]).run()  # fmt: skip
    except DataError as error:
        say(error=error.message, hint=error.hint)
        return 2
    say(finished=True)
    return 0


if __name__ == "__main__":
    hide_torch()
    sys.exit(main())
