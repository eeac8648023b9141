"""The independent truth: what the papers say, in float64, on ragged Python lists.

A row is a list of only the tokens that count, so there is no mask and nothing to forget: no
padding, no prompt, no tool output. A batch is a list of rows, a group a list of rewards.
Everything is written as in the paper named above it (arXiv number, equation), with loops,
`math.exp`, `min` and `max`. These plain forms overflow at extreme log-ratios (`math.exp` raises
above 709); tests of extremes need other truths than this file.

Gradients are written by hand, never by autodiff:

* `<surrogate>_slope`: d gain_t / d log_ratio_t, that is A times the detached coefficient
  of the score-form loss -A sg(c) log pi, to which every policy-gradient objective reduces;
* `<level>_vjp`: the transposed derivative of a level, cotangents of its outputs -> of its inputs;
* `<estimator>_slope`: d value / d logprob of a KL estimator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Row = list[float]
total = math.fsum


def mean(xs: Row) -> float:
  return total(xs) / len(xs)


def variance(xs: Row, ddof: int) -> float:
  center = mean(xs)
  return total([(x - center) ** 2 for x in xs]) / (len(xs) - ddof)


def flat(batch: list) -> list:
  return [x for row in batch for x in row]


def sign(x: float) -> float:
  return (x > 0) - (x < 0)


# ------------------------------------------------------------------------------------- logprobs


def log_softmax(logits: Row, temperature: float = 1.0) -> Row:
  """log p(v) = z_v / T - log sum_u exp(z_u / T)."""
  z = [x / temperature for x in logits]
  normalizer = math.log(total([math.exp(x) for x in z]))
  return [x - normalizer for x in z]


def token_logprobs(logits: list[Row], tokens: list[int], temperature: float = 1.0) -> Row:
  return [log_softmax(z, temperature)[y] for z, y in zip(logits, tokens)]


def next_token_logprobs(logits: list[Row], tokens: list[int], temperature: float = 1.0) -> Row:
  """Position t - 1 of a causal model predicts token t; the first token is given, not scored."""
  scored = token_logprobs(logits[:-1], tokens[1:], temperature)
  return [0.0] + scored if tokens else []


def token_logprobs_slope(logits: list[Row], tokens: list[int], temperature: float = 1.0):
  """d log p(y) / d z_v = (1{v = y} - p(v)) / T."""
  return [
    [((v == y) - math.exp(lp)) / temperature for v, lp in enumerate(log_softmax(z, temperature))]
    for z, y in zip(logits, tokens)
  ]


def token_entropy(logits: list[Row], temperature: float = 1.0) -> Row:
  """H = -sum_v p(v) log p(v) (Shannon 1948)."""
  return [-total([math.exp(lp) * lp for lp in log_softmax(z, temperature)]) for z in logits]


def token_entropy_slope(logits: list[Row], temperature: float = 1.0) -> list[Row]:
  """d H / d z_v = -p(v) (log p(v) + H) / T."""
  slopes = []
  for z, entropy in zip(logits, token_entropy(logits, temperature)):
    logps = log_softmax(z, temperature)
    slopes.append([-math.exp(lp) * (lp + entropy) / temperature for lp in logps])
  return slopes


def sequence_logprob(logprobs: Row) -> float:
  return total(logprobs)


def mean_logprob(logprobs: Row) -> float:
  return mean(logprobs) if logprobs else 0.0


# ---------------------------------------------------------------------------------------- masks


def masked_mean(xs: Row) -> float:
  return mean(xs) if xs else 0.0


def response_mask(tokens: list[int], stop_tokens: list[int]) -> list[bool]:
  """True up to and including the first stop token: the stop was chosen by the policy."""
  counts, stopped = [], False
  for token in tokens:
    counts.append(not stopped)
    stopped = stopped or token in stop_tokens
  return counts


def is_finished(tokens: list[int], stop_tokens: list[int]) -> bool:
  return any(token in stop_tokens for token in tokens)


def segment_total(xs: Row) -> Row:
  return [total(xs)] * len(xs)


def segment_mean(xs: Row) -> Row:
  return [total(xs) / len(xs)] * len(xs) if xs else []


def segment_max(xs: Row) -> Row:
  return [max(xs)] * len(xs) if xs else []


def segment_max_vjp(xs: Row, cotangents: Row) -> Row:
  """The largest token alone moves the maximum."""
  return [total(cotangents) if x == max(xs) else 0.0 for x in xs]


def segment_count(xs: Row) -> Row:
  return [float(len(xs))] * len(xs)


# --------------------------------------------------------------------------------- loss_weights
# loss = -sum(weight * gain). B rows of lengths n_i, V of them not empty, N tokens in all.


def _rows_counted(batch: list[Row], count_empty: bool) -> int:
  return len(batch) if count_empty else sum(1 for row in batch if row)


def _per_row(batch: list[Row], weight: Callable[[int], float]) -> list[Row]:
  return [[weight(len(row))] * len(row) if row else [] for row in batch]


def token_sum(batch: list[Row]) -> list[Row]:
  return _per_row(batch, lambda n: 1.0)


def token_mean(batch: list[Row]) -> list[Row]:
  """DAPO, arXiv:2503.14476 eq. 8: 1 / sum_i |o_i|."""
  return _per_row(batch, lambda n: 1.0 / len(flat(batch)))


def sequence_mean(batch: list[Row], count_empty: bool = False) -> list[Row]:
  """GRPO, arXiv:2402.03300 eq. 3: 1/G sum_i 1/|o_i| sum_t."""
  rows = _rows_counted(batch, count_empty)
  return _per_row(batch, lambda n: 1.0 / (rows * n))


def sequence_sum(batch: list[Row], count_empty: bool = False) -> list[Row]:
  """The log-probability of the whole response, arXiv:2402.14740 eq. 6: 1/k sum_i sum_t."""
  rows = _rows_counted(batch, count_empty)
  return _per_row(batch, lambda n: 1.0 / rows)


def constant_length(batch: list[Row], length: float, count_empty: bool = False) -> list[Row]:
  """Dr. GRPO, arXiv:2503.20783 section 3.2 and its listing 1: the divisor is a constant."""
  rows = _rows_counted(batch, count_empty)
  return _per_row(batch, lambda n: 1.0 / (rows * length))


def length_power(batch: list[Row], alpha: float, count_empty: bool = False) -> list[Row]:
  """|y|^-alpha per sequence: alpha = 0 is sequence_sum, alpha = 1 is sequence_mean."""
  rows = _rows_counted(batch, count_empty)
  return _per_row(batch, lambda n: 1.0 / (rows * n**alpha))


def group_token_mean(groups: list[list[Row]], count_empty: bool = False) -> list[list[Row]]:
  """DAPO as its eq. 8 reads with the expectation over prompts outside: mean over groups."""
  counted = len(groups) if count_empty else sum(1 for group in groups if flat(group))
  return [
    [[1.0 / (counted * len(flat(group)))] * len(row) if row else [] for row in group]
    for group in groups
  ]


# --------------------------------------------------------------------------------------- ratios


def token_log_ratio(logprobs: Row, old_logprobs: Row) -> Row:
  """log r_t = log pi(y_t) - log pi_old(y_t)."""
  return [new - old for new, old in zip(logprobs, old_logprobs)]


def per_token(d: Row) -> Row:
  return list(d)


def per_token_vjp(cotangents: Row) -> Row:
  return list(cotangents)


def per_prefix(d: Row) -> Row:
  """log prod_{u <= t} r_u: the importance weight of token t and of what led to it."""
  return [total(d[: t + 1]) for t in range(len(d))]


def per_prefix_vjp(cotangents: Row) -> Row:
  """Token u is in the prefix of every t >= u."""
  return [total(cotangents[u:]) for u in range(len(cotangents))]


def per_sequence(d: Row) -> Row:
  """log pi(y) / pi_old(y)."""
  return [total(d)] * len(d)


def per_sequence_vjp(cotangents: Row) -> Row:
  return [total(cotangents)] * len(cotangents)


def per_sequence_geometric(d: Row) -> Row:
  """GSPO, arXiv:2507.18071 eq. 7: s_i = (pi(y) / pi_old(y))^(1 / |y|)."""
  return [mean(d)] * len(d) if d else []


def per_sequence_geometric_vjp(cotangents: Row) -> Row:
  return [mean(cotangents)] * len(cotangents) if cotangents else []


def clamped(values: Row, low: float, high: float) -> Row:
  return [min(max(x, low), high) for x in values]


def clamped_cotangents(values: Row, cotangents: Row, low: float, high: float) -> Row:
  """What the clamp lets through to the level below it: nothing outside the band."""
  return [c if low < x < high else 0.0 for x, c in zip(values, cotangents)]


# ----------------------------------------------------------------------------------- surrogates
# One token: d = log ratio, a = advantage, score = log pi of the token where the value is in score
# form (it is d when the caller gives no old log-probs). Gains are maximised. `_slope` functions
# return d gain / d log_ratio with the detached parts held fixed.


def reinforce(d, a, score):
  """Williams 1992; for language models arXiv:2402.14740 eq. 6: A log pi."""
  return a * score


def reinforce_slope(d, a, score):
  return a


def importance_weighted(d, a, score):
  """The conservative policy iteration objective, arXiv:1707.06347 eq. 6: r A."""
  return math.exp(d) * a


def importance_weighted_slope(d, a, score):
  return math.exp(d) * a


def ppo_clip(d, a, score, clip_low=0.2, clip_high=0.2):
  """arXiv:1707.06347 eq. 7: min(r A, clip(r, 1 - eps, 1 + eps) A)."""
  r = math.exp(d)
  return min(r * a, min(max(r, 1 - clip_low), 1 + clip_high) * a)


def _ppo_keeps(d, a, clip_low, clip_high):
  r = math.exp(d)
  return not (a > 0 and r > 1 + clip_high) and not (a < 0 and r < 1 - clip_low)


def ppo_clip_slope(d, a, score, clip_low=0.2, clip_high=0.2):
  return math.exp(d) * a if _ppo_keeps(d, a, clip_low, clip_high) else 0.0


def dual_clip(d, a, score, clip_low=0.2, clip_high=0.2, ratio_cap=3.0):
  """arXiv:1912.09729 section on dual-clip PPO: max(ppo, c A) where A < 0."""
  gain = ppo_clip(d, a, score, clip_low, clip_high)
  return max(gain, ratio_cap * a) if a < 0 else gain


def dual_clip_slope(d, a, score, clip_low=0.2, clip_high=0.2, ratio_cap=3.0):
  capped = a < 0 and math.exp(d) > ratio_cap
  return 0.0 if capped else ppo_clip_slope(d, a, score, clip_low, clip_high)


def cispo(d, a, score, clip_low=1.0, clip_high=4.0):
  """MiniMax-M1, arXiv:2506.13585 eq. 4 and 5: sg(clip(r, 1 - low, 1 + high)) A log pi."""
  return min(max(math.exp(d), 1 - clip_low), 1 + clip_high) * a * score


def cispo_slope(d, a, score, clip_low=1.0, clip_high=4.0):
  return min(max(math.exp(d), 1 - clip_low), 1 + clip_high) * a


def _sigmoid(x):
  return 1 / (1 + math.exp(-x))


def sapo(d, a, score, tau_pos=1.0, tau_neg=1.05):
  """arXiv:2511.20347: f(r) A with the gate f(r) = 4 / tau sigmoid(tau (r - 1))."""
  tau = tau_pos if a > 0 else tau_neg
  return 4 / tau * _sigmoid(tau * (math.exp(d) - 1)) * a


def sapo_slope(d, a, score, tau_pos=1.0, tau_neg=1.05):
  """d f / d log r = 4 sigmoid(x) sigmoid(-x) r, x = tau (r - 1): 1 on-policy."""
  x = (tau_pos if a > 0 else tau_neg) * (math.exp(d) - 1)
  return 4 * _sigmoid(x) * _sigmoid(-x) * math.exp(d) * a


def _vespo_weight(d, a, k_pos, lam_pos, k_neg, lam_neg):
  k, lam = (k_pos, lam_pos) if a >= 0 else (k_neg, lam_neg)
  w = math.exp(d)
  return w**k * math.exp(lam * (1 - w))


def vespo(d, a, score, k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0):
  """arXiv:2602.10693 eq. 20: sg(W^k exp(lam (1 - W))) A log pi, W the sequence's ratio."""
  return _vespo_weight(d, a, k_pos, lam_pos, k_neg, lam_neg) * a * score


