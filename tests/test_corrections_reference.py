"""jaxrl_lm.corrections against the reference. Everything here is a constant: no gradient at all."""

import math

import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests.ragged import PACKED, PADDED, Checker, normal, per_row, policies, uniform

LAYOUTS = pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
LOG_WEIGHTS = normal(1, 0.8)


@pytest.mark.parametrize("constants", [{"cap": 2.0}, {"cap": 1.5, "floor": 0.5}])
def test_truncated(constants):
  check = Checker(lambda x, mask: rl.truncated(x, mask, **constants))
  check.tokens([ref.truncated(row, **constants) for row in LOG_WEIGHTS], x=LOG_WEIGHTS)


def test_banded():
  check = Checker(lambda x, mask: rl.banded(x, mask, low=0.5, high=2.0))
  check.tokens([ref.banded(row, 0.5, 2.0) for row in LOG_WEIGHTS], x=LOG_WEIGHTS)


@pytest.mark.parametrize("bounds", [{"low": -0.5, "high": 0.4}, {"low": -0.3}, {"high": 0.2}])
def test_rejected(bounds):
  check = Checker(lambda x, mask: rl.rejected(x, mask, **bounds))
  check.tokens([ref.rejected(row, **bounds) for row in LOG_WEIGHTS], x=LOG_WEIGHTS)


@LAYOUTS
@pytest.mark.parametrize("level", ["per_sequence", "per_sequence_geometric", "segment_max"])
def test_rejected_by_k3_of_the_sequence(level, layout):
  """KL(sampler || trainer), k3 per token, summed, averaged or its maximum over the sequence."""
  trainer, sampler = policies(2, 0.6)

  def fn(trainer, sampler, mask, segment_ids=None):
    statistic = rl.kl_k3(sampler, trainer, mask)
    if level == "segment_max":
      statistic = rl.segment_max(statistic, mask, segment_ids)
    else:
      statistic = getattr(rl, level)(statistic, mask, segment_ids=segment_ids)
    return rl.rejected(statistic, mask, high=0.3)

  reduce = {"per_sequence": sum, "per_sequence_geometric": ref.masked_mean}.get(level, max)
  expected = []
  for lo, lb in zip(trainer, sampler, strict=True):
    statistics = [ref.kl_k3(b, o) for o, b in zip(lo, lb, strict=True)]
    keep = bool(statistics) and reduce(statistics) <= 0.3
    expected.append([float(keep)] * len(lo))
  assert {x for row in expected for x in row} == {0.0, 1.0}
  Checker(fn, layout).tokens(expected, trainer=trainer, sampler=sampler)


@LAYOUTS
@pytest.mark.parametrize("level", ["per_sequence", "per_sequence_geometric"])
def test_sequence_weights(level, layout):
  """Truncated sequence importance sampling, product or geometric mean."""
  trainer, sampler = policies(3, 0.4)

  def fn(trainer, sampler, mask, segment_ids=None):
    log_ratio = rl.token_log_ratio(trainer, sampler, mask)
    log_weights = getattr(rl, level)(log_ratio, mask, segment_ids=segment_ids)
    return rl.truncated(log_weights, mask, cap=1.2)

  expected = []
  for lo, lb in zip(trainer, sampler, strict=True):
    d = ref.token_log_ratio(lo, lb)
    expected.append(ref.truncated(getattr(ref, level)(d), 1.2))
  Checker(fn, layout).tokens(expected, trainer=trainer, sampler=sampler)


@LAYOUTS
def test_veto(layout):
  check = Checker(
    lambda x, mask, segment_ids=None: rl.veto(x, mask, low=0.3, segment_ids=segment_ids),
    layout,
  )
  expected = [ref.veto(row, 0.3) for row in LOG_WEIGHTS]
  assert {x for row in expected for x in row} == {0.0, 1.0}
  check.tokens(expected, x=LOG_WEIGHTS)


@LAYOUTS
def test_off_policy_mask(layout):
  d = normal(4, 0.4)
  a = [0.7, -0.4, 1.0, -1.2, -0.3, -2.0, 0.5, -0.1, -0.9, 0.0, -1.0, -0.2]

  def fn(d, a, mask, segment_ids=None):
    return rl.off_policy_mask(d, a, mask, threshold=0.05, segment_ids=segment_ids)

  expected = [ref.off_policy_mask(row, x, 0.05) for row, x in zip(d, a, strict=True)]
  assert {x for row in expected for x in row} == {0.0, 1.0}
  Checker(fn, layout).tokens(expected, d=d, a=per_row(a))


def test_self_normalised():
  weights = [[math.exp(x) for x in row] for row in normal(7, 0.5)]
  loss_weights = uniform(8, 0.0, 0.2)
  check = Checker(lambda w, lw, mask: rl.self_normalised(w, mask, lw))
  check.tokens(ref.self_normalised(weights, loss_weights), w=weights, lw=loss_weights)
  nothing = [[0.0] * len(row) for row in weights]
  check.tokens(nothing, w=nothing, lw=loss_weights)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_interpolated_proximal(alpha):
  current, sampler = policies(9, 0.5)
  check = Checker(lambda x, y, mask: rl.interpolated_proximal(x, y, mask, alpha=alpha))
  rows = zip(current, sampler, strict=True)
  check.tokens([ref.interpolated_proximal(x, y, alpha) for x, y in rows], x=current, y=sampler)
