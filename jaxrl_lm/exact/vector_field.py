r"""The expected update as a function of the parameters: training flows, and whether it ascends.

On-policy, F(theta) = E[g] over groups drawn from the policy at theta. It can be followed (SGD or
Adam on exact gradients), differentiated, and integrated around a loop. A gradient field has a
symmetric Jacobian; a field that has not ascends no function at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxrl_lm.exact.classes import (
  classify,
  enumerate_groups,
  kinds_of_groups,
)
from jaxrl_lm.exact.coefficients import kind_coefficients
from jaxrl_lm.exact.problem import Scoring, check_problem
from jaxrl_lm.exact.tabular import Policy
from jaxrl_lm.objectives import Objective


class _Table(NamedTuple):
  """Arrays of the enumerated groups, see `expected_update`."""

  ids: jax.Array
  group: jax.Array
  copies: jax.Array
  kind: jax.Array
  scale: jax.Array
  log_orderings: jax.Array
  class_of: jax.Array
  coefficients: jax.Array


def expected_update(
  objective: Objective,
  policy: Policy,
  rewards: Any,
  *,
  group_size: int,
  advantages: Callable[..., Any] | None = None,
  statistic: Any = None,
  max_groups: int = 2_000_000,
) -> Callable[[Any], Any]:
  r"""E[g] on-policy, as a differentiable function of the parameters.

  F(theta) = sum_y pi(y) sum_t E[kappa_t | class of y] grad log pi(y_t | s_t)

  averaged over prompts, each with a group of its own. The coefficients kappa are tabulated once:
  on-policy they depend on classes, not on the parameters.

  Args:
    objective: a row of the table, or one of your own.
    policy: gives the language and the way of scoring; its parameters are only a template.
    rewards, group_size, advantages, statistic, max_groups: as in `bias_variance`.

  Returns:
    params -> pytree like the parameters, to be added. Jit and differentiate it.

  Raises:
    ValueError: as in `bias_variance`.

  Example:
    >>> import jaxrl_lm as rl
    >>> from jaxrl_lm.exact import enumerate_language, first_token_reward, tabular_policy
    >>> language = enumerate_language(2, 1)
    >>> with jax.enable_x64(True):
    ...   policy = tabular_policy(language, np.zeros((1, 1, 2)))
    ...   rewards = first_token_reward(language, [1])
    ...   update = expected_update(rl.RLOO, policy, rewards, group_size=2)
    ...   update(policy.params).tolist()
    [[[-0.25, 0.25]]]
  """
  rewards = check_problem(policy, rewards, Scoring(), None)
  language = policy.language
  classes = classify(language, rewards, statistic)
  groups = enumerate_groups(len(classes.members), group_size, limit=max_groups)
  kinds = kinds_of_groups(objective, language, rewards, classes, groups, advantages)
  table = _Table(
    ids=jnp.asarray(classes.ids),
    group=jnp.asarray(kinds.group),
    copies=jnp.asarray(kinds.copies, jnp.float64),
    kind=jnp.asarray(kinds.kind),
    scale=jnp.asarray(kinds.scale),
    log_orderings=jnp.asarray(kinds.log_orderings),
    class_of=jnp.asarray(kinds.class_of),
    coefficients=jnp.asarray(kind_coefficients(objective, language, classes, kinds)),
  )
  number_of_classes = len(classes.members)

  def one_prompt(params: Any, table: _Table, language: Any, prompt: Any) -> Any:
    rows = jnp.arange(language.tokens.shape[0])
    mask = jnp.asarray(language.mask)
    logprobs, pull = jax.vjp(lambda x: policy.score(x, language, prompt, rows), params)
    log_probs = jnp.sum(jnp.where(mask, logprobs, 0.0), axis=-1)
    probs = jnp.exp(log_probs.astype(jnp.float64))
    ids = table.ids[prompt]
    class_probs = jax.ops.segment_sum(probs, ids, number_of_classes)
    log_class = jnp.log(jnp.maximum(class_probs, 1e-290))[table.class_of[table.kind]]
    # P(m) k_c / p_c: how often a sample of class c meets the other samples of m.
    log_groups = table.log_orderings + jax.ops.segment_sum(
      table.copies * log_class, table.group, table.log_orderings.shape[0]
    )
    meets = jnp.exp(log_groups[table.group] - log_class) * table.copies
    per_kind = jax.ops.segment_sum(meets * table.scale, table.kind, table.class_of.shape[0])
    expected = jax.ops.segment_sum(
      per_kind[:, None] * table.coefficients, table.class_of, number_of_classes
    )
    cotangent = jnp.where(mask, probs[:, None] * expected[ids], 0.0)
    return pull(cotangent.astype(logprobs.dtype))[0]

  def update(params: Any) -> Any:
    def add(total: Any, prompt: jax.Array) -> Any:
      return jax.tree.map(jnp.add, total, one_prompt(params, table, language, prompt)), None

    prompts = jnp.arange(policy.num_prompts)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), prompts)
    return jax.tree.map(lambda x: x / policy.num_prompts, total)

  return update


def jacobian(field: Callable[[Any], Any], params: Any) -> np.ndarray:
  """Jacobian of a vector field in parameter space.

  Args:
    field: params -> pytree like the parameters.
    params: where.

  Returns:
    [D, D], d field_i / d params_j, parameters flattened.
  """
  return np.asarray(_columns(field, params)).T


@functools.partial(jax.jit, static_argnums=0)
def _columns(field: Callable[[Any], Any], params: Any) -> jax.Array:
  """[D, D]: row j is the derivative along parameter j."""
  flat, unravel = ravel_pytree(params)

  def value(x: jax.Array) -> jax.Array:
    return ravel_pytree(field(unravel(x)))[0]

  along = lambda u: jax.jvp(value, (flat,), (u,))[1]  # noqa: E731
  return jax.lax.map(along, jnp.eye(flat.size, dtype=flat.dtype))


def curl(field: Callable[[Any], Any], params: Any) -> float:
  r"""Relative antisymmetric part of a field's Jacobian J: |J - J^T| / (2 |J|), Frobenius norms.

  0 where the field is the gradient of some function; 1 for a pure rotation.

  Args:
    field: params -> pytree like the parameters, such as `expected_update` returns.
    params: where.

  Returns:
    A number in [0, 1].

  Example:
    >>> round(curl(lambda x: jnp.stack([x[1], -x[0]]), jnp.ones(2)), 6)
    1.0
  """
  matrix = jacobian(field, params)
  return float(np.linalg.norm(matrix - matrix.T) / (2.0 * np.linalg.norm(matrix)))


def loop_work(
  field: Callable[[Any], Any],
  params: Any,
  first: Any,
  second: Any,
  *,
  radius: float = 1.0,
  points: int = 64,
) -> float:
  r"""Work of a field around a circle in the plane of two directions: the loop integral F . d theta.

  theta(phi) = params + radius (cos phi first + sin phi second)

  0 for a gradient field. The trapezoid rule over a period converges faster than any power.

  Args:
    field: params -> pytree like the parameters.
    params: centre of the circle.
    first, second: directions, pytrees like the parameters.
    radius: of the circle, in units of the directions.
    points: on the circle.

  Returns:
    The integral.

  Example:
    >>> x, y = jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])
    >>> round(loop_work(lambda v: jnp.stack([-v[1], v[0]]), jnp.zeros(2), x, y) / np.pi, 5)
    2.0
  """
  a, b = ravel_pytree(first)[0], ravel_pytree(second)[0]
  angles = 2.0 * np.pi * jnp.arange(points) / points
  return float(jnp.mean(_power(field, params, radius * a, radius * b, angles)) * 2.0 * np.pi)


@functools.partial(jax.jit, static_argnums=0)
def _power(
  field: Callable[[Any], Any], params: Any, a: jax.Array, b: jax.Array, angles: jax.Array
) -> jax.Array:
  """Field times speed at each angle of the circle."""
  flat, unravel = ravel_pytree(params)

  def power(angle: jax.Array) -> jax.Array:
    at = flat + jnp.cos(angle) * a + jnp.sin(angle) * b
    speed = jnp.cos(angle) * b - jnp.sin(angle) * a
    return ravel_pytree(field(unravel(at)))[0] @ speed

  return jax.lax.map(power, angles)
