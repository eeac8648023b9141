"""Sampling: what is drawn, what its log-prob is, when it ends, and that only the seed decides."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxrl_lm as rl
from experiments.harness.run import data_path
from jaxrl_lm.lm import decoding, policy, pretrained, sampling, scoring
from tests.bigram import Bigram

ROWS, LONGEST = 8, 12
STOPS = (3, 4)
SIZES = policy.PolicyConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=32,
  num_layers=1,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  max_length=32,
)
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11, 3], [12, 13, 14], [15], [16, 17]]


@pytest.fixture(scope="module")
def network() -> tuple[Any, Any]:
  """A transformer whose next token depends on all before it, not nearly uniform."""
  model, _ = policy.abstract_params(SIZES)
  params = jax.jit(lambda key: policy.init(SIZES, key)[1])(jax.random.key(0))
  return model, jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)


@pytest.fixture(scope="module")
def left() -> tuple[jax.Array, jax.Array]:
  return sampling.pad_prompts(PROMPTS, length=5)


draw = partial(sampling.sample, seed=1, max_new_tokens=LONGEST, stop_tokens=STOPS, temperature=0.7)
score = jax.jit(scoring.response_logprobs, static_argnums=0)


@pytest.fixture(scope="module")
def drawn(network: Any, left: Any) -> sampling.Samples:
  samples = draw(*network, *left)
  # Some have ended, some not, at different lengths: the tests below need them all.
  assert 0 < samples.finished.sum() < ROWS
  assert len(set(rl.lengths(samples.mask).tolist())) > 3
  return samples


# ------------------------------------------------------------------------------- what is drawn


def bigram(logits: Any, rows: int = 4096) -> tuple[Any, ...]:
  """A model that draws every token from softmax(logits), and prompts for it."""
  logits = jnp.asarray(logits)
  params = jnp.broadcast_to(logits[None], (logits.size, logits.size))
  prompts = jnp.zeros((rows, 1), jnp.int32)
  return Bigram(logits.size), params, prompts, prompts == 0


LOGITS = np.log([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])


@pytest.mark.parametrize(
  ("options", "kept"),
  [
    pytest.param({"temperature": 0.5}, 6, marks=pytest.mark.slow),
    pytest.param({"temperature": 2.0, "top_k": 3}, 3, marks=pytest.mark.slow),
    pytest.param({"top_p": 0.7}, 3, marks=pytest.mark.slow),  # .4 + .25 < .7 <= .8
    pytest.param({"min_p": 0.3}, 3, marks=pytest.mark.slow),  # .15 >= .12 > .1
    # At T = .5 the first four are .16, .0625, .0225, .01 of .2551; top-p .8 of those keeps two.
    ({"temperature": 0.5, "top_k": 4, "top_p": 0.8}, 2),
  ],
)
def test_the_frequencies_are_those_of_the_log_probs(options: dict[str, Any], kept: int) -> None:
  samples = sampling.sample(*bigram(LOGITS), seed=0, max_new_tokens=4, **options)
  scaled = LOGITS / options.get("temperature", 1.0)
  untruncated = scaled - np.log(np.exp(scaled).sum())
  log_mass = np.log(np.exp(untruncated[:kept]).sum())
  tokens = np.asarray(samples.tokens)
  assert tokens.max() < kept
  np.testing.assert_allclose(samples.untruncated_logprobs, untruncated[tokens], rtol=1e-5)
  np.testing.assert_allclose(samples.logprobs, (untruncated - log_mass)[tokens], atol=1e-5)
  p = np.exp(untruncated[:kept] - log_mass)
  counts = np.bincount(tokens.ravel(), minlength=kept)
  error = np.sqrt(p * (1 - p) * tokens.size)
  assert np.all(np.abs(counts - p * tokens.size) < 4 * error)


@pytest.mark.parametrize("size", [decoding.BLOCK, 300])
def test_tokens_of_every_block_come_as_often_as_their_probability(size: int) -> None:
  """Pearson's statistic over all tokens; the impossible ones, a whole block of them too, never."""
  draws = 40_000
  logits = 2.0 * jax.random.normal(jax.random.key(1), (size,))
  if size == 300:
    logits = logits.at[128:256].set(-jnp.inf).at[7].set(-jnp.inf)
  keys = jax.random.split(jax.random.key(2), draws)
  tokens = jax.jit(jax.vmap(decoding._categorical, (0, None)))(keys, logits)
  expected = draws * np.asarray(jax.nn.softmax(logits), np.float64)
  counts = np.bincount(tokens, minlength=size)
  assert counts.shape == (size,)
  assert not counts[expected == 0].any()
  many = expected > 5
  counts, expected = (np.append(x[many], x[~many].sum()) for x in (counts, expected))
  freedom = len(counts) - 1
  statistic = np.sum((counts - expected) ** 2 / np.maximum(expected, 1e-9))
  assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.slow
