"""jaxrl_lm.returns: goldens, gaps, packing, bootstrapping, garbage, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_lm import masks, returns

gae = jax.jit(returns.gae)
discounted = jax.jit(returns.discounted_returns)


def close(actual, expected, rtol=1e-6, atol=1e-7):
  np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=atol)


def batch():
  """Rows with interior gaps, a full row, one of one token, an empty one."""
  rng = np.random.default_rng(0)
  rewards, values = rng.normal(size=(2, 6, 7)).astype(np.float32)
  mask = rng.random((6, 7)) > 0.4
  mask[0], mask[1], mask[2] = True, False, False
  mask[2, 3] = True
  return rewards, values, mask


# -- GAE -------------------------------------------------------------------------------------


def test_values_on_padding_are_not_bootstrapped_from():
  """delta_1 = 1 - .2 = .8; delta_0 = 0 + .2 - .1 = .1, .1 + .95 * .8 = .86."""
  rewards, values = np.array([0.0, 1.0, 0.0, 0.0]), np.array([0.1, 0.2, 7.0, 7.0])
  mask = np.array([True, True, False, False])
  close(returns.gae(rewards, values, mask, gae_lambda=0.95), [0.86, 0.8, 0.0, 0.0])


def test_truncated_is_not_terminal():
  """V = .4, .6, nothing rewarded: terminal -.6, then .2 - .6 = -.4; followed by .8: .2, .4."""
  rewards, values, on = np.zeros((1, 2)), np.array([[0.4, 0.6]]), np.ones((1, 2), bool)
  close(returns.gae(rewards, values, on), [[-0.4, -0.6]])
  close(returns.gae(rewards, values, on, bootstrap_value=jnp.array([0.8])), [[0.4, 0.2]])
  # Discounted: .5 * .8 - .6 = -.2; .5 * .6 - .4 - .5 * .2 = -.2.
  half = returns.gae(rewards, values, on, discount=0.5, bootstrap_value=jnp.array([0.8]))
  close(half, [[-0.2, -0.2]])


def test_masked_tokens_cost_no_discount():
  """A row with tool output inside equals the row without it, embedded."""
  rewards, values, mask = batch()
  result = np.asarray(gae(rewards, values, mask, discount=0.9, gae_lambda=0.8))
  assert not np.any(result[~mask])
  for i in range(len(mask)):
    m = mask[i]
    if m.any():
      compact = returns_of_row(rewards[i][m], values[i][m], 0.9, 0.8)
      close(result[i][m], compact, rtol=1e-5, atol=1e-6)


def returns_of_row(rewards, values, discount, gae_lambda):
  """The defining sum, in float64."""
  after = np.append(values[1:], 0).astype(np.float64)
  delta = rewards + discount * after - values
  decay = discount * gae_lambda
  n = len(delta)
  return [sum(decay ** (u - t) * delta[u] for u in range(t, n)) for t in range(n)]


def test_lambda_1_is_returns_minus_values_and_lambda_0_one_step():
  rewards, values, mask = batch()
  expected = np.asarray(discounted(rewards, mask, discount=0.9)) - np.where(mask, values, 0)
  close(gae(rewards, values, mask, discount=0.9), expected, rtol=1e-5, atol=1e-6)
  one_step = np.asarray(gae(rewards, values, mask, discount=0.9, gae_lambda=0.0))
  close(one_step[0, :-1], rewards[0, :-1] + 0.9 * values[0, 1:] - values[0, :-1], rtol=1e-5)


def test_discount_and_lambda_per_row():
  rewards, values, mask = batch()
  discount = np.linspace(0.5, 1.0, 6, dtype=np.float32)
  gae_lambda = np.asarray(returns.length_adaptive_lambda(mask, alpha=0.5))
  result = gae(rewards, values, mask, discount=discount, gae_lambda=gae_lambda)
  for i in range(6):
    row = gae(rewards, values, mask, discount=discount[i], gae_lambda=gae_lambda[i])
    close(result[i], row[i], rtol=1e-5)
  swept = jax.jit(jax.vmap(lambda d: returns.gae(rewards, values, mask, discount=d)))(discount)
  close(swept[2, 3], gae(rewards, values, mask, discount=discount[2])[3], rtol=1e-5)


# -- packing ---------------------------------------------------------------------------------


def pack(rows, width, ids, order=None):
  """Rows of unequal length behind one another, then padding; `order` interleaves the tokens."""
  flat = np.concatenate(rows)
  packed, segment_ids = np.zeros(width, flat.dtype), np.zeros(width, np.int32)
  packed[: len(flat)] = flat
  segment_ids[: len(flat)] = np.repeat(ids, [len(row) for row in rows])
  if order is not None:
    packed, segment_ids = packed[order], segment_ids[order]
  return packed, segment_ids


@pytest.mark.parametrize("ids", [(1, 2, 3, 4), (9, 2, 40, -3)], ids=["rising", "any"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["contiguous", "interleaved"])
def test_packed_equals_unpacked(ids, interleaved):
  """Unequal segments, each with its gaps and its bootstrap value, and padding behind them."""
  rng = np.random.default_rng(1)
  lengths, width = (5, 1, 7, 3), 20
  parts = [rng.normal(size=(3, n)).astype(np.float32) for n in lengths]
  gaps = [rng.random(n) > 0.3 for n in lengths]
  for gap in gaps:
    gap[0] = True
  order = None
  if interleaved:  # tokens of the segments mixed, in their order within each
    owner = rng.permutation(np.repeat(np.arange(4), lengths))
    starts = np.cumsum((0, *lengths))
    seen = [0] * 4
    order = []
    for o in owner:
      order.append(starts[o] + seen[o])
      seen[o] += 1
    order = np.array(order + list(range(len(order), width)))
  rewards, values, ends = (pack([p[i] for p in parts], width, ids, order)[0] for i in range(3))
  mask, segment_ids = pack(gaps, width, ids, order)
  arrays = [a[None] for a in (rewards, values, mask)]
  packed = gae(
    *arrays, discount=0.9, gae_lambda=0.8, bootstrap_value=ends[None], segment_ids=segment_ids[None]
  )
  summed = discounted(arrays[0], arrays[2], discount=0.9, segment_ids=segment_ids[None])
  unpacked, gap = np.full((3, 4, 7), np.nan, np.float32), np.zeros((4, 7), bool)
  for i, n in enumerate(lengths):
    unpacked[:, i, :n], gap[i, :n] = parts[i], gaps[i]
  last = [np.flatnonzero(row)[-1] for row in gap]
  ends = unpacked[2][range(4), last]
  alone = gae(*unpacked[:2], gap, discount=0.9, gae_lambda=0.8, bootstrap_value=ends)
  alone_summed = discounted(unpacked[0], gap, discount=0.9)
  for i, name in enumerate(ids):
    here = segment_ids == name
    close(np.asarray(packed)[0, here], np.asarray(alone)[i, : lengths[i]])
    close(np.asarray(summed)[0, here], np.asarray(alone_summed)[i, : lengths[i]])
  assert not np.any(np.asarray(packed)[0, ~mask])


def test_segments_do_not_see_each_other():
  rewards, values, mask = batch()
  segment_ids = np.tile(np.array([1, 1, 1, 2, 2, 2, 2]), (6, 1))
  before = np.asarray(gae(rewards, values, mask, gae_lambda=0.9, segment_ids=segment_ids))
  rewards[:, 3:] += 100
  values[:, 3:] -= 50
  after = np.asarray(gae(rewards, values, mask, gae_lambda=0.9, segment_ids=segment_ids))
  np.testing.assert_array_equal(after[:, :3], before[:, :3])
  assert np.any(after[:, 3:] != before[:, 3:])


# -- returns ---------------------------------------------------------------------------------


def test_discounted_returns_golden():
  # 4; 2 + .5 * 4 = 4; 1 + .5 * 4 = 3, the masked 100 between them neither counts nor discounts.
  rewards = np.array([1.0, 100.0, 2.0, 4.0])
  mask = np.array([True, False, True, True])
  close(returns.discounted_returns(rewards, mask, discount=0.5), [3.0, 0.0, 4.0, 4.0])
  close(returns.discounted_returns(rewards, mask, discount=0.0), [1.0, 0.0, 2.0, 4.0])


def test_undiscounted_return_of_the_first_token_is_the_total():
  rewards, _, mask = batch()
  result = np.asarray(discounted(rewards, mask))
  first = [row[m][0] if m.any() else 0.0 for row, m in zip(result, mask, strict=True)]
  close(first, masks.masked_sum(rewards, mask, axis=-1), rtol=1e-5)


# -- every recursion -------------------------------------------------------------------------


def test_masked_positions_are_not_read():
  rewards, values, mask = batch()
  segment_ids = np.tile(np.array([3, 3, 3, 1, 1, 1, 1]), (6, 1))
  ends = np.full((6, 7), 0.5, np.float32)
  last = np.asarray(masks.last_token_mask(mask, segment_ids=segment_ids))
  clean = gae(
    *(np.where(mask, x, 0) for x in (rewards, values)),
    mask,
    gae_lambda=0.9,
    bootstrap_value=np.where(last, ends, 0),
    segment_ids=segment_ids,
  )
  for garbage in (np.nan, np.inf, -1e30):
    dirty = gae(
      *(np.where(mask, x, garbage).astype(np.float32) for x in (rewards, values)),
      mask,
      gae_lambda=0.9,
      bootstrap_value=np.where(last, ends, garbage).astype(np.float32),
      segment_ids=np.where(mask, segment_ids, -99),
    )
    np.testing.assert_array_equal(dirty, clean)
  # The bootstrap value of a row without a token is not read either.
  ends = np.where(mask.any(-1), 0.5, np.nan).astype(np.float32)
  assert np.all(np.isfinite(gae(rewards, values, mask, bootstrap_value=ends)))


def test_rows_are_independent():
  rewards, values, mask = batch()
  knobs = {"discount": 0.9, "gae_lambda": 0.8}
  whole = np.asarray(gae(rewards, values, mask, **knobs))
  mapped = jax.jit(jax.vmap(functools.partial(returns.gae, **knobs)))
  close(mapped(rewards, values, mask), whole, rtol=1e-5, atol=1e-6)
  close(gae(rewards[0], values[0], mask[0], **knobs), whole[0], rtol=1e-5, atol=1e-6)
  close(returns.gae(rewards, values, mask, **knobs), whole, rtol=1e-5, atol=1e-6)  # eager
  deep = gae(*(x.reshape(2, 3, 7) for x in (rewards, values, mask)), **knobs)
  close(deep, whole.reshape(2, 3, 7), rtol=1e-5, atol=1e-6)


def test_everything_is_a_constant():
  rewards, values, mask = (jnp.asarray(x) for x in batch())
  scores = rewards[:, 0]

  def total(rewards, values, scores, discount, gae_lambda):
    knobs = {"discount": discount, "gae_lambda": gae_lambda}
    terminal = returns.terminal_rewards(scores, mask)
    return (
      jnp.sum(returns.gae(rewards, values, mask, bootstrap_value=scores, **knobs) ** 2)
      + jnp.sum(returns.discounted_returns(rewards, mask, discount=discount) ** 2)
      + jnp.sum(returns.kl_shaped_rewards(terminal, values, mask, kl_coef=discount) ** 2)
      + jnp.sum(returns.overlong_penalty(scores, max_length=8, buffer=4))
      + jnp.sum(returns.length_adaptive_lambda(mask, alpha=gae_lambda))
    )

  arguments = (rewards, values, scores, jnp.float32(0.9), jnp.float32(0.8))
  for gradient in jax.jit(jax.grad(total, argnums=tuple(range(5))))(*arguments):
    np.testing.assert_array_equal(gradient, 0.0)


def test_types(x64):
  rewards, values, mask = batch()
  cases = [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32")]
  for given, kept in [*cases, ("float64", "float64")]:
    r, v = jnp.asarray(rewards, given), jnp.asarray(values, given)
    for function in (
      lambda r, v: returns.gae(r, v, mask, discount=0.9, gae_lambda=0.8, bootstrap_value=v[:, 0]),
      lambda r, v: returns.discounted_returns(r, mask, discount=0.9),
      lambda r, v: returns.terminal_rewards(r[:, 0], mask),
      lambda r, v: returns.kl_shaped_rewards(r, v, mask, kl_coef=0.1),
      lambda r, v: returns.overlong_penalty(r[:, 0], max_length=8, buffer=4),
    ):
      assert jax.eval_shape(function, r, v).dtype == kept
  mixed = jax.eval_shape(returns.gae, jnp.asarray(rewards, jnp.float64), jnp.asarray(values), mask)
  assert mixed.dtype == jnp.float64
  double = returns.gae(rewards.astype(np.float64), values.astype(np.float64), mask, gae_lambda=0.8)
  expected = returns_of_row(rewards[0].astype(np.float64), values[0].astype(np.float64), 1.0, 0.8)
  close(double[0], expected, rtol=1e-12)


@pytest.mark.parametrize(
  "axis_type",
  [
    pytest.param(jax.sharding.AxisType.Auto, marks=pytest.mark.slow),
    jax.sharding.AxisType.Explicit,
  ],
  ids=str,
)
def test_sharded_rows_agree(axis_type):
  """Under jit with sharded rows, and inside shard_map, where the carry must vary as the rows do."""
  mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
  rewards, values, mask = batch()
  segment_ids = np.tile(np.array([1, 1, 1, 2, 2, 2, 2]), (6, 1))

  def every(rewards, values, mask, segment_ids):
    gae_lambda = returns.length_adaptive_lambda(mask, alpha=0.5)
    shaped = returns.kl_shaped_rewards(rewards, values, mask, kl_coef=0.1)
    return (
      returns.gae(shaped, values, mask, gae_lambda=gae_lambda, bootstrap_value=values[:, 0]),
      returns.gae(rewards, values, mask, bootstrap_value=values, segment_ids=segment_ids),
      returns.discounted_returns(rewards, mask, discount=0.9, segment_ids=segment_ids),
      returns.terminal_rewards(values[:, 0], mask),
    )

  arrays = (rewards, values, mask, segment_ids)
  expected = jax.jit(every)(*arrays)
  with jax.set_mesh(mesh):
    rows = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in arrays]
    split = jax.shard_map(every, in_specs=P("data"), out_specs=P("data"))
    for function in (every, split):
      for a, b in zip(jax.jit(function)(*rows), expected, strict=True):
        close(a, b)


# -- shaping ---------------------------------------------------------------------------------


def test_terminal_rewards():
  mask = np.array([[True, True, False], [True, False, True], [False, False, False]])
  result = returns.terminal_rewards(np.array([1.0, 2.0, np.nan]), mask)
  np.testing.assert_array_equal(result, [[0, 1, 0], [0, 0, 2], [0, 0, 0]])


def test_penalty_for_a_missing_stop_token_is_a_composition():
  """Prompt 2 4 2, completion 5 6 7, stop token 2: the 2s of the prompt do not end the response."""
  tokens = np.array([[2, 4, 2, 5, 6, 7], [2, 4, 2, 5, 6, 2]])
  response = np.arange(6)[None] >= np.full((2, 1), 3)
  finished = masks.is_finished(tokens, stop_tokens=2, within=response)
  scores = jnp.where(finished, 1.0, 1.0 - 0.5)
  mask = masks.response_mask(tokens, stop_tokens=2, within=response)
  result = returns.terminal_rewards(scores, mask)
  np.testing.assert_array_equal(result[:, -1], [0.5, 1.0])


def test_kl_lowers_the_reward_of_a_policy_above_the_reference():
  """log pi -.5 against -1.5: k1 = 1, reward 0 - .1 * 1 = -.1; the wrong sign gives +.1."""
  mask = np.array([True, False])
  kl = np.array([-0.5 - -1.5, np.nan])
  close(returns.kl_shaped_rewards(np.array([0.0, np.nan]), kl, mask, kl_coef=0.1), [-0.1, 0.0])


def test_overlong_penalty():
  # max 20, buffer 4: 0 up to 16, then (16 - n) / 4, -1 at 20 and beyond.
  lengths = np.array([0, 16, 17, 18, 19, 20, 21, 1000])
  expected = [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]
  close(returns.overlong_penalty(lengths, max_length=20, buffer=4), expected)
  traced = jax.jit(lambda n, m, b: returns.overlong_penalty(n, max_length=m, buffer=b))
  close(traced(lengths, 20, 4), expected)


def test_length_adaptive_lambda():
  mask = np.arange(100)[None] < np.array([[0], [1], [20], [40], [100]])
  # 1 - 1 / (.05 n): 0 below n = 20, then 1/2 at 40, 4/5 at 100.
  expected = [0.0, 0.0, 0.0, 0.5, 0.8]
  close(returns.length_adaptive_lambda(mask, alpha=0.05), expected)


# -- errors ----------------------------------------------------------------------------------

R, M = np.zeros((3, 3), np.float32), np.ones((3, 3), bool)
S = np.zeros((3, 3), np.int32)


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (lambda: returns.discounted_returns(R[0], M), ValueError, r"mask.*\(3, 3\)"),
    (lambda: returns.discounted_returns(R, M.astype(float)), TypeError, "mask must be boolean"),
    (lambda: returns.discounted_returns(R, M, discount=1.5), ValueError, "discount"),
    (lambda: returns.discounted_returns(R, M, discount=R), ValueError, "discount"),
    (lambda: returns.discounted_returns(R, M, segment_ids=R), TypeError, "segment_ids"),
    (lambda: returns.discounted_returns(R, M, segment_ids=S[:1]), ValueError, "segment_ids"),
    (lambda: returns.gae(R, R[:2], M), ValueError, r"values.*\(2, 3\)"),
    (lambda: returns.gae(R, R, M[:, :2]), ValueError, "mask"),
    (lambda: returns.gae(R, R, M, discount=-0.1), ValueError, "discount"),
    (lambda: returns.gae(R, R, M, gae_lambda=1.01), ValueError, "gae_lambda"),
    (lambda: returns.gae(R, R, M, gae_lambda=np.ones(2)), ValueError, "gae_lambda"),
    (lambda: returns.gae(R, R, M, bootstrap_value=R), ValueError, "bootstrap_value"),
    (lambda: returns.gae(R, R, M, bootstrap_value=1.0), ValueError, "bootstrap_value"),
    (
      lambda: returns.gae(R, R, M, bootstrap_value=R[:, 0], segment_ids=S),
      ValueError,
      "bootstrap_value",
    ),
    (lambda: returns.terminal_rewards(R, M), ValueError, r"scores.*\(3, 3\)"),
    (lambda: returns.terminal_rewards(R[0], R), TypeError, "mask"),
    (lambda: returns.kl_shaped_rewards(R, R[0], M, kl_coef=0.1), ValueError, "kl"),
    (lambda: returns.kl_shaped_rewards(R, R, M, kl_coef=-0.1), ValueError, "kl_coef"),
    (lambda: returns.kl_shaped_rewards(R, R, M, kl_coef=np.ones(3)), ValueError, "kl_coef"),
    (lambda: returns.kl_shaped_rewards(R, R, M[0], kl_coef=0.1), ValueError, "mask"),
    (lambda: returns.overlong_penalty(S, max_length=4, buffer=0), ValueError, "buffer"),
    (lambda: returns.overlong_penalty(S, max_length=4, buffer=4), ValueError, "max_length"),
    (lambda: returns.overlong_penalty(S, max_length=3, buffer=4), ValueError, "max_length"),
    (lambda: returns.length_adaptive_lambda(M, alpha=0.0), ValueError, "alpha"),
    (lambda: returns.length_adaptive_lambda(R, alpha=1.0), TypeError, "mask"),
  ],
)
def test_bad_inputs(call, error, message):
  with pytest.raises(error, match=message):
    call()
