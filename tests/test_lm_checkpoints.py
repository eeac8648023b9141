"""Checkpoints: what comes back is what was saved, or there is an error that says what is not."""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_lm.lm import checkpoint_digests
from jaxrl_lm.lm.checkpoints import CheckpointError, Checkpoints
from jaxrl_lm.lm.processes import GracefulExit
from jaxrl_lm.lm.settings import differences, settings
from jaxrl_lm.vocabulary_sharding import VocabularySharding
from tests import checkpoint_worker

ROOT = Path(__file__).parents[1]


class Train(NamedTuple):
  step: Any
  params: Any
  opt_state: Any
  key: Any
  critic: Any


def state(shift: float = 0.0) -> Train:
  w = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32) + np.float32(shift)
  params = {
    "layers": {0: jnp.asarray(w), 1: jnp.asarray(w[:, :3], jnp.bfloat16)},
    "linear/w.b": jnp.asarray(w[0, :4], jnp.float16),
    "nothing": jnp.zeros((0, 3)),
    "flags": jnp.array([True, False]),
  }
  keys = {"one": jax.random.key(7), "rows": jax.random.split(jax.random.key(8, impl="rbg"), 3)}
  opt_state = optax.adam(1e-3).init(params)
  return Train(jnp.int32(16777217), params, opt_state, keys, None)


@pytest.fixture(scope="module")
def first() -> Train:
  return state()


@pytest.fixture(scope="module")
def second() -> Train:
  return state(1.0)


def assert_same(got: Any, wanted: Any) -> None:
  """Containers, types, dtypes and every bit."""
  assert jax.tree.structure(got) == jax.tree.structure(wanted)
  for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
    assert x.dtype == y.dtype, path
    assert x.shape == y.shape, path
    assert isinstance(x, np.ndarray) == isinstance(y, np.ndarray), path
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


def abstract(tree: Any) -> Any:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def saved(folder: Path, **steps: Any) -> Path:
  """A folder with the states, saved as steps _1, _2, ..."""
  with Checkpoints(folder, keep_latest=9) as checkpoints:
    for step, tree in steps.items():
      checkpoints.save(int(step[1:]), tree, {"loss": [0.1, None]})
  return folder


def test_everything_comes_back_as_it_was(tmp_path, first, second):
  with Checkpoints(tmp_path / "a" / "b") as checkpoints:
    checkpoints.save(3, first, {"loss": [0.1, None], "who": "é"}, metric=0.5)
    assert checkpoints.steps == [3]
    restored = checkpoints.restore(second)
    assert (restored.step, restored.record) == (3, {"loss": [0.1, None], "who": "é"})
    assert_same(restored.state, first)
  with Checkpoints(tmp_path / "a" / "b") as checkpoints:
    for target in (abstract(first), jax.eval_shape(state)):
      assert_same(checkpoints.restore(target, 3).state, first)


def test_host_arrays_stay_on_the_host_and_may_change_at_once(tmp_path):
  rows = np.arange(1_000_000, dtype=np.int64)
  tree = {"rows": rows, "x": np.float64(0.1), "none": None, "flag": np.array([True])}
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(0, tree)
    rows[:] = 7
    got = checkpoints.restore(tree).state
  np.testing.assert_array_equal(got["rows"], np.arange(1_000_000))
  assert got["rows"].dtype == np.int64
  assert (got["x"].dtype, got["x"]) == (np.float64, 0.1)
  assert got["none"] is None


def test_donated_arrays_are_saved_before_they_go(tmp_path):
  increment = jax.jit(lambda x: x + 1, donate_argnums=0)
  x = jnp.zeros(100_000)
  with Checkpoints(tmp_path, keep_latest=5) as checkpoints:
    for step in range(5):
      checkpoints.save(step, {"x": x})
      x = increment(x)
    for step in range(5):
      got = checkpoints.restore({"x": x}, step).state["x"]
      np.testing.assert_array_equal(got, np.full(100_000, step))


