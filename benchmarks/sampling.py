"""Speed and memory of sampling, beside what a user would pick instead.

  rate        tokens/s of `sample` against `generate` of transformers: the same weights, written by
              one and read by the other, 64 rows, 256 tokens, T = 1, one after the other in turn
  recompute   cached decoding against a full forward pass for every token, over the length
  compile     seconds of the first call, without and with the persistent compilation cache
  memory      temporary memory of the compiled program against the cache's formula
  truncation  what top-k, top-p and min-p add to a step of a large vocabulary
  mismatch    sampler against scorer in float32, in bfloat16, and one in each

Rows are split over one device per core, which is how JAX uses the cores of a CPU for operations
this small; the same tokens come out. Seconds are of the wall clock; beside them CPU seconds of the
process, which count every core and say more where others use the machine. A rate is that of the
fastest of the rounds.

Goal: at least twice the tokens/s of transformers. A miss is marked with "!". Models: stories260K
where the data folder has it, and a 4-layer 256-wide Llama with random weights.
Without torch and transformers the first table has no second column; they may also be in an
environment of their own, named by --torch-python.
Time: five minutes. Numbers worth quoting come from a machine that does nothing else.
Command: python -m benchmarks.sampling [--only rate memory ...] [--torch-python PYTHON]
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import jaxrl_lm as rl
from benchmarks.other_process import OtherProcess
from experiments.harness.run import data_path
from jaxrl_lm.lm import decoding, policy, pretrained, sampling, scoring, truncation

ROWS, PROMPT, NEW = 64, 8, 256
GOAL = 2.0
ROUNDS = 3
LLAMA = policy.PolicyConfig(
  vocab_size=4096,
  hidden_size=256,
  intermediate_size=688,
  num_layers=4,
  num_heads=8,
  num_kv_heads=8,
  head_dim=32,
  max_length=512,
)


def models() -> dict[str, tuple[Any, Any]]:
  found = {"llama 4 x 256": policy.init(LLAMA, jax.random.key(0))}
  if (path := data_path("stories260K/stories260K.bin")) is not None:
    found = {"stories260K": pretrained.load(path)[:2]} | found
  return found


def prompts(model: Any, rows: int = ROWS) -> tuple[jax.Array, jax.Array]:
  tokens = np.random.default_rng(0).integers(3, model.config.vocab_size, (rows, PROMPT))
  return sampling.pad_prompts(tokens.tolist(), length=PROMPT)


def over_cores(inputs: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
  """Parameters on every device, and the rows of prompts and mask over all of them."""
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
  specs = PartitionSpec(), PartitionSpec("data"), PartitionSpec("data")
  return jax.device_put(inputs, tuple(NamedSharding(mesh, spec) for spec in specs))


def timed(call: Callable[[], Any]) -> tuple[float, float]:
  """Wall and CPU seconds."""
  start = time.perf_counter(), time.process_time()
  jax.block_until_ready(call())
  return time.perf_counter() - start[0], time.process_time() - start[1]


def table(title: str, *columns: str) -> Table:
  made = Table(title=title)
  for column in columns:
    made.add_column(column, justify="right", no_wrap=True)
  return made


# --------------------------------------------------------------------- against transformers

# Reads a folder and answers every line of its input with the seconds of one call.
TRANSFORMERS = """
import json, sys, time
import torch, transformers
folder, rows, prompt, new, threads = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(threads)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
generator = torch.Generator().manual_seed(0)
ids = torch.randint(3, model.config.vocab_size, (rows, prompt), generator=generator)
options = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
model.generation_config.eos_token_id = None
with torch.no_grad():
  model.generate(ids, max_new_tokens=8, **options)
  versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
  print(json.dumps(versions), flush=True)
  for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    out = model.generate(ids, max_new_tokens=new, **options)
    assert out.shape == (rows, prompt + new), out.shape
    print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)
