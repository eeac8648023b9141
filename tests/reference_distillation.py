"""The independent truth of distillation, online preferences and process rewards.

As in `reference.py`: float64, ragged Python lists of only the tokens that count, loops, formulas
as in the paper named above them, gradients written by hand (`<loss>_slope`: d value of each token
/ d logits, or / d log-prob).
"""

from __future__ import annotations

import math

from tests.reference import Row, log_softmax, mean, total

# --------------------------------------------------------------------------------- divergences


def probabilities(logits: Row, temperature: float) -> Row:
  return [math.exp(x) for x in log_softmax(logits, temperature)]


def kl(p: Row, q: Row) -> float:
  return total([a * math.log(a / b) for a, b in zip(p, q) if a > 0])


def mixture(p: Row, q: Row, share: float) -> Row:
  return [share * a + (1 - share) * b for a, b in zip(p, q)]


def forward_kl_of(s: Row, t: Row) -> float:
  """KL(T || S)."""
  return kl(t, s)


def reverse_kl_of(s: Row, t: Row) -> float:
  return kl(s, t)


def skewed_forward_kl_of(s: Row, t: Row, skew: float) -> float:
  """arXiv:2402.03898, section 3.1: KL(p || a p + (1 - a) q), p the teacher."""
  return kl(t, mixture(t, s, skew))


def skewed_reverse_kl_of(s: Row, t: Row, skew: float) -> float:
  """The same with p the student."""
  return kl(s, mixture(s, t, skew))


def jensen_shannon_of(s: Row, t: Row, beta: float) -> float:
  """arXiv:2306.13649, eq. 1, P the teacher and Q the student."""
  m = mixture(t, s, beta)
  return beta * kl(t, m) + (1 - beta) * kl(s, m)


# d / d log S[v], as if the log-probs were free.


def forward_kl_free(s: Row, t: Row) -> Row:
  return [-b for b in t]


def reverse_kl_free(s: Row, t: Row) -> Row:
  return [a * (math.log(a / b) + 1) for a, b in zip(s, t)]


def skewed_forward_kl_free(s: Row, t: Row, skew: float) -> Row:
  return [-b * (1 - skew) * a / (skew * b + (1 - skew) * a) for a, b in zip(s, t)]


def skewed_reverse_kl_free(s: Row, t: Row, skew: float) -> Row:
  ms = mixture(s, t, skew)
  return [a * (math.log(a / m) + 1 - skew * a / m) for a, m in zip(s, ms)]


def jensen_shannon_free(s: Row, t: Row, beta: float) -> Row:
  ms = mixture(t, s, beta)
  return [(1 - beta) * a * math.log(a / m) for a, m in zip(s, ms)]


DIVERGENCES = {
  "forward_kl": (forward_kl_of, forward_kl_free),
  "exact_kl": (reverse_kl_of, reverse_kl_free),
  "skewed_forward_kl": (skewed_forward_kl_of, skewed_forward_kl_free),
  "skewed_reverse_kl": (skewed_reverse_kl_of, skewed_reverse_kl_free),
  "jensen_shannon": (jensen_shannon_of, jensen_shannon_free),
}


def through_softmax(free: Row, s: Row, temperature: float) -> Row:
  """d log S[u] / d z[v] = (1{u = v} - S[v]) / temperature."""
  return [(g - a * total(free)) / temperature for g, a in zip(free, s)]


def divergence(name: str, logits: list[Row], teacher: list[Row], temperature: float, *constants):
  """(values, slopes in the student's logits) of the tokens of one row."""
  value, free = DIVERGENCES[name]
  values, slopes = [], []
  for z, y in zip(logits, teacher, strict=True):
    s, t = probabilities(z, temperature), probabilities(y, temperature)
    values.append(value(s, t, *constants))
    slopes.append(through_softmax(free(s, t, *constants), s, temperature))
  return values, slopes


def bucket_divergence(
  name: str, logits: list[Row], logprobs: list[Row], ids: list[list[int]], temperature, *constants
):
  """The same over the kept tokens and the rest, which moves as one outcome."""
  value, free = DIVERGENCES[name]
  values, slopes = [], []
  for z, lps, kept in zip(logits, logprobs, ids, strict=True):
    s = probabilities(z, temperature)
    where = [kept.index(v) if v in kept else len(kept) for v in range(len(s))]
    student = [total([a for a, b in zip(s, where) if b == k]) for k in range(len(kept) + 1)]
    teacher = [math.exp(x) for x in lps]
    teacher.append(1 - total(teacher))
    values.append(value(student, teacher, *constants))
    buckets = free(student, teacher, *constants)
    each = [buckets[k] * a / student[k] for a, k in zip(s, where)]
    slopes.append(through_softmax(each, s, temperature))
  return values, slopes


# ------------------------------------------------------------------------------ log-probs of data


def distillation_advantages(logprobs: Row, teacher: Row) -> Row:
  """arXiv:2306.08543, section 2.2: log p(y) - log q(y), p the teacher."""
  return [t - s for s, t in zip(logprobs, teacher)]


def sft_loss(logprobs: Row) -> Row:
  return [-x for x in logprobs]


def dft_loss(logprobs: Row) -> Row:
  """arXiv:2508.05629: -sg(p) log p."""
  return [-math.exp(x) * x for x in logprobs]


def dft_loss_slope(logprobs: Row) -> Row:
  return [-math.exp(x) for x in logprobs]


def vapo_nll(rows: list[Row], rewards: Row) -> float:
  """arXiv:2504.05118: -1 / (tokens of the correct answers) x the sum of their log-probs."""
  tokens = [x for row, r in zip(rows, rewards) if r > 0 for x in row]
  return -mean(tokens) if tokens else 0.0


# ----------------------------------------------------------------------------- online preferences


def preference_pair(rewards: Row) -> tuple[int, int]:
  best = worst = 0
  for i, r in enumerate(rewards):
    best = i if r > rewards[best] else best
    worst = i if r < rewards[worst] else worst
  return best, worst


def nash_md_advantage(preference: float, logprobs: Row, ref_logprobs: Row, tau: float) -> float:
  """arXiv:2312.00886, section 7."""
  return preference - 0.5 - tau * total([a - b for a, b in zip(logprobs, ref_logprobs)])


def geometric_mixture(logits: Row, ref_logits: Row, share: float, temperature: float) -> Row:
  """p proportional to pi^(1 - share) ref^share; log-probs."""
  both = zip(probabilities(logits, temperature), probabilities(ref_logits, temperature))
  weights = [a ** (1 - share) * b**share for a, b in both]
  return [math.log(w / total(weights)) for w in weights]


# -------------------------------------------------------------------------------- process rewards


def step_rewards(scores: Row, step_ids: list[int]) -> Row:
  rewards = [0.0] * len(step_ids)
  for k, score in enumerate(scores, 1):
    ends = [t for t, step in enumerate(step_ids) if step == k]
    if ends:
      rewards[ends[-1]] = score
  return rewards


def best_of_n(rewards: Row) -> Row:
  ties = [r == max(rewards) for r in rewards]
  return [tie / sum(ties) for tie in ties]


def adaptive_kl_coef(coef: float, kl: float, target: float, gain: float, clip: float) -> float:
  """arXiv:1909.08593, section 2.2: e = clip((KL - target) / target), beta (1 + K e)."""
  error = max(-clip, min(clip, (kl - target) / target))
  return coef * (1 + gain * error)
