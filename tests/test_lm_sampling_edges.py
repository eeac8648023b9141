"""Sampler and scorer at the edges: what is refused, what is confined, and what is never drawn."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxrl_lm as rl
from jaxrl_lm.lm import decoding, sampling, scoring, truncation
from tests.bigram import Bigram

ONE = jnp.array([[1, 2]])
GOOD: dict[str, Any] = {"seed": 0, "max_new_tokens": 2}
ROW = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)

# ---------------------------------------------------------------------------------- constants


@pytest.mark.parametrize(
  ("bad", "error", "message"),
  [
    ({"stop_tokens": [2.5]}, TypeError, "stop_tokens must be integer"),
    ({"stop_tokens": "3"}, TypeError, "stop_tokens must be integer"),
    ({"stop_tokens": True}, TypeError, "stop_tokens must be integer"),
    ({"stop_tokens": [2**32 + 1]}, ValueError, "stop_tokens must fit"),
    ({"pad_id": 0.5}, TypeError, "pad_id must be an integer, got 0.5"),
    ({"step": 0.5}, TypeError, "step must be an integer"),
    ({"step": 2**32}, ValueError, "step must lie in"),
    ({"seed": 2**32}, ValueError, r"seed must lie in \[0, 4294967295\], got 4294967296"),
    ({"seed": np.int64(-1)}, ValueError, "seed must lie in"),
    ({"seed": True}, TypeError, "seed must be an integer, got True"),
    ({"row_ids": np.array([2**32])}, ValueError, "row_ids must fit int32"),
    ({"row_ids": np.array([-1])}, ValueError, "row_ids must lie in"),
    ({"top_k": 2.5}, TypeError, "top_k must be an integer, got 2.5"),
    ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an integer, got 2.0"),
    ({"temperature": 1e-38}, ValueError, r"temperature must lie in \[1e-30, inf\), got 1e-38"),
    ({"temperature": "1"}, TypeError, "temperature must be a number"),
    ({"valid_vocab": 9}, ValueError, r"valid_vocab must lie in \[1, 8\], got 9"),
    ({"valid_vocab": 2.5}, TypeError, "valid_vocab must be an integer"),
  ],
)
@pytest.mark.parametrize("function", [sampling.sample, sampling.stream])
def test_a_constant_that_is_none_is_an_error_at_the_call(
  bad: dict[str, Any], error: type[Exception], message: str, function: Any
) -> None:
  with pytest.raises(error, match=message):
    function(Bigram(8), ROW, ONE, ONE > 0, **GOOD | bad)


def test_a_traced_size_is_an_error_that_names_it() -> None:
  def call(n: Any) -> Any:
    return sampling.sample(Bigram(8), ROW, ONE, ONE > 0, seed=0, max_new_tokens=n)

  with pytest.raises(TypeError, match="max_new_tokens must be known while tracing"):
    jax.jit(call)(2)


@pytest.mark.parametrize(
  ("prompts", "options", "error", "message"),
  [
    ([[2**32 + 5]], {}, ValueError, "prompts must .*32"),
    ([[-(2**31) - 1]], {}, ValueError, "prompts must .*32"),
    ([[1]], {"length": 2.5}, TypeError, "length must be an integer"),
    ([[1]], {"pad_id": 0.5}, TypeError, "pad_id must be an integer"),
    ([[True]], {}, TypeError, "prompts must be integer"),
  ],
)
def test_numbers_that_would_become_others(
  prompts: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
  with pytest.raises(error, match=message):
    sampling.pad_prompts(prompts, **options)


def test_stop_tokens_may_be_a_set_or_traced_and_the_last_seed_is_not_the_first() -> None:
  prompts = jnp.ones((8, 1), jnp.int32)
  draw = partial(sampling.sample, Bigram(8), ROW, prompts, prompts > 0, max_new_tokens=6)
  got = draw(seed=0, stop_tokens={5, 3})
  np.testing.assert_array_equal(got.mask, rl.response_mask(got.tokens, stop_tokens=(3, 5)))
  assert 0 < got.finished.sum() < 8
  assert (draw(seed=2**32 - 1, stop_tokens=[3, 5]).tokens != got.tokens).any()
  traced = jax.eval_shape(lambda stops: draw(seed=0, stop_tokens=stops), jnp.array([3, 5]))
  assert traced.tokens.shape == (8, 6)


# ------------------------------------------------------------------------------ what is drawn


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_ids_that_the_tokenizer_lacks_are_never_drawn(temperature: float) -> None:
  """Eight columns of which five exist; the likeliest does not. Uniform over five is -log 5."""
  logits = jnp.zeros((8, 8)).at[:, 5:].set(9.0)
  prompts = jnp.zeros((64, 1), jnp.int32)
  arguments = (Bigram(8), logits, prompts, prompts == 0)
  samples = sampling.sample(
    *arguments, seed=0, max_new_tokens=4, valid_vocab=5, temperature=temperature
  )
  assert samples.tokens.max() == (4 if temperature else 0)
  np.testing.assert_allclose(samples.untruncated_logprobs, -np.log(5), rtol=1e-6)
  scored = scoring.response_logprobs(*arguments, *samples[:2], valid_vocab=5)
  np.testing.assert_allclose(scored, samples.untruncated_logprobs, rtol=1e-6)
  assert (scoring.response_logprobs(*arguments, *samples[:2]) < -10).all()


def test_the_gradient_through_ids_that_do_not_exist_is_zero() -> None:
  prompts = jnp.zeros((1, 1), jnp.int32)

  def scored(logits: jax.Array) -> jax.Array:
    arrays = (prompts, prompts == 0, prompts + 2, prompts == 0)
    return scoring.response_logprobs(Bigram(8), logits, *arrays, valid_vocab=5).sum()

  gradient = jax.jit(jax.grad(scored))(jnp.zeros((8, 8)))[0]
  np.testing.assert_allclose(gradient, [-0.2, -0.2, 0.8, -0.2, -0.2, 0, 0, 0], atol=1e-6)


@pytest.mark.slow
def test_a_token_of_3e_8_comes_as_often_as_it_should() -> None:
  """127 of them in 2.2 million draws: 8.4 +- 2.9. On a grid of 2^-23 they are 14 times rarer."""
  draws, tail = 2_200_000, 3e-8
  logits = jnp.full(decoding.BLOCK, np.log(tail)).at[5].set(np.log(1 - 127 * tail))

  @jax.jit
  def count(key: jax.Array) -> jax.Array:
    def part(total: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
      keys = jax.random.split(key, 10_000)
      tokens = jax.vmap(decoding._categorical, (0, None))(keys, logits)
      return total + jnp.sum(tokens != 5), None

    return jax.lax.scan(part, jnp.int32(0), jax.random.split(key, draws // 10_000))[0]

  expected = draws * 127 * tail
  # The lower bound is what the coarse grid misses: its mean is 0.6.
  assert 2 <= int(count(jax.random.key(0))) < expected + 4 * np.sqrt(expected)


@pytest.mark.parametrize(
  "truncated", [lambda z: truncation.keep_top_k(z, 2), lambda z: truncation.keep_top_p(z, 0.5)]
)
def test_a_nan_stays_one(truncated: Any) -> None:
  got = truncated(jnp.array([[np.nan, 0.0, 1.0], [0.0, 2.0, 1.0]]))
  assert jnp.isnan(got[0, 0])
  assert not jnp.isnan(got[1]).any()


def test_min_p_keeps_the_largest_even_if_it_is_infinite_or_nan() -> None:
  got = truncation.keep_min_p(jnp.array([[np.inf, 0, 1], [np.nan, 0, 1]]), 1.0)
  np.testing.assert_array_equal(got, [[np.inf, -np.inf, -np.inf], [np.nan, -np.inf, -np.inf]])


@pytest.mark.parametrize(
  ("function", "value"), [(truncation.keep_top_k, 2.5), (truncation.keep_valid, 2.5)]
)
def test_a_number_of_tokens_is_whole(function: Any, value: float) -> None:
  with pytest.raises(TypeError, match="must be an integer, got 2.5"):
    function(jnp.zeros(3), value)


# --------------------------------------------------------------------------------- the scorer

SEEN = np.array([[True, True, True, True], [True, True, False, False]])
TOKENS = jnp.array([[3, 1, 4, 2], [5, 6, 0, 0]])
PROMPTS = (jnp.array([[1, 2], [0, 7]]), jnp.array([[True, True], [False, True]]))


class Summing(Bigram):
  """The next token depends on all before it: hidden state t is the sum of the rows up to t."""

  def apply(self, params: Any, tokens: Any, *, segment_ids: Any, cache: Any = None) -> Any:
    output = super().apply(params, tokens, segment_ids=segment_ids, cache=cache)
    output.hidden = jnp.cumsum(output.hidden, axis=1)
    return output


@partial(jax.jit, static_argnums=0)
def traced_score(model: Any, mask: Any, seen: Any) -> jax.Array:
  return scoring.response_logprobs(model, ROW, *PROMPTS, TOKENS, mask, seen=seen)


@pytest.fixture(scope="module")
def full() -> jax.Array:
  """Log-probs of all tokens that are there."""
  return traced_score(Summing(8), SEEN, SEEN)


def test_tokens_that_are_seen_and_do_not_count(full: jax.Array) -> None:
  """The output of a tool: it conditions what follows, and is 0 itself."""
  mask = SEEN & np.array([[True, False, True, False], [False, True, True, True]])
  got = traced_score(Summing(8), mask, SEEN)
  np.testing.assert_allclose(got, np.where(mask, full, 0), rtol=1e-6)


def test_what_a_tool_said_conditions_what_follows() -> None:
  """Response [5, (tool) 9, 7]: 7 is predicted by what follows 9, with the tool's output in between.

  A bigram of distinct rows: its log-prob is in the row of 9.
  """
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(10, 10)), jnp.float32)
  prompts, tokens = jnp.array([[1]]), jnp.array([[5, 9, 7]])
  mask = jnp.array([[True, False, True]])
  score = jax.jit(scoring.response_logprobs, static_argnums=0)
  arrays = (logits, prompts, prompts > 0, tokens, mask)
  got = score(Bigram(10), *arrays, seen=tokens > 0)[0]
  table = jax.nn.log_softmax(logits)
  np.testing.assert_allclose(got, [table[1, 5], 0.0, table[9, 7]], atol=1e-6)


GAP = np.array([[True, False, True, True], [True, True, False, False]])


@pytest.mark.parametrize(
  ("mask", "seen", "message"),
  [
    (GAP, None, r"mask must be True from index 0 on without a gap, and rows \[0\] have one"),
    (SEEN & (np.arange(4) > 0), None, r"mask must be .* rows \[0, 1\] have one"),
    (SEEN, GAP, "seen must be True from index 0 on without a gap"),
    (np.ones((2, 4), bool), SEEN, r"mask must be False where seen is, and in rows \[1\]"),
    (SEEN, SEEN[:, :3], "seen must have the shape of tokens"),
  ],
)
def test_masks_that_contradict_are_an_error(mask: Any, seen: Any, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    scoring.response_logprobs(Summing(8), ROW, *PROMPTS, TOKENS, mask, seen=seen)


def test_after_a_gap_and_beyond_the_context_it_is_nan_where_nobody_can_look(
  full: jax.Array,
) -> None:
  """Row 0 has two tokens of prompt and a context of five: its last token is the sixth."""
  got = traced_score(Summing(8, context=5), SEEN, SEEN)
  np.testing.assert_allclose(got, full.at[0, 3].set(np.nan), rtol=1e-6)
  got = traced_score(Summing(8), GAP, GAP)
  np.testing.assert_allclose(got, full.at[0].set([full[0, 0], 0, np.nan, np.nan]), rtol=1e-6)
  with pytest.raises(ValueError, match="longer than the context: 6 in a row, max_length is 5"):
    scoring.response_logprobs(Summing(8, context=5), ROW, *PROMPTS, TOKENS, SEEN)


def test_narrow_prompts_do_not_wrap_the_response() -> None:
  """Id 300 in the dtype of uint8 prompts would be 44."""
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(400, 400)), jnp.float32)
  arrays = (np.ones((1, 2), bool), np.array([[300, 301]]), np.ones((1, 2), bool))
  got, want = (
    scoring.response_logprobs(Bigram(400), logits, np.array([[1, 2]], dtype), *arrays)
    for dtype in (np.uint8, np.int32)
  )
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(1, 0), (0, 2), (2,)])
def test_no_response_is_an_error(shape: tuple[int, ...]) -> None:
  tokens = jnp.zeros(shape, jnp.int32)
  with pytest.raises(ValueError, match=r"tokens must be \[B, N\] with B, N >= 1"):
    scoring.response_logprobs(Bigram(8), ROW, ONE, ONE > 0, tokens, tokens > 0)


def test_rows_on_an_explicit_mesh_are_scored_where_they_are() -> None:
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4])
  prompts = jnp.arange(8)[:, None]
  rows = jax.device_put((prompts, prompts >= 0), NamedSharding(mesh, PartitionSpec("data")))
  samples = sampling.sample(Bigram(8), ROW, *rows, seed=0, max_new_tokens=4)
  scored = scoring.response_logprobs(Bigram(8), ROW, *rows, *samples[:2])
  assert scored.sharding.shard_shape(scored.shape) == (2, 4)
  np.testing.assert_allclose(scored, samples.logprobs, atol=1e-6)
  for where in (rows, (prompts, prompts >= 0)):
    params = ROW if where is rows else jax.device_put(ROW, NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(ValueError, match="must not lie on an Explicit mesh: use `sample`"):
      sampling.stream(Bigram(8), params, *where, seed=0, max_new_tokens=4)
