"""What a measurement is asked, checked: further log-probs, the target, a direction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxrl_lm.exact.backward_induction import check_distribution, expected_reward
from jaxrl_lm.exact.language import Language
from jaxrl_lm.exact.tabular import Policy


class Scoring(NamedTuple):
  """What the loss of a response is made of besides its group, per enumerated token.

  Attributes:
    old_logprobs: [P, N, T] of the policy that ratios are taken against; None = on-policy.
    importance_weights: [P, N, T] from `corrections`; None = 1.
    ref_logprobs: [P, N, T] of the reference; None without a KL term.
    kl: its estimator, such as `kl_k2`.
    kl_coef: its weight.
  """

  old_logprobs: Any = None
  importance_weights: Any = None
  ref_logprobs: Any = None
  kl: Callable[..., jax.Array] | None = None
  kl_coef: float = 0.0

  @property
  def is_on_policy(self) -> bool:
    """Whether coefficients are the same for all members of a class."""
    return self.old_logprobs is None and self.importance_weights is None and self.kl is None


def check_problem(policy: Policy, rewards: Any, scoring: Scoring, sampler: Any) -> np.ndarray:
  """What every measurement asks of its arguments.

  Args:
    policy: the policy.
    rewards: [P, N].
    scoring: further log-probs, [P, N, T] each.
    sampler: [P, N, T] log-probs, or None.

  Returns:
    The rewards, [P, N] float64.

  Raises:
    ValueError: see `bias_variance`.
  """
  if jnp.result_type(float) != jnp.float64:
    raise ValueError("exact moments need 64 bits: call inside `with jax.enable_x64(True)`")
  language, rewards = policy.language, np.asarray(rewards, np.float64)
  shape = (policy.num_prompts, language.tokens.shape[0])
  if rewards.shape != shape:
    raise ValueError(f"rewards must be [prompts, responses] = {shape}, got {rewards.shape}")
  if not np.isfinite(rewards).all():
    raise ValueError("rewards must be finite")
  if scoring.kl is None and not (scoring.ref_logprobs is None and np.all(scoring.kl_coef == 0)):
    raise ValueError("ref_logprobs or kl_coef is given but kl is None")
  check_distribution(language, policy.logprobs())
  given = scoring._asdict() | {"sampler_logprobs": sampler}
  for name in ("old_logprobs", "importance_weights", "ref_logprobs", "sampler_logprobs"):
    if given[name] is not None and np.shape(given[name]) != (*shape, language.horizon):
      raise ValueError(
        f"{name} must be [prompts, responses, horizon] = {(*shape, language.horizon)}, got "
        f"{np.shape(given[name])}"
      )
  for name in ("old_logprobs", "sampler_logprobs"):
    if given[name] is not None:
      check_distribution(language, jnp.asarray(given[name]))
  return rewards


def target_gradient(
  policy: Policy, rewards: Any, target: Callable[..., jax.Array] = expected_reward
) -> np.ndarray:
  """Exact gradient of a functional of the policy, for each prompt.

  Args:
    policy: the policy.
    rewards: [P, N].
    target: (language, logprobs [P, N, T], rewards) -> [P].

  Returns:
    [P, D], parameters flattened.
  """
  functions = target, policy.score, policy.num_prompts
  gradient = np.asarray(_jacobian_of_target(functions, policy.params, policy.language, rewards))
  if not np.isfinite(gradient).all():
    raise ValueError(
      "the target's gradient is not finite: is its KL infinite, or a log-prob NaN where the "
      "policy emits the token?"
    )
  return gradient


@functools.partial(jax.jit, static_argnums=0)
def _jacobian_of_target(
  functions: tuple[Any, Any, int], params: Any, language: Language, rewards: Any
) -> jax.Array:
  """[P, D]."""
  target, score, num_prompts = functions
  flat, unravel = ravel_pytree(params)

  def value(flat: jax.Array) -> jax.Array:
    policy = Policy(language, score, unravel(flat), num_prompts)
    return target(language, policy.logprobs(), jnp.asarray(rewards))

  return jax.jacrev(value)(flat)


def unit_direction(policy: Policy, direction: Any) -> Any:
  """A direction in parameter space, of length 1.

  Args:
    policy: the policy.
    direction: pytree like its parameters, or None.

  Returns:
    The same, scaled, in the parameters' precision; or None.

  Raises:
    ValueError: it is 0, or another pytree.
  """
  if direction is None:
    return None
  flat, unravel = ravel_pytree(
    jax.tree.map(lambda p, d: jnp.asarray(d, p.dtype) + 0 * p, policy.params, direction)
  )
  size = float(jnp.linalg.norm(flat))
  if not 0.0 < size < np.inf:
    raise ValueError(f"direction must be finite and not 0, its length is {size}")
  return unravel(flat / size)
