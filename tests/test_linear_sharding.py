"""The vocabulary sharded over a mesh: the same numbers, and collectives of the tokens' size."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl_lm as rl

ROWS, TIME, WIDTH, VOCABULARY = 8, 3, 4, 48
VALID = 45
BUDGET = 3 * 4 * 8 * 5


@pytest.fixture(scope="module")
def arrays():
  rng = np.random.default_rng(0)
  mask = rng.random((ROWS, TIME)) < 0.8
  made = {
    "hidden": np.where(mask[..., None], rng.normal(size=(ROWS, TIME, WIDTH)), np.nan),
    "unembedding": rng.normal(size=(VOCABULARY, WIDTH)),
    "bias": rng.normal(size=VOCABULARY),
    "tokens": rng.integers(0, VALID, mask.shape),
    "mask": mask,
    "weights": rng.normal(size=mask.shape),
  }
  return {k: jnp.asarray(x) for k, x in made.items()}


def statistics(arrays, sharding):
  """Two sweeps: all statistics."""
  stats = rl.linear_token_stats(
    arrays["hidden"],
    arrays["unembedding"],
    arrays["tokens"],
    mask=arrays["mask"],
    bias=arrays["bias"],
    valid_vocab=VALID,
    sharding=sharding,
    memory_budget=BUDGET,
  )
  return sum(jnp.sum(arrays["weights"] * x) for x in stats)


def weighted(arrays, sharding):
  """One sweep, where the vocabulary is whole."""
  return rl.linear_weighted_logprobs(
    arrays["hidden"],
    arrays["unembedding"],
    arrays["tokens"],
    arrays["weights"],
    entropy_coefficients=arrays["weights"],
    mask=arrays["mask"],
    bias=arrays["bias"],
    sharding=sharding,
    memory_budget=4 * VOCABULARY * 3,
  )[0]


DIFFERENTIATED = ("hidden", "unembedding", "bias")


def gradient(function, arrays, sharding=None):
  def of(parts, rest):
    return function(parts | rest, sharding)

  parts = {k: x for k, x in arrays.items() if k in DIFFERENTIATED}
  rest = {k: x for k, x in arrays.items() if k not in DIFFERENTIATED}
  return jax.value_and_grad(of)(parts, rest)


def assert_same(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.max(jnp.abs(b))))


def lay_out(arrays, mesh, tokens, vocabulary, width=None):
  """The arrays on a mesh: tokens over some axes, rows of the matrix over others, and its width."""
  specs = {
    "hidden": P(tokens),
    "unembedding": P(vocabulary, width),
    "bias": P(vocabulary),
    "tokens": P(tokens),
    "mask": P(tokens),
    "weights": P(tokens),
  }
  return {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in arrays.items()}


LAYOUTS = {
  "rows-of-the-matrix": ("data", "tensor", None),
  "fsdp": ("data", "tensor", "data"),
  "fsdp-over-rows": ("data", ("data", "tensor"), None),
  "tokens-only": ("data", None, None),
}


@pytest.mark.parametrize(
  ("kind", "devices", "layout", "function"),
  [
    (AxisType.Auto, 8, "rows-of-the-matrix", statistics),
    (AxisType.Explicit, 8, "fsdp", statistics),
    (AxisType.Auto, 8, "tokens-only", weighted),
    *(
      pytest.param(kind, devices, layout, function, marks=pytest.mark.slow)
      for kind in (AxisType.Auto, AxisType.Explicit)
      for devices, layout in [(8, x) for x in LAYOUTS] + [(n, "fsdp") for n in (1, 2, 4)]
      for function in (statistics, weighted)
    ),
  ],
)
def test_any_mesh_gives_the_same(arrays, kind, devices, layout, function):
  tokens, vocabulary, width = LAYOUTS[layout]
  shape = (2, devices // 2) if devices > 2 else (1, devices)
  mesh = jax.make_mesh(
    shape, ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices()[:devices]
  )
  placed = lay_out(arrays, mesh, tokens, vocabulary, width)
  sharding = rl.VocabularySharding(vocabulary, P(tokens), mesh) if kind == AxisType.Auto else None
  with jax.set_mesh(mesh):
    got = jax.jit(partial(gradient, function, sharding=sharding))(placed)
  assert_same(got, jax.jit(partial(gradient, function))(arrays))


@pytest.mark.parametrize("function", [statistics, pytest.param(weighted, marks=pytest.mark.slow)])
def test_inside_shard_map(arrays, function):
  """The device's shares, and the axis of the vocabulary by name: a part of the batch each."""
  mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
  rows = {"hidden": P("data"), "unembedding": P("tensor"), "bias": P("tensor")}

  def share(arrays):
    value, slopes = gradient(function, arrays, rl.VocabularySharding("tensor"))
    return jax.lax.psum(value, "data"), slopes

  mapped = jax.shard_map(
    share,
    mesh=mesh,
    in_specs=({k: rows.get(k, P("data")) for k in arrays},),
    out_specs=(P(), rows),
  )
  assert_same(jax.jit(mapped)(arrays), jax.jit(partial(gradient, function))(arrays))


