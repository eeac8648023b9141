"""What packed rows save: the update and its scores, with responses of very unequal lengths.

Rows of one response each, and packed ones of two lengths, side by side: the share of their tokens
that is padding, and seconds of the CPU (all cores) of an update and of the log-probs before it. The
same responses, the same loss and gradient (checked). Lengths are spread evenly in their logarithm,
from 8 to 384 tokens, after prompts of 8; the model has 4 layers, 128 wide, and 512 ids. Candidates
take their turn round after round; the first round, which compiles, is not counted.

Time: two minutes of CPU.
Command: python -m benchmarks.packing [--rounds 5]
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxrl_lm as rl
from jaxrl_lm.lm import micro_batches, optimizers, packing, policy, scoring, updates
from jaxrl_lm.lm.micro_batches import Batch
from jaxrl_lm.lm.train_state import init_state
from jaxrl_lm.lm.update_config import UpdateConfig

MODEL = policy.PolicyConfig(512, 128, 344, 4, 4, 4, 32, max_length=512, tied=True)
ROWS, PROMPT, SHORTEST, LONGEST = 64, 8, 8, 384
LENGTHS: dict[str, int | None] = {"a response each": None, "packed, 400": 400, "packed, 800": 800}
AGREES = 1e-4  # relative to the largest number, float32


def responses() -> Batch:
  """Random tokens; old log-probs near those of a policy that is almost uniform."""
  random = np.random.default_rng(0)
  lengths = np.exp(random.uniform(np.log(SHORTEST), np.log(LONGEST), ROWS)).astype(int)
  lengths[0] = LONGEST
  mask = np.arange(LONGEST)[None] < lengths[:, None]
  old = random.normal(-np.log(MODEL.vocab_size), 0.1, mask.shape)
  batch = Batch(
    prompts=random.integers(0, MODEL.vocab_size, (ROWS, PROMPT)),
    prompt_mask=np.ones((ROWS, PROMPT), np.bool_),
    tokens=random.integers(0, MODEL.vocab_size, mask.shape),
    mask=mask,
    advantages=random.normal(size=(ROWS, 1)).astype(np.float32),
    loss_weights=np.asarray(rl.GRPO.loss_weights(jnp.asarray(mask))),
    old_logprobs=old.astype(np.float32),
  )
  return jax.tree.map(jnp.asarray, batch)


def candidates() -> dict[str, Batch]:
  """The batch in rows of each kind, with the number of rows that the loop would give it."""
  batch, found = responses(), {}
  for name, length in LENGTHS.items():
    found[name] = batch
    if length is not None:
      packed = packing.pack_rows(batch, length)
      rows = packing.few_shapes(len(packed.tokens), 1)
      found[name] = jax.tree.map(jnp.asarray, micro_batches.pad_rows(packed, rows))
  return found


def padding(batch: Batch) -> float:
  """Share of the tokens that are computed and are none."""
  if batch.segment_ids is not None:
    return float(jnp.mean(batch.segment_ids == 0))
  return float(1 - jnp.mean(jnp.concatenate([batch.prompt_mask, batch.mask], axis=1)))


@partial(jax.jit, static_argnums=0)
def scores(model: Any, params: Any, batch: Batch) -> jax.Array:
  """Log-probs alone, as they are made before the update."""
  rows = (batch.prompts, batch.prompt_mask, batch.tokens, batch.mask)
  return scoring.response_scores(model, params, *rows, segment_ids=batch.segment_ids).logprobs


def seconds(function: Any, *arguments: Any) -> tuple[float, float]:
  """Wall and CPU."""
  begin = time.perf_counter(), time.process_time()
  jax.block_until_ready(function(*arguments))
  return time.perf_counter() - begin[0], time.process_time() - begin[1]


def main(rounds: int) -> int:
  console = Console()
  model, params = policy.init(MODEL, jax.random.key(0))
  config = UpdateConfig(rl.GRPO, optimizers.optimizer(1e-3))
  update, state = updates.compile_update(model, config), init_state(config, params)
  batches = candidates()
  taken: dict[str, Any] = {name: [] for name in batches}
  for number in range(rounds + 1):
    for name, batch in batches.items():
      both = seconds(scores, model, params, batch), seconds(update, state, batch)
      if number:
        taken[name].append(both)
  shown = Table(title=f"{ROWS} responses of {SHORTEST} to {LONGEST} tokens: seconds of CPU, wall")
  for column in ("", "rows", "padding", "log-probs", "update", "times"):
    shown.add_column(column, justify="right", no_wrap=True)
  medians = {name: np.median(x, axis=0) for name, x in taken.items()}
  plain, wanted, wrong = medians["a response each"], None, 0
  for name, batch in batches.items():
    _, metrics = update(state, batch)
    found = np.array([metrics.loss.mean(), metrics.grad_norm.mean(), metrics.entropy.mean()])
    wanted = found if wanted is None else wanted
    wrong += not np.allclose(found, wanted, rtol=AGREES, atol=AGREES * np.abs(wanted).max())
    cells = [f"{cpu:.3f}, {wall:.3f}" for wall, cpu in medians[name]]
    times = plain[:, 1].sum() / medians[name][:, 1].sum()
    rows = " x ".join(map(str, batch.tokens.shape))
    shown.add_row(name, rows, f"{padding(batch):.0%}", *cells, f"{times:.2f}")
  console.print(shown)
  if wrong:
    console.print("the losses or gradients do not agree")
  return wrong


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=5)
  raise SystemExit(main(parser.parse_args().rounds))
