"""jaxrl_lm.exact.ratio_distributions: every response, binomials, sampling; the stated tolerance."""

import jax
import numpy as np
import pytest
import scipy.stats

import jaxrl_lm as rl
from jaxrl_lm.exact import chains
from jaxrl_lm.exact import ratio_distributions as rd
from jaxrl_lm.exact.chains import MarkovChain
from tests.test_chains import BEHAVIOUR, TARGET, enumerated, five_token_chain, iid

BANDS = {
  rd.token_band: rl.per_token,
  rd.prefix_band: rl.per_prefix,
  rd.sequence_band: rl.per_sequence,
  rd.geometric_band: rl.per_sequence_geometric,
}


@pytest.mark.parametrize("band", BANDS)
def test_against_every_response_at_the_levels_of_the_library(band, x64):
  for length in (1, 2, 5):
    probability, log_ratio = enumerated(BEHAVIOUR, TARGET, length)
    level = np.asarray(jax.jit(BANDS[band])(log_ratio, np.ones_like(log_ratio, bool)))
    low, high = np.log(0.7) / length, np.log(1.6) / length
    expected = [probability @ x.mean(axis=1) for x in (level < low, level > high)]
    fractions = band(BEHAVIOUR, TARGET, length, low, high)
    scale = length if band is rd.geometric_band else 1
    gap = scale * min(np.abs(level - low).min(), np.abs(level - high).min())
    assert gap > fractions.tolerance  # else the fractions are those of a moved edge
    np.testing.assert_allclose([fractions.below, fractions.above], expected, atol=1e-13)
    np.testing.assert_allclose(fractions.inside, 1 - sum(expected), atol=1e-13)


def test_edges_are_moved_by_no_more_than_the_tolerance():
  probability, log_ratio = enumerated(BEHAVIOUR, TARGET, 6)
  total = log_ratio.sum(axis=1)
  points = np.concatenate([np.random.default_rng(0).normal(size=300), np.unique(total)[::5]])
  for resolution in (1e-4, 1e-2):
    cdf, tolerance = rd.log_ratio_cdf(BEHAVIOUR, TARGET, 6, points, resolution=resolution)
    reached = total <= points[:, None] + tolerance
    strictly = total <= points[:, None] - tolerance
    assert np.all(cdf <= reached @ probability + 1e-12)
    assert np.all(cdf >= strictly @ probability - 1e-12)
    assert np.all((cdf >= 0) & (cdf <= 1))
    assert np.diff(cdf[np.argsort(points)]).min() > -1e-12


@pytest.mark.parametrize("length", [1, 7, 64, 4096])
def test_two_independent_tokens_are_a_binomial(length):
  a, b = np.log(0.51 / 0.5), np.log(0.49 / 0.5)
  count = np.unique(np.linspace(0, length - 1, 60).astype(int))
  between = (count + 0.5) * a + (length - count - 0.5) * b
  cdf, tolerance = rd.log_ratio_cdf(iid(0.5, 0.5), iid(0.51, 0.49), length, between)
  assert tolerance < (a - b) / 2
  np.testing.assert_allclose(cdf, scipy.stats.binom.cdf(count, length, 0.5), atol=1e-11)


def test_prefixes_are_the_mean_over_all_lengths():
  mixture = rd.prefix_band(BEHAVIOUR, TARGET, 20, -0.3, 0.2)
  each = [
    rd.sequence_band(BEHAVIOUR, TARGET, t, -0.3, 0.2, resolution=1e-3)[:3] for t in range(1, 21)
  ]
  np.testing.assert_allclose(mixture[:3], np.mean(each, axis=0), atol=1e-4)


def sampled_log_ratios(behaviour, target, length, number):
  """Token log-ratios [number, length] of responses drawn from the behaviour."""
  rng = np.random.default_rng(5)
  tables = [np.cumsum(np.exp(x), axis=-1) for x in behaviour]
  ratio = [p - q for p, q in zip(target, behaviour)]
  u = rng.random((length, number, 1))
  last = np.minimum((tables[0] < u[0]).sum(axis=1), len(behaviour.initial) - 1)
  result = np.empty((length, number))
  result[0] = ratio[0][last]
  for t in range(1, length):
    token = np.minimum((tables[1][last] < u[t]).sum(axis=1), len(behaviour.initial) - 1)
    result[t], last = ratio[1][last, token], token
  return result.T