def vespo_slope(d, a, score, k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0):
  return _vespo_weight(d, a, k_pos, lam_pos, k_neg, lam_neg) * a


def topr(d, a, score):
  """arXiv:2503.14286: no weight on positives, sg(clip(r, 0, 1)) on the others."""
  return (1.0 if a > 0 else min(math.exp(d), 1.0)) * a * score


def topr_slope(d, a, score):
  return (1.0 if a > 0 else min(math.exp(d), 1.0)) * a


def _dppo_tv_weight(d, a, score, clip_low, clip_high, ratio_cap):
  p, p_old = math.exp(score), math.exp(score - d)
  keep = p - p_old <= clip_high if a > 0 else p - p_old >= -clip_low
  return min(math.exp(d), ratio_cap) if keep else 0.0


def dppo_tv(d, a, score, clip_low=0.2, clip_high=0.2, ratio_cap=20.0):
  """arXiv:2602.04879, binary total variation: mask by the shift of the token's probability."""
  return _dppo_tv_weight(d, a, score, clip_low, clip_high, ratio_cap) * a * score


def dppo_tv_slope(d, a, score, clip_low=0.2, clip_high=0.2, ratio_cap=20.0):
  return _dppo_tv_weight(d, a, score, clip_low, clip_high, ratio_cap) * a


