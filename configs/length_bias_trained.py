"""Settings of `experiments.length_bias_trained`."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

ROWS = ("constant", "mean", "token_mean", "group_token_mean", "root", "grpo", "sum")


@dataclasses.dataclass(frozen=True)
class Filler:
  """Sums of one digit with filler, and the transformer that is pretrained on them."""

  mean: float = 4.0
  """Of the filler, tokens, before it is cut."""
  most: int = 11
  """Longest filler."""
  steps: int = 500
  """Of pretraining."""
  width: int = 64
  """Of its two layers."""


@dataclasses.dataclass(frozen=True)
class Beginning:
  """The update at the first parameters."""

  rows: tuple[str, ...] = ROWS
  """Objectives, of `experiments.length_bias_trained.rows`."""
  num_prompts: int = 64
  """Groups in a fold; with fewer prompts in the task some stand in it twice."""
  folds: int = 6
  """Each is measured along the update of the others."""


@dataclasses.dataclass(frozen=True)
class Training:
  """One optimiser step on each rollout, no KL term."""

  rows: tuple[str, ...] = tuple(row for row in ROWS if row != "sum")
  """Objectives, of `experiments.length_bias_trained.rows`; a sum is a constant."""
  seeds: tuple[int, ...] = tuple(range(8))
  """Of the samples and the order of prompts; all start from one policy."""
  steps: int = 24
  """Of Adam."""
  learning_rate: float = 3e-4
  """Its step."""
  num_prompts: int = 16
  """Groups in a step."""
  group_size: int = 8
  """Responses to each prompt."""
  max_new_tokens: int = 16
  """Longest response, its stop token included."""
  evaluate_every: int = 4
  """Steps from one evaluation to the next."""
  held_out_prompts: int = 64
  """At most that many of the task's."""
  held_out_samples: int = 128
  """Responses to each."""


@dataclasses.dataclass(frozen=True)
class Stories:
  """Stories of stories260K that contain a word, and end."""

  word: str = "happy"
  """A story is right if it contains it and ends."""
  longest: int = 192
  """Tokens of a story in the steps in which it learns to end earlier, before all else."""
  group_size: int = 16
  """Responses to each prompt in these steps."""
  steps: int = 6
  """Their number."""
  training: Training = Training(
    rows=("constant", "mean", "token_mean"),
    seeds=tuple(range(5)),
    steps=16,
    num_prompts=8,
    max_new_tokens=96,
    evaluate_every=2,
    held_out_samples=64,
  )
  """What follows them."""


@dataclasses.dataclass(frozen=True)
class Config:
  """Lengths under each normalisation."""

  filler: Filler = Filler()
  beginning: Beginning = Beginning()
  training: Training = Training()
  """On sums with filler."""
  stories: Stories | None = Stories()


FULL = Config()

DEMO = replace(
  FULL,
  beginning=replace(FULL.beginning, rows=("constant", "mean", "sum"), folds=3),
  training=replace(FULL.training, rows=("constant", "mean"), seeds=(0, 1, 2)),
  stories=None,
)

SMALL = Config(
  filler=Filler(mean=2.0, most=6, steps=40, width=16),
  beginning=Beginning(rows=("constant", "mean", "sum"), num_prompts=16, folds=2),
  training=Training(
    rows=("constant", "mean"),
    seeds=(0, 1),
    steps=4,
    learning_rate=3e-3,
    evaluate_every=2,
    held_out_samples=16,
  ),
  stories=None,
)

CONFIGS = {
  "full": (FULL, "All of it."),
  "demo": (DEMO, "Fewer objectives and seeds, no stories."),
  "small": (SMALL, "A policy that hardly knows its sums: for the test."),
}
