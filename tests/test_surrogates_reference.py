"""jaxrl_lm.surrogates against the reference: gains and hand-written gradients."""

import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests.ragged import PACKED, PADDED, Checker, normal, policies, uniform

# Each with its defaults and with other constants.
CASES = [
  ("reinforce", {}),
  ("importance_weighted", {}),
  ("ppo_clip", {}),
  ("ppo_clip", {"clip_low": 0.3, "clip_high": 0.6}),
  ("dual_clip", {}),
  ("dual_clip", {"clip_low": 0.1, "clip_high": 0.3, "ratio_cap": 1.5}),
  ("cispo", {}),
  ("cispo", {"clip_low": 0.2, "clip_high": 0.28}),
  ("sapo", {}),
  ("sapo", {"tau_pos": 2.0, "tau_neg": 3.0}),
  ("gmpo", {}),
  ("gmpo", {"clip_low": 0.1, "clip_high": 0.3}),
  ("vespo", {}),
  ("vespo", {"k_pos": 1.0, "lam_pos": 2.0, "k_neg": 2.0, "lam_neg": 1.5}),
  ("topr", {}),
  ("dppo_tv", {}),
  ("dppo_tv", {"clip_low": 0.05, "clip_high": 0.1, "ratio_cap": 1.2}),
  ("dppo_kl", {}),
  ("dppo_kl", {"clip_low": 0.01, "clip_high": 0.02, "ratio_cap": 1.2}),
  ("dro", {"beta": 0.4}),
  ("clip_cov", {}),
  ("clip_cov", {"clip_low": 1.0, "clip_high": 1.0}),
  ("kl_cov", {}),
  ("kl_cov", {"kl_coef": 0.1}),
]
NEEDS_PROBABILITIES = ("dppo_tv", "dppo_kl")


def advantages(seed):
  """Of both signs within every row, and some that are exactly 0."""
  rows = normal(seed)
  return [[0.0 if t == 3 else a for t, a in enumerate(row)] for row in rows]


def truth(name, constants, d, a, scores, cotangents, selected):
  flags = selected or [None] * len(d)
  rows = list(zip(d, a, scores, cotangents, flags, strict=True))
  gains = [ref.surrogate_row(name, x, y, s, constants, f) for x, y, s, _, f in rows]
  pulled = [ref.surrogate_row_vjp(name, x, y, s, c, constants, f) for x, y, s, c, f in rows]
  return gains, pulled


# The value is A log pi where the caller gives the old log-probs, else A log r.
RUNS = [(*case, True) for case in CASES]
RUNS += [(*case, False) for case in CASES if case[0] not in NEEDS_PROBABILITIES and not case[1]]


@pytest.mark.parametrize(("name", "constants", "with_old"), RUNS)
def test_surrogate(name, constants, with_old):
  gain = getattr(rl, name)

  def fn(d, a, mask, old=None, **selected):
    return gain(d, a, mask=mask, old_logprobs=old, **constants, **selected)

  check = Checker(fn)
  for seed, scale in enumerate((0.3, 1.5)):
    new, old = policies(seed, scale)
    d = [ref.token_log_ratio(x, y) for x, y in zip(new, old, strict=True)]
    a, cotangents = advantages(seed + 10), normal(seed + 20)
    selected = None
    if name in ("clip_cov", "kl_cov"):
      selected = [[u < 0.3 for u in row] for row in uniform(seed + 30, 0, 1)]
    inputs = {"d": d, "a": a} | ({"old": old} if with_old else {})
    inputs |= {"selected": selected} if selected else {}
    gains, pulled = truth(name, constants, d, a, new if with_old else d, cotangents, selected)
    check.tokens(gains, {"d": pulled}, cotangents, **inputs)


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_packed(name):
  """segment_ids matter to gmpo alone, and disturb no other."""
  constants = {"beta": 0.4} if name == "dro" else {}
  gain = getattr(rl, name)

  def fn(d, a, old, mask, segment_ids, **selected):
    return gain(d, a, mask=mask, old_logprobs=old, segment_ids=segment_ids, **constants, **selected)

  new, old = policies(40, 0.5)
  d = [ref.token_log_ratio(x, y) for x, y in zip(new, old, strict=True)]
  a, cotangents = advantages(41), normal(42)
  selected = None
  if name in ("clip_cov", "kl_cov"):
    selected = [[u < 0.3 for u in row] for row in uniform(43, 0, 1)]
  gains, pulled = truth(name, constants, d, a, new, cotangents, selected)
  extra = {"selected": selected} if selected else {}
  Checker(fn, PACKED).tokens(gains, {"d": pulled}, cotangents, d=d, a=a, old=old, **extra)


def test_per_sequence_advantages():
  """[..., 1] is spread over the tokens."""
  d, cotangents = normal(50, 0.4), normal(51)
  values = np.array(normal(52)[1][:4] + normal(53)[4][:8], np.float64)
  a = [[float(x)] * len(row) for x, row in zip(values, d, strict=True)]
  gains, pulled = truth("ppo_clip", {}, d, a, d, cotangents, None)
  check = Checker(lambda d, a, mask: rl.ppo_clip(d, a, mask=mask))
  inputs = {"d": d, "a": values.reshape(*PADDED.shape[:-1], 1)}
  check.tokens(gains, {"d": pulled}, cotangents, **inputs)