def _dppo_kl_weight(d, a, score, clip_low, clip_high, ratio_cap):
  p, p_old = math.exp(score), math.exp(score - d)
  kl = p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old) / (1 - p))
  keep = (kl <= clip_high or p <= p_old) if a > 0 else (kl <= clip_low or p >= p_old)
  return min(math.exp(d), ratio_cap) if keep else 0.0


def dppo_kl(d, a, score, clip_low=0.05, clip_high=0.05, ratio_cap=20.0):
  """arXiv:2602.04879, binary KL(p_old || p) of {the token, any other token}."""
  return _dppo_kl_weight(d, a, score, clip_low, clip_high, ratio_cap) * a * score


def dppo_kl_slope(d, a, score, clip_low=0.05, clip_high=0.05, ratio_cap=20.0):
  return _dppo_kl_weight(d, a, score, clip_low, clip_high, ratio_cap) * a


def dro(d, a, score, beta):
  """arXiv:2405.19107, and Kimi k1.5, arXiv:2501.12599 eq. 3: A log pi - beta / 2 (log r)^2."""
  return a * score - beta / 2 * d**2


def dro_slope(d, a, score, beta):
  return a - beta * d


def clip_cov(d, a, score, selected, clip_low=0.2, clip_high=0.2):
  """arXiv:2505.22617 section 4, Clip-Cov: the selected tokens leave the PPO objective."""
  return 0.0 if selected else ppo_clip(d, a, score, clip_low, clip_high)


def clip_cov_slope(d, a, score, selected, clip_low=0.2, clip_high=0.2):
  return 0.0 if selected else ppo_clip_slope(d, a, score, clip_low, clip_high)


def kl_cov(d, a, score, selected, kl_coef=1.0):
  """arXiv:2505.22617 section 4, KL-Cov: r A, less kl_coef |log r| on the selected tokens."""
  return math.exp(d) * a - (kl_coef * abs(d) if selected else 0.0)


def kl_cov_slope(d, a, score, selected, kl_coef=1.0):
  return math.exp(d) * a - (kl_coef * sign(d) if selected else 0.0)


def _gmpo_clipped(d, a, clip_low, clip_high):
  """arXiv:2507.20673: the token's pessimistic clip in log space, r in [e^-low, e^high]."""
  bounded = min(max(d, -clip_low), clip_high)
  return min(d, bounded) if a > 0 else max(d, bounded)


