"""jaxrl_lm.exact.language: every response once, in order, and the prefix before each token."""

import itertools
import time

import jax
import numpy as np
import pytest

from jaxrl_lm.exact import (
  enumerate_language,
  first_token_reward,
  modular_sum_reward,
  num_responses,
)
from jaxrl_lm.exact.language import content_mask, prefix_states, readable

SHAPES = [
  (2, 1, None),
  (2, 1, 0),
  (2, 5, 1),
  (3, 4, None),
  (3, 4, 0),
  (4, 3, 2),
  (4, 3, 3),
  (2, 70, 0),  # 2^70 does not fit into 64 bits
]


def listed(vocabulary, horizon, end):
  """Every response as a tuple of tokens, up to its end, in lexicographic order."""
  if end is None:
    return sorted(itertools.product(range(vocabulary), repeat=horizon))
  content = [v for v in range(vocabulary) if v != end]
  strings = [
    s + ((end,) if t < horizon else ())
    for t in range(horizon + 1)
    for s in itertools.product(content, repeat=t)
  ]
  return sorted(strings, key=lambda s: s + (end,) * (horizon - len(s)))


@pytest.mark.parametrize(("vocabulary", "horizon", "end"), SHAPES)
def test_every_response_once_in_order(vocabulary, horizon, end):
  language = enumerate_language(vocabulary, horizon, end_token=end)
  expected = listed(vocabulary, horizon, end)
  rows = zip(language.tokens.tolist(), language.lengths.tolist(), strict=True)
  assert [tuple(tokens[:n]) for tokens, n in rows] == expected
  assert len(expected) == num_responses(vocabulary, horizon, end_token=end)
  filler = language.tokens[~language.mask]
  assert np.all(filler == end)
  assert np.all(np.diff(language.mask.astype(int), axis=1) <= 0)  # a response is a prefix
  assert (language.tokens.dtype, language.states.dtype) == (np.int32, np.int32)


@pytest.mark.parametrize(("vocabulary", "horizon", "end"), SHAPES)
def test_states_name_prefixes(vocabulary, horizon, end):
  """The same state is the same prefix; prefixes of a length are a contiguous block, in order."""
  language = enumerate_language(vocabulary, horizon, end_token=end)
  prefix_of = {}
  for n, t in np.argwhere(language.mask):
    prefix = tuple(language.tokens[n, :t].tolist())
    assert prefix_of.setdefault(int(language.states[n, t]), prefix) == prefix
  assert sorted(prefix_of) == list(range(language.num_states))
  assert len(set(prefix_of.values())) == language.num_states
  prefixes = [prefix_of[s] for s in range(language.num_states)]
  assert prefixes == sorted(prefixes, key=lambda p: (len(p), p))
  assert np.all(language.states[~language.mask] == 0)


def test_response_number_and_blocks_of_the_fixed_language():
  language = enumerate_language(5, 4)
  assert language.num_states == 1 + 5 + 25 + 125
  np.testing.assert_array_equal(language.tokens @ 5 ** np.arange(3, -1, -1), np.arange(625))
  number = np.arange(625)
  for t, first in enumerate((0, 1, 6, 31)):
    np.testing.assert_array_equal(language.states[:, t], first + number // 5 ** (4 - t))
  assert num_responses(5, 6, end_token=4) == 5461  # (4^7 - 1) / 3


def test_states_of_other_strings():
  """In any order, and whatever follows the end."""
  language = enumerate_language(4, 3, end_token=2)
  rng = np.random.default_rng(0)
  rows = rng.integers(0, len(language.tokens), 50)
  garbage = rng.integers(0, 4, (50, 3))
  tokens = np.where(language.mask[rows], language.tokens[rows], garbage)
  mask, states = prefix_states(language, tokens)
  np.testing.assert_array_equal(mask, language.mask[rows])
  np.testing.assert_array_equal(states, language.states[rows])


@pytest.mark.parametrize(("vocabulary", "horizon", "end"), SHAPES[:-1])
def test_rewards(vocabulary, horizon, end):
  language = enumerate_language(vocabulary, horizon, end_token=end)
  kinds = vocabulary - (end is not None)
  targets = np.arange(kinds)
  summed, first = modular_sum_reward(language, targets), first_token_reward(language, targets)
  for n, response in enumerate(listed(vocabulary, horizon, end)):
    content = [v for v in response if v != end]
    for p in targets:
      assert summed[p, n] == float(bool(content) and sum(content) % kinds == p)
      assert first[p, n] == float(response[0] == p)
    assert content_mask(language)[n].sum() == len(content)


@pytest.mark.parametrize(
  "shape",
  [(10, 6, None), *(pytest.param(x, marks=pytest.mark.slow) for x in ((3, 19, 0), (2, 20, None)))],
)
def test_a_million_responses(shape):
  """Within 1.5 s; the bound is for a busy machine."""
  start = time.perf_counter()
  language = enumerate_language(*shape[:2], end_token=shape[2])
  assert time.perf_counter() - start < 20.0
  assert 1e6 <= len(language.tokens) == num_responses(*shape[:2], end_token=shape[2])
  stored = language.tokens.nbytes + language.states.nbytes + language.mask.nbytes
  assert stored == 9 * language.tokens.size
  sample = np.random.default_rng(0).integers(0, len(language.tokens) - 1, 1000)
  one, other = (language.tokens[x].tolist() for x in (sample, sample + 1))
  assert all(a < b for a, b in zip(one, other, strict=True))


def test_language_is_a_pytree():
  language = enumerate_language(2, 2, end_token=1)
  assert len(jax.tree.leaves(language)) == 3
  traces = []

  @jax.jit
  def lengths(language):
    traces.append(language.num_states)
    return language.lengths

  for _ in range(2):  # an equal language shares the compilation
    assert lengths(enumerate_language(2, 2, end_token=1)).tolist() == [2, 2, 1]
  assert traces == [2]


def test_bad_inputs():
  with pytest.raises(ValueError, match="vocabulary must be at least 2"):
    enumerate_language(1, 3)
  with pytest.raises(ValueError, match="horizon must be at least 1"):
    enumerate_language(3, 0)
  for end in (-1, 3):
    with pytest.raises(ValueError, match=r"end_token must lie in \[0, 3\)"):
      enumerate_language(3, 2, end_token=end)
  with pytest.raises(ValueError, match=r"horizon 10 has 9,765,625 responses.*limit of 2,000,000"):
    enumerate_language(5, 10)
  with pytest.raises(ValueError, match=r"has 5,461 responses.*limit of 5,000"):
    enumerate_language(5, 6, end_token=4, limit=5000)
  # More digits than Python writes out.
  with pytest.raises(ValueError, match=r"has about 10\^6990 responses"):
    enumerate_language(5, 10_000)
  assert readable(10**15 - 1) == "999,999,999,999,999"
