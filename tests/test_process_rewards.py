"""Process rewards, best-of-n, rejection sampling."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests import reference_distillation as truth
from tests.ragged import GROUPS, LENGTHS, PACKED, Checker

NAN = math.nan


def steps_of(seed: int) -> list[list[int]]:
  """Steps of one to three tokens; the second token of every third row belongs to none."""
  rng = np.random.default_rng(seed)
  rows = []
  for i, n in enumerate(LENGTHS):
    ids = np.repeat(np.arange(1, n + 1), rng.integers(1, 4, n))[:n]
    ids[1:2] *= i % 3 > 0
    rows.append([int(k) for k in ids])
  return rows


def test_step_rewards() -> None:
  """Against the reference; scores of steps that no token belongs to hold garbage."""
  step_ids = steps_of(1)
  size = max(LENGTHS)
  scores = np.random.default_rng(2).normal(size=(*GROUPS, size))
  expected = []
  for row, ids in zip(scores.reshape(-1, size), step_ids, strict=True):
    expected.append(truth.step_rewards(row.tolist(), ids))
    row[[k not in ids for k in range(1, size + 1)]] = NAN
  check = Checker(lambda scores, step_ids, mask: rl.step_rewards(scores, mask, step_ids=step_ids))
  check.tokens(expected, scores=scores, step_ids=step_ids)


def test_packed_steps_are_numbered_through() -> None:
  """The steps of the second sample of a row come after those of the first."""
  rng = np.random.default_rng(3)
  steps = [list(range(1, n + 1)) for n in LENGTHS]  # each token a step
  scores = [rng.normal(size=n).tolist() for n in LENGTHS]
  expected = [truth.step_rewards(s, k) for s, k in zip(scores, steps, strict=True)]
  packed_scores = np.full((PACKED.shape[0], 16), NAN, np.float32)
  step_ids = np.zeros(PACKED.shape, np.int32)
  used = [0] * PACKED.shape[0]
  for (index, positions), s in zip(PACKED.places, scores, strict=True):
    row = index[0]
    step_ids[row][positions] = used[row] + 1 + np.arange(len(s))
    packed_scores[row][used[row] : used[row] + len(s)] = s
    used[row] += len(s)
  got = rl.step_rewards(packed_scores, PACKED.mask, step_ids=step_ids)
  np.testing.assert_allclose(PACKED.take(np.asarray(got)), np.concatenate(expected), rtol=1e-6)
  assert not np.asarray(got)[~PACKED.mask].any()


def test_step_ids_that_do_not_exist() -> None:
  """Beyond the scores, or negative: NaN at the end of that step alone, and only where it counts."""
  step_ids = jnp.array([1, 1, 3, 3, -1, 0, 9])
  mask = jnp.array([True] * 6 + [False])
  got = rl.step_rewards(jnp.array([0.5, 1.0]), mask, step_ids=step_ids)
  np.testing.assert_array_equal(got, [0, 0.5, 0, NAN, NAN, 0, 0])


def test_a_step_ends_at_its_last_counted_token() -> None:
  """The separator is tool output, or masked: the score stands before it, and is not lost."""
  step_ids = jnp.array([1, 1, 1, 2])
  mask = jnp.array([True, True, False, False])
  got = rl.step_rewards(jnp.array([0.5, 1.0]), mask, step_ids=step_ids)
  np.testing.assert_array_equal(got, [0, 0.5, 0, 0])


def test_process_supervised_grpo() -> None:
  """arXiv:2402.03300, section 4.1.3: scores of all steps of a group standardised together, then
  the sum of those of this step and later ones."""
  rng = np.random.default_rng(4)
  step_ids = np.array([[[1, 1, 2, 3], [1, 2, 2, 0], [1, 0, 0, 0]]])
  mask, steps = step_ids > 0, np.array([[3, 2, 1]])
  scored = np.arange(1, 4) <= steps[..., None]
  scores = np.where(scored, rng.normal(size=(1, 3, 3)), NAN)

  flat = rl.group_normalized(scores.reshape(1, 9), where=scored.reshape(1, 9), eps=0.0)
  rewards = rl.step_rewards(flat.reshape(1, 3, 3), mask, step_ids=step_ids)
  got = np.asarray(rl.discounted_returns(rewards, mask))

  everything = scores[scored].tolist()
  center, spread = ref.mean(everything), math.sqrt(ref.variance(everything, 1))
  for i in range(3):
    for t in range(4):
      later = [k for k in range(1, 4) if mask[0, i, t] and step_ids[0, i, t] <= k <= steps[0, i]]
      want = sum((scores[0, i, k - 1] - center) / spread for k in later)
      assert got[0, i, t] == pytest.approx(want, rel=1e-5, abs=1e-6)


# ------------------------------------------------------------------------------ weights of samples


def test_best_of_n() -> None:
  rng = np.random.default_rng(5)
  rewards = np.round(rng.normal(size=(40, 5)), 1)
  where = (rng.random((40, 5)) < 0.6) & (np.arange(40) > 0)[:, None]
  got = np.asarray(jax.jit(rl.best_of_n)(np.where(where, rewards, NAN), where=where))
  for row, on in enumerate(where):
    want = np.zeros(5)
    if on.any():
      want[on] = truth.best_of_n(rewards[row][on].tolist())
    np.testing.assert_allclose(got[row], want, rtol=1e-6)
  assert set(got.sum(-1).round(6)) == {0.0, 1.0}  # an empty group, too


def test_rewards_that_are_not_numbers() -> None:
  """NaN is never dropped silently: it has to be excluded."""
  rewards = jnp.array([[NAN, 1.0], [0.0, 1.0], [-math.inf, -math.inf]])
  np.testing.assert_array_equal(rl.best_of_n(rewards), [[NAN, NAN], [0, 1], [0.5, 0.5]])
  got = rl.rejection_sampling(rewards, threshold=1.0)
  np.testing.assert_array_equal(got, [[NAN, 1], [0, 1], [0, 0]])
  where = ~jnp.isnan(rewards)
  np.testing.assert_array_equal(rl.best_of_n(rewards, where=where)[0], [0, 1])
  got = rl.rejection_sampling(rewards, threshold=1.0, where=where)
  np.testing.assert_array_equal(got[0], [0, 1])


def test_best_of_n_is_supervised_learning_on_the_winners() -> None:
  """Weights times `token_mean`: winners over all tokens; weights of the winners' mask: over theirs.

  Log-probs -1, -2 | -3 with rewards 0, 1: 3 / 3 = 1 and 3 / 1 = 3; the loser has no gradient.
  """
  logprobs = jnp.array([[[-1.0, -2.0], [-3.0, NAN]]])
  mask = jnp.array([[[True, True], [True, False]]])
  weights = rl.best_of_n(jnp.array([[0.0, 1.0]]))
  kept = mask & (weights > 0)[..., None]
  arrays = (weights[..., None] * rl.token_mean(mask), rl.token_mean(kept))
  for loss_weights, want, slope in zip(arrays, (1.0, 3.0), (-1 / 3, -1.0), strict=True):
    value, gradient = jax.value_and_grad(
      lambda lp, w=loss_weights: jnp.sum(w * rl.sft_loss(lp, mask))
    )(logprobs)
    assert value == pytest.approx(want)
    np.testing.assert_allclose(gradient, [[[0, 0], [slope, 0]]], rtol=1e-6)
