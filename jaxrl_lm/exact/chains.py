"""Importance ratios of long responses: Markov chains over V tokens, by dynamic programming.

A behaviour policy mu samples the response, a target policy pi is what the gradient is wanted of;
rho_T = prod_t pi(y_t | y_{t-1}) / mu(y_t | y_{t-1}) is the importance ratio of T tokens.

  E_mu[rho_T] = 1          for every T
  E_mu[rho_T^2]            grows by the Perron root of mu (pi / mu)^2 per token
  log rho_T                has mean -KL_T and, for a small KL, a variance near 2 KL_T

so that a mismatch nobody sees in a token decides everything in a response. A chain needs
V^2 numbers per token instead of V^T responses, hence T up to thousands. The distribution of
log rho_T is in `ratio_distributions`, the gradient estimators in `counting`.

NumPy in float64 on the host, whatever dtype is given: these are a few numbers per step, and a
ratio of thousands of tokens is not a matter for float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxrl_lm import checks


class MarkovChain(NamedTuple):
  """A policy whose next token depends on the last one only.

  Attributes:
    initial: [V] log-probs of the first token, nats.
    transition: [V, V] log-probs, nats; row i is the distribution after token i.
  """

  initial: Any
  transition: Any


class LogRatioMoments(NamedTuple):
  """Mean and variance of log rho_T under the behaviour policy, at index T - 1.

  Attributes:
    mean: [horizon] in nats; its negative is KL(behaviour || target) of T tokens.
    variance: [horizon] in nats^2.
  """

  mean: np.ndarray
  variance: np.ndarray


def log_moments(
  behaviour: MarkovChain, target: MarkovChain, power: float, *, horizon: int
) -> np.ndarray:
  r"""log E_mu[rho_T^power] for T = 1 .. horizon.

  a_1 = mu_0 rho_0^k,  a_{t+1}[j] = sum_i a_t[i] mu[i, j] rho[i, j]^k,  E_mu[rho_T^k] = sum_j a_T[j]

  In log space, since E_mu[rho^2] passes e^700 at modest lengths. With `m2` of power 2:
  chi-square is `expm1(m2)`, the effective sample size of one sample `exp(-m2)`.

  Args:
    behaviour, target: chains over the same tokens.
    power: any real number; below 0 the target must have mass wherever the behaviour has.
    horizon: longest T.

  Returns:
    [horizon] float64, nats; index T - 1 speaks of responses of T tokens.

  Raises:
    ValueError: shapes differ, a row does not sum to one, horizon < 1, or a ratio is infinite.

  Example:
    >>> half = MarkovChain(np.log([0.5, 0.5]), np.log([[0.5, 0.5], [0.5, 0.5]]))
    >>> bent = MarkovChain(np.log([0.6, 0.4]), np.log([[0.6, 0.4], [0.6, 0.4]]))
    >>> np.exp(log_moments(half, bent, 2, horizon=3)).round(6)
    array([1.04    , 1.0816  , 1.124864])

  Reference: Owen 2013, "Monte Carlo theory, methods and examples", section 9.3.
  """
  behaviour, ratio = log_ratios(behaviour, target, finite=power < 0)
  length = checked_length("horizon", horizon)
  with np.errstate(invalid="ignore"):  # 0 * -inf: a power of 0 asks for nothing
    initial, step = (
      lp + np.where(power == 0, 0.0, power * lr) for lp, lr in zip(behaviour, ratio, strict=True)
    )
  moments = np.empty(length)
  moments[0] = np.logaddexp.reduce(initial)
  for t in range(1, length):
    initial = np.logaddexp.reduce(initial[:, None] + step, axis=0)
    moments[t] = np.logaddexp.reduce(initial)
  return moments


def log_moment_rate(behaviour: MarkovChain, target: MarkovChain, power: float) -> float:
  r"""log of the Perron root of mu rho^power: what `log_moments` gains per token for large T.

  Args:
    behaviour, target: chains over the same tokens.
    power: any real number, as for `log_moments`.

  Returns:
    Nats per token: 0 at power 1, and at power 2 the rate of decay of the effective sample size.

  Raises:
    ValueError: shapes differ, a row does not sum to one, or a ratio is infinite.

  Example:
    >>> half = MarkovChain(np.log([0.5, 0.5]), np.log([[0.5, 0.5], [0.5, 0.5]]))
    >>> bent = MarkovChain(np.log([0.6, 0.4]), np.log([[0.6, 0.4], [0.6, 0.4]]))
    >>> round(log_moment_rate(half, bent, 2), 6)  # log 1.04
    0.039221

  Reference: Dembo & Zeitouni 1998, "Large deviations techniques and applications", section 3.1.
  """
  behaviour, ratio = log_ratios(behaviour, target, finite=power < 0)
  if power == 0:
    return 0.0
  step = behaviour.transition + power * ratio.transition
  largest = np.max(step)
  return float(largest + np.log(np.max(np.abs(np.linalg.eigvals(np.exp(step - largest))))))


def log_ratio_moments(
  behaviour: MarkovChain, target: MarkovChain, *, horizon: int
) -> LogRatioMoments:
  r"""Exact mean and variance of log rho_T under the behaviour policy, for T = 1 .. horizon.

  -mean is the KL divergence of T tokens, KL(behaviour || target); for a small one
  log rho_T ~ N(-KL_T, 2 KL_T). The sum is centred at every step, so that nothing cancels.

  Args:
    behaviour, target: chains over the same tokens.
    horizon: longest T.

  Returns:
    Means and variances, [horizon] each; index T - 1 speaks of T tokens.

  Raises:
    ValueError: shapes differ, a row does not sum to one, horizon < 1, or the KL is infinite.

  Example:
    >>> half = MarkovChain(np.log([0.5, 0.5]), np.log([[0.5, 0.5], [0.5, 0.5]]))
    >>> bent = MarkovChain(np.log([0.6, 0.4]), np.log([[0.6, 0.4], [0.6, 0.4]]))
    >>> mean, variance = log_ratio_moments(half, bent, horizon=100)
    >>> (mean[-1] / 100).round(6), (variance[-1] / 100).round(6)
    (np.float64(-0.020411), np.float64(0.0411))

  Reference: Cover & Thomas 2006, "Elements of information theory", eq. 2.67 (chain rule).
  """
  behaviour, ratio = log_ratios(behaviour, target, finite=True)
  length = checked_length("horizon", horizon)
  initial, step = (np.exp(lp) for lp in behaviour)
  # Of log rho_t - its mean, on the event that the last token is j: mass, first, second moment.
  mean = float(initial @ ratio.initial)
  mass, centred = initial, ratio.initial - mean
  first, second = mass * centred, mass * centred**2
  means, variances = np.empty(length), np.empty(length)
  expected = np.sum(step * ratio.transition, axis=1)
  for t in range(length):
    means[t], variances[t] = mean, np.sum(second)
    increment = mass @ expected
    change = ratio.transition - increment
    once, twice = step * change, step * change**2
    second = second @ step + 2 * first @ once + mass @ twice
    first = first @ step + mass @ once
    mass, mean = mass @ step, mean + increment
  return LogRatioMoments(means, variances)


def stationary(chain: MarkovChain) -> np.ndarray:
  r"""The distribution of the last token that one more token leaves as it is.

  Args:
    chain: with one recurrent class of tokens.

  Returns:
    [V] probabilities.

  Raises:
    ValueError: a row does not sum to one, or several distributions are stationary.

  Example:
    >>> stationary(MarkovChain(np.log([0.5, 0.5]), np.log([[0.9, 0.1], [0.3, 0.7]]))).round(6)
    array([0.75, 0.25])

  Reference: Norris 1997, "Markov chains", section 1.7.
  """
  transition = np.exp(_checked_chain("chain", chain).transition)
  number = transition.shape[0]
  system = np.vstack([transition.T - np.eye(number), np.ones(number)])
  solution, _, rank, _ = np.linalg.lstsq(system, np.eye(number + 1)[-1], rcond=1e-13 * number)
  if rank < number:
    raise ValueError("chain has several stationary distributions: no token leads to every class")
  return np.maximum(solution, 0.0)


def kl_rate(behaviour: MarkovChain, target: MarkovChain) -> float:
  r"""KL(behaviour || target) per token of a long response.

  sum_i s_i sum_j mu[i, j] log(mu[i, j] / pi[i, j]),  s stationary under mu

  Args:
    behaviour, target: chains over the same tokens.

  Returns:
    Nats per token, >= 0.

  Raises:
    ValueError: shapes differ, a row does not sum to one, or the KL is infinite.

  Example:
    >>> half = MarkovChain(np.log([0.5, 0.5]), np.log([[0.5, 0.5], [0.5, 0.5]]))
    >>> bent = MarkovChain(np.log([0.6, 0.4]), np.log([[0.6, 0.4], [0.6, 0.4]]))
    >>> round(kl_rate(half, bent), 6)
    0.020411

  Reference: Cover & Thomas 2006, "Elements of information theory", section 4.2.
  """
  behaviour, ratio = log_ratios(behaviour, target, finite=True)
  return _kl_rate(stationary(behaviour)[:, None] * np.exp(behaviour.transition), ratio)


def at_kl_rate(
  behaviour: MarkovChain, initial_direction: Any, transition_direction: Any, *, rate: float
) -> MarkovChain:
  r"""The target policy at a stated KL per token from the behaviour, in a given direction.

  pi = mu exp(eps direction) / normaliser,  eps > 0 such that kl_rate(mu, pi) = rate

  One eps, found by bisection: the KL increases with it. The target has the behaviour's support.

  Args:
    behaviour: the chain to start from.
    initial_direction: [V] real numbers, for the first token.
    transition_direction: [V, V] real numbers, not constant over every row the chain visits.
    rate: KL(behaviour || target) per token, nats, > 0.

  Returns:
    The target chain.

  Raises:
    ValueError: shapes differ, a row does not sum to one, rate <= 0, or the direction changes
      nothing.

  Example:
    >>> half = MarkovChain(np.log([0.5, 0.5]), np.log([[0.5, 0.5], [0.5, 0.5]]))
    >>> target = at_kl_rate(half, [1.0, 0.0], [[1.0, 0.0], [1.0, 0.0]], rate=2e-4)
    >>> np.exp(target.initial).round(4), round(kl_rate(half, target), 10)
    (array([0.51, 0.49]), 0.0002)
  """
  behaviour = _checked_chain("behaviour", behaviour)
  checks.check_range("rate", rate, low=0.0, open_low=True)
  direction = MarkovChain(
    *(np.asarray(x, np.float64) for x in (initial_direction, transition_direction))
  )
  for name, x, like in zip(direction._fields, direction, behaviour, strict=True):
    if x.shape != like.shape or not np.all(np.isfinite(x)):
      raise ValueError(f"{name}_direction must be finite, of shape {like.shape}, got {x.shape}")
  visits = stationary(behaviour)[:, None] * np.exp(behaviour.transition)

  def tilted(eps: float) -> MarkovChain:
    return MarkovChain(
      *(_normalised(p + eps * d) for p, d in zip(behaviour, direction, strict=True))
    )

  def excess(eps: float) -> float:
    return _kl_rate(visits, _difference(tilted(eps), behaviour)) - rate

  low, high = 0.0, 1e-3
  while excess(high) < 0:
    low, high = high, 2 * high
    if high > 1e9:
      raise ValueError("transition_direction is constant over every row that the chain visits")
  while (middle := (low + high) / 2) not in (low, high):
    low, high = (low, middle) if excess(middle) > 0 else (middle, high)
  return tilted(high)


def log_ratios(
  behaviour: MarkovChain, target: MarkovChain, *, finite: bool
) -> tuple[MarkovChain, MarkovChain]:
  """The checked behaviour chain, and log pi / mu of each first token and transition.

  Args:
    behaviour, target: chains over the same tokens.
    finite: whether the target must have mass wherever the behaviour has.

  Returns:
    The behaviour with rows normalised in float64; log-ratios in nats, 0 where neither has mass.

  Raises:
    ValueError: shapes differ, a row does not sum to one, or the KL is infinite.
  """
  behaviour, target = _checked_chain("behaviour", behaviour), _checked_chain("target", target)
  checks.check_same_shape(behaviour=behaviour.transition, target=target.transition)
  ratio = _difference(target, behaviour)
  for name, lr in zip(ratio._fields, ratio, strict=True):
    if np.any(lr == np.inf):
      raise ValueError(
        f"target.{name} has mass where behaviour.{name} has none: KL(target || behaviour) is "
        "infinite, and no weight corrects for it"
      )
    if finite and np.any(lr == -np.inf):
      raise ValueError(
        f"target.{name} has no mass where behaviour.{name} has some: KL(behaviour || target) is "
        "infinite"
      )
  return behaviour, ratio


def checked_length(name: str, value: int) -> int:
  """A number of tokens: a whole number, at least 1.

  Args:
    name: what to call the argument in an error.
    value: the number.

  Returns:
    The same as an int.

  Raises:
    ValueError: it is not whole, or below 1.
  """
  checks.check_range(name, value, low=1)
  if int(value) != value:
    raise ValueError(f"{name} must be a whole number, got {value}")
  return int(value)


def _checked_chain(name: str, chain: MarkovChain) -> MarkovChain:
  """The same chain in float64, every row normalised to the last bit."""
  arrays = [np.asarray(x) for x in chain]
  shapes = [x.shape for x in arrays]
  if len(shapes[0]) != 1 or shapes[1] != shapes[0] * 2 or not shapes[0][0]:
    raise ValueError(f"{name} must hold [V] and [V, V] log-probs, got {shapes[0]} and {shapes[1]}")
  for field, x in zip(MarkovChain._fields, arrays, strict=True):
    with np.errstate(invalid="ignore", over="ignore"):
      error = np.max(np.abs(np.sum(np.exp(x.astype(np.float64)), axis=-1) - 1))
    # What rounding the log-probs to their dtype can do, and little more. (NaN fails as well.)
    if not error <= (1e-12 if x.dtype == np.float64 else 1e-6):
      raise ValueError(f"{name}.{field}: the probabilities of a row must sum to 1, off by {error}")
  return MarkovChain(*(_normalised(x.astype(np.float64)) for x in arrays))


def _normalised(logits: np.ndarray) -> np.ndarray:
  return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def _difference(target: MarkovChain, behaviour: MarkovChain) -> MarkovChain:
  """Log-ratios; 0 where neither chain has mass."""
  pairs = zip(target, behaviour, strict=True)
  with np.errstate(invalid="ignore"):
    return MarkovChain(*(np.where(np.isneginf(p) & np.isneginf(q), 0.0, p - q) for p, q in pairs))


def _kl_rate(visits: np.ndarray, ratio: MarkovChain) -> float:
  """KL from the frequency of each transition; sum of mu (rho - 1 - log rho), no term below 0."""
  return float(np.sum(visits * (np.expm1(ratio.transition) - ratio.transition)))