def test_neighbouring_tokens_rows_and_steps_are_independent() -> None:
  """Of two uniform tokens out of four, 1/4 agree."""
  calls = [
    sampling.sample(*bigram(np.zeros(4)), seed=0, step=step, max_new_tokens=4).tokens
    for step in (0, 1)
  ]
  tokens, later = (np.asarray(x) for x in calls)
  for a, b in (
    (tokens[:, :-1], tokens[:, 1:]),
    (tokens[:-1], tokens[1:]),
    (tokens, later),
    (tokens[:, 1:], later[:, :-1]),
  ):
    assert abs((a == b).mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / a.size)


def test_greedy_takes_the_first_of_the_likeliest_and_draws_nothing() -> None:
  model, params, prompts, mask = bigram([0.0, 2.0, 2.0, 1.0], rows=2)
  for options in ({}, {"top_k": 1}, {"top_p": 0.1, "min_p": 0.9}):
    samples = sampling.sample(
      model, params, prompts, mask, seed=0, max_new_tokens=4, temperature=0, **options
    )
    assert (samples.tokens == 1).all()
    np.testing.assert_array_equal(samples.logprobs, 0.0)
    want = 2 - np.log(1 + 2 * np.exp(2) + np.exp(1))
    np.testing.assert_allclose(samples.untruncated_logprobs, want, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.0}])
def test_the_narrowest_truncation_is_greedy_and_certain(options: dict[str, Any]) -> None:
  samples = sampling.sample(
    *bigram([0.0, 2.0, 2.0, 1.0], rows=4), seed=0, max_new_tokens=4, **options
  )
  assert (samples.tokens == 1).all()
  np.testing.assert_allclose(samples.logprobs, 0.0, atol=1e-6)


# ------------------------------------------------------------------------------ when it ends


def test_a_response_ends_with_the_first_stop_token(drawn: sampling.Samples) -> None:
  np.testing.assert_array_equal(drawn.mask, rl.response_mask(drawn.tokens, stop_tokens=STOPS))
  np.testing.assert_array_equal(drawn.finished, rl.is_finished(drawn.tokens, stop_tokens=STOPS))
  for x in (drawn.tokens, drawn.logprobs, drawn.untruncated_logprobs):
    assert not np.asarray(x)[~np.asarray(drawn.mask)].any()
  np.testing.assert_array_equal(np.asarray(drawn.logprobs) < 0, drawn.mask)


def test_padding_may_be_any_id_and_changes_no_token(
  network: Any, left: Any, drawn: sampling.Samples
) -> None:
  padded = draw(*network, *left, pad_id=STOPS[0])
  np.testing.assert_array_equal(padded.tokens, jnp.where(drawn.mask, drawn.tokens, STOPS[0]))
  np.testing.assert_array_equal(padded.mask, drawn.mask)


def test_without_a_stop_token_every_response_is_full_and_unfinished() -> None:
  samples = sampling.sample(*bigram(LOGITS), seed=0, max_new_tokens=4)
  assert samples.mask.all()
  assert not samples.finished.any()


