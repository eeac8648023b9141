"""The policy: rows are independent of padding and packing, and a cache changes no number."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_lm import lm
from jaxrl_lm.lm import attention, rope

CONFIG = lm.PolicyConfig(
  vocab_size=12,
  hidden_size=16,
  intermediate_size=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  max_length=32,
  qkv_bias=True,
  qk_norm=True,
  scalar_head=True,
)
WINDOWED = dataclasses.replace(CONFIG, sliding_window=3)
SCANNED = dataclasses.replace(WINDOWED, scan_layers=True)
BFLOAT16 = dataclasses.replace(CONFIG, compute_dtype="bfloat16")


@functools.cache
def policy(config):
  """A model with parameters large enough for attention to be far from uniform."""
  model, abstract = lm.abstract_params(config)
  rng = np.random.default_rng(0)
  return model, jax.tree.map(
    lambda x: jnp.asarray(rng.normal(0.3, 0.4, x.shape).astype(x.dtype)), abstract
  )


# Compiling is nearly all of the time here.
jit = functools.partial(
  jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)


@jit
def forward(model, params, tokens, **inputs):
  return model.apply(params, tokens, **inputs)


A, B = [3, 1, 4, 1], [9, 2, 6, 5]


@pytest.fixture(scope="module")
def alone():
  """Hidden states of A and of B, each in a row of its own and unpadded."""
  model, params = policy(CONFIG)
  return forward(model, params, jnp.array([A, B], jnp.int32)).hidden


# Garbage at padding: what stands there must not matter.
ROWS = {
  "left": ([7, -100, 2**31 - 1, 7, *A], [0, 0, 0, 0, 1, 1, 1, 1]),
  "right": ([*B, 7, -100, 2**31 - 1, 7], [2, 2, 2, 2, 0, 0, 0, 0]),
  "interior": ([3, 7, 1, 4, -1, 1, 12, 12], [1, 0, 1, 1, 0, 1, 0, 0]),
  "packed": ([*A, *B], [1, 1, 1, 1, 2, 2, 2, 2]),
  "packed with another": ([0, 11, 2, 8, *B], [3, 3, 3, 3, 2, 2, 2, 2]),
  "ids not ordered": ([*B, *A], [2, 2, 2, 2, 1, 1, 1, 1]),
  "interleaved": ([3, 9, 1, 2, 4, 6, 5, 1], [1, 2, 1, 2, 1, 2, 2, 1]),
}


@pytest.fixture(scope="module")
def together():
  """The rows of ROWS in one batch."""
  model, params = policy(CONFIG)
  tokens, segments = (jnp.array(x, jnp.int32) for x in zip(*ROWS.values(), strict=True))
  return forward(model, params, tokens, segment_ids=segments)


@pytest.mark.parametrize("name", ROWS)
def test_padding_and_packing_change_no_number(name, alone, together):
  segments = np.array(ROWS[name][1])
  hidden = np.asarray(together.hidden[list(ROWS).index(name)])
  for segment in {1, 2} & set(segments.tolist()):
    np.testing.assert_allclose(hidden[segments == segment], alone[segment - 1], rtol=0, atol=2e-6)
  assert np.all(hidden[segments == 0] == 0)


def test_a_packed_sequence_does_not_depend_on_its_neighbour_by_one_bit(together):
  one, other = (list(ROWS).index(name) for name in ("packed", "packed with another"))
  assert np.array_equal(together.hidden[one, 4:], together.hidden[other, 4:])
  assert not np.array_equal(together.hidden[one, :4], together.hidden[other, :4])


@pytest.mark.parametrize("unknown", [-1, 12, 2**31 - 1])
def test_an_unknown_id_is_nan_and_stays_in_its_row(unknown, alone):
  model, params = policy(CONFIG)
  hidden = forward(model, params, jnp.array([[*A[:3], unknown], B], jnp.int32)).hidden
  assert np.isnan(hidden[0, 3]).all()
  assert np.array_equal(hidden[0, :3], alone[0, :3])
  assert np.array_equal(hidden[1], alone[1])


def test_an_unknown_id_stays_in_its_segment_and_what_comes_after(together, alone):
  """In the rows of ROWS, so that it shares their compilation; NaN times a weight of 0 is NaN."""
  model, params = policy(CONFIG)
  tokens, segments = (np.array(x, np.int32) for x in zip(*ROWS.values(), strict=True))
  rows = [list(ROWS).index(name) for name in ("packed", "interleaved")]
  tokens[rows, 2] = 12  # of A; in the second row its second token
  hidden = np.asarray(forward(model, params, jnp.array(tokens), segment_ids=segments).hidden)
  for row, first in zip(rows, (2, 1), strict=True):
    of_a, of_b = (np.flatnonzero(segments[row] == segment) for segment in (1, 2))
    np.testing.assert_array_equal(hidden[row, of_b], together.hidden[row, of_b])
    np.testing.assert_array_equal(hidden[row, of_a[:first]], together.hidden[row, of_a[:first]])
    assert np.isnan(hidden[row, of_a[first:]]).all()


@pytest.mark.parametrize(
  ("segments", "positions"),
  [
    ([1, 1, 1, 2, 2, 0], [0, 1, 2, 0, 1, 0]),
    ([0, 0, 1, 1, 1], [0, 0, 0, 1, 2]),
    ([1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
    ([1, 0, 1, 2, 0, 1], [0, 0, 1, 0, 0, 2]),
  ],
)
def test_positions_count_the_tokens_of_a_segment(segments, positions):
  counted = attention.default_positions(jnp.array([segments]), None)
  assert counted.tolist() == [positions]


def test_the_mask_is_the_definition():
  rng = np.random.default_rng(0)
  segments = rng.integers(0, 3, (4, 9))
  positions = np.asarray(attention.default_positions(jnp.asarray(segments), None))
  for window in (None, 1, 2, 20):
    mask = np.asarray(
      attention.attention_mask(jnp.asarray(positions), jnp.asarray(segments), None, window=window)
    )
    for b, t, s in np.ndindex(mask.shape):
      sees = s <= t and segments[b, s] == segments[b, t] != 0
      if window is not None:
        sees &= positions[b, t] - positions[b, s] < window
      assert mask[b, t, s] == sees


def test_attention_shares_keys_among_a_group_of_heads():
  """Against loops in float64."""
  rng = np.random.default_rng(0)
  queries = rng.normal(size=(2, 3, 6, 4))
  keys, values = rng.normal(size=(2, 2, 2, 5, 4))
  mask = rng.random((2, 3, 5)) < 0.7
  mask[..., 0] = True
  queries_, keys_, values_ = (jnp.asarray(x, jnp.float32) for x in (queries, keys, values))
  out = np.asarray(jax.jit(attention.attend)(queries_, keys_.swapaxes(2, 3), values_, mask))
  for b, t, h in np.ndindex(2, 3, 6):
    seen, shared = mask[b, t], h // 3
    weights = np.exp(keys[b, shared][seen] @ queries[b, t, h] / 2)
    expected = weights @ values[b, shared][seen] / weights.sum()
    np.testing.assert_allclose(out[b, t, h], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_all_keys_have_in_common_has_no_share_in_the_gradient(dtype):
  """A bias of the keys moves all scores alike; one key alone leaves nothing to choose."""
  rng = np.random.default_rng(0)
  shapes = ((1, 32, 2, 8), (1, 1, 8, 32), (1, 1, 32, 8))
  queries, keys, values, direction = (rng.normal(size=x) for x in (*shapes, shapes[0]))
  keys += 16 * rng.normal(size=(1, 1, 8, 1))
  inputs = [jnp.asarray(x, dtype) for x in (queries, keys, values, direction)]
  mask = jnp.tril(jnp.ones((1, 32, 32), bool))

  @jax.jit
  def gradient(*inputs):
    return jax.vjp(lambda *x: attention.attend(*x, mask), *inputs[:3])[1](inputs[3])

  found, wanted = gradient(*inputs), gradient(*(x.astype(jnp.float32) for x in inputs))
  for x, want in zip(found, wanted, strict=True):
    error = jnp.linalg.norm((x.astype(jnp.float32) - want).ravel())
    assert error < jnp.finfo(dtype).eps * jnp.linalg.norm(want.ravel())
  assert not found[0][:, 0].any()


# Prompts of four slots. Then four steps of one token, and two tokens at once.
PROMPTS = {
  "unpadded": [1, 1, 1, 1],
  "left": [0, 0, 1, 1],
  "right": [1, 1, 1, 0],
  "packed": [1, 1, 2, 2],
  "one token": [0, 0, 0, 1],
}
ENDS = (4, 5, 6, 7, 8, 10)


@functools.cache
def decoded(config):
  """Hidden states [B, 10, D] of cached decoding and of one full forward, and the cache."""
  model, params = policy(config)
  prompts = np.array(list(PROMPTS.values()), np.int32)
  tokens = np.random.default_rng(2).integers(0, 12, (len(prompts), ENDS[-1])).astype(np.int32)
  response = np.repeat(prompts.max(axis=1, keepdims=True), ENDS[-1] - 4, axis=1)
  full = forward(model, params, tokens, segment_ids=np.concatenate([prompts, response], axis=1))

  cache = model.init_cache(len(prompts), ENDS[-1])
  output = forward(model, params, tokens[:, :4], segment_ids=prompts, cache=cache)
  parts = [output.hidden]
  for start, end in itertools.pairwise(ENDS):
    # Without segment ids: a row goes on in the segment it was last in.
    output = forward(model, params, tokens[:, start:end], cache=output.cache)
    assert output.cache.length == end
    parts.append(output.hidden)
  return np.concatenate(parts, axis=1), np.asarray(full.hidden), output.cache


@pytest.mark.parametrize(
  "config",
  [
    pytest.param(CONFIG, id="float32"),
    pytest.param(SCANNED, id="window, scanned"),
    pytest.param(WINDOWED, id="window", marks=pytest.mark.slow),
  ],
)
def test_cached_decoding_equals_the_full_forward_at_every_step(config):
  cached, full, cache = decoded(config)
  for i, name in enumerate(PROMPTS):
    np.testing.assert_allclose(cached[i], full[i], rtol=0, atol=3e-6, err_msg=name)
  assert cache.positions[2].tolist() == [0, 1, 2, 0, 3, 4, 5, 6, 7, 8]
  assert cache.positions[3].tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]


def test_a_full_cache_is_an_error_or_nan():
  model, params = policy(CONFIG)
  cached, _, cache = decoded(CONFIG)
  assert np.isfinite(cached[:, -1]).all()  # the last slot
  token = np.zeros((len(PROMPTS), 1), np.int32)
  with pytest.raises(ValueError, match="do not fit the cache: 1 of them after 10 .* 10 slots"):
    model.apply(params, token, cache=cache)
  assert np.isnan(forward(model, params, token, cache=cache).hidden).all()  # traced length


@pytest.mark.slow
def test_cached_decoding_in_bfloat16():
  """Both round every activation to 8 bits; sums in another order may round to the next number."""
  cached, full, cache = decoded(BFLOAT16)
  exact = decoded(CONFIG)[1]
  assert cached.dtype == full.dtype == cache.keys[0].dtype == jnp.bfloat16
  step = 2**-8 * np.abs(exact).max()
  assert np.abs(cached.astype(np.float32) - full.astype(np.float32)).max() <= step  # measured: 0
  assert step < np.abs(full.astype(np.float32) - exact).max() < 16 * step  # measured: 7


@pytest.mark.slow
def test_float64_stays_float64(x64):
  names = ("param_dtype", "compute_dtype", "head_dtype")
  config = dataclasses.replace(WINDOWED, **dict.fromkeys(names, "float64"))
  cached, full, _ = decoded(config)
  assert full.dtype == np.float64
  np.testing.assert_allclose(cached, full, rtol=0, atol=1e-14)


@pytest.mark.parametrize("config", [CONFIG, SCANNED, BFLOAT16], ids=["list", "stacked", "bfloat16"])
def test_the_cache_takes_the_memory_of_its_formula(config):
  cache = policy(config)[0].init_cache(3, 7)
  size = config.compute_dtype.itemsize
  stored = sum(x.nbytes for x in jax.tree.leaves((cache.keys, cache.values)))
  assert stored == 2 * 2 * 3 * 7 * 2 * 6 * size  # 2 L B S KV D


TRACES = []
RNG = np.random.default_rng(3)
TOKENS = RNG.integers(0, 12, (8, 6)).astype(np.int32)
SEGMENTS = np.array([[0, 1, 1, 1, 2, 2], [1, 1, 1, 1, 0, 0]] * 4, np.int32)


@jit
def logits_and_gradient(model, params, tokens, segments):
  TRACES.append(model)

  def loss(params):
    output = model.apply(params, tokens, segment_ids=segments)
    logits = model.logits(params, output.hidden)
    return jnp.sum(jnp.sin(logits)) + jnp.sum(jnp.sin(output.values)), logits

  gradient, logits = jax.grad(loss, has_aux=True)(params)
  return logits, gradient


def assert_close(gradient, expected):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max()),
    gradient,
    expected,
  )


@pytest.fixture(scope="module")
def unrolled():
  """Logits and gradient of the plain policy."""
  return logits_and_gradient(*policy(CONFIG), TOKENS, SEGMENTS)


def test_garbage_at_padding_changes_no_bit_of_value_and_gradient(unrolled):
  dirty = np.where(SEGMENTS == 0, -100, TOKENS)
  assert np.any(dirty != TOKENS)
  other = logits_and_gradient(*policy(CONFIG), dirty, SEGMENTS)
  assert jax.tree.all(jax.tree.map(np.array_equal, other, unrolled))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(other))


def stacked(params):
  layers = params["layers"].values()
  return params | {"layers": jax.tree.map(lambda *x: np.stack(x), *layers)}


@pytest.mark.parametrize(
  ("remat", "scan"),
  [
    (True, True),
    pytest.param(True, False, marks=pytest.mark.slow),
    pytest.param(False, True, marks=pytest.mark.slow),
  ],
)
def test_rematerialised_and_scanned_layers_give_the_same_numbers(remat, scan, unrolled):
  model, _ = lm.abstract_params(dataclasses.replace(CONFIG, remat=remat, scan_layers=scan))
  arrange = stacked if scan else lambda params: params
  params = arrange(policy(CONFIG)[1])
  logits, gradient = logits_and_gradient(model, params, TOKENS, SEGMENTS)
  np.testing.assert_allclose(logits, unrolled[0], rtol=0, atol=5e-6)
  assert_close(gradient, arrange(unrolled[1]))


def test_scanned_layers_are_initialised_as_unrolled_ones_are():
  config = lm.PolicyConfig(64, 64, 64, 2, 8, 8, 8, max_length=4, scalar_head=True)
  plain = lm.init(config, jax.random.key(5))[1]
  scanned = lm.init(dataclasses.replace(config, scan_layers=True), jax.random.key(5))[1]
  assert jax.tree.all(jax.tree.map(np.array_equal, stacked(plain), scanned))
  np.testing.assert_allclose(np.std(plain["embedding"]), 0.02, rtol=0.05)
  assert not np.array_equal(*(plain["layers"][i]["mlp"]["up"]["kernel"] for i in (0, 1)))
  assert np.all(plain["norm"]["scale"] == 1)
  assert np.all(plain["value_head"] == 0)


def test_rows_may_lie_on_the_devices_of_an_explicit_mesh(unrolled):
  model, params = policy(CONFIG)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
  with jax.set_mesh(mesh):
    rows, whole = (NamedSharding(mesh, PartitionSpec(*x)) for x in (("data",), ()))
    inputs = jax.device_put((TOKENS, SEGMENTS), rows)
    logits, gradient = logits_and_gradient(model, jax.device_put(params, whole), *inputs)
    assert logits.sharding.spec[0] == "data"
  np.testing.assert_allclose(logits, unrolled[0], rtol=0, atol=5e-6)
  assert_close(gradient, unrolled[1])


def test_logits_stay_where_an_explicit_mesh_has_their_tokens():
  model, params = policy(CONFIG)
  mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)
  hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 16)), jnp.float32)
  wanted = model.logits(params, hidden)
  with jax.set_mesh(mesh):
    whole = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    for spec in (PartitionSpec("data", "context"), PartitionSpec(None, "context")):
      logits = model.logits(whole, jax.device_put(hidden, NamedSharding(mesh, spec)))
      assert logits.sharding.spec == PartitionSpec(*spec, None)
      np.testing.assert_allclose(logits, wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0,), ()])
def test_logits_of_nothing_and_of_one_token(shape):
  model, params = policy(CONFIG)
  assert model.logits(params, jnp.ones((*shape, 16))).shape == (*shape, 12)


def test_parameters_may_be_sharded_both_ways(unrolled):
  model, params = policy(CONFIG)
  mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
  places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), lm.param_specs(CONFIG))
  params = jax.device_put(params, places)
  kernel = params["layers"][1]["mlp"]["up"]["kernel"]
  assert kernel.addressable_shards[0].data.shape == (8, 12)
  rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
  logits, gradient = logits_and_gradient(model, params, *jax.device_put((TOKENS, SEGMENTS), rows))
  np.testing.assert_allclose(logits, unrolled[0], rtol=0, atol=5e-6)
  assert_close(gradient, unrolled[1])


def test_stacked_parameters_are_not_split_over_layers():
  specs = lm.param_specs(SCANNED)["layers"]
  assert specs["attention"]["query"]["kernel"] == PartitionSpec(None, "fsdp", "tensor")
  assert specs["attention"]["query"]["bias"] == PartitionSpec(None, "tensor")
  assert specs["mlp_norm"]["scale"] == PartitionSpec(None)


def test_a_model_is_its_configuration(unrolled):
  """Equal configurations share a compilation, other packings too."""
  before = len(TRACES)
  model, _ = lm.abstract_params(dataclasses.replace(CONFIG, param_dtype=np.float32))
  assert model == policy(CONFIG)[0]
  logits_and_gradient(model, policy(CONFIG)[1], TOKENS, np.roll(SEGMENTS, 1, axis=1))
  assert len(TRACES) == before
  assert policy(CONFIG)[0] != policy(WINDOWED)[0]


def test_values_are_of_the_scalar_head(together):
  model, params = policy(CONFIG)
  np.testing.assert_allclose(
    together.values, np.asarray(together.hidden) @ params["value_head"], rtol=1e-5, atol=1e-6
  )
  plain, abstract = lm.abstract_params(dataclasses.replace(CONFIG, scalar_head=False))
  assert jax.eval_shape(plain.apply, abstract, TOKENS).values is None


def test_dtypes():
  """bfloat16 computes in bfloat16, and keeps float32 parameters, logits and values."""
  model, params = lm.abstract_params(BFLOAT16)
  output = jax.eval_shape(lambda p: model.apply(p, TOKENS, cache=model.init_cache(8, 6)), params)
  logits = jax.eval_shape(model.logits, params, output.hidden)
  assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
  assert output.hidden.dtype == output.cache.keys[0].dtype == jnp.bfloat16
  assert logits.dtype == output.values.dtype == jnp.float32


def test_logits_are_accumulated_in_float32():
  config = dataclasses.replace(BFLOAT16, hidden_size=513, param_dtype="bfloat16")
  model, _ = lm.abstract_params(config)
  params = {"unembedding": jnp.ones((12, 513), jnp.bfloat16)}
  logits = model.logits(params, jnp.ones((1, 1, 513), jnp.bfloat16))
  assert np.all(logits == 513)  # which bfloat16 does not have


@pytest.mark.slow
def test_a_tied_head_is_one_array_with_both_gradients():
  config = dataclasses.replace(CONFIG, tied=True)
  model, params = lm.abstract_params(config)[0], policy(CONFIG)[1]
  separate = params | {"unembedding": params["embedding"]}
  tied = {name: value for name, value in params.items() if name != "unembedding"}
  assert model.unembedding(tied) is tied["embedding"]

  _, both = logits_and_gradient(model, tied, TOKENS, SEGMENTS)
  _, parts = logits_and_gradient(policy(CONFIG)[0], separate, TOKENS, SEGMENTS)
  assert set(both) == set(parts) - {"unembedding"}
  assert_close(both["embedding"], parts["embedding"] + parts["unembedding"])


def test_rotary_pairs_are_adjacent_or_half_a_head_apart():
  x = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
  rotate = jax.jit(rope.rotate, static_argnames="interleaved")
  turn = rope.rotation(lm.Rope(100.0), jnp.array([[0, 2, 7]]), 8, jnp.dtype("float32"))
  angles = np.array([0, 2, 7])[:, None] * 100.0 ** (-np.arange(4) / 4)

  def complex_product(first, second):
    z = (np.asarray(first) + 1j * np.asarray(second)) * np.exp(1j * angles)[None, :, None]
    return z.real, z.imag

  adjacent = rotate(x, turn, interleaved=True)
  expected = np.stack(complex_product(x[..., ::2], x[..., 1::2]), axis=-1).reshape(x.shape)
  np.testing.assert_allclose(adjacent, expected, atol=1e-6)
  halves = rotate(x, turn, interleaved=False)
  expected = np.concatenate(complex_product(x[..., :4], x[..., 4:]), axis=-1)
  np.testing.assert_allclose(halves, expected, atol=1e-6)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
    ({"head_dim": 5}, "head_dim must be even"),
    ({"num_layers": 0}, r"num_layers must lie in \[1, 2147483647\], got 0"),
    ({"num_layers": 2.0}, "num_layers must be an integer, got 2.0"),
    ({"num_layers": True}, "num_layers must be an integer, got True"),
    ({"hidden_size": "16"}, "hidden_size must be an integer, got '16'"),
    ({"vocab_size": 10**12}, "vocab_size must lie in"),
    ({"sliding_window": 0}, r"sliding_window must lie in \[1, inf\), got 0"),
    ({"sliding_window": 2.5}, "sliding_window must be an integer"),
    ({"compute_dtype": "int32"}, "compute_dtype must be a floating dtype, got int32"),
    ({"norm_eps": -1.0}, "norm_eps must lie in"),
    ({"norm_eps": float("nan")}, "norm_eps must lie in"),
    ({"norm_eps": None}, "norm_eps must be a number, got None"),
    ({"tied": "false"}, "tied must be True or False, got 'false'"),
    ({"rope": None}, "rope must be a Rope, got None"),
  ],
)
def test_an_impossible_configuration_is_an_error(change, message):
  with pytest.raises((TypeError, ValueError), match=message):
    dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: lm.Rope(0.0), r"theta must lie in \(0.0, inf\), got 0.0"),
    (lambda: lm.Rope(-1.0), "theta must lie in"),
    (lambda: lm.Rope("1e4"), "theta must be a number, got '1e4'"),
    (lambda: lm.Rope(1.0, lm.YarnScaling(2.0, 16)), "theta must be above 1 with YarnScaling"),
    (lambda: lm.LinearScaling(0.0), "factor must lie in"),
    (lambda: lm.LinearScaling(float("nan")), "factor must lie in"),
    (lambda: lm.Llama3Scaling(8.0, 4.0, 4.0, 16), "low_freq_factor must be below high_freq_factor"),
    (lambda: lm.YarnScaling(-2.0, 16), "factor must lie in"),
    (lambda: lm.YarnScaling(2.0, 16, 1.0, 32.0), "beta_fast must not be below beta_slow"),
  ],
)
def test_an_impossible_rotation_is_an_error(make, message):
  with pytest.raises((TypeError, ValueError), match=message):
    make()


@pytest.mark.parametrize(
  ("inputs", "error", "message"),
  [
    ({"tokens": np.zeros((1, 3))}, TypeError, "tokens must be integer"),
    ({"tokens": np.zeros(3, int)}, ValueError, r"tokens must be \[B, T\] .*, got shape \(3,\)"),
    ({"tokens": np.zeros((0, 3), int)}, ValueError, r"B, T >= 1, got shape \(0, 3\)"),
    ({"tokens": np.zeros((2, 0), int)}, ValueError, r"B, T >= 1, got shape \(2, 0\)"),
    ({"tokens": np.array([[2**32 + 5]])}, ValueError, "tokens must fit int32"),
    ({"tokens": np.zeros((1, 33), int)}, ValueError, "33 in a row, max_length is 32"),
    ({"segment_ids": np.ones((1, 4), int)}, ValueError, "segment_ids must have the shape of"),
    ({"segment_ids": np.ones((1, 3), bool)}, TypeError, "segment_ids must be integer"),
    ({"positions": np.ones((2, 3), int)}, ValueError, "positions must have the shape of tokens"),
    ({"cache": 2}, ValueError, "cache must have a row per row of tokens"),
  ],
)
def test_bad_input_is_an_error_that_names_it(inputs, error, message):
  model, params = policy(CONFIG)
  inputs = {"tokens": np.zeros((1, 3), int)} | inputs
  if "cache" in inputs:
    inputs["cache"] = model.init_cache(inputs["cache"], 4)
  with pytest.raises(error, match=message):
    model.apply(params, **inputs)


def test_an_impossible_cache_is_an_error():
  for size, message in (
    ((0, 4), "batch must lie in"),
    ((1, 0), "length must lie in"),
    ((1, 2.5), "length must be an integer"),
  ):
    with pytest.raises((TypeError, ValueError), match=message):
      policy(CONFIG)[0].init_cache(*size)


@pytest.mark.parametrize("change", [{"num_kv_heads": 4}, {"num_layers": 1}, {"scan_layers": True}])
def test_a_cache_of_another_model_is_an_error(change):
  model, params = policy(CONFIG)
  other = lm.abstract_params(dataclasses.replace(CONFIG, **change))[0]
  with pytest.raises(ValueError, match="cache must be one of this model: its keys are"):
    model.apply(params, np.zeros((1, 1), int), cache=other.init_cache(1, 4))


def test_an_embedding_that_is_split_over_an_explicit_mesh_is_an_error():
  model, params = policy(CONFIG)
  mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Explicit,), devices=jax.devices()[:2])
  split = jax.device_put(params["embedding"], NamedSharding(mesh, PartitionSpec("tensor")))
  with pytest.raises(ValueError, match="params must not be split over an Explicit mesh"):
    jax.eval_shape(lambda p: model.apply(p, np.zeros((1, 1), int)), params | {"embedding": split})
