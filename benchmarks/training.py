"""Speed and memory of a training step, beside a plain PyTorch loop of the same model.

  step     seconds of a GRPO step of a toy (2 layers, 64 wide) split into sampling, scoring and
           update, beside PyTorch: the same sizes and mathematics, which the run checks on one
           batch (loss and gradient agree)
  compile  seconds to the end of the first step in a new process, with an empty and with a filled
           persistent compilation cache
  memory   temporary memory of an update at the size of Qwen2.5-0.5B, with logits in memory and
           with tiles of them; compiled, never run

Ours is `training.train`, metrics and report included, on one device and with the rows over one
device per core. PyTorch runs in a process of its own, on one thread and on all cores; the faster
of the two is what ours is compared with. Candidates take a step one after another, round after
round; the first round, which compiles, is not counted. Seconds are of the wall clock and of the
CPU (all cores), medians with quartiles; the ratio is the median over the rounds, each against the
steps of the same round.

Goals: at least twice as fast as PyTorch by the wall clock; compiled within 20 s and, from a filled
cache, 6 s, on two cores. A miss is marked with "!". Numbers worth quoting come from a machine that
does nothing else.
Time: five minutes, most of it compilation.
Command: python -m benchmarks.training [--only step compile memory] [--rounds 20]
  [--torch-python PYTHON]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from rich.console import Console
from rich.table import Table

import jaxrl_lm as rl
from benchmarks.other_process import OtherProcess
from configs import real_runs
from experiments.harness.run import data_path
from experiments.real_run import setup
from jaxrl_lm.lm import optimizers, policy, pretrained, scoring, tasks, training, updates
from jaxrl_lm.lm.micro_batches import Batch
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.train_state import init_state
from jaxrl_lm.lm.update_config import UpdateConfig

TOY = policy.PolicyConfig(
  vocab_size=512,
  hidden_size=64,
  intermediate_size=172,
  num_layers=2,
  num_heads=4,
  num_kv_heads=4,
  head_dim=16,
  max_length=128,
  tied=True,
)
PROMPT, LEARNING_RATE, PAUSE = 8, 1e-3, 0.5
ROLLOUT = RolloutConfig(num_prompts=16, group_size=8, max_new_tokens=64, stop_tokens=())
PARTS = ("sampling", "scoring", "update")
GOAL, COLD_GOAL, WARM_GOAL = 2.0, 20.0, 6.0
AGREES = 1e-4  # relative to the largest number, float32

Seconds = dict[str, tuple[float, float]]  # of each part: wall, CPU


def task(vocabulary: int) -> tasks.Task:
  """64 prompts of random tokens, rewarded with the share of even tokens in the response."""
  ids = np.random.default_rng(0).integers(3, vocabulary, (64, PROMPT))
  prompts = tuple(tasks.Prompt(str(i), tuple(row.tolist())) for i, row in enumerate(ids))

  def even(responses: tasks.Responses) -> np.ndarray:
    return np.mean(responses.tokens % 2 == 0, axis=-1, where=responses.mask)

  return tasks.Task(prompts, (), (tasks.Component("even", even),))


def config(**changes: Any) -> TrainConfig:
  # Four parts need 27 MB at once. Blocks above 32 MB glibc gives back after every update, and the
  # page faults of getting them again are a quarter of its CPU time.
  update = UpdateConfig(rl.GRPO, optimizers.optimizer(LEARNING_RATE), micro_batches=4)
  return TrainConfig(ROLLOUT, dataclasses.replace(update, **changes), 10**6, minibatches=2, shown=0)


def table(title: str, *columns: str) -> Table:
  made = Table(title=title, title_justify="left")
  for column in columns:
    made.add_column(column, justify="right", no_wrap=True)
  return made


# --------------------------------------------------------------------------- a step


def over_cores() -> Mesh:
  names = ("data", "fsdp", "tensor")
  return jax.make_mesh((jax.device_count(), 1, 1), names, axis_types=(AxisType.Auto,) * 3)


def steps(loaded: Pretrained, mesh: Mesh | None) -> Iterator[Seconds]:
  """Steps of `training.train`: the seconds of its parts, and "whole", with the report."""
  run = training.train(loaded, task(loaded.model.config.vocab_size), config(), mesh=mesh)
  while True:
    readings: list[tuple[float, float]] = []

    def clock(readings: list[tuple[float, float]] = readings) -> float:
      readings.append((time.perf_counter(), time.process_time()))
      return readings[-1][0]

    # The loop reads its clock between the parts: the CPU's is read with it.
    with mock.patch.object(training, "time", SimpleNamespace(perf_counter=clock)):
      begin = time.perf_counter(), time.process_time()
      next(run)
      end = time.perf_counter(), time.process_time()
    marks = np.array(readings[-4:])
    spans = dict(zip(PARTS, np.diff(marks, axis=0), strict=True))
    yield spans | {"whole": np.subtract(end, begin)}


def torch_steps(other: OtherProcess, threads: int) -> Iterator[Seconds]:
  while True:
    found = {name: np.array(seconds) for name, seconds in other.ask(threads).items()}
    yield found | {"whole": sum(found.values())}


def save(folder: Path, loaded: Pretrained) -> None:
  """What PyTorch needs: sizes, parameters, prompts, and a batch with its loss and gradient."""
  model, params, _ = loaded
  batch = _batch(model.config, rows=32)
  # Plain descent takes the gradient off the parameters; a large step, so that little is rounded.
  size = 2.0**10
  descent = UpdateConfig(rl.GRPO, optax.sgd(size), max_grad_norm=None)
  update = updates.compile_update(model, descent)
  state, metrics = update(init_state(descent, params), batch)
  gradient = jax.tree.map(lambda before, after: (before - after) / size, params, state.params)
  sizes = dataclasses.asdict(ROLLOUT) | {
    name: getattr(model.config, name)
    for name in ("num_layers", "num_heads", "head_dim", "max_length", "norm_eps")
  }
  sizes |= {"theta": model.config.rope.theta, "minibatches": config().minibatches}
  sizes |= {"learning_rate": LEARNING_RATE}
  (folder / "sizes.json").write_text(json.dumps(sizes))
  np.savez(folder / "weights.npz", **_named(params))
  np.savez(folder / "gradient.npz", **_named(gradient))
  arrays = {name: x for name, x in batch._asdict().items() if x is not None}
  prompts = [prompt.tokens for prompt in task(model.config.vocab_size).prompts]
  loss = metrics.loss.total
  np.savez(folder / "batch.npz", all_prompts=prompts, loss=loss, **arrays)


def _batch(config: policy.PolicyConfig, rows: int) -> Batch:
  """Random tokens; old log-probs far enough from the policy's that some ratios are clipped."""
  random, shape = np.random.default_rng(1), (rows, ROLLOUT.max_new_tokens)
  mask = np.ones(shape, np.bool_)
  old = random.normal(-np.log(config.vocab_size), 0.3, shape)
  batch = Batch(
    prompts=random.integers(3, config.vocab_size, (rows, PROMPT), dtype=np.int32),
    prompt_mask=np.ones((rows, PROMPT), np.bool_),
    tokens=random.integers(3, config.vocab_size, shape, dtype=np.int32),
    mask=mask,
    advantages=random.normal(size=(rows, 1)).astype(np.float32),
    loss_weights=rl.GRPO.loss_weights(mask),
    old_logprobs=old.astype(np.float32),
  )
  return jax.tree.map(jnp.asarray, batch)