def gmpo(d: Row, a: Row, clip_low=0.4, clip_high=0.4) -> Row:
  """arXiv:2507.20673, whole row: A (prod_t clipped r_t)^(1 / |o|), the same at every token."""
  if not d:
    return []
  geometric = math.exp(mean([_gmpo_clipped(x, y, clip_low, clip_high) for x, y in zip(d, a)]))
  return [y * geometric for y in a]


def gmpo_vjp(d: Row, a: Row, cotangents: Row, clip_low=0.4, clip_high=0.4) -> Row:
  """A token moves the gain of all n tokens of its row, unless it is clipped."""
  pulled = total([c * gain for c, gain in zip(cotangents, gmpo(d, a, clip_low, clip_high))])
  clipped = [_gmpo_clipped(x, y, clip_low, clip_high) != x for x, y in zip(d, a)]
  return [0.0 if c else pulled / len(d) for c in clipped]


# ------------------------------------------------------------------------------------ selection
# Over the whole batch at once.


def quantile(xs: Row, q: float) -> float:
  """Linear interpolation between order statistics (type 7 of Hyndman & Fan 1996)."""
  ordered, place = sorted(xs), q * (len(xs) - 1)
  below = math.floor(place)
  above = min(below + 1, len(xs) - 1)
  return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def top_entropy_mask(entropy: list[Row], fraction: float) -> list[list[bool]]:
  """arXiv:2506.01939 eq. 5: only the most uncertain tokens of the batch are trained."""
  threshold = quantile(flat(entropy), 1 - fraction)
  return [[h >= threshold for h in row] for row in entropy]


def token_covariance(logprobs: list[Row], advantages: list[Row]) -> list[Row]:
  """arXiv:2505.22617 eq. 10: (log pi - mean log pi) (A - mean A), means over the batch."""
  lp_mean, a_mean = mean(flat(logprobs)), mean(flat(advantages))
  return [
    [(lp - lp_mean) * (a - a_mean) for lp, a in zip(lps, advs)]
    for lps, advs in zip(logprobs, advantages)
  ]


def selection_size(tokens: int, fraction: float) -> int:
  return max(1, math.floor(fraction * tokens))


def kl_cov_selection(logprobs: list[Row], advantages: list[Row], fraction: float):
  """arXiv:2505.22617, KL-Cov: the tokens whose covariance ranks within the top k."""
  covariance = token_covariance(logprobs, advantages)
  ranked = sorted(flat(covariance), reverse=True)
  threshold = ranked[selection_size(len(ranked), fraction) - 1]
  return [[c >= threshold for c in row] for row in covariance]


def clip_cov_eligible(
  logprobs, log_ratio, advantages, cov_low=1.0, cov_high=5.0, clip_low=0.2, clip_high=0.2
) -> list[list[bool]]:
  """arXiv:2505.22617, Clip-Cov: the tokens among which k are drawn at random."""
  covariance = token_covariance(logprobs, advantages)
  return [
    [cov_low < c < cov_high and _ppo_keeps(d, a, clip_low, clip_high) for c, d, a in zip(*rows)]
    for rows in zip(covariance, log_ratio, advantages)
  ]


# ---------------------------------------------------------------------------------- corrections
# w = pi_old / pi_sampler, the mismatch of trainer and sampler; everything here is a constant.


def truncated(log_weights: Row, cap: float, floor: float = 0.0) -> Row:
  """Truncated importance sampling, Ionides 2008; IMPALA, arXiv:1802.01561: min(w, cap)."""
  return [min(max(math.exp(x), floor), cap) for x in log_weights]


def banded(log_weights: Row, low: float, high: float) -> Row:
  """IcePop, arXiv:2510.18855: w inside the band, 0 outside."""
  weights = [math.exp(x) for x in log_weights]
  return [w if low <= w <= high else 0.0 for w in weights]


def rejected(statistic: Row, low: float | None = None, high: float | None = None) -> Row:
  low, high = -math.inf if low is None else low, math.inf if high is None else high
  return [1.0 if low <= x <= high else 0.0 for x in statistic]


def veto(log_weights: Row, low: float) -> Row:
  """One token too improbable under the trainer discards its sequence."""
  keep = all(math.exp(x) >= low for x in log_weights)
  return [float(keep)] * len(log_weights)


def off_policy_mask(log_ratio: Row, advantage: float, threshold: float) -> Row:
  """DeepSeek-V3.2, arXiv:2512.02556, off-policy sequence masking: drop where A < 0 and
  mean_t log pi_old / pi > threshold."""
  if not log_ratio:
    return []
  drop = advantage < 0 and mean([-d for d in log_ratio]) > threshold
  return [0.0 if drop else 1.0] * len(log_ratio)


def self_normalised(weights: list[Row], loss_weights: list[Row]) -> list[Row]:
  """Weighted importance sampling, Rubinstein 1981: the weights' weighted mean becomes 1."""
  products = [w * x for ws, xs in zip(loss_weights, weights) for w, x in zip(ws, xs)]
  average = total(products) / total(flat(loss_weights))
  return [[x / average if average else 0.0 for x in row] for row in weights]


def interpolated_proximal(logprobs: Row, sampler_logprobs: Row, alpha: float) -> Row:
  """Proximal policy on the line between sampler and current policy, in log space."""
  return [(1 - alpha) * lb + alpha * lp for lp, lb in zip(logprobs, sampler_logprobs)]


# ----------------------------------------------------------------------------------- advantages
# One group: the rewards of the valid samples of one prompt.


