"""Settings of `experiments.token_vs_sequence`."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from configs.length_bias import Setting
from configs.policies import Network


@dataclasses.dataclass(frozen=True)
class Known:
  """Numbers of the table that were computed independently; text is right to its digits."""

  correct: tuple[str, ...] = ("0.1672", "0.1968", "0.1420", "0.2901")
  """P(correct) of each prompt."""
  length_correct: str = "4.530"
  """Mean length of correct responses, mean over prompts, tokens."""
  length_wrong: str = "3.968"
  """Of wrong ones."""


@dataclasses.dataclass(frozen=True)
class Critic:
  """Values of the states in place of that of the prompt."""

  gae_lambda: float = 0.95
  """Of GAE, beside 1 and 0."""
  error: float = 0.3
  """Standard deviation of a wrong critic's error per state, in units of the reward's own."""
  seed: int = 0
  """Of that error."""


@dataclasses.dataclass(frozen=True)
class Kl:
  """A penalty on the divergence from a reference."""

  coefficient: float = 0.1
  """Reward per nat."""
  nats: float = 0.1
  """KL(reference || policy) per response: how far the policy has moved."""
  seed: int = 0
  """Of the random direction, beside the gradient."""


@dataclasses.dataclass(frozen=True)
class Clip:
  """Off-policy: the policy has moved away from the one that sampled."""

  nats: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
  """KL(sampler || policy) per response."""
  width: float = 0.2
  """Of the band of token and of sequence ratios, to either side of 1."""
  seed: int = 0
  """Of the random direction, beside the gradient."""


@dataclasses.dataclass(frozen=True)
class Curl:
  """A smaller language of one prompt, whose Jacobians are small."""

  vocabulary: int = 4
  """Tokens, the end token included."""
  horizon: int = 4
  """Longest response, tokens."""
  target: int = 1
  """Of the sum of the content tokens."""
  width: int = 8
  """Units of each hidden layer of its network."""


@dataclasses.dataclass(frozen=True)
class Config:
  """Token MDP against sequence bandit, all of it."""

  setting: Setting = Setting()
  """The language; its policy is the table."""
  known: Known | None = Known()
  """Numbers that the table must reproduce, if they are known."""
  network: Network = Network(width=16, steps=400)
  """The policy that shares everything, fitted to the table."""
  critic: Critic = Critic()
  kl: Kl = Kl()
  clip: Clip = Clip()
  discounts: tuple[float, ...] = (0.8, 0.9, 0.95, 0.99)
  """Of a token."""
  curl: Curl = Curl()


FULL = Config()

DEMO = replace(
  FULL,
  network=Network(width=16, steps=200),
  clip=Clip(nats=(1e-3, 1e-2, 1e-1)),
  discounts=(0.8, 0.9, 0.99),
)

SMALL = replace(
  FULL,
  setting=Setting(vocabulary=4, horizon=3, targets=(0, 1)),
  known=None,
  network=Network(width=8, steps=150),
  discounts=(0.8, 0.95),
  curl=Curl(vocabulary=3, horizon=3, width=4),
)

CONFIGS = {
  "full": (FULL, "All of it."),
  "demo": (DEMO, "Fewer distances and discounts."),
  "small": (SMALL, "A language of 40 responses: seconds."),
}
