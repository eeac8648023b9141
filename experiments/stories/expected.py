"""What `experiments.stories` expects, and what came out of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.harness.run import Experiment
from experiments.stories import measures
from experiments.stories.frontier import Curve

ERRORS = 5.0  # standard errors that a golden allows, or asks for
BAI = "Bai et al. 2022, arXiv:2204.05862, abstract"
GSPO = "GSPO, arXiv:2507.18071, section 5"
CISPO = "MiniMax-M1, arXiv:2506.13585, figure 2"
OUTSET = "expected at the outset of this experiment"


def rises(experiment: Experiment, rows: dict[str, Any], *, known: bool) -> None:
  """Rewards rise: a golden where a full run was measured, else a hypothesis."""
  least = min(row["rise"].value / row["rise"].error for row in rows.values())
  name = f"the held-out reward of every algorithm rises by more than {ERRORS:g} standard errors"
  if known:
    experiment.golden(name, least > ERRORS, True, source="what training is for")
  else:
    experiment.hypothesis(
      name, "It does.", least, least > ERRORS or None, source="what training is for"
    )


def goldens(
  experiment: Experiment,
  table: dict[str, Any],
  curve: Curve,
  others: list[Curve],
) -> None:
  """What must come out: the bound holds, the estimates agree."""
  above = excess(table, curve, others)
  experiment.golden(
    f"no mean lies more than {ERRORS:g} errors above the optimal curve",
    max(float(x.max()) for x in above.values()) < ERRORS,
    True,
    source="Gibbs' variational principle: no policy has more reward at its KL",
  )
  first = max(float(np.abs(runs["kl"][:, 0]).max()) for runs in table.values())
  experiment.golden(
    "largest |KL to the start| before the first step, nats per response",
    first,
    0.0,
    atol=1e-2,
    source="sampler and scorer agree to rounding",
  )
  # One number a seed: the noise of a seed's evaluations is shared by all algorithms.
  apart = measures.mean(
    np.mean([runs["kl"] - runs["kl_k3"] for runs in table.values()], axis=(0, 2))
  )
  experiment.golden(
    f"k1 and k3 are of one KL, to {ERRORS:g} errors: mean difference, nats per response",
    apart.value,
    0.0,
    atol=ERRORS * apart.error,
    source="both are unbiased: Schulman 2020",
  )


def hypotheses(
  experiment: Experiment, table: dict[str, Any], rows: dict[str, Any], curve: Curve
) -> None:
  """What papers say of these algorithms."""
  powers = [row["gain ~ KL to the power"].value for row in rows.values()]
  experiment.hypothesis(
    "power of the KL that the reward grows with, by algorithm",
    "Reward grows linearly with the square root of the KL: powers of 0.35 to 0.65.",
    powers,
    all(0.35 < x < 0.65 for x in powers),
    source=BAI,
    explanation=f"The optimum has the power {curve.power():.2f} from 10 to 90 % of its gain. A run "
    "falls short of it most at first, while a reward that is rare at the start says little and the "
    "nats go into noise.",
  )
  base = next(iter(table))
  for name in ("dr_grpo", "rloo"):
    if name in table and base == "grpo":
      kl = measures.matched_kl(table)
      _better(
        experiment,
        f"{name} over grpo: reward at {kl:.1f} nats",
        f"Without the division by the group's std, {name} earns more at the same KL.",
        measures.reward_at(table[name], kl) - measures.reward_at(table[base], kl),
        OUTSET,
      )
  for name, source in (("cispo", CISPO), ("gspo", GSPO)):
    if name in table and base == "grpo":
      _better(
        experiment,
        f"{name} over grpo: held-out reward, mean over the run",
        f"With as many steps {name} learns faster than GRPO.",
        (table[name]["reward"] - table[base]["reward"])[:, 1:].mean(axis=1),
        source,
        f"It stops {100 * rows[name]['clipped'].value:.0f} % of the tokens and goes "
        f"{rows[name]['KL at end'].value:.0f} nats where GRPO goes "
        f"{rows[base]['KL at end'].value:.0f}.",
      )
  if "gspo" in table and base == "grpo":
    shares = [rows[name]["clipped"].value for name in ("gspo", "grpo")]
    experiment.hypothesis(
      "shares of the tokens that gspo and grpo clip",
      "GSPO clips two orders of magnitude more (there 0.15 and 0.0013).",
      shares,
      shares[0] > 30 * shares[1],
      source=GSPO,
      explanation="It clips more, by a smaller factor: steps are large here, and token ratios "
      "leave GRPO's band more often than there.",
    )


def excess(table: dict[str, Any], curve: Curve, others: list[Curve]) -> dict[str, np.ndarray]:
  """[E] how far each mean over seeds lies above the curve, in standard errors.

  Args:
    table: the runs.
    curve: the optimum.
    others: the same of resampled responses, for its own error.
  """
  found = {}
  for name, runs in table.items():
    gaps = [measures.mean(x) for x in (runs["reward"] - curve.at(runs["kl"])).T]
    own = np.std([x.at(runs["kl"]).mean(axis=0) for x in others], axis=0)
    errors = np.hypot([x.error for x in gaps], own)
    found[name] = np.array([x.value for x in gaps]) / np.maximum(errors, 1e-9)
  return found


def _better(
  experiment: Experiment,
  name: str,
  statement: str,
  differences: Any,
  source: str,
  explanation: str = "The difference is the other way.",
) -> None:
  found = measures.mean(differences)
  experiment.hypothesis(
    name,
    statement,
    [found.value, found.value - found.half, found.value + found.half],
    found.value > 0 if found.resolved else None,
    source=source,
    explanation=explanation if found.resolved else "The interval holds 0.",
  )


def claims(table: dict[str, Any], rows: dict[str, Any], pairs: dict[str, Any]) -> tuple[str, str]:
  """What the two figures show, each in a sentence."""

  def values(key: str) -> dict[str, float]:
    return {name: row[key].value for name, row in rows.items()}

  reward, over = values("reward at end"), values("KL over the least for its reward")
  differ = sum(row["reward at matched KL"].resolved for row in pairs.values())
  first = (
    f"Rewards of {min(reward.values()):.2f} to {max(reward.values()):.2f} cost "
    f"{min(over.values()):.1f} to {max(over.values()):.1f} times the least KL that buys them; at "
    f"{measures.matched_kl(table):.1f} nats {differ} of {len(pairs)} pairs of algorithms differ"
  )
  speed, spent = values("steps to half of the most"), values("KL at end")
  speed = {name: steps for name, steps in speed.items() if np.isfinite(steps)}
  if not speed:
    return first, "No algorithm is at half of the reward with every seed"
  fast, slow = min(speed, key=speed.__getitem__), max(speed, key=speed.__getitem__)
  second = (
    f"{fast} is at half of the reward first (step {speed[fast]:.1f}; {spent[fast]:.0f} nats at the "
    f"end), {slow} last (step {speed[slow]:.1f}; {spent[slow]:.0f} nats)"
  )
  return first, second