def has_signal(rewards: Row, eps: float = np.finfo(np.float64).eps) -> bool:
  """The rewards differ by more than rounding; a group without spread teaches nothing."""
  if not rewards:
    return False
  return max(rewards) - min(rewards) > 4 * eps * max(abs(r) for r in rewards)


def raw_rewards(rewards: Row) -> Row:
  """No baseline."""
  return list(rewards)


def group_centered(rewards: Row) -> Row:
  """Dr. GRPO, arXiv:2503.20783 section 3.2: r - mean."""
  return [r - mean(rewards) if has_signal(rewards) else 0.0 for r in rewards]


def group_normalized(rewards: Row, ddof: int = 1, eps: float = 1e-6) -> Row:
  """GRPO, arXiv:2402.03300 section 4.1.2: (r - mean) / std."""
  if not has_signal(rewards):
    return [0.0] * len(rewards)
  return [(r - mean(rewards)) / (math.sqrt(variance(rewards, ddof)) + eps) for r in rewards]


def _others(rewards: Row, i: int) -> Row:
  return rewards[:i] + rewards[i + 1 :]


def leave_one_out(rewards: Row) -> Row:
  """RLOO, arXiv:2402.14740 eq. 7: r_i - mean of the other k - 1."""
  if not has_signal(rewards):
    return [0.0] * len(rewards)
  return [r - mean(_others(rewards, i)) for i, r in enumerate(rewards)]


def leave_one_out_normalized(rewards: Row, eps: float = 1e-6) -> Row:
  """As NeMo-RL: baseline and (ddof 1) std of the other samples; undivided without a std."""
  if not has_signal(rewards):
    return [0.0] * len(rewards)
  result = []
  for i, r in enumerate(rewards):
    others = _others(rewards, i)
    scale = math.sqrt(variance(others, 1)) + eps if has_signal(others) else 1.0
    result.append((r - mean(others)) / scale)
  return result


def batch_scaled(groups: list[Row], ddof: int = 1, eps: float = 1e-6) -> list[Row]:
  """Lite PPO, arXiv:2508.08221 section 5: group mean, standard deviation of the batch."""
  std = math.sqrt(variance(flat(groups), ddof))
  return [[a / (std + eps) for a in group_centered(group)] for group in groups]


def greedy_baseline(rewards: Row, greedy_reward: float) -> Row:
  """ReMax, arXiv:2310.10505 eq. 5: r - r(greedy response)."""
  return [r - greedy_reward for r in rewards]


def length_weighted_baseline(rewards: Row, lengths: Row) -> Row:
  """OPO, arXiv:2505.23585 eq. 8: b = sum l_i r_i / sum l_i."""
  if not has_signal(rewards):
    return [0.0] * len(rewards)
  baseline = total([n * r for n, r in zip(lengths, rewards)]) / total(lengths)
  return [r - baseline for r in rewards]


def signal_scaled(groups: list[Row]) -> list[Row]:
  """GPG, arXiv:2504.02546 section 3: samples over samples of groups with signal, times r - mean."""
  informative = len(flat([group for group in groups if has_signal(group)]))
  return [[a * len(flat(groups)) / informative for a in group_centered(g)] for g in groups]


def pass_at_k(rewards: Row, k: int) -> Row:
  """PKPO, arXiv:2505.15201 eq. 33 (leave one out, k - 1), by enumeration of the subsets:
  1 / C(n, k) sum_{I: |I| = k, i in I} (max_I r - max_{I without i} r), times n because the
  sum over samples of the paper is a mean here."""
  n = len(rewards)
  result = [0.0] * n
  for subset in itertools.combinations(range(n), k):
    for i in subset:
      best = max(rewards[j] for j in subset)
      best_without = max(rewards[j] for j in subset if j != i)
      result[i] += n / math.comb(n, k) * (best - best_without)
  return result


def mean_normalized(rewards: Row) -> Row:
  """MaxRL, arXiv:2602.02710: (r - mean) / mean; nothing where no sample succeeds."""
  if not has_signal(rewards) or mean(rewards) <= 0:
    return [0.0] * len(rewards)
  return [(r - mean(rewards)) / mean(rewards) for r in rewards]


def multi_reward_normalized(rewards: list[Row], weights: Row, ddof=1, eps=1e-6) -> Row:
  """GDPO, arXiv:2601.05242: every reward normalised in its group, then their weighted sum."""
  parts = [group_normalized(component, ddof, eps) for component in rewards]
  return [total([w * a for w, a in zip(weights, column)]) for column in zip(*parts)]


# -------------------------------------------------------------------------------------- returns


def masked_moments(batch: list[Row], ddof: int = 1) -> tuple[float, float]:
  xs = flat(batch)
  return mean(xs), variance(xs, ddof) if len(xs) > 1 else 0.0


def whiten(batch: list[Row], ddof: int = 1, eps: float = 1e-8) -> list[Row]:
  """Engstrom et al., arXiv:2005.12729 section 3: zero mean, unit variance, over the batch."""
  center, spread = masked_moments(batch, ddof)
  return [[(x - center) / math.sqrt(spread + eps) for x in row] for row in batch]


def discounted_returns(rewards: Row, discount: float = 1.0) -> Row:
  """G_t = sum_{u >= t} discount^(u - t) r_u (Sutton & Barto, eq. 3.8)."""
  n = len(rewards)
  return [total([discount ** (u - t) * rewards[u] for u in range(t, n)]) for t in range(n)]


