"""Without torch a tokenizer gives the same tokens."""

import json
import subprocess
import sys
from pathlib import Path

from megatrain.data.chat import Encoder, load_tokenizer
from megatrain.data.formats import Conversation
from megatrain.runs.model_source import DEMO_FOLDER
from tests.data import tiny

ROOT = Path(__file__).parents[2]
MESSAGES = tiny.chat("Hi 😀", "Yo", "Ok?", "No.", system="Be")
TRAINED = [message["role"] == "assistant" for message in MESSAGES]
PROGRAM = f"""
import importlib.metadata, json, sys
from pathlib import Path
from megatrain.data.chat import Encoder, load_tokenizer
from megatrain.data.formats import Conversation
from megatrain.data.torchless import hide_torch
hide_torch()
found = [Encoder(load_tokenizer(Path(folder))).encode(Conversation({MESSAGES!r}, {TRAINED!r})) for folder in sys.argv[1:]]
print(json.dumps([[encoded.ids, [bool(trained) for trained in encoded.mask]] for encoded in found]))
assert "torch" not in sys.modules
assert importlib.metadata.version("transformers")
"""


def test_the_same_tokens_and_no_torch(tmp_path: Path, glass_folder: Path) -> None:
    folders = [tiny.saved(tmp_path / "chatml", tiny.CHATML), tiny.saved(tmp_path / "llama", tiny.LLAMA3), glass_folder, DEMO_FOLDER]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, folders)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    here = [Encoder(load_tokenizer(folder)).encode(Conversation(MESSAGES, TRAINED)) for folder in folders]
    assert json.loads(done.stdout) == [[list(encoded.ids), [bool(trained) for trained in encoded.mask]] for encoded in here]
