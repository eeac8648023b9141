"""The independent truth of critics, reward models and preference losses, as `reference.py`.

One pair, one response or one token at a time, in float64, as in the paper named above it, with
`math.exp` and `math.log`. These plain forms overflow at extreme log-ratios; tests of extremes need
other truths than this file.

Gradients are written by hand: `<loss>_slope` returns the derivatives in the differentiated
arguments, in their order.
"""

from __future__ import annotations

import math

import numpy as np

total = math.fsum
Row = list[float]
Pair = tuple[float, float]


def sigmoid(x: float) -> float:
  return 1.0 / (1.0 + math.exp(-x))


def nls(x: float) -> float:
  """-log sigmoid(x), whose derivative is -sigmoid(-x)."""
  return -math.log(sigmoid(x))


def bump(x: float) -> float:
  """Derivative of the sigmoid."""
  return sigmoid(x) * (1.0 - sigmoid(x))


def opposite(slope: float) -> Pair:
  """Of a loss of the margin: what chosen gains, rejected loses."""
  return slope, -slope


# ----------------------------------------------------------------------------------- log-ratios


def sequence_log_ratio(logprobs: Row, ref_logprobs: Row) -> float:
  return total(a - b for a, b in zip(logprobs, ref_logprobs))


def mean_log_ratio(logprobs: Row, ref_logprobs: Row) -> float:
  return sequence_log_ratio(logprobs, ref_logprobs) / len(logprobs) if logprobs else 0.0


# ------------------------------------------------------------------- losses of the margin alone


def dpo_loss(c: float, r: float, beta: float) -> float:
  """Rafailov et al. 2023, eq. 7."""
  return nls(beta * c - beta * r)


def dpo_loss_slope(c: float, r: float, beta: float) -> Pair:
  return opposite(-beta * sigmoid(beta * r - beta * c))


def conservative_dpo_loss(c: float, r: float, beta: float, label_smoothing: float) -> float:
  """The cross-entropy of the label (1 - e, e) (Mitchell 2023)."""
  e, p = label_smoothing, sigmoid(beta * (c - r))
  return -(1 - e) * math.log(p) - e * math.log(1 - p)


def conservative_dpo_loss_slope(c: float, r: float, beta: float, label_smoothing: float) -> Pair:
  return opposite(beta * (sigmoid(beta * (c - r)) - (1 - label_smoothing)))


def robust_dpo_loss(c: float, r: float, beta: float, label_smoothing: float) -> float:
  """The loss whose expectation over flipped labels is that of the true ones (rDPO)."""
  e = label_smoothing
  return ((1 - e) * dpo_loss(c, r, beta) - e * dpo_loss(r, c, beta)) / (1 - 2 * e)


def robust_dpo_loss_slope(c: float, r: float, beta: float, label_smoothing: float) -> Pair:
  e = label_smoothing
  own, flipped = dpo_loss_slope(c, r, beta)[0], -dpo_loss_slope(r, c, beta)[0]
  return opposite(((1 - e) * own - e * flipped) / (1 - 2 * e))


def hinge_dpo_loss(c: float, r: float, beta: float) -> float:
  return max(0.0, 1.0 - beta * (c - r))


def hinge_dpo_loss_slope(c: float, r: float, beta: float) -> Pair:
  return opposite(-beta if beta * (c - r) < 1 else 0.0)


def ipo_loss(c: float, r: float, beta: float) -> float:
  """Azar et al. 2023, eq. 17."""
  return (c - r - 1 / (2 * beta)) ** 2


def ipo_loss_slope(c: float, r: float, beta: float) -> Pair:
  return opposite(2 * (c - r - 1 / (2 * beta)))


def exo_loss(c: float, r: float, beta: float, label_smoothing: float) -> float:
  """Ji et al. 2024, eq. 16: sum over the two responses of q log(q / label)."""
  q = sigmoid(beta * (c - r))
  return sum(p * math.log(p / y) for p, y in ((q, 1 - label_smoothing), (1 - q, label_smoothing)))


def exo_loss_slope(c: float, r: float, beta: float, label_smoothing: float) -> Pair:
  x = beta * (c - r)
  return opposite(beta * bump(x) * (x - math.log((1 - label_smoothing) / label_smoothing)))


def discopop_loss(c: float, r: float, beta: float, tau: float) -> float:
  """Lu et al. 2024, eq. 5."""
  x = beta * (c - r)
  m = sigmoid(x / tau)
  return (1 - m) * nls(x) + m * math.exp(-x)


def discopop_loss_slope(c: float, r: float, beta: float, tau: float) -> Pair:
  x = beta * (c - r)
  m, switch = sigmoid(x / tau), bump(x / tau) / tau
  slope = -switch * nls(x) - (1 - m) * sigmoid(-x) + (switch - m) * math.exp(-x)
  return opposite(beta * slope)


