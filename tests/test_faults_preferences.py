"""Faults that users of other libraries have reported of critics and preference losses.

As `test_faults.py`: every test is named after a kind of fault and cites a public report of it; its
docstring is the arithmetic of the right value.
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)


def one(x: float) -> jax.Array:
  return jnp.array([x], jnp.float32)


ON = jnp.array([[True]])


@pytest.mark.parametrize(
  ("value", "target", "gradient"),
  # max((1 - 3)^2, (0.2 - 3)^2) / 2 = max(4, 7.84) / 2, and the clipped term is a constant
  [(1.0, 3.0, 0.0), (2.9, 0.1, 2.8)],  # max(7.84, (0.2 - 0.1)^2) / 2, unclipped: V - R
)
def test_value_clip(value: float, target: float, gradient: float) -> None:
  """Old value 0, clip 0.2. ray-project/ray#19291, tensorflow/agents#352."""
  loss = lambda v: rl.clipped_value_loss(v, one(0.0), one(target), ON[0], clip=0.2)[0]
  got = jax.value_and_grad(loss)(one(value))
  close(got[0], 3.92)
  close(got[1], [gradient])


def test_value_clip_old_values_are_constants() -> None:
  """Old values that move with the parameters would make the clip idle."""
  grads = jax.grad(lambda *x: rl.clipped_value_loss(*x, ON[0], clip=0.2)[0], argnums=(1, 2))(
    one(2.9), one(0.0), one(0.1)
  )
  assert not any(x.any() for x in grads)


def test_value_clip_fraction() -> None:
  """Old 0, new 1, return 3, clip 0.2: clipped, not "never". RLinf/RLinf#1529.

  For a return of -3 the unclipped error 4 is the larger: outside the band and not clipped. The
  masked tokens do not count.
  """
  mask = jnp.array([True, True, False])
  old, new = jnp.zeros(3), jnp.array([1.0, 1.0, jnp.nan])
  fraction = rl.value_clip_fraction(new, old, jnp.array([3.0, -3.0, 3.0]), mask, clip=0.2)
  close(fraction.mean(), 0.5)
  assert fraction.count == 2


def test_ref_ignored() -> None:
  """Policy difference 3, reference difference 1, beta 0.1: -log sig(0.2) = 0.598139.

  Without the reference -log sig(0.3) = 0.554355; with the policy as its own reference log 2. The
  reference carries no gradient. huggingface/trl#1962, linkedin/Liger-Kernel#387.
  """
  on = jnp.ones((1, 2), bool)
  chosen, rejected = jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -3.0]])
  ref_chosen, ref_rejected = jnp.array([[-2.0, -1.0]]), jnp.array([[-2.0, -2.0]])

  def loss(chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any) -> jax.Array:
    pair = ((chosen, ref_chosen), (rejected, ref_rejected))
    return rl.dpo_loss(*(rl.sequence_log_ratio(x, ref, on) for x, ref in pair))[0]

  value, gradients = jax.value_and_grad(loss, (0, 1, 2, 3))(
    chosen, rejected, ref_chosen, ref_rejected
  )
  close(value, 0.598139)
  slope = 0.1 / (1 + math.exp(0.2))
  for got, want in zip(gradients, (-slope, slope, 0.0, 0.0), strict=True):
    close(got, np.full((1, 2), want))
  close(loss(chosen, rejected, chosen, rejected), math.log(2))
  free = rl.cpo_loss(rl.sequence_logprob(chosen, on), rl.sequence_logprob(rejected, on))
  close(free, [0.554355])


