"""Claim: a log is read for what it is, in every format, or refused with the line that is wrong.

Setting: small files. Time: seconds.
"""

import datetime
import io
import json
import sys
import zipfile
from dataclasses import replace

import jax
import numpy as np
import pytest

from configs.audit_rollouts import FULL, Columns
from experiments import audit_rollouts
from experiments.audit_rollouts import collection, command
from experiments.audit_rollouts.chunks import ROWS
from experiments.audit_rollouts.faults import BadLog
from tests.rollout_logs import logprobs, rollouts, write_csv, write_jsonl

ROW = {"group": 1, "reward": 1.0, "length": 3}
STEP = {"step": 1}


def read(*paths, config=FULL):
  with jax.enable_x64(True):
    return collection.read(paths, config)


def columns(**names):
  return replace(FULL, columns=Columns(**names))


def jsonl(path, *rows):
  lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
  path.write_text("\n".join(lines) + "\n")
  return path


def same(a, b):
  for field in ("group", "length", "reward", "step", "truncated"):
    np.testing.assert_array_equal(getattr(a.responses, field), getattr(b.responses, field))


def test_json_lines_csv_and_arrays_are_the_same_log(tmp_path):
  flat = rollouts(0, steps=6, prompts=2, size=4, limit=200)
  want = read(write_jsonl(tmp_path / "log.jsonl", flat))
  assert want.responses.reward.shape == (48,)
  assert want.responses.truncated.any()
  np.testing.assert_array_equal(want.responses.group, np.repeat(np.arange(12), 4))
  np.testing.assert_array_equal(want.responses.length, flat["length"])
  same(read(write_csv(tmp_path / "log.csv", flat)), want)
  np.savez(tmp_path / "flat.npz", **flat)
  same(read(tmp_path / "flat.npz"), want)
  grouped = {key: x.reshape(12, 4) for key, x in flat.items() if key != "group"}
  np.savez(tmp_path / "groups.npz", **(grouped | {"step": grouped["step"][:, 0]}))
  same(read(tmp_path / "groups.npz"), want)


def test_groups_may_be_scattered_over_chunks_and_files(tmp_path):
  flat = rollouts(0, steps=70, prompts=16, size=8)  # more rows than a chunk holds
  assert len(flat["reward"]) > ROWS
  order = np.random.default_rng(0).permutation(len(flat["reward"]))
  half = len(order) // 2
  parts = [{key: x[part] for key, x in flat.items()} for part in (order[:half], order[half:])]
  paths = [write_jsonl(tmp_path / f"{i}.jsonl", part) for i, part in enumerate(parts)]
  found = read(*paths).responses
  _, want = np.unique(flat["group"][order], return_inverse=True)
  pairs = np.unique(np.stack([found.group, want]), axis=1)
  assert pairs.shape[1] == len(np.unique(want)) == found.group.max() + 1


def test_the_same_id_at_another_step_is_another_group(tmp_path):
  rows = [ROW | {"group": "a", "step": step} for step in (1, 1, 2, 2)]
  np.testing.assert_array_equal(
    read(jsonl(tmp_path / "a.jsonl", *rows)).responses.group, [0, 0, 1, 1]
  )


@pytest.mark.parametrize(
  "ids",
  [
    (-1, -2),
    ("1", "2"),
    (1.0, 2.0),
    ([{"content": "a"}], []),
    (2**60, 2**60 + 1),
    (10**30, 10**30 + 1),
  ],
)
def test_ids_of_any_kind(tmp_path, ids):
  rows = [ROW | {"group": ids[i]} for i in (0, 1, 0, 1)]
  np.testing.assert_array_equal(
    read(jsonl(tmp_path / "a.jsonl", *rows)).responses.group, [0, 1, 0, 1]
  )


def verl(step, score, output="some text", **more):
  row = {"input": f"prompt {step}", "output": output, "gts": "4", "score": score, "step": step}
  return row | more


