"""Token rewards -> returns and advantages: shaping, discounting, GAE.

Everything returned is a constant (stop_gradient). What stands at masked positions of rewards and
values is never read. The recursions over time skip masked positions: the next state of a token
is the next counted token of its segment, at no extra discount, so tool output inside a row costs
nothing. For missing stop tokens shape the score first, for example
`jnp.where(is_finished(tokens, stop_tokens=eos, within=response), score, score - penalty)`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, masks


def discounted_returns(
  rewards: jax.Array,
  mask: jax.Array,
  *,
  discount: float | jax.Array = 1.0,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""Discounted reward-to-go of each token.

  G_t = r_t + discount * G_{t'},  t' the next counted token of the segment (G = 0 after the last)

  Args:
    rewards: [..., T] reward of each token. Constant.
    mask: [..., T] bool, True = counts; other rewards are not read.
    discount: factor per counted token, in [0, 1]; scalar or one per row [...].
    segment_ids: [..., T] int, 0 = padding; None = a row is one segment.

  Returns:
    [..., T] returns, constant, 0 at masked positions.

  Raises:
    TypeError: the mask is not boolean, segment_ids are not integers.
    ValueError: shapes differ, or discount is out of range.

  Example:
    >>> discounted_returns(jnp.array([0.0, 9.0, 1.0]), jnp.array([True, False, True]), discount=0.5)
    Array([0.5, 0. , 1. ], dtype=float32)

  Reference: Sutton and Barto 2018, eq. 3.8; Hu et al. 2025 (REINFORCE++), arXiv:2501.03262.
  """
  # GAE with the value 0 everywhere and lambda 1 is the same recursion, to the last bit.
  rewards = checks.as_constant("rewards", rewards)
  return gae(rewards, jnp.zeros_like(rewards), mask, discount=discount, segment_ids=segment_ids)


