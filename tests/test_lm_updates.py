"""An update is plain autodiff of the objective and one optimiser step, however the rows are cut."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_lm as rl
from experiments.algorithm_table import named_objectives
from jaxrl_lm import lm
from jaxrl_lm.lm import micro_batches, updates
from tests import update_batches
from tests.bigram import Bigram
from tests.update_batches import assert_same_bits, assert_trees_close, jit

SLOW = pytest.mark.slow
RATE = 0.5


def rows_of(batch: lm.Batch) -> tuple[jax.Array, ...]:
  return batch.prompts, batch.prompt_mask, batch.tokens, batch.mask


# ------------------------------------------------------------- every objective, by hand

OBJECTIVES = named_objectives()
SELECTIONS = {
  "CLIP_COV": partial(rl.clip_cov_selection, fraction=0.2, cov_low=0.0),
  "KL_COV": partial(lm.kl_cov_tokens, fraction=0.2),
}
# The one that looks at all rows before the gradient; the plain path is taken below.
QUICK = ("CLIP_COV",)


def gradient_by_hand(
  model: Any, objective: rl.Objective, select: Any, params: Any, batch: lm.Batch, key: Any
) -> Any:
  """Autodiff of the composed loss on the whole batch: no micro-batches, no scorer's slot."""

  def loss(params: Any) -> jax.Array:
    logprobs = lm.response_logprobs(model, params, *rows_of(batch))
    selected = None
    if select is not None:
      log_ratio = rl.token_log_ratio(logprobs, batch.old_logprobs, batch.mask)
      selected = select(key, logprobs, log_ratio, batch.advantages, batch.mask)
    return rl.objective_loss(
      objective,
      logprobs,
      batch.old_logprobs,
      batch.advantages,
      batch.mask,
      loss_weights=objective.loss_weights(batch.mask),
      selected=selected,
    )[0]

  return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize(
  "name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in OBJECTIVES]
)
def test_an_update_is_a_step_along_the_gradient_of_the_objective(name: str) -> None:
  objective, select = OBJECTIVES[name], SELECTIONS.get(name)
  model = Bigram(8)
  params = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
  batch = update_batches.near_policy(update_batches.ragged(), model, params, spread=0.4)
  batch = batch._replace(
    loss_weights=objective.loss_weights(batch.mask),
    advantages=jnp.where(batch.mask, batch.advantages, 0),
    importance_weights=None,
  )
  if objective.advantages not in (rl.gae, rl.whitened_returns):
    batch = batch._replace(advantages=batch.advantages[:, :1] + 0.3)
  config = lm.UpdateConfig(
    objective, optax.sgd(RATE), micro_batches=4, selection=select, max_grad_norm=None
  )
  key = jax.random.key(3)
  hand = jit(partial(gradient_by_hand, model, objective, select))
  loss, gradient = hand(params, batch, key)
  state, metrics = jit(partial(lm.update, model, config))(lm.init_state(config, params), batch, key)
  assert float(jnp.abs(gradient).max()) > 1e-3
  # Three roundings of float32 on either side, and a sum in another order.
  assert_trees_close(state.params, params - RATE * gradient, rtol=1e-6)
  assert_trees_close(params - state.params, RATE * gradient, rtol=3e-6, atol=1e-7)
  np.testing.assert_allclose(metrics.loss.mean(), loss, rtol=1e-5, atol=1e-6)
  norm = np.linalg.norm(np.asarray(gradient, np.float64))
  np.testing.assert_allclose(metrics.grad_norm.mean(), norm, rtol=3e-6)


def test_a_selection_that_draws_asks_for_its_key() -> None:
  config = lm.UpdateConfig(rl.CLIP_COV, optax.sgd(RATE), selection=SELECTIONS["CLIP_COV"])
  state = lm.init_state(config, jnp.zeros((8, 8)))
  with pytest.raises(TypeError, match="key is required, got None"):
    lm.update(Bigram(8), config, state, update_batches.ragged())


# ------------------------------------------------ a policy with a critic and every term of a loss


