"""The log-probs of responses under a model, by one forward pass over prompt and response."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import checks, logprobs, masks


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
  prompts, prompt_mask = check_prompts(prompts, prompt_mask)
  tokens = checks.check_integer("tokens", tokens)
  checks.check_rank("tokens", tokens, 2)
  mask = checks.check_mask(mask, tokens=tokens)
  checks.check_same_shape(**{"prompts[:, 0]": prompts[:, 0], "tokens[:, 0]": tokens[:, 0]})
  real = jnp.concatenate([prompt_mask, mask], axis=1)
  sequences = jnp.where(real, jnp.concatenate([prompts, tokens.astype(prompts.dtype)], axis=1), 0)
  hidden = model.apply(params, sequences, segment_ids=real.astype(jnp.int32)).hidden
  width = prompts.shape[1]
  before = [last_hidden(hidden[:, :width], prompt_mask), hidden[:, width:-1]]
  logits = model.logits(params, jnp.concatenate(before, axis=1))
  return logprobs.token_logprobs(logits, tokens, mask=mask, temperature=temperature)


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
