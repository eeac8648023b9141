"""Whether an expected update is the gradient of anything: its curl, and its work around a loop.

A field of curl 0 need not be grad J. With a std it is the gradient of a function of J; TOPR and
1/n without a baseline ascend E[r / n]; OPO, whose baseline b contains the sample itself, ascends
J - E[b] / G: the scores of a group add up to that of the group, so that E[b sum_i s_i] = grad E[b].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxrl_lm as rl
from configs.length_bias import Curl, Setting
from experiments.algorithm_table import named_objectives
from experiments.length_bias.measures import Track
from experiments.length_bias.setting import Problem, grpo, reference_problem
from jaxrl_lm.exact import expected_update, jacobian, loop_work

# Left out: PPO takes a critic; a covariance selection couples the tokens of a batch.
LEFT_OUT = ("PPO", "DUAL_CLIP_PPO", "CLIP_COV", "KL_COV")


def curls(settings: Curl, setting: Setting, group_size: int, track: Track) -> dict[str, Any]:
  """Relative antisymmetric part of the Jacobian of every row, and work around a loop.

  The loop lies in the plane where 1/n turns most. Its work is relative to |F| at its centre times
  its circumference.
  """
  small = Setting(
    vocabulary=settings.vocabulary,
    horizon=settings.horizon,
    targets=(settings.target,),
    seed=setting.seed,
    concentration=setting.concentration,
    policy=setting.policy,
  )
  problem = reference_problem(small, group_size)
  params = problem.policy.params
  found: dict[str, float] = {}
  plane: Any = None
  loops: dict[str, float] = {}
  fields = {name: (row, advantages) for name, row, advantages in _rows(problem, settings.table)}
  for name in track(list(fields)):
    row, advantages = fields[name]
    field = expected_update(
      row, problem.policy, problem.rewards, group_size=group_size, advantages=advantages
    )
    matrix = jacobian(field, params)
    found[name] = float(np.linalg.norm(matrix - matrix.T) / (2.0 * np.linalg.norm(matrix)))
    if plane is None:  # the first row is 1/n
      plane = _steepest_plane(matrix, params)
    if name in LOOPS:
      loops[name] = _relative_work(field, params, plane, settings.radius)
  return {"curl": found, "loop": loops, "parameters": int(ravel_pytree(params)[0].size)}


MEAN = "1/n, centred"
LOOPS = (MEAN, "sum, centred", "sum, group std", "1/n, no baseline", "token mean, centred")


def _rows(
  problem: Problem, table: bool
) -> list[tuple[str, rl.Objective, Callable[..., Any] | None]]:
  """(name, objective, its advantages where they need more than rewards)."""
  std = partial(rl.group_normalized, eps=0.0)
  rows: list[tuple[str, rl.Objective, Callable[..., Any] | None]] = [
    (MEAN, grpo(rl.sequence_mean), None),
    ("1/n, group std", grpo(rl.sequence_mean, std), None),
    ("1/n, leave one out", grpo(rl.sequence_mean, rl.leave_one_out), None),
    ("1/n, no baseline", grpo(rl.sequence_mean, rl.raw_rewards), None),
    ("sum, centred", grpo(rl.sequence_sum), None),
    ("sum, group std", grpo(rl.sequence_sum, std), None),
    ("token mean, centred", grpo(rl.token_mean), None),
  ]
  if not table:
    return [row for row in rows if row[0] in LOOPS]
  more = _advantages_of(problem)
  rows += [
    (name, row, more.get(row.advantages))
    for name, row in named_objectives().items()
    if name not in LEFT_OUT
  ]
  return rows


def _advantages_of(problem: Problem) -> dict[Any, Callable[..., Any]]:
  """What advantages that need more than the rewards are called with."""
  logprobs = np.asarray(problem.policy.logprobs())[0].sum(axis=-1)
  greedy = float(problem.rewards[0, logprobs.argmax()])  # held fixed, as its gradient is 0
  lengths = lambda mask: mask.sum(axis=-1)  # noqa: E731
  return {
    rl.greedy_baseline: lambda rewards, mask: rl.greedy_baseline(rewards, jnp.full(1, greedy)),
    rl.length_weighted_baseline: lambda rewards, mask: rl.length_weighted_baseline(
      rewards, lengths(mask)
    ),
    rl.whitened_returns: lambda rewards, mask: rl.whitened_returns(
      rl.terminal_rewards(rewards, mask), mask
    ),
    rl.whitened_group_centered: rl.whitened_group_centered,
  }


def _steepest_plane(matrix: np.ndarray, params: Any) -> tuple[Any, Any]:
  """Two unit directions between which the antisymmetric part is largest."""
  left, _, right = np.linalg.svd(matrix - matrix.T)
  unravel = ravel_pytree(params)[1]
  return unravel(jnp.asarray(left[:, 0])), unravel(jnp.asarray(right[0]))


def _relative_work(field: Any, params: Any, plane: tuple[Any, Any], radius: float) -> float:
  size = float(jnp.linalg.norm(ravel_pytree(jax.jit(field)(params))[0]))
  return loop_work(field, params, *plane, radius=radius) / (2.0 * np.pi * radius * size)