def _named(tree: Any) -> dict[str, np.ndarray]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  name = partial(jax.tree_util.keystr, simple=True, separator=".")
  return {name(path): np.asarray(x) for path, x in leaves}


def measured(candidates: dict[str, Iterator[Seconds]], rounds: int) -> dict[str, Any]:
  """[rounds, parts and whole, wall and CPU] of each candidate."""
  found: dict[str, Any] = {name: [] for name in candidates}
  for index in range(rounds + 1):
    for name, candidate in candidates.items():
      time.sleep(PAUSE)  # a core that has rested is faster: all of them have
      seconds = next(candidate)
      if index:
        found[name].append([seconds[part] for part in (*PARTS, "whole")])
  return {name: np.array(taken) for name, taken in found.items()}


def step(console: Console, rounds: int, python: str) -> int:
  """The table; how many goals are missed."""
  loaded = Pretrained(*policy.init(TOY, jax.random.key(0)), None)
  cores = os.cpu_count() or 1
  candidates = {
    "one device": steps(loaded, None),
    f"rows over {jax.device_count()} devices": steps(loaded, over_cores()),
  }
  ours = list(candidates)
  with tempfile.TemporaryDirectory() as folder:
    save(Path(folder), loaded)
    command = [python, "-m", "benchmarks.torch_training", folder]
    with closing(OtherProcess(command)) as other:
      version = other.answer()
      if version:
        errors = other.ask("check")
        if max(errors) > AGREES:
          raise SystemExit(f"PyTorch disagrees: loss by {errors[0]:.1e}, gradient {errors[1]:.1e}")
        threads = {"1 thread": 1, f"{cores} threads": cores}
        candidates |= {f"PyTorch, {k}": torch_steps(other, n) for k, n in threads.items()}
      found = measured(candidates, rounds)
  rows, misses = _step_table(found, ours)
  console.print(rows)
  console.print(
    f"{version}: loss and gradient agree to {errors[0]:.0e} and {errors[1]:.0e}"
    if version
    else f"{python} has no torch: no comparison"
  )
  return misses