def test_the_loop_ends_when_all_rows_have() -> None:
  """0 -> 1 -> 2 -> 3: three tokens, of which two are read."""
  params = 50.0 * jnp.eye(4, k=1)
  model, prompts = Bigram(4), jnp.zeros((2, 1), jnp.int32)
  rule = sampling._rule(model, 2, 0, 0, None, 1.0, None, 1.0, 0.0, (3,), 0)
  state = decoding.prefill(model, params, prompts, prompts == 0, rule, max_new_tokens=50)
  cache, progress = decoding.decode(model, params, *state, rule, jnp.int32(50))
  assert (int(progress.drawn), int(cache)) == (3, 1 + 2)
  assert progress.samples.tokens[:, :4].tolist() == [[1, 2, 3, 0]] * 2


@pytest.mark.slow
def test_a_stream_gives_the_same_tokens_as_they_come() -> None:
  """Uniform over 8 tokens of which one ends the response."""
  model, params, prompts, mask = bigram(np.zeros(8), rows=4)
  options = {"seed": 3, "max_new_tokens": 12, "stop_tokens": (3,)}
  whole = sampling.sample(model, params, prompts, mask, **options)
  parts = list(sampling.stream(model, params, prompts, mask, chunk=5, **options))
  # After 1, 6, 11 and all 12 tokens; what was yielded first is still there.
  assert [int(rl.lengths(part.mask).max()) for part in parts] == [1, 6, 11, 12]
  for part in parts:
    np.testing.assert_array_equal(part.tokens, jnp.where(part.mask, whole.tokens, 0))
  for got, want in zip(parts[-1], whole, strict=True):
    np.testing.assert_allclose(got, want, atol=1e-6)


# ---------------------------------------------------------------------- only the seed decides


def test_a_row_draws_the_same_in_any_batch(
  drawn: sampling.Samples, network: Any, left: Any
) -> None:
  """Rows 6, 1, 3 and 4 alone, in this order, with the numbers that they have in the whole."""
  rows = np.array([6, 1, 3, 4])
  prompts, mask = (x[rows] for x in left)
  part = draw(*network, prompts, mask, row_ids=rows)
  np.testing.assert_array_equal(part.tokens, drawn.tokens[rows])
  np.testing.assert_allclose(part.logprobs, drawn.logprobs[rows], atol=1e-5)


def test_the_same_call_is_the_same_and_another_is_not(
  network: Any, left: Any, drawn: sampling.Samples
) -> None:
  again = draw(*network, *left)
  np.testing.assert_array_equal(again.tokens, drawn.tokens)
  for other in ({"seed": 6}, {"step": 1}, {"row_ids": np.arange(ROWS) + ROWS}):
    assert (draw(*network, *left, **other).tokens != drawn.tokens).any(axis=-1).sum() >= ROWS - 1