def test_against_sampling_and_the_normal_law_at_great_length():
  behaviour, target = five_token_chain()
  length, number = 4096, 1500
  prefixes = np.cumsum(sampled_log_ratios(behaviour, target, length, number), axis=1)
  low, high = np.log(0.8), np.log(1.2)
  root = np.sqrt(length)
  for band, values, edges in [
    (rd.sequence_band, prefixes[:, -1], (low, high)),
    (rd.sequence_band, prefixes[:, -1], (-0.02 * root, 0.02 * root)),
    (rd.geometric_band, prefixes[:, -1] / length, (np.log(1 - 3e-4), np.log(1 + 4e-4))),
    (rd.prefix_band, prefixes, (low, high)),
  ]:
    exact = band(behaviour, target, length, *edges)
    for fraction, outside in ((exact.below, values < edges[0]), (exact.above, values > edges[1])):
      by_response = outside.reshape(number, -1).mean(axis=1)
      error = by_response.std() / np.sqrt(number) + 1e-9
      assert abs(by_response.mean() - fraction) < 4 * error
  mean, variance = (x[-1] for x in chains.log_ratio_moments(behaviour, target, horizon=length))
  points = np.linspace(-5, 4, 40)
  cdf, tolerance = rd.log_ratio_cdf(behaviour, target, length, points)
  assert tolerance < 3e-3
  normal = scipy.stats.norm.cdf(points, mean, np.sqrt(variance))
  np.testing.assert_allclose(cdf, normal, atol=2e-3)
  # A hundred times coarser, and still right to the square of the tolerance.
  coarse, tolerance = rd.log_ratio_cdf(behaviour, target, length, points, resolution=1e-2)
  np.testing.assert_allclose(coarse, cdf, atol=tolerance**2 / 70 * 0.25 / variance * 1.5)


def test_clipping_at_great_length():
  """A token band clips nothing; GSPO's becomes a threshold on KL per token."""
  behaviour, target = five_token_chain()
  assert rd.token_band(behaviour, target, 4096, np.log(0.8), np.log(1.2)).inside == 1
  gspo = [rd.geometric_band(behaviour, target, n, np.log(1 - 3e-4), np.log(1 + 4e-4)).inside
          for n in (64, 1024, 65536)]  # fmt: skip
  assert gspo[0] < gspo[1] < gspo[2]
  assert gspo[2] > 0.85  # a KL of 2e-4 lies inside 3e-4
  root = [rd.sequence_band(behaviour, target, n, -0.02 * n**0.5, 0.02 * n**0.5).inside
          for n in (64, 1024)]  # fmt: skip
  assert abs(root[0] - root[1]) < 0.1


def test_equal_policies_and_sums_without_spread():
  fractions = rd.sequence_band(BEHAVIOUR, BEHAVIOUR, 4096, -1e-6, 1e-6)
  np.testing.assert_allclose(fractions[:3], [0, 1, 0], atol=1e-12)
  assert rd.prefix_band(BEHAVIOUR, BEHAVIOUR, 64, -1e-6, 1e-6).inside > 1 - 1e-12
  # One token of ratio 1.25, one of 0.8 in turn, after a first token that is certain.
  behaviour = MarkovChain(np.log([0.5, 0.25, 0.25]), np.log(np.full((3, 3), 1 / 3)))
  cdf, _ = rd.log_ratio_cdf(behaviour, behaviour, 3, [-np.inf, -1e-3, 0.0, 1e-3, np.inf])
  np.testing.assert_allclose(cdf, [0, 0, 0.5, 1, 1], atol=1e-12)


def test_rare_tokens_of_great_ratio():
  """A skewed chain: the range is wide, the mass at its end 1e-6."""
  behaviour, target = iid(1 - 1e-6, 1e-6), iid(0.9, 0.1)
  for length in (1, 3, 50):
    middle = 0.5 * np.log(1e5) + length * np.log(0.9)
    fractions = rd.sequence_band(behaviour, target, length, -20.0, middle)
    np.testing.assert_allclose(fractions.above, -np.expm1(length * np.log1p(-1e-6)), atol=1e-12)


def test_bad_inputs():
  good = iid(0.5, 0.5)
  for band in BANDS:
    with pytest.raises(ValueError, match="high"):
      band(good, good, 4, 0.1, 0.1)
    with pytest.raises(ValueError, match="length"):
      band(good, good, 0, -0.1, 0.1)
  with pytest.raises(ValueError, match="resolution"):
    rd.sequence_band(good, good, 4, -0.1, 0.1, resolution=0.0)
