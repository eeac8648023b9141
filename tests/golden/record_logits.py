"""Records the logits of transformers on the checkpoints of `checkpoints`.

`python -m tests.golden.record_logits`, where torch and transformers are installed, writes
logits.npz beside this file. Recorded with transformers 5.24.0 and torch 2.13.0.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.golden import checkpoints

SEED = 20
LOGITS = Path(__file__).with_name("logits.npz")


def transformers_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
  """[B, T, V] in float32, by the plain implementation of attention."""
  import torch
  from transformers import AutoModelForCausalLM

  model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  )
  with torch.no_grad():
    return model.eval()(torch.tensor(tokens)).logits.numpy()


def main() -> None:
  tokens = checkpoints.tokens(SEED)
  with tempfile.TemporaryDirectory() as scratch:
    logits = {
      name: transformers_logits(
        checkpoints.write_checkpoint(Path(scratch, name), name, SEED), tokens
      )
      for name in checkpoints.CASES
    }
  np.savez_compressed(LOGITS, **logits)
  for name, values in logits.items():
    print(f"{name:14} {values.shape} standard deviation {values.std():.2f}")


if __name__ == "__main__":
  main()
