"""Coefficients of an update: the derivative of the library's loss in each token's log-prob.

One group's loss is a sum over its responses, so that a response's coefficients follow from its own
log-probs, advantage and weights: they are evaluated for every kind of sample and every response
of its class, and proportional ones are merged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_lm.exact.classes import (
  Classes,
  Kinds,
)
from jaxrl_lm.exact.language import Language
from jaxrl_lm.exact.problem import Scoring
from jaxrl_lm.objectives import Objective, objective_loss

_ROWS = 2**16  # coefficient rows evaluated at once
_DIGITS = 10  # to which two rows of coefficients count as proportional


class Patterns(NamedTuple):
  """Coefficients of a prompt's responses, up to a factor: what the kinds have in common.

  Attributes:
    of_kind: [J] pattern of each kind, 0 where the prompt has no such response.
    scale: [J] factor, 0 there.
    rows: per pattern, the responses of its class.
    coefficients: per pattern, [size, T].
  """

  of_kind: np.ndarray
  scale: np.ndarray
  rows: list[np.ndarray]
  coefficients: list[np.ndarray]


class ResponseLoss(NamedTuple):
  """What the loss of one prompt's responses is made of.

  Attributes:
    objective: the objective.
    kl, kl_coef: of the KL term, or None and 0.
    arrays: [N, T] each, of all enumerated responses: logprobs and what `Scoring` holds.
  """

  objective: Objective
  kl: Callable[..., jax.Array] | None
  kl_coef: float
  arrays: dict[str, np.ndarray]


def loss_of_prompt(
  objective: Objective, scoring: Scoring, logprobs: jax.Array, prompt: int
) -> ResponseLoss:
  """What the loss of the responses to one prompt is made of.

  Args:
    objective: the objective.
    scoring: further log-probs of all prompts.
    logprobs: [P, N, T] of the policy.
    prompt: which one.

  Returns:
    The parts, of all enumerated responses.
  """
  given = {"logprobs": logprobs, **scoring._asdict()}
  names = ("logprobs", "old_logprobs", "importance_weights", "ref_logprobs")
  arrays = {name: np.asarray(given[name])[prompt] for name in names if given[name] is not None}
  return ResponseLoss(objective, scoring.kl, scoring.kl_coef, arrays)


def patterns_of_prompt(
  loss: ResponseLoss,
  language: Language,
  members: list[np.ndarray],
  kinds: Kinds,
  *,
  on_policy: bool,
) -> Patterns:
  """The coefficients of every kind for every response of its class, proportional ones merged.

  Args:
    loss: of the prompt's responses.
    language: the language.
    members: per class, the prompt's responses that are ever drawn.
    kinds: of the groups.
    on_policy: whether members of a class may be expected to be alike.

  Returns:
    The patterns.

  Raises:
    ValueError: a coefficient is not finite, or members that should be alike are not.
  """
  mask = np.asarray(language.mask)
  # If all members get the same, three are asked, the longest first, and must agree.
  alike = on_policy and _are_alike(loss, language, members, kinds)
  asked = [np.r_[_longest(mask, m), m[[0, -1]]] if alike and len(m) else m for m in members]
  items = [(j, asked[k]) for j, k in enumerate(kinds.class_of) if len(asked[k])]
  values = _coefficients(loss, language, kinds, items)

  of_kind, scale = np.zeros(len(kinds.class_of), np.int64), np.zeros(len(kinds.class_of))
  known: dict[tuple[int, bytes], int] = {}
  rows: list[np.ndarray] = []
  coefficients: list[np.ndarray] = []
  for (j, row), block in zip(items, values, strict=True):
    k = int(kinds.class_of[j])
    largest = block.flat[np.abs(block).argmax()]
    if largest == 0:
      continue
    block = block / largest
    if alike:
      if not _same_where_counted(block, mask[row]):
        raise ValueError("responses of equal statistic have different coefficients on-policy")
      block = block[:1]
    key = (k, (np.round(block, _DIGITS) + 0.0).tobytes())
    if key not in known:
      known[key] = len(rows)
      rows.append(members[k])
      coefficients.append(np.where(mask[members[k]], block, 0.0))
    of_kind[j], scale[j] = known[key], largest
  return Patterns(of_kind, scale, rows, coefficients)


def _are_alike(
  loss: ResponseLoss, language: Language, members: list[np.ndarray], kinds: Kinds
) -> bool:
  """Whether all members of a class get the same coefficients, at the extreme advantages."""
  mask, items = np.asarray(language.mask), []
  for k, rows in enumerate(members):
    own = np.flatnonzero(kinds.class_of == k)
    if len(rows) and len(own):
      rows = np.r_[_longest(mask, rows), rows]
      extremes = (f(kinds.advantages[own].sum(axis=1)) for f in (np.argmin, np.argmax))
      items += [(int(own[i]), rows) for i in sorted(set(extremes))]
  values = _coefficients(loss, language, kinds, items)
  return all(_same_where_counted(x, mask[rows]) for x, (_, rows) in zip(values, items, strict=True))


def _longest(mask: np.ndarray, rows: np.ndarray) -> int:
  return int(rows[mask[rows].sum(axis=1).argmax()])


def _same_where_counted(block: np.ndarray, mask: np.ndarray) -> bool:
  """Whether each row equals the first one, up to rounding, at the tokens that it has."""
  wrong = np.abs(np.where(mask, block - block[:1], 0.0)).max(initial=0.0)
  return bool(wrong <= 10.0 ** (1 - _DIGITS) * np.abs(block).max(initial=0.0))


def kind_coefficients(
  objective: Objective, language: Language, classes: Classes, kinds: Kinds
) -> np.ndarray:
  """On-policy coefficients of every kind, the same for all members of its class.

  Args:
    objective: the objective.
    language: the language.
    classes, kinds: of the groups.

  Returns:
    [J, T] -d loss / d logprobs.

  Raises:
    ValueError: members of a class differ, or the log-probs matter.
  """
  mask = np.asarray(language.mask)
  # Any log-probs will do: random ones show whether they matter.
  logprobs = -np.random.default_rng(0).exponential(np.ones(mask.shape))
  loss = ResponseLoss(objective, None, 0.0, {"logprobs": logprobs})
  members = [np.unique(m[:, 1]) for m in classes.members]
  if not _are_alike(loss, language, members, kinds):
    raise ValueError(
      "responses of equal statistic have different coefficients on-policy: give a finer "
      "`statistic`, or, if the coefficients depend on log-probs, call `bias_variance`"
    )
  asked = [np.array([_longest(mask, m)]) for m in members]
  items = [(j, asked[k]) for j, k in enumerate(kinds.class_of)]
  return np.concatenate(_coefficients(loss, language, kinds, items))


def _coefficients(
  loss: ResponseLoss, language: Language, kinds: Kinds, items: list[tuple[int, np.ndarray]]
) -> list[np.ndarray]:
  """-d loss / d logprobs [size, T] for each (kind, responses)."""
  row = np.concatenate([rows for _, rows in items])
  kind = np.concatenate([np.full(len(rows), j) for j, rows in items])
  done = []
  size = min(_ROWS, 2 ** (len(row) - 1).bit_length())
  for start in range(0, len(row), size):
    part = slice(start, start + size)
    r, j = (np.pad(x[part], (0, size - len(x[part])), mode="edge") for x in (row, kind))
    given = {name: x[r] for name, x in loss.arrays.items()}
    given |= {"advantages": kinds.advantages[j], "loss_weights": kinds.weights[j]}
    mask = np.asarray(language.mask)[r]
    value = _response_gradient(loss.objective, loss.kl, loss.kl_coef, mask, given)
    done.append(np.asarray(value)[: len(row[part])])
  values = np.concatenate(done)
  if not np.isfinite(values).all():
    bad = int(row[np.argwhere(~np.isfinite(values))[0, 0]])
    raise ValueError(
      f"the update of response {bad} is not finite, and the sampler draws it: "
      f"{ {name: x[bad].tolist() for name, x in loss.arrays.items()} }"
    )
  return np.split(values, np.cumsum([len(rows) for _, rows in items])[:-1])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _response_gradient(
  objective: Objective, kl: Any, kl_coef: Any, mask: Any, given: dict[str, Any]
) -> jax.Array:
  def gain(logprobs: jax.Array) -> jax.Array:
    loss, _ = objective_loss(
      objective,
      logprobs,
      given.get("old_logprobs"),
      given["advantages"],
      mask,
      loss_weights=given["loss_weights"],
      importance_weights=given.get("importance_weights"),
      ref_logprobs=given.get("ref_logprobs"),
      kl=kl,
      **({} if kl is None else {"kl_coef": kl_coef}),
    )
    return -loss

  return jax.grad(gain)(given["logprobs"])
