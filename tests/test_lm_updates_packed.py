"""An update of packed rows is the update of the rows."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxrl_lm as rl
from experiments.algorithm_table import named_objectives
from jaxrl_lm import lm
from jaxrl_lm.lm.packing import pack_rows, unpack_tokens
from tests import update_batches
from tests.bigram import Bigram
from tests.update_batches import assert_same_bits, assert_trees_close, jit

LENGTH = 12
OBJECTIVES = named_objectives()
SELECTIONS = {
  # All candidates: what is drawn of fewer depends on where a token stands in the array.
  "CLIP_COV": partial(rl.clip_cov_selection, fraction=1.0, cov_low=0.0),
  "KL_COV": partial(lm.kl_cov_tokens, fraction=0.2),
}
QUICK = ("GSPO", "GMPO")


def packed_rows(batch: lm.Batch, multiple: int) -> lm.Batch:
  packed = lm.pad_rows(pack_rows(batch, LENGTH), multiple)
  return jax.tree.map(jnp.asarray, packed)


def garbage_in_padding(batch: lm.Batch) -> lm.Batch:
  """NaN and ids that do not exist wherever nothing is read."""
  fill = lambda x: jnp.where(batch.mask, x, jnp.nan) if x.dtype == jnp.float32 else x
  tokens = jnp.where(batch.segment_ids > 0, batch.tokens, 10**6)
  return jax.tree.map(fill, batch)._replace(tokens=tokens, loss_weights=batch.loss_weights)


def without_positions(metrics: lm.UpdateMetrics) -> Any:
  """Positions are those of the array: see the test of them below."""
  extremes = metrics.log_ratio_extremes
  return vars(metrics) | {"log_ratio_extremes": (extremes.low, extremes.high)}


@pytest.mark.parametrize(
  "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in OBJECTIVES]
)
def test_every_objective(name: str) -> None:
  """Parameters and all metrics; the sequence-level ones have segments of 1 to 5 tokens."""
  objective, model = OBJECTIVES[name], Bigram(8)
  params = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
  batch = update_batches.near_policy(update_batches.ragged(), model, params, spread=0.4)
  batch = batch._replace(loss_weights=objective.loss_weights(batch.mask))
  if objective.advantages not in (rl.gae, rl.whitened_returns):
    batch = batch._replace(advantages=jnp.asarray([[1.0, -2, 0.5, 9, 1, -0.5, 2, -1]]).T)
  config = lm.UpdateConfig(
    objective, optax.sgd(0.5), selection=SELECTIONS.get(name), max_grad_norm=None
  )
  state, key = lm.init_state(config, params), jax.random.key(3)
  want, metrics = jit(partial(lm.update, model, config))(state, batch, key)
  in_parts = dataclasses.replace(config, micro_batches=2)
  packed = garbage_in_padding(packed_rows(batch, 2))
  got, packed_metrics = jit(partial(lm.update, model, in_parts))(state, packed, key)
  change = lambda x: x.params - params
  assert float(jnp.abs(change(want)).max()) > 1e-3
  assert int(got.skipped) == 0
  # Sums of float32 in another order.
  assert_trees_close(change(got), change(want), rtol=3e-6, atol=1e-7)
  assert_trees_close(*map(without_positions, (packed_metrics, metrics)), rtol=3e-6, atol=1e-6)


# ------------------------------------------------------------------------------ every term at once


def config_of(parts: int, score: Any = lm.response_scores) -> lm.UpdateConfig:
  critic, _ = update_batches.network(update_batches.WITH_VALUES, 1)
  optimizer = optax.sgd(0.1, momentum=0.9)
  # A selection that looks at the ratios of sequences, at a band of its own.
  select = partial(rl.clip_cov_selection, fraction=1.0, cov_low=0.0, clip_low=0.02, clip_high=0.02)
  return lm.UpdateConfig(
    dataclasses.replace(rl.CLIP_COV, level=rl.per_sequence_geometric),
    optimizer,
    micro_batches=parts,
    temperature=0.8,
    kl=rl.kl_k3,
    kl_coef=0.1,
    entropy_coef=0.05,
    selection=select,
    score=score,
    critic=lm.CriticConfig(critic, optimizer),
  )


@pytest.fixture(scope="module")
def start() -> Any:
  """A policy, a state with a critic, a batch with tool outputs, and its update."""
  model, params = update_batches.network()
  _, critic_params = update_batches.network(update_batches.WITH_VALUES, 1)
  batch = update_batches.near_policy(update_batches.ragged(), model, params, spread=0.4)
  mask = batch.mask.at[0, 1:3].set(False).at[2, 1].set(False)
  batch = batch._replace(mask=mask, seen=batch.mask)
  state = lm.init_state(config_of(1), params, critic_params)
  return (
    model,
    state,
    batch,
    jit(partial(lm.update, model, config_of(1)))(state, batch, jax.random.key(0)),
  )


def assert_same_update(got: Any, want: Any) -> None:
  """Rounding: another order of sums, over rows, keys and tokens."""
  (state, metrics), (wanted, wanted_metrics) = got, want
  assert_trees_close(state, wanted, rtol=3e-6, atol=1e-6)
  assert_trees_close(*map(without_positions, (metrics, wanted_metrics)), rtol=5e-6, atol=1e-6)


def test_a_critic_every_term_and_tool_outputs(start: Any) -> None:
  model, state, batch, want = start
  packed = garbage_in_padding(packed_rows(batch, 2))
  got = jit(partial(lm.update, model, config_of(2)))(state, packed, jax.random.key(0))
  assert_same_update(got, want)
  assert int(got[1].entropy.count) == int(batch.mask.sum()) == 14
  # The extremes are at the tokens they are at.
  flat = lambda x, shape: np.unravel_index(int(x), shape)
  for side in ("low_position", "high_position"):
    found = np.zeros(packed.tokens.shape)
    found[flat(getattr(got[1].log_ratio_extremes, side), found.shape)] = 1
    there = unpack_tokens(found, batch, LENGTH)[
      flat(getattr(want[1].log_ratio_extremes, side), batch.tokens.shape)[0]
    ]
    assert there.any()  # a whole sequence has the same ratio


@pytest.mark.slow
def test_the_linear_scorer(start: Any) -> None:
  model, state, batch, want = start
  config = config_of(1, lm.linear_response_scores)
  got = jit(partial(lm.update, model, config))(state, packed_rows(batch, 1), jax.random.key(0))
  assert_same_update(got, want)


@pytest.mark.slow
def test_eight_devices(start: Any) -> None:
  model, state, batch, want = start
  axes, types = ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3
  mesh = jax.make_mesh((2, 2, 2), axes, axis_types=types)
  config = config_of(1)
  state = jax.device_put(state, lm.state_shardings(mesh, model, config))
  step = lm.compile_update(model, config, mesh)
  assert_same_update(
    jax.device_get(step(state, packed_rows(batch, 4), jax.random.key(0))), jax.device_get(want)
  )


def test_other_sequences_of_a_row_change_no_bit(start: Any) -> None:
  model, state, batch, _ = start
  packed = packed_rows(batch, 1)
  other = packed.segment_ids == 2
  score = jit(partial(lm.response_scores, model))
  rows = (packed.prompts, packed.prompt_mask, packed.tokens, packed.mask)
  changed = jnp.where(other, (packed.tokens + 1) % 8, packed.tokens)
  found, want = (
    score(state.params, *rows[:2], tokens, packed.mask, segment_ids=packed.segment_ids)
    for tokens in (changed, packed.tokens)
  )
  kept = np.asarray(packed.mask & ~other)
  assert_same_bits(*(jax.tree.map(lambda x: x[kept], scores) for scores in (found, want)))
  assert (found.logprobs != want.logprobs).any()
