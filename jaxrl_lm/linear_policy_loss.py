r"""Value and gradient of an objective from hidden states in one sweep over the logits.

The gradient of an objective is that of a weighted sum of log-probs (and entropies):

  grad L(log pi) = grad sum_t c_t log pi(y_t),  c_t = dL / d log pi(y_t), a constant

Where the coefficients are known before the sweep, three matrix products do: logits, and the
gradients of hidden states and unembedding, from the same tile. They are known on-policy, where the
ratio is 1, and whenever a forward pass of the same parameters has been made (the old log-probs
of the first update). In later updates `objective_loss` of `linear_token_logprobs` takes four.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, vocabulary_statistics
from jaxrl_lm.objectives import Objective, ObjectiveAux, objective_loss
from jaxrl_lm.vocabulary_sharding import VocabularySharding, on_shards
from jaxrl_lm.vocabulary_statistics import TILE_BUDGET, TokenStats
from jaxrl_lm.vocabulary_sweeps import Slopes, Sums, Wanted, local_sums, sums_and_gradients
from jaxrl_lm.vocabulary_tiles import Blocks, Head, Tokens, logits_dtype

BLOCK_BUDGET = 2**30  # bytes; 1024 tokens of a vocabulary of 262,144


def linear_weighted_logprobs(
  hidden: jax.Array,
  unembedding: jax.Array,
  tokens: jax.Array,
  coefficients: jax.Array,
  *,
  entropy_coefficients: jax.Array | None = None,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
  bias: jax.Array | None = None,
  softcap: Any = None,
  valid_vocab: Any = None,
  sharding: VocabularySharding | None = None,
  memory_budget: int = BLOCK_BUDGET,
) -> tuple[jax.Array, TokenStats]:
  r"""Weighted sum of log-probs (and entropies), with its gradient in the same sweep.

  total = sum_t c_t log pi(y_t | s_t) + e_t H_t

  Whatever is linear in log-probs with known coefficients: cross-entropy (c = -weights), REINFORCE
  (c = weights * advantages), and every loss at a point where its derivative is known. Three
  matrix products for value and gradient; without a gradient one. Over a sharded vocabulary, where
  one sweep would need a collective for every block of tokens, it is two sweeps and four products.

  Args:
    hidden, unembedding, tokens, mask: as in `linear_token_logprobs`.
    coefficients: [..., T] c. Constant.
    entropy_coefficients: [..., T] e. Constant. None = no entropy.
    temperature, bias, softcap, valid_vocab, sharding: as in `linear_token_logprobs`.
    memory_budget: bytes for the logits of one block of tokens (one row of them at least).

  Returns:
    The total (inside `shard_map`, of the device's tokens), and TokenStats, [..., T] each, as
    constants: log-probs and normaliser, and the entropy where it has coefficients.

  Raises:
    ValueError: as `linear_token_logprobs`, or coefficients are not [..., T].
    TypeError: as `linear_token_logprobs`.

  Example:
    >>> hidden, unembedding, tokens = jnp.ones((2, 1)), jnp.zeros((4, 1)), jnp.array([3, 1])
    >>> total, stats = linear_weighted_logprobs(hidden, unembedding, tokens, -jnp.ones(2))
    >>> total.round(4), stats.logprobs.round(4)
    (Array(2.7726, dtype=float32), Array([-1.3863, -1.3863], dtype=float32))

  Reference: gradients in the forward pass: Hsu et al. 2024 (Liger), arXiv:2410.10989, section 3.2.
  """
  head = vocabulary_statistics.check_head(unembedding, bias, softcap, valid_vocab, temperature)
  batch = vocabulary_statistics.check_tokens(hidden, tokens, mask, head)
  weights = _Weights(
    _coefficients("coefficients", coefficients, batch),
    None
    if entropy_coefficients is None
    else _coefficients("entropy_coefficients", entropy_coefficients, batch),
  )
  local = partial(_local, memory_budget=memory_budget)
  total, stats = on_shards(local, head, (batch, weights), sharding)
  return total, stats


def linear_policy_loss(
  objective: Objective,
  hidden: jax.Array,
  unembedding: jax.Array,
  tokens: jax.Array,
  logprobs: jax.Array,
  old_logprobs: jax.Array | None,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  loss_weights: jax.Array,
  entropy_coef: Any = None,
  temperature: Any = 1.0,
  bias: jax.Array | None = None,
  softcap: Any = None,
  valid_vocab: Any = None,
  sharding: VocabularySharding | None = None,
  memory_budget: int = BLOCK_BUDGET,
  **terms: Any,
) -> tuple[jax.Array, ObjectiveAux]:
  r"""`objective_loss` and its gradient in one sweep, for log-probs that are known beforehand.

  c_t = d objective_loss / d log pi(y_t) at `logprobs`;  gradient: that of sum_t c_t log pi(y_t)

  Exact where `logprobs` are those of the policy that is scored: on the first update of a batch,
  whose old log-probs a forward pass has computed. On-policy (`old_logprobs=None`) the ratio
  is 1 whatever they are, and the sampler's log-probs do, unless a KL term makes the coefficient
  depend on them. The value is always that of the log-probs of the sweep.

  Args:
    objective: a row of the table, or one of your own. Static under jit.
    hidden, unembedding, tokens: as in `linear_token_logprobs`. Differentiated.
    logprobs: [..., T] of the tokens under this policy, nats, where the coefficients are taken.
      Constant.
    old_logprobs: [..., T] or None, as in `objective_loss`. Constant.
    advantages: [..., T] or [..., 1]. Constant.
    mask: [..., T] bool, True = counts.
    loss_weights: [..., T] from `objective.loss_weights` on the whole batch. Constant.
    entropy_coef: weight of the entropy bonus. None = no bonus, and no entropy computed.
    temperature, bias, softcap, valid_vocab, sharding: as in `linear_token_logprobs`.
    memory_budget: as in `linear_weighted_logprobs`.
    **terms: other arguments of `objective_loss`: importance_weights, ref_logprobs, kl, kl_coef,
      segment_ids, selected.

  Returns:
    loss, a scalar to be minimised, and `ObjectiveAux`.

  Raises:
    ValueError: as `linear_token_logprobs` and `objective_loss`.
    TypeError: as `linear_token_logprobs` and `objective_loss`.

  Example:
    >>> import jaxrl_lm as rl
    >>> hidden, unembedding, tokens = jnp.ones((1, 2, 1)), jnp.zeros((4, 1)), jnp.array([[3, 1]])
    >>> mask, advantages = jnp.ones((1, 2), bool), jnp.array([[1.0]])
    >>> loss, aux = linear_policy_loss(
    ...   rl.GRPO,
    ...   hidden,
    ...   unembedding,
    ...   tokens,
    ...   jnp.full((1, 2), -1.4),
    ...   None,
    ...   advantages,
    ...   mask,
    ...   loss_weights=rl.GRPO.loss_weights(mask),
    ... )
    >>> loss
    Array(-1., dtype=float32)

  Reference: each row of the table names its own.
  """
  logprobs = checks.as_constant("logprobs", logprobs)

  def loss_of(logprobs: jax.Array, entropy: jax.Array | None) -> tuple[jax.Array, ObjectiveAux]:
    bonus = {} if entropy is None else {"entropy": entropy, "entropy_coef": entropy_coef}
    return objective_loss(
      objective,
      logprobs,
      old_logprobs,
      advantages,
      mask,
      loss_weights=loss_weights,
      **bonus,
      **terms,
    )

  entropy = None if entropy_coef is None else jnp.zeros_like(logprobs)
  coefficients = jax.grad(lambda x: loss_of(*x)[0])((logprobs, entropy))
  total, stats = linear_weighted_logprobs(
    hidden,
    unembedding,
    tokens,
    coefficients[0],
    entropy_coefficients=coefficients[1],
    mask=mask,
    temperature=temperature,
    bias=bias,
    softcap=softcap,
    valid_vocab=valid_vocab,
    sharding=sharding,
    memory_budget=memory_budget,
  )
  loss, aux = loss_of(stats.logprobs, stats.entropy)
  return _with_gradient_of(loss, total), aux


@jax.custom_jvp
def _with_gradient_of(value: jax.Array, source: jax.Array) -> jax.Array:
  """The value of one scalar with the gradient of another, also where that one is infinite."""
  del source
  return value


@_with_gradient_of.defjvp
def _with_gradient_of_jvp(primals: Any, tangents: Any) -> Any:
  return primals[0], tangents[1]


class _Weights(NamedTuple):
  """Coefficients of log-prob and entropy, [..., T] each."""

  logprob: jax.Array
  entropy: jax.Array | None


class _Sweep(NamedTuple):
  """What is static in the sweep."""

  blocks: Blocks
  wanted: Wanted


def _coefficients(name: str, x: Any, batch: Tokens) -> jax.Array:
  x, _ = checks.masked_constant(name, x, batch.mask)
  return x


def _local(
  head: Head, batch: tuple[Tokens, _Weights], axes: tuple[str, ...], *, memory_budget: int
) -> tuple[jax.Array, TokenStats]:
  """Total of this device's tokens, and their statistics."""
  tokens, weights = batch
  wanted = Wanted(mean=weights.entropy is not None)
  if axes:
    budget = min(vocabulary_statistics.check_budget(memory_budget), TILE_BUDGET)
    stats = vocabulary_statistics.statistics(
      head, tokens, axes, wanted=wanted, memory_budget=budget
    )[1]
    return _total(stats, weights), jax.lax.stop_gradient(stats)
  if tokens.ids.size == 0:
    nothing = jnp.zeros(tokens.ids.shape, logits_dtype(head, tokens))
    extra = nothing if wanted.mean else None
    return jnp.zeros((), nothing.dtype), TokenStats(nothing, nothing, extra, None, None)
  tokens, shape = vocabulary_statistics.flatten(tokens)
  weights = jax.tree.map(lambda x: x.reshape(-1), weights)
  sweep = _Sweep(_choose_blocks(tokens, head, memory_budget), wanted)
  total, stats = _weighted(head, tokens, weights, sweep)
  return total, jax.tree.map(lambda x: jax.lax.stop_gradient(x.reshape(shape)), stats)


def _choose_blocks(tokens: Tokens, head: Head, memory_budget: int) -> Blocks:
  """As many tokens, up to 1024, as the budget allows logits over the whole vocabulary."""
  vocabulary, itemsize = head.unembedding.shape[0], logits_dtype(head, tokens).itemsize
  budget = vocabulary_statistics.check_budget(memory_budget)
  rows = min(1024, max(budget // (vocabulary * itemsize), 1))
  rows = vocabulary_statistics.block_size(tokens.ids.shape[0], rows)
  tile = max(TILE_BUDGET // (3 * itemsize * rows), 1)
  return Blocks(rows, vocabulary_statistics.block_size(vocabulary, min(8192, tile)))


def _total(stats: TokenStats, weights: _Weights) -> jax.Array:
  """sum c log pi + e H; a coefficient of 0 wins over a log-prob of -inf."""
  total = jnp.sum(jnp.where(weights.logprob == 0, 0.0, weights.logprob * stats.logprobs))
  if weights.entropy is None or stats.entropy is None:
    return total
  return total + jnp.sum(weights.entropy * stats.entropy)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _weighted(
  head: Head, tokens: Tokens, weights: _Weights, sweep: _Sweep
) -> tuple[jax.Array, TokenStats]:
  sums = local_sums(head, tokens, sweep.blocks, sweep.wanted)
  stats = vocabulary_statistics.stats_of(head, tokens, sums, ())
  return _total(stats, weights), stats


def _weighted_forward(
  head: Head, tokens: Tokens, weights: _Weights, sweep: _Sweep
) -> tuple[tuple[jax.Array, TokenStats], Any]:
  def slopes(sums: Sums, part: Tokens, part_weights: _Weights) -> Slopes:
    nothing = jnp.zeros_like(part_weights.logprob)
    cotangents = TokenStats(part_weights.logprob, nothing, part_weights.entropy, None, None)
    return vocabulary_statistics.slopes_of(head, part, sums, cotangents, ())

  sums, grads = sums_and_gradients(head, tokens, weights, slopes, sweep.blocks, sweep.wanted)
  stats = vocabulary_statistics.stats_of(head, tokens, sums, ())
  return (_total(stats, weights), stats), (head, tokens, grads)


def _weighted_backward(sweep: _Sweep, residuals: Any, cotangents: Any) -> Any:
  head, tokens, grads = residuals
  # Each device's part first: only then are the parts of all devices added up.
  grads = jax.tree.map(lambda x: cotangents[0] * x, grads)
  return *vocabulary_statistics.input_gradients(head, tokens, grads), None


_weighted.defvjp(_weighted_forward, _weighted_backward)
