"""jaxrl_lm.selection against the reference. A selection depends on the batch: it is not packed."""

import jax
import numpy as np

import jaxrl_lm as rl
from tests import reference as ref
from tests.ragged import LENGTHS, PADDED, Checker, normal, policies, uniform


def test_top_entropy_mask():
  entropy = uniform(1, 0.0, 2.0)
  for fraction in (0.23, 0.6, 1.0):
    check = Checker(lambda h, mask, f=fraction: rl.top_entropy_mask(h, mask, fraction=f))
    check.values(ref.top_entropy_mask(entropy, fraction), h=entropy)


def test_token_covariance():
  logprobs, advantages = policies(2, 0.3)[0], normal(3)
  check = Checker(lambda lp, a, mask: rl.token_covariance(lp, a, mask))
  check.values(ref.token_covariance(logprobs, advantages), lp=logprobs, a=advantages)


def test_kl_cov_selection():
  logprobs, advantages = policies(4, 0.3)[0], normal(5)
  for fraction in (2e-4, 0.1, 0.37):
    check = Checker(lambda lp, a, mask, f=fraction: rl.kl_cov_selection(lp, a, mask, fraction=f))
    expected = ref.kl_cov_selection(logprobs, advantages, fraction)
    assert sum(ref.flat(expected)) == max(1, int(fraction * sum(LENGTHS)))
    check.values(expected, lp=logprobs, a=advantages)


def test_clip_cov_selection():
  """Drawn at random: of the right tokens, in the right number, not always the same."""
  (new, old), advantages = policies(6, 0.3), normal(7)
  d = [ref.token_log_ratio(x, y) for x, y in zip(new, old, strict=True)]
  eligible = ref.clip_cov_eligible(new, d, advantages, cov_low=0.1, cov_high=2.0)
  allowed = PADDED.take(PADDED.put(eligible, bool))
  arrays = [PADDED.put(x, np.float32) for x in (new, d, advantages)]
  for fraction, count in ((0.1, int(0.1 * sum(LENGTHS))), (2e-4, 1), (1.0, int(allowed.sum()))):
    draws = []
    for seed in range(3):
      selected = rl.clip_cov_selection(
        jax.random.key(seed), *arrays, PADDED.mask, fraction=fraction, cov_low=0.1, cov_high=2.0
      )
      assert selected.dtype == bool
      tokens = PADDED.take(np.asarray(selected))
      assert tokens.sum() == np.sum(selected) == count <= allowed.sum()
      assert not np.any(tokens & ~allowed)
      draws.append(tokens.tolist())
    assert (len({tuple(x) for x in draws}) > 1) == (fraction < 1)
