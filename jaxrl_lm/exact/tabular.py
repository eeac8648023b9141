"""Policies that score the responses of an enumerated language; tables of one softmax per prefix.

A policy is a function from parameters to the log-probs of enumerated tokens. A table holds one
row of logits per (prompt, prefix), so that its parameters do not interact: what an update does
here is due to the estimator. A policy that shares parameters (a network that scores the tokens)
goes through the same functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import checks
from jaxrl_lm.exact.language import Language, prefix_states


class Policy(NamedTuple):
  """A policy over an enumerated language, at given parameters.

  Attributes:
    language: the language.
    score: (params, language, prompt, rows) -> [R, T] log-probs of the tokens of the responses
      `rows` ([R] int) to one prompt (int scalar); at masked positions anything. Row by row: a
      response's log-probs may not depend on which others are asked for.
    params: pytree of floating arrays.
    num_prompts: number of prompts P.
    score_gram: (params, language, prompt, rows) -> [R, T, T] inner products of the token scores
      d log pi(y_t | s_t) / d params, where they are known in closed form; None = by autodiff.
  """

  language: Language
  score: Callable[..., jax.Array]
  params: Any
  num_prompts: int
  score_gram: Callable[..., jax.Array] | None = None

  def logprobs(self, params: Any | None = None) -> jax.Array:
    """Log-probs of all tokens of all responses.

    Args:
      params: parameters; None = the policy's own.

    Returns:
      [P, N, T] nats, 0 at masked positions. Differentiable in the parameters.
    """
    params = self.params if params is None else params
    return _all_logprobs((self.score, self.num_prompts), params, self.language)


@functools.partial(jax.jit, static_argnums=0)
def _all_logprobs(scoring: tuple[Any, int], params: Any, language: Language) -> jax.Array:
  score, num_prompts = scoring
  rows = np.arange(language.tokens.shape[0])
  scored = [score(params, language, p, rows) for p in range(num_prompts)]
  return jnp.where(language.mask, jnp.stack(scored), 0.0)


def tabular_policy(language: Language, logits: Any) -> Policy:
  """One softmax per (prompt, prefix).

  Args:
    language: the language.
    logits: [P, S, V], S = language.num_states.

  Returns:
    The policy, whose parameters are the logits.

  Raises:
    ValueError: the logits have another shape.

  Example:
    >>> from jaxrl_lm.exact.language import enumerate_language
    >>> policy = tabular_policy(enumerate_language(2, 2), jnp.zeros((1, 3, 2)))
    >>> policy.logprobs().shape
    (1, 4, 2)
  """
  logits = checks.as_float("logits", logits)
  checks.check_rank("logits", logits, 3)
  expected = (logits.shape[0], language.num_states, language.vocabulary)
  if logits.shape != expected:
    raise ValueError(f"logits must be [prompts, states, vocabulary] = {expected}: {logits.shape}")
  return Policy(language, _table_score, logits, logits.shape[0], _table_score_gram)


def _table_score(logits: jax.Array, language: Language, prompt: Any, rows: Any) -> jax.Array:
  logprobs = jax.nn.log_softmax(logits[prompt], axis=-1)
  states, tokens = jnp.asarray(language.states)[rows], jnp.asarray(language.tokens)[rows]
  return logprobs[states, tokens]


def _table_score_gram(logits: jax.Array, language: Language, prompt: Any, rows: Any) -> jax.Array:
  """Scores of different states touch different parameters; |e_a - p|^2 = 1 - 2 p_a + sum p^2."""
  probs = jax.nn.softmax(logits[prompt], axis=-1)
  states, tokens = jnp.asarray(language.states)[rows], jnp.asarray(language.tokens)[rows]
  square = 1.0 - 2.0 * probs[states, tokens] + jnp.sum(probs**2, axis=-1)[states]
  square = jnp.where(jnp.asarray(language.mask)[rows], square, 0.0)
  return jnp.where(jnp.eye(language.horizon, dtype=jnp.bool_)[None], square[..., None], 0.0)


def count_pretrained_logits(
  language: Language,
  *,
  prompts: int,
  seed: int,
  concentration: float,
  sequences: int = 4000,
  smoothing: float = 0.5,
) -> np.ndarray:
  r"""A reference policy "pretrained" by counting a corpus drawn from a random Markov chain.

  logits = log(count of (prefix, token) + smoothing)

  Per prompt: a first-token distribution and a transition matrix from a Dirichlet, then
  `sequences` strings; after the end token a string stays there. A high count of a few prefixes
  and a flat distribution on all others is what makes it look like a pretrained model.

  Args:
    language: the language.
    prompts: number of prompts P, drawn one after the other from the same generator.
    seed: of `numpy.random.default_rng`.
    concentration: of the Dirichlet; small = peaked.
    sequences: strings per prompt.
    smoothing: added to every count, > 0.

  Returns:
    [P, S, V] float64 logits.

  Raises:
    ValueError: smoothing <= 0.

  Example:
    >>> from jaxrl_lm.exact.language import enumerate_language
    >>> language = enumerate_language(5, 4)
    >>> count_pretrained_logits(language, prompts=4, seed=1, concentration=0.3).shape
    (4, 156, 5)
  """
  checks.check_range("smoothing", smoothing, low=0.0, open_low=True)
  rng = np.random.default_rng(seed)
  logits = []
  for _ in range(prompts):
    strings = _markov_strings(rng, language, concentration, sequences)
    logits.append(np.log(_count_prefixes(language, strings) + smoothing))
  return np.stack(logits)


def _markov_strings(
  rng: np.random.Generator, language: Language, concentration: float, sequences: int
) -> np.ndarray:
  """[sequences, T] strings of a random Markov chain; the end token absorbs."""
  size = language.vocabulary
  init = rng.dirichlet(concentration * np.ones(size))
  transition = rng.dirichlet(concentration * np.ones(size), size=size)
  strings = np.empty((sequences, language.horizon), np.int64)
  strings[:, 0] = rng.choice(size, size=sequences, p=init)
  for t in range(1, language.horizon):
    u = rng.random(sequences)[:, None]
    drawn = (np.cumsum(transition[strings[:, t - 1]], axis=1) < u).sum(axis=1)
    strings[:, t] = np.minimum(drawn, size - 1)
  if language.end_token is not None:
    ended = np.cumsum(strings == language.end_token, axis=1) > 0
    strings[ended] = language.end_token
  return strings


def _count_prefixes(language: Language, strings: np.ndarray) -> np.ndarray:
  """[S, V]: how often each token follows each prefix."""
  mask, states = prefix_states(language, strings)
  counts = np.zeros((language.num_states, language.vocabulary))
  np.add.at(counts, (states[mask], strings[mask]), 1.0)
  return counts
