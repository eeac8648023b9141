"""Settings of `experiments.mdp_walkthrough`."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from configs.policies import Network, Table


@dataclasses.dataclass(frozen=True)
class Config:
  """One response to one prompt, in a language with an end token."""

  vocabulary: int = 5
  """Tokens: digits, and the end token, which is the last one."""
  horizon: int = 6
  """Longest response, tokens."""
  targets: tuple[int, ...] = (0, 1, 2, 3)
  """Per prompt: the digits must sum to it, modulo their number of kinds."""
  seed: int = 4
  """Of the corpus that is counted."""
  concentration: float = 0.6
  """Of the Dirichlet that the corpus' transitions are drawn from."""
  policy: Table | Network = Table()
  """Who writes the response."""
  known: tuple[str, ...] | None = ("0.1672", "0.1968", "0.1420", "0.2901")
  """P(correct) of each prompt, if it was computed independently; right to its digits."""
  prompt: int = 3
  """Which prompt is answered."""
  response: tuple[int, ...] = (0, 3, 1, 3, 4)
  """Its tokens: up to and including the end token, or as many as the horizon."""


FULL = Config()

SMALL = replace(
  FULL, vocabulary=4, horizon=3, targets=(0, 1), known=None, prompt=1, response=(2, 2, 3)
)

SHARED = replace(FULL, policy=Network(), known=None)

CONFIGS = {
  "full": (FULL, "A right answer of five tokens: seconds."),
  "small": (SMALL, "A language of 40 responses, for the test."),
  "shared": (SHARED, "A network that shares its parameters writes it: 20 seconds."),
}