def full_config(parts: int, optimizer: Any) -> lm.UpdateConfig:
  critic, _ = update_batches.network(update_batches.WITH_VALUES, 1)
  return lm.UpdateConfig(
    rl.DAPO,
    optimizer,
    micro_batches=parts,
    temperature=0.8,
    kl=rl.kl_k3,
    kl_coef=0.1,
    entropy_coef=0.05,
    critic=lm.CriticConfig(critic, optimizer),
  )


ADAM = lm.optimizer(1e-2, weight_decay=0.1, eps=1e-4)


@pytest.fixture(scope="module")
def start() -> tuple[Any, lm.TrainState, lm.Batch]:
  """A policy, a state with a history of momentum, and a batch."""
  model, params = update_batches.network()
  _, critic_params = update_batches.network(update_batches.WITH_VALUES, 1)
  state = lm.init_state(full_config(1, ADAM), params, critic_params)
  rng = np.random.default_rng(2)
  moved = lambda x: (
    x + jnp.asarray(np.abs(rng.normal(0, 0.1, x.shape)), x.dtype)
    if x.dtype == jnp.float32
    else x + 3
  )
  critic = state.critic._replace(opt_state=jax.tree.map(moved, state.critic.opt_state))
  state = state._replace(opt_state=jax.tree.map(moved, state.opt_state), critic=critic)
  return (
    model,
    state,
    update_batches.near_policy(update_batches.ragged(), model, params, spread=0.4),
  )


def compiled_update(model: Any, config: lm.UpdateConfig) -> Any:
  """The update as a function of (state, batch), and of coefficients that are traced."""

  @jit
  def run(state: Any, batch: Any, kl_coef: Any, entropy_coef: Any) -> Any:
    traced = dataclasses.replace(config, kl_coef=kl_coef, entropy_coef=entropy_coef)
    return lm.update(model, traced, state, batch)

  return lambda state, batch, kl_coef=0.1, entropy_coef=0.05: run(
    state, batch, kl_coef, entropy_coef
  )


@pytest.fixture(scope="module")
def whole(start: Any) -> Any:
  """The update without accumulation."""
  return compiled_update(start[0], full_config(1, ADAM))


@pytest.mark.parametrize("parts", [pytest.param(2, marks=SLOW), 4, pytest.param(8, marks=SLOW)])
def test_accumulation_changes_no_number(start: Any, whole: Any, parts: int) -> None:
  """Uneven lengths, an empty row, and in four parts a part without a token."""
  model, state, batch = start
  assert not batch.mask[3::4].any()
  cut = compiled_update(model, full_config(parts, ADAM))(state, batch)
  # float32 sums in another order.
  assert_trees_close(cut, whole(state, batch), rtol=2e-6, atol=2e-7)


def test_the_step_is_adamw_of_the_clipped_gradients_of_both_losses(start: Any, whole: Any) -> None:
  model, state, batch = start
  config = full_config(1, ADAM)

  def policy_loss(params: Any) -> jax.Array:
    scores = lm.response_scores(model, params, *rows_of(batch), temperature=0.8)
    return rl.objective_loss(
      rl.DAPO,
      scores.logprobs,
      batch.old_logprobs,
      batch.advantages,
      batch.mask,
      loss_weights=batch.loss_weights,
      importance_weights=batch.importance_weights,
      ref_logprobs=batch.ref_logprobs,
      kl=rl.kl_k3,
      kl_coef=0.1,
      entropy=scores.entropy,
      entropy_coef=0.05,
    )[0]

  def value_loss(params: Any) -> jax.Array:
    values = lm.response_values(config.critic.model, params, *rows_of(batch))
    loss = rl.clipped_value_loss(values, batch.old_values, batch.returns, batch.mask, clip=0.2)
    return jnp.sum(batch.loss_weights * loss)

  @jit
  def by_hand(state: lm.TrainState) -> Any:
    moved = []
    for loss, part in ((policy_loss, state), (value_loss, state.critic)):
      value, gradient = jax.value_and_grad(loss)(part.params)
      norm = optax.tree.norm(gradient)
      gradient = optax.tree.scale(jnp.minimum(1, 1 / norm), gradient)
      change, _ = ADAM.update(gradient, part.opt_state, part.params)
      moved.append((value, norm, optax.apply_updates(part.params, change)))
    return moved

  (loss, norm, params), (value, value_norm, critic_params) = by_hand(state)
  assert value_norm > 1
  new, metrics = whole(state, batch)
  got = (metrics.loss.mean(), metrics.grad_norm.mean(), new.params)
  assert_trees_close(got, (loss, norm, params), rtol=3e-6)
  critic = metrics.critic
  got = (critic.loss.mean(), critic.grad_norm.mean(), new.critic.params)
  assert_trees_close(got, (value, value_norm, critic_params), rtol=3e-6)
  assert (int(new.step), int(new.cursor), int(new.skipped)) == (0, 0, 0)


