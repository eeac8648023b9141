r"""The distribution of importance ratios of long responses, and the fraction a band clips.

log rho_T of a Markov chain takes exponentially many values, but its Fourier transform is a power
of a V x V matrix,

  E_mu[exp(i w log rho_T)] = v(w) M(w)^(T-1) 1,   M(w)[i, j] = mu[i, j] rho[i, j]^(i w),

by repeated squaring at any T; the transform of the mixture over all prefixes is a power of a
(V + 1) x (V + 1) matrix. What is inverted is the distribution of log rho + U, with an independent
U that is bounded, |U| <= tolerance, so that

  P(log rho <= x - tolerance) <= result <= P(log rho <= x + tolerance)

holds for every chain, lattice or not. The error has three further parts, all below 1e-11 in
practice: the sum over frequencies is cut where the transform of U (a Kaiser-Bessel density) is
beta / sinh(beta) = 2e-14; the line is wrapped onto a range outside of which lies at most 2e-15
(Chernoff's bound, evaluated); and rounding, about T times machine precision. A band edge with no
value of log rho within `tolerance` is then exact to these; where the distribution is as good as
continuous, moving an edge at random by U changes the result by about tolerance^2 / 70 times the
slope of the density.

In NumPy, float64 and complex128, as in `chains`. The cost is that of V^3 log(T) / resolution
multiplications, for every T: seconds at V = 5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxrl_lm import checks
from jaxrl_lm.exact import chains
from jaxrl_lm.exact.chains import MarkovChain

# log of the mass allowed beyond either end of the range; shape of the density of U: the first
# makes the wrapped line, the second the cut sum as exact as rounding.
_LOG_MASS_BEYOND = -34.5
_BETA = 36.0
_CHUNK = 4096  # frequencies at a time: the matrices stay in cache


class BandFractions(NamedTuple):
  """Where log-ratios lie; the three fractions sum to one.

  Attributes:
    below: fraction below the band, clipped low.
    inside: fraction inside.
    above: fraction above the band, clipped high.
    tolerance: in nats of the summed log-ratio, how far an edge may have been moved.
  """

  below: float
  inside: float
  above: float
  tolerance: float


def log_ratio_cdf(
  behaviour: MarkovChain, target: MarkovChain, length: int, points: Any, *, resolution: float = 1e-4
) -> tuple[np.ndarray, float]:
  r"""P_mu(log rho_T <= x), the distribution function of the sequence log-ratio.

  A value of log rho within `tolerance` of x counts in part, one at x itself by half; the module
  docstring states the error.

  Args:
    behaviour, target: chains over the same tokens.
    length: T, the number of tokens.
    points: [...] x in nats; -inf and inf are allowed.
    resolution: tolerance as a fraction of the range of log rho (all but 2e-15 of its mass, about
      17 standard deviations).

  Returns:
    Probabilities of the shape of the points, and the tolerance in nats.

  Raises:
    ValueError: shapes differ, a row does not sum to one, length < 1, the KL is infinite, or the
      resolution is not in (0, 0.1].

  Example:
    >>> half = MarkovChain(np.log([0.5, 0.5]), np.log([[0.5, 0.5], [0.5, 0.5]]))
    >>> bent = MarkovChain(np.log([0.6, 0.4]), np.log([[0.6, 0.4], [0.6, 0.4]]))
    >>> log_ratio_cdf(half, bent, 2, [-0.1, 0.1])[0].round(9)  # log 0.64, log 0.96, log 1.44
    array([0.25, 0.75])

  Reference: Feller 1971, "An introduction to probability theory", vol. 2, sections XV.3, XIX.5.
  """
  return _cdf(behaviour, target, length, points, resolution, prefixes=False)


def sequence_band(
  behaviour: MarkovChain,
  target: MarkovChain,
  length: int,
  low: float,
  high: float,
  *,
  resolution: float = 1e-4,
) -> BandFractions:
  r"""Fractions of responses whose log rho_T lies below, inside and above [low, high].

  A PPO band [0.8, 1.2] has the edges log 0.8 and log 1.2; for one that grows with sqrt(T),
  multiply them by sqrt(T).

  Args:
    behaviour, target: chains over the same tokens.
    length: T, the number of tokens.
    low, high: edges in nats; -inf and inf are allowed.
    resolution: as for `log_ratio_cdf`.

  Returns:
    The three fractions and the tolerance.

  Raises:
    ValueError: as for `log_ratio_cdf`, or low >= high.

  Example:
    >>> half = MarkovChain(np.log([0.5, 0.5]), np.log([[0.5, 0.5], [0.5, 0.5]]))
    >>> bent = MarkovChain(np.log([0.6, 0.4]), np.log([[0.6, 0.4], [0.6, 0.4]]))
    >>> np.round(sequence_band(half, bent, 2, np.log(0.8), np.log(1.2))[:3], 9)
    array([0.25, 0.5 , 0.25])

  Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7, on the ratio of the response.
  """
  return _band(behaviour, target, length, low, high, resolution, prefixes=False)


def geometric_band(
  behaviour: MarkovChain,
  target: MarkovChain,
  length: int,
  low: float,
  high: float,
  *,
  resolution: float = 1e-4,
) -> BandFractions:
  r"""Fractions of responses whose (1 / T) log rho_T lies below, inside and above [low, high].

  GSPO's ratio rho^(1/T): the same as `sequence_band` with edges T times as far. As T grows the
  ratio concentrates at exp(-KL per token), so that the band becomes a threshold on the KL.

  Args:
    behaviour, target: chains over the same tokens.
    length: T, the number of tokens.
    low, high: edges in nats per token; GSPO's are log(1 - 3e-4) and log(1 + 4e-4).
    resolution: as for `log_ratio_cdf`.

  Returns:
    The three fractions and the tolerance.

  Raises:
    ValueError: as for `log_ratio_cdf`, or low >= high.

  Example:
    >>> half = MarkovChain(np.log([0.5, 0.5]), np.log([[0.5, 0.5], [0.5, 0.5]]))
    >>> bent = MarkovChain(np.log([0.6, 0.4]), np.log([[0.6, 0.4], [0.6, 0.4]]))
    >>> np.round(geometric_band(half, bent, 2, -0.03, 0.03)[:3], 9)
    array([0.25, 0.5 , 0.25])

  Reference: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 7.
  """
  length = chains.checked_length("length", length)
  return sequence_band(
    behaviour, target, length, length * low, length * high, resolution=resolution
  )


def prefix_band(
  behaviour: MarkovChain,
  target: MarkovChain,
  length: int,
  low: float,
  high: float,
  *,
  resolution: float = 1e-4,
) -> BandFractions:
  r"""Expected fractions of tokens whose prefix log-ratio lies below, inside and above a band.

  (1 / T) sum_{t=1}^T P(log rho_t < low), and so on: the mixture over all prefixes of a response.

  Args:
    behaviour, target: chains over the same tokens.
    length: T, the number of tokens.
    low, high: edges in nats; -inf and inf are allowed.
    resolution: as for `log_ratio_cdf`, of the range of the mixture.

  Returns:
    The three fractions and the tolerance.

  Raises:
    ValueError: as for `log_ratio_cdf`, or low >= high.

  Example:
    >>> half = MarkovChain(np.log([0.5, 0.5]), np.log([[0.5, 0.5], [0.5, 0.5]]))
    >>> bent = MarkovChain(np.log([0.6, 0.4]), np.log([[0.6, 0.4], [0.6, 0.4]]))
    >>> np.round(prefix_band(half, bent, 2, np.log(0.7), np.log(1.3))[:3], 9)  # of T = 1: inside
    array([0.125, 0.75 , 0.125])

  Reference: Precup, Sutton & Singh 2000, per-decision importance sampling.
  """
  return _band(behaviour, target, length, low, high, resolution, prefixes=True)


def token_band(
  behaviour: MarkovChain, target: MarkovChain, length: int, low: float, high: float
) -> BandFractions:
  r"""Expected fractions of tokens whose own log-ratio lies below, inside and above a band.

  A finite sum over first tokens and transitions, each with its expected frequency under the
  behaviour; no tolerance, and an edge belongs to the band.

  Args:
    behaviour, target: chains over the same tokens.
    length: T, the number of tokens.
    low, high: edges in nats; -inf and inf are allowed.

  Returns:
    The three fractions; the tolerance is 0.

  Raises:
    ValueError: shapes differ, a row does not sum to one, length < 1, the KL is infinite, or
      low >= high.

  Example:
    >>> half = MarkovChain(np.log([0.5, 0.5]), np.log([[0.5, 0.5], [0.5, 0.5]]))
    >>> bent = MarkovChain(np.log([0.7, 0.3]), np.log([[0.5, 0.5], [0.7, 0.3]]))
    >>> np.round(token_band(half, bent, 3, np.log(0.8), np.log(1.2))[:3], 9)
    array([0.33333333, 0.33333333, 0.33333333])

  Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
  """
  behaviour, ratio = chains.log_ratios(behaviour, target, finite=True)
  length = chains.checked_length("length", length)
  _check_edges(low, high)
  initial, step = (np.exp(lp) for lp in behaviour)
  occupancy, last = np.zeros_like(initial), initial
  for _ in range(length - 1):
    occupancy, last = occupancy + last, last @ step
  frequency = np.vstack([initial, occupancy[:, None] * step]) / length
  log_ratio = np.vstack([ratio.initial, ratio.transition])
  below, above = (float(np.sum(frequency[x])) for x in (log_ratio < low, log_ratio > high))
  return BandFractions(below, 1.0 - below - above, above, 0.0)


def _band(
  behaviour: MarkovChain,
  target: MarkovChain,
  length: int,
  low: float,
  high: float,
  resolution: float,
  *,
  prefixes: bool,
) -> BandFractions:
  _check_edges(low, high)
  cdf, tolerance = _cdf(behaviour, target, length, [low, high], resolution, prefixes=prefixes)
  inside = max(float(cdf[1] - cdf[0]), 0.0)
  return BandFractions(float(cdf[0]), inside, float(1 - cdf[1]), tolerance)


def _check_edges(low: float, high: float) -> None:
  checks.check_range("low", low)
  checks.check_range("high", high, low=low, open_low=True)


def _cdf(
  behaviour: MarkovChain,
  target: MarkovChain,
  length: int,
  points: Any,
  resolution: float,
  *,
  prefixes: bool,
) -> tuple[np.ndarray, float]:
  """Distribution function of the log-ratio of all T tokens, or of the mixture over prefixes."""
  checks.check_range("resolution", resolution, low=0.0, high=0.1, open_low=True)
  length = chains.checked_length("length", length)
  behaviour, ratio = chains.log_ratios(behaviour, target, finite=True)
  low, high = _range(behaviour, ratio, length, prefixes)
  tolerance = resolution * (high - low)
  low, high = low - tolerance, high + tolerance
  x = np.clip(np.asarray(points, np.float64), low, high)

  # Density of the wrapped line = (1 / period) sum_k transform(w_k) exp(-i w_k x), integrated.
  period = high - low
  result = (x - low) / period
  number = int(np.ceil(_BETA * period / (2 * np.pi * tolerance)))
  for start in range(1, number + 1, _CHUNK):
    k = np.arange(start, min(start + _CHUNK, number + 1))
    frequency = 2 * np.pi * k / period
    value, log_scale = _transform(behaviour, ratio, length, 1j * frequency, prefixes)
    value = value * np.exp(log_scale) * _transform_of_blur(frequency * tolerance) / (np.pi * k)
    ends = np.exp(-1j * frequency * low) - np.exp(-1j * x[..., None] * frequency)
    result = result + (ends @ value).imag
  return np.clip(result, 0.0, 1.0), float(tolerance)


def _range(
  behaviour: MarkovChain, ratio: MarkovChain, length: int, prefixes: bool
) -> tuple[float, float]:
  """Chernoff: P(S >= x) <= E[exp(z S)] exp(-z x) for every z > 0, so take the best of many."""
  values = np.concatenate([ratio.initial, ratio.transition.ravel()])
  # Up to where exp(z lr) of two tokens differ by e^100: no entry of the matrix underflows.
  z = np.geomspace(1e-4, 100.0, 120) / max(np.ptp(values), 1e-9)
  ends = []
  for sign in (-1, 1):
    value, log_scale = _transform(behaviour, ratio, length, sign * z, prefixes)
    with np.errstate(divide="ignore"):
      bound = (np.log(value) + log_scale - _LOG_MASS_BEYOND) / z
    ends.append(sign * np.min(bound[value > 0]))
  return ends[0], ends[1]


def _transform(
  behaviour: MarkovChain, ratio: MarkovChain, length: int, z: np.ndarray, prefixes: bool
) -> tuple[np.ndarray, np.ndarray]:
  """E[exp(z log rho_T)], or its mean over the prefixes, as a number times exp(log_scale)."""
  first = behaviour.initial + z[:, None] * ratio.initial
  step = behaviour.transition + z[:, None, None] * ratio.transition
  first_scale = np.max(first.real, axis=-1)
  scale = np.max(step.real, axis=(-2, -1))
  first, step = np.exp(first - first_scale[:, None]), np.exp(step - scale[:, None, None])
  log_scale = first_scale + (length - 1) * scale
  if not prefixes:
    column = np.ones(first.shape + (1,), first.dtype)
    column, extra = _power_times(step, column, length - 1)
    return np.sum(first * column[..., 0], axis=-1), log_scale + extra
  # The last column of [[M, 1], [0, 1]]^T is sum_{t < T} M^t 1. With M divided by its scale, the
  # corner is 1 / scale, and the column that sum over scale^(T - 1).
  number = first.shape[-1]
  extended = np.ones((z.size, number + 1, number + 1), step.dtype)
  extended[:, :number, :number], extended[:, number, :number] = step, 0
  extended[:, number, number] = np.exp(-scale)
  column = np.zeros_like(extended[..., :1])
  column[:, number] = 1
  column, extra = _power_times(extended, column, length)
  return np.sum(first * column[:, :number, 0], axis=-1) / length, log_scale + extra


def _power_times(
  matrix: np.ndarray, column: np.ndarray, exponent: int
) -> tuple[np.ndarray, np.ndarray]:
  """matrix^exponent column [K, n, 1] by repeated squaring, as a column times exp(log_scale)."""
  column_scale = np.zeros(matrix.shape[0])
  matrix_scale = np.zeros(matrix.shape[0])
  while exponent:
    if exponent & 1:
      column, extra = _rescaled(matrix @ column)
      column_scale = column_scale + matrix_scale + extra
    exponent >>= 1
    if exponent:
      matrix, extra = _rescaled(matrix @ matrix)
      matrix_scale = 2 * matrix_scale + extra
  return column, column_scale


def _rescaled(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Largest entry 1, and the log of what it was: nothing over- or underflows."""
  largest = np.max(np.abs(x), axis=(-2, -1))
  largest = np.where(largest > 0, largest, 1.0)
  return x / largest[:, None, None], np.log(largest)


def _transform_of_blur(x: np.ndarray) -> np.ndarray:
  """Fourier transform, at frequency x / tolerance, of the Kaiser-Bessel density of U; 1 at 0."""
  root = np.sqrt(np.maximum(_BETA**2 - x**2, 0.0))
  # sinh(root) / root over sinh(beta) / beta, without overflow and with its limit 1 at root = 0.
  sinhc = np.where(root > 0, -np.expm1(-2 * root) / (2 * np.where(root > 0, root, 1.0)), 1.0)
  return sinhc * np.exp(root - _BETA) * 2 * _BETA / -np.expm1(-2 * _BETA)
