"""Data sets of the Hugging Face hub, through `datasets`.

The commit is asked for first and then asked for by name, so all rows are of one version. With `max_rows` only as much
as is needed is fetched; without it the data set is downloaded into the hub's own cache and read from there.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
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
        rows = self._loaded()
        return len(rows) if hasattr(rows, "__len__") else 0

    def version(self) -> str:
        self._loaded()
        return self._version

    def rows(self) -> Iterator[Row]:
        place = f"{self.name} {self.split}"
        with _explained(self.name, self.split):
            for number, values in enumerate(self._loaded(), 1):
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
            self.notes = ("The hub could not be reached; the copy in the local cache is used.",)
        return found

    def _commit(self) -> str:
        """The commit that the hub has now; empty when the hub cannot be reached."""
        import httpx
        import huggingface_hub
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            with _explained(self.name, self.split):
                return huggingface_hub.HfApi().dataset_info(self.name, timeout=20).sha or ""
        except (httpx.TransportError, OfflineModeIsEnabled):
            return ""


@contextmanager
def _explained(name: str, split: str) -> Iterator[None]:
    """Turns what the hub and `datasets` raise into DataError with a hint; a missing connection passes through."""
    import datasets
    import httpx
    import pyarrow

    try:
        yield
    except (datasets.exceptions.DatasetsError, pyarrow.ArrowException, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, httpx.TransportError):
            raise
        raise _explanation(name, split, error) from error


def _explanation(name: str, split: str, error: Exception) -> DataError:
    import datasets
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    text = " ".join(str(error).split())[:600]
    subject = f"The data set {name}"
    if isinstance(error, GatedRepoError):
        return DataError(f"{subject} is gated.", "Accept its conditions on the hub and log in with `hf auth login`.")
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
        problem = f"{subject} can neither be fetched nor found in the local cache."
        return DataError(problem, "Check the connection, or give a file or folder.")
    return DataError(f"{subject} cannot be read: {text}.", "Check data.path, data.subset and data.split.")
