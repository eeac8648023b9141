"""Settings of `experiments.kl_estimators`."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from configs.policies import Network, Table


@dataclasses.dataclass(frozen=True)
class Setting:
  """A language with an end token, and the reference policy."""

  vocabulary: int = 5
  """Tokens, the end token included; the end token is the last one."""
  horizon: int = 5
  """Longest response, tokens."""
  targets: tuple[int, ...] = (0, 1, 2, 3)
  """Per prompt: content tokens must sum to it; the policy leaves the reference by this reward."""
  seed: int = 4
  """Of the corpus that is counted."""
  concentration: float = 0.6
  """Of the Dirichlet that the corpus' transitions are drawn from."""


@dataclasses.dataclass(frozen=True)
class Config:
  """Every estimator of the KL, in the loss and in the reward."""

  setting: Setting = Setting()
  table: Table = Table()
  """The policy whose parameters do not interact."""
  network: Network = Network(width=16)
  """The policy whose parameters are shared."""
  levels: tuple[float, ...] = (1e-3, 1e-2, 0.1, 0.3, 1.0)
  """KL(policy || reference), nats per response, mean over prompts."""
  headline: float = 0.1
  """The one of them at which samples of an old policy are looked at too."""
  staleness: tuple[float, ...] = (1e-3, 1e-2, 0.1, 0.5)
  """KL(old policy || policy), nats per response, mean over prompts."""
  direction_seed: int = 0
  """Of the random direction in which the old policy lies."""


FULL = Config()

SMALL = replace(
  FULL,
  setting=Setting(vocabulary=4, horizon=3, targets=(0, 1)),
  network=Network(width=8, steps=200),
  levels=(1e-3, 0.1, 1.0),
  staleness=(1e-2, 0.3),
)

CONFIGS = {
  "full": (FULL, "All of it: two minutes."),
  "small": (SMALL, "A language of 40 responses, for the test."),
}
