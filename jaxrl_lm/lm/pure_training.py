r"""A whole training run as one pure function, for policies so small that runs are an axis.

`make_train(config)` gives a function of parameters, key and hyper-parameters that samples, rewards
and updates in one `lax.scan`: `jit` compiles the run, `vmap` runs many seeds or learning rates at
once. Every step draws G responses to every prompt. `training.train` does the same, and everything
a real run needs besides, one step at a time.

  run = make_train(config)
  many = jax.jit(jax.vmap(run, in_axes=(None, 0)))
  params, metrics = many(params, jax.random.split(jax.random.key(0), 8))
  metrics.rewards.mean()                                         # [8, steps]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_lm import checks, kl, masks
from jaxrl_lm.lm import objective_advantages, optimizers, sampling, scoring
from jaxrl_lm.lm.decoding import Samples
from jaxrl_lm.objectives import Objective, objective_loss
from jaxrl_lm.returns import terminal_rewards
from jaxrl_lm.statistics import Average


@dataclasses.dataclass(frozen=True)
class PureTrainConfig:
  """What a pure run is made of. Hyper-parameters to map over are arguments of the run instead.

  Attributes:
    model: as of `policy.init`, or anything with its `apply`, `logits`, `init_cache` and `config`.
    objective: a row of `jaxrl_lm.objectives`; its advantages may ask for all but values and greedy
      rewards.
    reward: (tokens [P, G, T], mask [P, G, T]) -> [P, G], pure; NaN = not to be scored, excluded.
    prompts: token ids of the P prompts, all of which are in every step.
    group_size: G, responses to each prompt.
    max_new_tokens: T, the longest response.
    steps: of the run.
    stop_tokens: ids that end a response; none: every response has T tokens.
    epochs: optimiser steps on each batch, the log-probs of the ratio held fixed.
    optimizer: learning rate -> `optax.GradientTransformation`.
    kl: estimator of the KL term to the initial parameters (`kl_k2`), or None.
  """

  model: Any
  objective: Objective
  reward: Callable[[jax.Array, jax.Array], jax.Array]
  prompts: tuple[tuple[int, ...], ...]
  group_size: int
  max_new_tokens: int
  steps: int
  stop_tokens: tuple[int, ...] = ()
  epochs: int = 1
  optimizer: Callable[[Any], optax.GradientTransformation] = optax.adam
  kl: Callable[..., jax.Array] | None = None


class PureMetrics(NamedTuple):
  """Of each step, [steps]; averages keep their sums and counts.

  Attributes:
    rewards: over the samples that could be scored.
    lengths: over all samples, tokens.
    kl: k3 estimate of the KL to the initial policy, nats per token, before the update.
    loss: of the first epoch.
    skipped: updates that were not made because a loss or gradient was not finite.
  """

  rewards: Average
  lengths: Average
  kl: Average
  loss: jax.Array
  skipped: jax.Array


class _Batch(NamedTuple):
  """One step's data. Prompts have a row per sample, everything else is by group, [P, G, ..]."""

  prompts: jax.Array
  prompt_mask: jax.Array
  tokens: jax.Array
  mask: jax.Array
  advantages: jax.Array
  old_logprobs: jax.Array
  ref_logprobs: jax.Array


def make_train(config: PureTrainConfig) -> Callable[..., tuple[Any, PureMetrics]]:
  """The run of a config as a pure function.

  A step in which no advantage differs from 0 changes nothing, momentum and KL term included; nor
  does an update whose loss or gradient is not finite.

  Args:
    config: what the run is made of.

  Returns:
    run(params, key, *, learning_rate, kl_coef=0.0, temperature=1.0) -> (params, PureMetrics), of
    arrays only: all of its arguments may be traced and mapped over. The noise of a sample depends
    on the key, the step and its row, as in `sampling.sample` with the seed `seed_of(key)`.

  Raises:
    ValueError: a size is below 1; in the run, what `sample`, `objective_loss` and the objective's
      advantages raise.
  """
  for name in ("group_size", "max_new_tokens", "steps", "epochs"):
    checks.check_range(name, getattr(config, name), low=1)
  longest = max(map(len, config.prompts), default=0)
  with jax.ensure_compile_time_eval():  # also where the caller is being traced
    padded = sampling.pad_prompts(config.prompts, length=longest)
    prompts, prompt_mask = (jnp.repeat(x, config.group_size, axis=0) for x in padded)

  def run(
    params: Any, key: jax.Array, *, learning_rate: Any, kl_coef: Any = 0.0, temperature: Any = 1.0
  ) -> tuple[Any, PureMetrics]:
    optimizer, reference, seed = config.optimizer(learning_rate), params, seed_of(key)

    def step(carry: tuple[Any, Any], number: jax.Array) -> tuple[tuple[Any, Any], PureMetrics]:
      params, _ = carry
      samples = sampling.sample(
        config.model,
        params,
        prompts,
        prompt_mask,
        seed=seed,
        step=number,
        max_new_tokens=config.max_new_tokens,
        temperature=temperature,
        stop_tokens=config.stop_tokens,
      )
      policies = params, reference
      batch, rewards = _batch(config, policies, prompts, prompt_mask, samples, temperature)
      update = _update(config, optimizer, batch, kl_coef, temperature)
      updated, (losses, finite) = jax.lax.scan(update, carry, None, length=config.epochs)
      signal = jnp.any((batch.advantages != 0) & batch.mask)
      carry = jax.tree.map(lambda new, old: jnp.where(signal, new, old), updated, carry)
      return carry, _metrics(batch, samples.mask, rewards, losses[0], jnp.sum(~finite & signal))

    carry = (params, optimizer.init(optimizers.widened(params)))
    (params, _), metrics = jax.lax.scan(step, carry, jnp.arange(config.steps))
    return params, metrics

  return run


