"""Mask -> per-token loss weights: all length normalisation of losses lives here, only here.

loss = -sum(loss_weights * gain), so a reduction is an array one can look at. It is computed
once on the whole update batch and then cut, packed or sharded like the tokens: parts sum to
the whole, exactly, because nothing is divided by a part's own count. Five lines of
micro-batching (gradients are summed over the parts in the same way, not averaged):

  >>> mask = jnp.arange(4)[None] < jnp.array([[4], [1], [2]])
  >>> gain = jnp.arange(12.0).reshape(3, 4)
  >>> weights = token_mean(mask)  # of the whole update batch
  >>> parts = [-jnp.sum(weights[rows] * gain[rows]) for rows in (slice(0, 1), slice(1, 3))]
  >>> bool(jnp.isclose(sum(parts), -jnp.sum(weights * gain)))
  True

Functions here couple all rows through their counts: under shard_map pass the global mask.
A row is one sequence; weights are computed unpacked, then packed like tokens. Two more
decisions are visible: whether rows without a token are counted (`count_empty`), and, where
a length is divided by, which (`constant_length` requires it: a padded width is never used).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks


def token_mean(mask: jax.Array) -> jax.Array:
  r"""Mean over all tokens of the batch: w = 1 / N, N = sum of |y_i|.

  Long responses weigh more, each token the same. N is random, so with advantages of the same
  batch the estimator is not exactly unbiased (a ratio estimator), though close.

  Args:
    mask: [..., T] bool, True = counts.

  Returns:
    [..., T] weights that sum to 1 (to 0 if nothing counts); 0 at masked positions.

  Raises:
    TypeError: the mask is not boolean.

  Example:
    >>> token_mean(jnp.array([[True, True, True], [True, False, False]]))
    Array([[0.25, 0.25, 0.25],
           [0.25, 0.  , 0.  ]], dtype=float32)

  Reference: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 12, pooled over the batch.
  """
  mask = checks.check_mask(mask)
  return _weights(mask, jnp.sum(mask, dtype=jnp.int32))


def sequence_mean(mask: jax.Array, *, count_empty: bool = False) -> jax.Array:
  r"""Mean over tokens of each sequence, then over sequences: w_i = 1 / (B |y_i|).

  GRPO's reduction. It divides the score of a sequence by its length, which makes the expected
  update point elsewhere than the policy gradient: long wrong answers are punished less.

  Args:
    mask: [..., T] bool, True = counts.
    count_empty: whether sequences without a token are counted in B. verl, OpenRLHF and Tunix
      leave them out (False), TRL and Liger count them.

  Returns:
    [..., T] weights that sum to 1 over non-empty sequences; 0 at masked positions.

  Raises:
    TypeError: the mask is not boolean.

  Example:
    >>> sequence_mean(jnp.array([[True, True], [True, False]]))
    Array([[0.25, 0.25],
           [0.5 , 0.  ]], dtype=float32)

  Reference: Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 3.
  """
  return length_power(mask, alpha=1, count_empty=count_empty)


def sequence_sum(mask: jax.Array, *, count_empty: bool = False) -> jax.Array:
  r"""Sum over tokens of each sequence, then mean over sequences: w = 1 / B.

  The reduction of the policy gradient itself: the score of a sequence is the sum of its
  token scores.

  Args:
    mask: [..., T] bool, True = counts.
    count_empty: whether sequences without a token are counted in B.

  Returns:
    [..., T] weights; 0 at masked positions.

  Raises:
    TypeError: the mask is not boolean.

  Example:
    >>> sequence_sum(jnp.array([[True, True], [True, False]]))
    Array([[0.5, 0.5],
           [0.5, 0. ]], dtype=float32)

  Reference: Williams 1992, "Simple statistical gradient-following algorithms", theorem 1.
  """
  return length_power(mask, alpha=0, count_empty=count_empty)


def token_sum(mask: jax.Array) -> jax.Array:
  r"""Plain sum over all tokens: w = 1 at every counted token.

  Args:
    mask: [..., T] bool, True = counts.

  Returns:
    [..., T] ones; 0 at masked positions.

  Raises:
    TypeError: the mask is not boolean.

  Example:
    >>> token_sum(jnp.array([True, False]))
    Array([1., 0.], dtype=float32)
  """
  return checks.check_mask(mask).astype(jnp.result_type(float))


def constant_length(mask: jax.Array, *, length: Any, count_empty: bool = False) -> jax.Array:
  r"""Sum over tokens divided by one constant length, then mean over sequences: w = 1 / (B L).

  Dr. GRPO's reduction: `sequence_sum` scaled by 1 / L, so the direction of the policy gradient
  is kept. L is a constant of the run (the longest response allowed), never the width this
  batch happens to be padded to, so that the scale does not change from batch to batch.

  Args:
    mask: [..., T] bool, True = counts.
    length: L, tokens, > 0.
    count_empty: whether sequences without a token are counted in B.

  Returns:
    [..., T] weights; 0 at masked positions.

  Raises:
    TypeError: the mask is not boolean, or length is None.
    ValueError: length <= 0.

  Example:
    >>> constant_length(jnp.array([[True, True], [True, False]]), length=4)
    Array([[0.125, 0.125],
           [0.125, 0.   ]], dtype=float32)

  Reference: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2.
  """
  checks.check_range("length", length, low=0.0, open_low=True)
  return sequence_sum(mask, count_empty=count_empty) / length


def group_token_mean(mask: jax.Array, *, count_empty: bool = False) -> jax.Array:
  r"""Mean over the tokens of each group, then over groups: w = 1 / (P N_p).

  DAPO's formula as printed, which is for one prompt; the codes pool the batch (`token_mean`).
  The two differ when groups differ in total length.

  Args:
    mask: [..., G, T] bool, True = counts; the samples of a group are axis -2.
    count_empty: whether groups without a token are counted in P.

  Returns:
    [..., G, T] weights that sum to 1 over non-empty groups; 0 at masked positions.

  Raises:
    TypeError: the mask is not boolean.
    ValueError: the mask has no group axis.

  Example:
    >>> group_token_mean(jnp.array([[[True, True]], [[True, False]]]))
    Array([[[0.25, 0.25]],
    <BLANKLINE>
           [[0.5 , 0.  ]]], dtype=float32)

  Reference: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 8.
  """
  mask = checks.check_mask(mask)
  checks.check_rank("mask", mask, 2)
  tokens = jnp.sum(mask, axis=(-2, -1), keepdims=True, dtype=jnp.int32)
  return _weights(mask, tokens) / _how_many(tokens > 0, count_empty)


def length_power(mask: jax.Array, *, alpha: Any, count_empty: bool = False) -> jax.Array:
  r"""Sum over tokens divided by a power of the length: w_i = 1 / (B |y_i|^alpha).

  Interpolates between `sequence_sum` (alpha = 0) and `sequence_mean` (alpha = 1).

  Args:
    mask: [..., T] bool, True = counts.
    alpha: power of the length; may be traced.
    count_empty: whether sequences without a token are counted in B.

  Returns:
    [..., T] weights; 0 at masked positions.

  Raises:
    TypeError: the mask is not boolean, or alpha is None.

  Example:
    >>> length_power(jnp.array([[True, True, True, True]]), alpha=0.5)
    Array([[0.5, 0.5, 0.5, 0.5]], dtype=float32)
  """
  checks.check_range("alpha", alpha)
  mask = checks.check_mask(mask)
  tokens = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)
  length = jnp.maximum(tokens, 1).astype(jnp.result_type(float))
  return _weights(mask, length**alpha) / _how_many(tokens > 0, count_empty)


def _weights(mask: jax.Array, divisor: jax.Array) -> jax.Array:
  """1 / divisor at counted tokens, with a divisor of 0 (nothing counts) read as 1."""
  divisor = jnp.where(divisor == 0, 1, divisor).astype(jnp.result_type(float))
  return jnp.where(mask, 1.0 / divisor, 0.0)


def _how_many(counted: jax.Array, count_empty: bool) -> jax.Array:
  """Number of sequences or groups to average over, at least 1."""
  number = counted.size if count_empty else jnp.sum(counted, dtype=jnp.int32)
  return jnp.maximum(number, 1).astype(jnp.result_type(float))
