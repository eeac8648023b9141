"""Losses of reward models that learn from preference pairs, per pair."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_lm import pairs


def bradley_terry_loss(
  chosen_rewards: jax.Array, rejected_rewards: jax.Array, *, margin: jax.Array | None = None
) -> jax.Array:
  r"""Negative log-likelihood of a preference under the Bradley-Terry model, per pair.

  loss = -log sig(r_chosen - r_rejected - margin)

  Linear, not inf, for a gap of 1e3 on the wrong side.

  Args:
    chosen_rewards, rejected_rewards: [B] rewards of the two responses. Differentiated.
    margin: [B] by how much chosen should be ahead (larger for a clearer preference). Constant.
      None = 0.

  Returns:
    [B] loss, to be minimised.

  Raises:
    ValueError: shapes differ.

  Example:
    >>> bradley_terry_loss(jnp.array([1.0]), jnp.array([0.0]), margin=jnp.array([1.0]))
    Array([0.6931472], dtype=float32)

  Reference: Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023
    (Llama 2), arXiv:2307.09288, eq. 2.
  """
  rows = {"chosen_rewards": chosen_rewards, "rejected_rewards": rejected_rewards}
  if margin is not None:
    rows["margin"] = jax.lax.stop_gradient(margin)
  chosen, rejected, *margins = pairs.same_rows(**rows)
  return pairs.logistic_loss(chosen - rejected - (margins[0] if margins else 0.0))


def reward_centering_loss(chosen_rewards: jax.Array, rejected_rewards: jax.Array) -> jax.Array:
  r"""Penalty that centres the rewards of a pair at 0, which the preference leaves free, per pair.

  loss = (r_chosen + r_rejected)^2

  Add it with a small coefficient (TRL: 0.01).

  Args:
    chosen_rewards, rejected_rewards: [B] rewards of the two responses. Differentiated.

  Returns:
    [B] loss, >= 0, to be minimised.

  Raises:
    ValueError: shapes differ.

  Example:
    >>> reward_centering_loss(jnp.array([2.0]), jnp.array([1.0]))
    Array([9.], dtype=float32)

  Reference: Eisenstein et al. 2023, arXiv:2312.09244, section 2.
  """
  chosen, rejected = pairs.same_rows(
    chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards
  )
  return jnp.square(chosen + rejected)
