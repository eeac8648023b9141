"""Log-probs from hidden states against logits in memory: value, gradient, hard input, memory."""

import math
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from jaxrl_lm import vocabulary_statistics
from jaxrl_lm.vocabulary_tiles import Head, Tokens

STATISTICS = rl.TokenStats._fields


def make(shape, width, vocabulary, seed=0, dtype=np.float32):
  """Hidden states, unembedding, bias, tokens and mask; garbage where the mask is False."""
  rng = np.random.default_rng(seed)
  mask = rng.random(shape) < 0.8
  hidden = np.where(mask[..., None], rng.normal(size=(*shape, width)), np.nan).astype(dtype)
  tokens = np.where(mask, rng.integers(0, vocabulary, shape), -(2**31) + 5).astype(np.int32)
  unembedding = rng.normal(size=(vocabulary, width)).astype(dtype)
  bias = rng.normal(size=vocabulary).astype(dtype)
  return tuple(map(jnp.asarray, (hidden, unembedding, bias, tokens, mask)))


def in_memory(
  hidden, unembedding, bias, tokens, mask, *, temperature=1.0, softcap=None, valid=None
):
  """The statistics from logits, by the functions of `logprobs`."""
  logits = jnp.where(mask[..., None], hidden, 0) @ unembedding.T
  logits += bias.reshape((1,) * tokens.ndim + (-1,))
  if softcap is not None:
    logits = softcap * jnp.tanh(logits / softcap)
  logits = logits[..., :valid]
  scaled = logits / temperature
  p = jax.nn.softmax(scaled)
  counted = partial(jnp.where, mask)
  # Not jnp.max: under jit its gradient can miss the maximum, which is computed twice.
  chosen = jnp.argmax(scaled, axis=-1, keepdims=True)
  best = jnp.take_along_axis(jax.nn.log_softmax(scaled), chosen, axis=-1)
  return rl.TokenStats(
    logprobs=rl.token_logprobs(logits, tokens, mask=mask, temperature=temperature),
    log_normalizer=counted(jax.nn.logsumexp(scaled, axis=-1), 0.0),
    entropy=rl.token_entropy(logits, mask=mask, temperature=temperature),
    sum_squares=counted(jnp.sum(jnp.square(p), axis=-1), 0.0),
    best_logprob=counted(best[..., 0], 0.0),
  )


def swept(hidden, unembedding, bias, tokens, mask, *, valid=None, **rest):
  return rl.linear_token_stats(
    hidden, unembedding, tokens, mask=mask, bias=bias, valid_vocab=valid, **rest
  )


def weighted(function, weights, hidden, unembedding, bias, tokens, mask, **rest):
  stats = function(hidden, unembedding, bias, tokens, mask, **rest)
  return sum(jnp.sum(w * x) for w, x in zip(weights, stats)), stats


def assert_same(arguments, *, budget, only=None, rtol=2e-5, **rest):
  """Values and gradients of all statistics (or one), tile by tile and in memory."""
  hidden, unembedding, bias, tokens, mask = arguments
  rng = np.random.default_rng(9)
  weights = [jnp.asarray(rng.normal(size=mask.shape), hidden.dtype) for _ in STATISTICS]
  if only is not None:
    weights = [w * (name == only) for w, name in zip(weights, STATISTICS)]
  gradient = partial(jax.grad, argnums=(1, 2, 3), has_aux=True)
  ours = jax.jit(gradient(partial(weighted, partial(swept, memory_budget=budget, **rest))))
  clean = jnp.where(mask[..., None], hidden, 0)
  want = jax.jit(gradient(partial(weighted, partial(in_memory, **rest))))(
    weights, clean, unembedding, bias, tokens, mask
  )
  got = ours(weights, *arguments)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, atol=rtol * (1e-30 + float(jnp.max(jnp.abs(b)))), rtol=0)
  # Not one bit of what is masked.
  assert not np.any(np.asarray(got[0][0])[~np.asarray(mask)])
  for x in got[1]:
    assert not np.any(np.asarray(x)[~np.asarray(mask)])


