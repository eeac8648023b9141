"""Settings of `experiments.ratio_explosion_trained`."""

from __future__ import annotations

import dataclasses
from dataclasses import replace


@dataclasses.dataclass(frozen=True)
class Chain:
  """The transformer that is made where stories260K is absent: it learns a chain of 5 tokens."""

  tokens: int = 128
  """Of a sequence that it learns from, and at most of a response."""
  steps: int = 150
  """Of Adam, on 128 sequences each; 0: a random transformer of one layer."""
  width: int = 32
  """Of its two layers."""


@dataclasses.dataclass(frozen=True)
class Config:
  """Ratios of one rollout after each of several updates."""

  stories: bool = True
  """On stories260K where it is, else on the chain; False: on the chain."""
  word: str = "tree"
  """A story with it has reward 1."""
  chain: Chain = Chain()
  warmup_steps: int = 12
  """Of training, on fresh responses, before the rollout that grows stale; shared by the seeds."""
  warmup_rate: float = 3e-4
  """Learning rate of them."""

  rates: tuple[float, ...] = (3e-4, 3e-5)
  """Learning rates of the updates that follow; the first is that of `experiments.train`."""
  updates: int = 16
  """On one rollout, each on groups of its own."""
  staleness: tuple[int, ...] = (1, 2, 4, 8, 16)
  """Updates after which all responses are scored."""
  minibatch_groups: int = 2
  """Groups in an update."""
  group_size: int = 8
  """Responses to a prompt."""
  tokens: int = 256
  """Of every response: none ends before."""
  lengths: tuple[int, ...] = (1, 4, 16, 64, 128, 256)
  """First tokens of them that are taken for a response."""
  seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
  """Of the rollouts."""


FULL = Config()

DEMO = replace(
  FULL, warmup_steps=6, rates=(3e-4,), tokens=128, lengths=(1, 4, 16, 64, 128), seeds=(0, 1, 2)
)

SMALL = replace(
  FULL,
  stories=False,
  chain=Chain(tokens=32, steps=0),
  warmup_steps=0,
  rates=(3e-3, 3e-4),
  updates=4,
  staleness=(1, 2, 4),
  minibatch_groups=4,
  tokens=32,
  lengths=(4, 32),
  seeds=(0, 1),
)

CONFIGS = {
  "full": (FULL, "All of it."),
  "demo": (DEMO, "Half as long responses, one rate, three seeds."),
  "small": (SMALL, "A random transformer: seconds."),
}
