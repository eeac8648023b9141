"""Divergences from hidden states: against the same functions of logits in memory, on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl_lm as rl

INF = math.inf
K = 3


class Head(NamedTuple):
  """Hidden states [..., T, D], unembedding [V, D], bias [V]."""

  hidden: Any
  unembedding: Any
  bias: Any


class Case(NamedTuple):
  """Sizes, how much memory there is for a tile, and the options of the call."""

  shape: tuple[int, ...]
  vocabulary: int
  budget: int
  options: dict[str, Any]


def own_terms(logprobs: jax.Array, teacher_logprobs: jax.Array) -> jax.Array:
  """A user's: squared Hellinger distance."""
  return 0.5 * jnp.square(jnp.exp(logprobs / 2) - jnp.exp(teacher_logprobs / 2))


def hellinger(logits: jax.Array, teacher: jax.Array, *, mask: Any, temperature: Any) -> jax.Array:
  both = (jax.nn.log_softmax(x / temperature) for x in (logits, teacher))
  return rl.zero_masked(own_terms(*both).sum(-1), mask)


# Terms, and the function of logits.
DIVERGENCES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
  "exact_kl": (rl.reverse_kl_terms, rl.exact_kl),
  "forward_kl": (rl.forward_kl_terms, rl.forward_kl),
  "skewed_forward_kl": (
    partial(rl.skewed_forward_kl_terms, skew=0.1),
    partial(rl.skewed_forward_kl, skew=0.1),
  ),
  "skewed_reverse_kl": (
    partial(rl.skewed_reverse_kl_terms, skew=0.3),
    partial(rl.skewed_reverse_kl, skew=0.3),
  ),
  "jensen_shannon": (
    partial(rl.jensen_shannon_terms, beta=0.3),
    partial(rl.jensen_shannon, beta=0.3),
  ),
  "own": (own_terms, hellinger),
}
# One of each sweep.
FEW = ("jensen_shannon", "top_k_kl", "top_k_with_tail")
ALL = (*DIVERGENCES, *FEW[1:])


def from_hidden(name: str, student: Head, teacher: Head, kept: Any, **options: Any) -> Any:
  softcap = options.get("softcap")
  if name == "top_k_with_tail":
    return rl.linear_top_k_with_tail(*student[:2], *kept, bias=student.bias, **options)
  other = {"bias": teacher.bias, "softcap": None if softcap is None else softcap - 1}
  if name == "top_k_kl":
    other = {f"ref_{key}": x for key, x in other.items()}
    call = partial(rl.linear_top_k_kl, k=K)
  else:
    other = {f"teacher_{key}": x for key, x in other.items()}
    call = partial(rl.linear_divergence, DIVERGENCES[name][0])
  return call(*student[:2], *teacher[:2], bias=student.bias, **other, **options)


def logits_of(head: Head, mask: Any, softcap: Any, valid: Any) -> jax.Array:
  """The definition; nothing of the library."""
  hidden = head.hidden if mask is None else jnp.where(mask[..., None], head.hidden, 0)
  z = jnp.einsum("...d,vd->...v", hidden, head.unembedding[:valid])
  bias = jnp.broadcast_to(head.bias[:valid], z.shape)
  z = z + jnp.where(jnp.isneginf(bias), 0.0, bias)
  z = z if softcap is None else softcap * jnp.tanh(z / softcap)
  return jnp.where(jnp.isneginf(bias), -jnp.inf, z)


def from_logits(
  name: str,
  student: Head,
  teacher: Head,
  kept: Any,
  *,
  mask: Any = None,
  temperature: Any = 1.0,
  softcap: Any = None,
  valid_vocab: Any = None,
) -> Any:
  rest = {"mask": mask, "temperature": temperature}
  logits = logits_of(student, mask, softcap, valid_vocab)
  if name == "top_k_with_tail":
    return rl.top_k_with_tail(logits, *kept, **rest)
  other = logits_of(teacher, mask, None if softcap is None else softcap - 1, valid_vocab)
  if name == "top_k_kl":
    return rl.top_k_kl(logits, other, k=K, **rest)
  return DIVERGENCES[name][1](logits, other, **rest)


