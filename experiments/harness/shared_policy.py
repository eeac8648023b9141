"""A policy that shares its parameters: a small network over the prefixes of an enumerated language.

In a table an update of one prefix touches no other, so that whatever an estimator does is its own
doing. Here prompts and prefixes share all weights, as in a language model. Both are policies of
the laboratory: the same measurements take either.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from configs.policies import Network, Table
from jaxrl_lm.exact import (
  Policy,
  count_pretrained_logits,
  kl_divergence,
  tabular_policy,
)
from jaxrl_lm.exact.language import Language


def reference_policy(
  settings: Table | Network, language: Language, *, prompts: int, seed: int, concentration: float
) -> Policy:
  """The reference by counting: the table itself, or a network fitted to it.

  Args:
    settings: which of the two.
    language: the language.
    prompts, seed, concentration: as in `count_pretrained_logits`.
  """
  logits = count_pretrained_logits(
    language,
    prompts=prompts,
    seed=seed,
    concentration=concentration,
    smoothing=settings.smoothing,
  )
  table = tabular_policy(language, logits)
  return fitted_network(table, settings) if isinstance(settings, Network) else table


def fitted_network(table: Policy, settings: Network) -> Policy:
  """The network closest to a table: Adam on the exact KL(table || network), mean over prompts."""
  language = table.language
  policy = network_policy(language, prompts=table.num_prompts, settings=settings)
  schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
  optimizer = optax.adam(schedule)

  @jax.jit
  def fit(params: Any, language: Language, target: jax.Array) -> Any:
    def divergence(params: Any) -> jax.Array:
      logprobs = policy._replace(language=language).logprobs(params)
      return jnp.mean(kl_divergence(language, target, logprobs))

    def step(carry: Any, _: None) -> Any:
      params, state = carry
      updates, state = optimizer.update(jax.grad(divergence)(params), state, params)
      return (optax.apply_updates(params, updates), state), None

    start = (params, optimizer.init(params))
    return jax.lax.scan(step, start, length=settings.steps)[0][0]

  return policy._replace(params=fit(policy.params, language, table.logprobs()))


def network_policy(language: Language, *, prompts: int, settings: Network) -> Policy:
  """A network of random weights: one-hot prefix and prompt, two hidden layers, a softmax."""
  inputs = _prefixes(language.vocabulary, language.horizon, language.end_token).shape[1]
  sizes = {"prompt": (prompts, settings.width), "prefix": (inputs, settings.width)}
  sizes |= {"hidden": (settings.width,) * 2, "out": (settings.width, language.vocabulary)}
  rng = np.random.default_rng(settings.seed)
  params = {
    # At most one input of each position is on, so that their number is no fan-in.
    name: rng.normal(0.0, 1.0 / np.sqrt(language.horizon if name == "prefix" else shape[0]), shape)
    for name, shape in sizes.items()
  }
  params |= {"bias": np.zeros(settings.width), "out_bias": np.zeros(language.vocabulary)}
  return Policy(language, _score, jax.tree.map(jnp.asarray, params), prompts, _score_gram)


def _score(params: Any, language: Language, prompt: Any, rows: Any) -> jax.Array:
  features = jnp.asarray(_prefixes(language.vocabulary, language.horizon, language.end_token))
  states, tokens = jnp.asarray(language.states)[rows], jnp.asarray(language.tokens)[rows]
  if states.size < features.shape[0]:  # few responses: only their prefixes
    logprobs = _logprobs(params, prompt, features[states])
    return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
  return _logprobs(params, prompt, features)[states, tokens]


@jax.jit
def _score_gram(params: Any, language: Language, prompt: Any, rows: Any) -> jax.Array:
  """By autodiff, but once for each prefix and token, however many responses share it."""
  features = jnp.asarray(_prefixes(language.vocabulary, language.horizon, language.end_token))
  flat, unravel = ravel_pytree(params)
  scores = jax.vmap(jax.jacrev(lambda x, prefix: _logprobs(unravel(x), prompt, prefix)), (None, 0))
  table = scores(flat, features)  # [S, V, D]
  states, tokens, mask = (jnp.asarray(x) for x in (language.states, language.tokens, language.mask))

  def one(row: jax.Array) -> jax.Array:
    score = jnp.where(mask[row][:, None], table[states[row], tokens[row]], 0.0)
    return score @ score.T

  return jax.lax.map(one, jnp.asarray(rows), batch_size=256)


def _logprobs(params: Any, prompt: Any, features: jax.Array) -> jax.Array:
  """[..., V] log-probs of the next token after prefixes of these features [..., F]."""
  spread = lambda x: x.reshape((1,) * (features.ndim - 1) + x.shape)  # noqa: E731
  x = features.astype(params["prefix"].dtype) @ params["prefix"] + spread(params["prompt"][prompt])
  x = jnp.tanh(x)
  x = jnp.tanh(x @ params["hidden"] + spread(params["bias"]))
  return jax.nn.log_softmax(x @ params["out"] + spread(params["out_bias"]), axis=-1)


@functools.cache
def _prefixes(vocabulary: int, horizon: int, end_token: int | None) -> np.ndarray:
  """[S, F] one-hot length of each prefix, and its tokens, in the order of the language's states."""
  branches = vocabulary - (end_token is not None)
  rows = []
  for length in range(horizon):
    numbers = np.arange(branches**length)[:, None]
    digits = numbers // branches ** np.arange(length - 1, -1, -1) % branches
    tokens = np.zeros((len(numbers), horizon - 1, branches), np.int8)
    np.put_along_axis(tokens[:, :length], digits[..., None], 1, axis=-1)
    place = np.zeros((len(numbers), horizon), np.int8)
    place[:, length] = 1
    rows.append(np.concatenate([place, tokens.reshape(len(numbers), -1)], axis=1))
  return np.concatenate(rows)
