"""Where a model's files are: the built-in demo, a folder, or the hub. Loads no torch; pickles are never fetched or read."""

import contextlib
import importlib
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatrain
from megatrain.config import DEMO, ModelConfig
from megatrain.engine.events import Phase
from megatrain.errors import ModelError
from megatrain.units import format_bytes

DEMO_FOLDER = Path(megatrain.__file__).resolve().parent.parent / "assets" / "demo-model"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_URL = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)/?.*")
SMALL_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "*.tiktoken")  # config, generation config, tokenizer, template
WEIGHTS = "*.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class CancelledError(Exception):
    """The user stopped the run while it was being prepared."""


def _ignore(_: Phase) -> None:
    return None


def _never() -> bool:
    return False


def resolve_model(config: ModelConfig, report: Callable[[Phase], None] = _ignore, cancelled: Callable[[], bool] = _never,
                  weights: bool = True) -> Path:  # fmt: skip
    """The local folder of the model; a hub model is downloaded to the hub's own cache first.

    `weights=False` fetches configuration and tokenizer only, which is enough to plan. ModelError says what is missing
    and what to do; CancelledError when `cancelled()` became true.
    """
    wanted = hub_id(config.path)
    if wanted == DEMO:
        return _checked(DEMO_FOLDER, "The built-in model", weights and not config.from_scratch)
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return _checked(folder.resolve(), f"The folder {config.path}", weights and not config.from_scratch)
    if not HUB_ID.fullmatch(wanted):
        raise ModelError(f"There is no folder {config.path!r}, and it is no hub id.", "Give a folder, or a hub id like Qwen/Qwen3-0.6B.")
    return _fetch(wanted, config, report, cancelled, weights and not config.from_scratch)


def hub_id(text: str) -> str:
    """What was typed or pasted, with the address of the hub taken away."""
    match = HUB_URL.fullmatch(text.strip())
    return match[1] if match else text.strip()


def _checked(folder: Path, subject: str, weights: bool) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{subject} has no config.json.", "Choose the folder of a Hugging Face model.")
    if weights and not any(folder.glob(WEIGHTS)):
        raise _no_safetensors(subject, any(path.suffix in PICKLES for path in folder.iterdir()))
    return folder


def _no_safetensors(subject: str, pickles: bool) -> ModelError:
    if pickles:
        text = f"{subject} keeps its weights as pickles, which can run any program when read."
        return ModelError(text, "Choose a version in safetensors, or convert it with transformers' save_pretrained.")
    return ModelError(f"{subject} has no weights (*.safetensors).", "Choose another model, or start from random weights.")


def _fetch(name: str, config: ModelConfig, report: Callable[[Phase], None], cancelled: Callable[[], bool], weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    report(Phase("download"))
    broken: tuple[type[Exception], ...] = (OSError, *_transport_errors())  # the hub's own errors are OSErrors, and so is a full disk
    try:
        total = _bytes_on_hub(name, config.revision, weights)
        if total is None:
            return _from_cache(name, config.revision, weights)
        # Asked for by name, not by commit: only then does the cache note which commit the name stands for.
        path = huggingface_hub.snapshot_download(name, revision=config.revision, **_chosen(weights),
                                                 tqdm_class=_progress_class(total, report, cancelled))  # fmt: skip
        report(Phase("download", total, total, "bytes"))  # files that were here already were never counted
    except HFValidationError as error:
        raise ModelError(f"{name!r} is no hub id.", "It looks like owner/name.") from error
    except broken as error:
        explained = _explained(name, config.revision, error)
        if explained is None:
            raise
        raise explained from error
    return _checked(Path(path), f"The model {name}", weights)


def _chosen(weights: bool) -> dict[str, list[str]]:
    """Which files of a repository are fetched: nothing out of its folders, no program, no pickle."""
    return {"allow_patterns": [*SMALL_FILES, WEIGHTS] if weights else list(SMALL_FILES), "ignore_patterns": ["*/*"]}


def _bytes_on_hub(name: str, revision: str | None, weights: bool) -> int | None:
    """What has to be fetched; None when the hub cannot be reached. Refuses a model without safetensors at once."""
    import huggingface_hub

    broken: tuple[type[Exception], ...] = (OSError, *_transport_errors())
    try:
        info = huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True, timeout=20)
    except broken as error:
        if _is_offline(error):
            return None
        raise
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if "/" not in file.rfilename}
    if weights and not any(file.endswith(".safetensors") for file in sizes):
        raise _no_safetensors(f"The model {name}", any(Path(file).suffix in PICKLES for file in sizes))
    patterns = _chosen(weights)["allow_patterns"]
    return sum(size for file, size in sizes.items() if any(Path(file).match(pattern) for pattern in patterns))


def _from_cache(name: str, revision: str | None, weights: bool) -> Path:
    import huggingface_hub

    try:
        path = huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True, **_chosen(weights))
        return _checked(Path(path), f"The downloaded copy of {name}", weights)
    except OSError as error:
        text = f"The hub cannot be reached, and {name} is not on this computer yet."
        raise ModelError(text, "Check the connection, or choose a folder or a model that is downloaded.") from error


def _transport_errors() -> tuple[type[Exception], ...]:
    """What a missing connection raises: the hub's client moved from httpx to httpx2 within one major version."""
    found = []
    for name in ("httpx2", "httpx"):
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(name).TransportError)
    return tuple(found)


def _is_offline(error: BaseException) -> bool:
    return isinstance(error, (ConnectionError, *_transport_errors()))


def _explained(name: str, revision: str | None, error: Exception) -> ModelError | None:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    page = f"https://huggingface.co/{name}"
    if isinstance(error, GatedRepoError) or status == 403:
        hint = f"Open {page}, accept its conditions, then log in: `hf auth login`."
        return ModelError(f"The model {name} asks for permission first.", hint)
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"The model {name} has no revision {revision!r}.", f"See {page}/tree/main for what there is.")
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        hint = "Check the name; for a private one log in: `hf auth login`."
        return ModelError(f"The model {name} is not on the hub, or it is private.", hint)
    if isinstance(error, HfHubHTTPError):
        return ModelError(f"The hub refused {name}: {' '.join(str(error).split())[:300]}.", "Try again later.")
    if _is_offline(error):
        return ModelError(f"The connection to the hub broke while {name} was downloaded.", "Start again: what was fetched is kept.")
    return None


def _progress_class(total: int, report: Callable[[Phase], None], cancelled: Callable[[], bool]) -> Any:
    """A tqdm that reports bytes as Phase `download` instead of drawing, and stops the download when it is cancelled."""
    from tqdm.auto import tqdm

    guard = threading.Lock()

    class Progress(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._counts_bytes = kwargs.get("unit") == "B"
            self._seen = float(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if cancelled():
                raise CancelledError(f"stopped after {format_bytes(self._seen)} of {format_bytes(total)}")
            if self._counts_bytes:
                with guard:  # several files are fetched at once
                    self._seen += n or 0
                    report(Phase("download", min(self._seen, total), total, "bytes"))

    return Progress