@pytest.mark.parametrize(
  ("devices", "axis_type"),
  [
    pytest.param(n, kind, marks=() if (n, kind) == (8, AxisType.Auto) else pytest.mark.slow)
    for n in (1, 2, 4, 8)
    for kind in (AxisType.Auto, AxisType.Explicit)
  ],
)
def test_any_number_of_devices_draws_the_same(
  network: Any, left: Any, drawn: sampling.Samples, devices: int, axis_type: AxisType
) -> None:
  mesh = jax.make_mesh((devices,), ("data",), (axis_type,), devices=jax.devices()[:devices])
  model, params = network
  with jax.set_mesh(mesh):
    rows = jax.device_put(left, NamedSharding(mesh, PartitionSpec("data")))
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    samples = draw(model, params, *rows)
  assert samples.tokens.sharding.shard_shape(samples.tokens.shape) == (ROWS // devices, LONGEST)
  for name in ("tokens", "mask", "finished"):
    np.testing.assert_array_equal(getattr(samples, name), getattr(drawn, name))
  np.testing.assert_allclose(samples.logprobs, drawn.logprobs, atol=1e-5)


# ------------------------------------------------------------------------ prompts and the scorer


def right_padded(prompts: jax.Array, mask: jax.Array, pad: int) -> tuple[jax.Array, jax.Array]:
  lengths = rl.lengths(mask)
  rows = [np.roll(row, n) for row, n in zip(np.asarray(prompts), lengths.tolist())]
  mask = jnp.arange(prompts.shape[1])[None] < lengths[:, None]
  return jnp.where(mask, jnp.array(rows), pad), mask


@pytest.mark.parametrize("pad", [0, 31, -100])
def test_the_side_of_the_padding_and_what_stands_there_change_nothing(
  network: Any, left: Any, drawn: sampling.Samples, pad: int
) -> None:
  prompts, mask = right_padded(*left, pad)
  samples = draw(*network, prompts, mask)
  np.testing.assert_array_equal(samples.tokens, drawn.tokens)
  np.testing.assert_allclose(samples.logprobs, drawn.logprobs, atol=1e-5)


@pytest.mark.slow
def test_the_bucket_changes_nothing(network: Any, drawn: sampling.Samples) -> None:
  samples = draw(*network, *sampling.pad_prompts(PROMPTS))  # 16 wide instead of 5
  np.testing.assert_array_equal(samples.tokens, drawn.tokens)
  alone = draw(*network, *sampling.pad_prompts(PROMPTS[3:4], length=4), row_ids=np.array([3]))
  np.testing.assert_array_equal(alone.tokens[0], drawn.tokens[3])


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_on_policy_ratio_through_sampler_and_scorer_is_1(
  network: Any, left: Any, drawn: sampling.Samples, side: str
) -> None:
  prompts, mask = left if side == "left" else right_padded(*left, 0)
  dirty = jnp.where(drawn.mask, drawn.tokens, -100)
  scored = score(*network, prompts, mask, dirty, drawn.mask, temperature=0.7)
  ratio = jnp.exp(rl.token_log_ratio(scored, drawn.logprobs, drawn.mask))
  np.testing.assert_allclose(ratio, 1.0, atol=1e-5)
  unscaled = score(*network, prompts, mask, dirty, drawn.mask, temperature=1.0)
  assert jnp.abs(rl.token_log_ratio(unscaled, drawn.logprobs, drawn.mask)).max() > 0.1


def test_the_scorer_is_the_full_forward_shifted_once(
  network: Any, left: Any, drawn: sampling.Samples
) -> None:
  """Left-padded prompts and responses in one row, through `next_token_logprobs`."""
  model, params = network
  tokens = jnp.concatenate([left[0], drawn.tokens], axis=1)
  segments = jnp.concatenate([left[1], drawn.mask], axis=1).astype(jnp.int32)
  counted = segments * (jnp.arange(tokens.shape[1]) >= left[0].shape[1])[None]

  @jax.jit
  def full(params: Any, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    logits = model.logits(params, model.apply(params, tokens, segment_ids=segments).hidden)
    return rl.next_token_logprobs(logits, tokens, mask=counted > 0, temperature=0.7)

  want = full(params, tokens, segments)[:, left[0].shape[1] :]
  np.testing.assert_allclose(drawn.untruncated_logprobs, want, atol=1e-5)


def test_the_scorer_has_the_gradient_of_the_policy() -> None:
  """E[grad log pi] = 0, exactly, over the three tokens of a bigram; no token's own is 0."""
  model, logits = Bigram(3), jnp.array([[0.1, 0.5, -0.3], [0.0, 1.0, 0.2], [0.4, 0.0, 0.0]])
  prompts, tokens = jnp.zeros((3, 1), jnp.int32), jnp.arange(3)[:, None]
  on = prompts == 0
  score = jax.jit(
    jax.jacrev(lambda x: scoring.response_logprobs(model, x, prompts, on, tokens, on))
  )
  scores = score(logits)[:, 0]
  np.testing.assert_allclose(jnp.tensordot(jax.nn.softmax(logits[0]), scores, 1), 0.0, atol=1e-6)
  assert jnp.all(jnp.abs(scores[:, 0]) > 0.1)
  np.testing.assert_array_equal(scores[:, 1:], 0.0)


def test_lengths_share_compilations() -> None:
  """Prompts of 1 to 32 tokens: two widths, 16 and 32. Values of the constants: one."""
  widths = {sampling.pad_prompts([[1] * n])[0].shape[1] for n in range(1, 33)}
  assert widths == {16, 32}
  model, params = Bigram(4), jnp.zeros((4, 4))
  before = sampling._sample._cache_size()
  for n, temperature in ((1, 1.0), (3, 0.7), (9, 2), (14, np.float32(1)), (16, jnp.float32(0.5))):
    sampling.sample(
      model,
      params,
      *sampling.pad_prompts([[1] * n]),
      seed=n,
      step=n,
      max_new_tokens=2,
      temperature=temperature,
    )
  assert sampling._sample._cache_size() == before + 1


def test_prompts_are_padded_on_the_left() -> None:
  tokens, mask = sampling.pad_prompts([[1, 2], [3]], pad_id=7, length=3)
  assert tokens.tolist() == [[7, 1, 2], [7, 7, 3]]
  assert mask.tolist() == [[False, True, True], [False, False, True]]
  assert tokens.dtype == jnp.int32


# ---------------------------------------------------------------------------------- bad input

GOOD: dict[str, Any] = {
  "prompts": jnp.array([[1, 2]]),
  "prompt_mask": jnp.array([[True, True]]),
  "seed": 0,
  "max_new_tokens": 4,
}


@pytest.mark.parametrize(
  ("bad", "message"),
  [
    ({"temperature": -1.0}, "temperature must lie in"),
    ({"temperature": float("nan")}, "temperature must lie in"),
    ({"top_p": 1.1}, "top_p must lie in"),
    ({"top_p": -0.1}, "top_p must lie in"),
    ({"min_p": 2.0}, "min_p must lie in"),
    ({"top_k": 0}, "top_k must lie in"),
    ({"top_k": 5}, r"top_k must lie in \[1, 4\], got 5"),
    ({"max_new_tokens": 0}, "max_new_tokens must lie in"),
    ({"stop_tokens": (1, 4)}, r"stop_tokens must lie in the vocabulary \[0, 4\), got \[4\]"),
    ({"stop_tokens": -1}, "stop_tokens must lie in the vocabulary"),
    ({"pad_id": -100}, "pad_id must lie in the vocabulary"),
    ({"prompts": jnp.array([[1, 4]])}, r"prompts must lie in the vocabulary \[0, 4\), got \[4\]"),
    ({"prompts": jnp.zeros((0, 2), int), "prompt_mask": jnp.zeros((0, 2), bool)}, "B, P >= 1"),
    ({"prompts": jnp.zeros((1, 0), int), "prompt_mask": jnp.zeros((1, 0), bool)}, "B, P >= 1"),
    ({"prompts": jnp.array([1, 2]), "prompt_mask": jnp.array([True, True])}, "must be"),
    ({"prompt_mask": jnp.array([[False, False]])}, r"at least one token .* none: \[0\]"),
    ({"prompt_mask": jnp.array([[True]])}, "prompt_mask must have the shape of prompts"),
    ({"max_new_tokens": 9}, "context of 10; it leaves room for 8 new tokens"),
    ({"row_ids": np.array([0, 1])}, "row_ids must be one per prompt"),
  ],
)
def test_what_is_wrong_is_an_error_that_says_so(bad: dict[str, Any], message: str) -> None:
  arguments = GOOD | bad
  with pytest.raises(ValueError, match=message):
    sampling.sample(Bigram(4, context=10), jnp.zeros((4, 4)), **arguments)


def test_rows_of_the_same_id_are_an_error() -> None:
  two = {"prompts": jnp.ones((2, 1), int), "prompt_mask": jnp.ones((2, 1), bool)}
  with pytest.raises(ValueError, match="row_ids must differ"):
    sampling.sample(Bigram(4), jnp.zeros((4, 4)), **GOOD | two, row_ids=np.array([1, 1]))


@pytest.mark.parametrize(
  ("prompts", "options", "error", "message"),
  [
    ([], {}, ValueError, "at least one prompt"),
    ([[1], []], {}, ValueError, r"must not be empty, and these are: \[1\]"),
    ([[1, 2, 3]], {"length": 2}, ValueError, "longest prompt, 3, got 2"),
    (["once upon"], {}, TypeError, "encode it first"),
    ("once upon", {}, TypeError, "encode it first"),
    ([[0.5]], {}, TypeError, "integer"),
  ],
)
def test_prompts_that_cannot_be_padded(
  prompts: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
  with pytest.raises(error, match=message):
    sampling.pad_prompts(prompts, **options)


# ------------------------------------------------------------------------------- a real model

STORIES = data_path("stories260K/stories260K.bin")


@pytest.fixture(scope="module")
def stories() -> tuple[Any, Any, Any, sampling.Samples]:
  """256 stories of up to 400 tokens at T = 1; they end with BOS."""
  if STORIES is None:
    pytest.skip("stories260K not found (set JAXRL_LM_DATA)")
  model, params, tokenizer = pretrained.load(STORIES)
  prompts = jnp.array([tokenizer.encode("Once upon a time")] * 256)
  samples = sampling.sample(
    model,
    params,
    prompts,
    prompts >= 0,
    seed=0,
    max_new_tokens=400,
    stop_tokens=tokenizer.eos_ids,
  )
  return model, params, prompts, samples


@pytest.mark.slow
def test_stories260k_tells_what_it_is_known_to_tell(stories: Any) -> None:
  """Dog in 16 % of the stories, happy 48 %, fish 2 %; 66 % have ended, 14 % by 256 tokens.

  The known shares are of 64 stories (10, 31, 1, 42 and 9 of them): four standard errors of the
  difference of two samples, and the same for the mean log-prob per token, -1.28.
  """
  *_, samples = stories
  tokenizer = pretrained.load(STORIES).tokenizer
  rows = [row[on].tolist() for row, on in zip(*map(np.asarray, samples[:2]), strict=True)]
  texts = [tokenizer.decode(row) for row in rows]
  found = {word: np.mean([word in text for text in texts]) for word in ("dog", "happy", "fish")}
  finished = np.asarray(samples.finished)
  found |= {"ended": finished.mean()}
  found |= {"by 256": (finished & (np.asarray(rl.lengths(samples.mask)) <= 256)).mean()}
  known = {"dog": 10, "happy": 31, "fish": 1, "ended": 42, "by 256": 9}
  inverse = 1 / len(rows) + 1 / 64
  for name, count in known.items():
    pooled = (found[name] * len(rows) + count) / (len(rows) + 64)
    error = np.sqrt(pooled * (1 - pooled) * inverse)
    assert abs(found[name] - count / 64) < 4 * error, (name, found[name])
  means = rl.mean_logprob(samples.logprobs, samples.mask)
  mean = float(samples.logprobs.sum() / samples.mask.sum())
  assert abs(mean + 1.28) < 4 * float(means.std()) * np.sqrt(inverse), mean


@pytest.mark.slow
def test_a_real_model_is_sampled_without_bias_and_its_ratio_is_1(stories: Any) -> None:
  """E[log pi(y_t) + H_t] = 0 token by token, so its sum over 80,000 of them is a few deviations.

  A draw that prefers likely or unlikely tokens by a thousandth of a nat would show.
  """
  model, params, prompts, samples = stories

  @jax.jit
  def scored(params: Any, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
    both = jnp.concatenate([prompts[: len(tokens)], tokens], axis=1)
    segments = jnp.concatenate([prompts[: len(tokens)] >= 0, mask], axis=1).astype(jnp.int32)
    hidden = model.apply(params, both, segment_ids=segments).hidden
    logp = jax.nn.log_softmax(model.logits(params, hidden)[:, prompts.shape[1] - 1 : -1])
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    variance = jnp.sum(jnp.exp(logp) * logp**2, axis=-1) - entropy**2
    chosen = jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]
    return tuple(jnp.where(mask, x, 0.0) for x in (chosen, entropy, variance))

  parts = [scored(params, *(x[i : i + 64] for x in samples[:2])) for i in range(0, 256, 64)]
  chosen, entropy, variance = (np.concatenate(x).astype(np.float64) for x in zip(*parts))
  assert abs(np.sum(chosen + entropy)) < 4 * np.sqrt(np.sum(variance))
  np.testing.assert_allclose(np.exp(chosen - samples.logprobs), 1.0, atol=1e-4)
