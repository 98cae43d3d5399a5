"""Checkpoints are whole or not there: killed at any instant, disk full at any byte, damaged files, retention."""

import json
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from megatrain.engine import checkpoint
from megatrain.engine.checkpoint import CheckpointWriter, complete, engine_states, file_states, latest, load, recover, verify
from megatrain.errors import CheckpointError, DiskFullError
from megatrain.models.blocks import BlockLayout, lay_out, layout_record


class Block:
    """A block with random states; counts how often it was taken."""

    def __init__(self, name: str, seed: int = 0, fault: Exception | None = None) -> None:
        parameters = {f"{name}.weight": torch.empty(7, 5), f"{name}.router": torch.empty(3)}
        buffers = {f"{name}.bias": torch.empty(2, dtype=torch.int64)}
        fp32 = frozenset([f"{name}.router"])
        args = (torch.bfloat16, fp32, frozenset(parameters), frozenset(buffers))
        self.layout: BlockLayout = lay_out(name, "layer0", parameters, buffers, *args)
        generator = torch.Generator().manual_seed(seed)
        numel = self.layout.numel
        weights = torch.zeros(self.layout.weight_bytes, dtype=torch.uint8)  # the gaps between the sections stay zero
        for part in file_states(self.layout, {"weights": weights}).values():
            part.view(torch.uint8).random_(0, 128, generator=generator)
        self.states = {
            "weights": weights,
            "masters": torch.randint(-100, 100, (self.layout.numel_a,), dtype=torch.int16, generator=generator),
            "exp_avg": torch.randn(numel, generator=generator),
            "exp_avg_sq": torch.rand(numel, generator=generator),
        }
        self.fault, self.times_taken = fault, 0

    def read(self) -> dict[str, torch.Tensor]:
        if self.fault:
            raise self.fault
        return file_states(self.layout, self.states)

    def taken(self) -> None:
        self.times_taken += 1

    @property
    def name(self) -> str:
        return self.layout.name


def blocks(seed: int = 0) -> list[Block]:
    return [Block(name, seed + index) for index, name in enumerate(("embed", "layer000", "head"))]


def save(root: Path, step: int, keep: int = 10, seed: int = 0) -> Path:
    writer = CheckpointWriter(root, keep)
    writer.start(step, blocks(seed), {"position": step})
    return Path(writer.wait().path)


def equal(folder: Path, seed: int) -> bool:
    reader = load(folder)
    return all(same(engine_states(block.layout, reader.block(block.name)), block.states) for block in blocks(seed))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Every bit, types included."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in expected.items()
    )


def test_everything_comes_back(tmp_path: Path) -> None:
    given = blocks(seed=3)
    writer = CheckpointWriter(tmp_path / "checkpoints", keep=2)
    layouts = [layout_record(block.layout) for block in given]
    meta = {"position": 17, "rate": 1e-5, "names": ["a"], "config": {"seed": 1}, "layouts": layouts}
    writer.start(100, given, meta)
    done = writer.wait()
    assert done.step == 100
    assert Path(done.path) == latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-00000100"
    assert [block.times_taken for block in given] == [1, 1, 1]
    reader = load(Path(done.path))
    assert (reader.step, reader.meta, reader.num_bytes) == (100, json.loads(json.dumps(meta)), done.num_bytes)
    assert reader.layouts == [block.layout for block in given]
    for block in given:
        found = reader.block(block.name)
        assert list(found) == ["weights", "weights_fp32", "buffers", "masters", "exp_avg", "exp_avg_sq"]
        assert found["weights"].dtype == torch.bfloat16
        assert same(engine_states(block.layout, found), block.states)
    assert set(reader.block("head", {"weights", "masters"})) == {"weights", "masters"}
    assert verify(reader.path) == []
    assert writer.finished() is None
    with pytest.raises(CheckpointError, match="holds no block tail"):
        reader.block("tail")


def test_order_is_that_of_saving_and_numbers_are_not_compared_as_text(tmp_path: Path) -> None:
    for step in (9, 90, 100):
        save(tmp_path, step)
    assert latest(tmp_path).name == "step-00000100"
    save(tmp_path, 50)  # the run went back to an earlier step and trained on from there
    assert latest(tmp_path).name == "step-00000050"


