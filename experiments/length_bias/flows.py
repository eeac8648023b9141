"""Training under each reduction, and the lengths of responses at equal P(correct)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_lm as rl
from configs.length_bias import Flows
from experiments.length_bias.measures import Track
from experiments.length_bias.setting import Lengths, Problem, grpo, lengths
from jaxrl_lm.exact import Policy, bias_variance, expected_update
from jaxrl_lm.exact.language import Language

TRAINED = {
  "sum": rl.sequence_sum,
  "token mean": rl.token_mean,
  "sequence mean": rl.sequence_mean,
}


def flows(problem: Problem, settings: Flows, track: Track) -> dict[str, Any]:
  """Trajectories at equal P(correct), by optimiser and reduction; `at_equal_progress` each."""
  names = ["SGD", "Adam"] + ["sampled Adam"] * bool(settings.seeds)
  table: dict[str, Any] = {name: {} for name in names}
  pairs = [(name, reduction) for name in names for reduction in TRAINED]
  for name, reduction in track(pairs):
    objective = grpo(TRAINED[reduction])
    if name == "sampled Adam":
      trajectory = sampled_flow(problem, objective, settings)
    elif name == "SGD":
      moments = bias_variance(
        objective, problem.policy, problem.rewards, group_size=problem.group_size
      )
      rate = settings.sgd_rate / moments.averaged().scale[0]
      trajectory = exact_flow(problem, objective, optax.sgd(rate), settings.sgd_steps)
    else:
      adam = optax.adam(settings.adam_rate)
      trajectory = exact_flow(problem, objective, adam, settings.adam_steps)
    table[name][reduction] = at_equal_progress(trajectory, settings)
  return table


def exact_flow(problem: Problem, objective: rl.Objective, optimizer: Any, steps: int) -> Lengths:
  """Lengths [1, steps, P] along the exact expected update, before each step: nothing is drawn."""
  policy = problem.policy
  update = expected_update(objective, policy, problem.rewards, group_size=problem.group_size)

  def step(carry: Any, _: None) -> Any:
    params, state = carry
    now = lengths(policy.language, policy.logprobs(params), problem.rewards)
    descent = jax.tree.map(jnp.negative, update(params))
    change, state = optimizer.update(descent, state, params)
    return (optax.apply_updates(params, change), state), now

  @jax.jit
  def train(params: Any) -> Lengths:
    return jax.lax.scan(step, (params, optimizer.init(params)), length=steps)[1]

  return jax.tree.map(lambda x: x[None], train(policy.params))


def sampled_flow(problem: Problem, objective: rl.Objective, settings: Flows) -> Lengths:
  """Lengths [seeds, steps, P] of training on samples, one group per prompt and step."""
  optimizer = optax.adam(settings.sampled_rate)

  def step(carry: Any, key: jax.Array, policy: Policy) -> Any:
    params, state = carry
    logprobs = policy.logprobs(params)
    now = lengths(policy.language, logprobs, problem.rewards)
    rows = _draw(key, logprobs, problem.group_size)
    descent = jax.grad(_loss)(params, policy, objective, rows, jnp.asarray(problem.rewards))
    change, state = optimizer.update(descent, state, params)
    return (optax.apply_updates(params, change), state), now

  @jax.jit
  def train(params: Any, language: Language, keys: jax.Array) -> Lengths:
    policy = problem.policy._replace(language=language)
    start = (params, optimizer.init(params))
    run = lambda keys: jax.lax.scan(lambda c, k: step(c, k, policy), start, keys)[1]  # noqa: E731
    return jax.lax.map(run, keys)

  steps = settings.sampled_steps
  keys = jnp.stack([jax.random.split(jax.random.key(seed), steps) for seed in settings.seeds])
  return train(problem.policy.params, problem.policy.language, keys)


def _draw(key: jax.Array, logprobs: jax.Array, group_size: int) -> jax.Array:
  """[P, G] responses drawn from their exact probabilities."""
  cumulative = jnp.cumsum(jnp.exp(jnp.sum(logprobs, axis=-1)), axis=-1)
  uniform = jax.random.uniform(key, (len(cumulative), group_size), cumulative.dtype)
  return jax.vmap(jnp.searchsorted)(cumulative, uniform * cumulative[:, -1:])


def _loss(
  params: Any, policy: Policy, objective: rl.Objective, rows: jax.Array, rewards: jax.Array
) -> jax.Array:
  """The library's loss of the responses `rows` [P, G]."""
  score = jax.vmap(policy.score, in_axes=(None, None, 0, 0))
  logprobs = score(params, policy.language, jnp.arange(policy.num_prompts), rows)
  mask = jnp.asarray(policy.language.mask)[rows]
  advantages = objective.advantages(jnp.take_along_axis(rewards, rows, axis=1))
  weights = objective.loss_weights(mask)
  return rl.objective_loss(
    objective, logprobs, None, advantages[..., None], mask, loss_weights=weights
  )[0]


def at_equal_progress(trajectory: Lengths, settings: Flows) -> dict[str, Any]:
  """Lengths where each prompt first reaches given values of its P(correct).

  Args:
    trajectory: [seeds, steps, P].
    settings: the last value and how many there are; the first is that of the reference.

  Returns:
    correct, length_wrong, length_correct: [seeds, points], means over the prompts; NaN where a
    prompt never gets there. At a point every prompt has gone the same part of its way.
  """
  correct, wrong, right = (np.asarray(x) for x in trajectory)
  best = np.maximum.accumulate(correct, axis=1)
  part = np.linspace(0.0, 1.0, settings.points)
  found: list[Any] = []
  for seed in range(len(correct)):
    rows = []
    for p in range(correct.shape[-1]):
      levels = correct[seed, 0, p] * (1.0 - part) + settings.progress * part
      rows.append(
        [
          levels,
          *(_first_passage(levels, best[seed, :, p], x[seed, :, p]) for x in (wrong, right)),
        ]
      )
    found.append(np.mean(rows, axis=0))
  names = ("correct", "length_wrong", "length_correct")
  return dict(zip(names, np.moveaxis(np.array(found), 1, 0), strict=True))


def _first_passage(levels: np.ndarray, best: np.ndarray, x: np.ndarray) -> np.ndarray:
  """x where the running maximum `best` first reaches each level, interpolated; NaN = never."""
  after = np.searchsorted(best, levels)
  inside = after < len(best)
  after = np.minimum(after, len(best) - 1)
  before = np.maximum(after - 1, 0)
  step = best[after] - best[before]
  share = np.where(step > 0, (levels - best[before]) / np.where(step > 0, step, 1.0), 0.0)
  return np.where(inside, x[before] + share * (x[after] - x[before]), np.nan)
