"""What a model says of responses, by one forward pass over prompt and response.

  response_logprobs       log pi(y_t | x, y_<t)
  response_scores         the same and the entropy of pi(. | x, y_<t), from logits in memory
  linear_response_scores  the same as that, and logits only in tiles
  response_values         V(x, y_<t) of a critic

All are at index t for token t. Scorers of one signature: which one an update uses is a slot of its
configuration, and old log-probs are taken from the same one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import checks, linear_logprobs, logprobs, masks
from jaxrl_lm.vocabulary_sharding import VocabularySharding
from jaxrl_lm.vocabulary_statistics import TILE_BUDGET


class TokenScores(NamedTuple):
  """What a scorer says of every token of a response; 0 elsewhere.

  Attributes:
    logprobs: [B, N] log-prob of the token, nats, float32 at least.
    entropy: [B, N] of the distribution that the token was drawn from, nats; None from a scorer
      that does not compute it.
  """

  logprobs: jax.Array
  entropy: jax.Array | None


def response_logprobs(
  model: Any,
  params: Any,
  prompts: jax.Array,
  prompt_mask: jax.Array,
  tokens: jax.Array,
  mask: jax.Array,
  *,
  temperature: Any = 1.0,
) -> jax.Array:
  r"""Log-prob of each response token given its prompt and the tokens before it.

  log pi(y_t | x, y_<t) at index t, the alignment of everything else in the library. Of a sample
  at the same parameters and temperature it is `Samples.untruncated_logprobs`, to rounding.

  Prompts may be padded on either side: the first token of a response is predicted by the last
  real token of its prompt, wherever that stands. Logits are made for the response only.

  Args:
    model: of `policy.init` or `pretrained.load`; static under jit.
    params: its parameters. Differentiated.
    prompts: [B, P] int token ids.
    prompt_mask: [B, P] bool, False = padding; every row has a True.
    tokens: [B, N] int token ids of the responses.
    mask: [B, N] bool, True at the tokens of a response, which begins at index 0 without a gap; the
      log-prob is 0 elsewhere, and what stands there is not read.
    temperature: the sampler's temperature, > 0.

  Returns:
    [B, N] log-probs in nats, float32 at least.

  Raises:
    ValueError: shapes do not match, or temperature <= 0.
    TypeError: tokens are not integers, or a mask is not boolean.
  """
  hidden = _hidden_before(model, params, prompts, prompt_mask, tokens, mask)
  logits = model.logits(params, hidden)
  return logprobs.token_logprobs(logits, tokens, mask=mask, temperature=temperature)


def response_scores(
  model: Any,
  params: Any,
  prompts: jax.Array,
  prompt_mask: jax.Array,
  tokens: jax.Array,
  mask: jax.Array,
  *,
  temperature: Any = 1.0,
) -> TokenScores:
  r"""Log-prob and entropy of each response token, from logits in memory.

  log pi(y_t | s_t) and H(pi(. | s_t)), s_t = (x, y_<t); both at the temperature.

  Args:
    model, params, prompts, prompt_mask, tokens, mask, temperature: as of `response_logprobs`.
      Both results are differentiated in the parameters.

  Returns:
    TokenScores.

  Raises:
    ValueError, TypeError: as `response_logprobs`.
  """
  hidden = _hidden_before(model, params, prompts, prompt_mask, tokens, mask)
  logits = model.logits(params, hidden)
  return TokenScores(
    logprobs.token_logprobs(logits, tokens, mask=mask, temperature=temperature),
    logprobs.token_entropy(logits, mask=mask, temperature=temperature),
  )


def linear_response_scores(
  model: Any,
  params: Any,
  prompts: jax.Array,
  prompt_mask: jax.Array,
  tokens: jax.Array,
  mask: jax.Array,
  *,
  temperature: Any = 1.0,
  sharding: VocabularySharding | None = None,
  memory_budget: int = TILE_BUDGET,
) -> TokenScores:
  r"""`response_scores` without the logits: a tile of them at a time, by `linear_token_stats`.

  The same numbers to rounding, value and gradient, in memory that does not grow with the
  vocabulary. (Where the model's `head_dtype` is below float32, its logits are rounded to it and
  those of the tiles are not.)

  Args:
    model, params, prompts, prompt_mask, tokens, mask, temperature: as of `response_logprobs`.
    sharding: as of `linear_token_logprobs`; on a mesh bind it with `functools.partial`.
    memory_budget: as of `linear_token_logprobs`.

  Returns:
    TokenScores.

  Raises:
    ValueError, TypeError: as `response_logprobs`.
  """
  stats = linear_logprobs.linear_token_stats(
    _hidden_before(model, params, prompts, prompt_mask, tokens, mask),
    model.unembedding(params),
    tokens,
    mask=mask,
    temperature=temperature,
    sharding=sharding,
    memory_budget=memory_budget,
  )
  return TokenScores(stats.logprobs, stats.entropy)


def response_values(
  model: Any,
  params: Any,
  prompts: jax.Array,
  prompt_mask: jax.Array,
  tokens: jax.Array,
  mask: jax.Array,
) -> jax.Array:
  r"""A critic's value of the state before each response token.

  V(x, y_<t) at index t: the scalar head at the last token of the prompt for t = 0, at token t - 1
  after that. What `gae` and the value losses take.

  Args:
    model: with a scalar head; static under jit.
    params: its parameters. Differentiated.
    prompts, prompt_mask, tokens, mask: as of `response_logprobs`.

  Returns:
    [B, N] values, float32 at least, 0 where the mask is False.

  Raises:
    ValueError: shapes do not match, or the model has no scalar head.
    TypeError: tokens are not integers, or a mask is not boolean.
  """
  output, prompt_mask, mask = _forward(model, params, prompts, prompt_mask, tokens, mask)
  if output.values is None:
    raise ValueError("the critic has no scalar head: PolicyConfig(..., scalar_head=True) has one")
  values = _before(checks.as_float("values", output.values)[..., None], prompt_mask)[..., 0]
  return masks.zero_masked(values, mask)


def _hidden_before(
  model: Any, params: Any, prompts: Any, prompt_mask: Any, tokens: Any, mask: Any
) -> jax.Array:
  """[B, N, D] hidden states, at index t the one that predicts token t of the response."""
  output, prompt_mask, _ = _forward(model, params, prompts, prompt_mask, tokens, mask)
  return _before(output.hidden, prompt_mask)


def _forward(
  model: Any, params: Any, prompts: Any, prompt_mask: Any, tokens: Any, mask: Any
) -> tuple[Any, jax.Array, jax.Array]:
  """The model's output over prompts and responses, and both masks, checked."""
  prompts, prompt_mask = check_prompts(prompts, prompt_mask)
  tokens = checks.check_integer("tokens", tokens)
  checks.check_rank("tokens", tokens, 2)
  mask = checks.check_mask(mask, tokens=tokens)
  checks.check_same_shape(**{"prompts[:, 0]": prompts[:, 0], "tokens[:, 0]": tokens[:, 0]})
  real = jnp.concatenate([prompt_mask, mask], axis=1)
  sequences = jnp.where(real, jnp.concatenate([prompts, tokens.astype(prompts.dtype)], axis=1), 0)
  output = model.apply(params, sequences, segment_ids=real.astype(jnp.int32))
  return output, prompt_mask, mask


