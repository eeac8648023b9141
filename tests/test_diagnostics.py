"""jaxrl_lm.diagnostics: goldens, masks and packing; how parts merge is in test_statistics.py."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_lm import diagnostics, loss_weights, masks, ratios

NAN, INF = float("nan"), float("inf")


def close(actual, expected, rtol=1e-6):
  np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=0)


# -- goldens -----------------------------------------------------------------------------------


def test_average_of_numbers_flags_and_lengths():
  on = jnp.array([True, True])
  close(diagnostics.average(jnp.array([2, 4]), on).mean(), 3.0)
  close(diagnostics.average(jnp.array([False, True]), on).mean(), 0.5)
  # Row 1 (4 tokens) is dropped from the loss: its length still counts, 3 and not 1.
  produced = jnp.array([[True, True, False, False], [True, True, True, True]])
  trained = produced & jnp.array([[True], [False]])
  close(diagnostics.average(masks.lengths(produced), on).mean(), 3.0)
  close(diagnostics.average(masks.lengths(trained), on).mean(), 1.0)


def test_clip_fractions_know_the_sign():
  """r = 1.5, 1.5, .5, .5; A = +, -, +, -: the minimum cuts positions 0 and 3 only."""
  log_ratio = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5, 9.0]))
  a, mask = jnp.array([1.0, -1.0, 1.0, -1.0, 1.0]), jnp.array([True] * 4 + [False])
  parts = diagnostics.clip_fractions(log_ratio, a, mask, clip_low=0.2, clip_high=0.2)
  close([parts[k].mean() for k in ("low", "high", "clipped")], [0.25, 0.25, 0.5])
  assert [int(part.count) for part in parts.values()] == [4, 4, 4]
  # No advantage, nothing to clip; the bounds themselves are inside; clip_low = 1 never cuts.
  edge = jnp.log1p(jnp.array([0.2, -0.2, 5.0, -0.99]))
  a = jnp.array([1.0, -1.0, 0.0, -1.0])
  clip = functools.partial(diagnostics.clip_fractions, edge, a, jnp.ones((4,), bool))
  close(clip(clip_low=0.2, clip_high=0.2)["clipped"].mean(), 0.25)
  close(clip(clip_low=1.0, clip_high=0.2)["clipped"].mean(), 0.0)


def test_clip_fractions_are_where_the_gradient_of_ppo_is_zero():
  rng = np.random.default_rng(0)
  log_ratio = jnp.asarray(rng.normal(0, 0.4, 200), jnp.float32)
  a, on = jnp.asarray(rng.normal(size=200), jnp.float32), jnp.ones((200,), bool)

  def gain(x):
    ratio = jnp.exp(x)
    return jnp.sum(jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.3) * a))

  stopped = np.asarray(jax.grad(gain)(log_ratio)) == 0
  parts = diagnostics.clip_fractions(log_ratio, a, on, clip_low=0.2, clip_high=0.3)
  assert int(parts["clipped"].total) == stopped.sum() > 20


def test_advantage_per_sequence():
  log_ratio = jnp.array([[0.5, -0.5], [0.5, -0.5]])
  a, mask = jnp.array([[1.0], [-1.0]]), jnp.ones((2, 2), bool)
  parts = diagnostics.clip_fractions(log_ratio, a, mask, clip_low=0.2, clip_high=0.2)
  close([parts["low"].mean(), parts["high"].mean()], [0.25, 0.25])


def test_policy_drift_golden():
  # old - current = 0.5 and -0.25: k1 their mean 0.125; k3 = exp(-d) - 1 + d of each.
  drift = diagnostics.policy_drift(
    jnp.array([-1.5, -0.75, 3.0]), jnp.array([-1.0, -1.0, NAN]), jnp.array([True, True, False])
  )
  close(drift["k1"].mean(), 0.125)
  close(drift["k3"].mean(), (np.exp(-0.5) - 0.5 + np.exp(0.25) - 1.25) / 2, rtol=1e-5)
  assert int(drift["k3"].count) == 2


def test_perplexity_gap_golden():
  gap = diagnostics.perplexity_gap(
    jnp.array([-1.5, -0.5, NAN]), jnp.array([-1.0, -0.25, 0.0]), jnp.array([True, True, False])
  )
  # (1.5 + .5) / 2, (1 + .25) / 2, (.5 + .25) / 2
  close([gap[k].mean() for k in ("policy", "sampler", "gap")], [1.0, 0.625, 0.375])


def test_effective_sample_size_of_tokens_and_sequences():
  # Two sequences, of 3 and 1 tokens; log ratios sum to log 3 and 0.
  log_ratio = jnp.array([[np.log(3.0), 0.0, 0.0], [0.0, NAN, 1e30]])
  mask = jnp.array([[True, True, True], [True, False, False]])
  tokens = diagnostics.token_effective_sample_size(log_ratio, mask)
  close(tokens.fraction(), 36 / (4 * 12))  # (3 + 1 + 1 + 1)^2 / (4 (9 + 1 + 1 + 1))
  level = ratios.per_sequence(jnp.where(mask, log_ratio, 0.0), mask)
  sequences = diagnostics.sequence_effective_sample_size(level, mask)
  close(sequences.fraction(), 16 / (2 * 10))  # (3 + 1)^2 / (2 (9 + 1)), each counted once
  assert int(sequences.count) == 2


@pytest.mark.parametrize("size", [1e3, -1e3, 1e30])
def test_effective_sample_size_does_not_overflow(size):
  x, mask = jnp.full((2, 4), size), jnp.ones((2, 4), bool)
  close(diagnostics.token_effective_sample_size(x, mask).fraction(), 1.0)
  close(diagnostics.sequence_effective_sample_size(x, mask).fraction(), 1.0)
  one = x.at[0, 2].add(abs(size))
  close(diagnostics.token_effective_sample_size(one, mask).fraction(), 1 / 8)


def test_ratio_extremes_position():
  x = jnp.array([[0.1, 9.0, -0.2], [0.3, -0.5, 0.0]])
  mask = jnp.array([[True, False, True], [True, True, False]])
  whole = diagnostics.ratio_extremes(x, mask)
  close([whole.low, whole.high], [-0.5, 0.3])
  assert np.unravel_index(int(whole.low_position), x.shape) == (1, 1)
  assert np.unravel_index(int(whole.high_position), x.shape) == (1, 0)
  top = diagnostics.ratio_extremes(x[:1], mask[:1])
  bottom = diagnostics.ratio_extremes(x[1:], mask[1:], offset=1 * 3)  # row 1, T = 3
  jax.tree.map(np.testing.assert_array_equal, top.merge(bottom), whole)


def test_gradient_share_shows_a_length_bias():
  """Equal |A| everywhere: the weight per sequence is constant, or grows with its length."""
  lengths = np.array([1, 2, 4, 8])
  mask = jnp.asarray(np.arange(8)[None] < lengths[:, None])
  shares = functools.partial(diagnostics.gradient_share_by_length, mask=mask, edges=(2, 3, 8))
  # A sequence mean: 1/4 for each sequence. A token mean: n / 15.
  close(shares(-loss_weights.sequence_mean(mask)), [1 / 4, 1 / 4, 1 / 4, 1 / 4])
  close(shares(loss_weights.token_mean(mask)), [1 / 15, 2 / 15, 4 / 15, 8 / 15])
  close(shares(jnp.ones((4, 8)), edges=[2]), [1, 14])
  close(shares(jnp.ones((4, 8)), edges=[]), [15])


def test_zero_signal_groups():
  rewards = jnp.array([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.5, 0.5, NAN], [NAN, NAN, NAN]])
  where = jnp.array([[True] * 3, [True] * 3, [True, True, False], [False] * 3])
  silent = diagnostics.zero_signal_groups(rewards, where=where)
  assert (float(silent.total), int(silent.count)) == (2.0, 3)  # the last group does not exist
  close(diagnostics.zero_signal_groups(rewards[:2]).mean(), 0.5)
  close(diagnostics.zero_signal_groups(rewards[0]).mean(), 1.0)


# -- what holds for all of them ----------------------------------------------------------------


def _gradient_share(x, y, mask, segment_ids):
  return diagnostics.gradient_share_by_length(x, mask, edges=(2, 4), segment_ids=segment_ids)


def _sequence_ess(x, y, mask, segment_ids):
  level = ratios.per_sequence(x, mask, segment_ids=segment_ids)
  ess = diagnostics.sequence_effective_sample_size(level, mask, segment_ids=segment_ids)
  return ess, ess.fraction()


# (x, y, mask, segment_ids) -> a tree of numbers
FUNCTIONS = {
  "average": lambda x, y, m, s: diagnostics.average(x, m),
  "clip_fractions": lambda x, y, m, s: diagnostics.clip_fractions(
    x, y, m, clip_low=0.2, clip_high=0.3
  ),
  "policy_drift": lambda x, y, m, s: diagnostics.policy_drift(x, y, m),
  "perplexity_gap": lambda x, y, m, s: diagnostics.perplexity_gap(x, y, m),
  "token_effective_sample_size": lambda x, y, m, s: diagnostics.token_effective_sample_size(x, m),
  "sequence_effective_sample_size": _sequence_ess,
  "gradient_share_by_length": _gradient_share,
  "ratio_extremes": lambda x, y, m, s: diagnostics.ratio_extremes(x, m),
}
POSITIONAL = {"ratio_extremes"}  # packing moves the tokens
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def to_float(tree):
  return jax.tree.map(lambda z: z.astype(jnp.float32), tree)


@functools.cache
def jitted(name):
  return jax.jit(FUNCTIONS[name])


@functools.cache
def value_and_gradient(name):
  def scalar(x, y, mask, segment_ids):
    tree = FUNCTIONS[name](x, y, mask, segment_ids)
    return sum(jnp.sum(z) for z in jax.tree.leaves(to_float(tree))), tree

  return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True))


def batch(dtype="float32"):
  """Eight rows of six in segments of unequal length, interior gaps, an empty row."""
  rng = np.random.default_rng(11)
  x, y = rng.normal(-1, 0.6, (2, 8, 6)).astype(dtype)
  mask = rng.random((8, 6)) < 0.8
  mask[3] = False
  segment_ids = np.array([[1, 1, 1, 2, 2, 0], [5, 4, 4, 4, 4, 4]] * 4, np.int32)
  return x, y, mask & (segment_ids > 0), segment_ids


def assert_trees_close(actual, expected, rtol=1e-6):
  jax.tree.map(lambda a, b: close(a, b, rtol=rtol), actual, expected)


@every_function
def test_masked_garbage_changes_no_bit_and_nothing_is_differentiated(name):
  x, y, mask, segment_ids = batch()
  (_, clean), _ = value_and_gradient(name)(x, y, mask, segment_ids)
  assert all(np.all(np.isfinite(z)) for z in jax.tree.leaves(clean))
  for garbage in (NAN, INF, -INF, 1e30):
    dirty = [np.where(mask, z, np.float32(garbage)) for z in (x, y)]
    (_, tree), gradients = value_and_gradient(name)(*dirty, mask, segment_ids)
    jax.tree.map(np.testing.assert_array_equal, tree, clean)
    assert not np.any(gradients)


@every_function
def test_nothing_counted(name):
  x, y, mask, segment_ids = batch()
  tree = jitted(name)(np.full_like(x, NAN), y, np.zeros_like(mask), segment_ids)
  if name == "ratio_extremes":
    assert (float(tree.low), float(tree.high), int(tree.low_position)) == (INF, -INF, -1)
  else:
    assert all(np.all(np.isin(z, (0.0, -INF))) for z in jax.tree.leaves(tree))


@every_function
def test_jit_equals_eager_and_vmap_equals_rows(name):
  arrays = batch()
  assert_trees_close(FUNCTIONS[name](*arrays), jitted(name)(*arrays))
  blocks = [z.reshape(4, 2, 6) for z in arrays]
  rows = jax.jit(jax.vmap(FUNCTIONS[name]))(*blocks)
  for k in range(4):
    expected = jitted(name)(*(z[k] for z in blocks))
    assert_trees_close(jax.tree.map(lambda z, k=k: z[k], rows), expected, rtol=1e-5)


@every_function
def test_packed_equals_unpacked(name):
  x, y, mask, segment_ids = batch()
  places = [(r, s) for r in range(8) for s in np.unique(segment_ids[r]) if s]
  own = np.stack([(segment_ids[r] == s) & mask[r] for r, s in places])
  rows = [r for r, _ in places]
  packed = jitted(name)(x, y, mask, segment_ids)
  unpacked = jitted(name)(x[rows], y[rows], own, np.ones_like(own, np.int32))
  if name in POSITIONAL:
    packed, unpacked = ((tree.low, tree.high) for tree in (packed, unpacked))
  assert_trees_close(unpacked, packed, rtol=1e-5)


@every_function
def test_rows_sharded_over_an_explicit_mesh(name):
  arrays = batch()
  mesh = jax.make_mesh((8,), ("data",))
  sharded = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec("data")))
  with jax.set_mesh(mesh):
    on_mesh = jitted(name)(*sharded)
  assert_trees_close(on_mesh, jitted(name)(*arrays), rtol=1e-5)


@every_function
def test_precision(name, x64):
  def kinds(dtype):
    leaves = jax.tree.leaves(jax.eval_shape(FUNCTIONS[name], *batch(dtype)))
    return {str(z.dtype) for z in leaves} - {"int32"}

  assert kinds("float64") == {"float64"}
  assert kinds("float32") == kinds("float16") == {"float32"}


def test_bfloat16_is_summed_in_float32():
  """A bfloat16 sum of ones stops at 256."""
  ones, on = jnp.ones((1000,), jnp.bfloat16), jnp.ones((1000,), bool)
  assert float(diagnostics.average(ones, on).total) == 1000.0
  drift = diagnostics.policy_drift(-2 * ones, -ones, on)
  close(drift["k1"].total, 1000.0)


def test_micro_batches_and_devices_agree_on_every_dictionary():
  """Pairs of sums and counts add up: over micro-batches with +, over devices with psum."""
  x, y, mask, _ = batch()
  mask[4:6] = False
  whole = jitted("clip_fractions")(x, y, mask, None)
  micro = [jitted("clip_fractions")(x[i : i + 2], y[i : i + 2], mask[i : i + 2], None)
           for i in range(0, 8, 2)]  # fmt: skip
  added = {k: functools.reduce(operator.add, [part[k] for part in micro]) for k in whole}
  assert_trees_close(added, whole)

  mesh, spec = jax.make_mesh((8,), ("data",)), PartitionSpec("data")

  @jax.jit
  @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,) * 3, out_specs=PartitionSpec())
  def on_devices(x, y, mask):
    return jax.lax.psum(FUNCTIONS["clip_fractions"](x, y, mask, None), "data")

  assert_trees_close(on_devices(*jax.device_put((x, y, mask), NamedSharding(mesh, spec))), whole)


# -- errors ------------------------------------------------------------------------------------

X, M = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
clip = functools.partial(diagnostics.clip_fractions, clip_low=0.2, clip_high=0.2)
BAD_INPUT = [
  (r"mask must .*\(2, 3\).*\(3,\)", lambda: diagnostics.average(X[0], M)),
  ("clip_low must", lambda: clip(X, X, M, clip_low=-0.1)),
  ("clip_low must", lambda: clip(X, X, M, clip_low=1.1)),
  ("clip_high must", lambda: clip(X, X, M, clip_high=-0.1)),
  (r"advantages must .*\(2,\)", lambda: clip(X, X[:, 0], M)),
  ("old_logprobs", lambda: diagnostics.policy_drift(X, X[:1], M)),
  ("sampler_logprobs", lambda: diagnostics.perplexity_gap(X, X[:, :1], M)),
  ("edges must", lambda: diagnostics.gradient_share_by_length(X, M, edges=[4, 4])),
  (
    "segment_ids must",
    lambda: diagnostics.sequence_effective_sample_size(X, M, segment_ids=M[0].astype(int)),
  ),
]


@pytest.mark.parametrize(("message", "call"), BAD_INPUT)
def test_bad_input_names_the_argument(message, call):
  with pytest.raises(ValueError, match=message):
    call()


@every_function
def test_mask_must_be_boolean(name):
  with pytest.raises(TypeError, match="mask must be boolean"):
    FUNCTIONS[name](X, X, M.astype(jnp.int32), None)
