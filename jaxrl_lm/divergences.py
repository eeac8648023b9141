r"""Divergences between next-token distributions as terms of a sum over the vocabulary.

  divergence = sum_v terms(log S[v], log T[v])

Elementwise functions of two log-probs, of a student S (or policy) and a teacher T (or reference):
`kl.exact_kl` and `distillation` sum them over logits in memory, `linear_divergence` tile by tile,
and there the function is an argument. An impossible token (-inf) adds 0 wherever its probability
is a factor, in value and gradient.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import categorical, checks


def reverse_kl_terms(logprobs: jax.Array, teacher_logprobs: jax.Array) -> jax.Array:
  r"""Terms of KL(S || T): S (log S - log T).

  Args:
    logprobs: [...] log S. Differentiated.
    teacher_logprobs: [...] log T. Differentiated.

  Returns:
    [...] terms; +inf where T excludes what S allows.

  Raises:
    ValueError: shapes do not match.

  Example:
    >>> reverse_kl_terms(jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))).sum()
    Array(0.14384..., dtype=float32)

  Reference: Kullback & Leibler 1951, eq. 2.4.
  """
  return categorical.kl_terms(*_checked(logprobs, teacher_logprobs))


def forward_kl_terms(logprobs: jax.Array, teacher_logprobs: jax.Array) -> jax.Array:
  r"""Terms of KL(T || S): T (log T - log S).

  Args:
    logprobs: [...] log S. Differentiated.
    teacher_logprobs: [...] log T. Differentiated.

  Returns:
    [...] terms; +inf where S excludes what T allows.

  Raises:
    ValueError: shapes do not match.

  Example:
    >>> forward_kl_terms(jnp.log(jnp.array([0.5, 0.5])), jnp.array([0.0, -jnp.inf])).sum()
    Array(0.6931472, dtype=float32)

  Reference: Hinton et al. 2015, arXiv:1503.02531, section 2.
  """
  student, teacher = _checked(logprobs, teacher_logprobs)
  return categorical.kl_terms(teacher, student)


def skewed_forward_kl_terms(
  logprobs: jax.Array, teacher_logprobs: jax.Array, *, skew: Any
) -> jax.Array:
  r"""Terms of KL(T || skew T + (1 - skew) S).

  Args:
    logprobs: [...] log S. Differentiated.
    teacher_logprobs: [...] log T. Differentiated.
    skew: share of T in the mixture, in (0, 1).

  Returns:
    [...] terms.

  Raises:
    ValueError: shapes do not match, or skew is outside (0, 1).

  Example:
    >>> skewed_forward_kl_terms(jnp.array([-jnp.inf]), jnp.array([0.0]), skew=0.1).round(4)
    Array([2.3026], dtype=float32)

  Reference: Ko et al. 2024 (DistiLLM), arXiv:2402.03898, section 3.1.
  """
  checks.check_range("skew", skew, low=0.0, high=1.0, open_low=True, open_high=True)
  student, teacher = _checked(logprobs, teacher_logprobs)
  return categorical.mixture_kl_terms(teacher, student, skew)


def skewed_reverse_kl_terms(
  logprobs: jax.Array, teacher_logprobs: jax.Array, *, skew: Any
) -> jax.Array:
  r"""Terms of KL(S || skew S + (1 - skew) T).

  Args:
    logprobs: [...] log S. Differentiated.
    teacher_logprobs: [...] log T. Differentiated.
    skew: share of S in the mixture, in (0, 1).

  Returns:
    [...] terms.

  Raises:
    ValueError: shapes do not match, or skew is outside (0, 1).

  Example:
    >>> skewed_reverse_kl_terms(jnp.array([0.0]), jnp.array([-jnp.inf]), skew=0.1).round(4)
    Array([2.3026], dtype=float32)

  Reference: Ko et al. 2024 (DistiLLM), arXiv:2402.03898, section 3.1.
  """
  checks.check_range("skew", skew, low=0.0, high=1.0, open_low=True, open_high=True)
  return categorical.mixture_kl_terms(*_checked(logprobs, teacher_logprobs), skew)


def jensen_shannon_terms(
  logprobs: jax.Array, teacher_logprobs: jax.Array, *, beta: Any = 0.5
) -> jax.Array:
  r"""Terms of the generalised Jensen-Shannon divergence; 0 at beta = 0 and 1.

  JSD = beta KL(T || M) + (1 - beta) KL(S || M),  M = beta T + (1 - beta) S

  Args:
    logprobs: [...] log S. Differentiated.
    teacher_logprobs: [...] log T. Differentiated.
    beta: share of T in the mixture, in [0, 1].

  Returns:
    [...] terms.

  Raises:
    ValueError: shapes do not match, or beta is outside [0, 1].

  Example:
    >>> one, other = jnp.array([0.0, -jnp.inf]), jnp.array([-jnp.inf, 0.0])
    >>> jensen_shannon_terms(one, other).sum()
    Array(0.6931472, dtype=float32)

  Reference: Agarwal et al. 2024 (GKD), arXiv:2306.13649, eq. 1.
  """
  checks.check_range("beta", beta, low=0.0, high=1.0)
  student, teacher = _checked(logprobs, teacher_logprobs)
  beta = jax.lax.stop_gradient(jnp.asarray(beta, student.dtype))
  inside = (beta > 0) & (beta < 1)
  beta = jnp.where(inside, beta, 0.5)
  forward = categorical.mixture_kl_terms(teacher, student, beta)
  reverse = categorical.mixture_kl_terms(student, teacher, 1.0 - beta)
  return jnp.where(inside, beta * forward + (1.0 - beta) * reverse, 0.0)


def _checked(logprobs: Any, teacher_logprobs: Any) -> tuple[jax.Array, jax.Array]:
  student = checks.as_float("logprobs", logprobs)
  teacher = checks.as_float("teacher_logprobs", teacher_logprobs)
  checks.check_same_shape(logprobs=student, teacher_logprobs=teacher)
  return student, teacher