# ------------------------------------------------------------------------------ anchored losses


def nca_loss(c: float, r: float, beta: float) -> float:
  """Chen et al. 2024: responses of weight 1 and 0, each 1/2 as noise."""
  noise = sum(math.log(1 - sigmoid(beta * s)) for s in (c, r))
  return -math.log(sigmoid(beta * c)) - noise / 2


def nca_loss_slope(c: float, r: float, beta: float) -> Pair:
  chosen = 1.5 * sigmoid(beta * c) - 1.0
  return beta * chosen, beta * sigmoid(beta * r) / 2


def bco_pair_loss(c: float, r: float, beta: float, delta: float) -> float:
  """Jung et al. 2024: logistic regression of "chosen" on the reward."""
  return -math.log(sigmoid(beta * c - delta)) - math.log(1 - sigmoid(beta * r - delta))


def bco_pair_loss_slope(c: float, r: float, beta: float, delta: float) -> Pair:
  return beta * (sigmoid(beta * c - delta) - 1), beta * sigmoid(beta * r - delta)


def sppo_loss(c: float, r: float, beta: float) -> float:
  """Wu et al. 2024 with win probabilities 1 and 0: (log-ratio - eta (P - 1/2))^2."""
  eta = 1 / beta
  return (c - eta * (1 - 0.5)) ** 2 + (r - eta * (0 - 0.5)) ** 2


def sppo_loss_slope(c: float, r: float, beta: float) -> Pair:
  return 2 * c - 1 / beta, 2 * r + 1 / beta


def apo_zero_loss(c: float, r: float, beta: float) -> float:
  """D'Oosterlinck et al. 2024, eq. 7."""
  return 1 - sigmoid(beta * c) + sigmoid(beta * r)


def apo_zero_loss_slope(c: float, r: float, beta: float) -> Pair:
  return -beta * bump(beta * c), beta * bump(beta * r)


def apo_down_loss(c: float, r: float, beta: float) -> float:
  """D'Oosterlinck et al. 2024, eq. 8."""
  return sigmoid(beta * c) + 1 - sigmoid(beta * (c - r))


def apo_down_loss_slope(c: float, r: float, beta: float) -> Pair:
  apart = bump(beta * (c - r))
  return beta * (bump(beta * c) - apart), beta * apart


# -------------------------------------------------------------------------- the batch is sorted


def _by_rank(xs: Row) -> list[int]:
  return sorted(range(len(xs)), key=lambda i: xs[i])


def aot_unpaired_loss(c: Row, r: Row, beta: float, label_smoothing: float) -> Row:
  """Quantile against quantile (Melnyk et al. 2024)."""
  ranks = zip(sorted(c), sorted(r))
  return [conservative_dpo_loss(x, y, beta, label_smoothing) for x, y in ranks]


def aot_unpaired_loss_vjp(
  c: Row, r: Row, beta: float, label_smoothing: float, cotangents: Row
) -> tuple[Row, Row]:
  chosen, rejected = [0.0] * len(c), [0.0] * len(r)
  for i, j, cotangent in zip(_by_rank(c), _by_rank(r), cotangents):
    up, down = conservative_dpo_loss_slope(c[i], r[j], beta, label_smoothing)
    chosen[i], rejected[j] = cotangent * up, cotangent * down
  return chosen, rejected


# --------------------------------------------------------------------------- labelled responses


def kto_baseline(mismatched: Row) -> float:
  return max(0.0, total(mismatched) / len(mismatched)) if mismatched else 0.0


def kto_loss(s: float, desirable: bool, beta: float, baseline: float, weights: Pair) -> float:
  """Ethayarajh et al. 2024: lambda - value, on either side of the reference point."""
  value = sigmoid(beta * (s - baseline)) if desirable else sigmoid(beta * (baseline - s))
  return weights[not desirable] * (1 - value)


def kto_loss_slope(s: float, desirable: bool, beta: float, baseline: float, weights: Pair) -> float:
  steepness = weights[not desirable] * beta * bump(beta * (s - baseline))
  return -steepness if desirable else steepness


def bco_loss(s: float, desirable: bool, beta: float, delta: float, weights: Pair) -> float:
  p = sigmoid(beta * s - delta)
  return -weights[not desirable] * math.log(p if desirable else 1 - p)


def bco_loss_slope(s: float, desirable: bool, beta: float, delta: float, weights: Pair) -> float:
  return weights[not desirable] * beta * (sigmoid(beta * s - delta) - desirable)


# --------------------------------------------------------------------------- without a reference


