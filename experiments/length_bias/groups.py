"""Real graded responses: what one token weighs under each reduction, by length and correctness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl

DATA = {"GSM8K": "gsm8k_openai4.npz", "MATH": "qwen25math_groups8.npz"}
REDUCTIONS = {
  "sum": rl.sequence_sum,
  "token mean": rl.token_mean,
  "group token mean": rl.group_token_mean,
  "sequence mean": rl.sequence_mean,
}
BINS = 5


def token_weights(path: Path) -> dict[str, Any]:
  """Push per token, |centred advantage| x loss weight, in fifths of the responses by length.

  Of the groups with signal. Per reduction `wrong` and `correct` [5]: the mean push on a token of a
  response in that fifth, over the mean push on all tokens; `share_wrong_longest`: the part of
  the push on wrong responses that the longest fifth of them gets, of wrong ones' tokens in
  `share_tokens`.
  """
  with np.load(path) as data:
    rewards = data["correct"].astype(np.float64)
    tokens = data["len_qwen_tokens"].astype(np.int64)
  kept = np.asarray(rl.has_signal(jnp.asarray(rewards)))
  rewards, tokens = rewards[kept], tokens[kept]
  mask = jnp.asarray(np.arange(tokens.max()) < tokens[..., None])
  advantages = np.abs(np.asarray(rl.group_centered(jnp.asarray(rewards))))
  edges = np.quantile(tokens, np.linspace(0.0, 1.0, BINS + 1))
  fifth = np.clip(np.searchsorted(edges, tokens, side="right") - 1, 0, BINS - 1)
  table: dict[str, Any] = {
    "groups": int(kept.sum()),
    "edges": edges,
    "length_wrong": tokens[rewards == 0].mean(),
    "length_correct": tokens[rewards > 0].mean(),
    "share_tokens": _share(tokens, tokens, rewards == 0),
  }
  for name, reduction in REDUCTIONS.items():
    # Every token of a response has the same weight.
    push = np.asarray(reduction(mask))[..., 0] * advantages * tokens
    rows = {"share_wrong_longest": _share(push, tokens, rewards == 0)}
    for which, value in (("wrong", 0.0), ("correct", 1.0)):
      inside = [(fifth == k) & (rewards == value) for k in range(BINS)]
      per_token = np.array([_ratio(push[i].sum(), tokens[i].sum()) for i in inside])
      rows[which] = per_token / (push.sum() / tokens.sum())
    table[name] = rows
  return table


def _share(x: np.ndarray, tokens: np.ndarray, where: np.ndarray) -> float:
  """The part of x that the longest fifth of the responses in `where` has."""
  longest = np.argsort(tokens[where], kind="stable")[-max(where.sum() // BINS, 1) :]
  return float(x[where][longest].sum() / x[where].sum())


def _ratio(a: float, b: float) -> float:
  return float(a / b) if b else float("nan")