def pulled(call: Callable[..., Any], names: Any, student: Head, *rest: Any, **options: Any) -> Any:
  """{name: (values, gradients of a random combination of them in the student's head)}."""
  out = {}
  for name in names:

    def value(student: Head, name: str = name) -> Any:
      both = call(name, student, *rest, **options)
      return (both[0], both[1]) if isinstance(both, tuple) else (both, both)

    student_value, pull, both = jax.vjp(lambda x: ((y := value(x))[0], y), student, has_aux=True)
    # Laid out on the mesh as the value is.
    ones = jnp.where(jnp.isfinite(student_value), 1.0, 1.0).astype(student_value.dtype)
    out[name] = both, pull(jnp.cos(jnp.cumsum(ones, axis=-1)))[0]
  return out


def inputs(case: Case, seed: int = 0) -> tuple[Head, Head, tuple[np.ndarray, np.ndarray]]:
  """Student and teacher of different hidden sizes, and the tokens that a teacher kept."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape)
  v, valid = case.vocabulary, case.options.get("valid_vocab") or case.vocabulary
  student, teacher = (Head(normal(*case.shape, d), normal(v, d), normal(v)) for d in (3, 5))
  ids = np.argsort(rng.random((*case.shape, valid)), -1)[..., :K].astype(np.int32)
  return student, teacher, (np.log(rng.uniform(0.1, 0.33, ids.shape)), ids)


def assert_close(got: Any, want: Any, rtol: float, atol: float) -> None:
  for name in want:
    pairs = zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True)
    for number, (a, b) in enumerate(pairs):
      a, b = np.asarray(a, float), np.asarray(b, float)
      np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=f"{name} {number}")


# ------------------------------------------------------------------------ the same as from logits

ON = np.arange(1100).reshape(2, 550) % 7 != 3
# In float64: blocks of 640 tokens and 8 or 16 ids, neither of which divides the sizes.
EVERYTHING = Case(
  (2, 550), 37, 6 * 8 * 5120, {"mask": ON, "temperature": 0.7, "softcap": 3.0, "valid_vocab": 33}
)
CASES = {
  "one id at a time": Case((5,), 11, 6 * 8 * 5, {"temperature": 0.7}),
  "one logit at a time": Case((2, 2), 7, 1, {}),
  "one block": Case((1,), 5, 2**26, {"softcap": 4.0}),
}


def spoilt(garbage: bool) -> Any:
  """The inputs of EVERYTHING, with or without garbage where nothing counts."""
  student, teacher, (logprobs, ids) = inputs(EVERYTHING)
  for head in (student, teacher):
    off = head.hidden[~ON]
    off[:] = np.resize([np.nan, np.inf, -np.inf, 1e300], off.shape) if garbage else 0.0
    head.hidden[~ON] = off
    head.unembedding[33:] = np.nan if garbage else 0.0
    head.bias[33:] = [np.nan, np.inf, 1e300, -np.inf] if garbage else 0.0
    head.bias[2] = -np.inf  # Excluded by both,
  student.bias[20] = -np.inf  # by the student: the forward KL is infinite.
  logprobs[~ON], ids[~ON] = (np.nan, -7) if garbage else (-1.0, 0)
  # Empty slots, an id given twice, one of the padding, a negative one: alone and together.
  logprobs[0, 0, 1], ids[0, 0, 1] = -np.inf, -5
  logprobs[0, 1, :] = -np.inf
  ids[0, 2, 1] = ids[0, 2, 2]
  ids[0, 4, 0], ids[0, 5, 2], ids[1, 549, 1] = 33, -1, 2**30
  ids[1, 6] = [2, 20, 5]  # what the student excludes
  return student, teacher, (logprobs, ids)


@pytest.fixture(
  scope="module",
  params=[FEW, pytest.param([x for x in DIVERGENCES if x not in FEW], marks=pytest.mark.slow)],
  ids=["sweeps", "terms"],
)
def everything(request: Any) -> Any:
  names = request.param
  with jax.enable_x64(True):
    mask = {"mask": jnp.asarray(ON)}
    options = EVERYTHING.options | mask
    run = jax.jit(partial(pulled, from_hidden, names, memory_budget=EVERYTHING.budget, **options))
    want = jax.jit(partial(pulled, from_logits, names, **options))(*spoilt(False))
    return jax.device_get((run(*spoilt(False)), run(*spoilt(True)), want))


def test_everything_at_once_on_ragged_blocks(everything: Any) -> None:
  """Mask, temperature, softcap, padding, excluded tokens, empty and wrong slots; to rounding."""
  got, _, want = everything
  assert_close(got, want, 1e-10, 1e-11)
  for name, (values, _) in want.items():
    finite = np.isfinite(values[0])
    assert finite.all() or name in ("forward_kl", "top_k_with_tail"), name
    if name == "top_k_with_tail":
      wrong = np.isnan(values[0]).all(-1)
      assert np.argwhere(wrong).tolist() == [[0, 2], [0, 4], [0, 5], [1, 549]]


def test_garbage_changes_no_bit(everything: Any) -> None:
  clean, dirty, _ = everything
  for name in clean:
    for a, b in zip(jax.tree.leaves(dirty[name]), jax.tree.leaves(clean[name]), strict=True):
      assert a.tobytes() == b.tobytes(), name
    gradient = dirty[name][1]
    assert not gradient.hidden[~ON].any(), name
    assert not gradient.unembedding[33:].any(), name
    assert not gradient.bias[[2, 20, *range(33, 37)]].any(), name


@pytest.mark.slow  # the ragged blocks above are the default suite's
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("title", CASES)
def test_other_blocks(title: str) -> None:
  case = CASES[title]
  arguments = inputs(case)
  run = jax.jit(partial(pulled, from_hidden, ALL, memory_budget=case.budget, **case.options))
  want = jax.jit(partial(pulled, from_logits, ALL, **case.options))(*arguments)
  assert_close(run(*arguments), want, 1e-10, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
  "dtypes",
  [
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float16", "bfloat16", "float32"),
  ],
  ids="-".join,
)
def test_low_precision(dtypes: tuple[str, ...]) -> None:
  """Rounded inputs lose nothing more: against float64 of the same numbers."""
  case = Case((2, 9), 29, 6 * 4 * 18 * 4, {"temperature": 0.7})
  student, teacher, kept = inputs(case, 1)
  student, teacher = (
    Head(*(np.asarray(x, jnp.dtype(t)) for x, t in zip(head, dtypes, strict=True)))
    for head in (student, teacher)
  )
  kept = kept[0].astype(np.float32), kept[1]
  run = jax.jit(partial(pulled, from_hidden, FEW, memory_budget=case.budget, **case.options))
  got = jax.device_get(run(student, teacher, kept))
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: x.astype(float), (student, teacher))
    run = jax.jit(partial(pulled, from_logits, FEW, **case.options))
    want = jax.device_get(run(*wide, kept))
  for name in FEW:
    for x in got[name][0]:
      assert x.dtype == np.float32
    for x, dtype, truth in zip(got[name][1], dtypes, want[name][1], strict=True):
      assert x.dtype == dtype
      error = np.abs(x.astype(float) - truth).max() / np.abs(truth).max()
      assert error <= max(4 * float(jnp.finfo(dtype).eps), 4e-6), (name, dtype)
  values = ({name: x[name][0] for name in FEW} for x in (got, want))
  assert_close(*values, 4e-6, 4e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_heads_of_different_precision() -> None:
  """float64 of one and float32 of the other: the student's decides."""
  student, teacher, kept = inputs(Case((7,), 11, 0, {}))
  single = lambda x: jax.tree.map(np.float32, x)
  run = jax.jit(partial(pulled, from_hidden, FEW, memory_budget=240))
  want = jax.device_get(run(student, teacher, kept))
  for pair in ((single(student), teacher), (student, single(teacher))):
    got = jax.device_get(run(*pair, kept))
    assert got["jensen_shannon"][0][0].dtype == pair[0].hidden.dtype
    assert_close(got, want, 1e-5, 1e-5)


