"""RunConfig + tokenizer -> Loader and DataReport. Rows are tokenised once and found again by the content they came from.

Each source of a mixture has tokens of its own, so another mixture of the same sources is tokenised already. Data that is
larger than STREAMED_BYTES and is trained for a given number of steps is tokenised beside the training, which begins with
the first shard.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.config import DataConfig, RunConfig
from megatrain.data import overlap
from megatrain.data.background import GrowingShards, Tokeniser
from megatrain.data.cache import open_shards
from megatrain.data.hub import HubSource
from megatrain.data.loader import Loader
from megatrain.data.recipes import parts
from megatrain.data.report import DUPLICATE, DataReport
from megatrain.data.sources import FileSource, Source, open_source
from megatrain.data.tokenise import Build, PreparationCancelled
from megatrain.engine.events import Phase
from megatrain.errors import DataError

__all__ = ["PreparationCancelled", "Prepared", "prepare"]

ENCODING = 2  # raised when the same row would give other tokens than before
STREAMED_BYTES = 1 << 28  # about one shard of tokens
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt",
                    "*.tiktoken", "*.model", "additional_chat_templates/*", "config.json")  # fmt: skip

Progress = Callable[[Phase], None]


@dataclass(frozen=True)
class Prepared:
    """Data that is ready to be trained on."""

    loader: Loader
    report: DataReport


def prepare(
    config: RunConfig,
    tokenizer_folder: Path,
    cache_folder: Path,
    progress: Progress = lambda phase: None,
    cancelled: Callable[[], bool] = lambda: False,
    cache_key: str = "",
) -> Prepared:
    """The loader of a run and the report on its rows. DataError when no token would be trained.

    `cache_key`, from the report of a run that is resumed, names the tokens of that run: while they are in the cache
    they are used as they are, and the source is not asked, which may have changed since or be out of reach.
    """
    known = [open_shards(cache_folder / key) for key in cache_key.split()] if cache_key else []
    chosen = parts(config.data)
    if not all(shards.complete for shards in known) or len(known) != len(chosen):
        may_stream = len(chosen) == 1 and config.train.num_steps is not None
        growing = [_tokens(part.config, tokenizer_folder, cache_folder, progress, cancelled, may_stream) for part in chosen]
    else:
        growing = [GrowingShards(shards) for shards in known]
    details = [shards.wait_for(1).details for shards in growing]
    read = sum(found["rows_read"] for found in details)
    progress(Phase("tokenise", read, read, "rows"))
    loader = Loader([(shards, part.weight) for shards, part in zip(growing, chosen, strict=True)], config, details[0]["pad_id"])
    return Prepared(loader, _report(loader, growing))


def _tokens(config: DataConfig, tokenizer_folder: Path, cache_folder: Path, progress: Progress, cancelled: Callable[[], bool],
            may_stream: bool) -> GrowingShards:  # fmt: skip
    """The tokens of one source, from the cache, or made now."""
    source = open_source(config)
    if isinstance(source, HubSource):
        progress(Phase("download"))
    folder = cache_folder / _cache_key(config, source, tokenizer_folder)
    known = open_shards(folder)
    if known.complete:
        return GrowingShards(known)
    if may_stream and isinstance(source, FileSource) and source.num_bytes > STREAMED_BYTES:
        return _streamed(GrowingShards(known, Tokeniser(config, tokenizer_folder, folder)), progress, cancelled)
    Build(config, source, tokenizer_folder, folder, progress, cancelled).run()
    known = open_shards(folder)
    if not known.complete:
        raise DataError(f"The tokens in {cache_folder} were damaged while they were written.", "Check the disk, then start again.")
    return GrowingShards(known)


def _streamed(growing: GrowingShards, progress: Progress, cancelled: Callable[[], bool]) -> GrowingShards:
    """The same, once the first shard is there."""
    tokeniser = growing.tokeniser
    assert tokeniser is not None
    while not growing.poll(1):
        if cancelled():
            tokeniser.stop()
            raise PreparationCancelled("The preparation of the data was stopped.")
        progress(Phase("tokenise", tokeniser.done, tokeniser.total, "rows"))
    return growing


def _cache_key(config: DataConfig, source: Source, tokenizer_folder: Path) -> str:
    """Names the tokens by everything that decides them: rows, how they are read, the tokenizer and its template."""
    files = sorted({path for pattern in _TOKENIZER_FILES for path in tokenizer_folder.glob(pattern) if path.is_file()})
    tokenizer = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    settings = [config.format, config.text_column, config.train_on, config.sequence_length, config.max_rows, config.bad_lines,
                config.long_rows, _template_text(config.chat_template)]  # fmt: skip
    return hashlib.sha256(json.dumps([ENCODING, source.version(), settings, tokenizer]).encode()).hexdigest()[:32]


def _template_text(choice: str | None) -> str | None:
    """The choice itself, or the content of the file that it names."""
    try:
        return Path(choice).expanduser().read_text("utf-8") if choice and "{" not in choice else choice
    except (OSError, ValueError):
        return choice


def _report(loader: Loader, growing: list[GrowingShards]) -> DataReport:
    details = [shards.known.details for shards in growing]
    reports = [DataReport.from_dict(found) for found in details]
    keys = [shards.known.folder.name for shards in growing]
    report = reports[0] if len(reports) == 1 else _joined(reports)
    same = overlap.find(loader.streams)
    examples = report.examples | ({DUPLICATE: same.examples} if same.examples else {})
    notes = list(report.notes)
    if same.eval_overlap:
        notes.append(f"{same.eval_overlap} of the {loader.eval_rows} held-out rows are also trained on: the held-out loss looks too good.")
    complete = all(shards.known.complete for shards in growing)
    if not complete:
        notes.append("These figures are of the first part of the data; the rest is tokenised while the training runs.")
    return replace(report, eval_rows=loader.eval_rows, num_packs=loader.num_packs, packing_efficiency=loader.packing_efficiency,
                   duplicates=same.duplicates, eval_overlap=same.eval_overlap, examples=examples, notes=notes, complete=complete,
                   sources=_shares(loader, reports) if loader.is_mixture else [], cache_key=" ".join(keys))  # fmt: skip


def _shares(loader: Loader, reports: list[DataReport]) -> list[dict]:
    counts = loader.packs_by_source
    return [{"name": report.source, "weight": weight, "rows": report.rows_kept, "tokens": report.tokens, "packs": packs,
             "share": packs / sum(counts)} for report, weight, packs in zip(reports, loader.weights, counts, strict=True)]  # fmt: skip


def _joined(reports: list[DataReport]) -> DataReport:
    """One report on several sources. Examples and notes say which source they are of."""
    first = reports[0]

    def total(name: str) -> int:
        return sum(getattr(report, name) for report in reports)

    dropped, lengths = Counter[str](), Counter[int]()
    examples: dict[str, list[tuple[int, str]]] = {}
    for report in reports:
        dropped.update(report.dropped)
        lengths.update(dict(report.length_histogram))
        for reason, rows in report.examples.items():
            examples.setdefault(reason, []).extend(rows[: 3 - len(examples.get(reason, []))])
    formats, templates = (list(dict.fromkeys(getattr(report, name) for report in reports)) for name in ("format", "template"))
    used = next((name for name in ("chosen", "fallback", "tokenizer") if name in templates), "none")
    return DataReport(
        ", ".join(formats), ", ".join(report.source for report in reports), total("rows_read"), total("rows_kept"), total("rows_cut"),
        dict(dropped), examples, total("tokens"), total("trained_tokens"), max(report.largest_id for report in reports),
        template=used, notes=[f"{report.source}: {note}" for report in reports for note in report.notes],
        rows_split=total("rows_split"), length_histogram=sorted(lengths.items()), longest_row=max(report.longest_row for report in reports),
        rows_escaped=total("rows_escaped"), chat_template=next((r.chat_template for r in reports if r.chat_template), first.chat_template),
    )  # fmt: skip
