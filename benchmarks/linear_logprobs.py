"""Log-probs from hidden states: memory, time and accuracy beside logits in memory.

Memory: XLA's temporary memory of value and gradient at a real size; compiled, never run.
Time: value and both gradients of -sum(c log pi), beside the three matrix products that no method
avoids (logits, gradient of hidden states, gradient of the unembedding), run one by one at the
same sizes. On a CPU with `torch` installed also the heads of PyTorch trainers. Candidates are run
one after another, round after round, each once beforehand; a ratio is the median over the rounds.
On a CPU the time is that of the process on all cores (a busy machine lengthens the wall, not
that), elsewhere of the wall. Each begins after the same pause: a core that has rested is faster,
and what the threads of PyTorch do after their work, in a process of its own, is over by then.
Accuracy: float32 against the same in float64.

Goals: two sweeps at most 1 % of the memory of logits in memory and the same for any vocabulary, one
sweep 5 %; times of at most 1.25 (two sweeps), 1.10 (one) and 1.20 (one, with entropy)
products. A miss is marked with "!".
Time: about ten minutes on two cores, most of it PyTorch, which may be in an environment of its own,
named by --torch-python.
Command: python -m benchmarks.linear_logprobs [--device] [--rounds 9] [--only memory ...]
  [--torch-python PYTHON]
--device: sizes for an accelerator, bfloat16, whatever device JAX finds.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
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
from benchmarks.other_process import OtherProcess

PARTS = ("memory", "time", "accuracy")


class Sizes(NamedTuple):
  """Tokens, width and vocabulary."""

  tokens: int
  width: int
  vocabulary: int

  def __str__(self) -> str:
    return f"N={self.tokens:,} D={self.width:,} V={self.vocabulary:,}"


MEMORY = (
  Sizes(16_384, 1024, 151_936),
  Sizes(16_384, 1024, 262_144),
  Sizes(32_768, 1024, 151_936),
)
TIME = (Sizes(4096, 512, 32_768), Sizes(1024, 512, 151_936))
DEVICE_TIME = (Sizes(16_384, 1024, 151_936), Sizes(16_384, 4096, 128_256))
TORCH_FILES = ("hidden", "matrix", "tokens", "coefficients", "value", "grad_hidden", "grad_matrix")
PAUSE = 0.5  # seconds before each candidate
GOALS = {
  "two sweeps": 1.25,
  "one sweep": 1.10,
  "one sweep, entropy": 1.20,
}


def composed(hidden: jax.Array, matrix: jax.Array, tokens: jax.Array, c: jax.Array) -> jax.Array:
  logits = jnp.matmul(hidden, matrix.T, preferred_element_type=jnp.float32)
  return -jnp.sum(c * rl.token_logprobs(logits, tokens))


def two_sweeps(hidden: jax.Array, matrix: jax.Array, tokens: jax.Array, c: jax.Array) -> jax.Array:
  return -jnp.sum(c * rl.linear_token_logprobs(hidden, matrix, tokens))


def all_statistics(
  hidden: jax.Array, matrix: jax.Array, tokens: jax.Array, c: jax.Array
) -> jax.Array:
  stats = rl.linear_token_stats(hidden, matrix, tokens)
  return -jnp.sum(c * (stats.logprobs + 0.01 * stats.entropy))


def one_sweep(hidden: jax.Array, matrix: jax.Array, tokens: jax.Array, c: jax.Array) -> jax.Array:
  return rl.linear_weighted_logprobs(hidden, matrix, tokens, -c)[0]


def one_sweep_entropy(
  hidden: jax.Array, matrix: jax.Array, tokens: jax.Array, c: jax.Array
) -> jax.Array:
  return rl.linear_weighted_logprobs(
    hidden, matrix, tokens, -c, entropy_coefficients=-0.01 * jnp.ones_like(c)
  )[0]


METHODS: dict[str, Callable[..., jax.Array]] = {
  "logits in memory": composed,
  "two sweeps": two_sweeps,
  "two sweeps, all statistics": all_statistics,
  "one sweep": one_sweep,
  "one sweep, entropy": one_sweep_entropy,
}


def shapes(sizes: Sizes, dtype: Any = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
  tokens, width, vocabulary = sizes
  return (
    jax.ShapeDtypeStruct((tokens, width), dtype),
    jax.ShapeDtypeStruct((vocabulary, width), dtype),
    jax.ShapeDtypeStruct((tokens,), jnp.int32),
    jax.ShapeDtypeStruct((tokens,), jnp.float32),
  )


def arrays(sizes: Sizes, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
  """States and a matrix whose logits have a standard deviation of about 2."""
  keys = jax.random.split(jax.random.key(0), 4)
  hidden, matrix, tokens, coefficients = shapes(sizes, dtype)
  return (
    jax.random.normal(keys[0], hidden.shape, dtype),
    jax.random.normal(keys[1], matrix.shape, dtype) * (2 * sizes.width**-0.5),
    jax.random.randint(keys[2], tokens.shape, 0, sizes.vocabulary),
    jax.random.normal(keys[3], coefficients.shape),
  )


def gradient(method: Callable[..., jax.Array]) -> Callable[..., Any]:
  return jax.jit(jax.value_and_grad(method, (0, 1)))


def memory_table() -> Table:
  table = Table("MiB of temporary memory", *(str(x) for x in MEMORY), "of logits in memory, first")
  taken = {
    name: [_temporary(method, sizes) for sizes in MEMORY]
    for name, method in track(METHODS.items(), description="compiling", transient=True)
  }
  logits = taken["logits in memory"][0]
  for name, sizes in taken.items():
    share = sizes[0] / logits
    goal = 0.01 if name.startswith("two") else 0.05 if name.startswith("one") else 1.0
    cells = [f"{x / 2**20:,.0f}" for x in sizes]
    table.add_row(name, *cells, f"{100 * share:.2f} %{'' if share <= goal else ' !'}")
  return table


def _temporary(method: Callable[..., jax.Array], sizes: Sizes) -> int:
  return gradient(method).lower(*shapes(sizes)).compile().memory_analysis().temp_size_in_bytes


def three_products(hidden: jax.Array, matrix: jax.Array, slope: jax.Array) -> tuple[Any, ...]:
  """Each product of three compiled alone, so that none is merged with another."""

  def product(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    contracted = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(x, y, contracted, preferred_element_type=jnp.float32)

  compiled = jax.jit(product, static_argnums=2)
  parts = ((hidden, matrix, (1, 1)), (slope, matrix, (1, 0)), (slope, hidden, (0, 0)))
  return tuple(partial(compiled, *part) for part in parts)


def candidates(inputs: tuple[jax.Array, ...]) -> dict[str, Callable[[], float]]:
  """Ours by name: each call gives seconds."""
  hidden, matrix = inputs[:2]
  slope = jax.random.normal(jax.random.key(4), (len(hidden), len(matrix)), hidden.dtype)
  products = three_products(hidden, matrix, slope)
  made: dict[str, Callable[[], Any]] = {
    "three products": lambda: [jax.block_until_ready(x()) for x in products]
  }
  for name, method in METHODS.items():
    made[name] = partial(lambda f: jax.block_until_ready(f(*inputs)), gradient(method))
  return {name: partial(seconds_of, call) for name, call in made.items()}


def seconds_of(call: Callable[[], Any]) -> float:
  clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
  start = clock()
  call()
  return clock() - start


def torch_candidates(other: OtherProcess) -> dict[str, Callable[[], float]]:
  """Heads of PyTorch by name; none if that process has no PyTorch.

  Raises:
    SystemExit: one of them computes something else than logits in memory do.
  """

  def call(name: str) -> float:
    taken, error = other.ask(name)
    if error > 1e-3:
      raise SystemExit(f"{name} disagrees by {error:.1e}")
    return taken

  return {name: partial(call, name) for name in other.answer() or ()}


def save(inputs: tuple[jax.Array, ...], folder: str) -> None:
  """Inputs, and what they should give, for another process."""
  value, grads = gradient(composed)(*inputs)
  for name, x in zip(TORCH_FILES, (*inputs, value, *grads), strict=True):
    np.save(Path(folder) / f"{name}.npy", np.asarray(x))


def time_table(sizes: Sizes, dtype: Any, rounds: int, python: str | None) -> Table:
  inputs = arrays(sizes, dtype)
  made = candidates(inputs)
  if python is None:
    return measured(made, f"{sizes}, {jnp.dtype(dtype)}", rounds)
  with tempfile.TemporaryDirectory() as folder:
    save(inputs, folder)
    with closing(OtherProcess([python, "-m", "benchmarks.torch_heads", folder])) as other:
      return measured(made | torch_candidates(other), f"{sizes}, {jnp.dtype(dtype)}", rounds)


def measured(made: dict[str, Callable[[], float]], title: str, rounds: int) -> Table:
  seconds: dict[str, list[float]] = {name: [] for name in made}
  for index in track(range(rounds + 1), description=title, transient=True):
    for name, candidate in made.items():
      time.sleep(PAUSE)
      taken = candidate()
      if index:  # the first round compiles, and allocates memory
        seconds[name].append(taken)
  base = np.array(seconds["three products"])
  table = Table(title, "seconds (quartiles)", "of three products")
  for name, taken in seconds.items():
    low, median, high = np.percentile(taken, (25, 50, 75))
    ratio = float(np.median(taken / base))
    miss = " !" if ratio > GOALS.get(name, np.inf) else ""
    table.add_row(name, f"{median:.3f} ({low:.3f}-{high:.3f})", f"{ratio:.2f}{miss}")
  return table


def accuracy_table(sizes: Sizes) -> Table:
  """Largest error over 256 tokens; bfloat16 inputs against themselves in float64."""
  hidden, matrix, tokens, _ = arrays(sizes._replace(tokens=256))
  table = Table(f"largest error, V={sizes.vocabulary:,}", "log-prob", "entropy")
  stats = jax.jit(rl.linear_token_stats)

  def in_memory(hidden: jax.Array, matrix: jax.Array, tokens: jax.Array) -> rl.TokenStats:
    logits = hidden.astype(jnp.float32) @ matrix.astype(jnp.float32).T
    entropy = rl.token_entropy(logits)
    return rl.TokenStats(rl.token_logprobs(logits, tokens), entropy, entropy, entropy, entropy)

  for name, dtype in (("float32", jnp.float32), ("bfloat16", jnp.bfloat16)):
    inputs = (hidden.astype(dtype), matrix.astype(dtype))
    z = np.asarray(inputs[0], np.float64) @ np.asarray(inputs[1], np.float64).T
    logprobs = z - np.logaddexp.reduce(z, axis=1)[:, None]
    chosen = logprobs[np.arange(len(z)), np.asarray(tokens)]
    entropy = -(np.exp(logprobs) * logprobs).sum(1)
    for method, function in (("sweep", stats), ("logits in float32", jax.jit(in_memory))):
      got = function(*inputs, tokens)
      errors = (np.max(np.abs(got.logprobs - chosen)), np.max(np.abs(got.entropy - entropy)))
      table.add_row(f"{name} inputs, {method}", *(f"{x:.1e}" for x in errors))
  return table


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--device", action="store_true", help="sizes for an accelerator, bfloat16")
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
  parser.add_argument("--torch-python", default=sys.executable, help="that has torch")
  arguments = parser.parse_args()
  console = Console()
  device = jax.devices()[0]
  console.print(f"{device.device_kind}, {platform.machine()}, JAX {jax.__version__}")
  if "memory" in arguments.only:
    console.print(memory_table())
  if "time" in arguments.only:
    python = arguments.torch_python if device.platform == "cpu" else None
    sizes, dtype = (DEVICE_TIME, jnp.bfloat16) if arguments.device else (TIME, jnp.float32)
    for size in sizes:
      console.print(time_table(size, dtype, arguments.rounds, python))
    console.print("PyTorch has no rows where it is not installed.")
  if "accuracy" in arguments.only:
    console.print(accuracy_table(MEMORY[0]._replace(width=512)))


if __name__ == "__main__":
  main()
