"""The two rewards of the exact laboratory, on tokens: what is learned can be compared with theory.

`modular_sum_reward` and `first_token_reward` are pure functions of arrays, for jit and vmap; the
tasks wrap them. The prompt of a target is the one token of that id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import checks
from jaxrl_lm.lm.tasks import Component, Prompt, Responses, Task


def modular_sum_reward(
  tokens: jax.Array,
  mask: jax.Array,
  *,
  target: Any,
  vocabulary: int,
  end_token: int | None = None,
) -> jax.Array:
  """1 if the content tokens sum to the target modulo their number of kinds, else 0.

  An empty response gets 0. It is decided by the last content token: every prefix can still be
  right, so that credit is hard to assign.

  Args:
    tokens: [..., T] int.
    mask: [..., T] bool, True = counts.
    target: one int, or [...] for a target per response.
    vocabulary: V, number of tokens, the end token included.
    end_token: its id, which is no content, or None. There are V - 1 kinds with one, V without.

  Returns:
    [...] float32.

  Raises:
    ValueError: shapes differ, or vocabulary leaves no content.
    TypeError: tokens or target are not integers, or the mask is not boolean.

  Example:
    >>> modular_sum_reward(
    ...   jnp.array([2, 2, 3]), jnp.ones(3, bool), target=1, vocabulary=4, end_token=3
    ... )
    Array(1., dtype=float32)
  """
  kinds = vocabulary - (end_token is not None)
  checks.check_range("vocabulary", vocabulary, low=1 + (end_token is not None))
  tokens, mask, target = _checked(tokens, mask, target)
  content = mask if end_token is None else mask & (tokens != end_token)
  total = jnp.sum(jnp.where(content, tokens, 0), axis=-1) % kinds
  return ((total == target) & jnp.any(content, axis=-1)).astype(jnp.float32)


def first_token_reward(tokens: jax.Array, mask: jax.Array, *, target: Any) -> jax.Array:
  """1 if the first token is the target, else 0: all that follows is filler.

  Args:
    tokens: [..., T] int.
    mask: [..., T] bool, True = counts; a response without a token gets 0.
    target: one int, or [...] for a target per response.

  Returns:
    [...] float32.

  Raises:
    ValueError: shapes differ.
    TypeError: tokens or target are not integers, or the mask is not boolean.

  Example:
    >>> first_token_reward(jnp.array([[2, 0], [0, 2]]), jnp.ones((2, 2), bool), target=2)
    Array([1., 0.], dtype=float32)
  """
  tokens, mask, target = _checked(tokens, mask, target)
  first = mask & (jnp.cumsum(mask, axis=-1, dtype=jnp.int32) == 1)
  token = jnp.sum(jnp.where(first, tokens, 0), axis=-1)
  return ((token == target) & jnp.any(mask, axis=-1)).astype(jnp.float32)


def _checked(tokens: Any, mask: Any, target: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
  tokens = checks.check_integer("tokens", tokens)
  mask = checks.check_mask(mask, tokens=tokens)
  target = checks.check_integer("target", target)
  if target.ndim:
    checks.check_same_shape(**checks.row_shape(mask), target=target)
  return tokens, mask, target


def modular_sum(vocabulary: int, targets: Sequence[int], *, end_token: int | None = None) -> Task:
  """Respond with tokens whose sum is the target, modulo the number of their kinds.

  Args:
    vocabulary: V, number of tokens, the end token included.
    targets: each below the number of kinds; the prompt of target k is the token k.
    end_token: as of `modular_sum_reward`; the sampler's stop token.

  Returns:
    The task, without held-out prompts: nothing is said of a target that was not trained on.

  Raises:
    ValueError: there is no target, or one is out of range.
  """
  kinds = vocabulary - (end_token is not None)

  def reward(responses: Responses) -> np.ndarray:
    values = modular_sum_reward(
      jnp.asarray(responses.tokens),
      jnp.asarray(responses.mask),
      target=_targets(responses),
      vocabulary=vocabulary,
      end_token=end_token,
    )
    return np.asarray(values)

  return Task(_prompts(targets, kinds), (), (Component("modular_sum", reward),))


def first_token(vocabulary: int, targets: Sequence[int]) -> Task:
  """Respond with the target first; what follows does not matter.

  Args:
    vocabulary: V, number of tokens.
    targets: token ids; the prompt of target k is the token k.

  Returns:
    The task, without held-out prompts.

  Raises:
    ValueError: there is no target, or one is out of range.
  """

  def reward(responses: Responses) -> np.ndarray:
    tokens, mask = jnp.asarray(responses.tokens), jnp.asarray(responses.mask)
    return np.asarray(first_token_reward(tokens, mask, target=_targets(responses)))

  return Task(_prompts(targets, vocabulary), (), (Component("first_token", reward),))


def _prompts(targets: Sequence[int], below: int) -> tuple[Prompt, ...]:
  for target in targets:
    if not 0 <= target < below:
      raise ValueError(f"targets must lie in [0, {below}), got {target}")
  return tuple(Prompt(str(target), (int(target),), int(target)) for target in targets)


def _targets(responses: Responses) -> jax.Array:
  return jnp.asarray(np.array([prompt.reference for prompt in responses.prompts], np.int32))
