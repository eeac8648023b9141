r"""What each reduction of the loss does to these responses, by their length and correctness.

The update is sum_i A_i w_i S_i, with A_i the reward less its group's mean, S_i the sum of the token
scores of response i and w_i its weight per token. Two things are measured.

*Push per token*, |A_i| w_i, with the weights that the reduction gives on each update batch.

*Drift*: how the update moves the mean length of wrong (and of correct) responses. A step of size
eta along the natural gradient multiplies the probability of response i of its prompt by
exp(eta A_i w_i), up to normalisation, as far as the policy can express it; so

  d E[n | wrong] / d eta = Cov(n, A w | wrong),    d E[r] / d eta = Cov(r, A w),

and their ratio is a number of tokens per unit of reward gained. With covariances within groups:

  drift_wrong(w) = mean over wrong responses of Cov_g(n, A w | wrong)
                   / mean over groups of Cov_g(r, A w)
  shift(w) = drift(w) - drift(sum),

as the sum over tokens is the policy gradient. With a reward of 0 or 1, A is the same for all wrong
responses of a group, so the drift of the sum is 0; 1/n gives Cov(n, A / n) > 0, as A < 0: wrong
answers are lengthened, and correct ones shortened. Here w is the expected weight of a response of
its length among others of mean length: the total of a token mean contains the response itself.

Reference: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.1; the exact version, on an
enumerated language: `experiments.length_bias`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import jaxrl_lm as rl
from experiments.audit_rollouts import intervals
from experiments.audit_rollouts.collection import Responses

SUM = "sequence sum"
REDUCTIONS = {
  SUM: rl.sequence_sum,  # constant_length is it, but for a constant
  "token mean": rl.token_mean,
  "group token mean": rl.group_token_mean,
  "sequence mean": rl.sequence_mean,
}
_CHECKED = 16, 64, 2048  # groups, responses of each and tokens on which the weights are checked


def group_advantages(responses: Responses) -> tuple[np.ndarray, np.ndarray]:
  """[N] centred rewards, and [P] whether a group has any signal."""
  reward = responses.reward
  advantages, signal = np.zeros(len(reward)), np.zeros(responses.group.max() + 1, bool)
  for groups, index, where in _padded(responses.group):
    centred, signal[groups] = _of_groups(reward[index], where)
    advantages[index[where]] = np.asarray(centred)[where]
  return advantages, signal


@jax.jit
def _of_groups(rewards: Any, where: Any) -> Any:
  return rl.group_centered(rewards, where=where), rl.has_signal(rewards, where=where)


def weights(responses: Responses) -> dict[str, np.ndarray]:
  """[N] weight per token under each reduction, on the update batch: a step, or the whole log."""
  length, group, batch = responses.length, responses.group, update_batch(responses)
  counted = length > 0
  batch_of = np.zeros(group.max() + 1, np.int64)
  batch_of[group] = batch
  tokens = np.bincount(group, length)
  sequences = np.bincount(batch, counted)[batch]
  groups = np.bincount(batch_of, tokens > 0)[batch]
  divisors = {
    SUM: sequences,
    "token mean": np.bincount(batch, length)[batch],
    "group token mean": groups * tokens[group],
    "sequence mean": sequences * length,
  }
  return {k: counted / np.where(counted, divisor, 1) for k, divisor in divisors.items()}


def expected_weights(responses: Responses) -> dict[str, np.ndarray]:
  """[N] the same of a response of its length among others of mean length."""
  length, group, batch = responses.length, responses.group, update_batch(responses)
  found = weights(responses)
  counted = length > 0
  for name, index in (("token mean", batch), ("group token mean", group)):
    number = np.bincount(index, counted)[index]
    mean = np.bincount(index, length)[index] / np.maximum(number, 1)
    total = np.bincount(index, length)[index]
    typical = length + (number - 1) * mean
    found[name] = found[name] * np.where(counted, total / np.where(counted, typical, 1), 0.0)
  return found


def update_batch(responses: Responses) -> np.ndarray:
  """[N] index of the update batch: the step, or 0 for all."""
  if responses.step is None:
    return np.zeros(len(responses.reward), np.int64)
  return np.unique(responses.step, return_inverse=True)[1]


def push(
  responses: Responses, advantages: np.ndarray, signal: np.ndarray, wrong: np.ndarray, bins: int
) -> dict[str, Any]:
  """Push per token by length, over the mean of all tokens, in the groups with signal.

  Per reduction `wrong` and `correct` [bins]; `longest`: the part of the push on wrong responses
  that the longest of them get (one in `bins`), which have `longest_tokens` of the tokens.
  """
  kept = signal[responses.group] & (responses.length > 0)
  table: dict[str, Any] = {"groups": int(signal.sum())}
  if not kept.any():
    return table
  tokens, wrong = responses.length[kept], wrong[kept]
  edges = np.quantile(tokens, np.linspace(0.0, 1.0, bins + 1))
  place = np.clip(np.searchsorted(edges, tokens, side="right") - 1, 0, bins - 1)
  table |= {"edges": edges, "longest_tokens": _longest(tokens, tokens, wrong, bins)}
  for name, weight in weights(responses).items():
    size = np.abs(advantages[kept]) * weight[kept] * tokens
    rows: dict[str, Any] = {"longest": _longest(size, tokens, wrong, bins)}
    for side, where in (("wrong", wrong), ("correct", ~wrong)):
      total, number = (np.bincount(place[where], x[where], bins) for x in (size, tokens))
      with np.errstate(invalid="ignore"):
        rows[side] = (total / number) / (size.sum() / tokens.sum())
    table[name] = rows
  return table


def shifts(
  responses: Responses, advantages: np.ndarray, wrong: np.ndarray, confidence: float
) -> dict[str, Any]:
  """Drift, and shift against the sum with its interval, of wrong and of correct lengths.

  {side: {reduction: {"drift", "shift" [3]}, "length": mean}}; tokens per unit of reward.
  """
  group, length = responses.group, responses.length.astype(float)
  size = np.bincount(group)
  several = (size > 1)[group]
  weight = expected_weights(responses)
  gain = {
    name: np.bincount(group, several * advantages**2 * w / np.maximum(size - 1, 1)[group])
    for name, w in weight.items()
  }
  table: dict[str, Any] = {}
  for side, members in (("wrong", wrong), ("correct", ~wrong)):
    number = np.bincount(group, members)
    paired = number > 1
    inside = members & paired[group]
    centred = length - (np.bincount(group, length * members) / np.maximum(number, 1))[group]
    scale = (number / np.maximum(number - 1, 1))[group] * inside
    rows: dict[str, Any] = {"length": float(length[members].mean()) if members.any() else np.nan}
    parts = {"number": number * paired, "groups": (size > 1).astype(float)}
    for name, w in weight.items():
      parts |= {
        "move": np.bincount(group, scale * centred * advantages * w),
        "gain": gain[name],
        "sum_move": np.bincount(group, scale * centred * advantages * weight[SUM]),
        "sum_gain": gain[SUM],
      }
      rows[name] = {
        "drift": float(intervals.of_totals(_drift, parts, confidence)[0]),
        "shift": np.zeros(3) if name == SUM else intervals.of_totals(_shift, parts, confidence),
      }
    table[side] = rows
  return table


def disagreement(responses: Responses) -> float:
  """Largest difference of the weights from the library's own, relative to the largest.

  On a batch of the first responses of the first groups, as masks, their lengths cut to a width.
  """
  groups, size, width = _CHECKED
  order = np.argsort(responses.group, kind="stable")
  group, number = responses.group[order], np.bincount(responses.group)
  slot = np.arange(len(order)) - (np.cumsum(number) - number)[group]
  kept = (group < groups) & (slot < size)
  group, slot = group[kept], slot[kept]
  length = np.minimum(responses.length[order][kept], width)
  lengths = np.zeros((group.max() + 1, slot.max() + 1), np.int64)
  lengths[group, slot] = length
  library = _of_masks(np.arange(max(length.max(), 1)) < lengths[..., None])
  worst = 0.0
  for name, own in weights(Responses(group, length, length, None, None)).items():
    theirs = np.asarray(library[name])[group, slot]
    worst = max(worst, float(np.max(np.abs(own - theirs)) / max(np.max(theirs), 1e-300)))
  return worst


@jax.jit
def _of_masks(mask: Any) -> dict[str, Any]:
  """[P, G] weight of the first token; all tokens of a response have the same."""
  return {name: reduction(mask)[..., 0] for name, reduction in REDUCTIONS.items()}


def _drift(total: dict[str, Any]) -> Any:
  return (total["move"] / total["number"]) / (total["gain"] / total["groups"])


def _shift(total: dict[str, Any]) -> Any:
  sum_only = total | {"move": total["sum_move"], "gain": total["sum_gain"]}
  return _drift(total) - _drift(sum_only)


def _longest(x: np.ndarray, tokens: np.ndarray, where: np.ndarray, bins: int) -> float:
  """The part of x that the longest responses in `where` have, one in `bins`."""
  total = x[where].sum()
  if not total:
    return float("nan")
  last = np.argsort(tokens[where], kind="stable")[-max(int(where.sum()) // bins, 1) :]
  return float(x[where][last].sum() / total)


def _padded(group: np.ndarray) -> Any:
  """Groups of similar size as arrays: (groups, [P, G] rows, [P, G] which are there)."""
  order, size = np.argsort(group, kind="stable"), np.bincount(group)
  start = np.cumsum(size) - size
  width = 1 << np.ceil(np.log2(np.maximum(size, 2))).astype(np.int64)
  for columns in np.unique(width):
    groups = np.flatnonzero(width == columns)
    where = np.arange(columns) < size[groups, None]
    index = np.where(where, start[groups, None] + np.arange(columns), 0)
    yield groups, order[index], where