def simpo_loss(c: float, r: float, beta: float, gamma: float) -> float:
  """Meng et al. 2024, eq. 6."""
  return nls(beta * c - beta * r - gamma)


def simpo_loss_slope(c: float, r: float, beta: float, gamma: float) -> Pair:
  return opposite(-beta * sigmoid(gamma - beta * (c - r)))


def odds(logprob: float) -> float:
  """Hong et al. 2024, eq. 4."""
  return math.exp(logprob) / (1 - math.exp(logprob))


def orpo_loss(c: float, r: float) -> float:
  """Hong et al. 2024, eq. 7."""
  return nls(math.log(odds(c) / odds(r)))


def orpo_loss_slope(c: float, r: float) -> Pair:
  wrong = sigmoid(-math.log(odds(c) / odds(r)))
  return -wrong / (1 - math.exp(c)), wrong / (1 - math.exp(r))


# -------------------------------------------------------------------------------- reward models


def bradley_terry_loss(c: float, r: float, margin: float = 0.0) -> float:
  """Touvron et al. 2023, eq. 2."""
  return nls(c - r - margin)


def bradley_terry_loss_slope(c: float, r: float, margin: float = 0.0) -> Pair:
  return opposite(-sigmoid(margin - (c - r)))


def reward_centering_loss(c: float, r: float) -> float:
  return (c + r) ** 2


def reward_centering_loss_slope(c: float, r: float) -> Pair:
  return 2 * (c + r), 2 * (c + r)


# ------------------------------------------------------------------------------------ transforms


def alpha_divergence_score(u: float, alpha: float) -> float:
  """f'(ratio) of Wang et al. 2023, table 1."""
  ratio = math.exp(u)
  return (1 - ratio**-alpha) / alpha if alpha else math.log(ratio)


def alpha_divergence_score_slope(u: float, alpha: float) -> float:
  return math.exp(-alpha * u)


def jensen_shannon_score(u: float) -> float:
  ratio = math.exp(u)
  return math.log(2 * ratio / (1 + ratio))


def jensen_shannon_score_slope(u: float) -> float:
  return 1 / (1 + math.exp(u))


def length_desensitized_weights(length: int, shared: int, alpha: float) -> Row:
  return [1.0 if t < shared else alpha for t in range(length)]


def log_collision_probability(logits: Row, temperature: float) -> float:
  weights = [math.exp(z / temperature) for z in logits]
  return math.log(sum((w / total(weights)) ** 2 for w in weights))


def log_collision_probability_slope(logits: Row, temperature: float) -> Row:
  """2 (softmax of 2 z / T - softmax of z / T) / T."""
  once, twice = ([math.exp(k * z / temperature) for z in logits] for k in (1, 2))
  return [2 * (b / total(twice) - a / total(once)) / temperature for a, b in zip(once, twice)]


def wpo_weights(logprobs: Row, collision_logprobs: Row) -> float:
  """Zhou et al. 2024, eq. 2: the geometric mean of pi over its expectation under pi."""
  ratios = [math.exp(a) / math.exp(b) for a, b in zip(logprobs, collision_logprobs)]
  return math.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0


# --------------------------------------------------------------------------------------- critics


def bounded(value: float, old: float, clip: float) -> float:
  return min(max(value, old - clip), old + clip)


def value_loss(value: float, target: float) -> float:
  return (value - target) ** 2 / 2


def value_loss_slope(value: float, target: float) -> float:
  return value - target


def clipped_value_loss(value: float, old: float, target: float, clip: float) -> float:
  return max(value_loss(value, target), value_loss(bounded(value, old, clip), target))


def clipped(value: float, old: float, target: float, clip: float) -> bool:
  """The bounded value is the worse one."""
  return value_loss(bounded(value, old, clip), target) > value_loss(value, target)


def clipped_value_loss_slope(value: float, old: float, target: float, clip: float) -> float:
  return 0.0 if clipped(value, old, target, clip) else value - target


def huber(value: float, target: float, delta: float) -> float:
  e = abs(value - target)
  return e**2 / 2 if e <= delta else delta * (e - delta / 2)


def huber_slope(value: float, target: float, delta: float) -> float:
  return min(max(value - target, -delta), delta)


def clipped_huber(value: float, old: float, target: float, delta: float, clip: float) -> float:
  return max(huber(value, target, delta), huber(bounded(value, old, clip), target, delta))


def clipped_huber_slope(
  value: float, old: float, target: float, delta: float, clip: float
) -> float:
  return 0.0 if clipped(value, old, target, clip) else huber_slope(value, target, delta)


def explained_variance(values: Row, targets: Row) -> float:
  errors = [t - v for v, t in zip(values, targets)]
  return 1 - float(np.var(errors)) / float(np.var(targets))
