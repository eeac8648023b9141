"""Settings of `experiments.generate`."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Config:
  """One text, drawn from one model."""

  model: Path | None = None
  """Folder of Hugging Face, or a model file of llama2.c; none: stories260K of the data folder."""
  prompt: str = "Once upon a time"
  """What the text begins with; it may be empty where the model has a BOS."""
  max_new_tokens: int = 200
  """Longest response, tokens. It also ends with a stop token of the tokenizer."""
  temperature: float = 1.0
  """0 takes the likeliest token."""
  top_k: int | None = None
  """Draw from that many likeliest tokens only."""
  top_p: float = 1.0
  """Draw from the fewest likeliest tokens of that probability; 1 = all."""
  min_p: float = 0.0
  """Draw from tokens at least that share as likely as the likeliest; 0 = all."""
  seed: int = 0
  """Of the noise."""
  chunk: int = 4
  """Tokens from one print to the next."""
  bfloat16: bool = False
  """Parameters and activations in it. The ratio is then printed and not judged."""
