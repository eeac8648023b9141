"""What an optimiser may decay, and in which precision it works."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_lm import lm
from jaxrl_lm.lm import optimizers
from tests import update_batches

EVERY_KIND = dataclasses.replace(
  update_batches.WITH_VALUES, num_layers=2, output_bias=True, qk_norm=True
)


@pytest.mark.parametrize("scanned", [False, True])
def test_norms_and_biases_are_not_decayed(scanned: bool) -> None:
  _, params = lm.abstract_params(dataclasses.replace(EVERY_KIND, scan_layers=scanned))
  decayed = {}
  for path, decays in jax.tree_util.tree_leaves_with_path(optimizers.decay_mask(params)):
    decayed.setdefault(path[-1].key, set()).add(decays)
  assert decayed == {
    **dict.fromkeys(("embedding", "unembedding", "kernel", "value_head"), {True}),
    **dict.fromkeys(("scale", "bias"), {False}),
  }
  assert optimizers.decay_mask(jnp.ones(2)) is True


def test_decay_is_a_fraction_of_the_parameter_per_step() -> None:
  """Gradient 0 in one of two parameters, after no step: only the decay is left."""
  optimizer = lm.optimizer(0.1, weight_decay=0.5)
  params = {"kernel": jnp.ones(1), "bias": jnp.ones(1), "other": {"kernel": jnp.ones(1)}}
  gradient = {"kernel": jnp.zeros(1), "bias": jnp.zeros(1), "other": {"kernel": jnp.ones(1)}}
  moved, _ = optimizers.step(optimizer, gradient, optimizer.init(params), params, jnp.bool_(True))
  np.testing.assert_allclose(moved["kernel"], 0.95, rtol=1e-6)
  np.testing.assert_array_equal(moved["bias"], 1.0)
  np.testing.assert_allclose(moved["other"]["kernel"], 0.85, rtol=1e-6)


def test_a_schedule_counts_the_steps_that_are_taken() -> None:
  optimizer = lm.optimizer(optax.linear_schedule(1.0, 0.0, 4), eps=0.0)
  params, gradient = jnp.zeros(()), jnp.ones(())
  state, seen = optimizer.init(params), []
  for take in (True, False, True):
    before = params
    params, state = optimizers.step(optimizer, gradient, state, params, jnp.bool_(take))
    seen.append(float(before - params))
  # The bias correction of v is 1 - b2 = .001 in float32: 6e-5 off, half of it after the root.
  np.testing.assert_allclose(seen, [1.0, 0.0, 0.75], rtol=3e-5)


@pytest.mark.parametrize("transformation", [lm.optimizer(0.25), optax.sgd(0.25, momentum=0.9)])
def test_moments_are_float32_whatever_the_parameters(
  transformation: optax.GradientTransformation,
) -> None:
  """And the sum is rounded once: 1 - 2^-9 is 1 in bfloat16, 1 - 2^-8 is not."""
  params = {"kernel": jnp.ones(4, jnp.bfloat16)}
  config = lm.UpdateConfig(None, transformation)
  state = lm.init_state(config, params)
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert {x.dtype for x in moments} == {jnp.dtype("float32")}
  gradient = {"kernel": jnp.ones(4, jnp.float32)}
  moved, after = optimizers.step(transformation, gradient, state.opt_state, params, jnp.bool_(True))
  assert moved["kernel"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(moved["kernel"].astype(jnp.float32), 0.75)
  for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state.opt_state), strict=True):
    assert new.dtype == old.dtype
  for exponent, kept in ((-9, True), (-8, False)):
    sgd = optax.sgd(2.0**exponent)
    moved, _ = optimizers.step(sgd, gradient, sgd.init(params), params, jnp.bool_(True))
    assert bool((moved["kernel"] == params["kernel"]).all()) == kept
