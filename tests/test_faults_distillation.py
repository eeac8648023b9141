"""Reported faults (see `test_faults`) that distillation and its neighbours can have.

Each docstring is the arithmetic of the right value, and names a public report.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl

INF = math.inf
close = lambda got, want, **rest: np.testing.assert_allclose(got, want, rtol=2e-6, **rest)


def test_fullkl_inf() -> None:
  """Student [1, 0, -inf], teacher [0, 0, -inf]; both exclude the third token.

  S = .731059, .268941, T = .5, .5. KL(S || T) = log 2 - H(S) = .110944; KL(T || S) =
  -log 2 - (log .731059 + log .268941) / 2 = .120115; M = .615529, .384471: JSD = (KL(T || M) +
  KL(S || M)) / 2 = (.027433 + .029638) / 2 = .028535. A plain sum is NaN, as in
  TRL's GKD. google-deepmind/optax#896.
  """
  student, teacher = jnp.array([[1.0, 0.0, -INF]]), jnp.array([[0.0, 0.0, -INF]])
  for f, want in (
    (rl.exact_kl, 0.110944),
    (rl.forward_kl, 0.120115),
    (rl.jensen_shannon, 0.028535),
  ):
    value, gradient = jax.jit(jax.value_and_grad(lambda z, f=f: f(z, teacher)[0]))(student)
    close(value, want, atol=1e-6)
    assert np.isfinite(gradient).all()
    assert gradient[0, 2] == 0
  # +inf by definition where one excludes what the other allows, on that side only.
  allowed = jnp.zeros((1, 3))
  assert rl.forward_kl(student, allowed)[0] == INF
  close(rl.forward_kl(allowed, student), math.log(3) - 0.582203, atol=1e-6)  # H(S) = .582203


def test_kl_gradient() -> None:
  """pi = [.7, .2, .1], ref = [.2, .3, .5]: the gradient in the logits is pi - ref for the forward
  and [.432506, -.208072, -.224434] for the reverse KL. As an advantage, log ref - log pi gives the
  reverse one (k1 in a loss gives none). OpenRLHF/OpenRLHF#1309."""
  pi, ref = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
  z, teacher = jnp.log(pi)[None], jnp.log(ref)[None]
  close(jax.grad(lambda z: rl.forward_kl(z, teacher)[0])(z)[0], pi - ref, atol=1e-6)
  reverse = np.array([0.432506, -0.208072, -0.224434])
  close(jax.grad(lambda z: rl.exact_kl(z, teacher)[0])(z)[0], reverse, atol=1e-6)

  def sampled(z: jax.Array, advantage: bool) -> jax.Array:
    lp, on = jax.nn.log_softmax(z)[0], jnp.ones(3, bool)
    k1 = rl.kl_k1(lp, teacher[0], on)
    a = rl.distillation_advantages(lp, teacher[0], on)
    return jnp.sum(pi * (-a * lp if advantage else k1))

  close(jax.grad(lambda z: sampled(z, True))(z)[0], reverse, atol=1e-6)
  close(jax.grad(lambda z: sampled(z, False))(z)[0], 0.0, atol=1e-6)


def test_kl_sign() -> None:
  """Student -0.5, teacher -1.5: the teacher likes the token less, so the advantage is -1.

  huggingface/trl#463.
  """
  on = jnp.ones(1, bool)
  close(rl.distillation_advantages(jnp.array([-0.5]), jnp.array([-1.5]), on), [-1.0])
  # And a divergence above its target raises the coefficient.
  assert rl.adaptive_kl_coef(jnp.array(0.1), 9.0, target=6.0) > 0.1


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_ga_token_mean(parts: int) -> None:
  """VAPO's positive term: log-probs -1 -2 -3 | -4 | -5 -6 | -7, rewards 1, 0, 1, 1: 24 / 6 = 4
  however the rows are cut. Means of halves give (2 + 6) / 2 = 4, of quarters (2 + 0 + 5.5 + 7) / 4.
  allenai/open-instruct#1161; the micro-batch's own count: NVIDIA-NeMo/RL."""
  logprobs = -np.array([[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 0, 0]], np.float32)
  mask = logprobs < 0
  rewards = np.array([1.0, 0.0, 1.0, 1.0])
  weights = np.asarray(rl.token_mean(mask & (rewards > 0)[:, None]))
  value = gradient = 0.0
  for rows in np.split(np.arange(4), parts):
    part = lambda lp, rows=rows: jnp.sum(
      weights[rows] * rl.positive_nll_loss(lp, rewards[rows], mask[rows])
    )
    v, g = jax.value_and_grad(part)(jnp.asarray(logprobs[rows]))
    value, gradient = value + v, gradient + np.asarray(g).sum()
  close(value, 4.0)
  close(gradient, -1.0)