def test_dpo_smoothing() -> None:
  """beta margin = 2, smoothing 0.1, -log sig(2) = 0.126928, -log sig(-2) = 2.126928.

  conservative: 0.9 (0.126928) + 0.1 (2.126928) = 0.326928
  robust: (0.9 (0.126928) - 0.1 (2.126928)) / 0.8 = -0.123072, and negative is right

  Where smoothing has no meaning it is refused, not ignored; so is 0.5.
  huggingface/trl#1035, huggingface/trl#1653.
  """
  two, zero = one(2.0), one(0.0)
  constants = {"label_smoothing": 0.1, "beta": 1.0}
  close(rl.conservative_dpo_loss(two, zero, **constants), [0.326928])
  close(rl.robust_dpo_loss(two, zero, **constants), [-0.123072])
  for loss in (rl.conservative_dpo_loss, rl.robust_dpo_loss, rl.exo_loss, rl.aot_unpaired_loss):
    with pytest.raises(ValueError, match=r"label_smoothing must lie in .*, got 0\.5"):
      loss(two, zero, label_smoothing=0.5)
  for loss in (rl.dpo_loss, rl.hinge_dpo_loss, rl.ipo_loss, rl.sppo_loss, rl.simpo_loss):
    assert "label_smoothing" not in inspect.signature(loss).parameters


def test_robust_loss_is_unbiased_under_flips() -> None:
  """0.9 robust(x) + 0.1 robust(-x) is the loss of the true labels, at every x."""
  c, r = jnp.linspace(-5.0, 5.0, 11), jnp.zeros(11)
  robust = partial(rl.robust_dpo_loss, label_smoothing=0.1)
  close(0.9 * robust(c, r) + 0.1 * robust(r, c), rl.dpo_loss(c, r), rtol=1e-5)


def test_ignored_option() -> None:
  """Margin 4, beta 0.5: sigmoid 0.126928, hinge max(0, 1 - 2) = 0, IPO (4 - 1)^2 = 9.

  RLinf/RLinf#316, modelscope/ms-swift#10167.
  """
  four, zero = one(4.0), one(0.0)
  close(rl.dpo_loss(four, zero, beta=0.5), [0.126928])
  close(rl.hinge_dpo_loss(four, zero, beta=0.5), [0.0])
  close(rl.ipo_loss(four, zero, beta=0.5), [9.0])


def test_ipo_length_convention() -> None:
  """Two responses of 4 tokens, log-ratio 0.5 and -0.5 per token, beta 0.1.

  Sum: (4 - 5)^2 = 1. Mean: (1 - 5)^2 = 16. huggingface/trl#1677, modelscope/ms-swift#9925.
  """
  on, zero = jnp.ones((1, 4), bool), jnp.zeros((1, 4))
  for log_ratio, want in ((rl.sequence_log_ratio, 1.0), (rl.mean_log_ratio, 16.0)):
    pair = (log_ratio(zero + x, zero, on) for x in (0.5, -0.5))
    close(rl.ipo_loss(*pair), [want])


def test_eos_count_of_simpo() -> None:
  """[-1, -1, -4 (stop)] against [-2]: means -2 with the stop token, -1 without.

  beta 1, gamma 0: log 2 with it, -log sig(1) = 0.313262 without; a mean of -2/3, which counts a
  token that it does not sum, would give -log sig(4/3) = 0.234. PaddlePaddle/PaddleFormers#4909.
  """
  logprobs = jnp.array([[-1.0, -1.0, -4.0]])
  for mask, want in (([1, 1, 1], math.log(2)), ([1, 1, 0], 0.313262)):
    chosen = rl.mean_logprob(logprobs, jnp.array([mask], bool))
    close(rl.simpo_loss(chosen, one(-2.0), beta=1.0, gamma=0.0), [want])


@pytest.mark.parametrize("margin", [-104.0, -200.0])
def test_hazard_log_of_a_sigmoid(margin: float) -> None:
  """-log sig(-200) is 200 with gradient -1; the log of a computed sigmoid is inf and NaN."""
  losses = {
    "dpo": lambda x: rl.dpo_loss(x, one(0.0), beta=1.0)[0],
    "bradley_terry": lambda x: rl.bradley_terry_loss(x, one(0.0))[0],
    "cpo": lambda x: rl.cpo_loss(x, one(0.0), beta=1.0)[0],
    "bco": lambda x: rl.bco_loss(x, ON[0], delta=0.0, beta=1.0)[0],
  }
  for name, loss in losses.items():
    value, gradient = jax.value_and_grad(loss)(one(margin))
    close(value, -margin, err_msg=name)
    close(gradient, [-1.0], err_msg=name)