def _step_table(found: dict[str, Any], ours: list[str]) -> tuple[Table, int]:
  sizes = f"{ROLLOUT.num_prompts} x {ROLLOUT.group_size} responses of {ROLLOUT.max_new_tokens}"
  title = f"a GRPO step, {sizes} tokens: seconds of wall, CPU"
  rows = table(title, "", *PARTS, "step, wall", "step, CPU", "times")
  theirs = [name for name in found if name not in ours]
  best = min(theirs, key=lambda name: np.median(found[name][:, -1, 0]), default=None)
  times = {
    name: float(np.median(found[best][:, -1, 0] / found[name][:, -1, 0])) for name in ours if best
  }
  fastest = max(times, key=times.__getitem__, default=None)
  for name, taken in found.items():
    low, middle, high = np.percentile(taken, (25, 50, 75), axis=0)
    cells = [f"{wall:.3f}, {cpu:.3f}" for wall, cpu in middle[:-1]]
    quartiles = zip(low[-1], middle[-1], high[-1], strict=True)
    cells += [f"{half:.3f} ({first:.3f}-{third:.3f})" for first, half, third in quartiles]
    miss = " !" if name == fastest and times[name] < GOAL else ""
    rows.add_row(name, *cells, f"{times[name]:.2f}{miss}" if name in times else "")
  return rows, int(fastest is not None and times[fastest] < GOAL)


# ------------------------------------------------------------------------ compilation

FIRST = """
import sys, time
begin = time.perf_counter()
from benchmarks import training as benchmark
loaded = benchmark.first_policy(sys.argv[1])
imported = time.perf_counter()
next(benchmark.steps(loaded, None))
print(imported - begin, time.perf_counter() - imported)
"""


def first_policy(name: str) -> Pretrained:
  if name == "toy":
    return Pretrained(*policy.init(TOY, jax.random.key(0)), None)
  return pretrained.load(name)