@pytest.mark.parametrize(("before", "after"), [(8, 1), (1, 8)])
def test_another_number_of_devices(tmp_path, before, after):
  def spread(devices: int) -> Any:
    mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
    tree = {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "n": np.int32(5)}
    tree["keys"] = jax.random.split(jax.random.key(1), 8)
    specs = {"w": P(None, "fsdp"), "n": P(), "keys": P("fsdp")}
    return jax.device_put(tree, {k: NamedSharding(mesh, spec) for k, spec in specs.items()})

  one, other = spread(before), spread(after)
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, one)
    got = checkpoints.restore(abstract(other)).state
  assert_same(got, other)
  assert got["w"].sharding == other["w"].sharding
  assert got["keys"].sharding.device_set == other["keys"].sharding.device_set


def test_what_was_not_pinned_to_a_device_is_not_afterwards(tmp_path):
  """A scalar committed to device 0 could not meet parameters that are spread over eight."""
  mesh = jax.make_mesh((8,), ("fsdp",))
  tree = {"w": jax.device_put(jnp.ones(8), NamedSharding(mesh, P("fsdp"))), "step": jnp.int32(3)}
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, tree)
    got = checkpoints.restore(tree).state
  np.testing.assert_array_equal(jax.jit(lambda s: s["w"] * s["step"])(got), 3 * np.ones(8))


def other_containers(tree: Train) -> Any:
  adam, scale = tree.opt_state
  return {
    "namedtuple": (
      tree._replace(opt_state=(tuple(adam), scale)),
      ".opt_state[0]: saved ScaleByAdamState, wanted tuple",
    ),
    "None": (tree._replace(critic={}), ".critic: saved NoneType, wanted dict"),
    "dtype": (tree._replace(step=jnp.float32(0)), ".step: saved int32[], wanted float32[]"),
    "shape": (
      tree._replace(params=tree.params | {"flags": jnp.ones(3, bool)}),
      ".params['flags']: saved bool[2], wanted bool[3]",
    ),
    "missing": (
      tree._replace(params=tree.params | {"extra": jnp.ones(3)}),
      ".params['extra']: saved nothing, wanted float32[3]",
    ),
    "key": (
      tree._replace(key=tree.key | {"one": jax.random.key(0, impl="rbg")}),
      ".key['one']: saved key<fry>[], wanted key<rbg>[]",
    ),
  }


@pytest.mark.parametrize("kind", ["namedtuple", "None", "dtype", "shape", "missing", "key"])
def test_another_state_is_refused_leaf_by_leaf(tmp_path, first, kind):
  saved(tmp_path, _1=first)
  target, message = other_containers(first)[kind]
  with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError) as error:
    checkpoints.restore(target, cast=True)
  first_line, *lines = str(error.value).splitlines()
  assert first_line == f"{tmp_path / '1'} holds another state:"
  assert lines == [f"  {message}"]  # what is below another container is not listed as well


def test_precision_changes_only_when_asked(tmp_path):
  x = jnp.array([1.001, 3.0])
  half = {"x": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
  saved(tmp_path, _1={"x": x}, _2={"x": jnp.array([1, 16777217])})
  with Checkpoints(tmp_path) as checkpoints:
    with pytest.raises(ValueError, match=r"\['x'\]: saved float32\[2\], wanted bfloat16\[2\]"):
      checkpoints.restore(half, 1)
    got = checkpoints.restore(half, 1, cast=True).state["x"]
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, x.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="saved int32"):  # 16777216.0 without a word
      checkpoints.restore({"x": x}, 2, cast=True)


def test_64_bits_are_not_lost(tmp_path, x64):
  device = jax.devices()[0]
  tree = {"x": jax.device_put(np.array([0.1]), device)}
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, tree)
    assert_same(checkpoints.restore(tree).state, tree)
    with jax.enable_x64(False):
      target = {"x": jax.device_put(np.zeros(1, np.float32), device)}
      with pytest.raises(ValueError, match=r"\['x'\] was saved as float64: set jax_enable_x64"):
        checkpoints.restore(target, cast=True)


def test_latest_and_best_are_kept_across_restarts(tmp_path):
  metrics = {1: 0.3, 2: 0.9, 3: 0.1, 4: float("nan"), 5: None, 6: 0.2, 7: 0.4}
  for step, metric in metrics.items():
    with Checkpoints(tmp_path, keep_latest=2, keep_best=1) as checkpoints:
      checkpoints.save(step, {"x": jnp.array([step])}, metric=metric)
  with Checkpoints(tmp_path, keep_latest=2, keep_best=1) as checkpoints:
    assert checkpoints.steps == [2, 6, 7]
    assert [checkpoints.restore({"x": jnp.zeros(1, int)}, s).state["x"][0] for s in (2, 7)] == [
      2,
      7,
    ]
  with Checkpoints(tmp_path, keep_latest=1, keep_best=0) as checkpoints:
    checkpoints.save(8, {"x": jnp.array([8])}, metric=-9.0)
    checkpoints.wait()
    assert checkpoints.steps == [8]