def gae(rewards: Row, values: Row, discount=1.0, gae_lambda=1.0, bootstrap=0.0) -> Row:
  """arXiv:1506.02438 eq. 16: A_t = sum_l (discount lambda)^l delta_{t + l}, eq. 10:
  delta_t = r_t + discount V(s_{t + 1}) - V(s_t). V after the last token is `bootstrap`."""
  n, after = len(rewards), values[1:] + [bootstrap]
  deltas = [rewards[t] + discount * after[t] - values[t] for t in range(n)]
  decay = discount * gae_lambda
  return [total([decay ** (u - t) * deltas[u] for u in range(t, n)]) for t in range(n)]


def whitened_returns(rewards: list[Row], discount: float = 1.0) -> list[Row]:
  """REINFORCE++, arXiv:2501.03262 section 3: returns, normalised over the batch."""
  return whiten([discounted_returns(row, discount) for row in rewards])


def whitened_group_centered(groups: list[Row], lengths: list[list[int]]) -> list[Row]:
  """REINFORCE++-baseline, arXiv:2501.03262: r - mean of the group, normalised over tokens."""
  advantages = flat([group_centered(group) for group in groups])
  return whiten([[a] * n for a, n in zip(advantages, flat(lengths))])


def length_adaptive_lambda(length: int, alpha: float) -> float:
  """VAPO, arXiv:2504.05118 section on length-adaptive GAE: 1 - 1 / (alpha l)."""
  return 1 - 1 / max(alpha * length, 1)


def terminal_rewards(score: float, length: int) -> Row:
  """The whole reward arrives with the last token."""
  return [0.0] * (length - 1) + [score] if length else []


def kl_shaped_rewards(rewards: Row, kl: Row, kl_coef: float) -> Row:
  """InstructGPT, arXiv:2203.02155 eq. 2, per token: r_t - beta kl_t."""
  return [r - kl_coef * k for r, k in zip(rewards, kl)]


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
  """DAPO, arXiv:2503.14476 eq. 13."""
  if length <= max_length - buffer:
    return 0.0
  if length <= max_length:
    return ((max_length - buffer) - length) / buffer
  return -1.0


# ------------------------------------------------------------------------------------------- kl
# One token sampled from pi: delta = log pi - log pi_ref (Schulman 2020, "Approximating KL
# divergence"). Slopes are with respect to log pi.


def kl_k1(lp, ref):
  return lp - ref


def kl_k1_slope(lp, ref):
  return 1.0


def kl_k2(lp, ref):
  return (lp - ref) ** 2 / 2


def kl_k2_slope(lp, ref):
  return lp - ref


def kl_k3(lp, ref):
  """Also GRPO, arXiv:2402.03300 eq. 4: pi_ref / pi - log(pi_ref / pi) - 1."""
  return math.exp(ref - lp) - (ref - lp) - 1


def kl_k3_slope(lp, ref):
  return 1 - math.exp(ref - lp)


def kl_abs(lp, ref):
  return abs(lp - ref)


def kl_abs_slope(lp, ref):
  return sign(lp - ref)


def reverse_kl_slope(lp, ref):
  """grad KL(pi || ref) = E_pi[delta grad log pi], arXiv:2506.09477: the gradient of k2."""
  return lp - ref


def kl_k3_off_policy(lp, ref, old):
  """DeepSeek-V3.2, arXiv:2512.02556, unbiased KL estimate: pi / pi_old times k3."""
  return math.exp(lp - old) * kl_k3(lp, ref)


def kl_k3_off_policy_slope(lp, ref, old):
  """d/dx e^(x - o) (e^(r - x) - (r - x) - 1) = e^(x - o) (x - r)."""
  return math.exp(lp - old) * (lp - ref)


def _bucket_kl(logp: Row, logq: Row, buckets: list[list[int]]) -> tuple[float, Row]:
  """KL of two distributions after merging tokens into buckets, and its slope in log p's logits."""
  scores, mass = [0.0] * len(logp), []
  for bucket in buckets:
    p, q = (total([math.exp(x[v]) for v in bucket]) for x in (logp, logq))
    mass.append(p * math.log(p / q))
    for v in bucket:
      scores[v] = math.log(p / q)
  kl = total(mass)
  return kl, [math.exp(lp) * (s - kl) for lp, s in zip(logp, scores)]


def _top_k_kl(z: Row, ref: Row, k: int, temperature: float) -> tuple[float, Row]:
  logp, logq = log_softmax(z, temperature), log_softmax(ref, temperature)
  order = sorted(range(len(z)), key=lambda v: -logp[v])
  tail = [order[k:]] if k < len(z) else []
  kl, slope = _bucket_kl(logp, logq, [[v] for v in order[:k]] + tail)
  return kl, [x / temperature for x in slope]


def top_k_kl(logits: list[Row], ref_logits: list[Row], k: int, temperature: float = 1.0) -> Row:
  """KL after merging all but the policy's k likeliest tokens into one: a lower bound."""
  return [_top_k_kl(z, ref, k, temperature)[0] for z, ref in zip(logits, ref_logits)]


def top_k_kl_slope(logits, ref_logits, k: int, temperature: float = 1.0) -> list[Row]:
  """d KL / d z_v = p_v (log(p_b / q_b) - KL) / T, b the bucket of v."""
  return [_top_k_kl(z, ref, k, temperature)[1] for z, ref in zip(logits, ref_logits)]


def exact_kl(logits: list[Row], ref_logits: list[Row], temperature: float = 1.0) -> Row:
  """KL(pi || ref) = sum_v p_v log(p_v / q_v): every token its own bucket."""
  return [_top_k_kl(z, ref, len(z), temperature)[0] for z, ref in zip(logits, ref_logits)]


