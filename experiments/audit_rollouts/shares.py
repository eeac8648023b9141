"""Groups that teach nothing, and responses that were cut off."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.audit_rollouts import intervals
from experiments.audit_rollouts.collection import Responses

_TIES = 5  # at the longest length, over what a length of the upper tenth has
_TIES_OF_ANY = 2  # over what the most frequent other length has
_LEAST_TIES = 10
_SHOWN = 0.995  # quantile: the last class of a histogram holds what is longer


def silent_groups(
  responses: Responses, signal: np.ndarray, wrong: np.ndarray, confidence: float
) -> dict[str, Any]:
  """Shares of the groups of two or more: all rewards equal, all correct, all wrong."""
  size = np.bincount(responses.group)
  several = size > 1
  bad = np.bincount(responses.group, wrong)
  kinds = {"silent": ~signal, "all_correct": bad == 0, "all_wrong": bad == size}
  table: dict[str, Any] = {"groups": int(several.sum()), "single": int((~several).sum())}
  for name, which in kinds.items():
    table[name] = intervals.share(which & several, several, confidence)
  return table


def truncation(responses: Responses, wrong: np.ndarray, confidence: float) -> dict[str, Any]:
  """Share of the responses that were cut off, of the wrong ones too, and how many are wrong.

  Without a flag a limit is inferred where the longest length has at least 10 responses, 5 times
  what the other lengths of the upper tenth of the range have each, and twice what any other length
  has (answers of one or two tokens, and rounded lengths, repeat too); `flag` says which it is.
  """
  group = responses.group
  cut = responses.truncated
  flag = cut is not None
  if cut is None:
    cut = _at_the_limit(responses.length)
  table: dict[str, Any] = {"flag": flag, "limit": int(responses.length[cut].max(initial=0))}
  ones = np.ones(len(group), bool)
  for name, (part, whole) in {
    "all": (cut, ones),
    "wrong": (cut & wrong, wrong),
    "wrong_if_cut": (cut & wrong, cut),
  }.items():
    numerator, denominator = np.bincount(group, part), np.bincount(group, whole)
    table[name] = intervals.share(numerator, denominator, confidence)
  return table


def lengths(responses: Responses, wrong: np.ndarray) -> dict[str, Any]:
  """Mean lengths, and histograms of wrong and correct ones."""
  top = max(float(np.quantile(responses.length, _SHOWN)), 1.0)
  edges = np.linspace(0, top, 41)
  table: dict[str, Any] = {"edges": edges, "mean": responses.length.mean()}
  table["longest"] = int(responses.length.max())
  for side, members in (("wrong", wrong), ("correct", ~wrong)):
    found = responses.length[members]
    table[side] = {
      "count": len(found),
      "mean": found.mean() if len(found) else np.nan,
      "histogram": np.histogram(np.minimum(found, top), edges)[0],
    }
  return table


def _at_the_limit(length: np.ndarray) -> np.ndarray:
  top = int(length.max())
  at = length == top
  below = np.sum((length > 0.9 * top) & ~at)
  others = max(top - int(0.9 * top) - 1, 1)
  most = np.unique(length[~at], return_counts=True)[1].max(initial=0)
  least = max(_TIES * below / others, _TIES_OF_ANY * most)
  limited = at.sum() >= _LEAST_TIES and at.sum() > least and not at.all()
  return at if limited else np.zeros_like(at)
