r"""Rewards per step, and samples of a group that are learnt from or not.

A step is a part of a response (a line of a proof, a turn) with a score of its own. Scores become
rewards at the last token of their step; returns and advantages follow as from any rewards.
GRPO with process supervision (arXiv:2402.03300, section 4.1.3) standardises the scores of all
steps of all samples of a prompt together, and sums those still to come:

  >>> from jaxrl_lm import discounted_returns, group_normalized
  >>> scores = jnp.array([[[1.0, 0.0], [0.0, 0.0]]])  # [P, G, S]
  >>> scored = jnp.array([[[True, True], [True, False]]])  # steps that there are
  >>> flat = [x.reshape(1, 4) for x in (scores, scored)]
  >>> scores = group_normalized(flat[0], where=flat[1], eps=0.0).reshape(scores.shape)
  >>> step_ids = jnp.array([[[1, 1, 2], [1, 1, 0]]])
  >>> rewards = step_rewards(scores, step_ids > 0, step_ids=step_ids)
  >>> discounted_returns(rewards, step_ids > 0).round(3)
  Array([[[ 0.577,  0.577, -0.577],
          [-0.577, -0.577,  0.   ]]], dtype=float32)

`best_of_n` and `rejection_sampling` weigh samples: their weights multiply loss weights of
`sft_loss`, as `weights[..., None] * token_mean(mask)`. To take the samples out of what the loss
divides by as well, make the loss weights of `mask & (weights > 0)[..., None]`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, masks
from jaxrl_lm.advantages import raw_rewards


def step_rewards(scores: jax.Array, mask: jax.Array, *, step_ids: jax.Array) -> jax.Array:
  r"""The score of each step as a reward at the last counted token of the step; 0 elsewhere.

  r_t = scores[k - 1] at the last t with step_ids_t = k

  Args:
    scores: [..., S], one per step and row; a score whose step has no counted token is ignored.
      Constant.
    mask: [..., T] bool, True = counts.
    step_ids: [..., T] int, 1 to S; 0 = belongs to no step. In a packed row the steps of all its
      samples are numbered through. At a counted token an id outside [0, S] makes the
      reward at the end of that step NaN.

  Returns:
    [..., T] rewards.

  Raises:
    ValueError: shapes do not match.
    TypeError: the mask is not boolean, or step_ids are not integers.

  Example:
    >>> scores, step_ids = jnp.array([0.5, 1.0]), jnp.array([1, 1, 2, 2])
    >>> step_rewards(scores, jnp.ones(4, bool), step_ids=step_ids)
    Array([0. , 0.5, 0. , 1. ], dtype=float32)

  Reference: Lightman et al. 2023, arXiv:2305.20050, section 2.6; as rewards: Shao et al. 2024,
    arXiv:2402.03300, section 4.1.3.
  """
  scores, mask = checks.as_constant("scores", scores), checks.check_mask(mask)
  checks.check_rank("scores", scores, 1)
  checks.check_same_shape(
    **checks.row_shape(mask),
    **{"scores[..., 0]": jax.ShapeDtypeStruct(scores.shape[:-1], scores.dtype)},
  )
  step_ids = checks.check_integer("step_ids", step_ids)
  checks.check_same_shape(mask=mask, step_ids=step_ids)
  step_ids = step_ids.astype(jnp.promote_types(step_ids.dtype, jnp.int32))
  steps = scores.shape[-1]
  ends = masks.last_token_mask(mask, segment_ids=step_ids) & (step_ids != 0)
  number = jnp.arange(1, steps + 1, dtype=step_ids.dtype).reshape((1,) * mask.ndim + (-1,))
  hit = ends[..., None] & (number == step_ids[..., None])
  rewards = jnp.sum(jnp.where(hit, scores[..., None, :], 0.0), axis=-1)
  known = (step_ids >= 0) & (step_ids <= steps)
  return jnp.where(ends & ~known, jnp.nan, rewards)


def best_of_n(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
  r"""Weight 1 for the best sample of each group, shared equally among ties; 0 for the others.

  w_i = 1[r_i = max r] / number of such samples

  Imitating the best of n. Groups where all are equally bad are imitated too: `has_signal`, or
  `rejection_sampling`, tells them apart.

  Args:
    rewards: [..., G]. Constant.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G] weights that sum to 1 in each group, to 0 where no sample counts. A NaN that is not
    excluded makes its whole group NaN.

  Raises:
    ValueError: shapes differ.
    TypeError: `where` is not boolean.

  Example:
    >>> best_of_n(jnp.array([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0]]))
    Array([[0. , 1. , 0. ],
           [0.5, 0.5, 0. ]], dtype=float32)

  Reference: Dong et al. 2023 (RAFT), arXiv:2304.06767, algorithm 1.
  """
  rewards, valid = _valid(rewards, where)
  best = jnp.max(jnp.where(valid, rewards, -jnp.inf), axis=-1, keepdims=True)
  tied = valid & (rewards == best)
  count = jnp.sum(tied, axis=-1, keepdims=True, dtype=jnp.int32)
  weights = tied.astype(rewards.dtype) / jnp.maximum(count, 1).astype(rewards.dtype)
  return jnp.where(valid & jnp.isnan(best), jnp.nan, weights)


def rejection_sampling(
  rewards: jax.Array, *, threshold: Any, where: jax.Array | None = None
) -> jax.Array:
  r"""Weight 1 for each sample that reaches the threshold, 0 for the others.

  w_i = 1[r_i >= threshold]

  Not normalised: a prompt with many accepted samples weighs more. Divided by its sum over the
  group, each solved prompt weighs the same.

  Args:
    rewards: [..., G]. Constant.
    threshold: smallest reward that is accepted.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G] weights, 0 or 1; a reward of NaN that is not excluded gives NaN.

  Raises:
    ValueError: shapes differ, or threshold is NaN (out of range).
    TypeError: `where` is not boolean.

  Example:
    >>> rejection_sampling(jnp.array([0.0, 1.0, 1.0]), threshold=1.0)
    Array([0., 1., 1.], dtype=float32)

  Reference: Yuan et al. 2023 (RFT), arXiv:2308.01825, section 3.3; Touvron et al. 2023 (Llama 2),
    arXiv:2307.09288, section 3.2.3.
  """
  checks.check_range("threshold", threshold)
  rewards, valid = _valid(rewards, where)
  weights = jnp.where(jnp.isnan(rewards), jnp.nan, (rewards >= threshold).astype(rewards.dtype))
  return jnp.where(valid, weights, 0.0)


def _valid(rewards: Any, where: Any) -> tuple[jax.Array, jax.Array]:
  """Rewards, 0 where excluded, and which samples count."""
  rewards = raw_rewards(rewards, where=where)
  valid = jnp.ones_like(rewards, dtype=jnp.bool_) if where is None else jnp.asarray(where)
  return rewards, valid
