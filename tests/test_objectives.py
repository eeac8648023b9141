"""Properties that every row of the table of algorithms has.

All rows are evaluated in one jitted function, because compilation, not arithmetic, is what a
test costs. Batch: 4 groups of 4 responses of 0 to 8 tokens, garbage at every masked position.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl_lm as rl
from experiments import algorithm_table
from experiments.algorithm_table import advantages_of, named_objectives, selection_of
from jaxrl_lm import objectives

ROWS = named_objectives()
GROUPS, SAMPLES, TIME = 4, 4, 8
SLOW = pytest.mark.slow
GARBAGE = (np.nan, 1e30, -1e30, np.inf, -np.inf)


def make_batch(seed: int = 0, garbage: Any = GARBAGE) -> algorithm_table.Batch:
  rng = np.random.default_rng(seed)
  shape = (GROUPS, SAMPLES, TIME)
  lengths = rng.integers(1, TIME + 1, shape[:2])
  lengths[0, 0], lengths[1, 2], lengths[2, 1] = 1, TIME, 0
  mask = np.arange(TIME) < lengths[..., None]
  mask[1, 2, 3] = False
  old = -rng.exponential(1.0, shape)
  logprobs = np.minimum(old + rng.normal(0.0, 0.4, shape), -1e-3)
  fill = np.resize(np.asarray(garbage, float), shape)
  dirty = [np.where(mask, x, fill) for x in (logprobs, old, rng.uniform(0.0, 1.0, shape))]
  return algorithm_table.Batch(
    jnp.asarray(mask),
    *map(jnp.asarray, dirty),
    rewards=jnp.asarray(rng.integers(0, 2, shape[:2]).astype(float)),
    greedy_rewards=jnp.asarray(rng.uniform(0.0, 1.0, GROUPS)),
  )


def rows(x: jax.Array) -> jax.Array:
  """[groups, samples, ...] -> [sequences, ...]."""
  return x.reshape(-1, *x.shape[2:])


def token_arrays(batch: algorithm_table.Batch) -> dict[str, Any]:
  """What an update needs of a batch, [sequences, T] each; advantages and weights per row."""
  per_row = {}
  for name, objective in ROWS.items():
    advantages = advantages_of(objective, batch)
    selected = selection_of(objective, batch, advantages)
    per_row[name] = {
      "advantages": rows(jnp.broadcast_to(advantages, batch.mask.shape)),
      "weights": rows(objective.loss_weights(batch.mask)),
      "selected": rows(batch.mask & False if selected is None else selected),
    }
  tokens = {name: rows(getattr(batch, name)) for name in ("mask", "logprobs", "old_logprobs")}
  return tokens | {"per_row": per_row}


def losses(arrays: dict[str, Any], segment_ids: jax.Array | None = None) -> dict[str, Any]:
  """{name: (loss, gradient in the log-probs)} of every row of the table."""

  def loss(name: str, logprobs: jax.Array) -> jax.Array:
    row = arrays["per_row"][name]
    selects = name in ("CLIP_COV", "KL_COV")
    return rl.objective_loss(
      ROWS[name],
      logprobs,
      arrays["old_logprobs"],
      row["advantages"],
      arrays["mask"],
      loss_weights=row["weights"],
      segment_ids=segment_ids,
      selected=row["selected"] if selects else None,
    )[0]

  return {name: jax.value_and_grad(partial(loss, name))(arrays["logprobs"]) for name in ROWS}


jitted_losses = jax.jit(losses)


@pytest.fixture(scope="module")
def arrays() -> dict[str, Any]:
  return token_arrays(make_batch())


@pytest.fixture(scope="module")
def whole(arrays: dict[str, Any]) -> dict[str, Any]:
  return jax.device_get(jitted_losses(arrays))


def assert_same(got: dict[str, Any], want: dict[str, Any], rtol: float = 2e-6) -> None:
  """Losses and gradients agree, relative to the largest entry of each."""
  assert got.keys() == want.keys()
  for name in want:
    for part in (0, 1):
      a, b = np.asarray(got[name][part]), np.asarray(want[name][part])
      # The value of a loss may cancel to near 0: its scale is that of the gradient there.
      scale = max(np.abs(b).max(), np.abs(want[name][1]).max())
      assert np.abs(a - b).max() <= rtol * scale, (name, part, np.abs(a - b).max() / scale)


def take(arrays: dict[str, Any], index: Any) -> dict[str, Any]:
  return jax.tree.map(lambda x: x[index], arrays)


def test_every_row_has_a_finite_loss_and_a_gradient(arrays: Any, whole: Any) -> None:
  for name, (loss, gradient) in whole.items():
    assert np.isfinite(loss), name
    assert np.isfinite(gradient).all(), name
    assert np.abs(gradient).max() > 0, name
    assert (gradient[~np.asarray(arrays["mask"])] == 0).all(), name


@pytest.mark.parametrize("garbage", [0.0, *GARBAGE])
def test_masked_garbage_changes_no_bit(whole: Any, garbage: float) -> None:
  clean = jitted_losses(token_arrays(make_batch(garbage=(garbage,))))
  for name, pair in whole.items():
    for got, want in zip(clean[name], pair, strict=True):
      np.testing.assert_array_equal(got, want, err_msg=name)


def test_eager_equals_jit(arrays: Any, whole: Any) -> None:
  names = ("GRPO", "GSPO_TOKEN", "VESPO", "KL_COV")
  for name in names:
    row = arrays["per_row"][name]
    selected = row["selected"] if name == "KL_COV" else None
    loss = rl.objective_loss(
      ROWS[name],
      arrays["logprobs"],
      arrays["old_logprobs"],
      row["advantages"],
      arrays["mask"],
      loss_weights=row["weights"],
      selected=selected,
    )[0]
    np.testing.assert_allclose(loss, whole[name][0], rtol=2e-6, err_msg=name)


@pytest.mark.parametrize("parts", [pytest.param(2, marks=SLOW), 4, pytest.param(16, marks=SLOW)])
def test_micro_batches_sum_to_the_whole(arrays: Any, whole: Any, parts: int) -> None:
  size = GROUPS * SAMPLES // parts
  pieces = [jitted_losses(take(arrays, slice(i * size, (i + 1) * size))) for i in range(parts)]
  total = {
    name: (
      sum(piece[name][0] for piece in pieces),
      np.concatenate([piece[name][1] for piece in pieces]),
    )
    for name in ROWS
  }
  assert_same(total, whole)


def test_permuting_sequences_permutes_gradients(arrays: Any, whole: Any) -> None:
  order = np.random.default_rng(1).permutation(GROUPS * SAMPLES)
  permuted = jitted_losses(take(arrays, order))
  assert_same(permuted, {name: (x[0], x[1][order]) for name, x in whole.items()})


def packed(arrays: dict[str, Any]) -> tuple[dict[str, Any], jax.Array, list[Any]]:
  """The responses moved, one after another, into rows of 13 tokens; unequal segments."""
  width, places, row, column = 13, [], 0, 0
  mask = np.asarray(arrays["mask"])
  for sequence in range(len(mask)):
    length = int(mask[sequence].nonzero()[0].max(initial=-1)) + 1
    if column + length > width:
      row, column = row + 1, 0
    places.append((sequence, row, column, length))
    column += length
  ids = np.zeros((row + 1, width), np.int32)
  # Ids need be neither small nor in order.
  for sequence, r, c, length in places:
    ids[r, c : c + length] = 1000 - 7 * sequence

  def pack(x: jax.Array) -> jax.Array:
    x = np.asarray(x)
    out = np.zeros((row + 1, width), x.dtype)
    for sequence, r, c, length in places:
      out[r, c : c + length] = x[sequence, :length]
    return jnp.asarray(out)

  return jax.tree.map(pack, arrays), jnp.asarray(ids), places


def test_packed_equals_unpacked(arrays: Any, whole: Any) -> None:
  moved, ids, places = packed(arrays)
  got = jax.device_get(jitted_losses(moved, ids))
  back = {}
  for name, (loss, gradient) in got.items():
    unpacked = np.zeros((GROUPS * SAMPLES, TIME), gradient.dtype)
    for sequence, r, c, length in places:
      unpacked[sequence, :length] = gradient[r, c : c + length]
    back[name] = (loss, unpacked)
  assert_same(back, whole)


def on_mesh(arrays: Any, devices: int, axis_type: AxisType) -> dict[str, Any]:
  mesh = jax.make_mesh((devices,), ("data",), (axis_type,), devices=jax.devices()[:devices])
  with jax.set_mesh(mesh):
    placed = jax.device_put(arrays, NamedSharding(mesh, P("data", None)))
    return jax.device_get(jax.jit(losses)(placed))


def under_shard_map(arrays: Any, devices: int) -> dict[str, Any]:
  mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])

  # The weights are global, so a psum of the local losses is the loss, and the gradient in the
  # local log-probs needs no reduction at all.
  def local(part: Any) -> Any:
    return {name: (jax.lax.psum(x[0], "data"), x[1]) for name, x in losses(part).items()}

  specs = {name: (P(), P("data")) for name in ROWS}
  mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=specs)
  return jax.device_get(jax.jit(mapped)(arrays))


@pytest.mark.parametrize(
  "devices",
  [pytest.param(n, marks=SLOW) for n in (1, 2, 4)] + [8],
)
@pytest.mark.parametrize("how", [pytest.param("auto", marks=SLOW), "explicit", "shard_map"])
def test_devices_agree(arrays: Any, whole: Any, devices: int, how: str) -> None:
  if how == "shard_map":
    got = under_shard_map(arrays, devices)
  else:
    got = on_mesh(arrays, devices, AxisType.Auto if how == "auto" else AxisType.Explicit)
  assert_same(got, whole)


@SLOW
def test_packed_rows_on_devices(arrays: Any) -> None:
  """Segments on an Explicit mesh: the sorts and scatters inside stay on their rows."""
  moved, ids, _ = packed(arrays)
  count = 8 * -(-ids.shape[0] // 8)
  pad = lambda x: jnp.pad(x, ((0, count - x.shape[0]), (0, 0)))  # noqa: E731
  moved, ids = jax.tree.map(pad, moved), pad(ids)
  want = jax.device_get(jitted_losses(moved, ids))
  mesh = jax.make_mesh((8,), ("data",))
  with jax.set_mesh(mesh):
    placed = jax.device_put((moved, ids), NamedSharding(mesh, P("data", None)))
    got = jax.device_get(jax.jit(losses)(*placed))
  assert_same(got, want)


def test_on_policy_gradient_of_ratio_surrogates_is_reinforce(arrays: Any) -> None:
  """At log-ratio 0 every coefficient is 1, so only the weights tell rows apart."""
  mask = arrays["mask"]
  advantages = jnp.where(mask, arrays["per_row"]["GRPO"]["advantages"], 0.0)
  weights = rl.token_mean(mask)

  @jax.jit
  def gradients(logprobs: jax.Array) -> dict[str, jax.Array]:
    def loss(name: str, logprobs: jax.Array) -> jax.Array:
      extra = {"selected": mask & False} if name in ("CLIP_COV", "KL_COV") else {}
      # A level that mixes tokens of one row keeps the row's total gradient; per token here.
      objective = dataclasses.replace(ROWS[name], level=rl.per_token)
      return rl.objective_loss(
        objective, logprobs, None, advantages, mask, loss_weights=weights, **extra
      )[0]

    return {name: jax.grad(partial(loss, name))(logprobs) for name in ROWS}

  for name, gradient in gradients(arrays["logprobs"]).items():
    np.testing.assert_allclose(gradient, -weights * advantages, atol=1e-7, err_msg=name)


ALL_ROWS = [
  n if n in ("GRPO", "GSPO_TOKEN", "DR_GRPO") else pytest.param(n, marks=SLOW) for n in ROWS
]


@pytest.mark.parametrize("name", ALL_ROWS)
def test_equal_objectives_compile_once_and_masks_never_recompile(arrays: Any, name: str) -> None:
  traces = []
  selected = arrays["mask"] if name in ("CLIP_COV", "KL_COV") else None

  @partial(jax.jit, static_argnames="objective")
  def step(objective: rl.Objective, logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    traces.append(objective)
    weights, advantages = objective.loss_weights(mask), jnp.ones_like(logprobs[:, :1])
    return rl.objective_loss(
      objective, logprobs, None, advantages, mask, loss_weights=weights, selected=selected
    )[0]

  def rebuilt(objective: rl.Objective) -> rl.Objective:
    copy = lambda f: partial(f.func, *f.args, **f.keywords) if isinstance(f, partial) else f  # noqa: E731
    return rl.Objective(*(copy(getattr(objective, x.name)) for x in dataclasses.fields(objective)))

  again = rebuilt(ROWS[name])
  assert again == ROWS[name]
  assert hash(again) == hash(ROWS[name])
  for mask in (arrays["mask"], ~arrays["mask"], arrays["mask"] & False):
    step(ROWS[name], arrays["logprobs"], mask)
    step(again, arrays["logprobs"], mask)
  assert len(traces) == 1


def test_objectives_differ_where_one_constant_differs() -> None:
  one = dataclasses.replace(rl.GRPO, surrogate=partial(rl.ppo_clip, clip_low=0.2, clip_high=0.3))
  assert one != rl.GRPO
  assert rl.dr_grpo(8) != rl.dr_grpo(9)
  assert rl.dr_grpo(8) == rl.dr_grpo(8)
  assert rl.GRPO != "GRPO"
  assert len(set(ROWS.values())) == len(ROWS)


def test_constants_may_be_traced(arrays: Any) -> None:
  def loss(clip: jax.Array) -> jax.Array:
    objective = dataclasses.replace(
      rl.GRPO, surrogate=partial(rl.ppo_clip, clip_low=clip, clip_high=clip)
    )
    row = arrays["per_row"]["GRPO"]
    return rl.objective_loss(
      objective,
      arrays["logprobs"],
      arrays["old_logprobs"],
      row["advantages"],
      arrays["mask"],
      loss_weights=row["weights"],
    )[0]

  clips = jnp.array([0.1, 0.2, 0.5])
  np.testing.assert_allclose(jax.vmap(loss)(clips), [loss(float(x)) for x in clips], rtol=1e-6)


def simple(**changes: Any) -> jax.Array:
  arguments: dict[str, Any] = {
    "objective": rl.GRPO,
    "logprobs": jnp.full((2, 3), -1.0),
    "old_logprobs": jnp.full((2, 3), -1.5),
    "advantages": jnp.array([[1.0], [-1.0]]),
    "mask": jnp.ones((2, 3), bool),
    "loss_weights": jnp.full((2, 3), 1 / 6),
  }
  arguments |= changes
  first = [
    arguments.pop(x) for x in ("objective", "logprobs", "old_logprobs", "advantages", "mask")
  ]
  return rl.objective_loss(*first, **arguments)[0]


def test_terms_add_up() -> None:
  """Policy term of `simple`: gains min(e^.5, 1.2) = 1.2 and -e^.5, means -0.224361 halved."""
  policy = -(1.2 - np.exp(0.5)) / 2
  np.testing.assert_allclose(simple(), policy, rtol=1e-6)
  with_kl = simple(ref_logprobs=jnp.full((2, 3), -2.0), kl=rl.kl_k1, kl_coef=0.1)
  np.testing.assert_allclose(with_kl, policy + 0.1, rtol=1e-6)
  with_entropy = simple(entropy=jnp.full((2, 3), 2.0), entropy_coef=0.1)
  np.testing.assert_allclose(with_entropy, policy - 0.2, rtol=1e-6)
  corrected = simple(importance_weights=jnp.array([[2.0], [1.0]]))
  np.testing.assert_allclose(corrected, -(2 * 1.2 - np.exp(0.5)) / 2, rtol=1e-6)


def test_importance_weights_leave_the_kl_alone() -> None:
  none = simple(
    importance_weights=jnp.zeros((2, 3)),
    ref_logprobs=jnp.full((2, 3), -2.0),
    kl=rl.kl_k1,
    kl_coef=0.1,
  )
  np.testing.assert_allclose(none, 0.1, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("CLIP_COV", "KL_COV")])
def test_a_rejected_token_cannot_overflow(name: str) -> None:
  """Its ratio is inf in float32; weight 0 must remove it, not multiply it (0 * inf is NaN)."""
  weights = jnp.ones((2, 3)).at[1].set(0.0)

  @jax.jit
  @jax.value_and_grad
  def run(logprobs: jax.Array) -> jax.Array:
    return simple(objective=ROWS[name], logprobs=logprobs, importance_weights=weights)

  for extreme in (1e3, -1e3, 1e30, -1e30, np.inf, -np.inf):
    loss, gradient = run(jnp.full((2, 3), -1.0).at[1, 1].set(extreme))
    assert np.isfinite(loss), extreme
    assert np.isfinite(gradient).all(), extreme
    assert (gradient[1] == 0).all(), extreme


@pytest.mark.parametrize(
  ("changes", "error", "match"),
  [
    ({"mask": jnp.ones((2, 3))}, TypeError, "mask must be boolean"),
    ({"mask": jnp.ones((2, 2), bool)}, ValueError, r"mask is \(2, 2\), logprobs is \(2, 3\)"),
    ({"old_logprobs": jnp.ones((3, 3))}, ValueError, "old_logprobs"),
    ({"advantages": jnp.ones(2)}, ValueError, "advantages"),
    ({"advantages": jnp.ones((1, 3))}, ValueError, "advantages"),
    ({"loss_weights": jnp.ones((2, 1))}, ValueError, "loss_weights"),
    ({"importance_weights": jnp.ones(2)}, ValueError, "importance_weights"),
    ({"segment_ids": jnp.ones((2, 2), int)}, ValueError, "segment_ids"),
    ({"segment_ids": jnp.ones((2, 3))}, TypeError, "segment_ids must be integer"),
    ({"kl": rl.kl_k3}, ValueError, "ref_logprobs is None"),
    ({"ref_logprobs": jnp.ones((2, 3))}, ValueError, "kl and ref_logprobs go together"),
    ({"kl_coef": 0.1}, ValueError, "kl_coef is given but kl is None"),
    ({"entropy_coef": 0.1}, ValueError, "entropy_coef is given but entropy is None"),
    ({"entropy": jnp.ones((2, 2)), "entropy_coef": 0.1}, ValueError, "entropy"),
    ({"selected": jnp.ones((2, 3), bool)}, TypeError, "selected"),
    ({"objective": ROWS["KL_COV"]}, TypeError, "selected"),
    ({"klcoef": 0.1}, TypeError, "klcoef"),
  ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_bad_input_is_a_clear_error(changes: Any, error: Any, match: str, jit: bool) -> None:
  static = {k: v for k, v in changes.items() if not isinstance(v, jax.Array)}
  traced = {k: v for k, v in changes.items() if isinstance(v, jax.Array)}
  call = lambda traced: simple(**static, **traced)  # noqa: E731
  with pytest.raises(error, match=match):
    (jax.jit(call) if jit else call)(traced)


def test_square_batch_does_not_broadcast() -> None:
  """[B] against [B, T] with B == T is the silent mistake."""
  with pytest.raises(ValueError, match="advantages"):
    rl.ppo_clip(jnp.zeros((3, 3)), jnp.ones(3))


def test_the_table_is_complete() -> None:
  source = [name for name, x in vars(objectives).items() if isinstance(x, rl.Objective)]
  assert set(source) | {"DR_GRPO"} == set(ROWS)
  for name in source:
    assert getattr(rl, name) is getattr(objectives, name)