def test_a_step_is_saved_once_and_in_order(tmp_path):
  tree = {"x": jnp.ones(2)}
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(4, tree)
    with pytest.raises(ValueError, match="has a step 4 already"):
      checkpoints.save(4, tree)
    with pytest.raises(ValueError, match="step 3 is before 4"):
      checkpoints.save(3, tree)
    with pytest.raises(ValueError, match="no step 5, but \\[4\\]"):
      checkpoints.restore(tree, 5)
    checkpoints.delete(4)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
      checkpoints.restore(tree)
    checkpoints.save(3, tree)


@pytest.mark.parametrize(
  ("tree", "record", "message"),
  [
    ({"x": 3}, {}, r"\['x'\] is a int, not an array"),
    ({}, {}, "no array"),
    ({"x": np.ones(1)}, {"loss": float("nan")}, "not JSON"),
    ({"x": np.ones(1)}, {"a": {1: 2}}, "text as keys"),
    ({"x": np.ones(1)}, {"x": np.ones(1)}, "not JSON"),
  ],
)
def test_what_cannot_be_saved_is_refused_at_once(tmp_path, tree, record, message):
  with Checkpoints(tmp_path) as checkpoints:
    with pytest.raises((TypeError, ValueError), match=message):
      checkpoints.save(1, tree, record)
    assert checkpoints.steps == []


def test_a_folder_that_is_no_checkpoint_is_named_and_stays(tmp_path):
  saved(tmp_path, _1={"x": jnp.ones(4)})
  (tmp_path / "7").mkdir()
  (tmp_path / "7" / "notes.txt").write_text("mine")
  with pytest.raises(ValueError, match=r"7 is named like a step and is no checkpoint \(notes.txt"):
    Checkpoints(tmp_path)
  assert (tmp_path / "7" / "notes.txt").read_text() == "mine"
  (tmp_path / "7").rename(tmp_path / "notes")
  with Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.steps == [1]


@pytest.mark.parametrize("arguments", [{"keep_latest": 0}, {"keep_best": -1}])
def test_nothing_to_keep_is_refused(tmp_path, arguments):
  with pytest.raises(ValueError, match="cannot keep"):
    Checkpoints(tmp_path, **arguments)


def test_an_object_store_is_refused():
  with pytest.raises(ValueError, match="file system"):
    Checkpoints("gs://bucket/run")


def test_a_file_is_no_folder(tmp_path):
  (tmp_path / "file").write_text("here")
  with pytest.raises(FileExistsError, match="file"):
    Checkpoints(tmp_path / "file")


def flip(path: Path, place: float = 0.5) -> bytes:
  """Flips one bit; returns what was there."""
  content = path.read_bytes()
  at = min(int(len(content) * place), len(content) - 1)
  path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
  return content


def test_a_flipped_bit_in_any_file_is_an_error(tmp_path, first, second):
  saved(tmp_path, _1=first, _2=second, _3=first)
  flip(tmp_path / "2" / "state" / "manifest.ocdbt")
  files = [path for path in (tmp_path / "3").rglob("*") if path.is_file()]
  assert len(files) > 10
  with Checkpoints(tmp_path, keep_latest=3) as checkpoints:
    for path in files:
      content = flip(path)
      if path.name in checkpoint_digests.UNCOVERED and path.parent.name == "3":
        # They hold when it was written, no part of the state.
        assert_same(checkpoints.restore(first).state, first)
      else:
        with pytest.raises(CheckpointError) as error:
          checkpoints.restore(first)
        if path.name != checkpoint_digests.FILE:
          assert str(path) in str(error.value)
        assert "step 1 is intact: restore it with step=1" in str(error.value)
      path.write_bytes(content)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
      checkpoints.restore(first)
    assert_same(checkpoints.restore(first, 1).state, first)
    with pytest.raises(CheckpointError, match="step 1 is intact"):
      checkpoints.restore(first, 2)
    flip(tmp_path / "1" / "record" / "metadata")
    with pytest.raises(CheckpointError, match="no older step is intact"):
      checkpoints.restore(first)


