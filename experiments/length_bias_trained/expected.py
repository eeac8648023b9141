"""What `experiments.length_bias_trained` expects, and what came out."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.harness.run import Experiment
from experiments.length_bias_trained.paths import interval, less_constant, levels
from experiments.length_bias_trained.rows import CONSTANT, MEAN, SUM, TOKEN_MEAN

DR_GRPO, DAPO, LABORATORY = "arXiv:2503.20783", "arXiv:2503.14476", "experiments.length_bias"
SHARED = "the lengths of right and wrong answers move together, against the first update's sign"
LEAK = "what makes an answer likelier also moves how likely filler is: parameters are shared"
ROUNDING = 1e-5  # of float32 sums
LITTLE = 0.2  # of what 1/n adds


def of_beginning(experiment: Experiment, last: Any, first: Any) -> None:
  """The first update: filler after the answer, and before it."""
  for name, found in (("after", last), ("before", first)):
    experiment.golden(
      f"filler {name} the answer: cosine of the updates of sum and constant length",
      found[SUM]["cosine"],
      1.0,
      atol=ROUNDING,
      source="one is the other divided by the length",
    )
    for which, sign in (("wrong", 1), ("right", -1)):
      added = interval(found[MEAN][which] - found[CONSTANT][which])
      if name == "after":
        statement, holds = f"{'above' if sign > 0 else 'below'} 0", _sign(added, sign)
      else:
        statement, holds = (
          "its interval holds 0: it is drawn before anything is right or wrong",
          _none(added),
        )
      experiment.hypothesis(
        f"filler {name} the answer: what 1/n adds to the drift of {which} lengths",
        f"{statement} (tokens per unit of P(right), and half the 95 % interval)",
        added,
        holds,
        source=DR_GRPO if name == "after" else "the pure case, from its other end",
        explanation="the interval holds 0" if holds is None else LEAK,
      )
  own = interval(last[CONSTANT]["wrong"])
  experiment.hypothesis(
    "filler after the answer: drift of wrong lengths under a constant length",
    "its interval holds 0, as in a table: filler says nothing of the reward",
    own,
    _none(own),
    source=LABORATORY,
    explanation="parameters are shared: what makes answers right also moves the end of the filler",
  )


def of_sum(experiment: Experiment, constant: Any, again: Any) -> None:
  """A sum, which is a constant times the length, and Adam, which does not see it."""
  apart = max(np.abs(constant[x][:1] - again[x]).max() for x in ("p", "wrong", "right"))
  experiment.golden(
    "a run with a sum less that with a constant length, all evaluations",
    apart,
    0.0,
    source="Adam without eps does not see a constant, here a power of two",
  )


def of_training(experiment: Experiment, task: str, rows: dict[str, Any]) -> None:
  """At equal P(right): the mean over four values that every run has gone through."""
  rise = min((path["p"][:, -1] - path["p"][:, 0]).min() for path in rows.values())
  experiment.golden(f"{task}: P(right) rises in every run", rise > 0.0, True)
  added = {
    row: {
      which: interval(less_constant(rows, row, which).mean(axis=1)) for which in ("wrong", "right")
    }
    for row in rows
    if row != CONSTANT
  }
  low, *_, high = levels(rows)
  at = f"at equal P(right), {low:.2f} to {high:.2f}"
  for which, sign in (("wrong", 1), ("right", -1)):
    found = added[MEAN][which]
    holds = _sign(found, sign)
    experiment.hypothesis(
      f"{task}: {which} answers under 1/n less a constant length, {at}",
      f"{'longer' if sign > 0 else 'shorter'} (tokens, and half the 95 % interval over seeds)",
      found,
      holds,
      source=DR_GRPO,
      explanation="the interval holds 0" if holds is None else SHARED,
    )
  apart = less_constant(rows, MEAN, "wrong") - less_constant(rows, MEAN, "right")
  gap = interval(apart.mean(axis=1))
  experiment.hypothesis(
    f"{task}: wrong less right answers under 1/n less a constant length, {at}",
    "wrong answers grow beside right ones (tokens, and half the 95 % interval over seeds)",
    gap,
    _sign(gap, 1),
    source="the pure case: all but this difference is of shared parameters",
    explanation="the interval holds 0: both lengths move together",
  )
  if TOKEN_MEAN in added:
    name = f"{task}: wrong answers under a token mean of the batch, {at}"
    _of_token_mean(experiment, name, added)


def _of_token_mean(experiment: Experiment, name: str, added: Any) -> None:
  """A mean over the tokens of a batch, beside what 1/n adds."""
  mean, half = added[TOKEN_MEAN]["wrong"]
  bound = LITTLE * abs(added[MEAN]["wrong"][0])
  near, far = abs(mean) + half < bound, abs(mean) - half > bound
  experiment.hypothesis(
    name,
    f"as under a constant length, to {LITTLE:g} of what 1/n adds (tokens, half the interval)",
    (mean, half),
    True if near else False if far else None,
    source=DAPO,
    explanation="see docs/experiments.md" if far else "the interval is wider than that",
  )


def _sign(found: tuple[float, float], sign: int) -> bool | None:
  mean, half = found
  return None if abs(mean) < half else bool(mean * sign > 0)


def _none(found: tuple[float, float]) -> bool:
  return abs(found[0]) < found[1]
