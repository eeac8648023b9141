r"""Samples of a model: prefill and cached decoding in one compiled program.

  y_t ~ q(. | x, y_<t),  q = softmax(keep(z / temperature)),  keep: top-k, then top-p, then min-p

A token is drawn as argmax of logits plus Gumbel noise, both in float32 whatever the model computes
in: first its block of 128 ids, then the token within it, which is the same distribution from far
fewer random numbers. The noise of a token depends on (seed, step, row id, index in the response)
and on nothing else, so that a row draws the same noise on one device or many, in any batch, beside
any other row. It is fine enough for tokens of probability 1e-13. The tokens are then the same too,
up to the rounding of the model's own matrix products, which on some devices depends on the shape of
the batch: a token differs where two candidates tie within it.

Every length of prompts, every batch size and every `max_new_tokens` is a compilation of its own.
`pad_prompts` brings prompts to few lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import checks
from jaxrl_lm.lm import decoding, scoring
from jaxrl_lm.lm.decoding import Samples

SHORTEST_BUCKET = 16
LAST_SEED = 2**32 - 1


def sample(
  model: Any,
  params: Any,
  prompts: jax.Array,
  prompt_mask: jax.Array,
  *,
  seed: Any,
  step: Any = 0,
  row_ids: Any = None,
  max_new_tokens: int,
  temperature: Any = 1.0,
  top_k: Any = None,
  top_p: Any = 1.0,
  min_p: Any = 0.0,
  stop_tokens: Any = (),
  pad_id: Any = 0,
  valid_vocab: Any = None,
) -> Samples:
  r"""Draws one response for each row of prompts.

  The loop ends early once every row has drawn a stop token. Nothing is differentiated.

  A sample is on-policy for a loss only if the loss scores it at the same temperature and there is
  no truncation: with top-k, top-p or min-p, `logprobs` are those of the behaviour policy, and
  `untruncated_logprobs` are not.

  Args:
    model: of `policy.init` or `pretrained.load`; static under jit.
    params: its parameters.
    prompts: [B, P] int token ids. For several responses to a prompt, repeat its row.
    prompt_mask: [B, P] bool, False = padding, on either side; every row has a True.
    seed: of the noise, in [0, 2**32), as are step and row ids: beyond, without x64, the upper bits
      would be lost and two seeds be one. The same seed, step and row id draw the same noise.
    step: of training, or whatever else tells one call from the next.
    row_ids: [B] int, one of its own for each row of the whole batch; None = 0, 1, .. B - 1. What
      splits a batch over calls or processes passes each row's number in the whole.
    max_new_tokens: N, the longest response.
    temperature: >= 1e-30, or 0, which takes the likeliest token (of equal ones the one with the
      smaller id), whatever the truncation. A traced one must not be 0.
    top_k: in [1, V]; None = off.
    top_p: in [0, 1]; 1 = off, 0 keeps the likeliest token.
    min_p: in [0, 1]; 0 = off.
    stop_tokens: ids that end a response, each counted as its last token; none: every response has
      N tokens and is not finished. A sequence or a set; may be traced.
    pad_id: what stands after the stop token.
    valid_vocab: number of ids that exist, <= V, where the model's head is padded for more
      (`tokenizer.vocab_size`); the others are never drawn. None = V.

  Returns:
    Samples, N wide.

  Raises:
    ValueError: no prompt or an empty one, a token id outside of the vocabulary, a prompt that
      leaves no room for N tokens in the model's context, or a constant outside of its range.
    TypeError: prompts or an integer constant are not integers, or the mask is not boolean.

  Reference: Gumbel-max sampling: Maddison et al. 2014, arXiv:1411.0030, section 2.
  """
  prompts, prompt_mask, max_new_tokens = _checked_prompts(
    model, prompts, prompt_mask, max_new_tokens
  )
  constants = (temperature, top_k, top_p, min_p, stop_tokens, pad_id, valid_vocab)
  rule = _rule(model, len(prompts), seed, step, row_ids, *constants)
  return _sample(model, params, prompts, prompt_mask, rule, max_new_tokens=max_new_tokens)


def stream(
  model: Any,
  params: Any,
  prompts: jax.Array,
  prompt_mask: jax.Array,
  *,
  chunk: int = 1,
  seed: Any,
  step: Any = 0,
  row_ids: Any = None,
  max_new_tokens: int,
  temperature: Any = 1.0,
  top_k: Any = None,
  top_p: Any = 1.0,
  min_p: Any = 0.0,
  stop_tokens: Any = (),
  pad_id: Any = 0,
  valid_vocab: Any = None,
) -> Iterator[Samples]:
  """`sample`, a few tokens at a time: the same tokens, as they come.

  Not on Explicit meshes.

  Args:
    model, params, prompts, prompt_mask: as of `sample`.
    chunk: tokens from one result to the next, >= 1.
    seed, step, row_ids, max_new_tokens, temperature, top_k, top_p, min_p: as of `sample`.
    stop_tokens, pad_id, valid_vocab: as of `sample`.

  Returns:
    Iterator of the samples so far, N wide: after 1, 1 + chunk, 1 + 2 chunk ... tokens, until all
    rows are finished.

  Raises:
    ValueError, TypeError: as `sample`, at the call; and for rows on an Explicit mesh.
  """
  chunk = checks.check_whole("chunk", chunk, low=1, static=True)
  prompts, prompt_mask, max_new_tokens = _checked_prompts(
    model, prompts, prompt_mask, max_new_tokens
  )
  if scoring.explicit_rows(params, prompts, prompt_mask) is not None:
    raise ValueError(
      "prompts and params must not lie on an Explicit mesh: use `sample`, or an Auto mesh"
    )
  constants = (temperature, top_k, top_p, min_p, stop_tokens, pad_id, valid_vocab)
  rule = _rule(model, len(prompts), seed, step, row_ids, *constants)

  def parts() -> Iterator[Samples]:
    cache, progress = decoding.prefill(
      model, params, prompts, prompt_mask, rule, max_new_tokens=max_new_tokens
    )
    yield progress.samples
    for until in range(1 + chunk, max_new_tokens + chunk, chunk):
      if np.all(progress.samples.finished):
        return
      end = jnp.int32(min(until, max_new_tokens))
      cache, progress = decoding.decode(model, params, cache, progress, rule, end)
      yield progress.samples

  return parts()


def pad_prompts(
  prompts: Sequence[Sequence[int]], *, pad_id: int = 0, length: int | None = None
) -> tuple[jax.Array, jax.Array]:
  """Prompts of any lengths as one array, padded on the left to one of few lengths.

  The length is that of the longest prompt, rounded up to a power of two from 16 on: prompts of up
  to n tokens then compile log2(n) times. Padding costs memory and time, and changes no number:
  it takes no position and is not attended to.

  Args:
    prompts: token ids, at least one prompt and one token in each.
    pad_id: what stands at padding.
    length: to pad to instead.

  Returns:
    Tokens [B, P] int32, and their mask [B, P], False = padding.

  Raises:
    ValueError: there is no prompt, one is empty, one is longer than `length`, or an id does not
      fit int32.
    TypeError: a prompt is text (encode it first), or a number is not an integer.

  Example:
    >>> tokens, mask = pad_prompts([[1, 7], [1, 7, 8]], length=4)
    >>> tokens.tolist()
    [[0, 0, 1, 7], [0, 1, 7, 8]]
  """
  if not len(prompts):
    raise ValueError("prompts must hold at least one prompt, got none")
  if any(isinstance(prompt, str) for prompt in prompts):
    raise TypeError("prompts must hold lists of token ids, got text: encode it first")
  lengths = np.array([len(prompt) for prompt in prompts])
  if not lengths.all():
    raise ValueError(f"prompts must not be empty, and these are: {np.flatnonzero(lengths == 0)}")
  longest = int(lengths.max())
  width = max(SHORTEST_BUCKET, 1 << (longest - 1).bit_length())
  if length is not None:
    width = checks.check_whole("length", length, static=True)
  if longest > width:
    raise ValueError(f"length must be at least that of the longest prompt, {longest}, got {width}")
  mask = np.arange(width) >= width - lengths[:, None]
  pad_id = checks.check_whole("pad_id", pad_id, low=-(2**31), high=2**31 - 1, static=True)
  ids = np.concatenate([*map(np.asarray, prompts)])
  checks.check_integer("prompts", ids)
  checks.check_entries("prompts", ids, low=-(2**31), high=2**31 - 1)
  tokens = np.full(mask.shape, pad_id, np.int32)
  tokens[mask] = ids
  return jnp.asarray(tokens), jnp.asarray(mask)


@partial(jax.jit, static_argnames=("model", "max_new_tokens"))
def _sample(
  model: Any,
  params: Any,
  prompts: jax.Array,
  prompt_mask: jax.Array,
  rule: decoding.Rule,
  *,
  max_new_tokens: int,
) -> Samples:
  def run(params: Any, prompts: jax.Array, prompt_mask: jax.Array, rule: decoding.Rule) -> Samples:
    cache, progress = decoding.prefill(
      model, params, prompts, prompt_mask, rule, max_new_tokens=max_new_tokens
    )
    until = jnp.int32(max_new_tokens)
    return decoding.decode(model, params, cache, progress, rule, until)[1].samples

  rows = scoring.explicit_rows(params, prompts, prompt_mask)
  if rows is not None:
    # The cache and the noise are laid out by the compiler, on Explicit meshes too.
    run = jax.sharding.auto_axes(run, out_sharding=rows)
  return run(params, prompts, prompt_mask, rule)


def _checked_prompts(
  model: Any, prompts: Any, prompt_mask: Any, max_new_tokens: Any
) -> tuple[jax.Array, jax.Array, int]:
  """Prompts and mask, whose ids are known and whose length leaves room for N tokens; and N."""
  prompts, prompt_mask = scoring.check_prompts(prompts, prompt_mask)
  max_new_tokens = checks.check_whole("max_new_tokens", max_new_tokens, low=1, static=True)
  longest, context = prompts.shape[1], model.config.max_length
  if scoring.is_concrete(prompts) and scoring.is_concrete(prompt_mask):
    real = np.asarray(prompt_mask)
    _check_ids("prompts", np.asarray(prompts)[real], model.config.vocab_size)
    longest = real.sum(axis=-1).max()
  if longest + max_new_tokens > context:
    raise ValueError(
      f"prompts of up to {longest} tokens and max_new_tokens = {max_new_tokens} are longer than "
      f"the model's context of {context}; it leaves room for {max(context - longest, 0)} new tokens"
    )
  return prompts, prompt_mask, max_new_tokens


def _rule(
  model: Any,
  rows: int,
  seed: Any,
  step: Any,
  row_ids: Any,
  temperature: Any,
  top_k: Any,
  top_p: Any,
  min_p: Any,
  stop_tokens: Any,
  pad_id: Any,
  valid_vocab: Any = None,
) -> decoding.Rule:
  """The constants, checked where they are concrete. What is off becomes None, so it costs nothing.

  They are arrays: another number of the same kind compiles nothing new.
  """
  vocabulary = model.config.vocab_size
  if valid_vocab is not None:
    valid_vocab = checks.check_whole("valid_vocab", valid_vocab, low=1, high=vocabulary)
  seed, step = (
    checks.check_whole(name, value, low=0, high=LAST_SEED)
    for name, value in (("seed", seed), ("step", step))
  )
  row_ids = _checked_row_ids(row_ids, rows)
  if isinstance(temperature, jax.core.Tracer) or np.any(temperature != 0):
    checks.check_temperature(temperature)
  checks.check_range("top_p", top_p, low=0.0, high=1.0)
  checks.check_range("min_p", min_p, low=0.0, high=1.0)
  if top_k is not None:
    top_k = checks.check_whole("top_k", top_k, low=1, high=vocabulary)
  stop_tokens = sorted(stop_tokens) if isinstance(stop_tokens, set | frozenset) else stop_tokens
  if not jax.tree.leaves(stop_tokens):  # an empty list has the dtype of floats
    stop_tokens = np.zeros(0, np.int32)
  stop_tokens = checks.check_integer("stop_tokens", stop_tokens).reshape(-1)
  pad_id = checks.check_integer("pad_id", checks.check_whole("pad_id", pad_id))
  for name, ids in (("stop_tokens", stop_tokens), ("pad_id", pad_id)):
    if scoring.is_concrete(ids):
      _check_ids(name, np.asarray(ids), vocabulary)

  def unless(value: Any, off: float) -> jax.Array | None:
    is_off = not isinstance(value, jax.core.Tracer) and value == off
    return None if is_off else jnp.asarray(value, jnp.float32)

  drawn = unless(temperature, 0.0)
  top_k, valid_vocab = (
    None if x is None else jnp.asarray(x, jnp.int32) for x in (top_k, valid_vocab)
  )
  top_p, min_p = unless(top_p, 1.0), unless(min_p, 0.0)
  if drawn is None:
    top_k = top_p = min_p = None
  return decoding.Rule(
    jax.random.fold_in(jax.random.key(seed), step),
    row_ids,
    drawn,
    top_k,
    top_p,
    min_p,
    stop_tokens=stop_tokens.astype(jnp.int32),
    pad_id=pad_id.astype(jnp.int32),
    valid_vocab=valid_vocab,
  )


def _checked_row_ids(row_ids: Any, rows: int) -> jax.Array:
  """[B] ids that differ, in [0, 2**32)."""
  row_ids = checks.check_integer("row_ids", np.arange(rows) if row_ids is None else row_ids)
  if row_ids.shape != (rows,):
    raise ValueError(f"row_ids must be one per prompt, ({rows},), got shape {row_ids.shape}")
  if not scoring.is_concrete(row_ids):
    return row_ids
  checks.check_entries("row_ids", row_ids, low=0, high=LAST_SEED)
  if len(np.unique(row_ids)) < rows:
    raise ValueError("row_ids must differ: rows of the same id draw the same noise")
  return row_ids


def _check_ids(name: str, ids: np.ndarray, vocabulary: int) -> None:
  """Token ids lie in the vocabulary."""
  outside = np.unique(ids[(ids < 0) | (ids >= vocabulary)])
  if outside.size:
    raise ValueError(f"{name} must lie in the vocabulary [0, {vocabulary}), got {outside.tolist()}")
