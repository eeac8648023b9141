"""jaxrl_lm.diagnostics against the reference."""

import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests.ragged import LENGTHS, PACKED, PADDED, Checker, normal, policies

LAYOUTS = pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
N = sum(LENGTHS)


def parts(average):
  return average.total, average.count, average.mean()


def truth(total, count):
  return total, count, total / count


def test_average():
  rows = normal(1)
  check = Checker(lambda x, mask: parts(rl.average(x, mask)))
  check.reduced(truth(ref.total(ref.flat(rows)), N), x=rows)


def test_clip_fractions():
  d, a = normal(2, 0.4), normal(3)

  def fn(d, a, mask):
    found = rl.clip_fractions(d, a, mask, clip_low=0.2, clip_high=0.28)
    return parts(found["low"]) + parts(found["high"]) + parts(found["clipped"])

  rows = [ref.clip_fractions(x, y, 0.2, 0.28) for x, y in zip(d, a, strict=True)]
  low, high = sum(x for x, _ in rows), sum(y for _, y in rows)
  assert low > 0
  assert high > 0
  Checker(fn).reduced(truth(low, N) + truth(high, N) + truth(low + high, N), d=d, a=a)


def test_policy_drift():
  new, old = policies(4, 0.5)

  def fn(new, old, mask):
    drift = rl.policy_drift(new, old, mask)
    return parts(drift["k1"]) + parts(drift["k3"])

  rows = [ref.policy_drift(x, y) for x, y in zip(new, old, strict=True)]
  k1, k3 = ref.total(x for x, _ in rows), ref.total(y for _, y in rows)
  Checker(fn).reduced(truth(k1, N) + truth(k3, N), new=new, old=old)


def test_perplexity_gap():
  """Mean -log-prob of trainer and sampler, and the first less the second."""
  trainer, sampler = policies(5, 0.5)

  def fn(trainer, sampler, mask):
    found = rl.perplexity_gap(trainer, sampler, mask)
    return parts(found["policy"]) + parts(found["sampler"]) + parts(found["gap"])

  a, b = (-ref.total(ref.flat(x)) for x in (trainer, sampler))
  expected = truth(a, N) + truth(b, N) + truth(a - b, N)
  Checker(fn).reduced(expected, trainer=trainer, sampler=sampler)


def test_token_effective_sample_size():
  rows = normal(6, 0.7)
  check = Checker(lambda x, mask: rl.token_effective_sample_size(x, mask).fraction())
  check.reduced(ref.effective_sample_size(ref.flat(rows)), x=rows)


@LAYOUTS
def test_sequence_effective_sample_size(layout):
  rows = normal(7, 0.3)

  def fn(x, mask, segment_ids=None):
    log_weights = rl.per_sequence(x, mask, segment_ids=segment_ids)
    sizes = rl.sequence_effective_sample_size(log_weights, mask, segment_ids=segment_ids)
    return sizes.fraction()

  expected = ref.effective_sample_size([ref.total(row) for row in rows if row])
  Checker(fn, layout).reduced(expected, x=rows)


def test_ratio_extremes():
  rows = normal(8)
  values, places = np.array(ref.flat(rows)), np.arange(PADDED.mask.size).reshape(PADDED.shape)
  positions = PADDED.take(places)

  def fn(x, mask):
    found = rl.ratio_extremes(x, mask)
    return found.low, found.low_position, found.high, found.high_position

  low, high = int(values.argmin()), int(values.argmax())
  Checker(fn).reduced((values[low], positions[low], values[high], positions[high]), x=rows)


@LAYOUTS
def test_gradient_share_by_length(layout):
  rows, edges = normal(9), [2, 5, 9]

  def fn(x, mask, segment_ids=None):
    return rl.gradient_share_by_length(x, mask, edges=edges, segment_ids=segment_ids)

  Checker(fn, layout).reduced(ref.gradient_share_by_length(rows, edges), x=rows)


def test_zero_signal_groups():
  """Three of the five groups with a valid sample: a group of one has no signal either."""
  groups = [[1.0, 0.0], [0.1, 0.1], [2.0], [], [0.0, 0.0], [3.0, 4.0]]
  silent = sum(1 for group in groups if group and not ref.has_signal(group))
  rewards, where = np.full((6, 2), np.nan, np.float32), np.zeros((6, 2), bool)
  for i, group in enumerate(groups):
    rewards[i, : len(group)], where[i, : len(group)] = group, True
  found = rl.zero_signal_groups(rewards, where=where)
  assert (float(found.total), int(found.count)) == (silent, 5)
  assert silent == 3
