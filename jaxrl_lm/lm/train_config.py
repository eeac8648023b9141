"""What a run is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_lm import checks
from jaxrl_lm.lm import objective_advantages, sampling
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.update_config import UpdateConfig

_REWARDS = {"rewards", "token_rewards", "component_rewards"}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """A run: with the policy, the task and the seed it says every number of it.

  Attributes:
    rollout: how responses are drawn.
    update: objective, optimiser, terms of the loss; its temperature is the sampler's too.
    steps: until when to train, counted from the beginning of the run, resumed or not. Not compared,
      so that a run can be made longer; nor is `shown`.
    seed: of samples, data order and minibatches, 0 to 2^32 - 1.
    epochs: passes over the rows of a step.
    minibatches: optimiser steps in a pass; each has num_prompts / minibatches groups.
    reward_kl: estimator of the KL to the reference, such as `kl_k1`, to be taken off the rewards:
      of each token for advantages per token, its sum for those per sample. Not for an objective
      that sees component rewards only, which it is no part of. None = not.
    reward_kl_coef: how much of it, reward per nat.
    importance: (log_weights, mask) -> importance weights, of the log-ratios [N, T] of old policy
      to sampler: `partial(truncated, cap=2.0)`. None = 1.
    advantage_transform: (advantages, mask) [P, G, T] -> the same, such as `whiten`, after the
      critic's targets are made. None = as they are.
    packed: tokens in a row that holds several sequences, one after the other, in scoring and
      updates: at least the longest prompt and `max_new_tokens`, and best no more. Numbers change
      by rounding only (a selection that draws, draws other tokens), time by the share of padding;
      rows come in few numbers (`few_shapes`), each compiled once. None = a row is one sequence.
    shown: responses in each report.
  """

  rollout: RolloutConfig
  update: UpdateConfig
  steps: int = dataclasses.field(compare=False)
  seed: int = 0
  epochs: int = 1
  minibatches: int = 1
  reward_kl: Callable[..., Any] | None = None
  reward_kl_coef: float = 0.0
  importance: Callable[..., Any] | None = None
  advantage_transform: Callable[..., Any] | None = None
  packed: int | None = None
  shown: int = dataclasses.field(default=4, compare=False)

  def __post_init__(self) -> None:
    """Checks what can be seen here."""
    checks.check_range("shown", self.shown, low=0)
    checks.check_range("steps", self.steps, low=0, high=np.iinfo(np.int32).max)
    checks.check_range("seed", self.seed, low=0, high=sampling.LAST_SEED)
    for name in ("epochs", "minibatches"):
      checks.check_range(name, getattr(self, name), low=1)
    if self.packed is not None:
      checks.check_whole("packed", self.packed, low=1, static=True)
    checks.check_range("temperature", self.update.temperature, low=0, open_low=True)
    if self.rollout.num_prompts % self.minibatches:
      raise ValueError(
        f"minibatches are made of whole groups: minibatches = {self.minibatches} does not divide "
        f"num_prompts = {self.rollout.num_prompts} ({self.rollout.rows} rows)"
      )
    if self.reward_kl is None and self.reward_kl_coef != 0:
      raise ValueError("reward_kl_coef is given but reward_kl is None")
    needs = objective_advantages.needs(self.update.objective.advantages)
    if self.reward_kl is not None and needs & _REWARDS == {"component_rewards"}:
      raise ValueError(
        "reward_kl is given, but the objective's advantages take component_rewards, which it is "
        "not taken off: use a KL term in the loss (update.kl)"
      )

  @property
  def needs_reference(self) -> bool:
    """Whether a term asks for the log-probs of the reference policy."""
    return self.update.kl is not None or self.reward_kl is not None
