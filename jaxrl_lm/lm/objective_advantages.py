r"""Calling the advantages slot of an objective with what it asks for.

The slot names a function, and those functions take different things: the reward of each sample of
a group, the length of the responses, the reward of a greedy response, or rewards and values of
every token. What a function gets is decided by the names of its parameters, which are the names of
the fields of `Given`:

  def mine(rewards, lengths, *, where):   # [P, G] each -> [P, G]
  def other(token_rewards, mask):         # [P, G, T] each -> [P, G, T]

One name has two meanings in the mathematics, and the signature tells them apart: a function with
`mask` and without `where` (`gae`, `whitened_returns`) takes the rewards of tokens as `rewards`.
Constants of the function are bound by `functools.partial`. It is called while it is traced.

A function that takes neither `where` nor `mask` cannot know of a sample that could not be scored,
and would count it: its advantages of a group with such a sample are not used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import checks


class Given(NamedTuple):
  """What an advantages slot can ask for: P prompts, G samples each, T tokens.

  Attributes:
    rewards: [P, G] reward of each sample; anything where it could not be scored.
    where: [P, G] bool, False = the sample could not be scored.
    lengths: [P, G] int, tokens of each response.
    mask: [P, G, T] bool, the tokens of the samples that could be scored.
    token_rewards: [P, G, T] the same rewards, at the last token of each response, and what is
      given per token (a KL penalty).
    component_rewards: [K, P, G] the rewards that are summed, before that and without a KL penalty
      or weights; 0 where the sample could not be scored (`where`, which is to be broadcast to
      [K, P, G], is of all K). Or None.
    greedy_rewards: [P] reward of the greedy response to each prompt, without a KL penalty: a
      baseline has no bias whatever it is. A group whose own cannot be scored is not `where`. Or
      None.
    values: [P, G, T] a critic's values of the states before the tokens, or None.
  """

  rewards: jax.Array
  where: jax.Array
  lengths: jax.Array
  mask: jax.Array
  token_rewards: jax.Array
  component_rewards: jax.Array | None = None
  greedy_rewards: jax.Array | None = None
  values: jax.Array | None = None


def needs(advantages: Callable[..., Any]) -> frozenset[str]:
  """The fields of `Given` that an advantages function asks for.

  Args:
    advantages: the slot of an objective; a partial counts without what it binds.

  Returns:
    Names of fields.

  Raises:
    TypeError: it has a parameter without a default that is no field.

  Example:
    >>> import jaxrl_lm as rl
    >>> sorted(needs(rl.GRPO.advantages)), sorted(needs(rl.PPO.advantages))
    (['rewards', 'where'], ['mask', 'token_rewards', 'values'])
  """
  return frozenset(_sources(advantages).values())


def advantages_of(advantages: Callable[..., Any], given: Given) -> jax.Array:
  """Advantages of all tokens, by the slot of an objective.

  Args:
    advantages: the slot.
    given: what there is.

  Returns:
    [P, G, T], or [P, G, 1] where the slot gives one number per sample. Constant; 0 for samples
    that could not be scored, and for all of their group if the slot takes neither `where` nor
    `mask`.

  Raises:
    TypeError: the slot has a parameter without a default that is no field of `Given`.
    ValueError: it asks for something that is None, or returns another shape.

  Example:
    >>> import jaxrl_lm as rl
    >>> ones = jnp.ones((1, 2, 3), bool)
    >>> rewards = jnp.array([[1.0, 0.0]])
    >>> given = Given(rewards, ones[..., 0], rl.lengths(ones), ones, ones * rewards[..., None])
    >>> advantages_of(rl.RLOO.advantages, given).tolist()
    [[[1.0], [-1.0]]]
  """
  sources = _sources(advantages)
  missing = sorted(field for field in sources.values() if getattr(given, field) is None)
  if missing:
    raise ValueError(f"the objective's advantages ask for {missing}, which this run does not have")
  result = advantages(**{name: getattr(given, field) for name, field in sources.items()})
  result = checks.as_constant("advantages", result)
  if result.shape == given.rewards.shape:
    result = result[..., None]
  if result.shape not in (given.mask.shape, (*given.rewards.shape, 1)):
    raise ValueError(
      f"the objective's advantages must be [P, G] {given.rewards.shape} or [P, G, T] "
      f"{given.mask.shape}, got {result.shape}"
    )
  where = given.where
  if not {"where", "mask"} & sources.keys():
    where = jnp.broadcast_to(jnp.all(where, axis=-1, keepdims=True), where.shape)
  return jnp.where(where[..., None], result, 0)


def _sources(advantages: Callable[..., Any]) -> dict[str, str]:
  """Parameter -> the field of `Given` that it gets."""
  bound = advantages.keywords if isinstance(advantages, partial) else {}
  signature = inspect.signature(advantages).parameters
  parameters = {name: x for name, x in signature.items() if name not in bound}
  names = [name for name in parameters if name in Given._fields]
  unknown = [
    name
    for name, parameter in parameters.items()
    if name not in names
    and parameter.default is parameter.empty
    and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
  ]
  if unknown:
    raise TypeError(
      f"the objective's advantages have parameters that are neither among {list(Given._fields)} "
      f"nor bound nor optional: {unknown}"
    )
  by_token = "mask" in names and "where" not in names
  return {name: "token_rewards" if by_token and name == "rewards" else name for name in names}