def test_what_stands_at_padding_changes_no_bit(start: Any, whole: Any) -> None:
  model, state, batch = start
  fill = lambda x: jnp.where(batch.mask, x, 1e30) if x.dtype == jnp.float32 else x
  other = jax.tree.map(fill, batch)._replace(
    loss_weights=batch.loss_weights,
    tokens=jnp.where(batch.mask, batch.tokens, 10**6),
    prompts=jnp.where(batch.prompt_mask, batch.prompts, 77),
  )
  assert_same_bits(whole(state, other), whole(state, batch))


@pytest.fixture(scope="module")
def bigram() -> Any:
  """A policy of one matrix, its update in two parts, a state and an on-policy batch."""
  model = Bigram(8)
  params = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
  config = lm.UpdateConfig(rl.GRPO, lm.optimizer(0.3), micro_batches=2)
  batch = update_batches.near_policy(update_batches.ragged(), model, params, spread=0.0)
  batch = batch._replace(importance_weights=None)
  return lm.compile_update(model, config), lm.init_state(config, params), batch


def test_other_data_and_equal_configurations_compile_nothing_again(bigram: Any) -> None:
  step, state, batch = bigram
  state, _ = step(state, batch)
  compiled = updates._update._cache_size()
  model, config = step.args
  step = lm.compile_update(dataclasses.replace(model), dataclasses.replace(config))
  other = update_batches.ragged(seed=5, lengths=(1, 1, 1, 2, 0, 0, 4, 3))
  _, metrics = step(state, other._replace(importance_weights=None))
  assert metrics.skipped.mean() == 0
  assert updates._update._cache_size() == compiled


def test_a_configuration_may_hold_arrays(bigram: Any) -> None:
  step, state, batch = bigram
  model, config = step.args
  surrogate = partial(rl.ppo_clip, clip_low=jnp.float32(0.2), clip_high=np.full((), 0.2, "f"))
  objective = dataclasses.replace(rl.GRPO, surrogate=surrogate)
  arrays = dataclasses.replace(config, objective=objective, max_grad_norm=jnp.float32(1))
  found, want = lm.compile_update(model, arrays)(state, batch), step(state, batch)
  assert_trees_close(found[0], want[0], rtol=1e-6, atol=0)


def test_the_second_update_on_the_same_rows_sees_how_far_the_first_one_went(bigram: Any) -> None:
  """Old log-probs are data: the first update is on-policy to rounding, the second is not."""
  step, state, batch = bigram
  state, first = step(state, batch)
  assert abs(first.log_ratio_extremes.high) < 1e-5
  assert first.clipped["clipped"].total == 0
  _, second = step(state, batch)
  assert second.drift["k3"].mean() > 1e-2
  assert second.clipped["clipped"].total > 0


# ----------------------------------------------------------------------- when nothing may move


@pytest.mark.parametrize("where", ["advantages", "returns", "old_logprobs"])
def test_one_nan_leaves_every_bit_and_is_counted(start: Any, whole: Any, where: str) -> None:
  """In the policy's loss or the critic's: neither moves, and the next update is as if before."""
  _, state, batch = start
  bad = batch._replace(**{where: getattr(batch, where).at[2, 1].set(jnp.nan)})
  after, metrics = whole(state, bad)
  assert int(after.skipped) == int(state.skipped) + 1
  assert_same_bits(after._replace(skipped=state.skipped), state)
  assert (metrics.skipped.mean(), int(metrics.loss.count), int(metrics.entropy.count)) == (1, 0, 0)
  assert jax.tree.all(jax.tree.map(lambda x: not np.isnan(x).any(), metrics.drift))
  if where == "old_logprobs":
    assert int(metrics.log_ratio_extremes.low_position) == 2 * update_batches.TIME + 1
  again, _ = whole(after, batch)
  want, _ = whole(state, batch)
  assert_same_bits(again._replace(skipped=want.skipped), want)