"""


def transformers(python: str, folder: Path) -> OtherProcess:
  """A process that generates when asked to."""
  sizes = map(str, (ROWS, PROMPT, NEW, os.cpu_count() or 1))
  return OtherProcess([python, "-c", TRANSFORMERS, str(folder), *sizes])


def rate(console: Console, python: str) -> int:
  """The table against transformers; how many goals are missed."""
  rows = table(
    "64 rows, 256 tokens", "model", "ours, tokens/s", "CPU s", "theirs", "CPU s", "times", "of CPU"
  )
  misses, versions = 0, None
  for name, (model, params) in models().items():
    ours, theirs = [], []
    inputs = over_cores((params, *prompts(model)))
    call = partial(sampling.sample, model, *inputs, max_new_tokens=NEW)
    jax.block_until_ready(call(seed=0))
    with tempfile.TemporaryDirectory() as folder:
      pretrained.save(Path(folder) / "model", model, params)
      with closing(transformers(python, Path(folder) / "model")) as other:
        versions = other.answer()
        for seed in range(ROUNDS):
          ours.append(timed(partial(call, seed=seed)))
          theirs += [other.ask()] if versions else []
    cells = [name]
    for found in filter(None, (ours, theirs)):
      best = np.min(found, axis=0)
      cells += [f"{ROWS * NEW / best[0]:,.0f}", f"{best[1]:.2f}"]
    if theirs:
      times, of_cpu = np.min(theirs, axis=0) / np.min(ours, axis=0)
      misses += int(times < GOAL)
      cells += [f"{times:.2f}" + (" !" if times < GOAL else ""), f"{of_cpu:.2f}"]
    rows.add_row(*cells)
  console.print(rows)
  console.print(versions or f"{python} has no torch and transformers: no comparison")
  return misses


# ---------------------------------------------------------------------- by ourselves


@partial(jax.jit, static_argnames=("model", "count"))
def recomputed(model: Any, params: Any, tokens: jax.Array, count: int) -> jax.Array:
  """Greedy decoding without a cache: every step runs the whole row, padded to its last length."""
  width = tokens.shape[1]
  row = jnp.pad(tokens, ((0, 0), (0, count)))
  slots = jnp.arange(width + count)[None]

  def step(i: jax.Array, row: jax.Array) -> jax.Array:
    mask = jnp.broadcast_to(slots < width + i, row.shape)
    hidden = model.apply(params, row, segment_ids=mask.astype(jnp.int32)).hidden
    logits = model.logits(params, scoring.last_hidden(hidden, mask))[:, 0]
    token = jnp.argmax(logits, axis=-1).astype(row.dtype)
    return jax.lax.dynamic_update_slice_in_dim(row, token[:, None], width + i, axis=1)

  return jax.lax.fori_loop(0, count, step, row)[:, width:]


def recompute(console: Console) -> None:
  model, params = policy.init(LLAMA, jax.random.key(0))
  rows = table(
    "8 rows, greedy: cache against recomputation", "tokens", "cached, s", "full, s", "times"
  )
  tokens, mask = prompts(model, 8)
  for count in (16, 32, 64, 128):
    options = {"seed": 0, "temperature": 0.0, "max_new_tokens": count}
    cached = partial(sampling.sample, model, params, tokens, mask, **options)
    full = partial(recomputed, model, params, tokens, count)
    assert jnp.mean(cached().tokens == full()) > 0.9  # equal but for ties to rounding
    seconds = np.min([[timed(cached)[0], timed(full)[0]] for _ in range(ROUNDS)], axis=0)
    rows.add_row(str(count), *(f"{x:.3f}" for x in seconds), f"{seconds[1] / seconds[0]:.1f}")
  console.print(rows)


COMPILE = """
import time, jax
from benchmarks import sampling as benchmark
model, params = benchmark.policy.init(benchmark.LLAMA, jax.random.key(0))
start = time.perf_counter()
call = benchmark.sampling.sample(model, params, *benchmark.prompts(model), seed=0, max_new_tokens=2)
jax.block_until_ready(call)
print(time.perf_counter() - start)
"""


def compilation(console: Console) -> None:
  rows = table("first call of the Llama, a new process each", "persistent cache", "seconds")
  with tempfile.TemporaryDirectory() as folder:
    settings = {
      "JAX_COMPILATION_CACHE_DIR": folder,
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for label in ("empty", "filled"):
      done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=Path(__file__).parents[1],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
      )
      rows.add_row(label, f"{float(done.stdout):.1f}")
  console.print(rows)


def memory(console: Console) -> None:
  model, params = policy.init(LLAMA, jax.random.key(0))
  rows = table(
    "64 rows: MB of the compiled program", "tokens", "cache, formula", "temporary", "times"
  )
  tokens, mask = prompts(model)
  for count in (64, 256, 504):
    rule = sampling._rule(model, ROWS, 0, 0, None, 1.0, None, 1.0, 0.0, (), 0)
    program = sampling._sample.lower(model, params, tokens, mask, rule, max_new_tokens=count)
    used = program.compile().memory_analysis().temp_size_in_bytes
    slots, config = PROMPT + count - 1, model.config
    formula = 2 * config.num_layers * ROWS * slots * config.num_kv_heads * config.head_dim * 4
    rows.add_row(str(count), f"{formula / 1e6:.1f}", f"{used / 1e6:.1f}", f"{used / formula:.2f}")
  console.print(rows)


def truncations(console: Console) -> None:
  rows = table("one draw, 64 rows of 151,936 logits", "truncation", "CPU seconds")
  logits = jax.random.normal(jax.random.key(0), (ROWS, 151_936)) * 3
  model = policy.abstract_params(LLAMA)[0]
  for name, options in (
    ("none", (None, 1.0, 0.0)),
    ("top-k 50", (50, 1.0, 0.0)),
    ("top-p .9", (None, 0.9, 0.0)),
    ("min-p .1", (None, 1.0, 0.1)),
  ):
    rule = sampling._rule(model, ROWS, 0, 0, None, 1.0, *options, (), 0)
    draw = partial(jax.jit(decoding._draw), logits, rule, jnp.int32(0))
    draw()
    rows.add_row(name, f"{min(timed(draw)[1] for _ in range(ROUNDS)):.2f}")
  by_sorting = partial(jax.jit(jnp.sort), logits)
  by_sorting()
  rows.add_row("(a sort alone)", f"{min(timed(by_sorting)[1] for _ in range(ROUNDS)):.2f}")
  kept = jnp.sum(truncation.keep_top_p(logits, 0.9) > -jnp.inf, axis=-1).mean()
  console.print(rows, f"top-p .9 keeps {kept:,.0f} tokens of these logits")


def mismatch(console: Console) -> None:
  rows = table(
    "sampler and scorer, 64 rows of 128 tokens", "model", "sampler", "scorer", "max", "mean", "KL"
  )
  score = jax.jit(scoring.response_logprobs, static_argnums=0)
  for name, (model, params) in models().items():
    computed = {
      dtype: policy.abstract_params(policy.dataclasses.replace(model.config, compute_dtype=dtype))[
        0
      ]
      for dtype in (jnp.float32, jnp.bfloat16)
    }
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens, mask = prompts(model)
    for sampler, scorer in (
      (jnp.float32, jnp.float32),
      (jnp.bfloat16, jnp.bfloat16),
      (jnp.bfloat16, jnp.float32),
    ):
      weights = [rounded if dtype == jnp.bfloat16 else params for dtype in (sampler, scorer)]
      samples = sampling.sample(
        computed[sampler], weights[0], tokens, mask, seed=0, max_new_tokens=128
      )
      scored = score(computed[scorer], weights[1], tokens, mask, samples.tokens, samples.mask)
      log_ratio = rl.token_log_ratio(scored, samples.logprobs, samples.mask)
      size = jnp.abs(log_ratio)
      rows.add_row(
        name,
        jnp.dtype(sampler).name,
        jnp.dtype(scorer).name,
        *(f"{float(x):.1e}" for x in (size.max(), size.mean(), -log_ratio.mean())),
      )
  console.print(rows, "max and mean of |log ratio|, nats; KL(sampler || scorer) per token")


SWEEPS = {
  "recompute": recompute,
  "compile": compilation,
  "memory": memory,
  "truncation": truncations,
  "mismatch": mismatch,
}


def main() -> None:
  parser = argparse.ArgumentParser(description="Speed and memory of sampling.")
  choices = ["rate", *SWEEPS]
  parser.add_argument("--only", nargs="+", choices=choices, default=choices)
  parser.add_argument("--torch-python", default=sys.executable, help="that has transformers")
  arguments = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
  console = Console()
  console = Console(width=max(console.width, 100))
  versions = f"Python {platform.python_version()}, jax {jax.__version__}"
  console.print(f"{versions}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
  if "rate" in arguments.only:
    misses = rate(console, arguments.torch_python)
    console.print(f"goals missed: {misses}")
  for name in arguments.only:
    if name != "rate":
      SWEEPS[name](console)


if __name__ == "__main__":
  main()
