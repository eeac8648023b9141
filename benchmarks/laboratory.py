"""How time and memory of the exact laboratory grow.

Exact moments of GRPO against the number of responses |Y| and the group size G, and dynamic
programming over long responses against the horizon T. Each row runs in a process of its own:
"first" is the first call, compilation included, "then" the fastest of the calls after it, and the
memory is the peak of the whole process, interpreter and libraries (0.3 GB) included.

Goals: moments at G = 8 on the language with an end token (5 tokens, 6 steps: 15,625 strings, 4
prompts) within 10 s after compilation and 2 GB; everything at T = 4096 within 10 s. A miss is
marked with "!".
Time: about five minutes. Numbers worth quoting come from a machine that does nothing else.
Command: python -m benchmarks.laboratory [--only responses group chain counting] [--calls 3]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxrl_lm as rl
from jaxrl_lm import exact
from jaxrl_lm.exact import chains, counting, ratio_distributions

MAX_SECONDS = 10.0
MAX_GIGABYTES = 2.0
PROMPTS = 4

Sizes = tuple[Any, ...]


class Sweep(NamedTuple):
  """A way in which the work grows.

  Attributes:
    title: of its table.
    columns: names of the sizes.
    rows: the sizes.
    prepare: sizes -> (what to time, a remark about its size).
    has_goal: whether the goals are asked of these sizes.
  """

  title: str
  columns: tuple[str, ...]
  rows: list[Sizes]
  prepare: Callable[..., tuple[Callable[[], Any], str]]
  has_goal: Callable[..., bool]


def grpo_moments(
  vocabulary: int, horizon: int, end_token: int | None, group_size: int
) -> tuple[Callable[[], Any], str]:
  language = exact.enumerate_language(vocabulary, horizon, end_token=end_token)
  logits = exact.count_pretrained_logits(language, prompts=PROMPTS, seed=4, concentration=0.6)
  policy = exact.tabular_policy(language, logits)
  rewards = exact.modular_sum_reward(language, np.arange(PROMPTS))
  call = partial(exact.bias_variance, rl.GRPO, policy, rewards, group_size=group_size)
  return call, f"{len(language.tokens):,} responses, {logits.size:,} parameters"


def chain_pair() -> tuple[chains.MarkovChain, chains.MarkovChain]:
  rng = np.random.default_rng(0)
  logits = [rng.normal(size=(5,)), rng.normal(size=(5, 5))]
  behaviour = chains.MarkovChain(
    *(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)) for x in logits)
  )
  directions = rng.normal(size=(5,)), rng.normal(size=(5, 5))
  return behaviour, chains.at_kl_rate(behaviour, *directions, rate=2e-4)


def chain(name: str, horizon: int) -> tuple[Callable[[], Any], str]:
  pair = chain_pair()
  calls = {
    "second moment": lambda: chains.log_moments(*pair, 2.0, horizon=horizon),
    "mean and variance": lambda: chains.log_ratio_moments(*pair, horizon=horizon),
    "band of the sequence ratio": lambda: ratio_distributions.sequence_band(
      *pair, horizon, np.log(0.8), np.log(1.2)
    ),
  }
  return calls[name], "5 tokens, 2e-4 nats per token"


def count(name: str, horizon: int) -> tuple[Callable[[], Any], str]:
  logits = 0.1 * np.random.default_rng(0).normal(size=(2, horizon, horizon + 1))
  weights = {"token": counting.TOKEN, "sequence": counting.SEQUENCE}[name]
  reward = counting.majority_reward(horizon)
  call = partial(counting.table_gradient_moments, *logits, reward, weights)
  return call, f"{horizon * (horizon + 1) // 2:,} states"


SWEEPS = {
  "responses": Sweep(
    f"GRPO against the number of responses, {PROMPTS} prompts",
    ("V", "T", "end token", "G"),
    [(5, t, 4, 8) for t in (3, 4, 5, 6, 7)] + [(5, t, None, 8) for t in (4, 5, 6, 7)],
    grpo_moments,
    lambda vocabulary, horizon, end, group_size: (vocabulary, horizon, end) == (5, 6, 4),
  ),
  "group": Sweep(
    f"GRPO against the group size, {PROMPTS} prompts",
    ("V", "T", "end token", "G"),
    [(5, 4, 4, g) for g in (2, 4, 8, 12, 16)] + [(5, 5, None, g) for g in (16, 64, 256, 1024)],
    grpo_moments,
    lambda *sizes: False,
  ),
  "chain": Sweep(
    "Markov chain of 5 tokens against the horizon",
    ("what", "T"),
    [
      (name, t)
      for name in ("second moment", "mean and variance", "band of the sequence ratio")
      for t in (64, 512, 4096)
    ],
    chain,
    lambda name, horizon: horizon == 4096,
  ),
  "counting": Sweep(
    "gradient estimators on the counting language against the horizon",
    ("ratio", "T"),
    [(name, t) for name in ("token", "sequence") for t in (64, 256, 512, 1024)],
    count,
    lambda name, horizon: False,
  ),
}


def measure(sweep: str, index: int, calls: int) -> dict[str, Any]:
  """In a process of its own: seconds of each call, and the peak of its memory."""
  seconds = []
  with jax.enable_x64(True):
    call, remark = SWEEPS[sweep].prepare(*SWEEPS[sweep].rows[index])
    for _ in range(calls):
      start = time.perf_counter()
      call()
      seconds.append(time.perf_counter() - start)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1.0 if sys.platform == "darwin" else 2.0**10
  return {"seconds": seconds, "gigabytes": peak * unit / 2.0**30, "remark": remark}


def measured(sweep: str, index: int, calls: int) -> dict[str, Any]:
  command = [sys.executable, "-m", "benchmarks.laboratory", "--calls", str(calls)]
  done = subprocess.run(
    [*command, "--row", sweep, str(index)],
    cwd=Path(__file__).parents[1],
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise SystemExit(f"{sweep} {SWEEPS[sweep].rows[index]}:\n{done.stderr}")
  return json.loads(done.stdout)


def marked(text: str, miss: bool) -> str:
  return f"[bold red]{text} ![/bold red]" if miss else text


def results_table(sweep: Sweep, results: list[dict[str, Any]]) -> tuple[Table, int]:
  """The table of one sweep, and how many goals are missed in it."""
  table, misses = Table(title=sweep.title), 0
  for column in (*sweep.columns, "first, s", "then, s", "peak, GB"):
    table.add_column(column, justify="right", no_wrap=True)
  table.add_column("size", no_wrap=True)
  for sizes, result in zip(sweep.rows, results, strict=True):
    first, *later = result["seconds"]
    then, asked = min(later), sweep.has_goal(*sizes)
    missed = asked and then > MAX_SECONDS, asked and result["gigabytes"] > MAX_GIGABYTES
    misses += sum(missed)
    table.add_row(
      *("-" if size is None else str(size) for size in sizes),
      f"{first:.2f}",
      marked(f"{then:.2f}", missed[0]),
      marked(f"{result['gigabytes']:.2f}", missed[1]),
      result["remark"],
    )
  return table, misses


def main() -> None:
  parser = argparse.ArgumentParser(description="Time and memory of the exact laboratory.")
  parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS))
  parser.add_argument("--calls", type=int, default=3, help="of each row, at least 2")
  parser.add_argument("--row", nargs=2, metavar=("SWEEP", "INDEX"), help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  jax.config.update("jax_enable_compilation_cache", False)
  if arguments.row:
    print(json.dumps(measure(arguments.row[0], int(arguments.row[1]), arguments.calls)))
    return
  console = Console()
  console = Console(width=max(console.width, 112))
  progress = partial(track, console=console, transient=True, disable=not console.is_terminal)
  versions = f"Python {platform.python_version()}, jax {jax.__version__}"
  console.print(f"{versions}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
  misses = 0
  for name in arguments.only:
    rows = progress(range(len(SWEEPS[name].rows)), description=name)
    results = [measured(name, index, max(2, arguments.calls)) for index in rows]
    table, missed = results_table(SWEEPS[name], results)
    misses += missed
    console.print(table)
  console.print(f"goals missed: {misses}" if misses else "every goal is met")


if __name__ == "__main__":
  main()
