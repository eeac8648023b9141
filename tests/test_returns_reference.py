"""jaxrl_lm.returns and jaxrl_lm.whitening against the reference: all of it constants."""

import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests.ragged import GROUPS, LENGTHS, PACKED, PADDED, Checker, f32, normal

LAYOUTS = pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
REWARDS, VALUES = normal(1), normal(2)


@LAYOUTS
@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
def test_discounted_returns(layout, discount):
  def fn(r, mask, segment_ids=None):
    return rl.discounted_returns(r, mask, discount=discount, segment_ids=segment_ids)

  expected = [ref.discounted_returns(row, discount) for row in REWARDS]
  Checker(fn, layout).tokens(expected, r=REWARDS)


@LAYOUTS
@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae(layout, discount, gae_lambda):
  def fn(r, v, mask, segment_ids=None):
    constants = {"discount": discount, "gae_lambda": gae_lambda}
    return rl.gae(r, v, mask, segment_ids=segment_ids, **constants)

  rows = zip(REWARDS, VALUES, strict=True)
  expected = [ref.gae(r, v, discount, gae_lambda) for r, v in rows]
  Checker(fn, layout).tokens(expected, r=REWARDS, v=VALUES)


BOOTSTRAP = f32(list(np.random.default_rng(3).normal(size=len(LENGTHS))))


def bootstrapped(gae_lambdas):
  rows = zip(REWARDS, VALUES, gae_lambdas, BOOTSTRAP, strict=True)
  return [ref.gae(r, v, 0.9, gae_lambda, b) for r, v, gae_lambda, b in rows]


def test_gae_with_bootstrap_and_lambda_of_the_row():
  """VAPO: lambda grows with the length; truncated rows end in the value of their last state."""
  lambdas = [ref.length_adaptive_lambda(n, 0.5) for n in LENGTHS]

  def fn(r, v, b, mask):
    gae_lambda = rl.length_adaptive_lambda(mask, alpha=0.5)
    return rl.gae(r, v, mask, discount=0.9, gae_lambda=gae_lambda, bootstrap_value=b)

  inputs = {"r": REWARDS, "v": VALUES, "b": np.reshape(BOOTSTRAP, GROUPS)}
  Checker(fn).tokens(bootstrapped(lambdas), **inputs)


def test_gae_with_bootstrap_packed():
  """Only the value at the last token of a segment is read."""

  def fn(r, v, b, mask, segment_ids):
    constants = {"discount": 0.9, "gae_lambda": 0.8}
    return rl.gae(r, v, mask, bootstrap_value=b, segment_ids=segment_ids, **constants)

  b = [[7.0] * (n - 1) + [x] * min(n, 1) for n, x in zip(LENGTHS, BOOTSTRAP, strict=True)]
  expected = bootstrapped([0.8] * len(LENGTHS))
  Checker(fn, PACKED).tokens(expected, r=REWARDS, v=VALUES, b=b)


def test_length_adaptive_lambda():
  check = Checker(lambda mask: rl.length_adaptive_lambda(mask, alpha=0.3))
  check.reduced([ref.length_adaptive_lambda(n, 0.3) for n in LENGTHS])


def test_terminal_rewards():
  """A row without tokens receives nothing, whatever its score."""
  scores = f32(list(np.random.default_rng(4).normal(size=len(LENGTHS))))
  expected = [ref.terminal_rewards(s, n) for s, n in zip(scores, LENGTHS, strict=True)]
  scores[LENGTHS.index(0)] = np.nan
  check = Checker(lambda s, mask: rl.terminal_rewards(s, mask))
  check.tokens(expected, s=np.reshape(scores, GROUPS))


def test_kl_shaped_rewards():
  check = Checker(lambda r, k, mask: rl.kl_shaped_rewards(r, k, mask, kl_coef=0.05))
  rows = zip(REWARDS, VALUES, strict=True)
  check.tokens([ref.kl_shaped_rewards(r, k, 0.05) for r, k in rows], r=REWARDS, k=VALUES)


def test_overlong_penalty():
  lengths = np.arange(0, 26)
  expected = [ref.overlong_penalty(int(n), 20, 5) for n in lengths]
  check = Checker(lambda n: rl.overlong_penalty(n, max_length=20, buffer=5))
  check.reduced(expected, n=lengths)


@pytest.mark.parametrize("ddof", [0, 1])
def test_whiten(ddof):
  check = Checker(lambda x, mask: rl.whiten(x, mask, ddof=ddof))
  check.tokens(ref.whiten(REWARDS, ddof), x=REWARDS)
  check = Checker(lambda x, mask: rl.masked_moments(x, mask, ddof=ddof))
  check.reduced(ref.masked_moments(REWARDS, ddof), x=REWARDS)


def test_whiten_with_moments():
  moments = ref.masked_moments(VALUES, 1)
  expected = [[(x - moments[0]) / (moments[1] + 1e-8) ** 0.5 for x in row] for row in REWARDS]
  check = Checker(lambda x, m, v, mask: rl.whiten(x, mask, moments=(m, v)))
  check.tokens(expected, x=REWARDS, m=np.float64(moments[0]), v=np.float64(moments[1]))


def test_whiten_one_token():
  """The mean of one token is itself."""
  mask = np.zeros(PADDED.shape, bool)
  mask[1, 0, 3] = True
  x = np.full(PADDED.shape, np.nan, np.float32)
  x[1, 0, 3] = 5.0
  assert not np.any(np.asarray(rl.whiten(x, mask)))


@LAYOUTS
def test_whitened_returns(layout):
  """The statistics are of the tokens, however they are packed."""

  def fn(r, mask, segment_ids=None):
    return rl.whitened_returns(r, mask, discount=0.9, segment_ids=segment_ids)

  Checker(fn, layout).tokens(ref.whitened_returns(REWARDS, 0.9), r=REWARDS)


def test_whitened_group_centered():
  prompts, size = GROUPS
  scores = f32(np.random.default_rng(5).normal(size=GROUPS).tolist())
  scores[1] = [0.1] * size
  lengths = [list(LENGTHS[p * size : (p + 1) * size]) for p in range(prompts)]
  check = Checker(lambda r, mask: rl.whitened_group_centered(r, mask))
  check.tokens(ref.whitened_group_centered(scores, lengths), r=np.array(scores))
