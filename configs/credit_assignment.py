"""Settings of `experiments.credit_assignment`."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from configs.policies import Network, Table


@dataclasses.dataclass(frozen=True)
class Setting:
  """A language of fixed length, and what counts as right."""

  vocabulary: int = 5
  """Tokens."""
  horizon: int = 4
  """Tokens of every response."""
  targets: tuple[int, ...] = (1, 2, 0, 0)
  """Per prompt: what the tokens sum to, modulo the vocabulary, or what the first one is."""
  seed: int = 1
  """Of the corpus that is counted."""
  concentration: float = 0.3
  """Of the Dirichlet that the corpus' transitions are drawn from."""


@dataclasses.dataclass(frozen=True)
class Known:
  """Numbers of the table that were computed independently; text is right to its digits."""

  correct: tuple[str, ...] = ("0.0175", "0.1875", "0.7073", "0.4387")
  """P(correct) of each prompt, reward on the sum."""
  sum_tokens: tuple[str, ...] = ("0.1314", "0.0687", "0.0874", "0.1418")
  """Mean |A_t| of each token, mean over prompts, reward on the sum."""
  sum_response: str = "0.3114"
  """Mean |r - V(x)| there."""
  first_token: str = "0.1540"
  """Mean |A_t| of the first token where it decides, and mean |r - V(x)|; later tokens have 0."""


@dataclasses.dataclass(frozen=True)
class Config:
  """Credit assignment, all of it."""

  setting: Setting = Setting()
  known: Known | None = Known()
  """Numbers that the table must reproduce, if they are known."""
  table: Table = Table()
  """The policy that shares nothing."""
  network: Network = Network()
  """The policy that shares everything, fitted to the table."""
  lambdas: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 1.0)
  """Of GAE; the last one must be 1."""
  compared: float = 0.95
  """Value of lambda that is compared with a discount of the same value; one of `lambdas`."""
  critic_error: float = 0.3
  """Standard deviation of a wrong critic's error per state, in units of the reward's own."""
  critic_seed: int = 0
  """Of that error."""
  samples: tuple[int, ...] = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
  """Responses per prompt that are averaged."""
  shown_prompt: int = 1
  """Prompt whose responses are drawn token by token."""
  shown: int = 7
  """How many of them, the most probable ones of each outcome."""


FULL = Config()

DEMO = replace(FULL, lambdas=(0.0, 0.5, 0.8, 0.95, 1.0), network=Network(steps=300))

SMALL = replace(
  FULL,
  setting=Setting(vocabulary=3, horizon=3, targets=(1, 2)),
  known=None,
  network=Network(width=8, steps=150),
  lambdas=(0.0, 0.5, 0.95, 1.0),
  shown_prompt=1,
  shown=4,
)

CONFIGS = {
  "full": (FULL, "All of it: half a minute."),
  "demo": (DEMO, "Fewer values of lambda: 20 seconds."),
  "small": (SMALL, "A language of 27 responses: seconds."),
}
