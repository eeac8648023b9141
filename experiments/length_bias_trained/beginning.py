"""At the first parameters: where each update goes, and what that does to lengths.

  d E[n | wrong] = Cov(n, u score | wrong),  d P(right) = Cov(r, u score),  score = grad log pi

u is the update of an objective, averaged over all samples but those of the fold that it is measured
on: on its own samples an update always seems to do what it was to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.length_bias_trained import Beginning, Training
from experiments.length_bias_trained.policies import RIGHT, Start
from experiments.length_bias_trained.rows import CONSTANT, rows
from jaxrl_lm import objectives
from jaxrl_lm.lm import rollouts, scoring
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.objectives import Objective

SEED = 99  # apart from those of training
Track = Callable[[Iterable[Any]], Iterable[Any]]


def drifts(start: Start, settings: Beginning, training: Training, track: Track) -> dict[str, Any]:
  """{objective: {"right", "wrong": [folds] tokens per unit of P(right), "cosine"}}."""
  sizes = RolloutConfig(settings.num_prompts, training.group_size, training.max_new_tokens)
  table = {name: rows(training.max_new_tokens)[name] for name in settings.rows}
  folds, gradients = [], []
  for fold in track(range(settings.folds)):
    fold_rows, reward = _drawn(start, sizes, fold)
    folds.append((fold_rows, reward))
    gradients.append(
      {
        name: _update(start.policy.model, objective, start.policy.params, fold_rows, reward)
        for name, objective in table.items()
      }
    )
  updates = {name: [fold[name] for fold in gradients] for name in table}
  constant = _total(updates[CONSTANT])
  return {
    name: _drift(start, folds, own) | {"cosine": _cosine(_total(own), constant)}
    for name, own in updates.items()
  }


def _drawn(start: Start, sizes: RolloutConfig, fold: int) -> tuple[Any, np.ndarray]:
  """Prompts and responses [N, ...], and rewards [P, G]."""
  cursor = fold * sizes.num_prompts
  drawn = rollouts.rollout(start.policy, start.task, sizes, seed=SEED, step=fold, cursor=cursor)
  rewards = drawn.scores.components[RIGHT].reshape(-1, sizes.group_size)
  samples = drawn.samples
  return (drawn.prompts, drawn.prompt_mask, samples.tokens, samples.mask), rewards


@partial(jax.jit, static_argnames=("model", "objective"))
def _update(model: Any, objective: Objective, params: Any, rows: Any, rewards: Any) -> Any:
  """Minus the gradient of the loss on whole groups."""
  mask = rows[-1].reshape(*rewards.shape, -1)
  advantages = objective.advantages(rewards)[..., None]
  weights = objective.loss_weights(mask)

  def gain(params: Any) -> jax.Array:
    logprobs = scoring.response_logprobs(model, params, *rows).reshape(mask.shape)
    loss, _ = objectives.objective_loss(
      objective, logprobs, None, advantages, mask, loss_weights=weights
    )
    return -loss

  return jax.grad(gain)(params)


@partial(jax.jit, static_argnames="model")
def _along(model: Any, params: Any, rows: Any, direction: Any) -> jax.Array:
  """[N] how fast the log-prob of each response grows in a direction."""

  def logprob(params: Any) -> jax.Array:
    return scoring.response_logprobs(model, params, *rows).sum(axis=-1)

  return jax.jvp(logprob, (params,), (direction,))[1]


def _drift(start: Start, folds: list[Any], updates: list[Any]) -> dict[str, Any]:
  whole = _total(updates)
  slopes = []
  for (fold_rows, rewards), own in zip(folds, updates, strict=True):
    others = jax.tree.map(lambda a, b: a - b, whole, own)
    score = np.asarray(_along(start.policy.model, start.policy.params, fold_rows, others), float)
    lengths, right = fold_rows[-1].sum(axis=-1), rewards.reshape(-1) > 0
    of_lengths = (_covariance(lengths[x], score[x]) for x in (right, ~right))
    slopes.append([_covariance(right, score), *of_lengths])
  reward, of_right, of_wrong = np.array(slopes).T
  return {"right": of_right / reward.mean(), "wrong": of_wrong / reward.mean()}


def _covariance(x: np.ndarray, y: np.ndarray) -> float:
  return float(np.mean((x - x.mean()) * (y - y.mean()))) if len(x) else float("nan")


def _total(updates: list[Any]) -> Any:
  return jax.tree.map(lambda *x: jnp.sum(jnp.stack(x), axis=0), *updates)


def _cosine(a: Any, b: Any) -> float:
  def inner(a: Any, b: Any) -> float:
    return sum(float(jnp.vdot(x, y)) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))

  return inner(a, b) / np.sqrt(inner(a, a) * inner(b, b))