@pytest.mark.parametrize(
  ("shape", "width", "vocabulary", "budget", "rest"),
  [
    pytest.param((3, 7), 4, 37, 3 * 4 * 4 * 5, {}, id="ragged-both-ways"),
    pytest.param(
      (2, 5), 3, 300, 3 * 4 * 3 * 130, {"softcap": 3.0, "temperature": 0.7, "valid": 290}, id="all"
    ),
    pytest.param((1, 1), 1, 2, 2**20, {"temperature": 3.0}, id="one-token"),
    pytest.param((2, 2, 2), 2, 5, 1, {"valid": 3}, id="tiles-of-one-logit"),
  ],
)
def test_statistics_and_gradients_equal_those_of_logits_in_memory(
  shape, width, vocabulary, budget, rest
):
  arguments = make(shape, width, rest.get("valid", vocabulary))
  more = make(shape, width, vocabulary)
  assert_same((arguments[0], more[1], more[2], *arguments[3:]), budget=budget, **rest)


@pytest.mark.slow
@pytest.mark.parametrize("only", STATISTICS)
def test_each_gradient(only):
  assert_same(make((3, 7), 4, 37), budget=3 * 4 * 4 * 5, only=only, temperature=0.7)


@pytest.mark.slow
@hypothesis.settings(max_examples=12)
@hypothesis.given(
  count=st.integers(1, 40),
  width=st.integers(1, 9),
  vocabulary=st.integers(2, 700),
  budget=st.sampled_from([1, 100, 1000, 10_000, 2**26]),
  temperature=st.sampled_from([1.0, 0.5, 2.0]),
  softcap=st.sampled_from([None, 5.0]),
  seed=st.integers(0, 99),
)
def test_any_shape(count, width, vocabulary, budget, temperature, softcap, seed):
  arguments = make((count,), width, vocabulary, seed)
  rest = {"temperature": temperature, "softcap": softcap}
  assert_same(arguments, budget=budget, rtol=5e-5, **rest)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_error_against_float64_at_a_real_vocabulary(dtype):
  """1e-5 in a log-prob and 5e-5 in an entropy; of bfloat16 inputs, those inputs are the truth."""
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(rng.normal(size=(64, 64)), dtype)
  unembedding = jnp.asarray(rng.normal(size=(151_936, 64)) / 4, dtype)
  tokens = jnp.asarray(rng.integers(0, 151_936, 64))
  z = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64).T
  logprobs = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
  stats = jax.jit(rl.linear_token_stats)(hidden, unembedding, tokens)
  assert stats.logprobs.dtype == jnp.float32
  np.testing.assert_allclose(stats.logprobs, logprobs[np.arange(64), tokens], atol=1e-5, rtol=0)
  np.testing.assert_allclose(
    stats.entropy, -np.sum(np.exp(logprobs) * logprobs, axis=1), atol=5e-5, rtol=0
  )


def test_float64_stays(x64):
  arguments = make((2, 3), 3, 11, dtype=np.float64)
  assert_same(arguments, budget=3 * 8 * 2 * 4, rtol=1e-13, temperature=0.7)


def test_gradients_have_the_dtypes_of_the_inputs():
  hidden, unembedding = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((5, 3), jnp.float16)
  loss = lambda h, w: jnp.sum(rl.linear_token_logprobs(h, w, jnp.array([0, 4])))
  slope = jax.grad(loss, argnums=(0, 1))(hidden, unembedding)
  assert [x.dtype for x in slope] == [jnp.bfloat16, jnp.float16]


def head(logits):
  """Hidden states and unembedding that give these logits, [N, V]."""
  logits = jnp.asarray(logits, jnp.float32)
  return jnp.eye(len(logits)), logits.T


@pytest.mark.parametrize("valid", [3, None])
def test_rows_beyond_the_valid_vocabulary_are_nothing(valid):
  """Logits 2, 1, 0, pad: log softmax of the first is -.4076; with a pad of 0, -.4938."""
  hidden, unembedding = head([[2.0, 1.0, 0.0, 0.0]])
  score = rl.linear_token_logprobs(hidden, unembedding, jnp.array([0]), valid_vocab=valid)
  np.testing.assert_allclose(score, -0.407606 if valid else -0.493812, atol=1e-6)


