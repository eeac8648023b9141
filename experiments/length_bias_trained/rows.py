"""The objectives that are compared: Dr. GRPO with another length normalisation in its one slot."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jaxrl_lm as rl
from jaxrl_lm.objectives import Objective

CONSTANT, SUM, MEAN, TOKEN_MEAN = "constant", "sum", "mean", "token_mean"
LABELS = {
  CONSTANT: "constant length (Dr. GRPO)",
  SUM: "sum",
  TOKEN_MEAN: "token mean, batch (DAPO's code)",
  "group_token_mean": "token mean, group (DAPO)",
  "root": "1/sqrt(n)",
  MEAN: "1/n",
  "grpo": "1/n and std (GRPO)",
}


def rows(longest: int) -> dict[str, Objective]:
  """Objectives for responses of up to `longest` tokens; all but the last one without std.

  On samples of the policy itself the ratio is 1, and no clip is ever reached.
  """
  base = rl.dr_grpo(longest)
  slots = {
    SUM: rl.sequence_sum,
    TOKEN_MEAN: rl.token_mean,
    "group_token_mean": rl.group_token_mean,
    "root": partial(rl.length_power, alpha=0.5),
    MEAN: rl.sequence_mean,
  }
  changed = {name: replace(base, loss_weights=slot) for name, slot in slots.items()}
  return {CONSTANT: base, **changed, "grpo": rl.GRPO}
