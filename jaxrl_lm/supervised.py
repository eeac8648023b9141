"""Losses of given tokens, per token, unreduced: what they are divided by is `loss_weights`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, masks


def sft_loss(logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""Negative log-prob of each token of given data: supervised fine-tuning, cross-entropy.

  loss_t = -log pi(y_t)

  Args:
    logprobs: [..., T] nats. Differentiated.
    mask: [..., T] bool, True = counts; elsewhere the loss is 0.

  Returns:
    [..., T] loss in nats, to be minimised.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> logprobs, mask = jnp.array([-1.0, -3.0, jnp.nan]), jnp.array([True, True, False])
    >>> sft_loss(logprobs, mask)
    Array([1., 3., 0.], dtype=float32)

  Reference: Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, section 3.5.
  """
  logprobs = checks.as_float("logprobs", logprobs)
  return masks.zero_masked(-logprobs, checks.check_mask(mask, logprobs=logprobs))


def dft_loss(logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""Supervised loss weighted by the token's own probability, per token.

  loss_t = -sg(pi(y_t)) log pi(y_t),  gradient -grad pi(y_t)

  The gradient is that of -pi: tokens the policy finds unlikely, on which that of the log-prob is
  largest, are left alone. Bounded: at most 1/e.

  Args:
    logprobs: [..., T] nats. Differentiated, but not in the weight.
    mask: [..., T] bool, True = counts; elsewhere the loss is 0.

  Returns:
    [..., T] loss, to be minimised.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> dft_loss(jnp.log(jnp.array([0.5])), jnp.array([True])).round(4)
    Array([0.3466], dtype=float32)

  Reference: Wu et al. 2025 (DFT), arXiv:2508.05629, section 3 (the token-level loss).
  """
  logprobs = checks.as_float("logprobs", logprobs)
  logprobs = masks.zero_masked(logprobs, checks.check_mask(mask, logprobs=logprobs))
  possible = ~jnp.isneginf(logprobs)
  weight = jax.lax.stop_gradient(jnp.exp(logprobs))
  return -weight * jnp.where(possible, logprobs, 0.0)


def positive_nll_loss(logprobs: jax.Array, rewards: jax.Array, mask: jax.Array) -> jax.Array:
  r"""Negative log-prob of the tokens of rewarded samples, per token; 0 on all others.

  loss_t = -log pi(y_t) 1[reward > 0]

  VAPO adds mu (0.1) times its mean over the tokens of all correct samples of the batch. That mean
  is an array of loss weights, made once on the whole batch: `token_mean(mask & (rewards >
  0)[..., None])`. NeMo-RL divides by the number in each micro-batch instead.

  Args:
    logprobs: [..., T] nats. Differentiated.
    rewards: [...], one per sample. Constant.
    mask: [..., T] bool, True = counts; elsewhere the loss is 0.

  Returns:
    [..., T] loss in nats, to be minimised.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> logprobs, mask = jnp.array([[-1.0, -3.0], [-2.0, -2.0]]), jnp.ones((2, 2), bool)
    >>> positive_nll_loss(logprobs, jnp.array([1.0, 0.0]), mask)
    Array([[1., 3.],
           [0., 0.]], dtype=float32)

  Reference: Yue et al. 2025 (VAPO), arXiv:2504.05118, "positive example LM loss".
  """
  mask = checks.check_mask(mask)
  rewards = checks.as_constant("rewards", rewards)
  checks.check_same_shape(**checks.row_shape(mask), rewards=rewards)
  logprobs = checks.as_float("logprobs", logprobs)
  checks.check_same_shape(mask=mask, logprobs=logprobs)
  return sft_loss(logprobs, mask & (rewards > 0)[..., None])