def test_shard_map_without_types_is_refused(arrays):
  mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
  score = lambda h, w, y: rl.linear_token_logprobs(
    h, w, y, sharding=rl.VocabularySharding("tensor")
  )
  mapped = jax.shard_map(
    score, mesh=mesh, in_specs=(P(), P("tensor"), P()), out_specs=P(), check_vma=False
  )
  with pytest.raises(ValueError, match="check_vma=True"):
    mapped(arrays["hidden"], arrays["unembedding"], arrays["tokens"])


COLLECTIVE = re.compile(
  r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)


def collectives(text):
  """(computation, entries of the largest operand) of every collective of a compiled program."""
  found, computation = [], None
  for line in text.splitlines():
    if header := re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line):
      computation = "entry" if header.group(1) else header.group(2)
    if match := COLLECTIVE.search(line):
      shapes = re.findall(r"\w+\[([\d,]*)\]", match.group(1))
      sizes = [np.prod([int(n) for n in shape.split(",") if n], dtype=int) for shape in shapes]
      found.append((computation, int(max(sizes))))
  return found


@pytest.mark.parametrize("data", [1, 2])
def test_collectives_are_few_outside_the_loops_and_of_the_size_of_the_tokens(data):
  """At most five, none inside a loop, none larger than the hidden states.

  But for one: with data parallelism the gradient of a matrix that several devices hold alike is
  added up over them, [V / 4, D], by whatever method the log-probs are computed.
  """
  names = ("data", "tensor") if data > 1 else ("tensor",)
  mesh = jax.make_mesh(
    (data, 4)[-len(names) :],
    names,
    axis_types=(AxisType.Auto,) * len(names),
    devices=jax.devices()[: 4 * data],
  )
  rows = P("data") if data > 1 else P()
  tokens, width, vocabulary = 64, 8, 4096
  sharding = rl.VocabularySharding("tensor", rows, mesh)

  def loss(hidden, unembedding, ids):
    stats = rl.linear_token_stats(
      hidden, unembedding, ids, sharding=sharding, memory_budget=3 * 4 * 16 * 128
    )
    return jnp.sum(stats.logprobs + stats.entropy)

  def shape(dims, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

  inputs = (
    shape((tokens, 1, width), rows),
    shape((vocabulary, width), P("tensor")),
    shape((tokens, 1), rows, jnp.int32),
  )
  outputs = (None, (inputs[0].sharding, inputs[1].sharding))
  compiled = (
    jax.jit(jax.value_and_grad(loss, (0, 1)), out_shardings=outputs).lower(*inputs).compile()
  )
  found = collectives(compiled.as_text())
  assert 2 <= len(found) <= 6
  assert {computation for computation, _ in found} == {"entry"}
  large = [size for _, size in found if size > tokens * width]
  assert large == ([] if data == 1 else [vocabulary // 4 * width])
