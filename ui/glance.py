"""A glance at data before a run: its columns, the format it is read as, and the first rows as they are understood."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from megatrain.config import DEMO, DataConfig
from megatrain.data.files import Row
from megatrain.data.formats import BadRow, Conversation, Example, Pair, Text, detect, read_row
from megatrain.data.recipes import parts
from megatrain.data.sources import FileSource, open_source
from megatrain.errors import DataError

ROWS_SHOWN = 5
ROWS_READ = 200  # for the mean length of a row
CHARACTERS_PER_TOKEN = 4.0  # English text and code, with vocabularies of 32,000 and more


@dataclass(frozen=True)
class Glance:
    """What the first rows tell. `num_rows` and `about_tokens` are 0 where only reading everything would tell."""

    format: str
    columns: tuple[str, ...]
    num_rows: int
    about_tokens: int
    rows: tuple[tuple[tuple[str, str], ...], ...]  # of each row: (role, words)


def is_local(config: DataConfig) -> bool:
    """Whether a look costs no download."""
    try:
        return config.path == DEMO or Path(config.path).expanduser().exists()
    except (OSError, ValueError):  # a name too long, a null byte
        return False


def glance(config: DataConfig) -> Glance:
    """Read the beginning of the data, of a mixture that of its first source. DataError when it cannot be found, read or understood."""
    config = parts(config)[0].config
    limit = min(config.max_rows or ROWS_READ, ROWS_READ)
    source = open_source(config if is_local(config) else replace(config, max_rows=limit))
    first = list(islice(source.rows(), limit))
    if not first:
        raise DataError(f"{source.name} holds no rows.", "Choose other data.")
    usable = [row.values for row in first if not row.problem]
    format = detect(usable, config.text_column) if config.format == "auto" else config.format
    columns = dict.fromkeys(name for values in usable for name in values)
    num_rows = source.total
    return Glance(format, tuple(columns), num_rows, _about_tokens(source, first, num_rows, config),
                  tuple(_turns(row, format, config) for row in first[:ROWS_SHOWN]))  # fmt: skip


def _about_tokens(source: object, first: list[Row], num_rows: int, config: DataConfig) -> int:
    """Tokens of all rows, from the mean length of the first ones, or from the size of plain files; 0 when neither is known."""
    mean = sum(sum(len(value) for value in row.values.values() if isinstance(value, str)) for row in first) / len(first)
    wanted = config.max_rows or num_rows
    if len(first) < (config.max_rows or ROWS_READ):
        wanted = len(first)
    if wanted and mean:
        return round(wanted * mean / CHARACTERS_PER_TOKEN)
    if isinstance(source, FileSource) and not config.max_rows:
        return round(source.num_bytes / CHARACTERS_PER_TOKEN)
    return 0


def _turns(row: Row, format: str, config: DataConfig) -> tuple[tuple[str, str], ...]:
    try:
        return _spoken(read_row(row, format, config.text_column))
    except BadRow as error:
        return (("problem", f"{row.place}: {error}"),)


def _spoken(example: Example) -> tuple[tuple[str, str], ...]:
    match example:
        case Conversation(messages=messages):
            return tuple((message["role"], message["content"]) for message in messages)
        case Pair(prompt=prompt, completion=completion):
            return (("prompt", prompt), ("completion", completion))
        case Text(text=words):
            return (("text", words),)