def test_garbage_beyond_the_valid_vocabulary():
  hidden, unembedding = head([[2.0, 1.0, 0.0, jnp.nan]])
  loss = lambda h, w: rl.linear_token_logprobs(h, w, jnp.array([0]), valid_vocab=3)[0]
  value, slopes = jax.value_and_grad(loss, argnums=(0, 1))(hidden, unembedding)
  np.testing.assert_allclose(value, -0.407606, atol=1e-6)
  assert np.all(np.isfinite(slopes[0]))
  np.testing.assert_allclose(slopes[1][:, 0], [0.334759, -0.244728, -0.090031, 0.0], atol=1e-6)


def test_tokens_that_do_not_exist():
  """NaN, never another token's log-prob, and no gradient; at masked positions nothing."""
  hidden, unembedding = head(np.zeros((4, 4)))
  tokens, mask = jnp.array([4, -1, 7, 2]), jnp.array([True, True, False, True])
  loss = lambda h: rl.linear_token_logprobs(h, unembedding, tokens, mask=mask)
  scores, pull = jax.vjp(loss, hidden)
  np.testing.assert_array_equal(np.isnan(scores), [True, True, False, False])
  np.testing.assert_allclose(scores[2:], [0.0, -math.log(4)], rtol=1e-6)
  assert np.all(np.isfinite(pull(jnp.ones(4))[0]))
  narrow = rl.linear_token_logprobs(jnp.zeros((1, 1)), jnp.zeros((300, 1)), jnp.uint8([200]))
  np.testing.assert_allclose(narrow, -math.log(300), rtol=1e-6)


