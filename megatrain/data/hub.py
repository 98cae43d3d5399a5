"""Data sets of the Hugging Face hub, through `datasets`.

The commit is asked for first and then asked for by name, so all rows are of one version. With `max_rows` only as much
as is needed is fetched; without it the data set is downloaded into the hub's own cache and read from there.
"""

import hashlib
import importlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from megatrain.data.files import Row
from megatrain.errors import DataError


@dataclass
class HubSource:
    """One split of a data set on the hub, or of its copy in the local cache when the hub cannot be reached."""

    name: str
    subset: str | None
    split: str
    max_rows: int | None
    notes: tuple[str, ...] = ()
    _rows: Any = None
    _version: str = ""

    @property
    def total(self) -> int:
        return 0 if self.max_rows else len(self._loaded())

    def version(self) -> str:
        self._loaded()
        return self._version

    def rows(self) -> Iterator[Row]:
        place = f"{self.name} {self.split}"
        with _explained(self.name, self.split):
            for number, values in enumerate(itertools.islice(self._loaded(), self.max_rows), 1):
                yield Row(f"{place} row {number}", values)

    def _loaded(self) -> Any:
        if self._rows is None:
            self._rows = self._load()
        return self._rows

    def _load(self) -> Any:
        import datasets

        commit = self._commit()
        with _explained(self.name, self.split):
            streaming = self.max_rows is not None and bool(commit)
            found = datasets.load_dataset(self.name, self.subset, split=self.split, revision=commit or None, streaming=streaming)
        if commit:
            self._version = f"{commit} {self.subset} {self.split}"
        else:  # from the cache: its files carry the version in their paths
            files = sorted(entry["filename"] for entry in found.cache_files)
            self._version = hashlib.sha256("\0".join(files).encode()).hexdigest()
            self.notes = ("The hub was not asked (offline mode); the copy in the local cache is used.",)
        return found

    def _commit(self) -> str:
        """The commit that the hub has now; empty in offline mode."""
        import huggingface_hub
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            with _explained(self.name, self.split):
                return huggingface_hub.HfApi().dataset_info(self.name, timeout=20).sha or ""
        except OfflineModeIsEnabled:
            return ""


@contextmanager
def _explained(name: str, split: str) -> Iterator[None]:
    """Turns what the hub and `datasets` raise into DataError with a hint; offline mode passes through."""
    import datasets
    import pyarrow
    from huggingface_hub.errors import OfflineModeIsEnabled

    connection = _connection_errors()
    try:
        yield
    except OfflineModeIsEnabled:
        raise
    except connection as error:
        hint = "Check the connection. With HF_HUB_OFFLINE=1 a copy in the local cache is used, if there is one."
        raise DataError(f"The hub cannot be reached for the data set {name}: {error}.", hint) from error
    except (datasets.exceptions.DatasetsError, pyarrow.ArrowException, OSError, ValueError, RuntimeError) as error:
        raise _explanation(name, split, error) from error


def _connection_errors() -> tuple[type[Exception], ...]:
    """What a lost or missing connection raises: the HTTP client of the hub's library goes by two names."""
    found: list[type[Exception]] = []
    for name in ("httpx2", "httpx"):
        with suppress(ImportError):
            found.append(importlib.import_module(name).TransportError)
    return tuple(found)


def _explanation(name: str, split: str, error: Exception) -> DataError:
    import datasets
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    text = " ".join(str(error).split())[:600]
    subject = f"The data set {name}"
    if isinstance(error, GatedRepoError):
        return DataError(f"{subject} is gated.", "Accept its conditions on the hub and log in with `hf auth login`.")
    if isinstance(error, datasets.exceptions.DatasetNotFoundError) and isinstance(error.__cause__, GatedRepoError):
        error = error.__cause__
    if isinstance(error, (RepositoryNotFoundError, datasets.exceptions.DatasetNotFoundError)):
        return DataError(f"{subject} is not on the hub, or it is private.", "Check the name; private ones need `hf auth login`.")
    if isinstance(error, HfHubHTTPError):
        return DataError(f"{subject} was refused by the hub: {text}.", "Try again later.")
    if isinstance(error, ValueError) and ("Unknown split" in text or "Bad split" in text):
        return DataError(f"{subject} has no split `{split}`: {text}", "Set data.split to one of those.")
    if isinstance(error, ValueError) and ("BuilderConfig" in text or "Config name is missing" in text):
        return DataError(f"{subject} has several subsets: {text}", "Set data.subset to one of those.")
    if isinstance(error, RuntimeError) and "no longer supported" in text:
        return DataError(f"{subject} is a program, which is not run.", "Look for a version of it in Parquet files.")
    if isinstance(error, (ConnectionError, FileNotFoundError)):
        return DataError(f"{subject} is not in the local cache.", "Fetch it with a connection once, or give a file or folder.")
    return DataError(f"{subject} cannot be read: {text}.", "Check data.path, data.subset and data.split.")
