r"""Divergences of two language-model heads from hidden states, never holding [N, V] logits.

A divergence is a sum over the vocabulary of terms f(log S[v], log T[v]), and so is its gradient:

  D_t = sum_v f(log S[v], log T[v]),   dD/dz[v] = f'[v] - S[v] sum_u f'[u],  f' = df / d log S

`linear_divergence` takes f as an argument: `reverse_kl_terms`, `forward_kl_terms`,
`skewed_forward_kl_terms`, `skewed_reverse_kl_terms`, `jensen_shannon_terms`, or one of your own.
Four matrix products forward (normalisers, then terms) and four backward. Student and teacher (or
policy and reference) may differ in hidden size, not in vocabulary. `linear_top_k_kl` and
`linear_top_k_with_tail` keep K tokens and one bucket for all others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import categorical, checks, kept_tokens, masks, vocabulary_statistics
from jaxrl_lm.vocabulary_buckets import local_buckets, local_top_k
from jaxrl_lm.vocabulary_divergence import Terms, local_divergence
from jaxrl_lm.vocabulary_sharding import VocabularySharding, on_shards, vocabulary_size
from jaxrl_lm.vocabulary_statistics import TILE_BUDGET
from jaxrl_lm.vocabulary_tiles import Head, Tokens


def linear_divergence(
  terms: Terms,
  hidden: jax.Array,
  unembedding: jax.Array,
  teacher_hidden: jax.Array,
  teacher_unembedding: jax.Array,
  *,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
  bias: jax.Array | None = None,
  teacher_bias: jax.Array | None = None,
  softcap: Any = None,
  teacher_softcap: Any = None,
  valid_vocab: Any = None,
  sharding: VocabularySharding | None = None,
  memory_budget: int = TILE_BUDGET,
) -> jax.Array:
  r"""Divergence of two next-token distributions at each index, from hidden states.

  D_t = sum_v f(log S_t[v], log T_t[v])

  `exact_kl`, `forward_kl`, `jensen_shannon` and the skewed ones, in a tile of memory.

  Args:
    terms: f, elementwise: (log-probs of the student, of the teacher) -> terms, 0 where both are
      -inf. Its gradient in the first argument (0 there too) is that of the loss; what else it
      depends on, such as a traced beta, is a constant.
    hidden: [..., T, D] of the student. Differentiated.
    unembedding: [V, D] of the student. Differentiated.
    teacher_hidden: [..., T, D']. Constant.
    teacher_unembedding: [V, D']. Constant.
    mask: [..., T] bool, True = counts; elsewhere the divergence is 0. None = all count.
    temperature: divides both logits, > 0. Constant.
    bias, teacher_bias: [V]; the student's is differentiated. None = 0.
    softcap, teacher_softcap: bounds of the logits before the temperature. None = no bound.
    valid_vocab: number of ids that exist. None = V.
    sharding: as in `linear_token_logprobs`, of both heads alike.
    memory_budget: bytes of temporary memory for tiles.

  Returns:
    [..., T] nats, float32 at least.

  Raises:
    ValueError: shapes do not match, a constant is out of range, or terms are not elementwise.
    TypeError: a dtype is wrong.

  Example:
    >>> import jaxrl_lm as rl
    >>> student = (jnp.zeros((1, 2)), jnp.eye(3, 2))
    >>> teacher = (jnp.ones((1, 1)), jnp.array([[1.0], [0.0], [0.0]]))
    >>> linear_divergence(rl.forward_kl_terms, *student, *teacher).round(4)
    Array([0.1233], dtype=float32)

  Reference: the divergences name their own in `distillation`.
  """
  head = vocabulary_statistics.check_head(unembedding, bias, softcap, valid_vocab, temperature)
  batch = vocabulary_statistics.check_tokens(hidden, None, mask, head)
  teacher = vocabulary_statistics.check_head(
    teacher_unembedding,
    teacher_bias,
    teacher_softcap,
    valid_vocab,
    temperature,
    "teacher_",
  )
  other = vocabulary_statistics.check_tokens(teacher_hidden, None, None, teacher, "teacher_")
  _check_pair(head, batch, teacher, other, "teacher_")
  teacher, other = jax.lax.stop_gradient((teacher, other))
  local = partial(local_divergence, terms=terms, memory_budget=memory_budget)
  return on_shards(local, (head, teacher), (batch, other.hidden), sharding)[1]


def linear_top_k_kl(
  hidden: jax.Array,
  unembedding: jax.Array,
  ref_hidden: jax.Array,
  ref_unembedding: jax.Array,
  *,
  k: int,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
  bias: jax.Array | None = None,
  ref_bias: jax.Array | None = None,
  softcap: Any = None,
  ref_softcap: Any = None,
  valid_vocab: Any = None,
  sharding: VocabularySharding | None = None,
  memory_budget: int = TILE_BUDGET,
) -> jax.Array:
  r"""`top_k_kl` from hidden states: KL(pi || ref) over the policy's top k and a rest.

  Unlike `top_k_kl` it takes a sharded vocabulary.

  Args:
    hidden, unembedding: of the policy. Differentiated, for fixed ids.
    ref_hidden, ref_unembedding: of the reference. Constant.
    k: number of tokens kept, 1 <= k < the number of ids.
    mask: [..., T] bool, True = counts; elsewhere the KL is 0. None = all count.
    temperature: divides both logits, > 0. Constant.
    bias, ref_bias, softcap, ref_softcap, valid_vocab: as in `linear_divergence`.
    sharding, memory_budget: as in `linear_divergence`.

  Returns:
    [..., T] KL in nats.

  Raises:
    ValueError: shapes do not match, or a constant is out of range.
    TypeError: a dtype is wrong.

  Example:
    >>> policy = (jnp.ones((1, 1)), jnp.arange(3.0)[:, None])
    >>> ref = (jnp.ones((1, 1)), jnp.zeros((3, 1)))
    >>> linear_top_k_kl(*policy, *ref, k=1).round(4)
    Array([0.2291], dtype=float32)

  Reference: `top_k_kl`.
  """
  head = vocabulary_statistics.check_head(unembedding, bias, softcap, valid_vocab, temperature)
  batch = vocabulary_statistics.check_tokens(hidden, None, mask, head)
  ref = vocabulary_statistics.check_head(
    ref_unembedding, ref_bias, ref_softcap, valid_vocab, temperature, "ref_"
  )
  other = vocabulary_statistics.check_tokens(ref_hidden, None, None, ref, "ref_")
  _check_pair(head, batch, ref, other, "ref_")
  traced = valid_vocab is None or isinstance(valid_vocab, jax.core.Tracer)
  size = vocabulary_size(head, sharding) if traced else valid_vocab
  checks.check_range("k", k, low=1, high=size, open_high=True)
  top = partial(local_top_k, k=k, memory_budget=memory_budget)
  ids = on_shards(top, head, batch, sharding)[1]
  ref, other = jax.lax.stop_gradient((ref, other))
  local = partial(local_buckets, memory_budget=memory_budget)
  policy = on_shards(local, head, (batch, ids), sharding)[1]
  other = Tokens(other.hidden, other.ids, batch.mask)
  reference = on_shards(local, ref, (other, ids), sharding)[1]
  return masks.zero_masked(categorical.divergence(policy, reference), batch.mask)


def linear_top_k_with_tail(
  hidden: jax.Array,
  unembedding: jax.Array,
  teacher_logprobs: jax.Array,
  teacher_ids: jax.Array,
  *,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
  bias: jax.Array | None = None,
  softcap: Any = None,
  valid_vocab: Any = None,
  sharding: VocabularySharding | None = None,
  memory_budget: int = TILE_BUDGET,
) -> kept_tokens.Buckets:
  r"""`top_k_with_tail` from hidden states: K tokens and one bucket for all others.

  Args:
    hidden, unembedding: of the student. Differentiated.
    teacher_logprobs: [..., T, K] nats, -inf = an empty slot. Constant.
    teacher_ids: [..., T, K] int, different from each other; an id that does not exist or is given
      twice makes its token NaN.
    mask: [..., T] bool, True = counts; elsewhere everything is 0. None = all count.
    temperature: divides the student's logits, > 0. Constant.
    bias, softcap, valid_vocab, sharding, memory_budget: as in `linear_token_logprobs`.

  Returns:
    Buckets: log-probs of both, [..., T, K + 1].

  Raises:
    ValueError: shapes do not match, or a constant is out of range.
    TypeError: a dtype is wrong.

  Example:
    >>> teacher = jnp.log(jnp.array([[0.5, 0.25]]))
    >>> head = (jnp.ones((1, 1)), jnp.zeros((4, 1)))
    >>> jnp.exp(linear_top_k_with_tail(*head, teacher, jnp.array([[3, 1]])).logprobs).round(4)
    Array([[0.25, 0.25, 0.5 ]], dtype=float32)

  Reference: `top_k_with_tail`.
  """
  head = vocabulary_statistics.check_head(unembedding, bias, softcap, valid_vocab, temperature)
  batch = vocabulary_statistics.check_tokens(hidden, None, mask, head)
  vocabulary = vocabulary_size(head, sharding)
  teacher, ids, taken = kept_tokens.check_kept(
    teacher_logprobs, teacher_ids, batch.mask, vocabulary, **{"hidden[..., 0]": batch.ids}
  )
  used = jnp.where(taken, ids, -1)
  local = partial(local_buckets, memory_budget=memory_budget)
  student = on_shards(local, head, (batch, used), sharding)[1]
  end = vocabulary if head.end is None else head.end
  known = jnp.all(~taken | ((ids >= 0) & (ids < end)), axis=-1) & _all_different(used)
  return kept_tokens.with_rest(student, teacher, taken, known, batch.mask, end)


def _check_pair(head: Head, batch: Tokens, other: Head, others: Tokens, prefix: str) -> None:
  """Two heads have the same vocabulary, and their states the same places."""
  mine, theirs = head.unembedding.shape, other.unembedding.shape
  if mine[0] != theirs[0]:
    raise ValueError(
      f"{prefix}unembedding must have as many rows as unembedding: {prefix}unembedding is "
      f"{theirs}, unembedding is {mine}"
    )
  if batch.ids.shape != others.ids.shape:
    raise ValueError(
      f"{prefix}hidden and hidden must have the same axes but the last: {prefix}hidden is "
      f"{others.hidden.shape}, hidden is {batch.hidden.shape}"
    )


def _all_different(ids: jax.Array) -> jax.Array:
  """No id but -1 is given twice, [...]."""
  ordered = jnp.sort(ids, axis=-1)
  same = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)
  return ~jnp.any(same, axis=-1)