def test_a_rollout_dump_of_verl(tmp_path):
  first = jsonl(tmp_path / "1.jsonl", verl(1, 1.0, acc=True), verl(1, 0.0, "é", acc=False))
  second = jsonl(tmp_path / "2.jsonl", verl(2, 0.0, acc=True), verl(2, -1.0, "four", acc=False))
  log = read(first, second)
  assert log.unit == "characters"
  assert "verl rollout dump" in log.notes[0]
  assert "LENGTHS ARE IN CHARACTERS" in log.notes[0]
  np.testing.assert_array_equal(log.responses.group, [0, 0, 1, 1])
  np.testing.assert_array_equal(log.responses.length, [9, 1, 9, 4])
  np.testing.assert_array_equal(log.responses.reward, [1.0, 0.0, 0.0, -1.0])
  np.testing.assert_array_equal(log.responses.step, [1, 1, 2, 2])
  # Some versions write every value as text.
  texts = [{k: str(v) for k, v in verl(1, score, acc=True).items()} for score in (1.0, 0.5)]
  np.testing.assert_array_equal(
    read(jsonl(tmp_path / "3.jsonl", *texts)).responses.reward, [1, 0.5]
  )
  # A column of tokens, and an id, are better than the text and the prompt.
  counted = [verl(1, 1.0, response_length=7, uid=x) for x in "abab"]
  log = read(jsonl(tmp_path / "4.jsonl", *counted))
  assert log.unit == "tokens"
  np.testing.assert_array_equal(log.responses.length, [7] * 4)
  np.testing.assert_array_equal(log.responses.group, [0, 1, 0, 1])


def trl(**rewards):
  row = {"step": "3", "prompt": [{"role": "user", "content": "2 + 2?"}]}
  row |= {"completion": [{"role": "assistant", "content": "four"}]}
  return row | rewards | {"advantage": 0.5}


def test_completions_of_trl(tmp_path):
  log = read(jsonl(tmp_path / "a.jsonl", trl(accuracy_reward=1.0), trl(accuracy_reward=None)))
  assert "TRL completions" in log.notes[0]
  assert log.counts["unscored"] == 1
  np.testing.assert_array_equal(log.responses.length, [4])
  several = [trl(accuracy_reward=x, format_reward=y, extra=9) for x, y in ((1.0, 0.5), (None, 0.5))]
  path = jsonl(tmp_path / "b.jsonl", *several)
  with pytest.raises(BadLog, match="--columns.reward accuracy_reward format_reward"):
    read(path)
  log = read(path, config=columns(reward=("accuracy_reward", "format_reward")))
  np.testing.assert_array_equal(log.responses.reward, [1.5, 0.5])


def test_log_probs_count_the_tokens(tmp_path):
  trainer, sampler = logprobs(np.array([3, 5, 1, 2]))
  flat = {"group": [1, 1, 2, 2], "reward": [1, 0, 1, 0]}
  flat |= {"old_log_probs": trainer, "rollout_log_probs": sampler}
  log = read(write_jsonl(tmp_path / "a.jsonl", flat))
  np.testing.assert_array_equal(log.responses.length, [3, 5, 1, 2])
  total = [np.sum(a - b) for a, b in zip(trainer, sampler)]
  np.testing.assert_allclose(log.tokens.sums["total"], total, rtol=1e-12)
  padded = np.full((2, 4, 6), np.nan)
  mask = np.arange(6) < np.array([[3], [5], [1], [2]])
  for side, rows in zip(padded, (trainer, sampler)):
    side[mask] = np.concatenate(rows)
  arrays = {"group": flat["group"], "reward": flat["reward"], "mask": mask}
  np.savez(tmp_path / "a.npz", **arrays, old_log_probs=padded[0], rollout_log_probs=padded[1])
  again = read(tmp_path / "a.npz")
  np.testing.assert_array_equal(again.responses.length, [3, 5, 1, 2])
  for key, sums in log.tokens.sums.items():
    np.testing.assert_array_equal(again.tokens.sums[key], sums)


def test_a_response_may_be_empty(tmp_path):
  log = read(jsonl(tmp_path / "a.jsonl", ROW, ROW | {"length": 0}))
  np.testing.assert_array_equal(log.responses.length, [3, 0])


