r"""Exact values on the tree of prefixes, and exact functionals of a policy with their gradients.

The reward comes once, at the end, and nothing is discounted:

  V(s)    = E[r | s] = sum over the responses y through s of  pi(y | s) r(y)
  Q(s, a) = V(s a), or r(y) where a is the last token of y
  A(s, a) = Q(s, a) - V(s);   along a response the A_t sum to r(y) - V(x)

The functionals below (`expected_reward`, `kl_divergence`, ...) are sums over responses of
pi(y | x) f(y), with log pi(y | x) from `sequence_logprob`: differentiate them by `jax.grad`, in
the parameters of any policy that scores the enumerated tokens.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import checks, masks
from jaxrl_lm.exact.language import Language
from jaxrl_lm.logprobs import sequence_logprob


class TokenValues(NamedTuple):
  """Exact values along every response, 0 at masked positions.

  Attributes:
    values: [..., N, T] V of the state before token t.
    action_values: [..., N, T] Q of token t.
    advantages: [..., N, T] A of token t.
  """

  values: jax.Array
  action_values: jax.Array
  advantages: jax.Array


def token_values(language: Language, logprobs: jax.Array, rewards: jax.Array) -> TokenValues:
  r"""Exact V, Q and A of each token of each response.

  Args:
    language: the language.
    logprobs: [..., N, T] of every enumerated token, nats. Differentiated.
    rewards: [..., N] reward of every response.

  Returns:
    The values, in the library's alignment: index t speaks of token t and the state before it.

  Raises:
    ValueError: shapes do not match.

  Example:
    >>> from jaxrl_lm.exact.language import enumerate_language
    >>> language = enumerate_language(2, 1)
    >>> token_values(language, jnp.log(jnp.array([[0.25], [0.75]])), jnp.array([0.0, 1.0])).values
    Array([[0.75],
           [0.75]], dtype=float32)

  Reference: Sutton & Barto 2018, sections 3.5 and 4.1.
  """
  logprobs, rewards = _checked(language, logprobs, rewards)
  values = _state_average(language, logprobs, rewards)
  last = masks.last_token_mask(language.mask)
  after = jnp.pad(values[..., 1:], [(0, 0)] * (values.ndim - 1) + [(0, 1)])
  action_values = jnp.where(last, rewards[..., None], after)
  action_values = jnp.where(language.mask, action_values, 0.0)
  return TokenValues(values, action_values, action_values - values)


def _state_average(language: Language, logprobs: jax.Array, x: jax.Array) -> jax.Array:
  """E[x | state] at each token: responses through a state, weighted by what is left of them."""
  terms = jnp.where(language.mask, jnp.exp(_suffix(logprobs)) * x[..., None], 0.0)
  total = jnp.vectorize(functools.partial(_state_sum, language), signature="(n,t)->(n,t)")
  return jnp.where(language.mask, total(terms), 0.0)


def _state_log_mean_exp(language: Language, logprobs: jax.Array, x: jax.Array) -> jax.Array:
  """log E[exp x | state] at each token, without underflow; 0 at masked positions."""
  log_terms = jnp.where(language.mask, _suffix(logprobs) + x[..., None], -jnp.inf)

  def one(log_terms: jax.Array) -> jax.Array:
    states = jnp.asarray(language.states)
    largest = jax.ops.segment_max(log_terms.reshape(-1), states.reshape(-1), language.num_states)
    largest = jax.lax.stop_gradient(largest)[states]
    return largest + jnp.log(_state_sum(language, jnp.exp(log_terms - largest)))

  one = jnp.vectorize(one, signature="(n,t)->(n,t)")
  return jnp.where(language.mask, one(log_terms), 0.0)


def _suffix(logprobs: jax.Array) -> jax.Array:
  """Log-prob of each token and all that follow."""
  return jnp.flip(jnp.cumsum(jnp.flip(logprobs, -1), -1), -1)


def _state_sum(language: Language, terms: jax.Array) -> jax.Array:
  """Sum of the terms [N, T] at equal states, at each of them."""
  states = jnp.asarray(language.states)
  total = jax.ops.segment_sum(terms.reshape(-1), states.reshape(-1), language.num_states)
  return total[states]


def response_probs(language: Language, logprobs: jax.Array) -> jax.Array:
  """pi(y | x) of every response.

  Args:
    language: the language.
    logprobs: [..., N, T] of every enumerated token, nats. Differentiated.

  Returns:
    [..., N].
  """
  return jnp.exp(sequence_logprob(logprobs, _mask_like(language, logprobs)))


def expected_reward(language: Language, logprobs: jax.Array, rewards: jax.Array) -> jax.Array:
  r"""J = sum_y pi(y | x) r(y), whose gradient is the policy gradient.

  Args:
    language: the language.
    logprobs: [..., N, T] of every enumerated token, nats. Differentiated.
    rewards: [..., N].

  Returns:
    [...].

  Raises:
    ValueError: shapes do not match.

  Reference: Williams 1992, section 3.
  """
  logprobs, rewards = _checked(language, logprobs, rewards)
  return jnp.sum(response_probs(language, logprobs) * rewards, axis=-1)


def pass_at_k(language: Language, logprobs: jax.Array, rewards: jax.Array, *, k: int) -> jax.Array:
  r"""1 - (1 - J)^k: the probability that one of k samples is right, for rewards of 0 and 1.

  Args:
    language: the language.
    logprobs: [..., N, T] of every enumerated token, nats. Differentiated.
    rewards: [..., N], 0 or 1.
    k: number of samples, >= 1.

  Returns:
    [...].

  Reference: Chen et al. 2021, arXiv:2107.03374, eq. 1, in expectation.
  """
  checks.check_range("k", k, low=1)
  return 1.0 - (1.0 - expected_reward(language, logprobs, rewards)) ** k


def kl_divergence(language: Language, logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  r"""KL(pi || ref) of whole responses: sum_y pi(y) (log pi(y) - log ref(y)).

  Args:
    language: the language.
    logprobs: [..., N, T] of pi, nats. Differentiated.
    ref_logprobs: [..., N, T] of the reference, nats. Differentiated.

  Returns:
    [...] nats.

  Raises:
    ValueError: shapes differ, or the KL is infinite (where that can be seen).
  """
  mask = _mask_like(language, logprobs)
  log_pi, log_ref = (sequence_logprob(x, mask) for x in (logprobs, ref_logprobs))
  possible = log_pi > -jnp.inf
  terms = jnp.exp(log_pi) * jnp.where(possible, log_pi - log_ref, 0.0)
  kl = jnp.sum(jnp.where(possible, terms, 0.0), axis=-1)
  if not isinstance(kl, jax.core.Tracer) and not bool(jnp.all(jnp.isfinite(kl))):
    raise ValueError("the KL is infinite: ref_logprobs excludes a response that the policy emits")
  return kl


def entropy(language: Language, logprobs: jax.Array) -> jax.Array:
  r"""-sum_y pi(y) log pi(y), of whole responses.

  Args:
    language: the language.
    logprobs: [..., N, T] of every enumerated token, nats. Differentiated.

  Returns:
    [...] nats.
  """
  log_pi = sequence_logprob(logprobs, _mask_like(language, logprobs))
  possible = log_pi > -jnp.inf
  log_pi = jnp.where(possible, log_pi, 0.0)
  return -jnp.sum(jnp.where(possible, jnp.exp(log_pi) * log_pi, 0.0), axis=-1)


def regularised_reward(
  language: Language,
  logprobs: jax.Array,
  rewards: jax.Array,
  *,
  ref_logprobs: jax.Array,
  kl_coef: Any,
) -> jax.Array:
  r"""J - kl_coef KL(pi || ref), the objective of RLHF.

  Args:
    language: the language.
    logprobs: [..., N, T] of pi, nats. Differentiated.
    rewards: [..., N].
    ref_logprobs: [..., N, T] of the reference, nats.
    kl_coef: strength, reward per nat.

  Returns:
    [...].

  Reference: Ouyang et al. 2022, arXiv:2203.02155, eq. 2.
  """
  kl = kl_divergence(language, logprobs, ref_logprobs)
  return expected_reward(language, logprobs, rewards) - kl_coef * kl


def regularised_optimum(
  language: Language, ref_logprobs: jax.Array, rewards: jax.Array, *, kl_coef: Any
) -> jax.Array:
  r"""The policy that maximises J - kl_coef KL(pi || ref), as log-probs of its tokens.

  pi*(y) = ref(y) exp(r(y) / kl_coef) / Z;  log pi*(a | s) = log ref(a | s) + log Z(s a) - log Z(s)

  with Z(s) the mean of exp(r / kl_coef) over the reference's continuations of s.

  Args:
    language: the language.
    ref_logprobs: [..., N, T] of the reference, nats.
    rewards: [..., N].
    kl_coef: strength, reward per nat, > 0.

  Returns:
    [..., N, T] log-probs in nats, 0 at masked positions.

  Raises:
    ValueError: shapes do not match, or kl_coef <= 0.

  Reference: Rafailov et al. 2023, arXiv:2305.18290, eq. 4.
  """
  checks.check_range("kl_coef", kl_coef, low=0.0, open_low=True)
  ref_logprobs, rewards = _checked(language, ref_logprobs, rewards)
  # Less the best: where the optimum goes, few digits cancel.
  tilt = (rewards - jnp.max(rewards, axis=-1, keepdims=True)) / kl_coef
  log_normaliser = _state_log_mean_exp(language, ref_logprobs, tilt)
  last = masks.last_token_mask(language.mask)
  after = jnp.pad(log_normaliser[..., 1:], [(0, 0)] * (rewards.ndim) + [(0, 1)])
  change = jnp.where(last, tilt[..., None], after) - log_normaliser
  return jnp.where(language.mask, ref_logprobs + change, 0.0)


def check_distribution(language: Language, logprobs: jax.Array) -> None:
  """The responses' probabilities sum to 1, for every prompt.

  Args:
    language: the language.
    logprobs: [..., N, T] of every enumerated token, nats.

  Returns:
    None.

  Raises:
    ValueError: they do not: the policy does not score the language's tokens.
  """
  mask = _mask_like(language, logprobs)
  if isinstance(logprobs, jax.core.Tracer):
    return
  given = np.asarray(checks.as_float("logprobs", logprobs))
  total = np.exp(np.where(mask, given, 0.0).sum(axis=-1)).sum(axis=-1)
  worst = float(np.abs(total - 1.0).max(initial=0.0))
  if not worst < 1e3 * float(np.finfo(given.dtype).eps) * language.horizon:
    raise ValueError(
      f"the probabilities of the {language.tokens.shape[0]} responses must sum to 1, "
      f"they sum to {total}, off by {worst:.2g}"
    )


def _checked(language: Language, logprobs: Any, rewards: Any) -> tuple[jax.Array, jax.Array]:
  logprobs, rewards = checks.as_float("logprobs", logprobs), checks.as_float("rewards", rewards)
  mask = _mask_like(language, logprobs)
  checks.check_same_shape(**{"logprobs[..., 0]": logprobs[..., 0]}, rewards=rewards)
  return jnp.where(mask, logprobs, 0.0), rewards


def _mask_like(language: Language, logprobs: Any) -> jax.Array:
  """The language's mask for every leading axis of the log-probs."""
  if jnp.shape(logprobs)[-2:] != language.tokens.shape:
    raise ValueError(
      f"logprobs must end in [responses, horizon] = {language.tokens.shape}, got "
      f"{jnp.shape(logprobs)}"
    )
  return jnp.broadcast_to(language.mask, jnp.shape(logprobs))