def test_excluded_tokens():
  """A bias of -inf: probability 0, in value and gradient; all of them, at a masked position."""
  hidden, unembedding = head([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
  bias, tokens = jnp.array([0.0, 0.0, -jnp.inf]), jnp.array([0, 2])

  def total(hidden, unembedding, bias):
    stats = rl.linear_token_stats(hidden, unembedding, tokens, bias=bias, memory_budget=12)
    return jnp.sum(stats.logprobs[:1]) + jnp.sum(stats.entropy) + jnp.sum(stats.sum_squares), stats

  slopes, stats = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(hidden, unembedding, bias)
  np.testing.assert_allclose(stats.logprobs, [-math.log(2), -np.inf], rtol=1e-6)
  np.testing.assert_allclose(stats.entropy, [math.log(2)] * 2, rtol=1e-6)
  assert all(np.all(np.isfinite(x)) for x in slopes)
  np.testing.assert_allclose(slopes[2], [0.5, -0.5, 0.0], atol=1e-6)

  nothing = jnp.full(3, -jnp.inf)
  mask = jnp.array([False, False])
  loss = lambda h, w: jnp.sum(rl.linear_token_stats(h, w, tokens, bias=nothing, mask=mask).entropy)
  value, slopes = jax.value_and_grad(loss, argnums=(0, 1))(hidden, unembedding)
  assert value == 0
  assert not any(np.any(x) for x in slopes)


def test_softcap():
  """Logits 90, 60 at a cap of 30: 30 tanh(3), 30 tanh(2), so -.332344 and -1.263159.

  Without the cap 0 and -30; with the cap's derivative left out, a gradient of .717 for .007.
  unslothai/unsloth-zoo#593.
  """
  hidden, unembedding = head([[90.0, 60.0], [90.0, 60.0]])
  loss = lambda h: rl.linear_token_logprobs(h, unembedding, jnp.array([0, 1]), softcap=30.0)
  scores, pull = jax.vjp(loss, hidden)
  np.testing.assert_allclose(scores, [-0.332344, -1.263159], atol=1e-5)
  capped = lambda z: rl.token_logprobs(30.0 * jnp.tanh(z / 30.0), jnp.array([0, 1]))
  slopes = jax.vjp(capped, hidden @ unembedding.T)[1](jnp.ones(2))[0]
  np.testing.assert_allclose(pull(jnp.ones(2))[0], slopes @ unembedding, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1e-3, 1e3])
def test_extreme_temperatures(temperature):
  hidden, unembedding = head([[2.0, 1.0, 0.0]])
  score = partial(rl.linear_token_logprobs, tokens=jnp.array([1]), temperature=temperature)
  value, slope = jax.value_and_grad(lambda h: score(h, unembedding)[0])(hidden)
  want = rl.token_logprobs(unembedding.T, jnp.array([1]), temperature=temperature)
  np.testing.assert_allclose(value, want[0], rtol=1e-6)
  assert np.all(np.isfinite(slope))


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_large_logits(scale):
  """A large offset costs no digits; the gradient stays that of a hard choice."""
  hidden, unembedding = head([[scale, scale, 0.0]])
  loss = lambda h: rl.linear_token_logprobs(h, unembedding, jnp.array([0]))[0]
  value, slope = jax.value_and_grad(loss)(hidden)
  np.testing.assert_allclose(value, -math.log(2), rtol=1e-6)
  assert np.all(np.isfinite(slope))


@pytest.mark.parametrize("count", [0, 1])
def test_no_token_and_one(count):
  loss = lambda h, w: jnp.sum(rl.linear_token_stats(h, w, jnp.zeros(count, int)).entropy)
  value, slopes = jax.value_and_grad(loss, argnums=(0, 1))(jnp.ones((count, 2)), jnp.ones((3, 2)))
  np.testing.assert_allclose(value, count * math.log(3), rtol=1e-6)
  assert slopes[0].shape == (count, 2)
  assert not np.any(slopes[1])


def test_mask_is_not_looked_behind():
  """Infinite hidden states and any token at masked positions: not one bit changes."""
  hidden, unembedding, bias, tokens, mask = make((4, 3), 2, 9)
  loss = lambda h, y: jnp.sum(
    rl.linear_token_stats(h, unembedding, y, mask=mask, bias=bias).entropy
    + rl.linear_token_logprobs(h, unembedding, y, mask=mask)
  )
  gradient = jax.jit(jax.value_and_grad(loss))
  want = gradient(jnp.where(mask[..., None], hidden, 0), jnp.where(mask, tokens, 0))
  got = gradient(jnp.where(mask[..., None], hidden, jnp.inf), jnp.where(mask, tokens, -100))
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_vmap_and_scan_equal_the_batch():
  hidden, unembedding, bias, tokens, mask = make((3, 4), 2, 9)
  score = lambda h, y, m: rl.linear_token_logprobs(
    h, unembedding, y, mask=m, bias=bias, memory_budget=3 * 4 * 2 * 4
  )
  want = score(hidden, tokens, mask)
  np.testing.assert_allclose(jax.vmap(score)(hidden, tokens, mask), want, rtol=1e-6, atol=1e-7)
  scanned = jax.lax.scan(lambda _, x: (None, score(*x)), None, (hidden, tokens, mask))[1]
  np.testing.assert_allclose(scanned, want, rtol=1e-6, atol=1e-7)


def test_temperature_and_cap_may_be_traced():
  hidden, unembedding, _, tokens, mask = make((2, 3), 2, 9)
  score = partial(rl.linear_token_logprobs, hidden, unembedding, tokens, mask=mask)
  both = jax.vmap(lambda t, c: score(temperature=t, softcap=c))
  got = both(jnp.array([0.5, 2.0]), jnp.array([3.0, 5.0]))
  for i, (temperature, softcap) in enumerate(((0.5, 3.0), (2.0, 5.0))):
    want = score(temperature=temperature, softcap=softcap)
    np.testing.assert_allclose(got[i], want, rtol=1e-6, atol=1e-7)


HIDDEN, UNEMBEDDING, TOKENS = jnp.ones((2, 3)), jnp.ones((5, 3)), jnp.zeros(2, int)


@pytest.mark.parametrize(
  ("change", "error", "message"),
  [
    ({"unembedding": jnp.ones((5, 4))}, ValueError, r"hidden is \(2, 3\), unembedding is \(5, 4\)"),
    ({"unembedding": jnp.ones(3)}, ValueError, r"unembedding must be \[V, D\].*\(3,\)"),
    ({"tokens": jnp.zeros(3, int)}, ValueError, r"tokens is \(3,\), hidden\[..., 0\] is \(2,\)"),
    ({"tokens": jnp.zeros(2)}, TypeError, "tokens must be integer"),
    ({"mask": jnp.ones(2)}, TypeError, "mask must be boolean"),
    ({"mask": jnp.ones(3, bool)}, ValueError, r"mask is \(3,\), hidden\[..., 0\] is \(2,\)"),
    ({"bias": jnp.ones(4)}, ValueError, r"bias is \(4,\), unembedding\[:, 0\] is \(5,\)"),
    ({"temperature": 0.0}, ValueError, "temperature must lie in"),
    ({"softcap": -1.0}, ValueError, "softcap must lie in"),
    ({"valid_vocab": 0}, ValueError, "valid_vocab must lie in"),
    ({"valid_vocab": 6}, ValueError, r"valid_vocab must lie in \[1, 5\]"),
    ({"valid_vocab": 2.5}, TypeError, "valid_vocab must be integer"),
    ({"memory_budget": 0}, ValueError, "memory_budget must lie in"),
    ({"hidden": jnp.ones((2, 3), complex)}, TypeError, "hidden must hold real numbers"),
  ],
)
@pytest.mark.parametrize("function", [rl.linear_token_logprobs, rl.linear_token_stats])
def test_errors_name_the_argument(function, change, error, message):
  arguments = {"hidden": HIDDEN, "unembedding": UNEMBEDDING, "tokens": TOKENS} | change
  with pytest.raises(error, match=message):
    function(**arguments)


def temporary_bytes(count, vocabulary, function, width=64):
  shapes = (
    jax.ShapeDtypeStruct((count, width), jnp.float32),
    jax.ShapeDtypeStruct((vocabulary, width), jnp.float32),
    jax.ShapeDtypeStruct((count,), jnp.int32),
  )
  gradient = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))
  return gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_vocabulary():
  """Nor with the number of tokens, beyond what there is of each token."""
  budget = 2**20
  loss = lambda h, w, y: jnp.sum(rl.linear_token_logprobs(h, w, y, memory_budget=budget))
  small, large, long = (
    temporary_bytes(*size, loss) for size in ((4096, 8192), (4096, 65_536), (8192, 8192))
  )
  assert small < 1.5 * budget
  assert abs(large - small) < 0.1 * budget
  assert long - small < 4096 * 64 * 4
  logits = lambda h, w, y: jnp.sum(rl.token_logprobs(h @ w.T, y))
  assert small < 0.01 * temporary_bytes(4096, 8192, logits)