@pytest.mark.parametrize("dirt", [jnp.nan, -jnp.inf, -200.0, 1e30])
def test_masked_nan(dirt: float) -> None:
  """The last token is padding: log-ratio 0.5, and -log sig(0.05) = 0.668460 of the pair.

  huggingface/trl#1447: a loss that goes NaN where every counted token is finite.
  """
  on = jnp.array([[True, True, False]])
  logprobs = jnp.array([[-1.0, -1.0, dirt]])
  ref = jnp.array([[-1.25, -1.25, 0.0]])

  def loss(logprobs: jax.Array) -> jax.Array:
    return rl.dpo_loss(rl.sequence_log_ratio(logprobs, ref, on), one(0.0))[0]

  value, gradient = jax.value_and_grad(loss)(logprobs)
  close(value, 0.668460)
  slope = -0.1 / (1 + math.exp(0.05))
  np.testing.assert_array_equal(gradient[0, 2], 0.0)
  close(gradient[0, :2], [slope, slope])


def test_all_masked() -> None:
  """A response without a token has log-ratio 0, whatever stands there: log 2, no gradient there.

  Peers divide by its length: TRL's CPO and ORPO, Liger. huggingface/trl#1473.
  """
  off, x = jnp.zeros((1, 2), bool), jnp.full((1, 2), jnp.nan)
  for log_ratio in (rl.sequence_log_ratio, rl.mean_log_ratio):
    value, gradient = jax.value_and_grad(
      lambda x, f=log_ratio: rl.dpo_loss(f(x, x, off), one(0.0))[0]
    )(x)
    close(value, math.log(2))
    assert not gradient.any()
  value, gradient = jax.value_and_grad(
    lambda x: rl.orpo_loss(rl.mean_logprob(x, off), one(-1.0))[0]
  )(x)
  # log odds of log-prob 0: -log eps = 15.9424 in float32; of -1: -1 - log(1 - 1/e) = -0.541325
  close(value, math.log1p(math.exp(-15.942385 - 0.541325)), rtol=1e-4)
  assert not gradient.any()


def test_kto_batch_of_one_class() -> None:
  """beta 0.1, baseline 0: 1 - sig(0.1), 1 - sig(0.2), or sig of them; no mean of nothing.

  huggingface/trl#1911, huggingface/trl#2554: NaN where a class is missing.
  """
  log_ratio = jnp.array([1.0, 2.0])
  sigmoids = 1 / (1 + np.exp([-0.1, -0.2]))
  for label, want in ((True, 1 - sigmoids), (False, sigmoids)):
    loss = partial(rl.kto_loss, desirable=jnp.full(2, label), baseline=0.0)
    close(loss(log_ratio), want)
    close(jnp.abs(jax.grad(lambda x, f=loss: f(x).sum())(log_ratio)), 0.1 * want * (1 - want))


def test_kto_baseline_is_a_constant_of_the_whole_batch() -> None:
  """Mean 1 of [3, -1]; the mean of the baselines of two halves would be (3 + 0) / 2 = 1.5."""
  mismatched = jnp.array([3.0, -1.0])
  close(rl.kto_baseline(mismatched), 1.0)
  halves = [rl.average(x, jnp.ones(1, bool)) for x in (mismatched[:1], mismatched[1:])]
  close(jnp.maximum((halves[0] + halves[1]).mean(), 0.0), 1.0)

  def loss(x: jax.Array) -> jax.Array:
    return rl.kto_loss(jnp.ones(2), jnp.array([True, False]), baseline=rl.kto_baseline(x)).sum()

  assert not jax.grad(loss)(mismatched).any()
