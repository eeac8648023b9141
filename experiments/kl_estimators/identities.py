"""What must be the same: two updates sample by sample, or an update and a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl
from experiments.kl_estimators.estimators import Row
from experiments.kl_estimators.moments import Factors
from experiments.kl_estimators.setting import next_logprobs
from jaxrl_lm.exact import (
  Moments,
  Policy,
  bias_variance,
  kl_divergence,
  response_probs,
  target_gradient,
)
from jaxrl_lm.exact.language import Language


def identities(
  policy: Policy, reference: jax.Array, factors: Factors, moments: dict[Row, Moments]
) -> dict[str, float]:
  """Relative differences of what should be the same; 0 to rounding."""
  target, laboratory = next(iter(moments.values())).target, _laboratory(policy, reference)
  mean = {row: m.mean for row, m in moments.items()}
  k2 = Row("k2", "loss")

  def apart(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / np.linalg.norm(target))

  forward = target_gradient(policy, reference, _forward_kl)
  forward_fixed = target_gradient(policy, reference, _forward_kl_of_states)
  reverse_fixed = target_gradient(policy, reference, _reverse_kl_of_states)
  return {
    "k2 of the response in the loss is k1 in the reward, sample by sample": difference(
      factors, Row("k2 of the response", "loss"), Row("k1", "whole")
    ),
    "k2 in the loss is k1 as an immediate reward, sample by sample": difference(
      factors, k2, Row("k1", "immediate")
    ),
    "k3 with the gradient of k2 is k2 in the loss, sample by sample": difference(
      factors, Row("k3, gradient of k2", "loss"), k2
    ),
    "k2 in the loss is the gradient of the states' reverse KL, states fixed": apart(
      mean[k2], reverse_fixed
    ),
    "exact per state in the loss is the gradient of the states' reverse KL, states fixed": apart(
      mean[Row("exact per state", "loss")], reverse_fixed
    ),
    "k3 in the loss is the gradient of the states' forward KL, states fixed": apart(
      mean[Row("k3", "loss")], forward_fixed
    ),
    "k3 of the response in the loss is the gradient of the forward KL": apart(
      mean[Row("k3 of the response", "loss")], forward
    ),
    "k3 of the response in the reward is the reverse gradient less the forward one": apart(
      mean[Row("k3 of the response", "whole")], target - forward
    ),
    "k3 in the loss and in the reward together are the gradient": apart(
      mean[Row("k3", "loss")] + mean[Row("k3", "whole")], target
    ),
    "bias_variance finds the same mean of k2 in the loss": apart(mean[k2], -laboratory.mean),
    "bias_variance finds the same variance of k2 in the loss": float(
      np.abs(moments[k2].variance / laboratory.variance - 1).max()
    ),
  }


def difference(factors: Factors, first: Row, second: Row) -> float:
  """Largest difference of the coefficients of one sample's update, by the largest of them."""
  x, y = (np.asarray(factors[row]) for row in (first, second))
  return float(np.abs(x - y).max() / np.abs(y).max())


def _laboratory(policy: Policy, reference: jax.Array) -> Moments:
  """The same by the one call: a reward of 0, so that the KL term is the whole update."""
  return bias_variance(
    rl.REINFORCE,
    policy,
    np.zeros(reference.shape[:2]),
    group_size=1,
    ref_logprobs=reference,
    kl=rl.kl_k2,
    kl_coef=1.0,
  )


def _forward_kl(language: Language, logprobs: jax.Array, reference: jax.Array) -> jax.Array:
  return kl_divergence(language, reference, logprobs)


def _forward_kl_of_states(
  language: Language, logprobs: jax.Array, reference: jax.Array
) -> jax.Array:
  """Mean over responses of the policy, which is no variable here."""
  return _over_fixed_states(language, logprobs, reference, rl.forward_kl)


def _reverse_kl_of_states(
  language: Language, logprobs: jax.Array, reference: jax.Array
) -> jax.Array:
  return _over_fixed_states(language, logprobs, reference, rl.exact_kl)


def _over_fixed_states(
  language: Language, logprobs: jax.Array, reference: jax.Array, divergence: Callable[..., Any]
) -> jax.Array:
  probs = jax.lax.stop_gradient(response_probs(language, logprobs))
  tables = (next_logprobs(language, x) for x in (logprobs, reference))
  mask = jnp.broadcast_to(language.mask, logprobs.shape)
  return jnp.sum(probs * divergence(*tables, mask=mask).sum(axis=-1), axis=-1)
