"""Settings of `experiments.length_bias`."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from configs.policies import Network, Table


@dataclasses.dataclass(frozen=True)
class Setting:
  """A language with an end token, a reward and a reference policy."""

  vocabulary: int = 5
  """Tokens, the end token included; the end token is the last one."""
  horizon: int = 6
  """Longest response, tokens."""
  targets: tuple[int, ...] = (0, 1, 2, 3)
  """Per prompt: content tokens must sum to it, modulo their number of kinds."""
  seed: int = 4
  """Of the corpus that is counted."""
  concentration: float = 0.6
  """Of the Dirichlet that the corpus' transitions are drawn from."""
  policy: Table | Network = Table()
  """What is measured and trained."""


@dataclasses.dataclass(frozen=True)
class Known:
  """Numbers of a setting that were computed independently; text is right to its digits."""

  correct: tuple[str, ...] = ("0.1672", "0.1968", "0.1420", "0.2901")
  """P(correct) of each prompt."""
  length_correct: str = "4.530"
  """Mean length of correct responses, mean over prompts, tokens."""
  length_wrong: str = "3.968"
  """Of wrong ones."""


@dataclasses.dataclass(frozen=True)
class Filler:
  """The pure case: the first token decides, what follows is filler until the end."""

  horizon: int = 4
  """Longest response, tokens."""
  correct: float = 0.3
  """P(correct): that the first token is the right one of two."""
  end: float = 0.3
  """Probability that a filler token ends the response."""
  group_sizes: tuple[int, ...] = (2, 4, 8, 16)
  """Samples per group."""


@dataclasses.dataclass(frozen=True)
class Flows:
  """Training, and where trajectories are compared."""

  progress: float = 0.8
  """P(correct) up to which every prompt is followed."""
  points: int = 25
  """Values of P(correct) at which lengths are compared."""
  sgd_steps: int = 130
  """Steps of SGD on the exact expected update."""
  sgd_rate: float = 3.0
  """Its learning rate, divided by the update's size in units of the gradient."""
  adam_steps: int = 50
  """Steps of Adam on the exact expected update."""
  adam_rate: float = 0.03
  """Its learning rate."""
  seeds: tuple[int, ...] = tuple(range(16))
  """Of the sampled runs; none = no sampled runs."""
  sampled_steps: int = 200
  """Steps of Adam on sampled groups, one group per prompt and step."""
  sampled_rate: float = 0.03
  """Its learning rate."""


@dataclasses.dataclass(frozen=True)
class Difficulty:
  """The weight that a division by the group's std gives to a prompt."""

  group_sizes: tuple[int, ...] = (2, 4, 8, 16, 64)
  """Samples per group."""
  correct: tuple[float, ...] = (0.001, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99)
  """P(correct) of a family of policies."""


@dataclasses.dataclass(frozen=True)
class Curl:
  """A smaller language of one prompt, whose Jacobians are small."""

  vocabulary: int = 4
  """Tokens, the end token included."""
  horizon: int = 4
  """Longest response, tokens."""
  target: int = 1
  """Of the sum of the content tokens."""
  table: bool = True
  """Measure all rows of the table of algorithms, not only the five that the loop is for."""
  radius: float = 1.0
  """Of the closed loop, logits."""


@dataclasses.dataclass(frozen=True)
class Config:
  """The length bias of GRPO, all of it."""

  setting: Setting = Setting()
  known: Known | None = Known()
  """Numbers that the setting must reproduce, if they are known."""
  group_size: int = 8
  """Samples per group."""
  cosine_band: tuple[float, float] = (0.86, 0.96)
  """Where the cosine of 1/n with the gradient is expected on every prompt."""
  alphas: tuple[float, ...] = (0.25, 0.5, 0.75)
  """Powers of the length, between the sum (0) and the mean (1)."""
  batch_samples: int = 1000
  """Batches drawn for what couples prompts; 0 = only its exact mean."""
  frontier_alphas: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
  """Powers of the length in the frontier of bias and variance."""
  frontier_groups: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
  """Groups per prompt that are averaged."""
  filler: Filler = Filler()
  flows: Flows = Flows()
  difficulty: Difficulty = Difficulty()
  curl: Curl = Curl()


FULL = Config()

DEMO = replace(
  FULL,
  alphas=(0.5,),
  batch_samples=0,
  frontier_alphas=(0.0, 0.25, 0.5, 0.75, 1.0),
  flows=replace(
    Flows(),
    points=17,
    sgd_rate=5.0,
    sgd_steps=80,
    adam_rate=0.05,
    adam_steps=26,
    seeds=tuple(range(8)),
    sampled_rate=0.05,
    sampled_steps=120,
  ),
  filler=Filler(group_sizes=(2, 8)),
  difficulty=Difficulty(group_sizes=(2, 8, 64), correct=(0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99)),
  curl=Curl(table=False),
)

_SMALL_SETTING = Setting(vocabulary=4, horizon=4, targets=(0, 1))

SMALL = replace(
  FULL,
  setting=_SMALL_SETTING,
  known=None,
  group_size=4,
  alphas=(0.5,),
  batch_samples=500,
  frontier_alphas=(0.0, 1.0),
  filler=Filler(horizon=3, group_sizes=(2, 4)),
  flows=replace(
    Flows(), points=9, sgd_steps=60, adam_steps=40, seeds=(0, 1, 2, 3), sampled_steps=100
  ),
  difficulty=Difficulty(group_sizes=(2, 8), correct=(0.01, 0.3)),
  curl=Curl(horizon=3, table=False),
)

SHARED = replace(
  FULL,
  setting=Setting(policy=Network()),
  known=None,
  alphas=(0.5,),
  batch_samples=500,
  frontier_alphas=(0.0, 0.5, 1.0),
  flows=replace(
    Flows(),
    sgd_rate=0.1,
    sgd_steps=160,
    adam_rate=0.003,
    adam_steps=90,
    sampled_rate=0.003,
    sampled_steps=250,
  ),
)

CONFIGS = {
  "full": (FULL, "All of it: 4 minutes."),
  "demo": (DEMO, "Fewer powers, seeds and rows: 70 seconds."),
  "small": (SMALL, "A language of 85 responses: seconds."),
  "shared": (SHARED, "A network that shares its parameters: 6 minutes."),
}