def test_without_a_signal_the_policy_keeps_every_bit(start: Any, whole: Any) -> None:
  """All advantages 0: no momentum, no decay, no count. The critic has its own signal."""
  _, state, batch = start
  step = partial(whole, kl_coef=0.0, entropy_coef=0.0)
  silent = batch._replace(advantages=jnp.zeros_like(batch.advantages))
  after, metrics = step(state, silent)
  assert_same_bits((after.params, after.opt_state), (state.params, state.opt_state))
  assert (metrics.idle.mean(), metrics.skipped.mean(), int(after.skipped)) == (1, 0, 0)
  moved = jax.tree.map(lambda a, b: bool((a != b).any()), after.critic.params, state.critic.params)
  assert moved["value_head"]
  # Rows without a weight are no signal either, whatever they hold.
  dropped = batch._replace(loss_weights=jnp.zeros_like(batch.loss_weights))
  nothing = jnp.full_like(batch.advantages, jnp.nan)
  dropped = dropped._replace(advantages=nothing, returns=nothing)
  after, metrics = step(state, dropped)
  assert_same_bits(after, state)


# --------------------------------------------------------------------------------- the metrics


def test_metrics_are_those_of_the_arrays(start: Any, whole: Any) -> None:
  model, state, batch = start
  critic, _ = update_batches.network(update_batches.WITH_VALUES, 1)
  mask = batch.mask

  @jit
  def measured(state: lm.TrainState) -> dict[str, Any]:
    scores = lm.response_scores(model, state.params, *rows_of(batch), temperature=0.8)
    values = lm.response_values(critic, state.critic.params, *rows_of(batch))
    log_ratio = rl.token_log_ratio(scores.logprobs, batch.old_logprobs, mask)
    advantages = jnp.where(mask, batch.advantages, 0)
    estimators = {"k1": rl.kl_k1, "k3": rl.kl_k3}
    ref = {
      k: rl.average(f(scores.logprobs, batch.ref_logprobs, mask), mask)
      for k, f in estimators.items()
    }
    return {
      "clipped": rl.clip_fractions(log_ratio, advantages, mask, clip_low=0.2, clip_high=0.28),
      "drift": rl.policy_drift(scores.logprobs, batch.old_logprobs, mask),
      "ref_kl": ref,
      "mismatch": rl.perplexity_gap(scores.logprobs, batch.sampler_logprobs, mask),
      "entropy": rl.average(scores.entropy, mask),
      "ratio_ess": rl.token_effective_sample_size(log_ratio, mask),
      "log_ratio_extremes": rl.ratio_extremes(log_ratio, mask),
      "explained_variance": rl.explained_variance(values, batch.returns, mask),
    }

  want = measured(state)
  assert want["clipped"]["low"].total > 0
  assert want["clipped"]["high"].total > 0
  _, metrics = whole(state, batch)
  found = vars(metrics) | {"explained_variance": metrics.critic.explained_variance}
  for name, x in want.items():
    assert_trees_close(found[name], x, rtol=1e-5, atol=1e-6)


def test_metrics_of_updates_merge_by_their_tokens(start: Any, whole: Any) -> None:
  """1 token in one update and 16 in the other: not the mean of two means."""
  _, state, batch = start
  few = batch._replace(mask=batch.mask & (jnp.arange(8) == 1)[:, None])
  rest = batch._replace(mask=batch.mask & (jnp.arange(8) != 1)[:, None])
  _, a = whole(state, few)
  _, b = whole(state, rest)
  _, together = whole(state, batch)
  merged = jit(lambda a, b: a + b)(a, b)
  assert (int(a.entropy.count), int(b.entropy.count)) == (1, 16)
  for name in ("clipped", "drift", "ref_kl", "mismatch", "entropy", "ratio_ess"):
    assert_trees_close(getattr(merged, name), getattr(together, name), rtol=1e-6, atol=1e-7)
  assert_same_bits(merged.log_ratio_extremes, together.log_ratio_extremes)
  got, want = (x.critic.explained_variance.fraction() for x in (merged, together))
  np.testing.assert_allclose(got, want, rtol=1e-5)
  means = (float(a.entropy.mean()) + float(b.entropy.mean())) / 2
  assert abs(means - float(together.entropy.mean())) > 1e-3
  assert int(merged.loss.count) == 2


