"""Languages small enough to enumerate: every response as a row of an array.

A language is a vocabulary, a horizon and, if it has one, a token that ends a response. The
responses are listed once, in lexicographic order; index n speaks of response n everywhere in the
laboratory, so that an expectation over the language is a weighted sum over rows. A state is a
prefix: states of equal length are a contiguous block, and inside it a prefix is its number in
base (count of tokens that do not end).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["tokens", "mask", "states"],
  meta_fields=["vocabulary", "horizon", "end_token"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Language:
  """All responses of a vocabulary and horizon, from `enumerate_language`.

  A pytree: pass it into jitted functions, so that its arrays are no constants of the program.

  Attributes:
    tokens: [N, T] int32; after its end a response repeats the end token.
    mask: [N, T] bool, True up to and including the end token.
    states: [N, T] int32, index of the prefix before each token; 0 at masked positions.
    vocabulary: number of tokens V, the end token included.
    horizon: longest response T, tokens.
    end_token: its id, or None: every response has T tokens.
  """

  tokens: Any
  mask: Any
  states: Any
  vocabulary: int
  horizon: int
  end_token: int | None

  @property
  def lengths(self) -> Any:
    """[N] tokens of each response, the end token included."""
    return self.mask.sum(axis=-1)

  @property
  def num_states(self) -> int:
    """Number of prefixes at which a token is chosen."""
    return sum(self._branches**t for t in range(self.horizon))

  @property
  def _branches(self) -> int:
    return self.vocabulary - (self.end_token is not None)


def num_responses(vocabulary: int, horizon: int, *, end_token: int | None = None) -> int:
  """How many responses a language has.

  V^T without an end token; with one, sum_{t < T} (V - 1)^t + (V - 1)^T.

  Args:
    vocabulary: number of tokens, the end token included.
    horizon: longest response, tokens.
    end_token: its id, or None.

  Returns:
    The count.

  Example:
    >>> num_responses(5, 4), num_responses(5, 6, end_token=4)
    (625, 5461)
  """
  if end_token is None:
    return vocabulary**horizon
  return sum((vocabulary - 1) ** t for t in range(horizon + 1))


def enumerate_language(
  vocabulary: int, horizon: int, *, end_token: int | None = None, limit: int = 2_000_000
) -> Language:
  """Every response of a language, in lexicographic order.

  With an end token only the distinct responses are listed: what would follow the end does not
  exist (5 tokens and 6 steps make 15,625 strings, which are 5,461 responses).

  Args:
    vocabulary: number of tokens, the end token included; at least 2.
    horizon: longest response, tokens; at least 1.
    end_token: id of the token that ends a response; None = every response has `horizon` tokens.
    limit: most responses to list.

  Returns:
    The language, as NumPy arrays.

  Raises:
    ValueError: an argument is out of range, or there are more responses than `limit`.

  Example:
    >>> language = enumerate_language(2, 2, end_token=1)
    >>> language.tokens.tolist(), language.lengths.tolist()
    ([[0, 0], [0, 1], [1, 1]], [2, 2, 1])
  """
  if vocabulary < 2:
    raise ValueError(f"vocabulary must be at least 2, got {vocabulary}")
  if horizon < 1:
    raise ValueError(f"horizon must be at least 1, got {horizon}")
  if end_token is not None and not 0 <= end_token < vocabulary:
    raise ValueError(f"end_token must lie in [0, {vocabulary}), got {end_token}")
  count = num_responses(vocabulary, horizon, end_token=end_token)
  if count > limit:
    raise ValueError(
      f"a language of vocabulary {vocabulary} and horizon {horizon} has {readable(count)} "
      f"responses, more than the limit of {limit:,}"
    )
  content = np.array([v for v in range(vocabulary) if v != end_token], np.int32)
  blocks = [_content_of_length(horizon, horizon, len(content))]
  if end_token is not None:
    blocks += [_content_of_length(t, horizon, len(content)) for t in range(horizon)]
  tokens = np.concatenate(blocks)
  tokens = np.where(tokens < 0, -1 if end_token is None else end_token, content[tokens])
  if end_token is not None:
    tokens = tokens[_lexicographic(tokens, vocabulary)]
  language = Language(tokens, None, None, vocabulary, horizon, end_token)
  mask, states = prefix_states(language, tokens)
  return dataclasses.replace(language, mask=mask, states=states)


def readable(count: int) -> str:
  """A count for a message; in powers of ten where it has too many digits.

  Args:
    count: a whole number, however large.

  Returns:
    The text.

  Example:
    >>> readable(1234567), readable(5**4096)
    ('1,234,567', 'about 10^2863')
  """
  return f"{count:,}" if count < 10**15 else f"about 10^{round(math.log10(count))}"


def _content_of_length(length: int, horizon: int, branches: int) -> np.ndarray:
  """[branches^length, horizon] int32: all strings of content digits, then -1."""
  numbers = np.arange(branches**length)
  digits = np.full((len(numbers), horizon), -1, np.int32)
  for t in range(length - 1, -1, -1):
    digits[:, t] = numbers % branches
    numbers //= branches
  return digits


def _lexicographic(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
  """Order of the rows; by their number in base V where that fits into 64 bits."""
  horizon = tokens.shape[1]
  if vocabulary**horizon >= 2**62:
    return np.lexsort(tokens.T[::-1])
  number = np.zeros(len(tokens), np.int64)
  for t in range(horizon):
    number = number * vocabulary + tokens[:, t]
  return np.argsort(number)


def prefix_states(language: Language, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Mask and states of any strings of the language.

  Args:
    language: the language.
    tokens: [R, T]; what follows an end token is not read.

  Returns:
    (mask, states), [R, T] each, as in `Language`.
  """
  branches, end = language._branches, language.end_token
  alive, number = np.ones(len(tokens), bool), np.zeros(len(tokens), np.int64)
  mask, states = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, np.int32)
  first = 0  # of the block of prefixes of length t
  for t in range(tokens.shape[1]):
    mask[:, t], states[:, t] = alive, np.where(alive, first + number, 0)
    first += branches**t
    token = tokens[:, t]
    if end is not None:
      alive = alive & (token != end)
      token = np.where(alive, token - (token > end), 0)
    number = number * branches + token
  return mask, states


