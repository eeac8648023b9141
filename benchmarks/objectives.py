"""Speed of every named objective: to run, to compile, to import.

Run: value_and_grad of the loss under jit, beside one fused pass over the same arrays (the floor
of any objective that is bound by memory) and, on a CPU with `torch` installed, beside the same
formula in eager PyTorch. The candidates of a row are timed one after another, round after round,
each after one call that is not timed; a ratio is the median of the ratios within a round, so that
a busy machine slows numerator and denominator alike. Times: median (quartiles). PyTorch's threads
spin while they wait for each other: on a busy machine start with OMP_WAIT_POLICY=passive.
Compile: trace, lower and compile, all caches of JAX empty, also taken in turns.
Import: what `import jaxrl_lm` adds in a fresh interpreter that has imported jax.

Goals, at 64 prompts of 8 responses of up to 2048 tokens on a CPU: at most 1.5 times the fused
pass and faster than PyTorch; compiled within 0.5 s (a prefix level: 1 s); imported within 0.15 s. A
miss is marked with "!". Levels other than the token's, on plain and on packed rows, follow below
the algorithms; the 1.5 is not asked of them.
Time: about five minutes. Numbers worth quoting come from a machine that does nothing else.
Command: python -m benchmarks.objectives [--sizes 64x8x2048 ...] [--rounds 21] [--only GRPO ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxrl_lm as rl
from experiments import algorithm_table

MAX_OF_FUSED = 1.5
MAX_COMPILE_SECONDS = 0.5
MAX_PREFIX_COMPILE_SECONDS = 1.0
MAX_IMPORT_SECONDS = 0.15
COMPILE_ROUNDS = 3
IMPORT_ROUNDS = 15
TOLERANCE = 1e-4
FUSED_ARRAYS = ("logprobs", "old_logprobs", "advantages", "mask", "loss_weights")

Sizes = tuple[int, ...]  # prompts, responses of each, tokens of the longest


class Row(NamedTuple):
  """An objective and the arrays it is timed on."""

  name: str
  objective: rl.Objective
  arguments: dict[str, jax.Array | None]
  is_algorithm: bool = True

  def compile_goal(self) -> float:
    prefix = self.objective.level is rl.per_prefix
    return MAX_PREFIX_COMPILE_SECONDS if prefix else MAX_COMPILE_SECONDS


class Timing(NamedTuple):
  """Seconds of each round."""

  seconds: np.ndarray

  def text(self) -> str:
    low, median, high = 1e3 * np.percentile(self.seconds, (25, 50, 75))
    return f"{median:.2f} [dim]({low:.2f}-{high:.2f})[/dim]"

  def ratio(self, other: Timing) -> float:
    return float(np.median(self.seconds / other.seconds))


def ragged_batch(sizes: Sizes, seed: int = 0) -> algorithm_table.Batch:
  """Responses of 1 to T tokens, with a policy that has moved a little from the sampler."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, sizes[-1] + 1, sizes[:2])
  old_logprobs = -rng.exponential(1.0, sizes)
  return algorithm_table.Batch(
    mask=jnp.asarray(np.arange(sizes[-1]) < lengths[..., None]),
    logprobs=jnp.asarray(np.minimum(old_logprobs + rng.normal(0.0, 0.1, sizes), -1e-3)),
    old_logprobs=jnp.asarray(old_logprobs),
    values=jnp.asarray(rng.uniform(0.0, 1.0, sizes)),
    rewards=jnp.asarray(rng.integers(0, 2, sizes[:2]).astype(float)),
    greedy_rewards=jnp.asarray(rng.uniform(0.0, 1.0, sizes[0])),
  )


def make_row(name: str, objective: rl.Objective, batch: algorithm_table.Batch) -> Row:
  advantages = algorithm_table.advantages_of(objective, batch)
  arguments = {
    "logprobs": batch.logprobs,
    "old_logprobs": batch.old_logprobs,
    "advantages": advantages,
    "mask": batch.mask,
    "loss_weights": objective.loss_weights(batch.mask),
    "selected": algorithm_table.selection_of(objective, batch, advantages),
    "segment_ids": None,
  }
  return Row(name, objective, arguments)


