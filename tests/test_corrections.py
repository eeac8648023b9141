"""jaxrl_lm.corrections: goldens, bounds, constancy, masks and packing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_lm import corrections, loss_weights, ratios

NAN, INF = float("nan"), float("inf")
ON = np.ones(4, bool)


def close(actual, expected, rtol=1e-6):
  np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=0)


# -- goldens ---------------------------------------------------------------------------------


def test_truncated_goldens():
  x, on = jnp.array([np.log(0.5), 0.0, np.log(1.5), np.log(3.0)]), ON
  # exp: 0.5, 1, 1.5, 3; cut at 2 from above; then at 0.75 from below.
  close(corrections.truncated(x, on, cap=2.0), [0.5, 1.0, 1.5, 2.0])
  close(corrections.truncated(x, on, cap=2.0, floor=0.75), [0.75, 1.0, 1.5, 2.0])
  close(corrections.truncated(x, on, cap=INF), [0.5, 1.0, 1.5, 3.0])
  # A weight that is cut is the cap to the bit: exp(log(cap)) is not.
  for cap in np.linspace(0.1, 9.0, 20, dtype=np.float32):
    assert corrections.truncated(jnp.array([1e3]), jnp.array([True]), cap=float(cap))[0] == cap


def test_weight_is_old_against_sampler():
  """The weight holds no policy update: the current log-prob -0.7 would make it exp(0.5)."""
  sampler, old = jnp.array([-1.2]), jnp.array([-1.0])
  on = jnp.array([True])

  def weight(old, sampler):
    return corrections.truncated(ratios.token_log_ratio(old, sampler, on), on, cap=2.0)[0]

  value, gradients = jax.value_and_grad(weight, argnums=(0, 1))(old, sampler)
  close(value, np.exp(0.2))  # 1.2214, not 1.6487
  assert all(not np.any(g) for g in gradients)


def test_level_of_a_long_sequence_is_a_choice():
  """2000 tokens of log-ratio -0.01: product exp(-20) = 2.06e-9, geometric mean exp(-0.01)."""
  log_ratio, on = jnp.full((2000,), -0.01), jnp.ones((2000,), bool)
  product = corrections.truncated(ratios.per_sequence(log_ratio, on), on, cap=2.0)
  mean = corrections.truncated(ratios.per_sequence_geometric(log_ratio, on), on, cap=2.0)
  close(product, np.full(2000, 2.0611536e-9), rtol=1e-4)
  close(mean, np.full(2000, 0.99004984))


def test_banded_goldens():
  x = jnp.log(jnp.array([0.5, 5.0, 0.4, 6.0]))
  close(corrections.banded(x, ON, low=0.5, high=5.0), [0.5, 5.0, 0.0, 0.0])  # ends included
  close(corrections.banded(x, ON, low=0.0, high=5.0), [0.5, 5.0, 0.4, 0.0])
  close(corrections.banded(x, ON, low=0.5, high=INF), [0.5, 5.0, 0.0, 6.0])


def test_rejected_goldens():
  x = jnp.array([-0.2, 0.0, 0.1, 0.3])
  np.testing.assert_array_equal(corrections.rejected(x, ON, high=0.1), [1, 1, 1, 0])
  np.testing.assert_array_equal(corrections.rejected(x, ON, low=0.0), [0, 1, 1, 1])
  np.testing.assert_array_equal(corrections.rejected(x, ON, low=0.0, high=0.1), [0, 1, 1, 0])
  np.testing.assert_array_equal(corrections.rejected(x.at[1].set(NAN), ON, high=9.0), [1, 0, 1, 1])


def test_veto_drops_only_the_segment_of_the_bad_token():
  x = jnp.log(jnp.array([1.0, 1e-5, 0.9, 1e-3, 2.0]))
  on = jnp.ones((5,), bool)
  segments = jnp.array([7, 7, 2, 2, 2])
  veto = functools.partial(corrections.veto, low=1e-4)
  np.testing.assert_array_equal(veto(x, on), [0, 0, 0, 0, 0])
  np.testing.assert_array_equal(veto(x, on, segment_ids=segments), [0, 0, 1, 1, 1])
  # The bad token is not the policy's: it does not count.
  np.testing.assert_array_equal(veto(x, on.at[1].set(False)), [1, 0, 1, 1, 1])
  np.testing.assert_array_equal(veto(x.at[2].set(NAN), on, segment_ids=segments), [0] * 5)


def test_off_policy_mask_goldens():
  # mean of -log_ratio: row 0 (0.4 + 0) / 2 = 0.2, row 1 -0.1, row 2 (one token) 0.3.
  log_ratio = jnp.array([[-0.4, 0.0], [0.1, 0.1], [-0.3, 9.0]])
  mask = jnp.array([[True, True], [True, True], [True, False]])
  opsm = functools.partial(corrections.off_policy_mask, log_ratio, mask=mask)
  bad, good = -jnp.ones((3, 1)), jnp.ones((3, 1))
  np.testing.assert_array_equal(opsm(bad, threshold=0.1), [[0, 0], [1, 1], [0, 0]])
  np.testing.assert_array_equal(opsm(bad, threshold=0.25), [[1, 1], [1, 1], [0, 0]])
  np.testing.assert_array_equal(opsm(good, threshold=0.1), [[1, 1], [1, 1], [1, 0]])
  # Eq. 9 looks at the sign of each token's advantage, and A = 0 is kept.
  tokens = jnp.array([[-1.0, 0.0], [-1.0, 1.0], [0.0, NAN]])
  np.testing.assert_array_equal(opsm(tokens, threshold=0.1), [[0, 1], [1, 1], [1, 0]])


def test_interpolated_proximal():
  current, sampler = jnp.array([-1.0, -0.1, -3.0]), jnp.array([-2.0, -1.7, -0.3])
  on = jnp.ones((3,), bool)
  between = functools.partial(corrections.interpolated_proximal, current, sampler, on)
  np.testing.assert_array_equal(between(alpha=0.0), sampler)
  np.testing.assert_array_equal(between(alpha=1.0), current)  # an on-policy ratio of exactly 1
  close(between(alpha=0.25), [-1.75, -1.3, -0.975])  # -2 + .25, -1.7 + .4, -.3 - .675
  # Policy versions per token: sampled at 1, 3 and 4, proximal 4, current 5.
  versions = np.array([1.0, 3.0, 4.0])
  close(between(alpha=(4 - versions) / (5 - versions)), [-1.25, -0.9, -0.3])  # 3/4, 1/2, 0


# -- self-normalisation ------------------------------------------------------------------------


def test_self_normalised_by_tokens_and_by_sequences():
  weights = jnp.array([[1.0, 2.0, 3.0], [6.0, NAN, 1e30]])
  mask = jnp.array([[True, True, True], [True, False, False]])
  # Token mean (1 + 2 + 3 + 6) / 4 = 3; mean of the sequence means (2 + 6) / 2 = 4.
  by_token = corrections.self_normalised(weights, mask, loss_weights.token_mean(mask))
  by_sequence = corrections.self_normalised(weights, mask, loss_weights.sequence_mean(mask))
  close(by_token, [[1 / 3, 2 / 3, 1], [2, 0, 0]])
  close(by_sequence, [[0.25, 0.5, 0.75], [1.5, 0, 0]])


def test_self_normalised_is_finite_where_the_sum_overflows():
  huge, share = jnp.array([3e38, 3e38, 0.0, 0.0]), jnp.full((4,), 1.0)
  close(corrections.self_normalised(huge, ON, share), [2.0, 2.0, 0.0, 0.0])
  close(corrections.self_normalised(huge.at[0].set(INF), ON, share)[2:], [0.0, 0.0])
  assert not np.any(corrections.self_normalised(jnp.zeros(4), ON, share))
  assert not np.any(corrections.self_normalised(huge, jnp.zeros(4, bool), jnp.zeros(4)))


def test_self_normalised_on_parts_takes_the_mean_of_the_whole():
  weights, mask = jnp.array([[1.0, 2.0], [4.0, 5.0]]), jnp.ones((2, 2), bool)
  share = loss_weights.token_mean(mask)
  whole = corrections.self_normalised(weights, mask, share)
  mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
  spec = jax.sharding.PartitionSpec("data")

  @jax.jit
  @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
  def on_devices(weights, mask, share):
    total, norm = jax.lax.psum((jnp.sum(share * weights), jnp.sum(share)), "data")
    return corrections.self_normalised(weights, mask, share, mean=total / norm)

  sharded = jax.device_put((weights, mask, share), jax.NamedSharding(mesh, spec))
  close(on_devices(*sharded), whole)
  close(whole, np.array([[1, 2], [4, 5]]) / 3)


# -- the denominator after a rejection ---------------------------------------------------------


def test_denominator_is_the_callers_choice():
  mask = jnp.array([[True, True, True], [True, False, False]])
  kept = corrections.rejected(jnp.array([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0]]), mask, high=1.0)
  original = loss_weights.token_mean(mask) * kept
  renormalised = loss_weights.token_mean(mask & (kept > 0)) * kept
  close(original, [[1 / 4, 0, 1 / 4], [0, 0, 0]])
  close(renormalised, [[1 / 2, 0, 1 / 2], [0, 0, 0]])
  # Per sequence: 1 / (2 rows x 3 tokens) against 1 / (1 row left x 2 tokens left).
  close(loss_weights.sequence_mean(mask) * kept, [[1 / 6, 0, 1 / 6], [0, 0, 0]])
  close(loss_weights.sequence_mean(mask & (kept > 0)) * kept, [[1 / 2, 0, 1 / 2], [0, 0, 0]])


# -- what holds for all of them ----------------------------------------------------------------


def _self_normalised(x, y, mask, segment_ids):
  return corrections.self_normalised(jnp.abs(x), mask, jnp.abs(y))


# (x, y, mask, segment_ids) -> weights
FUNCTIONS = {
  "truncated": lambda x, y, m, s: corrections.truncated(x, m, cap=1.5, floor=0.5),
  "banded": lambda x, y, m, s: corrections.banded(x, m, low=0.5, high=1.5),
  "rejected": lambda x, y, m, s: corrections.rejected(x, m, low=-0.4, high=0.4),
  "veto": lambda x, y, m, s: corrections.veto(x, m, low=0.5, segment_ids=s),
  "off_policy_mask": lambda x, y, m, s: corrections.off_policy_mask(
    x, y, m, threshold=0.05, segment_ids=s
  ),
  "self_normalised": _self_normalised,
  "interpolated_proximal": lambda x, y, m, s: corrections.interpolated_proximal(x, y, m, alpha=0.3),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


@functools.cache
def jitted(name):
  return jax.jit(FUNCTIONS[name])


@functools.cache
def value_and_gradient(name):
  def scalar(x, y, mask, segment_ids):
    weights = FUNCTIONS[name](x, y, mask, segment_ids)
    return jnp.sum(weights), weights

  return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True))


def batch(dtype="float32"):
  """Three rows of eight, of unequal segments; row 2 is empty, interior gaps in row 1."""
  rng = np.random.default_rng(3)
  x = rng.normal(0, 0.6, (3, 8)).astype(dtype)
  mask = np.array([[1, 1, 1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0, 1, 1], [0] * 8], bool)
  segment_ids = np.array([[1, 1, 1, 1, 2, 2, 0, 0], [4, 4, 4, 9, 9, 9, 9, 2], [0] * 8], np.int32)
  # One sign per segment, as the advantage of a sequence has.
  y = np.where(segment_ids % 2 == 1, -1.0, 1.0).astype(dtype)
  return x, y, mask, segment_ids


@every_function
def test_masked_garbage_changes_no_bit_and_nothing_is_differentiated(name):
  x, y, mask, segment_ids = batch()
  (_, clean), _ = value_and_gradient(name)(x, y, mask, segment_ids)
  assert np.all(np.isfinite(clean))
  assert not np.any(np.asarray(clean)[~mask])
  for garbage in (NAN, INF, -INF, 1e30):
    dirty = [np.where(mask, z, np.float32(garbage)) for z in (x, y)]
    (_, weights), gradients = value_and_gradient(name)(*dirty, mask, segment_ids)
    np.testing.assert_array_equal(weights, clean)
    assert not np.any(gradients)


@every_function
def test_jit_equals_eager_and_vmap_equals_batch(name):
  x, y, mask, segment_ids = batch()
  compiled = jitted(name)(x, y, mask, segment_ids)
  close(FUNCTIONS[name](x, y, mask, segment_ids), compiled)
  if name != "self_normalised":  # couples rows
    close(jax.jit(jax.vmap(FUNCTIONS[name]))(x, y, mask, segment_ids), compiled)


@every_function
def test_packed_equals_unpacked(name):
  x, y, mask, segment_ids = batch()
  weights = np.asarray(jitted(name)(x, y, mask, segment_ids))
  # Each segment in a row of its own, at the same columns.
  places = [(r, s) for r in range(3) for s in np.unique(segment_ids[r]) if s]
  own = np.stack([(segment_ids[r] == s) & mask[r] for r, s in places])
  rows = [r for r, _ in places]
  unpacked = jitted(name)(x[rows], y[rows], own, np.ones_like(own, np.int32))
  for k, r in enumerate(rows):
    close(np.asarray(unpacked)[k][own[k]], weights[r][own[k]])


@every_function
def test_precision(name, x64):
  for dtype, out in [("float64", "float64"), ("float32", "float32"), ("float16", "float32")]:
    x, y, mask, segment_ids = batch(dtype)
    assert jitted(name)(x, y, mask, segment_ids).dtype == out
  x, y, mask, segment_ids = batch()
  x, y = jnp.asarray(x, jnp.bfloat16), jnp.asarray(y, jnp.bfloat16)
  low = jitted(name)(x, y, mask, segment_ids)
  np.testing.assert_array_equal(
    low, jitted(name)(x.astype(jnp.float32), y.astype(jnp.float32), mask, segment_ids)
  )


@pytest.mark.parametrize("name", ["truncated", "banded", "rejected", "veto", "off_policy_mask"])
def test_finite_for_every_log_weight(name):
  x = np.array([[1e3, -1e3, 1e30, -1e30, 0.1, 3e38, INF, -INF]], np.float32)
  y, mask, segment_ids = -np.ones_like(x), np.ones_like(x, bool), np.arange(1, 9, dtype=np.int32)
  expected = {  # w = inf, 0, inf, 0, 1.105, inf, inf, 0, each a segment of its own
    "truncated": [1.5, 0.5, 1.5, 0.5, np.exp(0.1), 1.5, 1.5, 0.5],
    "banded": [0, 0, 0, 0, np.exp(0.1), 0, 0, 0],
    "rejected": [0, 0, 0, 0, 1, 0, 0, 0],
    "veto": [1, 0, 1, 0, 1, 1, 1, 0],
    "off_policy_mask": [1, 0, 1, 0, 1, 1, 1, 0],
  }
  for function in (FUNCTIONS[name], jitted(name)):
    close(function(x, y, mask, segment_ids[None])[0], expected[name])


def test_traced_constants_vmap():
  x = jnp.array([0.0, np.log(3.0), 5.0, -5.0])
  caps = jnp.array([1.0, 2.0, 4.0])
  swept = jax.jit(jax.vmap(lambda cap: corrections.truncated(x, ON, cap=cap, floor=cap / 4)))(caps)
  close(swept[:, 1], [1.0, 2.0, 3.0])
  swept = jax.jit(jax.vmap(lambda b: corrections.banded(x, ON, low=1 / b, high=b)))(caps)
  close(swept[:, 1], [0.0, 0.0, 3.0])


# -- errors ------------------------------------------------------------------------------------

X, ROW = jnp.zeros((2, 3)), jnp.zeros((2, 1))
M = jnp.ones((2, 3), bool)
BAD_INPUT = [
  ("cap must", lambda: corrections.truncated(X, M, cap=0.0)),
  ("cap must", lambda: corrections.truncated(X, M, cap=-2.0)),
  ("floor must", lambda: corrections.truncated(X, M, cap=2.0, floor=-0.1)),
  ("floor must", lambda: corrections.truncated(X, M, cap=2.0, floor=3.0)),
  ("low must", lambda: corrections.banded(X, M, low=-0.5, high=2.0)),
  ("high must", lambda: corrections.banded(X, M, low=0.5, high=0.2)),
  ("low and high", lambda: corrections.rejected(X, M)),
  ("high must", lambda: corrections.rejected(X, M, low=0.5, high=0.2)),
  ("high must", lambda: corrections.rejected(X, M, high=NAN)),
  ("low must", lambda: corrections.veto(X, M, low=-1.0)),
  ("threshold must", lambda: corrections.off_policy_mask(X, X, M, threshold=-0.1)),
  (r"advantages must .*\(2,\)", lambda: corrections.off_policy_mask(X, X[:, 0], M, threshold=0.1)),
  ("alpha must", lambda: corrections.interpolated_proximal(X, X, M, alpha=1.5)),
  ("mean must", lambda: corrections.self_normalised(X, M, X, mean=-1.0)),
  (r"loss_weights must .*\(2, 1\)", lambda: corrections.self_normalised(X, M, ROW)),
  (r"mask must .*\(2, 3\).*\(3,\)", lambda: corrections.truncated(X[0], M, cap=2.0)),
  ("segment_ids must", lambda: corrections.veto(X, M, low=0.1, segment_ids=M[0].astype(int))),
]


@pytest.mark.parametrize(("message", "call"), BAD_INPUT)
def test_bad_input_names_the_argument(message, call):
  with pytest.raises(ValueError, match=message):
    call()


@every_function
def test_mask_must_be_boolean(name):
  with pytest.raises(TypeError, match="mask must be boolean"):
    FUNCTIONS[name](X, X, M.astype(jnp.int32), None)
