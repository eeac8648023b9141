"""A run that saves every step until it is killed: `python -m tests.checkpoint_worker folder`."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm.lm.checkpoints import Checkpoints

SIZE = 50_000


def start() -> dict[str, Any]:
  return {"w": jnp.arange(SIZE, dtype=jnp.float32), "key": jax.random.key(3), "mean": jnp.zeros(())}


@jax.jit
def advance(state: dict[str, Any]) -> dict[str, Any]:
  key, noise = jax.random.split(state["key"])
  w = 0.9 * state["w"] + jax.random.normal(noise, (SIZE,))
  return {"w": w, "key": key, "mean": 0.5 * state["mean"] + w.mean()}


def main(folder: Path) -> None:
  with Checkpoints(folder, config={"size": SIZE}) as checkpoints:
    step, state = 0, start()
    if checkpoints.steps:
      step, state, _ = checkpoints.restore(state)
    while True:
      step, state = step + 1, advance(state)
      checkpoints.save(step, state, {"step": step})
      print(step, flush=True)


if __name__ == "__main__":
  main(Path(sys.argv[1]))