def test_a_reason_to_finish_is_a_flag(tmp_path):
  rows = [ROW | {"finish_reason": x} for x in ("stop", "length")]
  log = read(jsonl(tmp_path / "a.jsonl", *rows))
  np.testing.assert_array_equal(log.responses.truncated, [False, True])


def test_rewards_that_are_no_numbers_are_left_out_and_counted(tmp_path):
  text = '{"group": 1, "reward": NaN, "length": 3}'
  rows = [ROW, ROW, text, ROW | {"reward": None}, ROW | {"reward": float("inf")}]
  log = read(jsonl(tmp_path / "a.jsonl", *rows))
  assert log.counts == {"files": 1, "responses": 5, "skipped": 0, "unscored": 3}
  assert len(log.responses.reward) == 2
  table = "group,reward,length\n1,1,3\n1,,3\n1,nan,3\n"
  (tmp_path / "a.csv").write_text(table)
  assert read(tmp_path / "a.csv").counts["unscored"] == 2


def without(*names):
  return {key: value for key, value in ROW.items() if key not in names}


LONG = ROW | {"trainer_logprobs": [-1.0, -1.0, -1.0], "sampler_logprobs": [-1.0, -1.0, -1.0]}


@pytest.mark.parametrize(
  ("rows", "message"),
  [
    ([without("reward")], "line 1: no column for the reward: name it with --columns.reward"),
    ([without("group")], "line 1: no column for the group: name it with --columns.group"),
    ([without("length")], "line 1: no column for the length: .*Columns: group, reward"),
    ([ROW | {"score": 1}], "reward and score could be the reward: --columns.reward reward"),
    ([ROW, ROW, without("length")], "line 3: no column 'length', which line 1 has"),
    ([ROW, ROW | {"reward": "good"}], "line 2: reward is text here, 'good', and a number before"),
    ([ROW, ROW | {"reward": True}], "line 2: reward is true or false here, True, and a number"),
    ([ROW, ROW | {"reward": [1]}], r"line 2: reward is a list here, \[1\], and a number before"),
    ([ROW | {"reward": "good"}] * 2, "line 1: reward is no number: 'good'"),
    ([ROW, ROW | {"reward": 10**400}], "line 2: reward is no number: 1000"),
    ([ROW, ROW | {"length": -1}], "line 2: length must be a whole number, at least 0: -1"),
    ([ROW, ROW | {"length": 2.5}], "line 2: length must be a whole number, at least 0: 2.5"),
    ([ROW, ROW | {"length": None}], "line 2: length must be a whole number, at least 0: None"),
    ([ROW, ROW | {"group": "a"}], "line 2: group is text here, 'a', and a number before"),
    ([ROW | {"group": "a"}, ROW | {"group": ""}], "line 2: no group"),
    ([ROW | {"step": 1}, ROW | {"step": "x"}], "line 2: step is text here"),
    (
      [ROW | {"truncated": 2}] * 2,
      "line 1: truncated must be true or false, or length or stop: 2",
    ),
    ([ROW, "", '{"group": 1'], "line 3: not JSON"),
    ([ROW, "[1, 2]"], "line 2: a list where an object is expected"),
    ([ROW, "{" + '"a": [' * 100_000], "line 2: not JSON"),
    ([ROW | {"group": i} for i in range(3)], "line 1: its group does not come back, and neither"),
    ([ROW | {"reward": None}] * 2, "line 1: its reward is no finite number, and neither"),
    (
      [ROW | {"sample_id": x} for x in "aba"],
      "line 3: the same response of the same group as .*line 1",
    ),
    ([LONG, LONG | {"length": 2}], "line 2: length is 2, and there are 3 log-probs"),
    (
      [LONG, LONG | {"sampler_logprobs": [-1.0]}],
      "line 2: 3 trainer_logprobs, 1 sampler_logprobs: one of each per token",
    ),
    ([LONG | {"mask": [1, 1]}] * 2, "3 sampler_logprobs, 2 mask: one of each per token"),
    ([LONG, LONG | {"trainer_logprobs": [-1.0, -1.0, 0.5]}], "trainer_logprobs of token 3 is 0.5"),
    (
      ["{" + json.dumps(LONG | {"sampler_logprobs": 0})[1:-2] + "[-1.0, NaN, -1.0]}"] * 2,
      "line 1: sampler_logprobs of token 2 is nan",
    ),
    ([LONG, LONG | {"trainer_logprobs": 3}], "line 2: trainer_logprobs is no list of numbers: 3"),
    ([LONG, LONG | {"trainer_logprobs": ["a"]}], "line 2: trainer_logprobs is no list of numbers"),
  ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, rows, message):
  path = jsonl(tmp_path / "log.jsonl", *rows)
  with pytest.raises(BadLog, match=message) as caught:
    read(path)
  assert str(path) in str(caught.value)


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path):
  path = jsonl(
    tmp_path / "a.jsonl", ROW, "{", ROW | {"reward": "x"}, ROW | {"reward": 0}, without("length")
  )
  log = read(path, config=replace(FULL, skip_bad_rows=True))
  assert log.counts == {"files": 1, "responses": 2, "skipped": 3, "unscored": 0}
  assert "3 rows were skipped; the first: " in log.notes[-1]
  assert "line 2" in log.notes[-1]


