"""Settings of `experiments.audit_rollouts`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Columns:
  """Which column is what; None = recognised by its name."""

  group: str | None = None
  """Id of the prompt or group: a number, a text, or a list of messages."""
  reward: tuple[str, ...] = ()
  """Reward of the response; several are added up. A missing one counts 0 if another is there."""
  length: str | None = None
  """Tokens of the response; without it the log-probs are counted, or the characters of `text`."""
  text: str | None = None
  """The response itself, whose characters are counted where no column holds tokens."""
  step: str | None = None
  """Step of the training run; the responses of one step are one update batch."""
  truncated: str | None = None
  """Whether the response was cut off: true/false, 1/0, or a reason to finish, length/stop."""
  response: str | None = None
  """Id of the response within its group; the same one twice is an error."""
  trainer_logprobs: str | None = None
  """Log-probs of the tokens by the trainer, nats: a list per response, [..., T] in an .npz."""
  sampler_logprobs: str | None = None
  """Log-probs of the same tokens by the engine that drew them, nats."""
  mask: str | None = None
  """Which of these tokens the policy chose, where the lists hold others too."""


@dataclasses.dataclass(frozen=True)
class Rules:
  """When a number becomes a finding: its interval lies beyond the threshold, all of it."""

  confidence: float = 0.99
  """Of the two-sided intervals."""
  least: int = 30
  """Groups (log-probs: responses) below which nothing is decided."""
  growth: float = 0.05
  """Change of a mean length over the logged steps, as a share of the mean."""
  silent: float = 0.5
  """Share of the groups whose rewards are all equal."""
  truncated: float = 0.05
  """Share of the responses that were cut off."""
  mismatch: float = 1e-3
  """KL(sampler || trainer), nats per token."""
  normalised: float = 0.01
  """Distance from 1 of the mean token ratio, which is 1 if the sampler drew the tokens."""
  worth: float = 0.5
  """Effective sample size per response, at the mean length."""
  exposure: float = 0.02
  """Shift of a mean length by a reduction, per unit of reward gained, as a share of the mean."""


@dataclasses.dataclass(frozen=True)
class Config:
  """How a log is read and judged."""

  columns: Columns = Columns()
  rules: Rules = Rules()
  correct_above: float = 0.5
  """A response is correct if its reward is larger."""
  skip_bad_rows: bool = False
  """Leave out, and count, rows that cannot be read, in place of stopping at the first."""
  bins: int = 5
  """Classes of length, of equally many responses."""
  blocks: int = 20
  """Consecutive steps are put together into at most so many blocks to fit a slope."""
  horizons: tuple[int, ...] = (1024, 4096, 16_384, 65_536)
  """Tokens per response at which the effective sample size is predicted."""
  band: tuple[float, float] = (0.2, 0.2)
  """Below and above 1: the ratios outside are counted."""


FULL = Config()
