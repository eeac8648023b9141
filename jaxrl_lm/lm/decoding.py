"""The compiled loop of sampling: prefill, then one cached step a token.

`sampling` is its public face and checks the arguments; here everything is traced.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, logprobs
from jaxrl_lm.lm import scoring, truncation

BLOCK = 128  # ids that are drawn from together


class Samples(NamedTuple):
  """Responses, one a row.

  Attributes:
    tokens: [B, N] int32; `pad_id` after the stop token.
    mask: [B, N] bool, True at every token that was drawn, the stop token included.
    logprobs: [B, N] log-prob of each token under the distribution that it was drawn from, after
      temperature and truncation; 0 where masked. All 0 for greedy decoding, which draws nothing.
    untruncated_logprobs: [B, N] log-prob after the temperature only, which
      `scoring.response_logprobs` gives at the same temperature; 0 where masked. Their difference
      is the log of the probability that the truncation kept. For greedy decoding at temperature 1.
    finished: [B] bool, whether a stop token was drawn; a response without one is cut off.
  """

  tokens: jax.Array
  mask: jax.Array
  logprobs: jax.Array
  untruncated_logprobs: jax.Array
  finished: jax.Array


class Rule(NamedTuple):
  """How tokens are drawn, and what ends a row.

  Attributes:
    key: of the call.
    row_ids: [B] int, folded into it.
    temperature: None = greedy.
    top_k, top_p, min_p: None = off.
    stop_tokens: [S] int32, S >= 0.
    pad_id: int32.
    valid_vocab: int32 number of ids that exist; None = all.
  """

  key: jax.Array
  row_ids: jax.Array
  temperature: jax.Array | None
  top_k: jax.Array | None
  top_p: jax.Array | None
  min_p: jax.Array | None
  stop_tokens: jax.Array
  pad_id: jax.Array
  valid_vocab: jax.Array | None = None


class Progress(NamedTuple):
  """What has been drawn.

  Attributes:
    drawn: int32, tokens of each row. The cache holds all but the last of them.
    samples: the tokens, N wide.
  """

  drawn: jax.Array
  samples: Samples


@partial(jax.jit, static_argnames=("model", "max_new_tokens"))
def prefill(
  model: Any, params: Any, prompts: Any, prompt_mask: Any, rule: Rule, *, max_new_tokens: int
) -> tuple[Any, Progress]:
  """Runs the prompts and draws the first token.

  Args:
    model: static.
    params: its parameters.
    prompts: [B, P] int token ids.
    prompt_mask: [B, P] bool, False = padding.
    rule: how to draw.
    max_new_tokens: N.

  Returns:
    A cache of P + N - 1 slots (nothing reads the last token), and the progress.
  """
  rows, width = prompts.shape
  cache = model.init_cache(rows, width + max_new_tokens - 1)
  prompts = jnp.where(prompt_mask, prompts, 0)
  output = model.apply(params, prompts, segment_ids=prompt_mask.astype(jnp.int32), cache=cache)
  empty = jnp.zeros((rows, max_new_tokens), jnp.float32)
  padding = jnp.full(empty.shape, rule.pad_id, jnp.int32)
  progress = Progress(
    jnp.int32(0), Samples(padding, empty > 0, empty, empty, jnp.zeros(rows, jnp.bool_))
  )
  logits = model.logits(params, scoring.last_hidden(output.hidden, prompt_mask))
  return output.cache, _appended(progress, logits[:, 0], rule)


@partial(jax.jit, static_argnames="model", donate_argnames="cache")
def decode(
  model: Any, params: Any, cache: Any, progress: Progress, rule: Rule, until: jax.Array
) -> tuple[Any, Progress]:
  """Draws until `until` tokens are drawn or all rows are finished.

  Args:
    model: static.
    params: its parameters.
    cache: of `prefill` or the last call; its buffers are reused.
    progress: after at least one token.
    rule: how to draw.
    until: int32, in [1, N].

  Returns:
    Cache and progress after it.
  """

  def goes_on(carry: tuple[Any, Progress]) -> jax.Array:
    _, (drawn, samples) = carry
    return (drawn < until) & ~jnp.all(samples.finished)

  def step(carry: tuple[Any, Progress]) -> tuple[Any, Progress]:
    cache, progress = carry
    drawn, samples = progress
    last = jax.lax.dynamic_slice_in_dim(samples.tokens, drawn - 1, 1, axis=1)
    # The pad of a finished row is padding to the model too: nothing is added to its past.
    active = ~samples.finished[:, None]
    output = model.apply(params, last, segment_ids=active.astype(jnp.int32), cache=cache)
    return output.cache, _appended(progress, model.logits(params, output.hidden)[:, 0], rule)

  return jax.lax.while_loop(goes_on, step, (cache, progress))


def _appended(progress: Progress, logits: jax.Array, rule: Rule) -> Progress:
  """One token more, drawn from logits [B, V]; none in finished rows."""
  drawn, samples = progress
  token, logprob, untruncated = _draw(logits, rule, drawn)
  active = ~samples.finished

  def written(x: jax.Array, column: jax.Array, otherwise: Any) -> jax.Array:
    column = jnp.where(active, column, otherwise).astype(x.dtype)[:, None]
    return jax.lax.dynamic_update_slice_in_dim(x, column, drawn, axis=1)

  stops = jnp.any(token[:, None] == rule.stop_tokens[None], axis=-1)
  samples = Samples(
    tokens=written(samples.tokens, token, rule.pad_id),
    mask=written(samples.mask, active, False),
    logprobs=written(samples.logprobs, logprob, 0.0),
    untruncated_logprobs=written(samples.untruncated_logprobs, untruncated, 0.0),
    finished=samples.finished | stops,
  )
  return Progress(drawn + 1, samples)


def _draw(
  logits: jax.Array, rule: Rule, index: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """A token per row, its log-prob under what it was drawn from, and the untruncated one."""
  # Float32 before any noise: in bfloat16 the noise ties, and ties go to the smaller ids.
  logits = truncation.keep_valid(checks.as_float("logits", logits), rule.valid_vocab)
  if rule.temperature is None:
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    untruncated = logprobs.token_logprobs(logits, token)
    return token, jnp.zeros_like(untruncated), untruncated
  kept = checks.scaled_logits(logits, None, rule.temperature)
  if rule.top_k is not None:
    kept = truncation.keep_top_k(kept, rule.top_k)
  if rule.top_p is not None:
    kept = truncation.keep_top_p(kept, rule.top_p)
  if rule.min_p is not None:
    kept = truncation.keep_min_p(kept, rule.min_p)

  def drawn(row_id: jax.Array, row: jax.Array) -> jax.Array:
    return _categorical(jax.random.fold_in(jax.random.fold_in(rule.key, row_id), index), row)

  token = jax.vmap(drawn)(rule.row_ids, kept)
  untruncated = logprobs.token_logprobs(logits, token, temperature=rule.temperature)
  if rule.top_k is rule.top_p is rule.min_p is None:
    return token, untruncated, untruncated
  return token, logprobs.token_logprobs(kept, token), untruncated


def _categorical(key: jax.Array, logits: jax.Array) -> jax.Array:
  """A token drawn from softmax(logits), [V]: first its block of ids, then the token within it.

  Each by argmax of logits plus Gumbel noise; the logit of a block is the log-sum-exp of its own.
  The distribution is that of noise on every logit, with V / BLOCK + BLOCK random numbers for V.

  Resolution: the noise's uniform numbers lie on a grid of 2^-46 near 0, where the tail of the noise
  comes from (JAX's default grid of 2^-23 draws a token of 1e-7 half as often as it should). So
  frequencies are right down to 2^-46 of a block among blocks and of a token in its block, and
  below it such tokens are not drawn. The sum of a logit and its noise has 24 bits: two candidates
  tie about once in 10^6 draws, and the smaller id wins.
  """
  size = min(BLOCK, logits.shape[0])
  padding = -logits.shape[0] % size
  blocks = jnp.pad(logits, (0, padding), constant_values=-jnp.inf).reshape(-1, size)
  count = blocks.shape[0]
  noise = jax.random.gumbel(key, (count + size,), jnp.float32, mode="high")
  block = jnp.argmax(jax.nn.logsumexp(blocks, axis=1) + noise[:count])
  within = jnp.argmax(blocks[block] + noise[count:])
  return (block * size + within).astype(jnp.int32)