def test_a_leaf_that_changed_between_memory_and_disk_is_named(tmp_path):
  """The digests of the files agree: the bit was flipped before they were taken."""
  tree = {"a": jnp.ones(3), "noise": jax.random.bits(jax.random.key(0), (4096,))}
  saved(tmp_path, _1=tree, _2=tree)
  data = max(
    (p for p in (tmp_path / "2").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
  )
  assert data.stat().st_size > 4 * 4096
  flip(data)
  checkpoint_digests.write_file_digests(tmp_path / "2")
  with Checkpoints(tmp_path) as checkpoints:
    with pytest.raises(CheckpointError, match=r"leaf \['noise'\] is not what.*step 1 is intact"):
      checkpoints.restore(tree)
    assert_same(checkpoints.restore(tree, 1).state, tree)


def test_a_full_disk_loses_nothing_older(tmp_path, caplog):
  """A limit on the size of files: what is written beyond it fails as on a full disk."""
  small, large = {"x": jnp.ones(4)}, {"x": jax.random.bits(jax.random.key(1), (1 << 20,))}
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
    checkpoints.save(1, small)
    checkpoints.wait()
    try:
      resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
      checkpoints.save(2, large)
      with pytest.raises(CheckpointError, match=r"step 2 was not saved.*steps \[1\] are as they"):
        checkpoints.wait()
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert_same(checkpoints.restore(small).state, small)
    checkpoints.save(2, large)
    assert_same(checkpoints.restore(large).state, large)
    assert checkpoints.steps == [2]
  assert not caplog.records  # Orbax would show a traceback for each of its threads


def test_closing_raises_what_the_last_save_did(tmp_path):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  checkpoints = Checkpoints(tmp_path)
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    checkpoints.save(1, {"x": jax.random.bits(jax.random.key(1), (1 << 20,))})
    with pytest.raises(CheckpointError, match="there is no older one"):
      checkpoints.close()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_a_killed_save_left_is_removed(tmp_path):
  saved(tmp_path, _1={"x": jnp.ones(4)})
  shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
  (tmp_path / "3.orbax-checkpoint-tmp" / "state.orbax-checkpoint-tmp").mkdir(parents=True)
  with Checkpoints(tmp_path) as checkpoints:
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert checkpoints.steps == [1]


def test_what_a_killed_deletion_left_is_in_nobodys_way(tmp_path, caplog):
  tree = {"x": jnp.ones(4)}
  saved(tmp_path, _1=tree, _2=tree)
  shutil.rmtree(tmp_path / "1" / "state")
  (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()
  with Checkpoints(tmp_path, keep_latest=2) as checkpoints:
    with pytest.raises(CheckpointError, match="no older step is intact"):
      checkpoints.restore(tree, 1)
    assert_same(checkpoints.restore(tree).state, tree)
    checkpoints.save(3, tree)
    checkpoints.wait()
    assert checkpoints.steps == [2, 3]
  assert not caplog.records


def killed(folder: Path, seconds: float | None) -> int:
  """Runs the worker, kills it; what it last said it was writing. None: in the midst of a save."""
  before = {path.name for path in folder.iterdir()} if folder.exists() else set()
  command = [sys.executable, "-m", "tests.checkpoint_worker", str(folder)]
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
    assert worker.stdout is not None
    for _ in range(3):
      last = worker.stdout.readline()
    if seconds is None:
      deadline = time.monotonic() + 20
      while not any(path.name.endswith("-tmp") for path in folder.iterdir()):
        assert time.monotonic() < deadline
    else:
      time.sleep(seconds)
    worker.send_signal(signal.SIGKILL)
    last = [last, *worker.stdout.readlines()][-1]
  assert worker.returncode == -signal.SIGKILL
  assert {path.name for path in folder.iterdir()} != before
  return int(last)


def assert_continues(folder: Path, last: int) -> None:
  """The newest checkpoint is, to the bit, the state of a run that nobody killed."""
  with Checkpoints(folder, config={"size": checkpoint_worker.SIZE}) as checkpoints:
    step, got, record = checkpoints.restore(checkpoint_worker.start())
  assert last - 1 <= step <= last + 1
  assert record == {"step": step}
  wanted = checkpoint_worker.start()
  for _ in range(step):
    wanted = checkpoint_worker.advance(wanted)
  assert_same(got, wanted)


def test_a_kill_during_a_save_loses_at_most_that_save(tmp_path):
  assert_continues(tmp_path / "run", killed(tmp_path / "run", None))


@pytest.mark.slow
def test_kills_at_any_moment_one_after_another(tmp_path):
  moments = random.Random(0)
  for turn in range(6):
    last = killed(tmp_path / "run", moments.uniform(0, 0.3) if turn % 3 else None)
    assert_continues(tmp_path / "run", last)


# ---------------------------------------------------------------------------------- configuration


def clipped(x: Any, *, clip_low: float, clip_high: float = 0.2) -> Any:
  return x


def scaled(by: float) -> Any:
  return lambda x: x * by


@dataclasses.dataclass(frozen=True)
class Sampling:
  temperature: float = 1.0
  top_k: int | None = None


@dataclasses.dataclass(frozen=True)
class Config:
  surrogate: Any = partial(clipped, clip_low=0.2)
  sampling: Sampling = Sampling()
  widths: tuple[int, ...] = (4, 8)
  dtype: Any = jnp.float32
  schedule: Any = dataclasses.field(default_factory=lambda: scaled(0.1))
  optimiser: Any = dataclasses.field(default_factory=lambda: optax.adam(1e-3))
  folder: Any = dataclasses.field(default=Path("here"), compare=False)


CHANGES = {
  "surrogate.clip_low: 0.2 there, 0.3 now": {"surrogate": partial(clipped, clip_low=0.3)},
  "surrogate.clip_high: absent there, 0.2 now": {
    "surrogate": partial(clipped, clip_low=0.2, clip_high=0.2)
  },
  "sampling.temperature: 1.0 there, nan now": {"sampling": Sampling(float("nan"))},
  "sampling.top_k: None there, 5 now": {"sampling": Sampling(top_k=5)},
  "widths[1]: 8 there, 9 now": {"widths": (4, 9)},
  "widths: [4, 8] there, [4] now": {"widths": (4,)},
  "dtype: 'float32' there, 'bfloat16' now": {"dtype": jnp.bfloat16},
  "schedule.by: 0.1 there, 0.2 now": {"schedule": scaled(0.2)},
  "step_size: -0.001 there, -0.01 now": {"optimiser": optax.adam(1e-2)},
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_difference_of_configurations_is_shown(message):
  then = json.loads(json.dumps(settings(Config()), allow_nan=False))
  lines = differences(then, settings(dataclasses.replace(Config(), **CHANGES[message])))
  assert lines
  assert all(message.replace("nan", "'nan'") in line for line in lines)


def test_equal_configurations_have_no_difference():
  then = json.loads(json.dumps(settings(Config()), allow_nan=False))
  assert differences(then, settings(Config(folder=Path("elsewhere")))) == []


def test_another_function_or_class_is_a_difference():
  one, two = settings({"f": clipped, "c": Sampling()}), settings({"f": scaled, "c": Config()})
  lines = differences(one, two)
  assert any("clipped' there" in line and "scaled' now" in line for line in lines)
  assert any("'Sampling' there, 'Config' now" in line for line in lines)


def test_arrays_are_compared_by_their_bits():
  x = np.arange(100.0)
  assert differences(settings(x), settings(x.copy())) == []
  assert differences(settings(x), settings(x + 1e-12))
  assert differences(settings(jnp.ones(2)), settings(np.ones(2, np.float32))) == []


def test_meshes_are_compared_by_their_axes():
  def sharding(devices, axis, sizes):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[devices]).reshape(sizes), ("data", "tensor"))
    return VocabularySharding("tensor", P(("data", axis), None), mesh)

  then = settings(sharding(slice(4), "tensor", (2, 2)))
  assert then == json.loads(json.dumps(then))
  assert differences(then, settings(sharding(slice(4, 8), "tensor", (2, 2)))) == []
  other = settings(sharding(slice(4), "fsdp", (4, 1)))
  assert differences(then, other) == [
    "tokens[0][1]: 'tensor' there, 'fsdp' now",
    "mesh.data: 2 there, 4 now",
    "mesh.tensor: 2 there, 1 now",
  ]


def test_what_cannot_be_compared_is_named():
  with pytest.raises(TypeError, match=r"config\.a\[0\]: a lock cannot be compared"):
    settings({"a": [threading.Lock()]})


def times(x: Any, s: float = 1.0) -> Any:
  return s * x


def limited(by: int) -> Any:
  def over(lengths: Any, limit: int = by) -> Any:
    return lengths > limit

  return over


def test_constants_are_seen_wherever_they_are_bound():
  pairs = [
    (jax.jit(partial(np.add, 1)), jax.jit(partial(np.add, 2))),
    (jax.jit(partial(times, s=1.0)), jax.jit(partial(times, s=2.0))),
    (jax.vmap(partial(times, s=1.0)), jax.vmap(partial(times, s=2.0))),
    (jax.vmap(times, in_axes=0), jax.vmap(times, in_axes=1)),
    (jax.grad(partial(times, s=1.0)), jax.grad(partial(times, s=2.0))),
    (limited(1), limited(2)),
    (lambda x: x, lambda x: -x),
    (jax.random.key(0), jax.random.key(1)),
  ]
  for one, two in pairs:
    then = json.loads(json.dumps(settings(one), allow_nan=False))
    assert differences(then, settings(one)) == []
    assert differences(then, settings(two)) != []


@pytest.mark.parametrize("value", [np.float64(0.1), np.str_("a"), np.int64(3), np.bool_(True)])
def test_numbers_of_numpy_come_back_from_json(value):
  then = json.loads(json.dumps(settings(value)))
  assert differences(then, settings(value)) == []
  assert differences(settings(1), settings(1.0)) == []
  assert differences(settings(1), settings(True)) != []


def test_a_folder_is_of_one_run_at_a_time(tmp_path, first, second):
  with Checkpoints(tmp_path) as one, Checkpoints(tmp_path) as other:
    one.save(1, first)
    with pytest.raises(CheckpointError, match="another run saves in"):
      other.save(1, second)
    one.wait()
    assert_same(Checkpoints(tmp_path).restore(abstract(first)).state, first)
  one.close()  # twice is once
  with pytest.raises(CheckpointError, match="is closed: step 2 was not saved"):
    one.save(2, first)
  with Checkpoints(tmp_path) as later:
    later.save(2, second)


def test_a_folder_that_went_away_is_an_error_and_not_a_wait(tmp_path, first):
  """In a process of its own, which must end: Orbax would let it wait for minutes at its exit."""
  code = (
    "import shutil, sys, numpy as np\n"
    "from jaxrl_lm.lm.checkpoints import Checkpoints\n"
    "checkpoints = Checkpoints(sys.argv[1])\n"
    "shutil.rmtree(sys.argv[1])\n"
    "open(sys.argv[1], 'w').close()\n"
    "checkpoints.save(1, {'a': np.zeros(2)})\n"
    "checkpoints.wait()\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path / "run")],
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == 1
  assert "CheckpointError: step 1 was not saved" in done.stderr


def test_another_configuration_is_refused(tmp_path):
  tree = {"x": jnp.ones(2)}
  with Checkpoints(tmp_path, config=Config()) as checkpoints:
    checkpoints.save(1, tree)
  with Checkpoints(tmp_path, config=Config()) as checkpoints:
    checkpoints.restore(tree)
  other = Config(sampling=Sampling(0.7), widths=(4, 9))
  with Checkpoints(tmp_path, config=other) as checkpoints, pytest.raises(ValueError) as error:
    checkpoints.restore(tree)
  assert str(error.value).splitlines()[1:] == [
    "  sampling.temperature: 1.0 there, 0.7 now",
    "  widths[1]: 8 there, 9 now",
  ]


# ----------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_a_question(number):
  before = signal.getsignal(number)
  with GracefulExit() as leave:
    assert not leave.requested()
    signal.raise_signal(number)
    assert leave.requested()
    assert leave.received == number
  assert signal.getsignal(number) is before


def test_a_second_interrupt_raises():
  before = signal.getsignal(signal.SIGINT)
  with GracefulExit() as leave:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
    assert leave.received == signal.SIGTERM
  assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_signals_are_left_alone():
  before = signal.getsignal(signal.SIGTERM)
  seen = []

  def run() -> None:
    with GracefulExit() as leave:
      seen.extend([leave.requested(), signal.getsignal(signal.SIGTERM) is before])

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert seen == [False, True]
