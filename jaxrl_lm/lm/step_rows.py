"""How the rows of a step are put together for its programs: minibatches, packed rows, equal parts.

Log-probs of the old policy come from the scorer of the updates over rows of the same shape and,
where they are packed, over the very same rows: in another row a log-prob is the same to rounding
only, which in bfloat16 is more than the band of some clips (GSPO's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_lm.lm import data_order, micro_batches, packing, scoring
from jaxrl_lm.lm.micro_batches import Batch
from jaxrl_lm.lm.placement import Placement
from jaxrl_lm.lm.train_config import TrainConfig


def minibatch_rows(config: TrainConfig, step: int, epoch: int) -> Iterator[np.ndarray]:
  """The rows of each minibatch of an epoch, whole groups.

  Args:
    config: of the run.
    step: of the run.
    epoch: which pass over the rows of the step.

  Returns:
    Iterator of [N / minibatches] indices.
  """
  groups, size = config.rollout.num_prompts, config.rollout.group_size
  order = data_order.row_order(groups, seed=config.seed, step=step, epoch=epoch)
  for chosen in np.split(order, config.minibatches):
    yield (chosen[:, None] * size + np.arange(size)[None]).reshape(-1)


def taken(batch: Batch, rows: np.ndarray) -> Batch:
  """Some rows of a batch, as NumPy's arrays.

  Args:
    batch: any.
    rows: indices.

  Returns:
    The batch of these rows.
  """
  return jax.tree.map(lambda x: np.asarray(x)[rows], batch)


def filled(config: TrainConfig, part: Batch, placement: Placement) -> Batch:
  """A minibatch, packed if it is to be, of a number of rows that goes into equal parts.

  Args:
    config: of the run.
    part: rows that are not packed.
    placement: of the rows.

  Returns:
    The batch, with empty rows after its own.
  """
  multiple = config.update.micro_batches * placement.shards
  if config.packed is not None:
    part = packing.pack_rows(part, config.packed)
    multiple = packing.few_shapes(len(part.tokens), multiple)
  return micro_batches.pad_rows(part, multiple)


def scorer(
  config: TrainConfig, batch: Batch, step: int, placement: Placement
) -> Callable[[Any], Any]:
  """Scores of the whole batch, by functions of rows such as `logprobs`.

  Args:
    config: of the run.
    batch: the N rows of a step.
    step: of the run: where rows are packed, minibatches are those of its first epoch.
    placement: of the rows.

  Returns:
    Function of (a function of (rows, parts=)), which returns [N, T] of NumPy.
  """
  parts = config.update.micro_batches
  if config.packed is None:
    rows = (batch.prompts, batch.prompt_mask, batch.tokens, batch.mask)
    parts, count = config.minibatches * parts, len(batch.tokens)
    placed = _placed(rows, parts, placement)
    return lambda score: np.asarray(score((placed, {}), parts=parts))[:count]
  length, chosen = config.packed, list(minibatch_rows(config, step, epoch=0))
  minibatches = [taken(batch, rows) for rows in chosen]
  packed = [_packed_rows(filled(config, part, placement), placement) for part in minibatches]

  def scored(score: Any) -> Any:
    found = [
      packing.unpack_tokens(score(rows, parts=parts), part, length)
      for rows, part in zip(packed, minibatches, strict=True)
    ]
    return np.concatenate(found)[np.argsort(np.concatenate(chosen))]

  return scored


def _packed_rows(batch: Batch, placement: Placement) -> Any:
  """The arguments of a scorer, on the devices."""
  rows = (batch.prompts, batch.prompt_mask, batch.tokens, batch.mask)
  return jax.tree.map(placement.rows, (rows, {"segment_ids": batch.segment_ids}))


def _placed(rows: tuple[Any, ...], parts: int, placement: Placement) -> Any:
  """Rows on the devices, with copies of the last one so that they go into equal parts."""
  missing = -len(rows[0]) % (parts * placement.shards)
  whole = (np.concatenate([x, np.repeat(x[-1:], missing, axis=0)]) for x in rows)
  return tuple(map(placement.rows, whole))


@partial(jax.jit, static_argnames=("model", "score", "parts"))
def logprobs(
  model: Any, score: Any, params: Any, temperature: Any, rows: Any, *, parts: int
) -> jax.Array:
  """Log-probs of rows by a scorer, one part at a time.

  Args:
    model, score, params, temperature: the policy, what scores it, and at what temperature.
    rows: positional and keyword arguments of the scorer.
    parts: number of parts; it divides the rows.

  Returns:
    [R, T] nats.
  """

  def one(part: Any) -> jax.Array:
    positional, packed = part
    return score(model, params, *positional, temperature=temperature, **packed).logprobs

  return micro_batches.over_parts(one, rows, parts)


@partial(jax.jit, static_argnames=("model", "parts"))
def values(model: Any, params: Any, rows: Any, *, parts: int) -> jax.Array:
  """Values of rows by a critic, one part at a time.

  Args:
    model, params: the critic.
    rows, parts: as of `logprobs`.

  Returns:
    [R, T].
  """

  def one(part: Any) -> jax.Array:
    positional, packed = part
    return scoring.response_values(model, params, *positional, **packed)

  return micro_batches.over_parts(one, rows, parts)