@pytest.mark.parametrize(
  ("total", "largest"), [(5, 9), (151_936, 5461), (1000, 130), (37, 5), (0, 7)]
)
def test_blocks_cover_an_axis(total, largest):
  size = vocabulary_statistics.block_size(total, largest)
  assert 1 <= size <= max(largest, 1)
  covered = -(-total // size) * size
  assert total <= covered < total + size
  # The overlap is a waste of work.
  assert largest < 128 or covered <= 1.03 * max(total, 1)


def test_blocks_fit_the_budget():
  tokens = Tokens(jnp.zeros((5000, 2)), jnp.zeros(5000, int), jnp.ones(5000, bool))
  matrix = Head(jnp.zeros((40_000, 2)), None, None, None, jnp.int32(0), None)
  for budget in (1, 10_000, 2**26, 2**40):
    blocks = vocabulary_statistics.choose_blocks(tokens, matrix, budget)
    assert 3 * 4 * blocks.tokens * blocks.vocabulary <= max(budget, 12)
    assert blocks.tokens <= 1024


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers_for_accelerators(platform):
  """As far as a machine without one can tell: the program is exported, not run."""
  loss = lambda h, w, y: jnp.sum(rl.linear_token_stats(h, w, y).logprobs)
  shapes = (
    jax.ShapeDtypeStruct((2048, 64), jnp.bfloat16),
    jax.ShapeDtypeStruct((50_000, 64), jnp.bfloat16),
    jax.ShapeDtypeStruct((2048,), jnp.int32),
  )
  gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  exported = jax.export.export(gradient, platforms=[platform])(*shapes)
  assert exported.platforms == (platform,)
