r"""Distillation losses, per token, unreduced.

With T the teacher's and S the student's distribution of the next token:

  reverse KL(S || T)            kl.exact_kl(logits, teacher_logits)
    over the student's top k      kl.top_k_kl
  forward KL(T || S)            forward_kl
  KL(T || aT + (1-a)S)          skewed_forward_kl
  KL(S || aS + (1-a)T)          skewed_reverse_kl
  generalised Jensen-Shannon    jensen_shannon
  any of them on a teacher's    top_k_with_tail, whose two results are logits of K + 1 outcomes:
    top-k log-probs               forward_kl(*top_k_with_tail(...), mask=mask)
  reverse KL of the sampled     distillation_advantages and any surrogate; in a loss kl.kl_k2 or
    token                         with_reverse_kl_gradient
  cross-entropy of tokens       supervised.sft_loss

The teacher is a constant. A mean over tokens, and what it divides by, are `loss_weights`; a mix
of hard and soft targets is a sum of two losses. Both distributions are taken at `temperature`;
nothing is multiplied by its square (Tunix multiplies by T^2; TRL and Liger do not). Full
distributions may be sharded over the vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import categorical, checks, kept_tokens, masks
from jaxrl_lm.divergences import (
  forward_kl_terms,
  jensen_shannon_terms,
  skewed_forward_kl_terms,
  skewed_reverse_kl_terms,
)
from jaxrl_lm.kept_tokens import Buckets


def forward_kl(
  logits: jax.Array,
  teacher_logits: jax.Array,
  *,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
) -> jax.Array:
  r"""KL(teacher || student) of the next-token distributions: mass-covering distillation.

  KL_t = sum_v T[v] (log T[v] - log S[v]),  d / d logits = (S - T) / temperature

  Cross-entropy with soft labels, less the teacher's entropy. A token that the teacher excludes
  (-inf) adds 0; where the student excludes a token that the teacher allows it is +inf by
  definition (`skewed_forward_kl` is finite there).

  Args:
    logits: [..., T, V] of the student. Differentiated.
    teacher_logits: [..., T, V]. Constant.
    mask: [..., T] bool, True = counts; elsewhere the loss is 0. None = all count.
    temperature: divides both logits, > 0.

  Returns:
    [..., T] loss in nats, >= 0 up to rounding, to be minimised.

  Raises:
    ValueError: shapes differ, or temperature <= 0.

  Example:
    >>> forward_kl(jnp.zeros((1, 2)), jnp.array([[0.0, -jnp.inf]]))
    Array([0.6931472], dtype=float32)

  Reference: Hinton et al. 2015, arXiv:1503.02531, section 2; per token of a sequence: Agarwal et
    al. 2024 (GKD), arXiv:2306.13649, section 3.
  """
  student, teacher = categorical.two_logprobs(
    logits, mask, temperature, teacher_logits=teacher_logits
  )
  return masks.zero_masked(jnp.sum(forward_kl_terms(student, teacher), axis=-1), mask)


def skewed_forward_kl(
  logits: jax.Array,
  teacher_logits: jax.Array,
  *,
  skew: Any,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
) -> jax.Array:
  r"""KL(teacher || mixture of teacher and student), per token; at most -log(skew).

  KL_t = sum_v T[v] (log T[v] - log M[v]),  M = skew T + (1 - skew) S

  Finite, with its gradient, whatever either side excludes.

  Args:
    logits: [..., T, V] of the student. Differentiated.
    teacher_logits: [..., T, V]. Constant.
    skew: share of the teacher in the mixture, in (0, 1); at 0 it is `forward_kl`, at 1 it is 0.
    mask: [..., T] bool, True = counts; elsewhere the loss is 0. None = all count.
    temperature: divides both logits, > 0.

  Returns:
    [..., T] loss in nats, to be minimised.

  Raises:
    ValueError: shapes differ, temperature <= 0, or skew is outside (0, 1).

  Example:
    >>> one, other = jnp.array([[0.0, -jnp.inf]]), jnp.array([[-jnp.inf, 0.0]])
    >>> skewed_forward_kl(one, other, skew=0.1).round(4)  # -log 0.1
    Array([2.3026], dtype=float32)

  Reference: Ko et al. 2024 (DistiLLM), arXiv:2402.03898, section 3.1 (skew 0.1).
  """
  student, teacher = categorical.two_logprobs(
    logits, mask, temperature, teacher_logits=teacher_logits
  )
  terms = skewed_forward_kl_terms(student, teacher, skew=skew)
  return masks.zero_masked(jnp.sum(terms, axis=-1), mask)


def skewed_reverse_kl(
  logits: jax.Array,
  teacher_logits: jax.Array,
  *,
  skew: Any,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
) -> jax.Array:
  r"""KL(student || mixture of student and teacher), per token; at most -log(skew).

  KL_t = sum_v S[v] (log S[v] - log M[v]),  M = skew S + (1 - skew) T

  Finite, with its gradient, whatever either side excludes.

  Args:
    logits: [..., T, V] of the student. Differentiated.
    teacher_logits: [..., T, V]. Constant.
    skew: share of the student in the mixture, in (0, 1); at 0 it is `exact_kl`, at 1 it is 0.
    mask: [..., T] bool, True = counts; elsewhere the loss is 0. None = all count.
    temperature: divides both logits, > 0.

  Returns:
    [..., T] loss in nats, to be minimised.

  Raises:
    ValueError: shapes differ, temperature <= 0, or skew is outside (0, 1).

  Example:
    >>> skewed_reverse_kl(jnp.zeros((1, 2)), jnp.array([[0.0, -jnp.inf]]), skew=0.5).round(3)
    Array([0.144], dtype=float32)

  Reference: Ko et al. 2024 (DistiLLM), arXiv:2402.03898, section 3.1 (skew 0.1).
  """
  student, teacher = categorical.two_logprobs(
    logits, mask, temperature, teacher_logits=teacher_logits
  )
  terms = skewed_reverse_kl_terms(student, teacher, skew=skew)
  return masks.zero_masked(jnp.sum(terms, axis=-1), mask)


def jensen_shannon(
  logits: jax.Array,
  teacher_logits: jax.Array,
  *,
  beta: Any = 0.5,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
) -> jax.Array:
  r"""Generalised Jensen-Shannon divergence of teacher and student, per token.

  JSD_t = beta KL(T || M) + (1 - beta) KL(S || M),  M = beta T + (1 - beta) S

  The paper's definition for every beta: bounded (by log 2 at 1/2), finite with its gradient
  whatever either side excludes, and exactly 0 at beta = 0 and 1, where JSD / beta tends to the
  forward and JSD / (1 - beta) to the reverse KL. TRL's GKD and Liger compute the same inside
  (0, 1), but at the ends they switch to the divergences themselves: beta = 0 there is
  `forward_kl` here, beta = 1 is `exact_kl`.

  Args:
    logits: [..., T, V] of the student. Differentiated.
    teacher_logits: [..., T, V]. Constant.
    beta: share of the teacher in the mixture, in [0, 1].
    mask: [..., T] bool, True = counts; elsewhere the loss is 0. None = all count.
    temperature: divides both logits, > 0.

  Returns:
    [..., T] loss in nats, to be minimised.

  Raises:
    ValueError: shapes differ, temperature <= 0, or beta is outside [0, 1].

  Example:
    >>> jensen_shannon(jnp.array([[0.0, -jnp.inf]]), jnp.array([[-jnp.inf, 0.0]]))
    Array([0.6931472], dtype=float32)

  Reference: Agarwal et al. 2024 (GKD), arXiv:2306.13649, eq. 1.
  """
  student, teacher = categorical.two_logprobs(
    logits, mask, temperature, teacher_logits=teacher_logits
  )
  terms = jensen_shannon_terms(student, teacher, beta=beta)
  return masks.zero_masked(jnp.sum(terms, axis=-1), mask)


def top_k_with_tail(
  logits: jax.Array,
  teacher_logprobs: jax.Array,
  teacher_ids: jax.Array,
  *,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
) -> Buckets:
  r"""Student and teacher over K tokens and one bucket for all others, as two arrays of logits.

  outcomes: each kept token v with T[v] and S[v], then the rest with 1 - sum_k T and 1 - sum_k S

  What an inference engine returns of a teacher is enough for every divergence of this module:
  `forward_kl(*top_k_with_tail(...), mask=mask)`. Merging outcomes cannot raise a divergence, so
  it is a lower bound of the one over the vocabulary. Without the last bucket,
  `x[..., :-1]` of both, the kept tokens are normalised anew: another loss, blind to how much
  probability the student spends elsewhere. The kept ids may be anyone's: top k of the teacher
  (verl, Tunix, NeMo-RL), of the student (TRL's self-distillation), or sampled ones.

  The tokens are found by comparing ids, so that the vocabulary may be sharded: K passes over the
  logits, of which nothing is stored.

  Args:
    logits: [..., T, V] of the student. Differentiated.
    teacher_logprobs: [..., T, K] nats, of the full vocabulary (their probabilities sum to at
      most 1), at the temperature of the loss; -inf = an empty slot, whose id is ignored. Constant.
    teacher_ids: [..., T, K] int, different from each other; an id outside [0, V) or given twice
      makes its token NaN.
    mask: [..., T] bool, True = counts; elsewhere everything is 0. None = all count.
    temperature: divides the student's logits, > 0.

  Returns:
    Buckets: log-probs of both, [..., T, K + 1]. The teacher's rest is -inf where the kept
    probabilities sum to 1 up to rounding, and both rests where K = V.

  Raises:
    ValueError: shapes do not match, K is larger than V, or temperature <= 0.
    TypeError: ids are not integers.

  Example:
    >>> logits, teacher = jnp.zeros((1, 4)), jnp.log(jnp.array([[0.5, 0.25]]))
    >>> buckets = top_k_with_tail(logits, teacher, jnp.array([[3, 1]]))
    >>> jnp.exp(buckets.logprobs).round(4), jnp.exp(buckets.teacher_logprobs).round(4)
    (Array([[0.25, 0.25, 0.5 ]], dtype=float32), Array([[0.5 , 0.25, 0.25]], dtype=float32))

  Reference: the tail bucket is that of TRL's distillation losses; the bound is the
    data-processing inequality (Cover & Thomas, theorem 2.8.1).
  """
  student = jax.nn.log_softmax(checks.scaled_logits(logits, mask, temperature))
  vocabulary = student.shape[-1]
  shape = checks.token_shape(student)
  teacher, ids, taken = kept_tokens.check_kept(
    teacher_logprobs, teacher_ids, mask, vocabulary, **shape
  )

  every = jnp.arange(vocabulary, dtype=ids.dtype).reshape((1,) * (ids.ndim - 1) + (-1,))
  used = jnp.where(taken, ids, -1)
  kept = jnp.any(used[..., None, :] == every[..., None], axis=-1)
  known = jnp.sum(kept, axis=-1, dtype=jnp.int32) == jnp.sum(taken, axis=-1, dtype=jnp.int32)
  student = jnp.concatenate(
    [_at(student, used, every), categorical.rest_logprob(student, kept)], axis=-1
  )
  return kept_tokens.with_rest(student, teacher, taken, known, mask, vocabulary)


def distillation_advantages(
  logprobs: jax.Array, teacher_logprobs: jax.Array, mask: jax.Array
) -> jax.Array:
  r"""On-policy distillation as an advantage: log teacher - log student of each sampled token.

  A_t = log T(y_t) - log S(y_t),  E[A_t] = -KL(S || T) in every state

  With tokens of the student, `reinforce` or any ratio surrogate and these advantages, the
  expected gradient is that of the reverse KL per state, states held fixed (discount 0);
  `discounted_returns` of it also credits a token for the states it leads to. The value is that of
  -`kl_k1`, which is right here, in the advantage, and useless in a loss. A reward's advantage is
  added to it.

  Args:
    logprobs: [..., T] of the student that drew the tokens, nats. Constant.
    teacher_logprobs: [..., T] of the same tokens, nats; -inf gives -inf. Constant.
    mask: [..., T] bool, True = counts; elsewhere the advantage is 0.

  Returns:
    [..., T] advantages in nats.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> distillation_advantages(jnp.array([-2.0]), jnp.array([-0.5]), jnp.array([True]))
    Array([1.5], dtype=float32)

  Reference: Gu et al. 2024 (MiniLLM), arXiv:2306.08543, section 2.2 (its single-step part);
    Agarwal et al. 2024 (GKD), arXiv:2306.13649, section 3 (together with rewards).
  """
  logprobs, mask = checks.masked_constant("logprobs", logprobs, mask)
  teacher_logprobs, _ = checks.masked_constant("teacher_logprobs", teacher_logprobs, mask)
  checks.check_same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs)
  return teacher_logprobs - logprobs


def _at(x: jax.Array, ids: jax.Array, every: jax.Array) -> jax.Array:
  """x [..., T, V] at ids [..., T, K], one id after the other: never [..., T, V, K]."""

  @jax.checkpoint  # or a comparison with the vocabulary would be kept for each of the K gradients
  def one(x: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(every == ids[..., None], x, 0.0), axis=-1)

  chosen = jax.lax.scan(lambda _, ids: (None, one(x, ids)), None, jnp.moveaxis(ids, -1, 0))[1]
  return jnp.moveaxis(chosen, 0, -1)