def test_a_line_that_was_being_written(tmp_path):
  path = jsonl(tmp_path / "a.jsonl", ROW, ROW, ROW)
  path.write_text(path.read_text()[:-10])
  with pytest.raises(BadLog, match="line 3: the last line is cut off"):
    read(path)
  assert read(path, config=replace(FULL, skip_bad_rows=True)).counts["responses"] == 2


def stored(save, *arrays, **named):
  file = io.BytesIO()
  save(file, *arrays, **named)
  return file.getvalue()


def flipped(content):
  """Bits of the compressed part are damaged."""
  return content[:100] + bytes(byte ^ 0xFF for byte in content[100:200]) + content[200:]


def zipped(name, text):
  file = io.BytesIO()
  with zipfile.ZipFile(file, "w") as archive:
    archive.writestr(name, text)
  return file.getvalue()


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.jsonl", b"", "is empty"),
    ("a.csv", b" \n\n", "is empty"),
    ("a.csv", b"\xef\xbb\xbf", "is empty"),
    ("a.jsonl", b'\n\n{"group": 1, "length": 2}\n', "line 3: no column for the reward"),
    ("a.csv", b"\ngroup,length\n1,2\n", "line 2: no column for the reward"),
    ("a.csv", b"a" * 200_000 + b"\n1,2\n", "line 1: no column for the reward"),
    ("a.jsonl", b"PK\x03\x04....", "line 1: not JSON lines: it is a zip archive"),
    ("a.jsonl", b"\x1f\x8b....", "line 1: not JSON lines: it is compressed by gzip"),
    ("a.jsonl", b"PAR1....", "line 1: not JSON lines: it is a parquet file"),
    ("a.jsonl", b"group,reward,length\n", "line 1: not JSON lines: it does not begin with an obj"),
    ("a.jsonl", b'[{"group": 1}]', "line 1: it is one JSON array"),
    ("a.jsonl", b'{"group": "\xff"}\n', "line 1: not UTF-8 text"),
    ("a.jsonl", b"{\0\0", "line 1: not JSON lines: it holds bytes that are no text"),
    ("a.csv", b'{"group": 1}\n', "line 1: not CSV: it begins like JSON"),
    ("a.csv", b"group,group,reward\n", "line 1: two columns have the same name"),
    ("a.csv", b"group,reward,length\n1,1,3\n1,1\n", "line 3: 2 fields where line 1 has 3"),
    ("a.csv", b'group,reward,length\n1,1,3\n1,"1,3\n', "line 3: not CSV"),
    ("a.csv", b"group,reward,length\n1,1,3\n1,\xff,3\n", "line 3: not UTF-8 text"),
    ("a.csv", b"group,reward,length\n", "no row can be read"),
    ("a.npz", b"group,reward,length\n", "is not an .npz file"),
    ("a.npz", b"PK\x03\x04....", "is not an .npz file, or a damaged one"),
    ("a.npz", stored(np.save, np.ones(3)), "is not an .npz file, or a damaged one"),
    ("a.npz", flipped(stored(np.savez_compressed, reward=np.arange(999.0))), "a damaged one"),
    ("a.npz", zipped("a.txt", "hello"), "a.npz: no column for the reward"),
    ("a.parquet", b"group,reward\n", "is not a parquet file"),
    ("a.txt", b"group,reward\n", "a log's name ends in .jsonl"),
  ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path, name, content, message):
  path = tmp_path / name
  path.write_bytes(content)
  with pytest.raises(BadLog, match=message) as caught:
    read(path)
  assert str(path) in str(caught.value)


