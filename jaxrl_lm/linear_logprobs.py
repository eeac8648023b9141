r"""Hidden states + unembedding -> log-probs and entropy, never holding the [N, V] logits.

  logprobs = token_logprobs(hidden @ unembedding.T, tokens, mask=mask)         # [N, V] in memory
  logprobs = linear_token_logprobs(hidden, unembedding, tokens, mask=mask)     # a tile of it

The same numbers to rounding, value and gradient. Logits are computed tile by tile, and again in
the backward pass: four matrix products instead of three, in temporary memory that does not grow
with the vocabulary. Where the coefficient of each log-prob is known beforehand,
`linear_policy_loss` needs three; divergences of two heads are in `linear_distillation`.

Bytes of temporary memory, forward and backward, of N tokens, in float32 (4 bytes):

  logits in memory       4 (2 to 3) N V
  two sweeps             memory_budget, and 4 N D if hidden is not float32
  one sweep              memory_budget + tiles, and 4 V D if the unembedding is not float32

An on-policy ratio is exactly 1 only through one code path: log-probs with and without tiles
differ by up to 6e-6. Take old log-probs from the function that scores the current ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from jaxrl_lm.vocabulary_sharding import VocabularySharding, on_shards
from jaxrl_lm.vocabulary_statistics import (
  TILE_BUDGET,
  TokenStats,
  check_head,
  check_tokens,
  statistics,
)
from jaxrl_lm.vocabulary_sweeps import Wanted


def linear_token_logprobs(
  hidden: jax.Array,
  unembedding: jax.Array,
  tokens: jax.Array,
  *,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
  bias: jax.Array | None = None,
  softcap: Any = None,
  valid_vocab: Any = None,
  sharding: VocabularySharding | None = None,
  memory_budget: int = TILE_BUDGET,
) -> jax.Array:
  r"""Log-prob of each token, from hidden states and the unembedding matrix.

  log pi(y_t | s_t) = z_t[y_t] - log sum_v exp(z_t[v]),
  z_t = cap(unembedding h_t + bias) / temperature,  cap(x) = softcap tanh(x / softcap)

  `token_logprobs` of these logits, in a tile of memory and one more matrix product.

  Args:
    hidden: [..., T, D], aligned: index t holds the state *before* token t. Differentiated.
    unembedding: [V, D]. Differentiated.
    tokens: [..., T] int ids; at a counted position an id outside the vocabulary gives NaN.
    mask: [..., T] bool, True = counts; elsewhere the log-prob is 0. None = all count.
    temperature: the sampler's temperature, > 0. Constant.
    bias: [V], -inf excludes a token. Differentiated. None = 0.
    softcap: bound of the logits before the temperature, > 0. Constant. None = no bound.
    valid_vocab: number of ids that exist, <= V: rows from there on are padding, whatever stands
      in them. None = V.
    sharding: where the arrays lie on a mesh. None = on one device, or as the types on an Explicit
      mesh say.
    memory_budget: bytes of temporary memory for tiles.

  Returns:
    [..., T] log-probs in nats, <= 0, float32 at least.

  Raises:
    ValueError: shapes do not match; temperature or softcap <= 0; valid_vocab outside [1, V].
    TypeError: a dtype is wrong.

  Example:
    >>> import jax.numpy as jnp
    >>> hidden, unembedding = jnp.array([[2.0, 1.0]]), jnp.eye(3, 2)
    >>> linear_token_logprobs(hidden, unembedding, jnp.array([0])).round(4)
    Array([-0.4076], dtype=float32)

  Reference: the running normaliser: Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3; over
    blocks of the vocabulary: Wijmans et al. 2024, arXiv:2411.09009, section 4.
  """
  head = check_head(unembedding, bias, softcap, valid_vocab, temperature)
  batch = check_tokens(hidden, tokens, mask, head)
  local = partial(statistics, wanted=Wanted(), memory_budget=memory_budget)
  return on_shards(local, head, batch, sharding)[1].logprobs


def linear_token_stats(
  hidden: jax.Array,
  unembedding: jax.Array,
  tokens: jax.Array,
  *,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
  bias: jax.Array | None = None,
  softcap: Any = None,
  valid_vocab: Any = None,
  sharding: VocabularySharding | None = None,
  memory_budget: int = TILE_BUDGET,
) -> TokenStats:
  r"""Log-prob, normaliser, entropy, sum of squares and largest log-prob, in the same sweep.

  Every field is differentiated; the largest log-prob moves with the first of equal tokens.

  Args:
    hidden, unembedding, tokens, mask: as in `linear_token_logprobs`.
    temperature, bias, softcap, valid_vocab: as in `linear_token_logprobs`.
    sharding, memory_budget: as in `linear_token_logprobs`.

  Returns:
    TokenStats, [..., T] each.

  Raises:
    ValueError: as `linear_token_logprobs`.
    TypeError: as `linear_token_logprobs`.

  Example:
    >>> import jax.numpy as jnp
    >>> stats = linear_token_stats(jnp.ones((1, 1)), jnp.zeros((4, 1)), jnp.array([3]))
    >>> stats.sum_squares, stats.entropy.round(4)
    (Array([0.25], dtype=float32), Array([1.3863], dtype=float32))

  Reference: sum of squares as a weight: Zhou et al. 2024 (WPO), arXiv:2406.11827, section 3.
  """
  head = check_head(unembedding, bias, softcap, valid_vocab, temperature)
  batch = check_tokens(hidden, tokens, mask, head)
  local = partial(statistics, wanted=Wanted(True, True, True), memory_budget=memory_budget)
  return on_shards(local, head, batch, sharding)[1]