# --------------------------------------------------------------------------- corners of the buckets


def test_fewer_possible_tokens_than_kept_ones() -> None:
  """One token is possible, k = 3 are asked for: KL = -log of the reference's p of that token."""
  head = np.ones((2, 1), np.float32), np.arange(5, dtype=np.float32)[:, None]
  run = jax.jit(lambda bias: rl.linear_top_k_kl(*head, *head, k=3, bias=bias, memory_budget=96))
  ref = np.log(np.exp(np.arange(5)) / np.exp(np.arange(5)).sum())
  for possible in range(5):
    bias = np.where(np.arange(5) == possible, 0.0, -INF).astype(np.float32)
    np.testing.assert_allclose(run(bias), -ref[[possible, possible]], rtol=1e-6)


def test_all_ids_of_a_padded_vocabulary_are_kept() -> None:
  """Three ids exist and three are kept: no rest, whatever the teacher's sum says."""
  hidden, unembedding = np.ones((1, 1), np.float32), np.zeros((5, 1), np.float32)
  teacher, ids = np.log(np.array([[0.5, 0.25, 0.24]], np.float32)), np.array([[2, 0, 1]])
  run = jax.jit(partial(rl.linear_top_k_with_tail, valid_vocab=3))
  both = jax.device_get(run(hidden, unembedding, teacher, ids))
  np.testing.assert_allclose(np.exp(both.logprobs), [[1 / 3, 1 / 3, 1 / 3, 0]], rtol=1e-6)
  np.testing.assert_allclose(np.exp(both.teacher_logprobs), [[0.5, 0.25, 0.24, 0]], rtol=1e-6)


