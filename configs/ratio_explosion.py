"""Settings of `experiments.ratio_explosion`."""

from __future__ import annotations

import dataclasses
from dataclasses import replace


@dataclasses.dataclass(frozen=True)
class Chain:
  """A Markov chain that samples, and targets at stated KL rates in one random direction."""

  vocabulary: int = 5
  """Tokens."""
  concentration: float = 2.0
  """Of the Dirichlet that the behaviour's rows are drawn from."""
  seed: int = 0
  """Of the behaviour."""
  direction_seed: int = 1
  """Of the direction of the targets."""
  rates: tuple[float, ...] = (5e-5, 2e-4, 1e-3, 5e-3)
  """KL(behaviour || target), nats per token; the headline is about the second one."""
  lengths: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
  """Tokens per response."""
  gate_lengths: tuple[int, ...] = (16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
  """Tokens per response for the gates of a length-normalised ratio."""
  resolution: float = 2e-4
  """Of the distribution of log rho, as a fraction of its range."""


@dataclasses.dataclass(frozen=True)
class Bands:
  """Widths below and above 1, in units of the ratio."""

  clip: tuple[float, float] = (0.2, 0.2)
  """PPO's, for token, prefix and sequence ratios."""
  root_length: int = 64
  """The band that grows with sqrt(T) is PPO's, on the log scale, at this length."""
  gspo: tuple[float, float] = (3e-4, 4e-4)
  """GSPO's, for the ratio to the power 1 / T."""
  luspo: tuple[float, float] = (2e-3, 2.5e-3)
  """LUSPO's, likewise."""


@dataclasses.dataclass(frozen=True)
class Known:
  """Fractions of responses that leave PPO's band at the headline rate; right to their digits."""

  lengths: tuple[int, ...] = (256, 4096)
  """Tokens per response."""
  outside: tuple[str, ...] = ("0.5285", "0.8963")
  """Recomputed by propagating a histogram of log rho."""


@dataclasses.dataclass(frozen=True)
class States:
  """One logit per state of the counting language; the behaviour is a fair coin."""


@dataclasses.dataclass(frozen=True)
class Network:
  """A multilayer perceptron over position and count: the states share all parameters."""

  width: int = 8
  """Units of its hidden layer."""
  seed: int = 0
  """Of the behaviour's weights, and of the random direction."""


@dataclasses.dataclass(frozen=True)
class Counting:
  """The counting language, in which gradients and their estimators are exact."""

  policy: States | Network = States()
  """Whose gradient is estimated."""
  lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
  """Tokens per response."""
  rates: tuple[float, ...] = (2e-4, 5e-3)
  """KL(behaviour || target), nats per token: a mild one and a large one."""
  baseline: float = 0.5
  """Subtracted from the reward."""
  seed: int = 0
  """Of the shift that is drawn per state."""


@dataclasses.dataclass(frozen=True)
class Rollouts:
  """Token log-probs of real responses, from the sampler and from two trainers."""

  lengths: tuple[int, ...] = (8, 16, 32, 64, 96, 128, 160, 187, 220, 251)
  """First tokens of a response that are taken; shorter responses are left out."""
  resamples: int = 4000
  """Of the rows, for the intervals."""
  seed: int = 0
  """Of the resampling."""
  extrapolated: int = 4096
  """Tokens per response at which the effective sample size is predicted."""


@dataclasses.dataclass(frozen=True)
class Config:
  """The explosion of the sequence ratio, all of it."""

  chain: Chain = Chain()
  bands: Bands = Bands()
  known: Known | None = Known()
  """Numbers that the chain must reproduce, if they are known."""
  counting: Counting = Counting()
  rollouts: Rollouts = Rollouts()


FULL = Config()

DEMO = replace(
  FULL,
  chain=Chain(
    lengths=(4, 16, 64, 256, 1024, 4096),
    gate_lengths=(16, 256, 4096, 65_536, 262_144),
    resolution=1e-3,
  ),
  counting=Counting(lengths=(64, 128, 256, 512)),
)

SMALL = replace(
  FULL,
  chain=Chain(
    rates=(5e-5, 2e-4, 5e-3),
    lengths=(16, 256, 4096),
    gate_lengths=(256, 262_144),
    resolution=1e-3,
  ),
  counting=Counting(lengths=(32, 64)),
  rollouts=Rollouts(lengths=(64, 187), resamples=200),
)

SHARED = replace(FULL, counting=Counting(policy=Network(), lengths=(32, 64, 128, 256)))

CONFIGS = {
  "full": (FULL, "All of it."),
  "demo": (DEMO, "Fewer lengths: a minute."),
  "small": (SMALL, "Short responses: seconds."),
  "shared": (SHARED, "A small network in place of one logit per state."),
}