def packed(row: Row) -> Row:
  """The row with four segments of unequal length in each sequence, and advantages per token."""
  mask = row.arguments["mask"]
  ends = jnp.asarray([0.1, 0.35, 0.7]) * mask.shape[-1]
  segment = 1 + jnp.searchsorted(ends, jnp.arange(mask.shape[-1]), side="right")
  changed = {
    "segment_ids": jnp.where(mask, segment.reshape(1, 1, -1), 0).astype(jnp.int32),
    "advantages": jnp.broadcast_to(row.arguments["advantages"], mask.shape),
  }
  return Row(f"{row.name}, packed", row.objective, row.arguments | changed, False)


def all_rows(sizes: Sizes) -> list[Row]:
  batch = ragged_batch(sizes)
  algorithms = [make_row(*item, batch) for item in algorithm_table.named_objectives().items()]
  levels = [
    make_row(level.__name__, replace(rl.GRPO, level=level), batch)._replace(is_algorithm=False)
    for level in (rl.per_prefix, rl.per_sequence, rl.per_sequence_geometric)
  ]
  couples = [row for row in algorithms if row.name == "GMPO"]
  return algorithms + levels + [packed(row) for row in levels + couples]


def fused_pass(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  loss_weights: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """A clipped loss and its gradient by hand: reads each array once, writes the gradient."""
  ratio = jnp.exp(jnp.where(mask, logprobs - old_logprobs, 0.0))
  moves = jnp.where(advantages >= 0, ratio <= 1.2, ratio >= 0.8)
  scale = -loss_weights * advantages
  loss = jnp.where(mask, scale * jnp.where(moves, ratio, jnp.clip(ratio, 0.8, 1.2)), 0.0)
  return jnp.sum(loss), jnp.where(mask & moves, scale * ratio, 0.0)


def loss_and_gradient(objective: rl.Objective, logprobs: jax.Array, **arguments: Any) -> Any:
  def loss(logprobs: jax.Array) -> jax.Array:
    return rl.objective_loss(objective, logprobs, **arguments)[0]

  return jax.value_and_grad(loss)(logprobs)


def has_torch() -> bool:
  return jax.default_backend() == "cpu" and importlib.util.find_spec("torch") is not None


def torch_candidate(row: Row) -> Callable[[], Any]:
  """The same in PyTorch, once it has been seen to give the same numbers."""
  import torch

  from benchmarks import torch_objectives

  tensors = {k: x if x is None else torch.tensor(np.asarray(x)) for k, x in row.arguments.items()}
  if tensors["segment_ids"] is not None:
    tensors["segment_ids"] = tensors["segment_ids"].long()  # what scatter_add and gather take
  name = row.name.removesuffix(", packed")
  candidate = partial(torch_objectives.loss_and_gradient, name, torch_objectives.Batch(**tensors))
  want = jax.device_get(jax.jit(partial(loss_and_gradient, row.objective))(**row.arguments))
  for a, b in zip(want, (x.numpy() for x in candidate()), strict=True):
    if not np.max(np.abs(a - b)) <= TOLERANCE * max(np.max(np.abs(b)), np.max(np.abs(want[1]))):
      raise SystemExit(f"{row.name}: PyTorch disagrees by {np.max(np.abs(a - b)):.3g}")
  return candidate


def candidates(row: Row) -> dict[str, Callable[[], Any]]:
  ours = jax.jit(partial(loss_and_gradient, row.objective))
  fused = jax.jit(fused_pass)
  shared = {name: row.arguments[name] for name in FUSED_ARRAYS}
  made: dict[str, Callable[[], Any]] = {
    "fused": lambda: jax.block_until_ready(fused(**shared)),
    "ours": lambda: jax.block_until_ready(ours(**row.arguments)),
  }
  return made | ({"torch": torch_candidate(row)} if has_torch() else {})


def run_times(
  rows: list[Row], rounds: int, progress: Callable[..., Iterable[Any]]
) -> list[dict[str, Timing]]:
  made = [candidates(row) for row in progress(rows, description="checking")]
  seconds: list[dict[str, list[float]]] = [{name: [] for name in row} for row in made]
  for _ in progress(range(rounds), description="running"):
    for row, taken in zip(made, seconds, strict=True):
      for name, candidate in row.items():
        # Not timed: memory is allocated, and the threads of the previous candidate go to sleep.
        candidate()
        start = time.perf_counter()
        candidate()
        taken[name].append(time.perf_counter() - start)
  return [{name: Timing(np.asarray(x)) for name, x in row.items()} for row in seconds]


def compile_times(rows: list[Row], progress: Callable[..., Iterable[Any]]) -> list[Timing]:
  seconds = np.zeros((COMPILE_ROUNDS, len(rows)))
  jax.jit(fused_pass).lower(*[jnp.ones((2, 2))] * 3, jnp.ones((2, 2), bool), 1.0).compile()
  for turn in progress(range(COMPILE_ROUNDS), description="compiling"):
    for i, row in enumerate(rows):
      jax.clear_caches()
      start = time.perf_counter()
      jax.jit(partial(loss_and_gradient, row.objective)).lower(**row.arguments).compile()
      seconds[turn, i] = time.perf_counter() - start
  return [Timing(column) for column in seconds.T]


def import_times(progress: Callable[..., Iterable[Any]]) -> tuple[Timing, Timing]:
  """Of jax, and of jaxrl_lm after it."""
  code = (
    "from time import perf_counter as now; a = now(); import jax; b = now(); import jaxrl_lm;"
    "print(b - a, now() - b)"
  )
  run = partial(subprocess.run, cwd=Path(__file__).parents[1], check=True, capture_output=True)
  run([sys.executable, "-c", code])  # writes the bytecode
  seconds = []
  for _ in progress(range(IMPORT_ROUNDS), description="importing"):
    seconds.append([float(x) for x in run([sys.executable, "-c", code], text=True).stdout.split()])
  of_jax, of_ours = np.asarray(seconds).T
  return Timing(of_jax), Timing(of_ours)


def marked(text: str, miss: bool) -> str:
  return f"[bold red]{text} ![/bold red]" if miss else text


def results_table(
  sizes: Sizes, rows: list[Row], times: list[dict[str, Timing]], compiled: list[Timing]
) -> tuple[Table, int]:
  """The table of one size, and how many goals are missed in it."""
  table = Table(title="value and gradient at " + " x ".join(map(str, sizes)))
  table.add_column("objective", no_wrap=True)
  for column in ("ours, ms", "ours / fused", "PyTorch, ms", "PyTorch / ours", "compile, s"):
    table.add_column(column, justify="right", no_wrap=True)
  misses = 0
  for i, (row, time_of, compile_time) in enumerate(zip(rows, times, compiled, strict=True)):
    of_fused = time_of["ours"].ratio(time_of["fused"])
    of_ours = time_of["torch"].ratio(time_of["ours"]) if "torch" in time_of else np.inf
    compile_seconds = float(np.median(compile_time.seconds))
    missed = (
      row.is_algorithm and of_fused > MAX_OF_FUSED,
      of_ours < 1.0,
      compile_seconds > row.compile_goal(),
    )
    misses += sum(missed)
    table.add_row(
      row.name,
      time_of["ours"].text(),
      marked(f"{of_fused:.2f}", missed[0]),
      time_of["torch"].text() if "torch" in time_of else "-",
      marked(f"{of_ours:.1f}" if np.isfinite(of_ours) else "-", missed[1]),
      marked(f"{compile_seconds:.2f}", missed[2]),
      end_section=i + 1 < len(rows) and row.is_algorithm != rows[i + 1].is_algorithm,
    )
  return table, misses


def main() -> None:
  parser = argparse.ArgumentParser(description="Speed of every named objective.")
  parser.add_argument("--sizes", nargs="+", default=["64x8x2048"], metavar="PxGxT")
  parser.add_argument("--rounds", type=int, default=21)
  parser.add_argument("--only", nargs="+", metavar="NAME", help="rows to keep")
  arguments = parser.parse_args()
  jax.config.update("jax_enable_compilation_cache", False)
  console = Console()
  console = Console(width=max(console.width, 132))
  progress = partial(track, console=console, transient=True, disable=not console.is_terminal)
  versions = f"Python {platform.python_version()}, jax {jax.__version__}"
  console.print(f"{versions}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
  if not has_torch():
    console.print("no torch beside JAX on a CPU: its columns are left out")
  misses = 0
  for sizes in (tuple(map(int, text.split("x"))) for text in arguments.sizes):
    rows = [x for x in all_rows(sizes) if not arguments.only or x.name in arguments.only]
    compiled = compile_times(rows, progress)
    times = run_times(rows, arguments.rounds, progress)
    table, missed = results_table(sizes, rows, times, compiled)
    misses += missed
    console.print(table)
  of_jax, of_ours = import_times(progress)
  miss = float(np.median(of_ours.seconds)) > MAX_IMPORT_SECONDS
  console.print(f"import jax: {of_jax.text()} ms; jaxrl_lm adds {marked(of_ours.text(), miss)} ms")
  console.print(f"goals missed: {misses + miss}" if misses + miss else "every goal is met")


if __name__ == "__main__":
  main()