@pytest.mark.parametrize(
  "dtype", ["uint8", *(pytest.param(x, marks=pytest.mark.slow) for x in ("int8", "uint32"))]
)
def test_ids_in_every_block_and_in_narrow_types(dtype: str) -> None:
  """Blocks of 128 of 300 ids: the last one goes over 172 to 255 again."""
  z = np.linspace(-1.0, 1.0, 300, dtype=np.float32)
  ids = np.array([[3, 100, 127]] if dtype == "int8" else [[3, 200, 250]])
  run = jax.jit(partial(rl.linear_top_k_with_tail, memory_budget=6 * 4 * 128))
  got = run(np.ones((1, 1), np.float32), z[:, None], np.full((1, 3), -2.0, "f4"), ids.astype(dtype))
  p = np.exp(z) / np.exp(z).sum()
  want = [*p[ids[0]], 1 - p[ids[0]].sum()]
  np.testing.assert_allclose(np.exp(got.logprobs), [want], rtol=1e-5)


# ------------------------------------------------------------------------------------- hard input


@pytest.mark.parametrize(
  "shape", [(0,), *(pytest.param(x, marks=pytest.mark.slow) for x in ((2, 0), (0, 3)))]
)
def test_no_tokens(shape: tuple[int, ...]) -> None:
  student, teacher, kept = inputs(Case(shape, 5, 0, {}))
  for name, (values, gradient) in pulled(from_hidden, FEW, student, teacher, kept).items():
    assert values[0].shape[: len(shape)] == shape, name
    assert not np.any(gradient.unembedding), name


def test_extreme_logits() -> None:
  """Probabilities of exactly 0 and 1: finite in value and gradient; bounds are reached."""
  names = ("jensen_shannon", "top_k_kl")
  run = jax.jit(partial(pulled, from_hidden, names, memory_budget=120))
  for size in (1e4, 1e30):
    student, teacher = (
      Head(np.full((3, 1), s * size, np.float32), np.linspace(-1, 1, 5)[:, None], np.zeros(5))
      for s in (1, -1)
    )
    out = jax.device_get(run(*jax.tree.map(np.float32, (student, teacher)), None))
    for x in jax.tree.leaves(out):
      assert np.isfinite(x).all()
    bound = -0.3 * math.log(0.3) - 0.7 * math.log(0.7)
    np.testing.assert_allclose(out["jensen_shannon"][0][0], bound, rtol=1e-6)


