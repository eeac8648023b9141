"""Groups of samples, up to what an estimator can tell apart.

A group estimator weighs each sample's score by something that depends on the other samples only
through a statistic of each (for the usual reductions: its reward and its length). Responses of
equal statistic are a class, and N^G groups collapse into multisets of classes, which can be
listed. The library's own functions are evaluated on each of them; nothing is sampled and no
formula of an estimator is written twice.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm.exact.language import Language, readable
from jaxrl_lm.objectives import Objective

_CHUNK = 2**14  # groups evaluated at once,
_TOKENS = 2**22  # and most tokens of them
_DIGITS = 11  # to which two advantages or coefficients count as equal, relative to the largest


class Classes(NamedTuple):
  """Which responses look alike to the estimator.

  Attributes:
    ids: [P, N] class of each response to each prompt, below K.
    members: K arrays [size, 2] of (prompt, response).
  """

  ids: np.ndarray
  members: list[np.ndarray]


class Kinds(NamedTuple):
  """What can happen to a sample: its class, its advantage, its loss weights up to a factor.

  There is one entry for each class that a group holds, in the order of the groups.

  Attributes:
    group: [E] the group of each entry, ascending.
    copies: [E] how many samples of the group are of the class.
    kind: [E] index into the kinds, of what happens to such a sample.
    scale: [E] the factor on its loss weights.
    log_orderings: [M] log of G! / prod copies!, how many orderings a group has.
    class_of: [J] class of each kind.
    advantages: [J, T].
    weights: [J, T], largest entry 1.
  """

  group: np.ndarray
  copies: np.ndarray
  kind: np.ndarray
  scale: np.ndarray
  log_orderings: np.ndarray
  class_of: np.ndarray
  advantages: np.ndarray
  weights: np.ndarray


def classify(language: Language, rewards: Any, statistic: Any = None) -> Classes:
  """Sorts the responses to all prompts into classes of equal statistic.

  Args:
    language: the language.
    rewards: [P, N].
    statistic: [P, N] or [P, N, S] numbers; None = the reward and the length.

  Returns:
    The classes.

  Raises:
    ValueError: the statistic has another shape, or is not finite.
  """
  rewards = np.asarray(rewards, np.float64)
  if statistic is None:
    lengths = np.broadcast_to(np.asarray(language.lengths, np.float64), rewards.shape)
    statistic = np.stack([rewards, lengths], axis=-1)
  statistic = np.asarray(statistic, np.float64)
  statistic = statistic[..., None] if statistic.ndim == 2 else statistic
  if statistic.shape[:-1] != rewards.shape:
    raise ValueError(
      f"statistic must be [prompts, responses, ...] = {rewards.shape}, got {statistic.shape}"
    )
  if not np.isfinite(statistic).all():
    raise ValueError("statistic must be finite (rewards and lengths, unless another is given)")
  flat = statistic.reshape(-1, statistic.shape[-1])
  ids = np.unique(flat, axis=0, return_inverse=True)[1].reshape(rewards.shape)
  members = [np.argwhere(ids == k) for k in range(ids.max() + 1)]
  return Classes(ids, members)


def enumerate_groups(num_classes: int, group_size: int, *, limit: int) -> np.ndarray:
  """All multisets of `group_size` classes.

  Args:
    num_classes: K.
    group_size: samples per group G.
    limit: most multisets to list.

  Returns:
    [M, G] class of each sample, ascending; M = (K + G - 1 choose G).

  Raises:
    ValueError: there are more than `limit`, or group_size < 1.
  """
  if group_size < 1:
    raise ValueError(f"group_size must be at least 1, got {group_size}")
  number = math.comb(num_classes + group_size - 1, group_size)
  if number > limit:
    raise ValueError(
      f"group_size {group_size} over {num_classes} classes of responses makes {readable(number)} "
      f"groups, more than the limit of {limit:,}: give a coarser `statistic`, or sample with "
      "`sampled_bias_variance`"
    )
  listed = itertools.combinations_with_replacement(range(num_classes), group_size)
  flat = itertools.chain.from_iterable(listed)
  return np.fromiter(flat, np.int32, number * group_size).reshape(number, group_size)


def group_probs(kinds: Kinds, class_probs: np.ndarray) -> np.ndarray:
  """Multinomial probability of each group.

  Args:
    kinds: of the groups.
    class_probs: [K].

  Returns:
    [M].
  """
  possible = class_probs > 0
  log_probs = np.log(np.where(possible, class_probs, 1.0))
  of_entry = kinds.class_of[kinds.kind]
  number = len(kinds.log_orderings)
  total = np.bincount(kinds.group, kinds.copies * log_probs[of_entry], number)
  never = np.bincount(kinds.group, ~possible[of_entry], number) > 0
  return np.where(never, 0.0, np.exp(kinds.log_orderings + total))


def kinds_of_groups(
  objective: Objective,
  language: Language,
  rewards: Any,
  classes: Classes,
  groups: np.ndarray,
  advantages: Callable[..., Any] | None,
) -> Kinds:
  """Advantages and loss weights of every group, from the library's own functions.

  Three times: with the longest member of each class, with the last one, samples in reverse
  order, and with random members in random order. What comes out for the tokens that both have
  must not depend on it.

  Args:
    objective: its `advantages` (unless given) and `loss_weights` are called on one group.
    language: the language.
    rewards: [P, N].
    classes: of the responses.
    groups: [M, G] from `enumerate_groups`.
    advantages: (rewards [1, G], mask [1, G, T]) -> [1, G] or [1, G, T]; None = that of the
      objective, of the rewards.

  Returns:
    The kinds.

  Raises:
    ValueError: members of one class get different advantages or weights: the statistic does not
      determine the estimator.
    TypeError: the objective's advantages need more than the rewards.
  """
  rng = np.random.default_rng(0)
  rewards, mask = np.asarray(rewards, np.float64), np.asarray(language.mask)
  size = min(_CHUNK, max(1, _TOKENS // (groups.shape[1] * language.horizon)))
  size = min(size, 2 ** (len(groups) - 1).bit_length())
  entries = []
  for start in range(0, len(groups), size):
    part = groups[start : start + size]
    # The last chunk is filled up, so that there is one compilation.
    filled = np.pad(part, ((0, size - len(part)), (0, 0)), mode="edge")
    found = []
    for chosen, order in _representatives(classes, mask, filled, rng):
      prompt, row = chosen[..., 0][:, order], chosen[..., 1][:, order]
      done = _library(objective, advantages, rewards[prompt, row], mask[row])
      back = np.argsort(order)
      found.append([np.asarray(x)[:, back] for x in (*done, mask[row])])
    _check_sufficient("advantages", filled, *[(a, m) for a, _, m in found])
    _check_sufficient("loss weights", filled, *[(w, m) for _, w, m in found])
    entries.append(_entries(start, part, *found[0][:2]))
  return _collect(len(groups), *(np.concatenate(x) for x in zip(*entries, strict=True)))


def _representatives(
  classes: Classes, mask: np.ndarray, groups: np.ndarray, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Three times [M, G, 2] (prompt, response) of a member of each sample's class, and an order."""
  sizes = np.array([len(m) for m in classes.members])
  start = np.cumsum(sizes) - sizes
  longest = np.array([mask[m[:, 1]].sum(axis=1).argmax() for m in classes.members])
  offsets = [longest[groups], sizes[groups] - 1, rng.integers(0, sizes[groups])]
  forward = np.arange(groups.shape[1])
  orders = [forward, forward[::-1], rng.permutation(groups.shape[1])]
  chosen = [np.concatenate(classes.members)[start[groups] + x] for x in offsets]
  return list(zip(chosen, orders, strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _library(
  objective: Objective, advantages: Callable[..., Any] | None, rewards: Any, mask: Any
) -> tuple[jax.Array, jax.Array]:
  def one_group(rewards: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch = rewards[None], mask[None]
    given = group_advantages(objective, advantages, *batch)
    return given[0], objective.loss_weights(batch[1])[0]

  return jax.vmap(one_group)(rewards, mask)


def group_advantages(
  objective: Objective, advantages: Callable[..., Any] | None, rewards: jax.Array, mask: jax.Array
) -> jax.Array:
  """Advantages of whole groups, at every token.

  Args:
    objective: its `advantages` are called on the rewards, unless others are given.
    advantages: (rewards, mask) -> [P, G] or [P, G, T]; None = that of the objective.
    rewards: [P, G].
    mask: [P, G, T].

  Returns:
    [P, G, T].

  Raises:
    TypeError: the objective's advantages need more than the rewards.
    ValueError: the advantages have another shape.
  """
  if advantages is not None:
    given = jnp.asarray(advantages(rewards, mask))
  else:
    try:
      inspect.signature(objective.advantages).bind(rewards)
    except TypeError as error:
      raise TypeError(
        f"the objective's advantages need more than the rewards ({error}): pass `advantages=`, a "
        "function of (rewards, mask)"
      ) from None
    given = jnp.asarray(objective.advantages(rewards))
  if given.shape not in (rewards.shape, mask.shape):
    raise ValueError(
      f"advantages of rewards {rewards.shape} and mask {mask.shape} must have the shape of one of "
      f"them, got {given.shape}"
    )
  return jnp.broadcast_to(given[..., None] if given.ndim == 2 else given, mask.shape)


def _check_sufficient(name: str, groups: np.ndarray, *draws: tuple[np.ndarray, np.ndarray]) -> None:
  """All draws (values, mask) agree, and so do members of equal class of one group."""
  first, counted = draws[0]
  if not np.isfinite(first[counted]).all():
    raise ValueError(f"{name} of a group are not finite")
  tolerance = 10.0 ** (1 - _DIGITS) * np.abs(first[counted]).max(initial=0.0)
  for other, mask in draws[1:]:
    wrong = np.argwhere(mask & counted & ~(np.abs(other - first) <= tolerance))
    if len(wrong):
      group, sample, _ = wrong[0]
      raise ValueError(
        f"the statistic does not determine the {name}: two groups of classes "
        f"{groups[group].tolist()} give sample {sample} {first[group, sample].tolist()} and "
        f"{other[group, sample].tolist()}. Give a finer `statistic`, or sample with "
        "`sampled_bias_variance`"
      )
  same = (groups[:, 1:] == groups[:, :-1])[..., None]
  if np.any(same & (np.abs(first[:, 1:] - first[:, :-1]) > tolerance)):
    raise ValueError(f"{name} differ between samples of one group that have the same statistic")


def _entries(
  start: int, groups: np.ndarray, advantages: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, ...]:
  """Group, class, copies, advantages and weights of each class that each group holds."""
  is_first = np.pad(groups[:, 1:] != groups[:, :-1], ((0, 0), (1, 0)), constant_values=True)
  group, sample = np.nonzero(is_first)
  place = group * groups.shape[1] + sample
  copies = np.diff(place, append=groups.size)
  return (
    start + group,
    groups[is_first],
    copies,
    advantages[group, sample],
    weights[group, sample],
  )


def _collect(
  number: int,
  group: np.ndarray,
  class_of_entry: np.ndarray,
  copies: np.ndarray,
  advantages: np.ndarray,
  weights: np.ndarray,
) -> Kinds:
  """The entries, and the distinct pairs of advantages and weights among those of a class."""
  kind, scale = np.zeros(len(group), np.int64), np.abs(weights).max(axis=1)
  unit = weights / np.where(scale > 0, scale, 1.0)[:, None]
  largest = max(np.abs(advantages).max(initial=0.0), np.finfo(np.float64).tiny)
  rounded = np.round(np.concatenate([advantages / largest, unit], axis=1), _DIGITS) + 0.0  # no -0
  order = np.argsort(class_of_entry, kind="stable")
  known: list[np.ndarray] = []
  kinds = 0
  for inside in np.split(order, np.flatnonzero(np.diff(class_of_entry[order])) + 1):
    first, index = _distinct_rows(rounded[inside])
    kind[inside] = kinds + index
    known.append(inside[first])
    kinds += len(first)
  first = np.concatenate(known)
  log_factorial = np.array([math.lgamma(n + 1) for n in range(int(copies[group == 0].sum()) + 1)])
  log_orderings = log_factorial[-1] - np.bincount(group, log_factorial[copies], number)
  return Kinds(
    group, copies, kind, scale, log_orderings, class_of_entry[first], advantages[first], unit[first]
  )


def _distinct_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Of the distinct rows, one place each; and of each row, which of them it is."""
  # A column like its neighbour (an advantage of the whole response) says nothing new.
  x = x[:, np.r_[True, (x[:, 1:] != x[:, :-1]).any(axis=0)]]
  order = np.lexsort(x.T)
  starts = np.r_[True, (x[order[1:]] != x[order[:-1]]).any(axis=1)]
  index = np.empty(len(x), np.int64)
  index[order] = np.cumsum(starts) - 1
  return order[starts], index
