"""Value and gradient of every estimator, exactly: sums over all responses, nothing is sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.kl_estimators import Config
from configs.policies import Network, Table
from experiments.kl_estimators.estimators import (
  ESTIMATORS,
  OFF_POLICY,
  ON_POLICY,
  Row,
  coefficients,
  log_weights,
)
from experiments.kl_estimators.identities import difference, identities
from experiments.kl_estimators.moments import gradients, update_moments
from experiments.kl_estimators.setting import (
  Responses,
  Start,
  old_policy_at,
  policy_at,
  responses,
  sampling_probs,
  starting_point,
)
from jaxrl_lm.exact import Moments, Policy, kl_divergence
from jaxrl_lm.exact.language import Language

Track = Callable[[Iterable[Any]], Iterable[Any]]


def measure(config: Config, settings: Table | Network, track: Track) -> dict[str, Any]:
  """Of one policy, on its own samples and on old ones."""
  start = starting_point(config, settings)
  return {"on": on_policy(start, config, track), "off": off_policy(start, config, track)}


def on_policy(start: Start, config: Config, track: Track) -> dict[str, Any]:
  """Everything over the levels of KL(policy || reference)."""
  found = []
  for level in track(config.levels):
    policy = policy_at(start, level)
    given = responses(policy, start.reference, policy)
    factors = coefficients(ON_POLICY, policy.language, given)
    moments = update_moments(factors, gradients(policy, start.reference), sampling_probs(policy))
    found.append(
      {
        "kl": _divergence(policy, start.reference),
        "value": values(policy.language, given, policy, ("none",)),
        "gradient": _nested({row: described(m) for row, m in moments.items()}),
        "identity": identities(policy, start.reference.logprobs(), factors, moments),
      }
    )
  return stacked(found)


def off_policy(start: Start, config: Config, track: Track) -> dict[str, Any]:
  """Everything over the staleness of the samples, at one level."""
  policy = policy_at(start, config.headline)
  exact = gradients(policy, start.reference)
  found = []
  for level in track((0.0, *config.staleness)):
    old = old_policy_at(start, policy, level)
    given = responses(policy, start.reference, old)
    factors = coefficients(OFF_POLICY, policy.language, given)
    moments = update_moments(factors, exact, sampling_probs(old))
    same = difference(factors, Row("k3 off-policy", "loss"), Row("k3", "live", "token"))
    found.append(
      {
        "staleness": _divergence(old, policy),
        "value": values(policy.language, given, old, ("none", "token", "prefix", "sequence")),
        "gradient": _nested({row: described(m) for row, m in moments.items()}),
        "identity": {"k3 off-policy is k3 times its live token ratio, sample by sample": same},
      }
    )
  return stacked(found)


def values(
  language: Language, given: Responses, sampler: Policy, ratios: tuple[str, ...]
) -> dict[str, Any]:
  """Mean and spread of each estimate of one response: {estimator: {ratio: {bias, std}}}.

  In units of the KL, mean over prompts; the spread is over responses to the same prompt.
  """
  probs = sampling_probs(sampler)
  kl = np.asarray(
    kl_divergence(language, given.chosen(given.policy), given.chosen(given.reference))
  )
  table: dict[str, Any] = {}
  for name, estimator in ESTIMATORS.items():
    estimate = estimator(given, given.policy)
    # The off-policy one has its ratio in it.
    for ratio in ratios if name != "k3 off-policy" else ("none",):
      weighted = jnp.exp(log_weights(ratio, given, given.policy)) * estimate
      total = jnp.sum(jnp.where(given.mask, weighted, 0.0), axis=-1)
      mean = jnp.sum(probs * total, axis=-1, keepdims=True)
      variance = jnp.sum(probs * (total - mean) ** 2, axis=-1)
      table.setdefault(name, {})[ratio] = {
        "bias": float((mean[:, 0] - kl).mean() / kl.mean()),
        "std": float(jnp.sqrt(variance.mean()) / kl.mean()),
      }
  return table


def described(moments: Moments) -> dict[str, float]:
  """Of the batch of one response per prompt. noise: variance over the squared true gradient."""
  whole = moments.averaged()
  return {
    "cosine": float(whole.cosine[0]),
    "scale": float(whole.scale[0]),
    "bias": float(whole.relative_bias[0]),
    "noise": float(whole.variance[0] / np.sum(whole.target**2)),
  }


def _divergence(policy: Policy, other: Policy) -> float:
  """KL(policy || other) in nats per response, mean over prompts."""
  return float(kl_divergence(policy.language, policy.logprobs(), other.logprobs()).mean())


def _nested(table: dict[Row, Any]) -> dict[str, Any]:
  """{estimator: {place: {ratio: ...}}}, as a store can hold it."""
  nested: dict[str, Any] = {}
  for row, entry in table.items():
    nested.setdefault(row.estimator, {}).setdefault(row.place, {})[row.ratio] = entry
  return nested


def stacked(found: list[dict[str, Any]]) -> dict[str, Any]:
  """The same dict, whose numbers are arrays over the list."""
  return jax.tree.map(lambda *x: np.array(x), *found)