def exact_kl_slope(logits, ref_logits, temperature: float = 1.0) -> list[Row]:
  return [_top_k_kl(z, ref, len(z), temperature)[1] for z, ref in zip(logits, ref_logits)]


# ---------------------------------------------------------------------------------- diagnostics


def clip_fractions(log_ratio: Row, advantages: Row, clip_low: float, clip_high: float):
  """Counts of tokens whose gradient PPO's clip removes: (low, high)."""
  ratios = [math.exp(d) for d in log_ratio]
  low = sum(1 for r, a in zip(ratios, advantages) if a < 0 and r < 1 - clip_low)
  high = sum(1 for r, a in zip(ratios, advantages) if a > 0 and r > 1 + clip_high)
  return low, high


def policy_drift(logprobs: Row, old_logprobs: Row) -> tuple[float, float]:
  """Sums of k1 and k3 of KL(old || current): the tokens are samples of old."""
  pairs = list(zip(logprobs, old_logprobs))
  return total([kl_k1(old, lp) for lp, old in pairs]), total([kl_k3(old, lp) for lp, old in pairs])


def gradient_share_by_length(gradients: list[Row], edges: list[int]) -> Row:
  """Sum of |g| of the rows with edges[k - 1] <= length < edges[k], open at both ends."""
  bounds = [0, *edges, math.inf]
  sums = [0.0] * (len(edges) + 1)
  for row in gradients:
    for k in range(len(sums)):
      if bounds[k] <= len(row) < bounds[k + 1]:
        sums[k] += total([abs(g) for g in row])
  return sums


def effective_sample_size(log_weights: Row) -> float:
  """Kong 1992, as a fraction of the samples: (sum w)^2 / (n sum w^2)."""
  weights = [math.exp(x) for x in log_weights]
  return total(weights) ** 2 / (len(weights) * total([w * w for w in weights]))


# ----------------------------------------------------------------------------------- objectives


class Algorithm(NamedTuple):
  """A row of the comparison table: names in this module, and the constants of the surrogate."""

  advantages: str
  level: str
  surrogate: str
  constants: dict[str, float]
  loss_weights: str


def _ppo(advantages, loss_weights, level="per_token", clip_low=0.2, clip_high=0.2):
  band = {"clip_low": clip_low, "clip_high": clip_high}
  return Algorithm(advantages, level, "ppo_clip", band, loss_weights)


