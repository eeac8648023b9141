r"""Gradient estimators on long responses: a counting language, by dynamic programming.

Two tokens, a and b; T tokens per response; a policy that sees how many a's stand before token t,
s_t = (t, count), as one logit of "a" per state. The reward depends on the first token and on the
final count. Responses are sampled from a behaviour mu, and the one-sample REINFORCE estimator
of the gradient of J = E_pi[R] at the target pi is

  g = (R - baseline) sum_t w_t grad log pi(y_t | s_t),
  w_t = prod_{u < t} r_u^before  r_t^at  prod_{u > t} r_u^after,  r_u = pi / mu of token u

whose exponents say which ratio it is: `UNWEIGHTED`, `TOKEN`, `PREFIX`, `SEQUENCE`, `geometric(T)`.
Its mean and variance are sums over the T^2 / 2 states, not over the 2^T responses. All weights are
carried as logs: the second moment of a sequence ratio passes e^700.

Only the sequence ratio is unbiased whatever the reward. The token ratio is unbiased where the first
token decides (`first_a_reward`); elsewhere it keeps the bias of visiting states as mu does, and of
what mu makes of the rest of the response. The prefix ratio keeps only the latter.

In NumPy, float64, as in `chains`; a policy that shares parameters is differentiated by JAX, in
the dtype it computes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxrl_lm import checks
from jaxrl_lm.exact import chains


class RatioExponents(NamedTuple):
  """Which ratios weigh the score of token t, and to which power.

  Attributes:
    before: exponent of the ratios of tokens before t.
    at: exponent of the ratio of token t.
    after: exponent of the ratios of tokens after t.
  """

  before: float
  at: float
  after: float


UNWEIGHTED = RatioExponents(0.0, 0.0, 0.0)
TOKEN = RatioExponents(0.0, 1.0, 0.0)
PREFIX = RatioExponents(1.0, 1.0, 0.0)
SEQUENCE = RatioExponents(1.0, 1.0, 1.0)


class GradientMoments(NamedTuple):
  """Exact mean and variance of a one-sample gradient estimator, beside the gradient.

  Attributes:
    mean: E[g], of the shape of the parameters.
    target: the exact gradient of J at the target policy, same shape.
    log_variance: log of the total variance, E|g|^2 - |E g|^2.
  """

  mean: np.ndarray
  target: np.ndarray
  log_variance: float

  @property
  def bias(self) -> float:
    """|E[g] - target|."""
    return float(np.linalg.norm(self.mean - self.target))

  @property
  def relative_bias(self) -> float:
    """|E[g] - target| / |target|."""
    return self.bias / float(np.linalg.norm(self.target))

  def log_mse(self, n: Any = 1) -> np.ndarray:
    """Log of bias^2 + variance / n, the squared error of the average over n samples.

    Args:
      n: [...] number of samples.

    Returns:
      [...] logs.
    """
    return np.logaddexp(2 * _log(self.bias), self.log_variance - np.log(n))

  def log_crossover(self, other: GradientMoments) -> float:
    """Log of n* = (variance - other variance) / (other bias^2 - bias^2).

    A bias below 1e-12 of the gradient is rounding, and counts as none.

    Args:
      other: the estimator to compare with, of the same target.

    Returns:
      log n*, beyond which this estimator has the smaller squared error; -inf if it has it for
      every n, inf if for no large n.
    """
    bias, other_bias = (x.bias * (x.relative_bias > 1e-12) for x in (self, other))
    if bias >= other_bias:
      always = bias == other_bias and self.log_variance < other.log_variance
      return -np.inf if always else np.inf
    extra = _log_difference(self.log_variance, other.log_variance)
    return extra - _log_difference(2 * _log(other_bias), 2 * _log(bias))


def geometric(length: int) -> RatioExponents:
  r"""The length-normalised ratio rho^(1 / T) as a weight on every token.

  Args:
    length: T, the number of tokens.

  Returns:
    Exponents 1 / T throughout.

  Raises:
    ValueError: length < 1.

  Example:
    >>> geometric(4)
    RatioExponents(before=0.25, at=0.25, after=0.25)

  Reference: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 7.
  """
  exponent = 1.0 / chains.checked_length("length", length)
  return RatioExponents(exponent, exponent, exponent)


def majority_reward(length: int) -> np.ndarray:
  """1 if more than half of the tokens are a's.

  Args:
    length: T, the number of tokens.

  Returns:
    [2, T + 1] rewards, indexed by whether the first token is a, and by the number of a's.

  Raises:
    ValueError: length < 1.

  Example:
    >>> majority_reward(3)
    array([[0., 0., 1., 1.],
           [0., 0., 1., 1.]])
  """
  length = chains.checked_length("length", length)
  return np.tile(np.where(2 * np.arange(length + 1) > length, 1.0, 0.0), (2, 1))


def first_a_reward(length: int) -> np.ndarray:
  """1 if the first token is a; all other tokens are filler.

  Args:
    length: T, the number of tokens.

  Returns:
    [2, T + 1] rewards, indexed by whether the first token is a, and by the number of a's.

  Raises:
    ValueError: length < 1.

  Example:
    >>> first_a_reward(2)
    array([[0., 0., 0.],
           [1., 1., 1.]])
  """
  length = chains.checked_length("length", length)
  return np.repeat([[0.0], [1.0]], length + 1, axis=1)


def table_gradient_moments(
  logits: Any, behaviour_logits: Any, reward: Any, weights: RatioExponents, *, baseline: float = 0.0
) -> GradientMoments:
  r"""Bias and variance of the estimator when every state has a parameter of its own: its logit.

  The scores of different states are orthogonal, so forward sums of the ratios before a token and
  backward sums of ratio and reward after it are all there is to it. T = 512 takes about a second.

  Args:
    logits: [T, T + 1] of token a under the target, by position and number of a's before it;
      entries with more a's than tokens are not read. The parameters.
    behaviour_logits: [T, T + 1] of token a under the policy that samples.
    reward: [2, T + 1], indexed by whether the first token is a, and by the final number of a's.
    weights: exponents of the ratios.
    baseline: constant subtracted from the reward.

  Returns:
    Mean and target [T, T + 1], 0 where not read, and the log of the total variance.

  Raises:
    ValueError: shapes do not match, or a logit that is read, or a reward, is not finite (an
      infinite one makes the KL infinite).

  Example:
    >>> logits, behaviour = np.full((2, 3), 0.5), np.zeros((2, 3))
    >>> moments = table_gradient_moments(logits, behaviour, majority_reward(2), TOKEN)
    >>> round(moments.relative_bias, 4), round(moments.log_variance, 4)
    (0.1967, -2.4908)

  Reference: Precup, Sutton & Singh 2000, importance sampling per trajectory and per decision.
  """
  policies = _checked_policies(logits, behaviour_logits)
  reward = _checked_reward(reward, policies)
  checks.check_range("baseline", baseline)
  target, _ = _table_moments(_Policies(policies.target, policies.target), reward, UNWEIGHTED)
  mean, log_second = _table_moments(policies, reward - float(baseline), weights)
  return GradientMoments(mean, target, _log_variance(mean, log_second))


def shared_gradient_moments(
  policy: Callable[[Any], jax.Array],
  params: Any,
  behaviour_logits: Any,
  reward: Any,
  weights: RatioExponents,
  *,
  baseline: float = 0.0,
) -> GradientMoments:
  r"""Bias and variance of the estimator when the states share parameters.

  Scores of different states are not orthogonal. With G_t the weighted score accumulated before
  token t, E[1], E[G_t] and E[|G_t|^2] given the state are carried forward, under the ratios that
  each still has to be multiplied with. Time and memory grow as T^2 times the number of parameters.

  Args:
    policy: maps `params` to the target's logits [T, T + 1], as for `table_gradient_moments`.
    params: pytree of arrays, one dtype.
    behaviour_logits: [T, T + 1] of token a under the policy that samples.
    reward: [2, T + 1], indexed by whether the first token is a, and by the final number of a's.
    weights: exponents of the ratios.
    baseline: constant subtracted from the reward.

  Returns:
    Mean and target [D], flattened as `ravel_pytree` does, and the log of the total variance.

  Raises:
    ValueError: shapes do not match, or a logit that is read, or a reward, is not finite.

  Example:
    >>> def tilt(params):  # one logit for all states
    ...   return jax.numpy.full((2, 3), params["tilt"])
    >>> moments = shared_gradient_moments(
    ...   tilt, {"tilt": 0.5}, np.zeros((2, 3)), majority_reward(2), SEQUENCE
    ... )
    >>> moments.target.round(4), round(moments.relative_bias, 4)
    (array([0.2926]), 0.0)

  Reference: Precup, Sutton & Singh 2000, importance sampling per trajectory and per decision.
  """
  flat, unravel = ravel_pytree(params)
  logits = policy(params)
  table = table_gradient_moments(logits, behaviour_logits, reward, weights, baseline=baseline)
  jacobian = np.asarray(jax.jit(jax.jacfwd(lambda x: policy(unravel(x))))(flat), np.float64)
  mean, target = (np.einsum("tcd,tc->d", jacobian, x) for x in (table.mean, table.target))
  policies = _checked_policies(logits, behaviour_logits)
  gain = _checked_reward(reward, policies) - float(baseline)
  log_second = _shared_log_second_moment(policies, jacobian, gain, weights)
  return GradientMoments(mean, target, _log_variance(mean, log_second))


class _Policies(NamedTuple):
  """Log-probs [2, T, T + 1] of the tokens b and a in every state, under mu and under pi."""

  behaviour: np.ndarray
  target: np.ndarray

  def step(self, t: int, exponent: float) -> np.ndarray:
    """log of mu r^exponent of each token at t: [2 tokens, 2 first tokens, t + 1 counts]."""
    mu, pi = self.behaviour[:, t, : t + 1], self.target[:, t, : t + 1]
    step = np.repeat((mu + exponent * (pi - mu))[:, None], 2, axis=1)
    if t == 0:  # the first token is the first token
      step[0, 1] = step[1, 0] = -np.inf
    return step

  def log_scores(self, t: int) -> np.ndarray:
    """log |d log pi(token) / d logit|, [2 tokens, t + 1 counts]; the sign is that of the token."""
    return self.target[::-1, t, : t + 1]


_SIGN_OF_SCORE = (-1.0, 1.0)  # of the tokens b and a: -p(a) and 1 - p(a)


def _arrived(log_terms: np.ndarray) -> np.ndarray:
  """Logs of mass per token and state at t, [2, 2, t + 1] -> per state at t + 1, [2, t + 2]."""
  b, a = log_terms
  result = np.full((2, b.shape[-1] + 1), -np.inf)
  result[:, :-1] = b
  result[:, 1:] = np.logaddexp(result[:, 1:], a)
  return result


def _forward(policies: _Policies, exponent: float) -> list[np.ndarray]:
  """log E[1(state) product of earlier r^exponent], a [2, t + 1] for every t."""
  log_mass = [np.zeros((2, 1))]
  for t in range(policies.target.shape[1] - 1):
    log_mass.append(_arrived(log_mass[-1] + policies.step(t, exponent)))
  return log_mass


def _table_moments(
  policies: _Policies, gain: np.ndarray, weights: RatioExponents
) -> tuple[np.ndarray, float]:
  """Mean [T, T + 1] and log E|g|^2 of the estimator, by one pass from the end to the start."""
  once, twice = (_forward(policies, n * weights.before) for n in (1, 2))
  # What the later tokens are worth: the positive and the negative part of the gain, its square.
  worth = [_log(x) for x in (np.maximum(gain, 0), np.maximum(-gain, 0), gain**2)]
  powers = (weights.after, weights.after, 2 * weights.after)
  length = policies.target.shape[1]
  mean, log_second = np.zeros((length, length + 1)), -np.inf
  for t in reversed(range(length)):
    # Token b leaves the count as it is, token a raises it by one.
    plus, minus, square = ahead = [np.stack([x[:, :-1], x[:, 1:]]) for x in worth]
    reach = once[t] + policies.step(t, weights.at)
    value = np.sum(np.exp(reach + plus) - np.exp(reach + minus), axis=1)
    scores = np.exp(policies.log_scores(t))
    mean[t, : t + 1] = scores[1] * value[1] - scores[0] * value[0]
    reach = twice[t] + policies.step(t, 2 * weights.at) + 2 * policies.log_scores(t)[:, None]
    log_second = np.logaddexp(log_second, _log_sum(reach + square))
    steps = {power: policies.step(t, power) for power in set(powers)}
    worth = [np.logaddexp(*(steps[power] + x)) for power, x in zip(powers, ahead, strict=True)]
  return mean, float(log_second)


def _shared_log_second_moment(
  policies: _Policies, jacobian: np.ndarray, gain: np.ndarray, weights: RatioExponents
) -> float:
  """log E|g|^2 with the Jacobian [T, T + 1, D] of the logits.

  Of two tokens u < v, the ratios before u have the exponent 2 before, that of u has at + before,
  those between after + before, that of v after + at, those after v 2 after.
  """
  before, at, after = weights
  # Per state: log E[1] under ratios^(2 before), and over that mass E[G] and E[|G|^2].
  log_mass, second = np.zeros((2, 1)), np.zeros((2, 1))
  first = np.zeros((2, 1, jacobian.shape[-1]))
  for t in range(jacobian.shape[0]):
    rows = jacobian[t, : t + 1]
    norm, cross = np.sum(rows**2, axis=-1), np.einsum("fcd,cd->fc", first, rows)
    new_mass = _arrived(log_mass + policies.step(t, 2 * before))
    divisor = np.where(np.isneginf(new_mass), 0.0, new_mass)
    new_first, new_second = np.zeros((2, t + 2, rows.shape[-1])), np.zeros((2, t + 2))
    powers = {after + before, at + before, 2 * after, at + after, 2 * at}
    steps = {power: policies.step(t, power) for power in powers}
    for token, sign in enumerate(_SIGN_OF_SCORE):
      to = slice(token, token + t + 1)
      score = sign * np.exp(policies.log_scores(t)[token])
      # The share of the new state's mass that came from here, with another power of the ratio.
      share = {k: np.exp(log_mass + x[token] - divisor[:, to]) for k, x in steps.items()}
      new_first[:, to] += share[after + before][..., None] * first
      new_first[:, to] += (share[at + before] * score)[..., None] * rows
      new_second[:, to] += share[2 * after] * second + 2 * share[at + after] * score * cross
      new_second[:, to] += share[2 * at] * score**2 * norm
    log_mass, first, second = new_mass, new_first, new_second
  return _log_sum(log_mass + _log(np.maximum(second, 0.0)) + 2 * _log(np.abs(gain)))


def _log(x: Any) -> Any:
  """log, without a warning that the log of 0 is -inf."""
  with np.errstate(divide="ignore"):
    return np.log(x)


def _log_sum(x: np.ndarray) -> float:
  return float(np.logaddexp.reduce(x, axis=None))


def _log_variance(mean: np.ndarray, log_second: float) -> float:
  return _log_difference(log_second, float(_log(np.sum(mean**2))))


def _log_difference(larger: float, smaller: float) -> float:
  """log(e^larger - e^smaller); -inf where nothing is left."""
  if smaller >= larger:
    return -np.inf
  return float(larger + np.log(-np.expm1(smaller - larger)))


def _checked_policies(logits: Any, behaviour_logits: Any) -> _Policies:
  checks.check_same_shape(logits=logits, behaviour_logits=behaviour_logits)
  logprobs = []
  for name, x in (("behaviour_logits", behaviour_logits), ("logits", logits)):
    x = np.asarray(x, np.float64)
    if x.ndim != 2 or x.shape[0] < 1 or x.shape[1] != x.shape[0] + 1:
      raise ValueError(f"{name} must be [T, T + 1] with T >= 1, got shape {x.shape}")
    read = np.tri(*x.shape) > 0
    if not np.all(np.isfinite(x[read])):
      raise ValueError(f"{name} must be finite for up to t a's: without it the KL is infinite")
    x = np.where(read, x, 0.0)
    logprobs.append(-np.logaddexp(0.0, np.stack([x, -x])))
  return _Policies(*logprobs)


def _checked_reward(reward: Any, policies: _Policies) -> np.ndarray:
  reward = np.asarray(reward, np.float64)
  if reward.shape != (2, policies.target.shape[-1]) or not np.all(np.isfinite(reward)):
    shape = (2, policies.target.shape[-1])
    raise ValueError(f"reward must be finite, of shape {shape}, got shape {reward.shape}")
  return reward