def gae(
  rewards: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  *,
  discount: float | jax.Array = 1.0,
  gae_lambda: float | jax.Array = 1.0,
  bootstrap_value: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""Generalised advantage estimation, per token.

  A_t = delta_t + discount * gae_lambda * A_{t'},  delta_t = r_t + discount * V_{t'} - V_t

  t' is the next counted token of the segment: masked tokens inside a row are skipped (as in verl,
  Tunix, NeMo-RL), where a plain recursion on the padded row (OpenRLHF, TRL) discounts once per
  tool token. The target of the critic is `gae(...) + values`. Not whitened: see `whiten`.

  Args:
    rewards: [..., T] reward of each token. Constant.
    values: [..., T] value of the state before each token. Constant.
    mask: [..., T] bool, True = counts; other rewards and values are not read.
    discount: factor per counted token, in [0, 1]; scalar or one per row [...].
    gae_lambda: in [0, 1]: 1 = returns minus values, 0 = one step; scalar or per row [...].
    bootstrap_value: value of the state after the last token, for sequences that were cut off:
      [...] one per row; with segment_ids [..., T], read at the last counted token of each
      segment. None = 0: every sequence has ended.
    segment_ids: [..., T] int, 0 = padding; None = a row is one segment.

  Returns:
    [..., T] advantages, constant, 0 at masked positions.

  Raises:
    TypeError: the mask is not boolean, segment_ids are not integers.
    ValueError: shapes differ, or discount or gae_lambda is out of range.

  Example:
    >>> rewards, values = jnp.array([0.0, 1.0, 0.0]), jnp.array([0.1, 0.2, 7.0])
    >>> gae(rewards, values, jnp.array([True, True, False]), gae_lambda=0.95)
    Array([0.86, 0.8 , 0.  ], dtype=float32)

  Reference: Schulman et al. 2016, arXiv:1506.02438, eq. 10 and 16.
  """
  rewards, values = checks.as_constant("rewards", rewards), checks.as_constant("values", values)
  checks.check_same_shape(rewards=rewards, values=values)
  mask = checks.check_mask(mask, rewards=rewards)
  dtype = jnp.promote_types(rewards.dtype, values.dtype)
  tokens = {
    "reward": masks.zero_masked(rewards, mask).astype(dtype),
    "value": masks.zero_masked(values, mask).astype(dtype),
    "end_value": _end_values(bootstrap_value, mask, segment_ids).astype(dtype),
    "counts": mask,
    "last": masks.last_token_mask(mask, segment_ids=segment_ids),
  }
  discount = _per_row("discount", discount, mask, dtype)
  decay = discount * _per_row("gae_lambda", gae_lambda, mask, dtype)
  ids = () if segment_ids is None else (checks.check_integer("segment_ids", segment_ids),)
  return checks.by_row(_gae_of_row, tokens, discount, decay, *ids)


def _gae_of_row(
  tokens: dict[str, jax.Array],
  discount: jax.Array,
  decay: jax.Array,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  """GAE of one row [T]; the tokens of a segment are brought together first, in their order."""
  position = jnp.arange(tokens["counts"].shape[0], dtype=jnp.int32)
  if segment_ids is not None:
    order = jax.lax.sort((segment_ids, position), num_keys=1, is_stable=True)[1]
    tokens = {name: x[order] for name, x in tokens.items()}

  def step(
    after: tuple[jax.Array, jax.Array], token: dict[str, jax.Array]
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    next_value = jnp.where(token["last"], token["end_value"], after[0])
    next_advantage = jnp.where(token["last"], 0, after[1])
    delta = token["reward"] + discount * next_value - token["value"]
    advantage = delta + decay * next_advantage
    here = (token["value"], advantage)
    carry = jax.tree.map(lambda new, old: jnp.where(token["counts"], new, old), here, after)
    return carry, jnp.where(token["counts"], advantage, 0)

  # From the inputs, not from constants: under shard_map the carry must vary as they do.
  total = jnp.sum(tokens["reward"] + tokens["value"] + tokens["end_value"])
  zero = jnp.zeros_like(discount * total)
  advantages = jax.lax.scan(step, (zero, zero), tokens, reverse=True)[1]
  if segment_ids is not None:
    advantages = jax.lax.sort((order, advantages), num_keys=1)[1]
  return advantages


def _end_values(
  bootstrap_value: jax.Array | None, mask: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
  """The value after the last token of each segment, [..., T], 0 elsewhere."""
  if bootstrap_value is None:
    return jnp.zeros_like(mask, dtype=jnp.float32)
  value = checks.as_constant("bootstrap_value", bootstrap_value)
  if segment_ids is None:
    checks.check_same_shape(**checks.row_shape(mask), bootstrap_value=value)
    value = jnp.broadcast_to(value[..., None], mask.shape)
  else:
    checks.check_same_shape(mask=mask, bootstrap_value=value)
  return masks.zero_masked(value, masks.last_token_mask(mask, segment_ids=segment_ids))


def _per_row(name: str, value: float | jax.Array, mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """A factor in [0, 1], one per row."""
  checks.check_entries(name, value, low=0, high=1)
  factor = checks.as_constant(name, value).astype(dtype)
  if factor.ndim:
    checks.check_same_shape(**checks.row_shape(mask), **{name: factor})
  # Added to zeros rather than broadcast: it is then sharded as the rows are.
  return jnp.zeros_like(masks.lengths(mask), dtype=dtype) + factor


def length_adaptive_lambda(mask: jax.Array, *, alpha: float | jax.Array) -> jax.Array:
  r"""GAE lambda that grows with the length of the response.

  lambda = 1 - 1 / max(alpha |y|, 1)

  The end of a response then weighs the same at its start whatever the length: lambda^|y| tends to
  exp(-1 / alpha). For packed rows compute it before packing.

  Args:
    mask: [..., T] bool, True = counts.
    alpha: positive; VAPO uses 0.05.

  Returns:
    [...] in [0, 1), as `gae` takes it; 0 up to length 1 / alpha.

  Raises:
    TypeError: the mask is not boolean.
    ValueError: alpha is not positive.

  Example:
    >>> length_adaptive_lambda(jnp.ones((1, 40), bool), alpha=0.05)
    Array([0.5], dtype=float32)

  Reference: Yue et al. 2025 (VAPO), arXiv:2504.05118, eq. 5.
  """
  checks.check_range("alpha", alpha, low=0, open_low=True)
  lengths = checks.as_constant("lengths", masks.lengths(mask))
  alpha = checks.as_constant("alpha", alpha).astype(lengths.dtype)
  return 1 - 1 / jnp.maximum(alpha * lengths, 1)


def terminal_rewards(scores: jax.Array, mask: jax.Array) -> jax.Array:
  """The score of a sequence as the reward of its last counted token.

  A row without a token has nowhere to put its score.

  Args:
    scores: [...] one per sequence. Constant.
    mask: [..., T] bool, True = counts.

  Returns:
    [..., T] token rewards, constant.

  Raises:
    TypeError: the mask is not boolean.
    ValueError: scores do not have the shape of the mask without its last axis.

  Example:
    >>> terminal_rewards(jnp.array([2.0]), jnp.array([[True, True, False]]))
    Array([[0., 2., 0.]], dtype=float32)

  Reference: Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, section 3.5.
  """
  scores = checks.as_constant("scores", scores)
  mask = checks.check_mask(mask)
  checks.check_same_shape(**checks.row_shape(mask), scores=scores)
  return jnp.where(masks.last_token_mask(mask), scores[..., None], 0)


def kl_shaped_rewards(
  rewards: jax.Array, kl: jax.Array, mask: jax.Array, *, kl_coef: float | jax.Array
) -> jax.Array:
  r"""Token rewards less a KL penalty towards the reference policy.

  r_t - kl_coef * kl_t

  Through `discounted_returns` the penalty is cumulated (verl, OpenRLHF, slime); subtract it from
  finished advantages for the immediate one (NeMo-RL's REINFORCE++).

  Args:
    rewards: [..., T] (`terminal_rewards`). Constant.
    kl: [..., T] estimate of KL(pi || ref) per token, e.g. `kl_k1` of the sampled tokens, positive
      where the policy is above the reference. Constant.
    mask: [..., T] bool, True = counts.
    kl_coef: beta >= 0, reward per nat.

  Returns:
    [..., T] token rewards, constant, 0 at masked positions.

  Raises:
    TypeError: the mask is not boolean.
    ValueError: shapes differ, or kl_coef is negative.

  Example:
    >>> kl_shaped_rewards(jnp.array([0.0]), jnp.array([1.0]), jnp.array([True]), kl_coef=0.1)
    Array([-0.1], dtype=float32)

  Reference: Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, eq. 2.
  """
  rewards, kl = checks.as_constant("rewards", rewards), checks.as_constant("kl", kl)
  checks.check_same_shape(rewards=rewards, kl=kl)
  mask = checks.check_mask(mask, rewards=rewards)
  checks.check_range("kl_coef", kl_coef, low=0)
  kl_coef = checks.as_constant("kl_coef", kl_coef).astype(kl.dtype)
  return masks.zero_masked(rewards, mask) - kl_coef * masks.zero_masked(kl, mask)


def overlong_penalty(
  lengths: jax.Array, *, max_length: int | jax.Array, buffer: int | jax.Array
) -> jax.Array:
  r"""Soft punishment of responses that come close to the length limit.

  0 up to max_length - buffer, then linear in |y| down to -1 at max_length, and -1 beyond

  verl, NeMo-RL, AReaL and Tunix have no floor at -1 (the same where |y| <= max_length).

  Args:
    lengths: [...] tokens of each response (`masks.lengths`). Constant.
    max_length: tokens at which the penalty is full.
    buffer: tokens over which it grows, 0 < buffer < max_length.

  Returns:
    [...] penalty in [-1, 0], constant, to be added to the reward.

  Raises:
    ValueError: buffer is not positive, or max_length does not exceed it.

  Example:
    >>> overlong_penalty(jnp.array([10, 18, 20, 25]), max_length=20, buffer=4)
    Array([ 0. , -0.5, -1. , -1. ], dtype=float32)

  Reference: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
  """
  checks.check_same_shape(scalar=0.0, max_length=max_length, buffer=buffer)
  checks.check_range("buffer", buffer, low=0, open_low=True)
  if not isinstance(buffer, jax.core.Tracer):
    checks.check_range("max_length", max_length, low=float(buffer), open_low=True)
  lengths = checks.as_constant("lengths", lengths)
  limit = checks.as_constant("max_length", max_length).astype(lengths.dtype)
  width = checks.as_constant("buffer", buffer).astype(lengths.dtype)
  return jnp.clip((limit - width - lengths) / width, -1, 0)