def test_what_is_no_file(tmp_path):
  with pytest.raises(BadLog, match=r"is a folder. Name the files in it"):
    read(tmp_path)
  with pytest.raises(BadLog, match="is not there"):
    read(tmp_path / "no.jsonl")
  with pytest.raises(BadLog, match="Name the logs to audit"):
    read()
  path = jsonl(tmp_path / "a.jsonl", ROW, ROW)
  with pytest.raises(BadLog, match="is named twice"):
    read(path, tmp_path / "." / "a.jsonl")


def test_files_that_hold_different_things(tmp_path):
  paths = [
    jsonl(tmp_path / "a.jsonl", ROW, ROW),
    jsonl(tmp_path / "b.jsonl", ROW | {"step": 1}, ROW),
  ]
  with pytest.raises(BadLog, match="only one of them has step"):
    read(*paths)


def test_ids_of_two_kinds_would_split_groups(tmp_path):
  numbers = jsonl(tmp_path / "a.jsonl", ROW, ROW)
  texts = jsonl(tmp_path / "b.jsonl", *[ROW | {"group": "1"}] * 2)
  with pytest.raises(BadLog, match="b.jsonl: group is a number in .*, text in .*not be one group"):
    read(numbers, texts)


def test_a_log_of_one_kind_says_so(tmp_path):
  path = jsonl(tmp_path / "a.jsonl", ROW, ROW | {"reward": 2})
  assert last_note(path) == "a reward above 0.5 is correct (--correct-above): each is"
  path = jsonl(tmp_path / "a.jsonl", *[ROW | {"reward": reward} for reward in (-1, 0)])
  assert last_note(path) == "a reward above 0.5 is correct (--correct-above): none is"
  assert "correct" not in last_note(jsonl(tmp_path / "a.jsonl", ROW, ROW | {"reward": -1}))


def last_note(path):
  return read(path).notes[-1]


@pytest.mark.parametrize("change", [{"bins": 0}, {"blocks": 3}, {"band": (2.0, 0.2)}])
def test_a_setting_out_of_range_is_named(tmp_path, change):
  path = jsonl(tmp_path / "a.jsonl", ROW, ROW)
  with pytest.raises(BadLog, match=f"--{next(iter(change))} must"):
    audit_rollouts.main([path], replace(FULL, **change), out=tmp_path / "out")


def test_a_misspelt_column_is_answered_with_the_nearest(tmp_path):
  path = jsonl(tmp_path / "a.jsonl", ROW, ROW)
  with pytest.raises(BadLog, match=r"no column 'rewrd' \(--columns.reward\). Nearest: reward"):
    read(path, config=columns(reward=("rewrd",)))


def test_rows_of_two_arrays_are_different_groups(tmp_path):
  for name in "ab":
    np.savez(tmp_path / f"{name}.npz", reward=np.eye(2), length=np.ones((2, 2), int))
  log = read(tmp_path / "a.npz", tmp_path / "b.npz")
  np.testing.assert_array_equal(log.responses.group, [0, 0, 1, 1, 2, 2, 3, 3])


def test_log_probs_of_one_side(tmp_path):
  path = tmp_path / "a.jsonl"
  jsonl(path, *[ROW | {"rollout_log_probs": [-1.0] * 3, "mine": [-1.0] * 3}] * 2)
  assert read(path).tokens is None
  assert read(path, config=columns(trainer_logprobs="mine")).tokens is not None
  jsonl(path, *[ROW | {"mine": [-1.0] * 3}] * 2)
  with pytest.raises(BadLog, match="no column for the sampler_logprobs"):
    read(path, config=columns(trainer_logprobs="mine"))