def test_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, seed=1)
    save(tmp_path, 5, seed=2)
    assert equal(latest(tmp_path), seed=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("seed", range(6))
def test_retention(seed: int, tmp_path: Path) -> None:
    """Whatever is saved in whatever order: the newest `keep` stay, the last one always, and nothing else."""
    draw = random.Random(seed)
    keep, order = draw.randint(1, 4), []
    writer = CheckpointWriter(tmp_path, keep)
    for _ in range(8):
        step = draw.choice([1, 2, 10, 99, 100, 1000])
        writer.start(step, [Block("embed")], {})
        done = writer.wait()
        order = [*(other for other in order if other != step), step][-keep:]
        assert [reader.step for reader in complete(tmp_path)] == order
        assert len(list(tmp_path.iterdir())) == len(order)
        assert latest(tmp_path) == Path(done.path)


def test_nothing_old_is_removed_when_the_new_one_fails(tmp_path: Path) -> None:
    old = save(tmp_path, 1, keep=1)
    writer = CheckpointWriter(tmp_path, keep=1)
    given = [Block("embed"), Block("layer000", fault=RuntimeError("device lost")), Block("head")]
    writer.start(2, given, {})
    with pytest.raises(CheckpointError, match="Saving step 2 failed.*device lost"):
        writer.wait()
    assert [block.times_taken for block in given] == [1, 1, 1]  # nobody waits for ever
    assert latest(tmp_path) == old
    assert verify(old) == []
    assert list(tmp_path.iterdir()) == [old]
    writer.start(3, blocks(), {})  # the failure was told once; the writer goes on
    assert writer.wait().removed == ("step-00000001",)


def test_failure_is_raised_by_the_next_start_too(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.start(1, [Block("embed", fault=RuntimeError("gone"))], {})
    with pytest.raises(CheckpointError, match="gone"):
        writer.start(2, blocks(), {})


def test_training_goes_on_while_a_block_is_awaited(tmp_path: Path) -> None:
    released = threading.Event()
    slow = Block("layer000")
    slow.read = lambda: released.wait(30) and slow.states  # type: ignore[method-assign]
    first = Block("embed")
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.start(1, [first, slow], {})
    assert writer.finished() is None
    assert writer.busy
    assert latest(tmp_path) is None
    released.set()
    assert writer.wait().step == 1
    assert slow.times_taken == first.times_taken == 1


def test_meta_that_json_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=1)
    with pytest.raises(ValueError, match="JSON compliant"):
        writer.start(1, blocks(), {"loss": float("nan")})


def test_protected_checkpoint_stays(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    save(tmp_path, 2)
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.start(3, blocks(), {}, protect=first)
    assert writer.wait().removed == ("step-00000002",)
    assert [reader.step for reader in complete(tmp_path)] == [1, 3]


def test_block_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    other = lay_out("head", "head", {"head.weight": torch.empty(9, 9)}, {}, torch.bfloat16, frozenset(), frozenset(), frozenset())
    with pytest.raises(CheckpointError, match="Block head of the checkpoint does not fit this model: weights differs"):
        engine_states(other, load(folder).block("head"))


# Full disk ------------------------------------------------------------------------------------------------------------


def test_full_disk_at_any_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = save(tmp_path, 1, keep=1, seed=5)
    total = sum(path.stat().st_size for path in old.iterdir())
    original = checkpoint.platform.write_at
    written = 0
    limit = 0

    def limited(descriptor: int, buffer: object, offset: int) -> None:
        nonlocal written
        view = memoryview(buffer).cast("B")
        room = max(0, min(len(view), limit - written))
        if room:
            original(descriptor, view[:room], offset)
        written += room
        if room < len(view):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.platform, "write_at", limited)
    for room_on_disk in [0, 1, *range(50, total - 50, 331)]:
        written, limit, given = 0, room_on_disk, blocks()
        writer = CheckpointWriter(tmp_path, keep=1)
        writer.start(2, given, {})
        with pytest.raises(DiskFullError, match="No space is left"):
            writer.wait()
        assert [block.times_taken for block in given] == [1, 1, 1]
        assert list(tmp_path.iterdir()) == [old]
    assert verify(old) == []
    assert equal(old, seed=5)


def test_full_disk_when_flushing_and_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    writer = CheckpointWriter(tmp_path / "root", keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "fsync", full)
        writer.start(1, blocks(), {})
        with pytest.raises(DiskFullError):
            writer.wait()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        CheckpointWriter(tmp_path / "file", keep=1)


# Damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["header", "middle", "end"])
def test_changed_byte_is_found(place: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    path = folder / "block-0001.safetensors"
    content = bytearray(path.read_bytes())
    content[{"header": 30, "middle": len(content) // 2, "end": -1}[place]] ^= 1
    path.write_bytes(content)
    assert len(verify(folder)) == 1
    assert "block-0001.safetensors" in verify(folder)[0]
    with pytest.raises(CheckpointError, match=r"block-0001\.safetensors"):
        load(folder).block("layer000")
    load(folder).block("head")


def test_missing_short_and_foreign_files_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 2)
    save(tmp_path, 1)
    path = folder / "block-0002.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"block-0002\.safetensors has \d+ bytes instead of"):
        load(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"block-0002\.safetensors is missing"):
        load(folder)
    assert latest(tmp_path).name == "step-00000001"
    assert "missing" in verify(folder)[0]
    path.write_bytes(content)
    assert verify(folder) == []


@pytest.mark.parametrize("fault", ["gone", "cut", "changed", "format", "list"])
def test_damaged_manifest(fault: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    path = folder / "manifest.json"
    text = path.read_text()
    if fault == "gone":
        path.unlink()
    elif fault == "format":
        manifest = json.loads(text) | {"format": 99}
        path.write_text(json.dumps(manifest | {"sha256": checkpoint._digest(manifest)}))
    else:
        path.write_text({"cut": text[:-20], "changed": text.replace('"position": 1', '"position": 2'), "list": "[]"}[fault])
    with pytest.raises(CheckpointError, match="format 99" if fault == "format" else "manifest"):
        load(folder)
    assert latest(tmp_path) is None


# Killed at any instant ------------------------------------------------------------------------------------------------

_KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, {repository!r})
from megatrain import platform
from megatrain.engine import checkpoint
from tests.engine.test_checkpoint import blocks, save

os.fsync = lambda descriptor: None  # a killed process loses nothing that the system has already; flushing only takes time
root = Path(sys.argv[1])
for case in ("first", "again"):
    results = []
    for instant in range(1000):
        shutil.rmtree(root, ignore_errors=True)
        save(root, 1, keep=1, seed=1)
        if case == "again":
            save(root, 2, keep=2, seed=4)
        child = os.fork()
        if child == 0:
            left = instant
            def mortal(function):
                def call(*args, **kwargs):
                    global left
                    left -= 1
                    if left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*args, **kwargs)
                return call
            platform.write_at = mortal(platform.write_at)
            platform.flush_folder = mortal(platform.flush_folder)
            for name in ("fsync", "replace", "mkdir", "rmdir", "unlink", "open"):
                setattr(os, name, mortal(getattr(os, name)))
            save(root, 2, keep=1, seed=2)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        checkpoint.CheckpointWriter(root, keep=1)  # the next start
        found = checkpoint.latest(root)
        sound = found is not None and checkpoint.verify(found) == []
        names = sorted(path.name for path in root.iterdir())
        results.append([killed, sound, found.name if found else "", names])
        if not killed:
            break
    print(json.dumps(results))
"""


@pytest.mark.skipif(not hasattr(checkpoint.os, "fork"), reason="needs fork")
def test_killed_at_any_instant(tmp_path: Path) -> None:
    """First step 2 follows step 1; then step 2 is there already and is saved anew."""
    script = _KILLED.format(repository=str(Path(__file__).parents[2]))
    arguments = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "root")]
    output = subprocess.run(arguments, capture_output=True, text=True, timeout=250, check=False)
    assert output.returncode == 0, output.stderr[-2000:]
    for line, before in zip(output.stdout.splitlines()[-2:], ("step-00000001", "step-00000002"), strict=True):
        results = json.loads(line)
        assert len(results) > 15
        for killed, sound, found, names in results:
            assert sound, (killed, found, names)
            assert not [name for name in names if name.startswith(".tmp-")]
        assert results[0][2] == before
        assert results[-1] == [False, True, "step-00000002", ["step-00000002"]]


def test_leftovers_are_removed_and_a_replaced_checkpoint_put_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 7, seed=1)
    shutil.copytree(folder, tmp_path / ".tmp-step-00000008")
    shutil.copytree(folder, tmp_path / ".tmp-removed-step-00000006")
    folder.rename(tmp_path / ".tmp-replaced-step-00000007")
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert equal(folder, seed=1)