def content_mask(language: Language) -> Any:
  """The tokens of each response that are not its end token.

  Args:
    language: the language.

  Returns:
    [N, T] bool.
  """
  if language.end_token is None:
    return language.mask
  return language.mask & (language.tokens != language.end_token)


def modular_sum_reward(language: Language, targets: Any) -> np.ndarray:
  """1 if the content tokens sum to the target modulo their number of kinds, else 0.

  An empty response gets 0. It is decided by the last content token: every prefix can still be
  right, so that credit is hard to assign.

  Args:
    language: the language.
    targets: [P] int, one target per prompt.

  Returns:
    [P, N] float64.

  Example:
    >>> modular_sum_reward(enumerate_language(2, 2), [1]).tolist()
    [[0.0, 1.0, 1.0, 0.0]]
  """
  content = content_mask(language)
  total = np.where(content, language.tokens, 0).sum(axis=-1) % language._branches
  right = (total == np.asarray(targets)[:, None]) & content.any(axis=-1)
  return right.astype(np.float64)


def first_token_reward(language: Language, targets: Any) -> np.ndarray:
  """1 if the first token is the target, else 0: all that follows is filler.

  Args:
    language: the language.
    targets: [P] int, one target per prompt.

  Returns:
    [P, N] float64.

  Example:
    >>> first_token_reward(enumerate_language(2, 2), [1]).tolist()
    [[0.0, 0.0, 1.0, 1.0]]
  """
  return (language.tokens[:, 0] == np.asarray(targets)[:, None]).astype(np.float64)