def _before(x: jax.Array, prompt_mask: jax.Array) -> jax.Array:
  """[B, N, D] of x [B, P + N, D]: at index t what stands at the token before response token t."""
  width = prompt_mask.shape[1]
  return jnp.concatenate([last_hidden(x[:, :width], prompt_mask), x[:, width:-1]], axis=1)


def last_hidden(hidden: jax.Array, mask: jax.Array) -> jax.Array:
  """The hidden state at the last real token of each row: what predicts the next one.

  Args:
    hidden: [B, T, D]. Differentiated.
    mask: [B, T] bool, False = padding.

  Returns:
    [B, 1, D]; 0 for a row without a token.
  """
  last = masks.last_token_mask(mask)[..., None]
  return jnp.sum(jnp.where(last, hidden, 0), axis=1, keepdims=True, dtype=hidden.dtype)


def check_prompts(prompts: Any, prompt_mask: Any) -> tuple[jax.Array, jax.Array]:
  """Prompts and their mask as JAX arrays [B, P].

  Args:
    prompts: [B, P] int token ids.
    prompt_mask: [B, P] bool.

  Returns:
    Both.

  Raises:
    ValueError: there is no prompt, one has no token (if that is known while tracing), or the shapes
      differ.
    TypeError: the prompts are not integers, or the mask is not boolean.
  """
  prompts = checks.check_integer("prompts", prompts)
  prompt_mask = checks.check_mask(prompt_mask, name="prompt_mask", prompts=prompts)
  if prompts.ndim != 2 or not prompts.size:
    raise ValueError(f"prompts must be [B, P] with B, P >= 1, got shape {prompts.shape}")
  if is_concrete(prompt_mask):
    empty = np.flatnonzero(~np.asarray(prompt_mask).any(axis=-1))
    if empty.size:
      raise ValueError(
        f"every prompt needs at least one token (a BOS), and these have none: {empty.tolist()}"
      )
  return prompts, prompt_mask


def is_concrete(x: jax.Array) -> bool:
  """Whether the numbers can be looked at: not traced, and none of them on another host.

  Args:
    x: array.

  Returns:
    True if so.
  """
  return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
