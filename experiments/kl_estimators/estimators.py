"""Estimators of the KL, and the places of an update where they stand.

An estimator gives a value e_t to each token; its sum estimates KL(policy || reference) of the
response. The places, as the loss of a response, w the ratio to the policy that drew it:

  loss        sum_t sg(w_t) e_t               e is differentiated
  live        sum_t w_t e_t                   e and the ratio are
  whole       sum_t w_t sg(sum_u e_u)         a reward; every token gets the response's
  to go       sum_t w_t sg(sum_{u >= t} e_u)  a token gets its own and the later ones
  advantage   sum_t w_t sg(Q_t - V_t)         the same less its exact expectation
  immediate   sum_t w_t sg(e_t)               a token gets its own

In `loss` and `live` w is the ratio of the token, the prefix or the response; in a reward the
gradient is always the token's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxrl_lm as rl
from experiments.kl_estimators.setting import Responses
from jaxrl_lm.exact import token_values
from jaxrl_lm.exact.language import Language

Estimator = Callable[[Responses, jax.Array], jax.Array]


class Row(NamedTuple):
  """One way to put the KL into an update."""

  estimator: str
  place: str
  ratio: str = "none"


def of_token(function: Callable[..., jax.Array]) -> Estimator:
  """An estimator of the library, on each sampled token."""

  def estimate(given: Responses, policy: jax.Array) -> jax.Array:
    return function(given.chosen(policy), given.chosen(given.reference), given.mask)

  return estimate


def of_response(function: Callable[..., jax.Array]) -> Estimator:
  """The same on the whole response as if it were one token; stands at its last token."""

  def estimate(given: Responses, policy: jax.Array) -> jax.Array:
    totals = (
      rl.sequence_logprob(given.chosen(x), given.mask)[..., None] for x in (policy, given.reference)
    )
    value = function(*totals, given.mask[..., :1])
    return jnp.where(rl.last_token_mask(given.mask), value, 0.0)

  return estimate


def of_state(given: Responses, policy: jax.Array) -> jax.Array:
  """The exact KL of each visited state's next token."""
  return rl.exact_kl(policy, given.reference, mask=given.mask)


def k3_off_policy(given: Responses, policy: jax.Array) -> jax.Array:
  old, reference = given.chosen(given.old), given.chosen(given.reference)
  return rl.kl_k3_off_policy(given.chosen(policy), reference, given.mask, old_logprobs=old)


ESTIMATORS: dict[str, Estimator] = {
  "k1": of_token(rl.kl_k1),
  "k2": of_token(rl.kl_k2),
  "k3": of_token(rl.kl_k3),
  "abs": of_token(rl.kl_abs),
  "exact per state": of_state,
  "k3, gradient of k2": of_token(rl.with_reverse_kl_gradient(rl.kl_k3)),
  "k2 of the response": of_response(rl.kl_k2),
  "k3 of the response": of_response(rl.kl_k3),
  "k3 off-policy": k3_off_policy,
}
LEVELS = {"token": rl.per_token, "prefix": rl.per_prefix, "sequence": rl.per_sequence}

ON_POLICY = tuple(
  Row(estimator, place, ratio)
  for place, ratio, estimators in (
    ("loss", "none", [name for name in ESTIMATORS if name != "k3 off-policy"]),
    ("live", "token", ["k1", "k3", "exact per state"]),
    ("live", "prefix", ["k1", "k3", "exact per state"]),
    ("whole", "none", ["k1", "k2", "k3", "abs", "exact per state", "k3 of the response"]),
    ("to go", "none", ["k1", "k2", "k3", "abs", "exact per state"]),
    ("advantage", "none", ["k1", "k3"]),
    ("immediate", "none", ["k1", "k3"]),
  )
  for estimator in estimators
)
OFF_POLICY = (
  Row("k3 off-policy", "loss"),
  *(
    Row(estimator, place, ratio)
    for estimator in ("k1", "k2", "k3", "exact per state")
    for place, ratios in (
      ("loss", ("none", "token", "prefix", "sequence")),
      ("live", ("token", "prefix", "sequence")),
      ("to go", ("none", "token", "sequence")),
    )
    for ratio in ratios
  ),
)


def log_weights(ratio: str, given: Responses, policy: jax.Array) -> jax.Array:
  """[P, N, T] log of the ratio at a level, live."""
  log_ratio = rl.token_log_ratio(given.chosen(policy), given.chosen(given.old), given.mask)
  return jnp.zeros_like(log_ratio) if ratio == "none" else LEVELS[ratio](log_ratio, given.mask)


def loss(row: Row, language: Language, given: Responses, policy: jax.Array) -> jax.Array:
  """[P, N] of every response: what its samples make the optimiser minimise."""
  estimate = ESTIMATORS[row.estimator](given, policy)
  if row.place in ("loss", "live"):
    weights = jnp.exp(log_weights(row.ratio, given, policy))
    weights = weights if row.place == "live" else jax.lax.stop_gradient(weights)
    return rl.masked_sum(weights * estimate, given.mask, axis=-1)
  costs = credit(row.place, language, given, policy, estimate)
  logprobs, old = (given.chosen(x) for x in (policy, given.old))
  log_ratio = rl.token_log_ratio(logprobs, old, given.mask)
  if row.ratio == "none":
    gain = rl.reinforce(log_ratio, -costs, mask=given.mask, old_logprobs=old)
  else:
    level = rl.with_token_gradient(LEVELS[row.ratio])(log_ratio, given.mask)
    gain = rl.importance_weighted(level, -costs, mask=given.mask)
  return -rl.masked_sum(gain, given.mask, axis=-1)


def credit(
  place: str, language: Language, given: Responses, policy: jax.Array, estimate: jax.Array
) -> jax.Array:
  """[P, N, T] the part of the KL that a token answers for, where it is a reward."""
  total = jnp.sum(estimate, axis=-1)
  if place == "whole":
    return jnp.broadcast_to(total[..., None], estimate.shape)
  if place == "to go":
    return rl.discounted_returns(estimate, given.mask)
  if place == "advantage":
    return token_values(language, given.chosen(policy), total).advantages
  return estimate


@partial(jax.jit, static_argnums=0)
def coefficients(
  rows: tuple[Row, ...], language: Language, given: Responses
) -> dict[Row, jax.Array]:
  """[P, N, T, V] derivative of each loss in the log-prob of every token that could follow."""

  def of_row(row: Row) -> jax.Array:
    return jax.grad(lambda policy: jnp.sum(loss(row, language, given, policy)))(given.policy)

  return {row: of_row(row) for row in rows}
