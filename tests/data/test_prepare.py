"""From a file to a loader and a report, with tokenizers in folders as models have them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatrain.config import RunConfig
from megatrain.data.prepare import PreparationCancelled, Prepared, prepare
from megatrain.data.report import MAX_REASONS, OTHER_REASONS, DataReport
from megatrain.engine.events import Phase
from megatrain.errors import DataError
from tests.data import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved(tmp_path_factory.mktemp("chatml"), tiny.CHATML)


def config(path: Path | str, length: int = 128, **data) -> RunConfig:
    settings = {key: data.pop(key) for key in ("seed", "micro_batch_packs") if key in data}
    memory = {"micro_batch_packs": settings.pop("micro_batch_packs")} if "micro_batch_packs" in settings else {}
    return RunConfig.from_dict({"data": {"path": str(path), "sequence_length": length, **data},
                                "train": {"global_batch_tokens": 4 * length, **settings}, "memory": memory})  # fmt: skip


def lines(path: Path, rows: list) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return path


def pairs(count: int) -> list[dict]:
    return [{"prompt": f"Question {index}?", "completion": f"Answer {index}." * (1 + index % 5)} for index in range(count)]


def test_rows_become_batches_and_a_report(tmp_path: Path, chatml: Path) -> None:
    rows = [*pairs(30), {"prompt": "no answer"}, {"prompt": "q", "completion": " "}, {"prompt": "q", "completion": "a" * 500},
            {"prompt": "q" * 500, "completion": "a"}, {"prompt": "q", "completion": [{"role": "user", "content": "x"}]}]  # fmt: skip
    phases: list[Phase] = []
    made = prepare(config(lines(tmp_path / "a.jsonl", rows)), chatml, tmp_path / "cache", phases.append)
    report = made.report
    assert (report.rows_read, report.rows_kept, report.rows_cut) == (35, 32, 2)
    assert report.dropped == {
        "a pair of columns like `prompt` and `completion` is missing": 1, "column `completion` is missing or empty": 1,
        "there is no turn of the assistant": 1,
    }  # fmt: skip
    assert report.examples["column `completion` is missing or empty"] == [(32, 'a.jsonl line 32: {"prompt": "q", "completion": " "}')]
    assert (report.format, report.template, report.eval_rows, report.notes) == ("prompt_completion", "tokenizer", 1, [])
    assert 0 < report.trained_tokens < report.tokens
    assert report.largest_id == 261  # <|im_end|>
    assert 0.5 < report.packing_efficiency <= 1
    assert DataReport.from_json(report.to_json()) == report
    assert (phases[0], phases[-1]) == (Phase("tokenise", 0, 0, "rows"), Phase("tokenise", 35, 35, "rows"))
    batches = [made.loader.step_batch(step) for step in range(made.loader.steps_per_epoch)]
    assert batches[0].input_ids.shape == (4, 128)
    held_out = sum(batch.trained_tokens for batch in made.loader.eval_batches(4))
    assert sum(batch.trained_tokens for batch in batches) >= report.trained_tokens - held_out > 0


def test_a_second_run_reads_the_cache_and_not_the_rows(tmp_path: Path, chatml: Path) -> None:
    path = lines(tmp_path / "a.jsonl", pairs(30))
    first = prepare(config(path), chatml, tmp_path / "cache")
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")}
    second = prepare(config(path, seed=1), chatml, tmp_path / "cache")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")} == stamps
    assert second.report.cache_key == first.report.cache_key
    assert second.loader.fingerprint != first.loader.fingerprint


def test_what_decides_a_token_makes_another_cache(tmp_path: Path, chatml: Path) -> None:
    path = lines(tmp_path / "a.jsonl", pairs(30))
    other = tiny.saved(tmp_path / "other", tiny.LLAMA3)
    keys = {prepare(made, tokenizer, tmp_path / "cache").report.cache_key for made, tokenizer in [
        (config(path), chatml), (config(path), other), (config(path, length=64), chatml), (config(path, max_rows=29), chatml),
        (config(path, train_on="everything"), chatml), (config(path, format="prompt_completion"), chatml)]}  # fmt: skip
    lines(path, pairs(31))
    keys.add(prepare(config(path), chatml, tmp_path / "cache").report.cache_key)
    assert len(keys) == 7


def test_a_damaged_cache_is_built_again_with_the_same_fingerprint(tmp_path: Path, chatml: Path) -> None:
    made = config(lines(tmp_path / "a.jsonl", pairs(30)))
    first = prepare(made, chatml, tmp_path / "cache")
    file = tmp_path / "cache" / first.report.cache_key / "ids.bin"
    file.write_bytes(file.read_bytes()[:-8])
    assert prepare(made, chatml, tmp_path / "cache").loader.fingerprint == first.loader.fingerprint


def test_a_resumed_run_keeps_its_tokens_when_the_data_has_changed_or_gone(tmp_path: Path, chatml: Path) -> None:
    path = lines(tmp_path / "a.jsonl", pairs(30))
    first = prepare(config(path), chatml, tmp_path / "cache")
    lines(path, pairs(99))
    assert prepare(config(path), chatml, tmp_path / "cache").loader.fingerprint != first.loader.fingerprint
    for change in (lambda: None, path.unlink):
        change()
        resumed = prepare(config(path), chatml, tmp_path / "cache", cache_key=first.report.cache_key)
        assert (resumed.loader.fingerprint, resumed.report) == (first.loader.fingerprint, first.report)


def test_two_files_interrupted_in_the_second_epoch_go_on_as_if_nothing_had_been(tmp_path: Path, chatml: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    lines(folder / "b.jsonl", pairs(40)[20:])
    lines(folder / "a.jsonl", pairs(40)[:20])
    straight = prepare(config(folder), chatml, tmp_path / "one").loader
    steps = [straight.step_batch(step).input_ids.tolist() for step in range(3 * straight.steps_per_epoch)]
    resumed = prepare(config(folder), chatml, tmp_path / "two").loader
    middle = straight.steps_per_epoch + 2
    assert [resumed.step_batch(step).input_ids.tolist() for step in range(middle, len(steps))] == steps[middle:]
    assert resumed.fingerprint == straight.fingerprint


def test_the_plan_decides_nothing_about_a_step(tmp_path: Path, chatml: Path) -> None:
    path = lines(tmp_path / "a.jsonl", pairs(40))
    made = [prepare(config(path, micro_batch_packs=packs), chatml, tmp_path / "cache").loader for packs in (1, 2, 4)]
    assert len({loader.fingerprint for loader in made}) == 1
    assert len({loader.step_batch(5).input_ids.tobytes() for loader in made}) == 1


NOTHING = {
    "empty file": ("a.jsonl", "", "There is no row in a.jsonl"),
    "empty list": ("a.json", "[]", "There is no row in a.json"),
    "only a header": ("a.csv", "prompt,completion\n", "There is no row in a.csv"),
    "empty text": ("a.txt", "", "There is no row in a.txt"),
    "missing columns": ("a.csv", "title,body\nx,y\n", "a.csv: No known format has the columns title, body"),
    "no answers": ("a.jsonl", '{"prompt": "a", "completion": ""}\n' * 3,
                   "None of the 3 rows of a.jsonl gives a token to train on. 3 rows: column `completion` is missing or empty (row 1,"),
    "no objects": ("a.jsonl", "1\n2\n", "None of the 2 rows of a.jsonl gives a token to train on. 2 rows: the row is a JSON number"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_data_that_trains_nothing_stops_the_run_and_says_why(tmp_path: Path, chatml: Path, name: str) -> None:
    file, content, message = NOTHING[name]
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError) as error:
        prepare(config(tmp_path / file), chatml, tmp_path / "cache")
    assert error.value.message.startswith(message)
    assert error.value.hint
    assert list((tmp_path / "cache").glob("*")) == []


def test_a_mask_without_a_trained_token_is_an_error_and_not_a_run(tmp_path: Path) -> None:
    silent = tiny.saved(tmp_path / "silent", "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match="None of the 30 rows .* the chat template leaves out a turn"):
        prepare(config(lines(tmp_path / "a.jsonl", pairs(30))), silent, tmp_path / "cache")


def test_a_short_answer_survives_the_cutting_of_what_stands_around_it(tmp_path: Path, chatml: Path) -> None:
    turns = ["q" * 300, "a", "q" * 300, "b", "q" * 300]
    rows = [{"messages": [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(turns)]}]
    made = prepare(config(lines(tmp_path / "a.jsonl", rows)), chatml, tmp_path / "cache")
    assert (made.report.rows_kept, made.report.rows_cut, made.report.trained_tokens) == (1, 1, 2)
    assert made.loader.step_batch(0).trained_tokens == 4 * 2


def test_a_row_of_one_token_trains_nothing(tmp_path: Path) -> None:
    endless = tiny.saved(tmp_path / "model", bos=False, eos=None)
    report = prepare(config(lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "ab"}])), endless, tmp_path / "cache").report
    assert (report.dropped, report.trained_tokens) == ({"there is no token to train on": 1}, 1)
    assert report.notes == ["The tokenizer has no end token, so the model does not learn where a text ends."]


def test_a_long_text_is_split_and_loses_nothing(tmp_path: Path, chatml: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 9000)
    made = prepare(config(tmp_path / "a.txt"), chatml, tmp_path / "cache")
    assert (made.report.rows_cut, made.report.dropped, made.report.tokens) == (0, {}, 5 * 9000 + 2)
    assert made.report.trained_tokens == made.report.tokens - made.loader.num_packs
    assert made.report.packing_efficiency > 0.98


def test_many_reasons_are_counted_together(tmp_path: Path, chatml: Path) -> None:
    turns = [{"messages": [{"role": f"name {index}", "content": "x"}]} for index in range(100)]
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    report = prepare(config(lines(tmp_path / "a.jsonl", [good, *turns])), chatml, tmp_path / "cache").report
    assert len(report.dropped) == MAX_REASONS + 1
    assert report.dropped[OTHER_REASONS] == 100 - MAX_REASONS
    assert all(len(shown) <= 3 for shown in report.examples.values())


def test_only_the_first_rows_are_read_when_so_asked(tmp_path: Path, chatml: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(tmp_path / "b.jsonl", pairs(25)).read_text() + "\nnot JSON")
    assert prepare(config(tmp_path / "a.jsonl", max_rows=25), chatml, tmp_path / "cache").report.rows_read == 25


def test_cancelling_leaves_nothing_behind(tmp_path: Path, chatml: Path) -> None:
    calls = iter([False, False, True])
    with pytest.raises(PreparationCancelled):
        prepare(config(lines(tmp_path / "a.jsonl", pairs(2000))), chatml, tmp_path / "cache", cancelled=lambda: next(calls))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_preparation_that_is_killed_is_done_again(tmp_path: Path, chatml: Path) -> None:
    path = lines(tmp_path / "a.jsonl", pairs(3000))
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom megatrain.config import RunConfig\nfrom megatrain.data.prepare import prepare\n"
        "from megatrain.data.torchless import hide_torch\nhide_torch()\n"
        "def slow():\n    print('batch', flush=True)\n    time.sleep(0.3)\n    return False\n"
        f"config, folders = RunConfig.from_yaml({config(path).to_yaml()!r}), [Path({str(chatml)!r}), Path({str(tmp_path / 'cache')!r})]\n"
        "prepare(config, *folders, cancelled=slow)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    for _ in range(3):
        assert process.stdout.readline() == "batch\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = (tmp_path / "cache").iterdir()
    old = time.time() - 7200
    for file in [*left.iterdir(), left]:
        os.utime(file, (old, old))
    made = prepare(config(path), chatml, tmp_path / "cache")
    assert made.report.rows_kept == 3000
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [made.report.cache_key]


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(DataError, match="has no tokenizer that can be loaded"):
        prepare(config(lines(tmp_path / "a.jsonl", pairs(3))), tmp_path / "model", tmp_path / "cache")


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, chatml: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match="The tokens cannot be written to"):
        prepare(config(lines(tmp_path / "a.jsonl", pairs(3))), chatml, tmp_path / "cache")


def test_the_demo_trains_the_code_and_not_the_docstring(tmp_path: Path, glass_folder: Path) -> None:
    made: Prepared = prepare(config("demo", length=512, max_rows=60), glass_folder, tmp_path / "cache")
    assert (made.report.rows_read, made.report.rows_kept, made.report.eval_rows) == (60, 60, 1)
    assert made.report.template == "none"
    batch = made.loader.step_batch(0)
    assert 0.2 < batch.trained_tokens / batch.num_tokens < 0.95
