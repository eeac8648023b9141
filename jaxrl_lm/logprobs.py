"""Logits and tokens -> token log-probs and entropy; the only place that shifts tokens.

A language model is a policy: log pi(y | x) is the masked sum of its token log-probs. Whether a
loss uses that sum or the mean per token are two functions here, `sequence_logprob` and
`mean_logprob`, because the choice is a design decision with measurable consequences.

The vocabulary may be sharded: tokens are selected by comparing ids, not by a gather. A
vocabulary padded to a round size must be cut (`logits[..., :V]`) or set to -inf beforehand.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, masks


def token_logprobs(
  logits: jax.Array,
  tokens: jax.Array,
  *,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
) -> jax.Array:
  r"""Log-prob of each token under the logits at the same index.

  log pi(y_t | s_t) = z_t[y_t] - log sum_v exp(z_t[v]),  z = logits / temperature

  The temperature divides the logits, so that scoring at the sampler's temperature gives the
  log-prob of the distribution it drew from (dividing log-probs would not renormalise).
  Computed in float32 at least, and never above 0.

  Args:
    logits: [..., T, V], already aligned: index t holds the distribution of token t (for the
      raw output of a causal model use `next_token_logprobs`). Differentiated.
    tokens: [..., T] int ids in [0, V); at a counted position an id outside gives NaN.
    mask: [..., T] bool, True = counts; elsewhere the log-prob is 0. None = all count.
    temperature: the sampler's temperature, > 0.

  Returns:
    [..., T] log-probs in nats, <= 0; -inf for a token whose logit is -inf.

  Raises:
    ValueError: shapes do not match, or temperature <= 0.
    TypeError: tokens are not integers, or the mask is not boolean.

  Example:
    >>> token_logprobs(jnp.array([[2.0, 1.0, 0.0]]), jnp.array([0]), temperature=0.5).round(5)
    Array([-0.14293], dtype=float32)
  """
  tokens = checks.check_integer("tokens", tokens)
  # At least 32 bits: an id of the vocabulary must not wrap around in the tokens' own dtype.
  tokens = tokens.astype(jnp.promote_types(tokens.dtype, jnp.int32))
  logits = checks.scaled_logits(logits, mask, temperature)
  checks.check_same_shape(**checks.token_shape(logits), tokens=tokens)
  vocabulary = logits.shape[-1]
  known = (tokens >= 0) & (tokens < vocabulary)
  ids = jnp.arange(vocabulary, dtype=tokens.dtype).reshape((1,) * tokens.ndim + (-1,))
  shifted = _shifted(logits)
  selected = jnp.sum(jnp.where(ids == tokens[..., None], shifted, 0.0), axis=-1)
  logprobs = selected - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
  return masks.zero_masked(jnp.where(known, logprobs, jnp.nan), mask)


def next_token_logprobs(
  logits: jax.Array,
  tokens: jax.Array,
  *,
  mask: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  temperature: Any = 1.0,
) -> jax.Array:
  r"""Log-prob of each token of a full sequence, from the raw output of a causal model.

  out[t] = log softmax(logits[t-1] / temperature)[tokens[t]]

  Index t of the result speaks of token t, as everywhere in this library: apply the mask of
  the response tokens as it is, without shifting it. The first token of a row, and of each
  segment of a packed row, has no state that predicts it and scores 0.

  Args:
    logits: [..., T, V]; index t predicts token t + 1. Differentiated.
    tokens: [..., T] int ids of prompt and response.
    mask: [..., T] bool over tokens, True = score this token; elsewhere 0. None = all.
    segment_ids: [..., T] int, one id per sample, contiguous, 0 = padding (not turn or step
      ids, whose first tokens would score 0); None = one sequence a row.
    temperature: the sampler's temperature, > 0.

  Returns:
    [..., T] log-probs in nats, aligned with tokens.

  Raises:
    ValueError: shapes do not match, or temperature <= 0.
    TypeError: tokens or segment_ids are not integers, or the mask is not boolean.

  Example:
    >>> logits = jnp.log(jnp.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]]))
    >>> next_token_logprobs(logits, jnp.array([0, 2, 1])).round(4)
    Array([ 0.    , -2.3026, -0.5108], dtype=float32)
  """
  tokens = checks.check_integer("tokens", tokens)
  checks.check_rank("tokens", tokens, 1)
  scored = jnp.ones_like(tokens, dtype=jnp.bool_) if mask is None else mask
  scored = checks.check_mask(scored, tokens=tokens)
  if segment_ids is not None:
    segment_ids = checks.check_integer("segment_ids", segment_ids)
    checks.check_same_shape(tokens=tokens, segment_ids=segment_ids)
    same = segment_ids == jnp.roll(segment_ids, 1, axis=-1)
    scored = scored & same & (segment_ids != 0)
  first = jnp.cumsum(jnp.ones_like(tokens, dtype=jnp.int32), axis=-1) == 1
  scored = scored & ~first
  # Score token t + 1 at index t, where its logits are, then move the result to index t + 1:
  # slicing the logits instead would copy them.
  shifted = token_logprobs(
    logits,
    jnp.roll(tokens, -1, axis=-1),
    mask=jnp.roll(scored, -1, axis=-1),
    temperature=temperature,
  )
  return masks.zero_masked(jnp.roll(shifted, 1, axis=-1), scored)


def token_entropy(
  logits: jax.Array, *, mask: jax.Array | None = None, temperature: Any = 1.0
) -> jax.Array:
  r"""Entropy of the next-token distribution at each index.

  H_t = - sum_v p_t[v] log p_t[v],  p = softmax(logits / temperature)

  A logit of -inf (a token the policy excludes) adds 0, in value and gradient.

  Args:
    logits: [..., T, V]. Differentiated.
    mask: [..., T] bool, True = counts; elsewhere the entropy is 0. None = all count.
    temperature: the sampler's temperature, > 0.

  Returns:
    [..., T] entropy in nats, in [0, log V].

  Raises:
    ValueError: shapes do not match, or temperature <= 0.

  Example:
    >>> token_entropy(jnp.array([[0.0, 0.0, -jnp.inf]]))
    Array([0.6931472], dtype=float32)
  """
  shifted = _shifted(checks.scaled_logits(logits, mask, temperature))
  weights = jnp.exp(shifted)
  total = jnp.sum(weights, axis=-1)
  finite = jnp.where(jnp.isneginf(shifted), 0.0, shifted)
  entropy = jnp.log(total) - jnp.sum(weights * finite, axis=-1) / total
  return masks.zero_masked(entropy, mask)


def sequence_logprob(logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""log pi(y | x): the sum of the log-probs of the counted tokens.

  Args:
    logprobs: [..., T] in nats. Differentiated.
    mask: [..., T] bool, True = counts.

  Returns:
    [...] log-prob of each sequence in nats; 0 for an empty one.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> sequence_logprob(jnp.array([-1.0, -1.0, -4.0]), jnp.array([True, True, True]))
    Array(-6., dtype=float32)
  """
  logprobs = checks.as_float("logprobs", logprobs)
  mask = checks.check_mask(mask, logprobs=logprobs)
  return masks.masked_sum(logprobs, mask, axis=-1)


def mean_logprob(logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""(1 / |y|) log pi(y | x): the log-prob per counted token.

  It is not the log-prob of anything: it ranks responses of different length differently from
  `sequence_logprob`, and its gradient is the score divided by the length.

  Args:
    logprobs: [..., T] in nats. Differentiated.
    mask: [..., T] bool, True = counts; numerator and count use the same mask.

  Returns:
    [...] nats per token; 0 for an empty sequence.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> mean_logprob(jnp.array([-1.0, -1.0, -4.0]), jnp.array([True, True, True]))
    Array(-2., dtype=float32)
  """
  logprobs = checks.as_float("logprobs", logprobs)
  mask = checks.check_mask(mask, logprobs=logprobs)
  return masks.masked_mean(logprobs, mask, axis=-1)


def _shifted(logits: jax.Array) -> jax.Array:
  """Logits minus their maximum: exp cannot overflow, and no digits are lost to a large offset."""
  return logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
