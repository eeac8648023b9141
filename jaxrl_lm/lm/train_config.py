"""What a run is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl_lm import checks
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.update_config import UpdateConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """A run: with the policy, the task and the seed it says every number of it.

  Attributes:
    rollout: how responses are drawn.
    update: objective, optimiser, terms of the loss; its temperature is the sampler's too.
    steps: until when to train, counted from the beginning of the run, resumed or not.
    seed: of samples, data order and minibatches, >= 0.
    epochs: passes over the rows of a step.
    minibatches: optimiser steps in a pass; each has num_prompts / minibatches groups.
    reward_kl: estimator of the KL to the reference, such as `kl_k1`, to be taken off the rewards:
      of each token for advantages per token, its sum for those per sample. None = not.
    reward_kl_coef: how much of it, reward per nat.
    importance: (log_weights, mask) -> importance weights, of the log-ratios [N, T] of old policy
      to sampler: `partial(truncated, cap=2.0)`. None = 1.
    advantage_transform: (advantages, mask) [P, G, T] -> the same, such as `whiten`, after the
      critic's targets are made. None = as they are.
    shown: responses in each report.
  """

  rollout: RolloutConfig
  update: UpdateConfig
  steps: int
  seed: int = 0
  epochs: int = 1
  minibatches: int = 1
  reward_kl: Callable[..., Any] | None = None
  reward_kl_coef: float = 0.0
  importance: Callable[..., Any] | None = None
  advantage_transform: Callable[..., Any] | None = None
  shown: int = 4

  def __post_init__(self) -> None:
    """Checks what can be seen here."""
    for name in ("steps", "seed", "shown"):
      checks.check_range(name, getattr(self, name), low=0)
    for name in ("epochs", "minibatches"):
      checks.check_range(name, getattr(self, name), low=1)
    checks.check_range("temperature", self.update.temperature, low=0, open_low=True)
    if self.rollout.num_prompts % self.minibatches:
      raise ValueError(
        f"minibatches are made of whole groups: minibatches = {self.minibatches} does not divide "
        f"num_prompts = {self.rollout.num_prompts} ({self.rollout.rows} rows)"
      )
    if self.reward_kl is None and self.reward_kl_coef != 0:
      raise ValueError("reward_kl_coef is given but reward_kl is None")

  @property
  def needs_reference(self) -> bool:
    """Whether a term asks for the log-probs of the reference policy."""
    return self.update.kl is not None or self.reward_kl is not None
