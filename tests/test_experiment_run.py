"""Claim: a run that is killed continues.

Setting: a toy of two parts. Time: none.
"""

import contextlib
import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.harness import figures, folder, run, storage
from experiments.harness.expectations import Expectations

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Policy:
  """A nested dataclass."""

  width: int = 8
  """Units of the hidden layer."""


@dataclasses.dataclass(frozen=True)
class OtherPolicy:
  """The same fields under another name."""

  width: int = 8


@dataclasses.dataclass(frozen=True)
class Config:
  """Settings of the toy."""

  group_size: int = 4
  """Samples per prompt."""
  alphas: tuple[float, ...] = (0.0, 0.5, 1.0)
  """Powers of the length."""
  policy: Policy | OtherPolicy = Policy()
  expected: str = "10"
  """The golden."""


CONFIGS = {
  "full": (Config(), "All of it: no time."),
  "small": (Config(group_size=2), "Less of it."),
}


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
  """Whatever the surroundings ask of rich."""
  for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("COLUMNS", "100")


class Toy:
  """A toy experiment that counts what it computes, and can be stopped inside its second part."""

  def __init__(self):
    self.computed = []
    self.stop_at = None

  def main(self, config=Config(), *, out=None):
    with run.open("toy", config, out) as experiment:
      first = experiment.part("first", lambda: self.first(config))
      second = experiment.part("second", lambda: self.second(first, experiment.track))
      experiment.golden("sum", second["sum"], config.expected)
      experiment.hypothesis("sign", "the sum is below 0", second["sum"], False, source="nobody")
      experiment.figure("sums", drawn(first["x"]))
    return experiment.summary

  def first(self, config):
    self.computed.append("first")
    return {"x": jnp.arange(5.0) * config.group_size / 4, "pair": (1, None), "n": jnp.int32(3)}

  def second(self, first, track):
    self.computed.append("second")
    total = 0.0
    for step in track(range(5)):
      if step == self.stop_at:
        raise KeyboardInterrupt
      total += first["x"][step]
    return {"sum": total, "nan": float("nan"), "flag": np.bool_(True)}


@figures.style()
def drawn(x):
  figure = Figure()
  axes = figure.subplots()
  axes.plot(x, label="x")
  axes.set(xlabel="index", ylabel="x (tokens)")
  figures.title(figure, "x grows with its index, as a line of more than one hundred words " * 3)
  figures.legend(figure)
  return figure


def files(out):
  return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


def command(toy, *arguments):
  """Exit status of the toy's command line."""

  def main(config, *, out):
    return toy.main(config, out=out)

  try:
    run.cli(main, CONFIGS, [str(argument) for argument in arguments])
  except SystemExit as error:
    return error.code or 0
  return 0


def test_a_run_leaves_a_summary_metrics_and_a_figure(tmp_path, capsys):
  summary = Toy().main(out=tmp_path / "out")
  out = tmp_path / "out"
  stored = ["parts/first.npz", "parts/second.npz"]
  assert files(out) == ["config.json", "metrics.jsonl", *stored, "summary.json", "sums.png"]
  written = json.loads((out / "summary.json").read_text())
  assert written == json.loads(json.dumps(summary))
  assert written["config"]["policy"] == {"width": 8}
  assert {"jax", "jaxlib", "numpy", "python", "jaxrl_lm", "device"} <= written["environment"].keys()
  assert written["git"] is None or re.fullmatch(r"[0-9a-f]{40}", written["git"]["commit"])
  assert written["started"].endswith("+00:00")
  assert written["results"]["second"] == {"sum": 10.0, "nan": "nan", "flag": True}
  statuses = [row["status"] for row in written["expectations"]]
  assert statuses == ["matched", "contradicted"]
  lines = (out / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(line)["part"] for line in lines] == ["first", "second"]
  said = capsys.readouterr().out
  assert "contradicted: sign (nobody): not explained" in said
  assert "summary.json" in said
  assert "\x1b" not in said


