"""The rows of an update, in as many parts as memory asks for, with the gradient of the whole.

  loss = sum_t w_t l_t,  w of the whole batch   ->   loss and gradient are sums over the parts

Nothing is divided by the number of parts or by anything of a part, so that the cut changes neither
value nor gradient beyond rounding, whatever the lengths, with empty rows and empty parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import checks


class Batch(NamedTuple):
  """The rows of one update, [R, ...] each. All but the tokens is constant of the loss.

  A row is a prompt and its response, or, in the batch of `pack_rows`, several of them.

  Attributes:
    prompts: [R, W] int token ids.
    prompt_mask: [R, W] bool, False = padding; every row has a True.
    tokens: [R, T] int token ids of the responses.
    mask: [R, T] bool, True = a token that the policy chose and that counts; what stands elsewhere
      is not read, unless `seen` says so. Without `seen` it has no gap.
    advantages: [R, T], or [R, 1] for one value per response.
    loss_weights: [R, T] of `objective.loss_weights`, made on these R rows as a whole.
    old_logprobs: [R, T] of the policy the ratio is taken against, nats, by the scorer of the
      update, the same for every update on these rows. None = on-policy: the ratio is 1.
    sampler_logprobs: [R, T] as the sampler drew the tokens, nats; only measured. None = not.
    ref_logprobs: [R, T] of the reference policy, nats; None without one.
    importance_weights: [R, T] or [R, 1] of `corrections`; None = 1.
    old_values, returns: [R, T] of the critic when the tokens were drawn, and its targets; None
      without a critic.
    seen: [R, T] bool, True = the model sees this token, from index 0 on without a gap: those of the
      mask, and between them what it did not choose (tool outputs, other turns). None = the mask.
    segment_ids: [R, T] int of packed rows, equal where tokens are of one sequence, its prompt and
      response, 0 = padding. Prompts are then [R, 0] and `seen` is None. None = not packed.
  """

  prompts: jax.Array
  prompt_mask: jax.Array
  tokens: jax.Array
  mask: jax.Array
  advantages: jax.Array
  loss_weights: jax.Array
  old_logprobs: jax.Array | None = None
  sampler_logprobs: jax.Array | None = None
  ref_logprobs: jax.Array | None = None
  importance_weights: jax.Array | None = None
  old_values: jax.Array | None = None
  returns: jax.Array | None = None
  seen: jax.Array | None = None
  segment_ids: jax.Array | None = None


def pad_rows(batch: Batch, multiple: int) -> Batch:
  """The batch with empty rows after its own, so that their number is a multiple.

  An empty row has no token and weight 0: it changes no loss, gradient or metric.

  Args:
    batch: R rows.
    multiple: >= 1: micro-batches times the devices that rows are spread over.

  Returns:
    The batch, of the next multiple of rows.

  Raises:
    ValueError: multiple < 1.
  """
  checks.check_range("multiple", multiple, low=1)
  missing = -batch.tokens.shape[0] % multiple
  if not missing:
    return batch

  def padded(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, jnp.zeros((missing, *x.shape[1:]), x.dtype)])

  batch = jax.tree.map(padded, batch)
  if batch.segment_ids is not None:
    return batch
  # One (arbitrary) prompt token, for a model that attends to nothing has nothing to say.
  return batch._replace(prompt_mask=batch.prompt_mask.at[-missing:, 0].set(True))


def check_rows(batch: Batch, parts: int) -> None:
  """Every array has a row per response, and the rows go into equal parts.

  Args:
    batch: the batch.
    parts: number of micro-batches.

  Returns:
    None.

  Raises:
    ValueError: they do not.
  """
  checks.check_range("micro_batches", parts, low=1)
  rows = batch.tokens.shape[0]
  for name, x in batch._asdict().items():
    if x is not None and (jnp.ndim(x) != 2 or x.shape[0] != rows):
      raise ValueError(
        f"{name} must have a row for each of the {rows} rows of tokens, got shape {jnp.shape(x)}"
      )
  if not rows or rows % parts:
    raise ValueError(
      f"{rows} rows do not go into {parts} equal micro-batches: `pad_rows(batch, {parts})` adds "
      "empty rows"
    )


def over_parts(function: Callable[[Any], Any], rows: Any, parts: int) -> Any:
  """A function of rows, one part at a time.

  Args:
    function: of a part, to arrays with its rows.
    rows: pytree of [R, ...].
    parts: number of parts; it divides R.

  Returns:
    What the function returns, [R, ...].
  """
  return _join(jax.lax.map(function, _split(rows, parts)))


def summed_gradient(
  loss: Callable[[Any, Any], tuple[jax.Array, Any]], params: Any, rows: Any, parts: int
) -> tuple[jax.Array, Any, Any]:
  """Loss and gradient of all rows, added up over the parts.

  Args:
    loss: of parameters and a part of the rows, to a scalar and arrays with its rows.
    params: pytree. Differentiated.
    rows: pytree of [R, ...].
    parts: number of parts; it divides R. Memory for activations is that of one part, and there is
      one more copy of the parameters, for the sum.

  Returns:
    The loss, its gradient in float32 at least, and the arrays [R, ...].
  """

  def add(total: Any, part: Any) -> tuple[Any, Any]:
    (value, seen), gradient = jax.value_and_grad(loss, has_aux=True)(params, part)
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradient), (value, seen)

  zeros = jax.tree.map(
    lambda x: jnp.zeros_like(x, dtype=jnp.promote_types(x.dtype, jnp.float32)), params
  )
  gradient, (values, seen) = jax.lax.scan(add, zeros, _split(rows, parts))
  return jnp.sum(values), gradient, _join(seen)


def _split(rows: Any, parts: int) -> Any:
  """[R, ...] -> [K, R / K, ...]; part k has rows k, k + K, ...: some of every device's."""
  return jax.tree.map(
    lambda x: jnp.swapaxes(jnp.asarray(x).reshape(len(x) // parts, parts, *x.shape[1:]), 0, 1),
    rows,
  )


def _join(parts: Any) -> Any:
  """[K, R / K, ...] -> [R, ...]."""
  return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), parts)