def compilation(console: Console) -> int:
  rows = table(
    "to the end of the first step, a new process each", "model", "cache", "imports, s", "step, s"
  )
  misses, models = 0, {"2 x 64": "toy"}
  if (path := data_path("stories260K/stories260K.bin")) is not None:
    models["stories260K"] = str(path)
  for name, argument in models.items():
    with tempfile.TemporaryDirectory() as folder:
      for label, goal in (("empty", COLD_GOAL), ("filled", WARM_GOAL)):
        imports, first = _first_step(argument, folder)
        missed = first > goal
        misses += missed
        rows.add_row(name, label, f"{imports:.1f}", f"{first:.1f}{' !' if missed else ''}")
  console.print(rows)
  return misses


def _first_step(argument: str, folder: str) -> tuple[float, float]:
  settings = {
    "JAX_COMPILATION_CACHE_DIR": folder,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  done = subprocess.run(
    [sys.executable, "-c", FIRST, argument],
    cwd=Path(__file__).parents[1],
    env=os.environ | settings,
    capture_output=True,
    text=True,
    check=True,
  )
  imports, first = map(float, done.stdout.split())
  return imports, first


# ----------------------------------------------------------------------------- memory

MEMORY_ROWS, MEMORY_LENGTH = 8, 512
SCORERS = {
  "logits in memory": scoring.response_scores,
  "tiles of logits": scoring.linear_response_scores,
}


def memory(console: Console) -> int:
  shape = setup.policy_config(real_runs.CONFIGS["qwen2.5-0.5b-h200"])
  model, params = policy.abstract_params(shape)
  sizes = f"V = {shape.vocab_size:,}, {MEMORY_ROWS} rows of {MEMORY_LENGTH} tokens"
  rows = table(f"GB of an update of Qwen2.5-0.5B, {sizes}", "scorer", "new state", "temporary")
  for name, score in SCORERS.items():
    update = config(score=score, micro_batches=1).update
    state = jax.eval_shape(partial(init_state, update), params)
    compiled: Any = jax.jit(updates.update, static_argnames=("model", "config"))
    lowered = compiled.lower(model, update, state, _abstract_batch())
    used = lowered.compile().memory_analysis()
    cells = used.output_size_in_bytes, used.temp_size_in_bytes
    rows.add_row(name, *(f"{x / 1e9:.2f}" for x in cells))
  logits = 4 * MEMORY_ROWS * MEMORY_LENGTH * shape.vocab_size
  console.print(rows, f"one array of logits in float32: {logits / 1e9:.2f} GB")
  return 0


def _abstract_batch() -> Batch:
  def array(dtype: Any, width: int = MEMORY_LENGTH) -> Any:
    return jax.ShapeDtypeStruct((MEMORY_ROWS, width), dtype)

  return Batch(
    prompts=array(jnp.int32, PROMPT),
    prompt_mask=array(jnp.bool_, PROMPT),
    tokens=array(jnp.int32),
    mask=array(jnp.bool_),
    advantages=array(jnp.float32, 1),
    loss_weights=array(jnp.float32),
    old_logprobs=array(jnp.float32),
  )


def main() -> None:
  parser = argparse.ArgumentParser(description="Speed and memory of a training step.")
  choices = ("step", "compile", "memory")
  parser.add_argument("--only", nargs="+", choices=choices, default=choices)
  parser.add_argument("--rounds", type=int, default=20)
  parser.add_argument("--torch-python", default=sys.executable, help="that has torch")
  arguments = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
  console = Console()
  console = Console(width=max(console.width, 132))
  versions = f"Python {platform.python_version()}, jax {jax.__version__}"
  console.print(f"{versions}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
  parts: dict[str, Callable[[], int]] = {
    "step": lambda: step(console, arguments.rounds, arguments.torch_python),
    "compile": lambda: compilation(console),
    "memory": lambda: memory(console),
  }
  misses = sum(parts[name]() for name in arguments.only)
  console.print(f"goals missed: {misses}")


if __name__ == "__main__":
  main()