def test_a_killed_run_continues(tmp_path, capsys):
  toy = Toy()
  toy.stop_at = 3
  assert command(toy, "--out", tmp_path) == 130
  assert files(tmp_path) == ["config.json", "metrics.jsonl", "parts/first.npz"]
  toy.stop_at = None
  assert command(toy, "--out", tmp_path) == 0
  assert toy.computed == ["first", "second", "second"]
  before = json.loads((tmp_path / "summary.json").read_text())
  capsys.readouterr()
  assert command(toy, "--out", tmp_path) == 0
  assert len(toy.computed) == 3
  after = json.loads((tmp_path / "summary.json").read_text())
  for key in ("results", "parts", "wall_seconds", "expectations"):
    assert before[key] == after[key]
  assert "first: stored on" in capsys.readouterr().out


def test_a_process_killed_for_good_continues(tmp_path):
  """SIGKILL inside the second part: no handler of ours runs."""
  code = f"""
import sys, time
from pathlib import Path
from tests.test_experiment_run import Toy
toy = Toy()
slow = toy.second
toy.second = lambda *arguments: time.sleep(60)
toy.main(out=Path({str(tmp_path)!r}))
"""
  process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
  deadline = time.monotonic() + 60
  while not (tmp_path / "metrics.jsonl").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
  process.send_signal(signal.SIGKILL)
  process.wait()
  toy = Toy()
  toy.main(out=tmp_path)
  assert toy.computed == ["second"]


def test_fresh_and_resumed_runs_see_the_same_values(tmp_path):
  seen = []
  for _ in range(2):
    with run.open("toy", Config(), tmp_path) as experiment:
      seen.append(experiment.part("first", lambda: Toy().first(Config())))
  assert type(seen[0]["x"]) is type(seen[1]["x"]) is np.ndarray
  assert seen[0]["x"].dtype == np.float64
  assert seen[0].pop("x").tolist() == seen[1].pop("x").tolist()
  assert seen[0] == seen[1] == {"pair": [1, None], "n": 3}


def test_64_bits_inside_a_run_only(tmp_path):
  assert jnp.ones(1).dtype == jnp.float32
  with run.open("toy", Config(), tmp_path / "a") as experiment:
    assert experiment.part("x", lambda: jnp.ones(1)).dtype == np.float64
  with run.open("toy", Config(), tmp_path / "b", x64=False) as experiment:
    assert experiment.part("x", lambda: jnp.ones(1)).dtype == np.float32
  assert jnp.ones(1).dtype == jnp.float32


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_off_part_is_computed_again(tmp_path, capsys, kept):
  toy = Toy()
  toy.main(out=tmp_path)
  path = tmp_path / "parts" / "first.npz"
  content = path.read_bytes()
  path.write_bytes(content[: int(kept * len(content))])
  toy.main(out=tmp_path)
  assert toy.computed == ["first", "second", "first"]
  assert "first: the stored result is damaged" in capsys.readouterr().out


def test_no_flipped_byte_changes_a_stored_result(tmp_path):
  path = tmp_path / "x.npz"
  value = {"x": np.arange(4.0), "y": [1, 2.5, None, "text"]}
  storage.save(path, value)
  content = path.read_bytes()
  for index in range(len(content)):
    damaged = bytearray(content)
    damaged[index] ^= 0x41
    path.write_bytes(damaged)
    try:
      loaded = storage.load(path)
    except Exception:
      continue
    np.testing.assert_equal(loaded, value)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / "x.json"
  storage.write(path, "old")

  def fails(_):
    raise OSError("no space left")

  monkeypatch.setattr(storage.os, "fsync", fails)
  with pytest.raises(OSError, match="no space"):
    storage.write(path, "new")
  assert path.read_text() == "old"
  assert files(tmp_path) == ["x.json"]