def seed_of(key: jax.Array) -> jax.Array:
  """The seed of the samples of a run with this key.

  Args:
    key: random key.

  Returns:
    int32, >= 0.
  """
  return jax.random.randint(key, (), 0, jnp.iinfo(jnp.int32).max)


def _batch(
  config: PureTrainConfig,
  policies: tuple[Any, Any],
  prompts: jax.Array,
  prompt_mask: jax.Array,
  samples: Samples,
  temperature: Any,
) -> tuple[_Batch, jax.Array]:
  """What the update needs of samples, and their rewards [P, G]."""
  shape = (len(config.prompts), config.group_size, config.max_new_tokens)
  tokens, drawn = (x.reshape(shape) for x in (samples.tokens, samples.mask))
  rewards = checks.as_constant("rewards", config.reward(tokens, drawn))
  checks.check_same_shape(**{"mask[..., 0]": drawn[..., 0], "rewards": rewards})
  where = ~jnp.isnan(rewards)
  mask = drawn & where[..., None]
  given = objective_advantages.Given(
    rewards=rewards,
    where=where,
    lengths=masks.lengths(drawn),
    mask=mask,
    token_rewards=terminal_rewards(jnp.where(where, rewards, 0), mask),
  )
  advantages = objective_advantages.advantages_of(config.objective.advantages, given)

  def score(params: Any) -> jax.Array:
    rows = prompts, prompt_mask, samples.tokens, samples.mask
    scored = scoring.response_logprobs(config.model, params, *rows, temperature=temperature)
    return scored.reshape(shape)

  scored = map(score, policies)
  return _Batch(prompts, prompt_mask, tokens, mask, advantages, *scored), rewards


def _update(
  config: PureTrainConfig,
  optimizer: optax.GradientTransformation,
  batch: _Batch,
  kl_coef: Any,
  temperature: Any,
) -> Callable[[tuple[Any, Any], None], tuple[tuple[Any, Any], tuple[jax.Array, jax.Array]]]:
  """One optimiser step on the batch, as `lax.scan` calls it."""
  weights = config.objective.loss_weights(batch.mask)
  mask = batch.mask.reshape(-1, batch.mask.shape[-1])

  def loss(params: Any) -> jax.Array:
    rows = batch.prompts, batch.prompt_mask, batch.tokens.reshape(mask.shape), mask
    logprobs = scoring.response_logprobs(config.model, params, *rows, temperature=temperature)
    value, _ = objective_loss(
      config.objective,
      logprobs.reshape(batch.mask.shape),
      batch.old_logprobs,
      batch.advantages,
      batch.mask,
      loss_weights=weights,
      ref_logprobs=None if config.kl is None else batch.ref_logprobs,
      kl=config.kl,
      kl_coef=kl_coef,
    )
    return value

  def update(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], Any]:
    params, state = carry
    value, gradient = jax.value_and_grad(loss)(params)
    finite = optimizers.gradient_size(gradient).finite & jnp.isfinite(value)
    return optimizers.step(optimizer, gradient, state, params, finite), (value, finite)

  return update


def _metrics(
  batch: _Batch, drawn: jax.Array, rewards: jax.Array, loss: jax.Array, skipped: jax.Array
) -> PureMetrics:
  lengths = masks.lengths(drawn).astype(jnp.float32)
  return PureMetrics(
    rewards=Average.of(rewards, ~jnp.isnan(rewards)),
    lengths=Average.of(lengths, jnp.ones_like(lengths, dtype=jnp.bool_)),
    kl=Average.of(kl.kl_k3(batch.old_logprobs, batch.ref_logprobs, batch.mask), batch.mask),
    loss=loss,
    skipped=skipped,
  )