def test_a_file_without_a_good_row_beside_others(tmp_path):
  bad = jsonl(tmp_path / "a.jsonl", ROW | {"length": -1, "sample_id": 1})
  rows = [ROW | {"reward": reward, "sample_id": 1} for reward in (0, 1)]
  good = jsonl(tmp_path / "b.jsonl", *rows)
  with pytest.raises(BadLog, match="b.jsonl, line 2: the same response .*b.jsonl, line 1"):
    read(bad, good, config=replace(FULL, skip_bad_rows=True))


def test_arrays_that_do_not_fit(tmp_path):
  np.savez(tmp_path / "d.npz", reward=np.zeros((1, 2, 3)), length=np.ones((1, 2, 3), int))
  with pytest.raises(BadLog, match=r"must be \[N\] or \[P, G\]"):
    read(tmp_path / "d.npz")
  np.savez(tmp_path / "a.npz", reward=np.zeros((3, 2)), length=np.ones((2, 3), int))
  with pytest.raises(BadLog, match="do not have the same rows"):
    read(tmp_path / "a.npz")
  np.savez(tmp_path / "b.npz", reward=np.zeros((2, 2)), length=np.array([[1, 2], [3, -4]]))
  with pytest.raises(BadLog, match=r"entry \[1, 1\]: length must be a whole number"):
    read(tmp_path / "b.npz")
  np.savez(tmp_path / "c.npz", reward=np.array([[1, "a"]], object), length=np.ones((1, 2), int))
  with pytest.raises(BadLog, match="is not an .npz file, or a damaged one: .*pickle"):
    read(tmp_path / "c.npz")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  (tmp_path / "a.parquet").write_bytes(b"PAR1")
  with pytest.raises(BadLog, match="parquet is read with pyarrow, which is not installed"):
    read(tmp_path / "a.parquet")


def test_parquet(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  rows = [trl(accuracy_reward=float(i % 2)) for i in range(2500)]
  parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
  same(read(tmp_path / "a.parquet"), read(jsonl(tmp_path / "a.jsonl", *rows)))
  whole = (tmp_path / "a.parquet").read_bytes()
  (tmp_path / "b.parquet").write_bytes(whole[:-100])
  with pytest.raises(BadLog, match="damaged or cut off"):
    read(tmp_path / "b.parquet")
  (tmp_path / "b.parquet").write_bytes(flipped(whole))
  with pytest.raises(BadLog, match="b.parquet, after row 0: the parquet file is damaged"):
    read(tmp_path / "b.parquet")
  days = [ROW | {"group": datetime.date(2026, 1, 1 + i % 2)} for i in range(4)]
  parquet.write_table(pyarrow.Table.from_pylist(days), tmp_path / "d.parquet")
  np.testing.assert_array_equal(read(tmp_path / "d.parquet").responses.group, [0, 1, 0, 1])
  table = pyarrow.Table.from_pylist([trl(accuracy_reward=1.0) | {"step": "x"}] * 2)
  parquet.write_table(table, tmp_path / "c.parquet")
  with pytest.raises(BadLog, match="row 1: step must be a whole number|row 1: step is no number"):
    read(tmp_path / "c.parquet")


def test_a_bad_log_leaves_nothing_behind(tmp_path, capsys):
  path = jsonl(tmp_path / "a.jsonl", ROW, ROW | {"reward": "x"})
  out = tmp_path / "results" / "here"
  with pytest.raises(SystemExit) as stopped:
    command.cli([str(path), "--out", str(out)])
  assert stopped.value.code == 2
  assert "line 2: reward is text here" in capsys.readouterr().err
  assert not (tmp_path / "results").exists()


def test_other_contents_and_other_settings_have_another_folder(tmp_path):
  path = jsonl(tmp_path / "log.jsonl", ROW, ROW)
  folders = []
  for _ in range(2):
    for config in (FULL, columns(step="a")):
      audited = audit_rollouts.Audited(config, (audit_rollouts._identity(path),))
      folders.append(audit_rollouts.default_folder(audited))
    path.write_text(path.read_text() * 2)
  assert len(set(folders)) == 4
  assert all(folder.name.startswith("log-") for folder in folders)