@pytest.mark.parametrize(
  ("other", "message"),
  [
    (Config(group_size=8), r"group_size: 4 there, 8 now\n"),
    (Config(policy=Policy(16)), r"policy\.width: 8 there, 16 now\n"),
    (Config(policy=OtherPolicy()), r"policy: Policy there, OtherPolicy now\n"),
    (Config(alphas=(0.0,)), r"alphas: \[0\.0, 0\.5, 1\.0\] there, \[0\.0\] now\n"),
    (
      dataclasses.make_dataclass("Config", [("seeds", int, 3)])(),
      r"group_size: 4 there, absent now\n(?s:.*)seeds: absent there, 3 now\n",
    ),
  ],
)
def test_results_of_another_config_are_not_overwritten(tmp_path, other, message):
  toy = Toy()
  toy.main(Config(), out=tmp_path)
  before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
  with pytest.raises(folder.OccupiedFolder, match=f"(?s:{message}).*--out.*--fresh"):
    toy.main(other, out=tmp_path)
  assert before == {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
  with (
    pytest.raises(folder.OccupiedFolder, match="toy there, another now"),
    run.open("another", Config(), tmp_path),
  ):
    pass


def test_the_command_line_refuses_then_starts_afresh(tmp_path, capsys):
  toy = Toy()
  assert command(toy, "--out", tmp_path) == 0
  assert command(toy, "--out", tmp_path, "--group-size", 8) == 2
  assert "group_size: 4 there, 8 now" in capsys.readouterr().err
  (tmp_path / "parts" / "old.npz").touch()
  assert command(toy, "--out", tmp_path, "--group-size", 8, "--fresh", "--expected", "20") == 0
  assert toy.computed == ["first", "second"] * 2
  assert "parts/old.npz" not in files(tmp_path)


@pytest.mark.parametrize("arguments", [[], ["--fresh"]])
def test_a_folder_of_other_files_is_left_alone(tmp_path, capsys, arguments):
  (tmp_path / "thesis.tex").write_text("years")
  assert command(Toy(), "--out", tmp_path, *arguments) == 2
  assert command(Toy(), "--out", tmp_path / "thesis.tex", *arguments) == 2
  assert files(tmp_path) == ["thesis.tex"]
  assert "name another folder with --out" in capsys.readouterr().err


def test_what_other_code_computed_is_reused_with_a_warning(tmp_path, capsys, monkeypatch):
  toy = Toy()
  toy.main(out=tmp_path)
  now = run.provenance.environment()
  monkeypatch.setattr(run.provenance, "environment", lambda: now | {"code": "changed"})
  assert "WARNING" not in capsys.readouterr().out
  summary = toy.main(out=tmp_path)
  said = capsys.readouterr().out
  assert f"WARNING: computed by code {now['code']}, now changed (--fresh" in said
  assert summary["parts"]["first"]["made_by"]["code"] == now["code"]
  assert len(toy.computed) == 2


def test_a_missed_golden_is_status_1(tmp_path, capsys):
  assert command(Toy(), "--out", tmp_path, "--expected", "10.1") == 1
  assert "MISSED: sum" in capsys.readouterr().out
  assert json.loads((tmp_path / "summary.json").read_text())["missed"] == ["sum"]
  assert command(Toy(), "--out", tmp_path, "--expected", "10.1") == 1


def test_named_configs_have_folders_of_their_own(tmp_path, monkeypatch):
  monkeypatch.setattr(run, "RESULTS", tmp_path)
  assert command(Toy()) == 0
  assert command(Toy(), "small", "--expected", "5.0") == 0
  assert command(Toy(), "small", "--alphas", "1", "--out", tmp_path / "x", "--expected", "5") == 0
  named = "test_experiment_run"
  assert {path.name for path in tmp_path.iterdir()} == {named, f"{named}-small", "x"}
  summary = json.loads((tmp_path / "x" / "summary.json").read_text())
  assert summary["config"]["alphas"] == [1.0]


@pytest.mark.parametrize(
  ("arguments", "hint"),
  [
    (["--grop-size", "3"], "--group-size"),
    (["small", "--group-sise", "3"], "--group-size"),
    (["--policy.widht", "3"], "--policy.width"),
    (["smal"], "full, small"),
    (["--group-size", "many"], "--group-size"),
  ],
)
def test_a_misspelt_setting_names_the_nearest(tmp_path, capsys, arguments, hint):
  assert command(Toy(), "--out", tmp_path / "out", *arguments) == 2
  assert hint in capsys.readouterr().err
  assert not (tmp_path / "out").exists()


def test_help_tells_the_claim_the_configs_and_the_settings(capsys):
  assert command(Toy(), "--help") == 0
  said = capsys.readouterr().out
  for text in ("Claim: a run", "full", "All of it", "small", "--group-size", "Samples per prompt"):
    assert text in said
  assert "--out" in said
  assert "--fresh" in said


class Pair(NamedTuple):
  """Comes back as a list."""

  a: int
  b: float


def test_what_is_stored_comes_back(tmp_path):
  value = {
    "ints": np.arange(3, dtype=np.int8),
    "bools": [np.array([True, False]), np.bool_(False)],
    "scalars": (np.float32(0.5), jnp.float32(0.25), np.int64(3), np.array(7), True, None, "text"),
    "extremes": [float("inf"), float("nan"), 1e-308, 2**60],
    "big": np.arange(100.0).reshape(20, 5),
    "policy": Policy(3),
    "path": Path("a") / "b",
    "pair": Pair(1, 2.0),
    "empty": [{}, [], np.zeros((0, 3))],
    "names": np.array(["a", "bc"]),
  }
  storage.save(tmp_path / "x.npz", value)
  loaded = storage.load(tmp_path / "x.npz")
  for name in ("ints", "big", "names"):
    np.testing.assert_array_equal(loaded[name], value[name], strict=True)
  np.testing.assert_array_equal(loaded["bools"][0], value["bools"][0], strict=True)
  assert loaded["bools"][1] is False
  assert loaded["scalars"] == [0.5, 0.25, 3, 7, True, None, "text"]
  np.testing.assert_equal(loaded["extremes"], value["extremes"])
  assert loaded["policy"] == {"width": 3}
  assert loaded["path"] == str(Path("a") / "b")
  assert loaded["pair"] == [1, 2.0]
  assert loaded["empty"][2].shape == (0, 3)
  shown = storage.readable(value)
  assert shown["big"] == {"shape": [20, 5], "dtype": "float64"}
  assert shown["extremes"] == ["inf", "nan", 1e-308, 2**60]
  json.dumps(shown, allow_nan=False)


@pytest.mark.parametrize(
  ("value", "message"),
  [
    ({"a": [1, object()]}, r"result\.a\[1\]: a object"),
    ({"a": {3: 1}}, r"result\.a: keys must be text, and one is 3"),
    ({"a": jnp.ones(2, jnp.bfloat16)}, r"result\.a: an array of bfloat16"),
    ({"a": np.array([None])}, r"result\.a: an array of object"),
    ({"a": {1, 2}}, r"result\.a: a set"),
  ],
)
def test_what_cannot_be_stored_is_named(tmp_path, value, message):
  with pytest.raises(TypeError, match=message):
    storage.save(tmp_path / "x.npz", value)
  assert not files(tmp_path)


def golden(measured, expected, **tolerances):
  expectations = Expectations()
  expectations.golden("x", measured, expected, **tolerances)
  expectations.table("x")
  return expectations.rows[0].status


@pytest.mark.parametrize(
  ("measured", "expected", "tolerances"),
  [
    (0.01745, "0.0175", {}),
    (0.01755, "0.0175", {}),
    (jnp.float32(0.0175), "0.0175", {}),
    (1.24e5, "1.2e5", {}),
    (1319, "1319", {}),
    ([0.1314, 0.0687], ["0.131", "0.0687"], {}),
    (np.arange(3), [0, 1, 2], {}),
    (True, True, {}),
    (1.001, 1.0, {"rtol": 2e-3}),
    (1e-9, 0.0, {"atol": 1e-8}),
    (1.06, "1.0", {"atol": 0.02}),
    (np.inf, np.inf, {}),
  ],
)
def test_a_golden_matches(measured, expected, tolerances):
  assert golden(measured, expected, **tolerances) == "matched"


@pytest.mark.parametrize(
  ("measured", "expected", "tolerances"),
  [
    (0.01744, "0.0175", {}),
    (0.017561, "0.0175", {}),
    (1.3e5, "1.2e5", {}),
    (0.25, 0.2500001, {}),
    (np.nan, "0.0175", {}),
    (np.nan, np.nan, {"rtol": 1.0}),
    (jnp.nan, 0.0, {"atol": 1e300}),
    ([0.1, np.nan], ["0.1", "0.2"], {}),
    ([0.1, 0.1], "0.1", {}),
    (0.1, ["0.1", "0.1"], {}),
    ([0.1, 0.3], ["0.1", "0.2"], {}),
    (np.inf, "0.1", {}),
    (-np.inf, np.inf, {}),
    (-np.inf, np.inf, {"rtol": 0.1}),
    (None, "0.1", {}),
  ],
)
def test_a_golden_is_missed(measured, expected, tolerances):
  assert golden(measured, expected, **tolerances) == "missed"


@pytest.mark.parametrize(
  ("measured", "holds", "status"),
  [
    (0.3, True, "confirmed"),
    ([0.3, 0.4], jnp.bool_(True), "confirmed"),
    (0.3, np.bool_(False), "contradicted"),
    (0.3, None, "undecided"),
    (np.nan, True, "undecided"),
    ([0.1, np.nan], False, "undecided"),
  ],
)
def test_a_hypothesis_is_told_as_it_came_out(measured, holds, status):
  expectations = Expectations()
  expectations.hypothesis("x", "x is small", measured, holds, source="s", explanation="why")
  assert expectations.rows[0].status == status
  with pytest.raises(ValueError, match="'x' is stated twice"):
    expectations.golden("x", 1, 1)


@pytest.mark.parametrize("name", ["first", "a/b", "..", ""])
def test_a_part_needs_a_name_of_its_own(tmp_path, name):
  with (
    run.open("toy", Config(), tmp_path) as experiment,
    contextlib.suppress(ZeroDivisionError),
  ):
    experiment.part("first", lambda: 1)
    with pytest.raises(ValueError, match="name of its own"):
      experiment.part(name, lambda: 2)


def needy(out):
  with run.open("toy", Config(), out) as experiment:
    found = experiment.part("real", lambda path: path.read_text(), needs=["rollouts.txt"])
  return found, experiment.summary


def test_a_part_without_its_data_is_skipped_and_done_later(tmp_path, monkeypatch, capsys):
  data = tmp_path / "data"
  monkeypatch.setenv("JAXRL_LM_DATA", str(data))
  found, summary = needy(tmp_path / "out")
  assert found is None
  assert summary["skipped"] == {"real": ["rollouts.txt"]}
  assert "real: SKIPPED, rollouts.txt" in capsys.readouterr().out
  data.mkdir()
  (data / "rollouts.txt").write_text("tokens")
  found, summary = needy(tmp_path / "out")
  assert found == "tokens"
  assert summary["skipped"] == {}
  (data / "rollouts.txt").unlink()
  assert needy(tmp_path / "out")[0] == "tokens"


def test_data_lies_beside_the_checkout_unless_told(monkeypatch, tmp_path):
  monkeypatch.delenv("JAXRL_LM_DATA", raising=False)
  monkeypatch.setattr(run.provenance, "ROOT", tmp_path / "checkout")
  assert run.data_path("x") is None
  (tmp_path / "shared" / "data").mkdir(parents=True)
  (tmp_path / "shared" / "data" / "x").touch()
  assert run.data_path("x") == tmp_path / "shared" / "data" / "x"


def test_progress_speaks_in_lines_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(run, "SECONDS_BETWEEN_LINES", -1.0)
  Toy().main(out=tmp_path)
  said = capsys.readouterr().out
  assert "  second: 2 of 5\n" in said
  assert "\r" not in said


def test_progress_on_a_terminal_leaves_the_lines_whole(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("FORCE_COLOR", "1")
  Toy().main(out=tmp_path)
  plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
  assert re.search(r"first: \d+\.\d s\n", plain)


def test_a_figure_is_the_same_bytes_every_time(tmp_path):
  for name in ("a", "b"):
    figures.save(drawn(np.arange(3.0)), tmp_path / f"{name}.png")
  content = (tmp_path / "a.png").read_bytes()
  assert content == (tmp_path / "b.png").read_bytes()
  assert b"tEXt" not in content


def test_the_style_ends_with_its_block():
  import matplotlib as mpl

  before = dict(mpl.rcParams)
  with figures.style():
    assert not mpl.rcParams["axes.spines.top"]
  assert dict(mpl.rcParams) == before