# ------------------------------------------------------------------------------- finite differences


@pytest.mark.slow
def test_the_gradient_is_the_slope_of_the_loss(x64: None) -> None:
  """Central differences in float64 along the gradient and a random direction.

  With a ratio (no stop-gradient in the value) and no token at a clip's kink.
  """
  model, params = update_batches.network(
    dataclasses.replace(
      update_batches.CONFIG, param_dtype="float64", compute_dtype="float64", head_dtype="float64"
    )
  )
  batch = jax.tree.map(
    lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, update_batches.ragged()
  )
  objective = dataclasses.replace(rl.GRPO, surrogate=rl.importance_weighted)
  config = lm.UpdateConfig(
    objective, optax.sgd(1.0), kl=rl.kl_k3, kl_coef=0.1, entropy_coef=0.05, max_grad_norm=None,
    micro_batches=2,
  )  # fmt: skip
  step = jit(partial(lm.update, model, config))
  run = lambda params: step(lm.init_state(config, params), batch)
  state, metrics = run(params)
  gradient = jax.tree.map(jnp.subtract, params, state.params)
  rng = np.random.default_rng(0)
  noise = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
  for direction in (noise, gradient):
    unit = optax.tree.scale(1 / optax.tree.norm(direction), direction)
    losses = [run(optax.tree.add_scale(params, h, unit))[1].loss.total for h in (1e-5, -1e-5)]
    slope = (losses[0] - losses[1]) / 2e-5
    np.testing.assert_allclose(slope, optax.tree.vdot(gradient, unit), rtol=1e-7, atol=1e-9)
  np.testing.assert_allclose(metrics.grad_norm.mean(), optax.tree.norm(gradient), rtol=1e-12)


# ------------------------------------------------------------------------------------- bad input


def bad_update(batch: lm.Batch, **changes: Any) -> Any:
  model, params = Bigram(8), jnp.zeros((8, 8))
  config = lm.UpdateConfig(**{"objective": rl.GRPO, "optimizer": ADAM} | changes)
  state = lm.init_state(dataclasses.replace(config, critic=None), params)
  return jax.eval_shape(partial(updates.update, model, config), state, batch)


BATCH = update_batches.ragged()


