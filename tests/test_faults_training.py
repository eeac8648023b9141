"""Faults that users of other libraries have reported of training loops.

As `test_faults.py`: every test is named after a kind of fault and cites a public report of it; its
docstring is the arithmetic of the right value.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxrl_lm as rl
from jaxrl_lm import lm
from jaxrl_lm.lm import optimizers
from tests.bigram import Bigram
from tests.update_batches import assert_same_bits

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)


def taken(optimizer: Any, gradient: Any, opt_state: Any, params: Any) -> Any:
  """Parameters and optimiser state after the step that an update would take."""
  size = optimizers.gradient_size(gradient)
  gradient = optimizers.clipped(gradient, size.norm, 1.0)
  return optimizers.step(optimizer, gradient, opt_state, params, size.finite & ~size.zero)


def test_nan_skip() -> None:
  """Adam, gradients 1, NaN, 1: as without the NaN, parameters, moments and count, to the bit.

  The first step is -lr 1 / (1 + 1e-8). Unguarded, everything after the NaN is NaN.
  google-deepmind/optax#1746, espnet/espnet#3283.
  """
  optimizer, params = lm.optimizer(0.01), {"w": jnp.ones(())}
  one, nan = {"w": jnp.ones(())}, {"w": jnp.array(jnp.nan)}
  state = optimizer.init(params)
  params, state = taken(optimizer, one, state, params)
  close(params["w"], 0.99)
  after = taken(optimizer, nan, state, params)
  assert_same_bits(after, (params, state))
  assert_same_bits(taken(optimizer, one, *after[::-1]), taken(optimizer, one, state, params))
  updates, spoiled = optimizer.update(nan, state, params)
  updates, _ = optimizer.update(one, spoiled, params)
  assert np.isnan(updates["w"])


def bigram_update(**config: Any) -> tuple[Any, lm.TrainState, lm.Batch]:
  """The update of a policy of one matrix, and four rows of one token."""
  model, params = Bigram(4), jnp.zeros((4, 4))
  settings = lm.UpdateConfig(rl.REINFORCE, lm.optimizer(0.01, weight_decay=0.1), **config)
  tokens = jnp.array([[0], [1], [2], [3]])
  mask = jnp.ones((4, 1), bool)
  batch = lm.Batch(
    *(tokens, mask, tokens, mask),
    advantages=jnp.array([[1.0], [-1.0], [2.0], [0.5]]),
    loss_weights=jnp.full((4, 1), 0.25),
  )
  return lm.compile_update(model, settings), lm.init_state(settings, params), batch


def test_nan_skip_is_decided_by_all_devices_and_for_the_whole_window() -> None:
  """A NaN in one of four rows, each on a device and in a part of its own: nothing is kept of any.

  google-deepmind/optax#1746 (partial accumulation kept after a skip).
  """
  update, state, batch = bigram_update(micro_batches=2)
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
  spread = lambda batch: jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
  state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
  bad = batch._replace(advantages=batch.advantages.at[3].set(jnp.nan))
  after, metrics = update(state, spread(bad))
  assert (int(after.skipped), float(metrics.skipped.mean())) == (1, 1.0)
  assert_same_bits(after._replace(skipped=state.skipped), state)
  after, metrics = update(after, spread(batch))
  assert (int(after.skipped), float(metrics.skipped.mean())) == (1, 0.0)
  assert np.isfinite(after.params).all()
  assert (after.params != state.params).any()


def test_clip_norm() -> None:
  """Norm of (3, 4) is 5, clipped to 1 (.6, .8); of 1e30 (1, 1) it is 1.414e30, not inf.

  A NaN or an inf says so and is not spread as NaN or 0; zeros have norm 0 and a bound of 0 is
  refused; 70000 ones in bfloat16 have norm 264.575, where a sum in bfloat16 stops at 256.
  google-deepmind/optax#1752, AI-Hypercomputer/maxtext#5143.
  """
  size = optimizers.gradient_size
  tree = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
  close(size(tree).norm, 5.0)
  close(jax.tree.leaves(optimizers.clipped(tree, size(tree).norm, 1.0)), [[0.6], [0.8]])
  assert_same_bits(optimizers.clipped(tree, size(tree).norm, 5.0), tree)
  for bad in (jnp.nan, jnp.inf, -jnp.inf):
    found = size({"a": jnp.array([bad, 1.0]), "b": jnp.ones(1)})
    assert not found.finite
    assert not found.zero
  zeros = size({"a": jnp.zeros(3)})
  assert (float(zeros.norm), bool(zeros.finite), bool(zeros.zero)) == (0.0, True, True)
  clipped = optimizers.clipped({"a": jnp.zeros(3)}, zeros.norm, 1.0)
  assert (clipped["a"] == 0).all()
  with pytest.raises(ValueError, match="max_grad_norm"):
    optimizers.clipped(tree, zeros.norm, 0.0)
  for scale in (1e30, 1e-30):
    close(size(jnp.full(2, scale)).norm, np.sqrt(2) * scale, atol=0)
  close(size(jnp.ones(70_000, jnp.bfloat16)).norm, 264.575131)
  assert size(jnp.array([1e-45])).zero == (jnp.array(1e-45) == 0)


def test_zero_grad_step() -> None:
  """AdamW, lr .01, decay .1, w = 1, gradient 1, then 0: the second step is 0, not -.00769.

  m = .09, v = .000999, corrected .473684 and .499750: lr (.670050 + .1 w), w = .989.
  rasbt/reasoning-from-scratch#186.
  """
  optimizer = lm.optimizer(0.01, weight_decay=0.1)
  params, one, zero = ({"w": jnp.array(x)} for x in (1.0, 1.0, 0.0))
  params, state = taken(optimizer, one, optimizer.init(params), params)
  close(params["w"], 0.989)
  updates, _ = optimizer.update(zero, state, params)
  close(updates["w"], -0.01 * (0.473684 / np.sqrt(0.499750) + 0.0989), rtol=1e-5)
  assert_same_bits(taken(optimizer, zero, state, params), (params, state))


def test_zero_grad_step_of_a_batch_without_advantages() -> None:
  """All advantages 0 after a step with momentum. rasbt/reasoning-from-scratch#186."""
  update, state, batch = bigram_update()
  state, _ = update(state, batch)
  after, metrics = update(state, batch._replace(advantages=jnp.zeros((4, 1))))
  assert_same_bits(after, state)
  assert metrics.idle.mean() == 1


def test_donation() -> None:
  """The reference shares its arrays with the policy: after two updates it is what it was.

  A step that donates its state deletes them ('Array has been deleted'), and one whose critic shares
  them too donates a buffer twice. jax-ml/jax#9635, jax-ml/jax#9675, jax-ml/jax#12514.
  """
  update, state, batch = bigram_update()
  reference = state.params
  before = np.array(reference)
  new, _ = update(state, batch)
  update(new, batch)
  assert not any(x.is_deleted() for x in jax.tree.leaves((state, new, batch)))
  np.testing.assert_array_equal(reference, before)
  donating = jax.jit(lambda state: optax.tree.scale(2.0, state), donate_argnums=0)
  donating({"params": reference})
  with pytest.raises(RuntimeError, match="deleted"):
    np.asarray(reference)
