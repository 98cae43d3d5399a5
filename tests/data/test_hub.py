"""Data by hub id, over HTTP against a small hub; the client runs in a process of its own, as HF_ENDPOINT asks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.hub_server import HubServer

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from megatrain.config import DataConfig
from megatrain.data.sources import open_source
from megatrain.data.torchless import hide_torch
from megatrain.errors import DataError
hide_torch()  # as the processes do that read data and tokenize
for settings in json.loads(sys.argv[1]):
    try:
        source = open_source(DataConfig(**settings))
        rows = list(source.rows())
        print(json.dumps({"rows": [row.values for row in rows], "place": rows[-1].place, "total": source.total,
                          "version": source.version(), "notes": source.notes}))
    except DataError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}))
"""


def ask(hub: HubServer, cache: Path, *configs: dict, **variables: str) -> list[dict]:
    """What `open_source` finds for each configuration, in a client process of this hub."""
    environment = {**os.environ, **hub.environment(cache), **variables}
    command = [sys.executable, "-c", PROGRAM, json.dumps(configs)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows(split: str, count: int) -> list[dict]:
    return [{"question": f"{split} {index}?", "answer": f"{index}"} for index in range(count)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "hub" / "datasets" / "me" / "chat"
    (folder / "data").mkdir(parents=True)
    (folder.parent / "closed").mkdir()
    (folder.parent / "closed" / "a.jsonl").write_text('{"text": "a"}')
    for split, count in (("train", 30), ("test", 5)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(split, count)), folder / "data" / f"{split}-00000-of-00001.parquet")
    return tmp_path / "hub"


def test_a_data_set_by_its_id(root: Path, tmp_path: Path) -> None:
    with HubServer(root) as hub:
        commit = hub.commit("datasets", "me/chat")
        whole, other, first, by_url, *errors = ask(
            hub, tmp_path / "cache", {"path": "me/chat"}, {"path": "me/chat", "split": "test"}, {"path": "me/chat", "max_rows": 7},
            {"path": "https://huggingface.co/datasets/me/chat/viewer?row=1", "split": "test"},
            {"path": "me/none"}, {"path": "me/chat", "split": "tset"}, {"path": "me/chat", "subset": "de"})  # fmt: skip
    assert whole["rows"] == rows("train", 30)
    assert (whole["place"], whole["total"], whole["notes"]) == ("me/chat train row 30", 30, [])
    assert whole["version"].startswith(commit)
    assert other["rows"] == by_url["rows"] == rows("test", 5)
    assert first["rows"] == rows("train", 7)
    assert [error["error"].split(":")[0] for error in errors] == [
        "The data set me/none is not on the hub, or it is private.", "The data set me/chat has no split `tset`",
        "The data set me/chat has several subsets"]  # fmt: skip
    assert "['train', 'test']" in errors[1]["error"]


def test_a_hub_that_refuses_or_is_gone(root: Path, tmp_path: Path) -> None:
    with HubServer(root) as hub:
        hub.gated.add("me/closed")
        chat, closed = ask(hub, tmp_path / "cache", {"path": "me/chat"}, {"path": "me/closed"})
    assert len(chat["rows"]) == 30
    assert closed["error"] == "The data set me/closed is gated."
    (gone,) = ask(hub, tmp_path / "cache", {"path": "me/chat"})
    assert gone["error"].startswith("The hub cannot be reached for the data set me/chat")
    found, missing = ask(hub, tmp_path / "cache", {"path": "me/chat"}, {"path": "me/none"}, HF_HUB_OFFLINE="1")
    assert (found["rows"], len(found["notes"])) == (rows("train", 30), 1)
    assert missing["error"] == "The data set me/none is not in the local cache."


def test_a_new_commit_is_another_version(root: Path, tmp_path: Path) -> None:
    with HubServer(root) as hub:
        (before,) = ask(hub, tmp_path / "cache", {"path": "me/chat", "split": "test"})
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows("new", 3)), root / "datasets/me/chat/data/test-00000-of-00001.parquet")
        (after,) = ask(hub, tmp_path / "cache", {"path": "me/chat", "split": "test"})
    assert after["rows"] == rows("new", 3)
    assert after["version"] != before["version"]


SNAPSHOT = "import sys, huggingface_hub; print(huggingface_hub.snapshot_download('me/model', max_workers=1))"


def test_a_model_by_its_id_also_after_a_connection_that_broke(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models" / "me" / "model"
    (folder / "sub").mkdir(parents=True)
    content = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 2000, "sub/notes.txt": b"x"}
    for name, data in content.items():
        (folder / name).write_bytes(data)
    with HubServer(tmp_path / "hub") as hub:
        hub.token = "hf_secret"
        hub.cut_after = 300_000
        for attempt in range(2):
            environment = {**os.environ, **hub.environment(tmp_path / "cache")}
            done = subprocess.run([sys.executable, "-c", SNAPSHOT], env=environment, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
            assert attempt == 0, done.stderr
    assert hub.cut_after is None
    path = Path(done.stdout.strip().splitlines()[-1])
    assert {name: (path / name).read_bytes() for name in content} == content
