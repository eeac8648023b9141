r"""Losses of preference pairs that need no reference policy: SimPO, CPO, ORPO.

They take log-probs instead of log-ratios, and so have no argument for a reference:

  simpo_loss  -log sig(beta (mean_logprob of chosen - of rejected) - gamma)
  cpo_loss    -log sig(beta (sequence_logprob of chosen - of rejected))
  orpo_loss   -log sig(log odds of chosen - of rejected), odds of mean_logprob

Only the length convention in front and the score differ: other losses of `preferences` serve
log-probs as well. CPO and ORPO are the preference half of an objective whose other half is the
negative log-likelihood of the chosen response, and SimPO is not, though TRL and Liger add it unless
told otherwise (CPO alpha 1.0; ORPO: likelihood + lambda orpo_loss, lambda 0.1):

  nll = -mean_logprob(logprobs, mask)          # [B], or a weighted sum over tokens
  loss = cpo_loss(chosen, rejected) + alpha * nll
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import pairs


def simpo_loss(
  chosen_mean_logprob: jax.Array,
  rejected_mean_logprob: jax.Array,
  *,
  beta: Any = 2.0,
  gamma: Any = 0.5,
) -> jax.Array:
  r"""Simple preference optimisation: length-normalised, with a target margin, per pair.

  loss = -log sig(beta (chosen - rejected) - gamma)

  The mean must divide by the tokens it sums: count the stop token in both or in neither.
  Others: TRL and Liger beta 0.1, gamma 0.5; open-instruct gamma / beta = 0.3. Of
  `alpha_divergence_score` of the log-probs it is AlphaPO.

  Args:
    chosen_mean_logprob, rejected_mean_logprob: [B] log-prob per token, nats (`mean_logprob`).
      Differentiated.
    beta: scale of the reward, > 0.
    gamma: target margin of the rewards, >= 0.

  Returns:
    [B] loss, to be minimised.

  Raises:
    ValueError: shapes differ, beta <= 0, or gamma is negative.

  Example:
    >>> simpo_loss(jnp.array([-1.0]), jnp.array([-1.5])).round(6)
    Array([0.474077], dtype=float32)

  Reference: Meng et al. 2024 (SimPO), arXiv:2405.14734, eq. 6.
  """
  chosen, rejected = pairs.same_rows(
    chosen_mean_logprob=chosen_mean_logprob, rejected_mean_logprob=rejected_mean_logprob
  )
  gamma = pairs.number("gamma", gamma, chosen, low=0.0)
  beta = pairs.positive("beta", beta, chosen)
  return pairs.logistic_loss(beta * (chosen - rejected) - gamma)


def cpo_loss(
  chosen_logprob: jax.Array, rejected_logprob: jax.Array, *, beta: Any = 0.1
) -> jax.Array:
  r"""Contrastive preference optimisation, the preference half, per pair.

  loss = -log sig(beta (chosen - rejected))

  DPO with a uniform reference. Add the negative log-likelihood of the chosen response, without
  which the policy is held by nothing (see the module).

  Args:
    chosen_logprob, rejected_logprob: [B] log-prob of the sequence, nats (`sequence_logprob`).
      Differentiated.
    beta: scale of the reward, > 0.

  Returns:
    [B] loss, to be minimised.

  Raises:
    ValueError: shapes differ, or beta <= 0.

  Example:
    >>> cpo_loss(jnp.array([-10.0]), jnp.array([-12.0])).round(6)
    Array([0.598139], dtype=float32)

  Reference: Xu et al. 2024 (CPO), arXiv:2401.08417, section 3.
  """
  chosen, rejected = pairs.same_rows(
    chosen_logprob=chosen_logprob, rejected_logprob=rejected_logprob
  )
  return pairs.logistic_loss(pairs.positive("beta", beta, chosen) * (chosen - rejected))


def orpo_loss(chosen_mean_logprob: jax.Array, rejected_mean_logprob: jax.Array) -> jax.Array:
  r"""Odds ratio preference optimisation, the preference half, per pair.

  loss = -log sig(log odds(chosen) - log odds(rejected)),  odds = p / (1 - p),  p = exp(logprob)

  Finite where a log-prob is exactly 0 (a sure token, an empty response) and its odds are
  infinite: log-probs are read no closer to 0 than machine epsilon, which is all they are known
  to, with log odds of 16 in float32 and 36 in float64.

  Args:
    chosen_mean_logprob, rejected_mean_logprob: [B] log-prob per token, nats (`mean_logprob`;
      that of a sequence would make all odds vanish). Differentiated.

  Returns:
    [B] loss, to be minimised, before the lambda of the paper.

  Raises:
    ValueError: shapes differ.

  Example:
    >>> orpo_loss(jnp.log(jnp.array([0.5, 1.0])), jnp.log(jnp.array([0.25, 1.0]))).round(6)
    Array([0.287682, 0.693147], dtype=float32)

  Reference: Hong et al. 2024 (ORPO), arXiv:2403.07691, eq. 4 and 7.
  """
  chosen, rejected = pairs.same_rows(
    chosen_mean_logprob=chosen_mean_logprob, rejected_mean_logprob=rejected_mean_logprob
  )
  return pairs.logistic_loss(_log_odds(chosen) - _log_odds(rejected))


@jax.custom_jvp
def _log_odds(logprob: jax.Array) -> jax.Array:
  """log(p / (1 - p)) of p = exp(logprob), for log-probs of -epsilon and below."""
  x = jnp.minimum(logprob, -jnp.finfo(logprob.dtype).eps)
  near, far = jnp.maximum(x, -1.0), jnp.minimum(x, -0.5)
  return x - jnp.where(x > -0.7, jnp.log(-jnp.expm1(near)), jnp.log1p(-jnp.exp(far)))


@_log_odds.defjvp
def _log_odds_jvp(primals: Any, tangents: Any) -> Any:
  # 1 / (1 - p), at the bound too: times d logprob / d logit = 1 - p it stays in [0, 1].
  (logprob,), (tangent,) = primals, tangents
  x = jnp.minimum(logprob, -jnp.finfo(logprob.dtype).eps)
  return _log_odds(logprob), tangent / -jnp.expm1(x)
