"""Online preferences: pairs of groups, XPO's bonus, Nash-MD's gradient, its opponent."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference_distillation as truth
from tests.ragged import GROUPS, LENGTHS, Checker, logits_rows, normal, policies

INF, NAN = math.inf, math.nan

pairs_of = jax.jit(rl.preference_pairs)


def test_pairs_of_ragged_groups() -> None:
  """Each group alone, as a list of its counted samples, indices mapped back to its slots."""
  rng = np.random.default_rng(1)
  rewards = np.round(rng.normal(size=(40, 5)), 1)  # with ties
  where = rng.random((40, 5)) < 0.7
  pairs = jax.device_get(pairs_of(np.where(where, rewards, NAN), where=where))
  seen = set()
  for row, on in enumerate(where):
    slots = np.flatnonzero(on)
    there = len(set(rewards[row][on])) > 1
    assert pairs.where[row] == there
    seen.add(there)
    if there:
      best, worst = truth.preference_pair(rewards[row][on].tolist())
      assert pairs.chosen[row] == slots[best]
      assert pairs.rejected[row] == slots[worst]
  assert seen == {True, False}


def test_no_pair_without_a_preference() -> None:
  """Equal up to rounding, a group of one, a NaN that was not excluded."""
  rewards = jnp.array([[0.1 + 0.2, 0.3], [1.0, 0.0], [NAN, 0.0], [-INF, 0.0], [2.0, 1.0]])
  where = jnp.array([[True, True], [True, False], [True, True], [True, True], [True, True]])
  pairs = pairs_of(rewards, where=where)
  np.testing.assert_array_equal(pairs.where, [False, False, False, True, True])
  np.testing.assert_array_equal(pairs.chosen[3:], [1, 0])
  np.testing.assert_array_equal(pairs.rejected[3:], [0, 1])


def test_online_dpo_is_dpo_on_the_best_and_the_worst() -> None:
  """-log sigmoid(beta (S+ - S-)) of the chosen indices; other samples get no gradient at all."""
  rewards = jnp.array([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0]])
  sums = jnp.array([[-4.0, -6.0, NAN], [-3.0, -5.0, NAN]])
  pairs = pairs_of(rewards)

  def loss(sums: jax.Array) -> jax.Array:
    margin = rl.sample_at(sums, pairs.chosen) - rl.sample_at(sums, pairs.rejected)
    return jnp.sum(jnp.where(pairs.where, -jax.nn.log_sigmoid(0.1 * margin), 0.0))

  value, gradient = jax.value_and_grad(loss)(sums)
  margins = np.array([-6.0 + 4.0, -3.0 + 5.0])
  slopes = 0.1 / (1 + np.exp(0.1 * margins))
  np.testing.assert_allclose(value, np.log1p(np.exp(-0.1 * margins)).sum(), rtol=1e-6)
  want = [[slopes[0], -slopes[0], 0], [-slopes[1], slopes[1], 0]]
  np.testing.assert_allclose(gradient, want, rtol=1e-6)


def test_an_index_outside_the_group() -> None:
  got = rl.sample_at(jnp.ones((4, 3)), jnp.array([-1, 0, 2, 3], jnp.int8))
  np.testing.assert_array_equal(got, [NAN, 1, 1, NAN])


def test_xpo() -> None:
  """DPO of the pair plus alpha times the log-prob of the reference's sample, chosen or rejected.

  S = log pi - log ref = 1 and -2, beta 0.1: -log sigmoid(0.3) = 0.554355. y_ref is the rejected one
  with log pi = -20, alpha 0.01: 0.354355. Its slope: 0.1 sigmoid(-0.3) + 0.01 = 0.052556.
  """

  def loss(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    dpo = -jax.nn.log_sigmoid(0.1 * ((chosen + 31.0) - (rejected + 18.0)))
    return rl.xpo_loss(dpo, rejected, alpha=0.01)[0]

  value, slopes = jax.value_and_grad(loss, (0, 1))(jnp.array([-30.0]), jnp.array([-20.0]))
  np.testing.assert_allclose(value, 0.354355, rtol=1e-5)
  np.testing.assert_allclose(slopes, [[-0.0425557], [0.0525557]], rtol=1e-5)


def test_nash_md_advantages() -> None:
  """Against the reference, on ragged rows; 0 in the row without a token."""
  lp, lr = policies(41, 0.5)
  preferences = np.random.default_rng(42).uniform(size=GROUPS)
  expected = [
    truth.nash_md_advantage(p, *rows, 0.2) if n else 0.0
    for p, n, *rows in zip(preferences.ravel().tolist(), LENGTHS, lp, lr, strict=True)
  ]
  check = Checker(lambda p, lp, lr, mask: rl.nash_md_advantages(p, lp, lr, mask, kl_coef=0.2))
  check.reduced(expected, p=preferences, lp=lp, lr=lr)


@pytest.mark.usefixtures("x64")
def test_nash_md_follows_the_gradient_of_its_game() -> None:
  """One-token responses, all of them: E_{y ~ pi} A(y) grad log pi(y) with the win rate against the
  mixture is the gradient of E P(y > y') - tau KL(pi || ref), the opponent held fixed."""
  rng = np.random.default_rng(43)
  size, tau = 5, 0.3
  z, ref = jnp.asarray(rng.normal(size=size)), jnp.asarray(rng.normal(size=size))
  strength = rng.normal(size=(size, size))
  wins = 1 / (1 + np.exp(strength.T - strength))  # P(row beats column), not transitive
  ref_logprobs = jax.nn.log_softmax(ref)
  opponent = jnp.exp(rl.geometric_mixture(z[None], ref[None], share=0.25)[0])

  def game(z: jax.Array) -> jax.Array:
    p = jax.nn.softmax(z)
    return p @ (wins @ opponent) - tau * rl.exact_kl(z[None], ref[None])[0]

  def surrogate(z: jax.Array) -> jax.Array:
    lp = jax.nn.log_softmax(z)[:, None]  # [size, 1]: a batch of all responses
    on = jnp.ones((size, 1), bool)
    advantages = rl.nash_md_advantages(wins @ opponent, lp, ref_logprobs[:, None], on, kl_coef=tau)
    gain = rl.reinforce(rl.on_policy_log_ratio(lp, on), advantages[:, None])
    return jnp.sum(jax.lax.stop_gradient(jnp.exp(lp)) * gain)

  np.testing.assert_allclose(
    jax.jit(jax.grad(surrogate))(z), jax.jit(jax.grad(game))(z), rtol=1e-9, atol=1e-12
  )


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_geometric_mixture(share: float) -> None:
  """Against the reference; at the ends the policy and the reference themselves."""
  z, y = logits_rows(44), logits_rows(45)
  check = Checker(lambda z, y, mask: rl.geometric_mixture(z, y, share=share, mask=mask))
  expected = [
    [truth.geometric_mixture(a, b, share, 1.0) for a, b in zip(*rows, strict=True)]
    for rows in zip(z, y, strict=True)
  ]
  check.values(expected, z=z, y=y)


def test_geometric_mixture_of_excluded_tokens() -> None:
  """What either excludes is impossible inside (0, 1), and only there."""
  z, y = jnp.array([[0.0, 0.0, -INF, 0.0]]), jnp.array([[0.0, 0.0, 0.0, -INF]])
  third, half = math.log(1 / 3), math.log(0.5)
  wanted = {0.0: [third, third, -INF, third], 1.0: [third, third, third, -INF]}
  for share, want in (wanted | {0.5: [half, half, -INF, -INF]}).items():
    got: Any = rl.geometric_mixture(z, y, share=share)[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)
  nothing = rl.geometric_mixture(jnp.array([[0.0, -INF]]), jnp.array([[-INF, 0.0]]), share=0.5)
  assert np.isnan(nothing).all()


def test_the_penalty_of_trl_is_per_state() -> None:
  """P - 1/2 as the advantage and k2 in the loss: gradient (P - 1/2) - beta delta_t of each token,
  where the paper multiplies every score by the sum of all deltas."""
  lp, lr = (jnp.asarray(x[1])[None] for x in policies(46, 0.5))
  on = jnp.ones(lp.shape, bool)
  delta = lp - lr

  def loss(lp: jax.Array) -> jax.Array:
    advantages = rl.nash_md_advantages(jnp.array([0.9]), lp, lr, on, kl_coef=0.0)
    return rl.objective_loss(
      rl.REINFORCE, lp, None, advantages[..., None], on, loss_weights=rl.sequence_sum(on),
      ref_logprobs=lr, kl=rl.kl_k2, kl_coef=0.1,
    )[0]  # fmt: skip

  np.testing.assert_allclose(jax.jit(jax.grad(loss))(lp), -0.4 + 0.1 * delta, rtol=1e-5)
  paper = rl.nash_md_advantages(jnp.array([0.9]), lp, lr, on, kl_coef=0.1)
  np.testing.assert_allclose(paper, [0.4 - 0.1 * float(delta.sum())], rtol=1e-5)


def test_pairs_are_equivariant() -> None:
  """Permuting the samples permutes the indices, where there are no ties."""
  rewards = np.array(normal(47)[1])[:6].reshape(2, 3)
  order = np.array([2, 0, 1])
  one, other = pairs_of(rewards), pairs_of(rewards[:, order])
  np.testing.assert_array_equal(order[np.asarray(other.chosen)], one.chosen)
  np.testing.assert_array_equal(order[np.asarray(other.rejected)], one.rejected)
