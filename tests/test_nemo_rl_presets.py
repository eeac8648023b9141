"""NeMo-RL's presets against its formulas, written out on lists: there are no recorded numbers."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl


def nemo_rl(kind: str, lists: list[dict[str, Any]], rewards: list[float]) -> tuple[float, list]:
  """Loss and gradient; k3 to 10 times exp(x - sg(x)), coefficient 0.01; means over tokens."""
  total, tokens, gradient = 0.0, sum(len(row["lp"]) for row in lists), []
  for i, row in enumerate(lists):
    others = rewards[:i] + rewards[i + 1 :]
    mean = sum(others) / len(others)
    std = math.sqrt(sum((r - mean) ** 2 for r in others) / (len(others) - 1))
    a = rewards[i] - mean
    a = a / (std + 1e-6) if std > 0 else a
    scale = 1 / tokens if kind != "gspo" else 1 / (len(lists) * len(row["lp"]))
    n = len(row["lp"])
    sequence = math.exp(sum(x - o for x, o in zip(row["lp"], row["old"])) / n)
    out = []
    for x, o, r in zip(row["lp"], row["old"], row["ref"]):
      ratio = sequence if kind == "gspo" else math.exp(x - o)
      clipped = min(max(ratio, 0.8), 1.2)
      if kind == "cispo":
        value, slope = -clipped * a * x, -clipped * a
      elif kind == "reinforce":
        value, slope = -a * x, -a
      else:
        value = max(-a * ratio, -a * clipped)
        slope = -a * ratio if value == -a * ratio else 0.0
      k3 = math.exp(r - x) - 1 - (r - x)
      kl, kl_slope = (k3, x - r) if k3 < 10 else (10.0, 10.0)
      if kind == "reinforce":  # ours reports A log-ratio, whose gradient is the same
        value = -a * (x - o) - a * o
      total += scale * (value + 0.01 * kl)
      out.append(scale * (slope + 0.01 * kl_slope))
    gradient.append(out)
  return total, gradient


@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo", "reinforce"])
def test_nemo_rl_computes_its_formulas(kind, x64):
  rng = np.random.default_rng(5)
  lengths, rewards = (1, 3, 5, 2), [1.0, 0.0, 0.0, 0.5]
  lists = []
  for n in lengths:
    old = -rng.exponential(1.0, n) - 0.5
    lists.append({"old": list(old), "lp": list(old + rng.normal(0, 0.4, n)),
                  "ref": list(old + rng.normal(0, 0.4, n))})  # fmt: skip
  lists[2]["ref"][0] = lists[2]["lp"][0] + 4.0  # k3 = 49.6
  mask = np.arange(5) < np.asarray(lengths)[:, None]
  arrays = {
    name: np.array([row[name] + [np.nan] * (5 - len(row[name])) for row in lists])
    for name in ("lp", "old", "ref")
  }
  recipe = getattr(rl, f"nemo_rl_{kind}")()
  advantage = recipe.objective.advantages(jnp.asarray(rewards))[:, None]
  weights = recipe.objective.loss_weights(mask)

  def loss(logprobs: jax.Array) -> jax.Array:
    return rl.recipe_loss(recipe, logprobs, arrays["old"], advantage, mask, loss_weights=weights,
                          ref_logprobs=arrays["ref"])[0]  # fmt: skip

  value, gradient = jax.value_and_grad(loss)(jnp.asarray(arrays["lp"]))
  expected, slopes = nemo_rl(kind, lists, rewards)
  np.testing.assert_allclose(value, expected, rtol=1e-12)
  np.testing.assert_allclose(np.asarray(gradient)[mask], sum(slopes, []), rtol=1e-10, atol=1e-15)
