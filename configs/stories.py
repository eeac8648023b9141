"""Settings of `experiments.stories`."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from configs import train


@dataclasses.dataclass(frozen=True)
class Frontier:
  """How the distribution of the reward at the start is estimated."""

  rounds: int = 16
  """Of held_out_samples responses to each prompt."""
  resamples: int = 200
  """Of the responses, for the band."""


@dataclasses.dataclass(frozen=True)
class Config:
  """Reward against KL to the start, of several algorithms and seeds."""

  run: train.Config
  """What all runs share; its objective and seed are not used."""
  without_data: train.Config | None = None
  """The same where the model of `run` is absent; None: as `experiments.train` does."""
  algorithms: tuple[str, ...] = ("grpo", "dr_grpo", "rloo", "gspo", "cispo")
  """As `experiments.train` names them; papers compare them with the first."""
  seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
  """A seed's prompts and noise of the sampler are the same for all algorithms."""
  frontier: Frontier = Frontier()

  def __post_init__(self) -> None:
    if len(self.seeds) < 2:
      raise ValueError(f"intervals are over seeds: at least 2 are needed, got {self.seeds}")


STORIES = replace(
  train.DEFAULT,
  task="stories(word='dog')",
  reward_weights={"ending": 0.0},  # measured only: the start earns both once in 8,000 responses
  steps=16,
  max_new_tokens=64,
  minibatches=4,
  max_grad_norm=None,  # to Adam the size of a loss is nothing, and to a clip it is not
  kl=None,
  kl_coef=0.0,
  learning_rate=1.5e-4,
  evaluate_every=4,
  held_out_prompts=4,
  held_out_samples=64,
  checkpoint_every=8,
)
ADDITION = replace(
  STORIES,
  task="addition",
  reward_weights={},
  max_new_tokens=None,
  num_prompts=32,  # all differ: few would be learned by heart
  group_size=16,
  minibatches=2,
  learning_rate=3e-4,
  held_out_prompts=64,
  held_out_samples=16,
)

FULL = Config(run=STORIES, without_data=ADDITION)

DEMO = replace(FULL, algorithms=("grpo", "rloo", "gspo"), seeds=(0, 1, 2))

SMALL = Config(
  run=replace(
    STORIES,
    task="first_token(targets=[1, 2, 3])",
    reward_weights={},
    steps=6,
    num_prompts=3,  # with the group, the shape of the evaluations: one compilation
    group_size=64,
    minibatches=3,
    max_new_tokens=2,
    learning_rate=0.015,
    evaluate_every=3,
  ),
  algorithms=("grpo", "rloo"),
  seeds=(0, 1, 2),
  frontier=Frontier(rounds=4, resamples=50),
)

CONFIGS = {
  "full": (FULL, "Five algorithms, five seeds."),
  "demo": (DEMO, "Three algorithms, three seeds."),
  "small": (SMALL, "Two algorithms on a random policy of one layer: seconds."),
}
