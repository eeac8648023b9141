r"""Losses of preference pairs that push each response against the reference, not only the pair.

A loss of the margin alone (`preferences`) is content when the probabilities of both responses
fall, as long as the rejected one falls faster. These ask where each log-ratio stands. With
c = beta chosen, r = beta rejected and sig the sigmoid,

  nca_loss        -log sig(c) - log sig(-c) / 2 - log sig(-r) / 2
  bco_pair_loss   -log sig(c - delta) - log sig(-(r - delta))
  sppo_loss       (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2
  apo_zero_loss   sig(-c) + sig(r)           chosen up, rejected down
  apo_down_loss   sig(c) + sig(-(c - r))     both down, rejected further

The signature is that of `preferences`:

  loss(chosen_log_ratio, rejected_log_ratio, *, beta, <constants>) -> loss

  chosen_log_ratio, rejected_log_ratio: [B] log pi / ref, nats. Differentiated. Any shape, the
    same for both; one entry is one pair.
  beta: how strongly the policy is held to the reference, > 0.

Losses are unreduced, [B], to be minimised; finite for log-ratios of any size, but for the squares
of SPPO.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import pairs


def nca_loss(
  chosen_log_ratio: jax.Array, rejected_log_ratio: jax.Array, *, beta: Any = 0.1
) -> jax.Array:
  r"""Noise contrastive alignment of a pair (NCA), per pair.

  loss = -log sig(c) - log sig(-c) / 2 - log sig(-r) / 2

  A classifier of "from the optimal policy" against "from the reference", where the reference is
  the pair itself. Chosen settles at sig(c) = 2/3, not at infinity.

  Args:
    chosen_log_ratio, rejected_log_ratio, beta: see the module.

  Returns:
    [B] loss, 2 log 2 where both log-ratios are 0.

  Raises:
    ValueError: shapes differ, or beta <= 0.

  Example:
    >>> nca_loss(jnp.array([1.0]), jnp.array([-1.0]), beta=1.0).round(4)
    Array([1.1265], dtype=float32)

  Reference: Chen et al. 2024 (NCA), arXiv:2402.05369, with K = 2 and rewards 1 and 0.
  """
  c, r = _scaled(chosen_log_ratio, rejected_log_ratio, beta)
  against = pairs.logistic_loss(-c) + pairs.logistic_loss(-r)
  return pairs.logistic_loss(c) + 0.5 * against


def bco_pair_loss(
  chosen_log_ratio: jax.Array,
  rejected_log_ratio: jax.Array,
  *,
  delta: Any = 0.0,
  beta: Any = 0.1,
) -> jax.Array:
  r"""Binary classifier optimisation (BCO) of a pair.

  loss = -log sig(c - delta) - log sig(-(r - delta))

  An upper bound of DPO's loss, tightest for the right shift: the mean of the rewards c and r.
  The sum of `unpaired_preferences.bco_loss` of both responses.

  Args:
    chosen_log_ratio, rejected_log_ratio, beta: see the module.
    delta: reward shift, a running mean of the rewards beta log-ratio, kept by the caller.
      Constant. TRL's DPO and Liger: 0.

  Returns:
    [B] loss, 2 log 2 where both log-ratios are 0 and delta is.

  Raises:
    ValueError: shapes differ, or beta <= 0.

  Example:
    >>> bco_pair_loss(jnp.array([1.0]), jnp.array([-1.0]), beta=1.0).round(6)
    Array([0.626523], dtype=float32)

  Reference: Jung et al. 2024 (BCO), arXiv:2404.04656, section 3.
  """
  c, r = _scaled(chosen_log_ratio, rejected_log_ratio, beta)
  delta = pairs.number("delta", delta, c)
  return pairs.logistic_loss(c - delta) + pairs.logistic_loss(delta - r)


def sppo_loss(
  chosen_log_ratio: jax.Array, rejected_log_ratio: jax.Array, *, beta: Any = 0.1
) -> jax.Array:
  r"""Self-play preference optimisation with hard win probabilities 1 and 0 (SPPO), per pair.

  loss = (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2

  IPO that fixes both ends: the same optimal margin of 1 / beta, half of it for each response.

  Args:
    chosen_log_ratio, rejected_log_ratio: see the module.
    beta: 1 / eta of the paper, > 0.

  Returns:
    [B] loss, >= 0.

  Raises:
    ValueError: shapes differ, or beta <= 0.

  Example:
    >>> sppo_loss(jnp.array([3.0]), jnp.array([1.0]))
    Array([40.], dtype=float32)

  Reference: Wu et al. 2024 (SPPO), arXiv:2405.00675, section 4.
  """
  chosen, rejected = _scaled(chosen_log_ratio, rejected_log_ratio, 1.0)
  half = 0.5 / pairs.positive("beta", beta, chosen)
  return jnp.square(chosen - half) + jnp.square(rejected + half)


def apo_zero_loss(
  chosen_log_ratio: jax.Array, rejected_log_ratio: jax.Array, *, beta: Any = 0.1
) -> jax.Array:
  r"""Anchored preference optimisation, chosen up and rejected down (APO-zero), per pair.

  loss = sig(-c) + sig(r)

  For responses of which the chosen one is better than what the policy does by itself.

  Args:
    chosen_log_ratio, rejected_log_ratio, beta: see the module.

  Returns:
    [B] loss, in [0, 2].

  Raises:
    ValueError: shapes differ, or beta <= 0.

  Example:
    >>> apo_zero_loss(jnp.array([1.0]), jnp.array([-1.0]), beta=1.0).round(6)
    Array([0.537883], dtype=float32)

  Reference: D'Oosterlinck et al. 2024 (APO), arXiv:2408.06266, eq. 7.
  """
  c, r = _scaled(chosen_log_ratio, rejected_log_ratio, beta)
  return pairs.sigmoid(-c) + pairs.sigmoid(r)


def apo_down_loss(
  chosen_log_ratio: jax.Array, rejected_log_ratio: jax.Array, *, beta: Any = 0.1
) -> jax.Array:
  r"""Anchored preference optimisation, both down, rejected further (APO-down), per pair.

  loss = sig(c) + sig(-(c - r))

  For pairs of which even the chosen response is worse than what the policy does by itself.

  Args:
    chosen_log_ratio, rejected_log_ratio, beta: see the module.

  Returns:
    [B] loss, in [0, 2].

  Raises:
    ValueError: shapes differ, or beta <= 0.

  Example:
    >>> apo_down_loss(jnp.array([1.0]), jnp.array([-1.0]), beta=1.0).round(6)
    Array([0.850262], dtype=float32)

  Reference: D'Oosterlinck et al. 2024 (APO), arXiv:2408.06266, eq. 8.
  """
  c, r = _scaled(chosen_log_ratio, rejected_log_ratio, beta)
  return pairs.sigmoid(c) + pairs.sigmoid(r - c)


def _scaled(
  chosen_log_ratio: Any, rejected_log_ratio: Any, beta: Any
) -> tuple[jax.Array, jax.Array]:
  """beta times both log-ratios, checked."""
  chosen, rejected = pairs.same_rows(
    chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio
  )
  beta = pairs.positive("beta", beta, chosen)
  return beta * chosen, beta * rejected
