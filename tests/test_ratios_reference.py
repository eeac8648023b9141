"""jaxrl_lm.ratios against the reference."""

import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests.ragged import PACKED, PADDED, Checker, normal, policies

LEVELS = ["per_token", "per_prefix", "per_sequence", "per_sequence_geometric"]
LAYOUTS = pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])


def test_token_log_ratio():
  new, old = policies(1, 0.5)
  check = Checker(lambda new, old, mask: rl.token_log_ratio(new, old, mask))
  expected = [ref.token_log_ratio(x, y) for x, y in zip(new, old, strict=True)]
  cotangents = normal(2)
  check.tokens(expected, {"new": cotangents}, cotangents, new=new, old=old)


def test_on_policy_log_ratio():
  new, cotangents = normal(3), normal(4)
  check = Checker(lambda new, mask: rl.on_policy_log_ratio(new, mask))
  check.tokens([[0.0] * len(row) for row in new], {"new": cotangents}, cotangents, new=new)


@LAYOUTS
@pytest.mark.parametrize("name", LEVELS)
def test_level(name, layout):
  level, value, vjp = getattr(rl, name), *ref.LEVELS[name]
  d, cotangents = normal(5, 0.3), normal(6)
  check = Checker(lambda d, mask, segment_ids=None: level(d, mask, segment_ids=segment_ids), layout)
  check.tokens([value(r) for r in d], {"d": [vjp(c) for c in cotangents]}, cotangents, d=d)


@LAYOUTS
@pytest.mark.parametrize("name", LEVELS)
def test_with_token_gradient(name, layout):
  level, value = rl.with_token_gradient(getattr(rl, name)), ref.LEVELS[name][0]
  d, cotangents = normal(7, 0.3), normal(8)
  check = Checker(lambda d, mask, segment_ids=None: level(d, mask, segment_ids=segment_ids), layout)
  check.tokens([value(r) for r in d], {"d": cotangents}, cotangents, d=d)


@LAYOUTS
@pytest.mark.parametrize("name", LEVELS)
def test_clamped(name, layout):
  level, value, vjp = getattr(rl, name), *ref.LEVELS[name]
  d, cotangents, band = normal(9, 0.3), normal(10), (-0.15, 0.2)
  clamped = rl.clamped(level, *band)
  check = Checker(
    lambda d, mask, segment_ids=None: clamped(d, mask, segment_ids=segment_ids), layout
  )
  values = [value(r) for r in d]
  pulled = [
    vjp(ref.clamped_cotangents(v, c, *band)) for v, c in zip(values, cotangents, strict=True)
  ]
  check.tokens([ref.clamped(v, *band) for v in values], {"d": pulled}, cotangents, d=d)
