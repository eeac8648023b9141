"""K tokens of a vocabulary and one bucket for all others: what two code paths share.

`distillation.top_k_with_tail` has the student's logits, `linear_top_k_with_tail` its hidden states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import checks


class Buckets(NamedTuple):
  """K + 1 outcomes instead of V: each kept token, then all others together.

  Attributes:
    logprobs: [..., T, K + 1] of the student. Differentiated.
    teacher_logprobs: [..., T, K + 1] of the teacher, -inf in empty slots. Constant.
  """

  logprobs: jax.Array
  teacher_logprobs: jax.Array


def check_kept(
  teacher_logprobs: Any, teacher_ids: Any, mask: Any, vocabulary: int, **like: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """A teacher's kept tokens, checked.

  Args:
    teacher_logprobs: [..., T, K] nats; -inf = an empty slot.
    teacher_ids: [..., T, K] int.
    mask: [..., T] bool, or None = all count.
    vocabulary: V.
    **like: exactly one name=array of shape [..., T].

  Returns:
    The log-probs as constants, the ids in 32 bits at least, and which slots are taken.

  Raises:
    ValueError: shapes do not match, or K is not in [1, V].
    TypeError: ids are not integers.
  """
  teacher = checks.as_constant("teacher_logprobs", teacher_logprobs)
  ids = checks.check_integer("teacher_ids", teacher_ids)
  ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
  checks.check_rank("teacher_logprobs", teacher, 2)
  checks.check_same_shape(teacher_logprobs=teacher, teacher_ids=ids)
  states = jax.ShapeDtypeStruct(teacher.shape[:-1], teacher.dtype)
  checks.check_same_shape(**like, **{"teacher_logprobs[..., 0]": states})
  if not 1 <= ids.shape[-1] <= vocabulary:
    raise ValueError(
      f"teacher_ids must keep 1 to V tokens: teacher_ids is {ids.shape}, V is {vocabulary}"
    )
  taken = ~jnp.isneginf(teacher)
  return teacher, ids, taken if mask is None else taken & jnp.asarray(mask)[..., None]


def with_rest(
  student: jax.Array,
  teacher: jax.Array,
  taken: jax.Array,
  known: jax.Array,
  mask: Any,
  vocabulary: Any,
) -> Buckets:
  """Both distributions over the kept tokens and the rest.

  Args:
    student: [..., T, K + 1] log-probs of the kept tokens and of the rest.
    teacher: [..., T, K] log-probs of the kept tokens.
    taken: [..., T, K] bool, slots that hold a token.
    known: [..., T] bool; elsewhere both become NaN.
    mask: [..., T] bool, or None = all count; elsewhere both become 0.
    vocabulary: number of ids; where all of them are kept there is no rest. May be traced.

  Returns:
    Buckets.
  """
  student = jnp.concatenate(
    [jnp.where(taken, student[..., :-1], -jnp.inf), student[..., -1:]], axis=-1
  )
  teacher = jnp.where(taken, teacher, -jnp.inf)
  rest = _log_of_the_rest(teacher)
  rest = jnp.where(teacher.shape[-1] >= vocabulary, -jnp.inf, rest)
  teacher = jnp.concatenate([teacher, rest], axis=-1)
  buckets = (jnp.where(known[..., None], x, jnp.nan) for x in (student, teacher))
  if mask is not None:
    buckets = (jnp.where(jnp.asarray(mask)[..., None], x, 0.0) for x in buckets)
  return Buckets(*buckets)


def _log_of_the_rest(logprobs: jax.Array) -> jax.Array:
  """log(1 - sum of exp), [..., 1]; -inf where nothing is left but rounding."""
  rest = 1.0 - jnp.sum(jnp.exp(logprobs), axis=-1, keepdims=True)
  there = rest > 8 * jnp.finfo(rest.dtype).eps
  return jnp.where(there, jnp.log(jnp.where(there, rest, 1.0)), -jnp.inf)
