"""Which policy an experiment in the laboratory measures."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Table:
  """One softmax per (prompt, prefix), from counting: no parameter is shared."""

  smoothing: float = 0.5
  """Added to every count."""


@dataclasses.dataclass(frozen=True)
class Network:
  """A multilayer perceptron over the prefix, fitted to the table: all parameters are shared."""

  smoothing: float = 0.5
  """Added to every count of the table that it is fitted to."""
  width: int = 32
  """Units of each of the two hidden layers."""
  steps: int = 600
  """Steps of Adam on KL(table || network)."""
  learning_rate: float = 0.02
  """Of the first step; it falls to 0 as a cosine."""
  seed: int = 0
  """Of the initial weights."""