@pytest.mark.parametrize(
  ("batch", "changes", "error", "message"),
  [
    (BATCH, {"micro_batches": 3}, ValueError, r"8 rows .* 3 equal .*pad_rows\(batch, 3\)"),
    (BATCH, {"micro_batches": 0}, ValueError, "micro_batches must lie in"),
    (BATCH._replace(advantages=jnp.zeros(8)), {}, ValueError, "advantages must have a row"),
    (BATCH._replace(ref_logprobs=None), {"kl": rl.kl_k2}, ValueError, "ref_logprobs is None"),
    (BATCH, {"kl_coef": 0.1}, ValueError, "kl_coef is given but kl is None"),
    (BATCH, {"max_grad_norm": 0.0}, ValueError, "max_grad_norm must lie in"),
    (BATCH, {"objective": rl.KL_COV}, TypeError, "selected"),
    (BATCH, {"critic": lm.CriticConfig(Bigram(8), ADAM)}, ValueError, "state has no critic"),
    (BATCH._replace(mask=BATCH.mask.astype(int)), {}, TypeError, "mask must be boolean"),
  ],
)
def test_what_is_wrong_is_an_error_that_says_so(
  batch: lm.Batch, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
  with pytest.raises(error, match=message):
    bad_update(batch, **changes)


def test_a_critic_needs_a_head_returns_and_parameters(start: Any) -> None:
  model, state, batch = start
  config = full_config(1, ADAM)
  with pytest.raises(ValueError, match="critic_params is None"):
    lm.init_state(config, state.params)
  with pytest.raises(ValueError, match="config.critic is None"):
    lm.init_state(dataclasses.replace(config, critic=None), state.params, state.params)
  with pytest.raises(ValueError, match="needs old_values and returns"):
    jax.eval_shape(partial(lm.update, model, config), state, batch._replace(returns=None))
  with pytest.raises(ValueError, match="no scalar head"):
    jax.eval_shape(partial(lm.response_values, model), state.params, *rows_of(batch))


def test_a_tool_output_is_seen_and_not_counted(start: Any) -> None:
  """The gradient is that of the whole row with weight 0 at the token that was not chosen."""
  model, state, batch = start
  config = lm.UpdateConfig(rl.REINFORCE, optax.sgd(1.0), max_grad_norm=None)
  state = lm.init_state(config, state.params)
  step = jit(partial(lm.update, model, config))
  whole = batch._replace(old_logprobs=None, importance_weights=None, seen=batch.mask)
  want, _ = step(state, whole._replace(loss_weights=batch.loss_weights.at[0, 1].set(0)))
  counted = batch.mask.at[0, 1].set(False)
  got, metrics = step(state, whole._replace(mask=counted))
  assert_trees_close(got.params, want.params, rtol=1e-6)
  assert (int(got.skipped), int(metrics.entropy.count)) == (0, int(counted.sum()))
  assert any((x != y).any() for x, y in zip(*map(jax.tree.leaves, (got.params, state.params))))


def test_empty_rows_are_added_and_change_nothing(start: Any) -> None:
  batch = jax.tree.map(lambda x: x[:5], start[2])
  padded = lm.pad_rows(batch, 4)
  assert padded.tokens.shape[0] == 8
  assert lm.pad_rows(padded, 4) is padded
  assert not padded.mask[5:].any()
  assert padded.prompt_mask.any(axis=1).all()
  assert_same_bits(jax.tree.map(lambda x: x[:5], padded), batch)


@pytest.mark.slow
def test_updates_of_many_seeds_are_one_vmap(bigram: Any) -> None:
  _, state, batch = bigram
  model, config = Bigram(8), lm.UpdateConfig(rl.GRPO, lm.optimizer(0.3))
  seeds = jnp.asarray(np.random.default_rng(1).normal(size=(3, 8, 8)), jnp.float32)
  init = partial(lm.init_state, config)
  step = partial(lm.update, model, config)
  many = jit(jax.vmap(step, (0, None)))(jax.vmap(init)(seeds), batch)
  one = jit(step)
  for i in range(3):
    want = one(init(seeds[i]), batch)
    assert_trees_close(jax.tree.map(lambda x, i=i: x[i], many), want, rtol=2e-6, atol=1e-7)


@pytest.mark.slow
def test_an_update_of_padded_rows_is_that_of_the_rows(start: Any) -> None:
  model, params = Bigram(8), jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
  batch = jax.tree.map(lambda x: x[:5], start[2])

  def run(batch: lm.Batch, parts: int) -> Any:
    config = lm.UpdateConfig(rl.GRPO, ADAM, micro_batches=parts)
    return jit(partial(lm.update, model, config))(lm.init_state(config, params), batch)

  assert_trees_close(run(lm.pad_rows(batch, 4), 4), run(batch, 1), rtol=2e-6, atol=1e-7)


def test_parts_take_every_kth_row_and_come_back_in_order() -> None:
  """So that each part has rows of every device, and cutting moves nothing between them."""
  rows = {"a": jnp.arange(6), "b": jnp.arange(12.0).reshape(6, 2)}
  parts = []
  out = micro_batches.over_parts(lambda x: parts.append(x["a"].shape) or x, rows, 3)
  assert parts == [(2,)]
  assert_same_bits(out, rows)
  total, gradient, seen = micro_batches.summed_gradient(
    lambda p, x: (p * x.sum(), x), jnp.bfloat16(2.0), jnp.arange(6.0), 3
  )
  assert (float(total), float(gradient), gradient.dtype) == (30.0, 15.0, jnp.float32)
  np.testing.assert_array_equal(seen, np.arange(6.0))