def test_all_masked() -> None:
  """No token, no correct sample, no sample: 0 everywhere, gradient 0. verl-project/verl#782."""
  off, logprobs = jnp.zeros((2, 3), bool), jnp.full((2, 3), jnp.nan)
  logits = jnp.full((2, 3, 4), jnp.nan)

  def loss(logprobs: jax.Array, logits: jax.Array) -> jax.Array:
    weights = rl.token_mean(off)
    terms = rl.positive_nll_loss(logprobs, jnp.ones(2), off) + rl.sft_loss(logprobs, off)
    terms += rl.jensen_shannon(logits, logits, mask=off) + rl.forward_kl(logits, logits, mask=off)
    return jnp.sum(weights * terms)

  value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(logprobs, logits)
  assert value == 0
  assert not any(np.asarray(g).any() for g in gradients)
  nobody = jnp.zeros((2, 3), bool)
  assert not rl.best_of_n(logprobs, where=nobody).any()
  assert not rl.preference_pairs(logprobs, where=nobody).where.any()


def test_topk_off_by_one() -> None:
  """Logits 3, 2, 1, 0 = .6439 .2369 .0871 .0321; the teacher's top 2 are .5 and .3, rest .2.

  Forward KL over two tokens and the rest: .5 log(.5 / .6439) + .3 log(.3 / .2369) + .2 log(.2 /
  .1192) = -.126475 + .070864 + .103495 = .047884. Three outcomes, not two or
  four. kingoflolz/mesh-transformer-jax#164.
  """
  logits, teacher = jnp.array([[3.0, 2.0, 1.0, 0.0]]), jnp.log(jnp.array([[0.5, 0.3]]))
  buckets = rl.top_k_with_tail(logits, teacher, jnp.array([[0, 1]]))
  assert buckets.logprobs.shape == (1, 3)
  close(rl.forward_kl(*buckets), [0.047884], atol=1e-6)


def test_fp16_lsm_grad() -> None:
  """A vocabulary of 2^17 in float16 has a sum beyond 65504: the gradient S - T is finite.

  jax-ml/jax#40409.
  """
  size = 2**17
  logits = jnp.zeros((1, size), jnp.float16)
  teacher = jnp.where(jnp.arange(size)[None] == 3, 10.0, 0.0).astype(jnp.float16)
  gradient = jax.jit(jax.grad(lambda z: rl.forward_kl(z, teacher)[0]))(logits)
  assert np.isfinite(gradient).all()
  # T = e^10 / (2^17 - 1 + e^10) = .14388
  close(gradient[0, 3], 1 / size - 0.14388, atol=2e-4)


def test_temperature() -> None:
  """Logits 2, 1, 0 against 0, 0, 0 at T = 0.5 are 4, 2, 0: KL(T || S) = logsumexp - 2 - log 3
  = 4.142932 - 3.098612 = 1.044320; not divided log-probs, and not times T^2 (0.26108).
  huggingface/trl#4159."""
  value = rl.forward_kl(jnp.array([[2.0, 1.0, 0.0]]), jnp.zeros((1, 3)), temperature=0.5)
  close(value, [1.044320], atol=1e-6)


def test_zero_var_kl() -> None:
  """Two groups, one with equal rewards: it has no pair, and no share in a loss of pairs.

  huggingface/trl#7068.
  """
  pairs = rl.preference_pairs(jnp.array([[1.0, 1.0], [1.0, 0.0]]))
  weights = rl.token_mean(pairs.where)
  np.testing.assert_array_equal(weights, [0, 1])