ERRORS: dict[str, tuple[dict[str, Any], Any, str]] = {
  "vocabularies": (
    {"teacher_unembedding": jnp.ones((6, 3))},
    ValueError,
    r"teacher_unembedding is \(6, 3\), unembedding is \(5, 2\)",
  ),
  "places": (
    {"teacher_hidden": jnp.ones((1, 4, 3))},
    ValueError,
    r"teacher_hidden is \(1, 4, 3\), hidden is \(4, 2\)",
  ),
  "hidden sizes": (
    {"teacher_hidden": jnp.ones((4, 2))},
    ValueError,
    r"teacher_hidden is \(4, 2\), teacher_unembedding is \(5, 3\)",
  ),
  "bias": ({"teacher_bias": jnp.ones(4)}, ValueError, r"teacher_bias is \(4,\)"),
  "softcap": ({"teacher_softcap": -1.0}, ValueError, "teacher_softcap must lie in"),
  "temperature": ({"temperature": 0.0}, ValueError, "temperature must lie in"),
  "valid_vocab": ({"valid_vocab": 6}, ValueError, r"valid_vocab must lie in \[1, 5\], got 6"),
  "mask": ({"mask": jnp.ones((4,), int)}, TypeError, "mask must be boolean"),
  "no memory": ({"memory_budget": 0}, ValueError, r"memory_budget must lie in .*, got 0"),
  "all the memory": ({"memory_budget": INF}, ValueError, "memory_budget must lie in"),
  "reduced": ({"terms": lambda x, y: (x - y).sum()}, ValueError, "terms must be elementwise"),
  "complex": ({"teacher_hidden": jnp.ones((4, 3), complex)}, TypeError, "teacher_hidden must hold"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors_name_the_argument(what: str) -> None:
  changes, error, match = ERRORS[what]
  arguments = {
    "hidden": jnp.ones((4, 2)),
    "unembedding": jnp.ones((5, 2)),
    "teacher_hidden": jnp.ones((4, 3)),
    "teacher_unembedding": jnp.ones((5, 3)),
  }
  with pytest.raises(error, match=match):
    rl.linear_divergence(**{"terms": rl.forward_kl_terms} | arguments | changes)
  if "terms" in changes:
    return
  to_ref = lambda x: {name.replace("teacher_", "ref_"): y for name, y in x.items()}
  with pytest.raises(error, match=match.replace("teacher_", "ref_")):
    rl.linear_top_k_kl(**to_ref(arguments | changes), k=2)


def test_a_traced_budget_is_an_error() -> None:
  student, teacher, kept = inputs(Case((3,), 5, 0, {}))
  for name in FEW:
    with pytest.raises(TypeError, match="memory_budget must be known while tracing"):
      jax.eval_shape(
        lambda budget, name=name: from_hidden(name, student, teacher, kept, memory_budget=budget),
        100,
      )


# -------------------------------------------------------------------------------- transformations


@pytest.mark.usefixtures("x64")
def test_constants_may_be_traced_and_mapped() -> None:
  """beta, which the terms close over, is mapped over inside of the gradient."""
  student, teacher, _ = inputs(Case((5,), 11, 0, {}))
  betas = jnp.array([0.0, 0.3, 1.0])
  mixed = lambda call: jax.vmap(lambda b, s: call(b, s).sum(), (0, None))

  def linear(beta: Any, s: Head) -> jax.Array:
    terms = partial(rl.jensen_shannon_terms, beta=beta)
    return rl.linear_divergence(terms, *s[:2], *teacher[:2], memory_budget=240)

  def composed(beta: Any, s: Head) -> jax.Array:
    logits = (jnp.einsum("td,vd->tv", x.hidden, x.unembedding) for x in (s, teacher))
    return rl.jensen_shannon(*logits, beta=beta)

  @partial(jax.jit, static_argnums=0)
  def run(call: Any, student: Head) -> Any:
    return jax.value_and_grad(lambda s: mixed(call)(betas, s) @ jnp.arange(3.0))(student)

  got, want = run(linear, student), run(composed, student)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_options_may_be_traced() -> None:
  arguments = inputs(Case((5,), 11, 0, {}))
  options = {"temperature": 0.7, "softcap": 3.0, "valid_vocab": 9}
  traced = jax.jit(lambda options: pulled(from_hidden, FEW, *arguments, **options))(options)
  concrete = jax.jit(partial(pulled, from_hidden, FEW, **options))(*arguments)
  assert_close(traced, concrete, 1e-12, 1e-12)


# ---------------------------------------------------------------------------------------- meshes

SHARDED = Case((4, 6), 24, 6 * 8 * 24 * 2, {"temperature": 0.7})
ROWS = P("data")


@pytest.fixture(scope="module")
def on_one_device() -> Any:
  """From logits, and so the same for every number of devices."""
  with jax.enable_x64(True):
    run = jax.jit(partial(pulled, from_logits, FEW, **SHARDED.options))
    return jax.device_get(run(*inputs(SHARDED)))


def slow_unless(default: bool, *values: Any) -> Any:
  return pytest.param(*values, marks=() if default else pytest.mark.slow)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
  ("axis_type", "sizes"),
  [
    slow_unless(False, AxisType.Auto, (1, 1)),
    slow_unless(False, AxisType.Auto, (1, 2)),
    slow_unless(False, AxisType.Auto, (2, 2)),
    slow_unless(False, AxisType.Auto, (1, 8)),
    slow_unless(False, AxisType.Explicit, (2, 2)),
    slow_unless(True, AxisType.Explicit, (2, 4)),
  ],
)
def test_sharded_under_jit(axis_type: AxisType, sizes: Any, on_one_device: Any) -> None:
  student, teacher, kept = inputs(SHARDED)
  devices = jax.devices()[: math.prod(sizes)]
  mesh = jax.make_mesh(sizes, ("data", "model"), (axis_type,) * 2, devices=devices)
  sharding = rl.VocabularySharding("model", ROWS) if axis_type == AxisType.Auto else None
  options = SHARDED.options | {"memory_budget": SHARDED.budget, "sharding": sharding}
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  heads = (Head(put(x[0], ROWS), *(put(y, P("model")) for y in x[1:])) for x in (student, teacher))
  with jax.set_mesh(mesh):
    run = jax.jit(partial(pulled, from_hidden, FEW, **options))
    got = run(*heads, tuple(put(x, ROWS) for x in kept))
  assert_close(jax.device_get(got), on_one_device, 1e-9, 1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("sizes", [(1, 2), (2, 4)])
def test_inside_shard_map(sizes: Any, on_one_device: Any) -> None:
  """The gradients of a head are added up over the devices that do not hold a row of it each."""
  devices = jax.devices()[: math.prod(sizes)]
  mesh = jax.make_mesh(sizes, ("data", "model"), (AxisType.Auto,) * 2, devices=devices)
  options = {"memory_budget": SHARDED.budget, "sharding": rl.VocabularySharding("model")}
  head = Head(ROWS, P("model"), P("model"))

  def share(student: Head, teacher: Head, kept: Any) -> Any:
    out = pulled(from_hidden, FEW, student, teacher, kept, **SHARDED.options | options)
    return {name: (values[0], gradient) for name, (values, gradient) in out.items()}

  student, teacher, kept = inputs(SHARDED)
  want = {name: (values[0], gradient) for name, (values, gradient) in on_one_device.items()}
  run = jax.jit(
    jax.shard_map(
      share,
      mesh=mesh,
      in_specs=(head, head, (ROWS, ROWS)),
      out_specs=dict.fromkeys(FEW, (ROWS, head)),
    )
  )
  assert_close(jax.device_get(run(student, teacher, kept)), want, 1e-9, 1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_padding_on_a_mesh() -> None:
  """Of 24 ids 5 exist: one device holds a part of the padding, the others nothing else."""
  options = {"memory_budget": SHARDED.budget, "valid_vocab": 5}
  arguments = inputs(SHARDED._replace(options=options))
  want = jax.jit(partial(pulled, from_hidden, FEW, **options))(*arguments)
  mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
  sharding = rl.VocabularySharding("model", ROWS, mesh)
  got = jax.jit(partial(pulled, from_hidden, FEW, sharding=sharding, **options))(*arguments)
  assert_close(jax.device_get(got), jax.device_get(want), 1e-9, 1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_features_sharded_too(on_one_device: Any) -> None:
  """Hidden states and matrices over D (FSDP) on an Explicit mesh."""
  mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
  case = Case((4, 6), 24, SHARDED.budget, {})
  student, teacher, kept = inputs(case)
  wide = lambda head: Head(*(np.concatenate([x, x], -1) / 2**0.5 for x in head[:2]), head.bias)
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  heads = (
    Head(put(x[0], "data", None, "model"), put(x[1], None, "model"), put(x[2]))
    for x in (wide(student), wide(teacher))
  )
  with jax.set_mesh(mesh):
    run = jax.jit(partial(pulled, from_hidden, FEW, memory_budget=case.budget, **SHARDED.options))
    got = jax.device_get(run(*heads, tuple(put(x, "data") for x in kept)))
  for name in FEW:
    assert_close({name: got[name][0]}, {name: on_one_device[name][0]}, 1e-9, 1e-10)
    bias = {name: (got[name][1].bias,)}, {name: (on_one_device[name][1].bias,)}
    assert_close(*bias, 1e-9, 1e-10)


# ---------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("name", [slow_unless(name == FEW[0], name) for name in FEW])
def test_memory_does_not_grow_with_the_vocabulary(name: str) -> None:
  """256 tokens: the logits are 4 MiB at V = 4096 and 32 MiB at 32,768; twice that for two heads."""

  def temporary(vocabulary: int) -> int:
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    student, teacher = (Head(struct(256, d), struct(vocabulary, d), None) for d in (16, 32))
    kept = struct(256, K), jax.ShapeDtypeStruct((256, K), jnp.int32)

    def loss(student: Head, teacher: Head, kept: Any) -> jax.Array:
      value = from_hidden(name, student, teacher, kept, memory_budget=2**20)
      return value[0].sum() if isinstance(value, tuple) else value.sum()

    compiled = jax.jit(jax.grad(loss)).lower(student, teacher, kept).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  small, large = temporary(4096), temporary(32768)
  assert large <= 1.02 * small
  # The budget, and what is of the size of the hidden states.
  assert large <= 2**20 + 8 * 4 * 256 * (16 + 32)