ALGORITHMS = {
  # Williams 1992, theorem 1: the response as one action, no baseline.
  "REINFORCE": Algorithm("raw_rewards", "per_token", "reinforce", {}, "sequence_sum"),
  # arXiv:2501.03262: PPO's loss on returns whitened over the batch.
  "REINFORCE_PP": _ppo("whitened_returns", "token_mean"),
  # The same with the group mean as a baseline.
  "REINFORCE_PP_BASELINE": _ppo("whitened_group_centered", "token_mean"),
  # arXiv:2402.14740 eq. 7.
  "RLOO": Algorithm("leave_one_out", "per_token", "reinforce", {}, "sequence_sum"),
  # arXiv:2310.10505.
  "REMAX": Algorithm("greedy_baseline", "per_token", "reinforce", {}, "sequence_sum"),
  # arXiv:1707.06347 eq. 7.
  "PPO": _ppo("gae", "token_mean"),
  # arXiv:1912.09729.
  "DUAL_CLIP_PPO": Algorithm(
    "gae",
    "per_token",
    "dual_clip",
    {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 3.0},
    "token_mean",
  ),
  # arXiv:2402.03300 eq. 3.
  "GRPO": _ppo("group_normalized", "sequence_mean"),
  # arXiv:2503.14476 eq. 8 with clip-higher; the mean over tokens is of the batch, as in its code.
  "DAPO": _ppo("group_normalized", "token_mean", clip_high=0.28),
  # GRPO with a token mean, as TRL's "bnpo".
  "BNPO": _ppo("group_normalized", "token_mean"),
  # arXiv:2507.18071 eq. 5 and section 5.1.
  "GSPO": _ppo("group_normalized", "sequence_mean", "per_sequence_geometric", 3e-4, 4e-4),
  # arXiv:2507.18071 eq. 13 and 14.
  "GSPO_TOKEN": _ppo(
    "group_normalized", "sequence_mean", "per_sequence_geometric_token", 3e-4, 4e-4
  ),
  # arXiv:2602.05261: GSPO's row times its length; the band is of section 5.1.
  "LUSPO": _ppo("group_normalized", "sequence_sum", "per_sequence_geometric", 2e-3, 2.5e-3),
  # arXiv:2507.20673.
  "GMPO": Algorithm(
    "group_normalized", "per_token", "gmpo", {"clip_low": 0.4, "clip_high": 0.4}, "sequence_mean"
  ),
  # arXiv:2506.13585 eq. 4 and 5, ratios up to 5.
  "CISPO": Algorithm(
    "group_normalized", "per_token", "cispo", {"clip_low": 1.0, "clip_high": 4.0}, "token_mean"
  ),
  # arXiv:2511.20347.
  "SAPO": Algorithm(
    "group_normalized", "per_token", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, "sequence_mean"
  ),
  # arXiv:2602.10693 eq. 20: weight of the sequence, gradient of the token.
  "VESPO": Algorithm(
    "group_normalized",
    "per_sequence_token",
    "vespo",
    {"k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0},
    "token_mean",
  ),
  # arXiv:2504.02546.
  "GPG": Algorithm("signal_scaled", "per_token", "reinforce", {}, "token_mean"),
  # arXiv:2505.23585.
  "OPO": Algorithm("length_weighted_baseline", "per_token", "reinforce", {}, "sequence_sum"),
  # arXiv:2503.14286 eq. 7 and 8, ratio of the whole response; loss over length, section 4.
  "TOPR": Algorithm("raw_rewards", "per_sequence_token", "topr", {}, "sequence_mean"),
  # arXiv:2602.04879, without a cap on the ratio.
  "DPPO_TV": Algorithm(
    "group_centered",
    "per_token",
    "dppo_tv",
    {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": math.inf},
    "token_mean",
  ),
  "DPPO_KL": Algorithm(
    "group_centered",
    "per_token",
    "dppo_kl",
    {"clip_low": 0.05, "clip_high": 0.05, "ratio_cap": math.inf},
    "token_mean",
  ),
  # arXiv:2405.19107: one penalty on the ratio of the response.
  "DRO": Algorithm("group_centered", "per_sequence", "dro", {"beta": 0.1}, "sequence_mean"),
  # arXiv:2505.22617.
  "CLIP_COV": Algorithm(
    "group_normalized", "per_token", "clip_cov", {"clip_low": 0.2, "clip_high": 0.2}, "token_mean"
  ),
  "KL_COV": Algorithm("group_normalized", "per_token", "kl_cov", {"kl_coef": 1.0}, "token_mean"),
}

# Level -> (value, transposed derivative). `_token`: value of the level, gradient of the token.
LEVELS: dict[str, tuple[Callable, Callable]] = {
  "per_token": (per_token, per_token_vjp),
  "per_prefix": (per_prefix, per_prefix_vjp),
  "per_sequence": (per_sequence, per_sequence_vjp),
  "per_sequence_geometric": (per_sequence_geometric, per_sequence_geometric_vjp),
  "per_sequence_token": (per_sequence, per_token_vjp),
  "per_sequence_geometric_token": (per_sequence_geometric, per_token_vjp),
}


def surrogate_row(name: str, d: Row, a: Row, score: Row, constants: dict, selected=None) -> Row:
  """Gains of one row."""
  if name == "gmpo":
    return gmpo(d, a, **constants)
  flags = [()] * len(d) if selected is None else [(s,) for s in selected]
  gain = globals()[name]
  return [gain(*x, *s, **constants) for *x, s in zip(d, a, score, flags)]


def surrogate_row_vjp(name, d: Row, a: Row, score: Row, cotangents: Row, constants, selected=None):
  """Cotangents of the gains of one row -> cotangents of its log-ratios."""
  if name == "gmpo":
    return gmpo_vjp(d, a, cotangents, **constants)
  flags = [()] * len(d) if selected is None else [(s,) for s in selected]
  slope = globals()[name + "_slope"]
  slopes = [slope(*x, *s, **constants) for *x, s in zip(d, a, score, flags)]
  return [c * s for c, s in zip(cotangents, slopes)]


def objective_loss(
  algorithm: Algorithm,
  logprobs: list[Row],
  old_logprobs: list[Row] | None,
  advantages: list[Row],
  loss_weights: list[Row],
  importance_weights: list[Row] | None = None,
  ref_logprobs: list[Row] | None = None,
  kl: str | None = None,
  kl_coef: float = 0.0,
  entropy: list[Row] | None = None,
  entropy_coef: float = 0.0,
  selected: list[list[bool]] | None = None,
) -> tuple[float, list[Row], list[Row]]:
  """Loss, and its gradients with respect to every log-prob and every entropy.

  loss = - sum w iw gain + kl_coef sum w kl - entropy_coef sum w H
  d loss / d logprob = - level'(w iw slope) + kl_coef w kl_slope.
  On-policy (no old log-probs) the log-ratio is 0 and its derivative 1. The value of a term in
  score form is A times the log-prob of the token, whatever the level of the ratio.
  """
  level, level_vjp = LEVELS[algorithm.level]
  name, constants = algorithm.surrogate, algorithm.constants
  terms, gradients, entropy_gradients = [], [], []
  for i, lp in enumerate(logprobs):
    w, a = loss_weights[i], advantages[i]
    iw = importance_weights[i] if importance_weights else [1.0] * len(lp)
    d = level(token_log_ratio(lp, old_logprobs[i] if old_logprobs else lp))
    chosen = selected[i] if selected else None
    gains = surrogate_row(name, d, a, lp, constants, chosen)
    terms += [-x * y * g for x, y, g in zip(w, iw, gains)]
    cotangents = [-x * y for x, y in zip(w, iw)]
    pulled = surrogate_row_vjp(name, d, a, lp, cotangents, constants, chosen)
    gradient = level_vjp(pulled)
    if kl:
      value, slope = globals()[kl], globals()[kl + "_slope"]
      terms += [kl_coef * x * value(*pair) for x, *pair in zip(w, lp, ref_logprobs[i])]
      slopes = [slope(*pair) for pair in zip(lp, ref_logprobs[i])]
      gradient = [g + kl_coef * x * s for g, x, s in zip(gradient, w, slopes)]
    if entropy:
      terms += [-entropy_coef * x * h for x, h in zip(w, entropy[i])]
    gradients.append(gradient)
    entropy_gradients.append([-entropy_coef * x for x in w])
  return total(terms), gradients, entropy_gradients
