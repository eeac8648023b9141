"""Faults that users of other libraries have reported, each with its own small input.

Every test is named after a kind of fault and cites a public report of it; its docstring is the
arithmetic of the right value. Where the fault is one of a kind, the whole kind is tested: every
surrogate, every loss weight, every KL estimator. `ELSEWHERE` names the kinds that are tested in
files of their own.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl_lm as rl
from tests import linear_tables, preference_tables
from tests import test_faults_checkpoints as checkpoint_faults
from tests import test_faults_data_order as data_order_faults
from tests import test_faults_lm as lm_faults
from tests import test_faults_multihost as multihost_faults
from tests import test_faults_preferences as preference_faults
from tests import test_faults_training as training_faults
from tests.calls import FUNCTIONS, assert_complete, named, public_calls

# Faults of critics and preference losses, of models and of training runs have files of their own.
ELSEWHERE = {
  preference_faults: ("value_clip", "ref_ignored", "dpo_smoothing"),
  lm_faults: (
    "dp_same_seed",
    "categorical_bf16",
    "key_reuse",
    "kv_cache",
    "left_pad_pos",
    "softcap",
    "tied",
    "retokenize",
  ),
  training_faults: ("nan_skip", "clip_norm", "zero_grad_step", "donation"),
  data_order_faults: ("data_order",),
  checkpoint_faults: ("orbax_types",),
  multihost_faults: ("multihost_hang",),
}
NUMBER_OF_FAULTS = 70


def test_every_fault_is_tested() -> None:
  tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
  tested = {x for x in tested if not x.startswith(("every_", "hazard_"))}
  lists = [tested]
  for file, names in ELSEWHERE.items():
    assert all(hasattr(file, f"test_{name}") for name in names)
    lists.append(names)
  # Each in one list only.
  assert sum(map(len, lists)) == len(set().union(*lists)) == NUMBER_OF_FAULTS


close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)

# Compiled whole: a function that is called with a shape once is mostly compiling, step by step.
STATIC = {"axis", "count_empty", "ddof", "edges", "group_size", "k", "num_groups", "objective"}


def compiled(name: str) -> Callable[..., Any]:
  function = getattr(rl, name)
  static = STATIC & set(inspect.signature(function).parameters)
  return jax.jit(function, static_argnames=static | ({"kl"} if "objective" in static else set()))


fast = SimpleNamespace(**{name: compiled(name) for name in FUNCTIONS})


def unselected(surrogate: Any, log_ratio: Any, advantages: Any, **rest: Any) -> jax.Array:
  return surrogate(log_ratio, advantages, selected=jnp.zeros(log_ratio.shape, bool), **rest)


SURROGATES: dict[str, Callable[..., jax.Array]] = {
  "reinforce": rl.reinforce,
  "importance_weighted": rl.importance_weighted,
  "ppo_clip": rl.ppo_clip,
  "dual_clip": rl.dual_clip,
  "sapo": rl.sapo,
  "gmpo": rl.gmpo,
  "cispo": rl.cispo,
  "topr": rl.topr,
  "vespo": rl.vespo,
  "dppo_tv": rl.dppo_tv,
  "dppo_kl": rl.dppo_kl,
  "dro": partial(rl.dro, beta=0.1),
  "clip_cov": partial(unselected, rl.clip_cov),
  "kl_cov": partial(unselected, rl.kl_cov),
}
LOSS_WEIGHTS: dict[str, Callable[..., jax.Array]] = {
  "token_mean": rl.token_mean,
  "sequence_mean": rl.sequence_mean,
  "sequence_sum": rl.sequence_sum,
  "token_sum": rl.token_sum,
  "group_token_mean": rl.group_token_mean,
  "constant_length": partial(rl.constant_length, length=4),
  "length_power": partial(rl.length_power, alpha=0.5),
}


def on(*values: int) -> jax.Array:
  return jnp.array(values, bool)


def value_and_grad(f: Callable[..., jax.Array], x: Any) -> tuple[Any, Any]:
  value, gradient = jax.jit(jax.value_and_grad(f))(jnp.asarray(x, jnp.float32))
  return np.asarray(value), np.asarray(gradient)


# --------------------------------------------------------------------- devices, micro-batches

DOT = np.nan  # at a masked position
COSTS = np.array([[1, 2, 3], [4, DOT, DOT], [5, 6, DOT], [DOT, DOT, DOT]], np.float32)
DEVICES = pytest.mark.parametrize("devices", [1, 2, 4])


def weighted_costs(
  w: jax.Array, costs: jax.Array, mask: jax.Array, weights: jax.Array
) -> jax.Array:
  return jnp.sum(weights * w * fast.zero_masked(costs, mask))


@DEVICES
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_dp_token_mean(devices: int, axis_type: AxisType) -> None:
  """Rows 1 2 3 | 4 | 5 6 | none on four devices, loss w c, w = 2: 2 (21 / 6) = 7, slope 3.5.

  A mean per device and then over devices gives 5.75 and 2.875. PrimeIntellect-ai/prime-rl#2562.
  """
  mesh = jax.make_mesh((devices,), ("data",), (axis_type,), devices=jax.devices()[:devices])
  mask = ~np.isnan(COSTS)
  with jax.set_mesh(mesh):
    rows = NamedSharding(mesh, P("data", None))
    costs, mask = (jax.device_put(x, rows) for x in (COSTS, mask))

    @jax.jit
    def run(w: jax.Array, costs: jax.Array, mask: jax.Array) -> Any:
      return jax.value_and_grad(weighted_costs)(w, costs, mask, fast.token_mean(mask))

    loss, slope = run(jnp.float32(2.0), costs, mask)
  close((loss, slope), (7.0, 3.5))


@DEVICES
@pytest.mark.parametrize("pattern", ["grad outside", "grad inside", "grad inside, unchecked"])
def test_shardmap_grad(devices: int, pattern: str) -> None:
  """The same batch under shard_map: loss 7, slope 3.5 on any number of devices.

  The weights are global, so the local losses add up and so do the local slopes. Checked, JAX adds
  the slopes of a replicated parameter itself; unchecked it is one psum. jax-ml/jax#3970.
  """
  mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
  mask = ~np.isnan(COSTS)
  arrays = (COSTS, mask, fast.token_mean(mask))
  unchecked = pattern.endswith("unchecked")

  def local(w: jax.Array, *arrays: jax.Array) -> Any:
    if pattern == "grad outside":
      return jax.lax.psum(weighted_costs(w, *arrays), "data")
    loss, slope = jax.value_and_grad(weighted_costs)(w, *arrays)
    return jax.lax.psum(loss, "data"), jax.lax.psum(slope, "data") if unchecked else slope

  mapped = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(P(), P("data"), P("data"), P("data")),
    out_specs=P(),
    check_vma=not unchecked,
  )
  run = jax.value_and_grad(mapped) if pattern == "grad outside" else mapped
  close(jax.jit(run)(jnp.float32(2.0), *arrays), (7.0, 3.5))


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("empty", [0, 2])
def test_ga_token_mean(parts: int, empty: int) -> None:
  """Losses 1..6 and 10, 20: 51 / 8 = 6.375 however they are cut; a mean of means is 9.25.

  The gradient in a factor w of all losses is the same number. allenai/open-instruct#1161.
  """
  losses = np.array([[1, 2, 3], [4, 5, 6], [10, 0, 0], [20, 0, 0], *([[7, 7, 7]] * empty)])
  mask = np.array([[1] * 3, [1] * 3, [1, 0, 0], [1, 0, 0], *([[0] * 3] * empty)], bool)
  weights = np.asarray(fast.token_mean(mask))
  total = np.zeros(2)
  for rows in np.array_split(np.arange(len(losses)), parts):
    part = lambda w, rows=rows: weighted_costs(w, losses[rows], mask[rows], weights[rows])
    total += value_and_grad(part, 1.0)
  close(total, 6.375)


def test_ga_double_div() -> None:
  """51 / 8 = 6.375 is a sum of the parts; averaging them once more over K = 2 gives 3.1875.

  The contract: parts add up. An accumulator that averages, such as optax.MultiSteps (micro
  gradients 1 and 3 give 2), must be handed K times each part. modelscope/ms-swift#10117.
  """
  optax = pytest.importorskip("optax")
  losses = jnp.array([[1.0, 2, 3, 4, 5, 6], [10, 20, 0, 0, 0, 0]])
  mask = jnp.array([[True] * 6, [True] * 2 + [False] * 4])
  weights = fast.token_mean(mask)
  slopes = [jax.grad(weighted_costs)(1.0, losses[i], mask[i], weights[i]) for i in range(2)]
  close(sum(slopes), 6.375)
  averaging = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
  state = averaging.init(jnp.float32(0.0))
  for slope in slopes:
    step, state = averaging.update(2 * slope, state)
  close(step, -6.375)


# ------------------------------------------------------------------------------- masks, overflow


@pytest.mark.parametrize("x", [-200.0, -math.inf, math.nan])
def test_masked_nan(x: float) -> None:
  """log p = [-1, -2, -3], old = [-1, -2, X], mask [1, 1, 0]: mean ratio 1, gradient [.5, .5, 0].

  Masking by multiplication makes it NaN, a `where` behind exp makes the gradient NaN.
  google/tunix#2310.
  """
  value, gradient = masked_ratios(jnp.float32(x)).pop("mean ratio")
  close(value, 1.0)
  close(gradient, [0.5, 0.5, 0.0])
  # Of every surrogate, with the garbage in the log-ratio itself: as on-policy, c A / 2 with A = 1.
  for name, (value, gradient) in masked_ratios(jnp.float32(x)).items():
    if name in SURROGATES:
      assert np.isfinite(value), name
      close(gradient, [-0.5, -0.5, 0.0], err_msg=name)


@jax.jit
def masked_ratios(x: jax.Array) -> dict[str, Any]:
  """{what: (value, gradient)}, with x at the masked position of everything."""
  mask = on(1, 1, 0)
  put = lambda *numbers: jnp.append(jnp.array(numbers), x)
  old = put(-1.0, -2.0)

  def mean_ratio(logprobs: jax.Array) -> jax.Array:
    ratio = jnp.exp(fast.per_token(fast.token_log_ratio(logprobs, old, mask), mask))
    return fast.masked_mean(ratio, mask)

  def loss(surrogate: Any, log_ratio: jax.Array) -> jax.Array:
    gain = surrogate(log_ratio, put(1.0, 1.0), mask=mask, old_logprobs=old)
    return -jnp.sum(fast.token_mean(mask) * gain)

  results = {
    name: jax.value_and_grad(partial(loss, f))(put(0, 0)) for name, f in SURROGATES.items()
  }
  return results | {"mean ratio": jax.value_and_grad(mean_ratio)(jnp.array([-1.0, -2.0, -3.0]))}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ratio_overflow(dtype: Any) -> None:
  """log p = 100, old = 0, eps = .2: A = 1 gives loss -1.2 and gradient 0; A = 0 gives 0 and 0.

  A = -1 is unbounded in PPO (exp(100) > 3.4e38) and -3 under a dual clip of 3. Everything that is
  bounded has a finite gradient. OpenRLHF/OpenRLHF#1293.
  """
  log_ratio = jnp.full((3, 1), 100.0, dtype)
  advantages = (1.0, 0.0, -1.0)

  @jax.jit
  def gains(log_ratio: jax.Array) -> dict[str, Any]:
    out = {}
    for name, surrogate in SURROGATES.items():
      # An old log-prob of -101 makes the new one -1.
      f = partial(
        surrogate, advantages=jnp.array(advantages)[:, None], old_logprobs=jnp.full((3, 1), -101.0)
      )
      value, pull = jax.vjp(f, log_ratio)
      out[name] = value, pull(jnp.ones_like(value))[0].astype(jnp.float32)
    return out

  found = jax.device_get(gains(log_ratio))
  gain = lambda name, row: (found[name][0][row, 0], found[name][1][row, 0])
  close(gain("ppo_clip", 0), (1.2, 0.0))
  assert gain("ppo_clip", 2) == (-math.inf, -math.inf)
  close(gain("dual_clip", 2), (-3.0, 0.0))
  for name in SURROGATES:
    for row, advantage in enumerate(advantages):
      result = gain(name, row)
      assert not np.isnan(result).any(), name
      unbounded = ("importance_weighted", "kl_cov")
      unbounded += ("ppo_clip", "gmpo", "clip_cov") if advantage < 0 else ()
      if name not in unbounded or advantage == 0:
        assert np.isfinite(result).all(), (name, advantage)
      if advantage == 0 and name != "dro":
        assert result == (0.0, 0.0), name

  # Healthy ratios are exp to the bit: the guard costs nothing.
  x = jnp.linspace(-10.0, 10.0, 101)
  plain = jax.jit(lambda x: 0.7 * jnp.exp(x))(x)
  guarded = jax.jit(lambda x: fast.importance_weighted(x, jnp.full(101, 0.7)))(x)
  np.testing.assert_array_equal(guarded, plain)


@pytest.mark.parametrize(("advantage", "loss"), [(1.0, -1.2), (0.0, 0.0), (-1.0, math.inf)])
def test_hazard_ratio_of_a_long_sequence(advantage: float, loss: float) -> None:
  """400 tokens of log-ratio .3: the ratio of the sequence is exp(120), clipped at 1.2."""
  old, mask = jnp.full((1, 400), -1.0), jnp.ones((1, 400), bool)
  objective = dataclasses.replace(rl.GRPO, level=rl.per_sequence)

  def f(logprobs: jax.Array) -> jax.Array:
    advantages, weights = jnp.array([[advantage]]), objective.loss_weights(mask)
    return fast.objective_loss(objective, logprobs, old, advantages, mask, loss_weights=weights)[0]

  value, gradient = value_and_grad(f, old + 0.3)
  close(value, loss)
  assert not np.isnan(gradient).any()
  assert advantage < 0 or not gradient.any()


def test_all_masked() -> None:
  """Loss [3, 4], mask [0, 0]: 0 with gradient 0; a micro-batch of mean 2 and an empty one: 2.

  No epsilon in the denominator: the mean of [2, 2] is exactly 2. verl-project/verl#782.
  """
  value, gradient = value_and_grad(lambda x: fast.masked_mean(x, on(0, 0)), [3.0, 4.0])
  assert value == 0
  assert not gradient.any()
  assert fast.masked_mean(jnp.array([2.0, 2.0]), on(1, 1)) == 2

  mask = jnp.array([[[True, True], [False, False]]])
  for name, weights in LOSS_WEIGHTS.items():
    assert not np.asarray(weights(mask & False)).any(), name
    # With or without the empty row, the other one weighs the same.
    np.testing.assert_array_equal(weights(mask)[:, :1], weights(mask[:, :1]), err_msg=name)
  losses = jnp.array([[[1.0, 3.0], [math.nan, math.nan]]])
  assert jnp.sum(fast.token_mean(mask) * fast.zero_masked(losses, mask)) == 2
  window = fast.average(losses[0, 0], mask[0, 0]) + fast.average(losses[0, 1], mask[0, 1])
  assert window.mean() == 2

  f = lambda x: fast.objective_loss(
    rl.GSPO,
    x,
    None,
    jnp.ones((2, 1)),
    mask[0] & False,
    loss_weights=fast.token_mean(mask[0] & False),
  )[0]
  value, gradient = value_and_grad(f, losses[0])
  assert value == 0
  assert not gradient.any()


def test_denominator_mask() -> None:
  """Row A of 2 tokens, row B of 4 dropped as overlong, width 6, losses 1: 2 / 2 = 1.

  2 / 6 counts B, 2 / 12 the padding: one mask makes numerator and denominator.
  huggingface/trl#6369.
  """
  mask = jnp.arange(6)[None] < jnp.array([2, 4])[:, None]
  effective = mask & jnp.array([[True], [False]])
  for name in ("token_mean", "sequence_mean", "group_token_mean"):
    assert jnp.sum(LOSS_WEIGHTS[name](effective) * jnp.ones((2, 6))) == 1, name
  # The other choice is as visible: weights of all tokens, then the dropped ones taken out.
  close(jnp.sum(fast.token_mean(mask) * effective), 2 / 6)


@pytest.mark.parametrize("width", [4, 8, 16])
def test_drgrpo_const(width: int) -> None:
  """Two sequences whose token losses sum to 12, L = 8: 12 / (2 * 8) = .75 at any padded width.

  verl-project/verl#3741.
  """
  losses = jnp.zeros((2, width)).at[:, :4].set(jnp.array([[1.0, 2, 3, 0], [1, 2, 2, 1]]))
  mask = jnp.arange(width)[None] < jnp.array([3, 4])[:, None]
  for weights in (fast.constant_length(mask, length=8), rl.dr_grpo(8).loss_weights(mask)):
    assert jnp.sum(weights * losses) == 0.75


def test_mask_rowwise() -> None:
  """Losses [1, 1, 50], [1, 1, 1], mask [1, 1, 0], [1, 1, 1]: the 50 may be -50.

  Every reduction, and of the mean: 5 / 5 = 1. (All functions: tests/test_garbage.py.)
  huggingface/trl#6654.
  """
  mask = jnp.array([[True, True, False], [True, True, True]])
  for name, weights in LOSS_WEIGHTS.items():
    assert weights(mask)[0, 2] == 0, name
    for x in (50.0, -50.0):
      losses = jnp.ones((2, 3)).at[0, 2].set(x)
      want = {"token_sum": 5, "sequence_sum": 2.5, "constant_length": 2.5 / 4}
      want["length_power"] = (math.sqrt(2) + math.sqrt(3)) / 2
      close(jnp.sum(weights(mask) * losses), want.get(name, 1.0), err_msg=name)


def test_agg_default() -> None:
  """Losses [1, 1, 1, 1] and [5], L = 4: token mean 9/5, sequence mean 3, constant 9/8.

  Three functions, none of them a default: `loss_weights` is required. marin-community/marin#2376.
  """
  losses = jnp.array([[1.0, 1, 1, 1], [5, 0, 0, 0]])
  mask = losses > 0
  want = {"token_mean": 1.8, "sequence_mean": 3.0, "constant_length": 1.125}
  for name, value in want.items():
    close(jnp.sum(LOSS_WEIGHTS[name](mask) * losses), value)
  required = inspect.signature(rl.objective_loss).parameters["loss_weights"]
  assert required.default is inspect.Parameter.empty


def test_token_mean_scope() -> None:
  """Group A: 2 tokens, losses sum to 2; B: 8 tokens, 24. Pooled 26/10; per group (1 + 3)/2 = 2.

  verl-project/verl#2776.
  """
  mask = jnp.arange(8)[None, None] < jnp.array([2, 8])[:, None, None]
  losses = jnp.where(mask, jnp.array([1.0, 3.0])[:, None, None], 0.0)
  close(jnp.sum(fast.token_mean(mask) * losses), 2.6)
  close(jnp.sum(fast.group_token_mean(mask) * losses), 2.0)


# ------------------------------------------------------------------------- tokens and log-probs

SHIFT_TOKENS = jnp.array([0, 2, 1, 2])
SHIFT_PROBS = jnp.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.9, 0.05, 0.05]])


def test_shift_same_pos() -> None:
  """Token t is scored by the state before it: ln .1, ln .6, ln .5, and nothing for the first.

  The same position would read .7, .3, .25, .05. A model that copies its input is scored badly, one
  that predicts the next token well. AI-Hypercomputer/maxtext#2103.
  """
  got = fast.next_token_logprobs(jnp.log(SHIFT_PROBS), SHIFT_TOKENS)
  close(got, [0.0, -2.302585, -0.510826, -0.693147])
  tokens = jnp.array([3, 1, 2, 0, 1])
  copies = 20.0 * jax.nn.one_hot(tokens, 4)
  predicts = 20.0 * jax.nn.one_hot(jnp.roll(tokens, -1), 4)
  assert (fast.next_token_logprobs(copies, tokens)[1:] < -19).all()
  assert (fast.next_token_logprobs(predicts, tokens)[1:] > -1e-6).all()


def test_mask_not_shifted() -> None:
  """The mask speaks of tokens: over the last two, ln .6 + ln .5 = -1.20397.

  Sliced like the inputs it would be ln .5 = -.69315 with one prompt token instead of the last.
  The value of a state and the reward of a token stand at the same index (`gae`).
  Goekdeniz-Guelmez/mlx-lm-lora#80.
  """
  mask = on(0, 0, 1, 1)
  logprobs = fast.next_token_logprobs(jnp.log(SHIFT_PROBS), SHIFT_TOKENS, mask=mask)
  close(fast.sequence_logprob(logprobs, mask), -1.203973)
  assert np.flatnonzero(fast.terminal_rewards(jnp.float32(1.0), mask)).tolist() == [3]


def test_index_convention() -> None:
  """One convention: two scorings of the same tokens give a ratio of exactly 1 everywhere.

  From the raw output of a model, and from logits that are aligned already.
  PrimeIntellect-ai/prime-rl#1525.
  """
  rng = np.random.default_rng(0)
  logits, tokens = rng.normal(size=(2, 6, 5)).astype(np.float32), rng.integers(0, 5, (2, 6))
  mask = jnp.arange(6)[None] >= jnp.array([1, 3])[:, None]

  @jax.jit
  def ratio_of(logits: jax.Array, tokens: jax.Array, mask: jax.Array) -> Any:
    shifted = fast.next_token_logprobs(logits, tokens, mask=mask)
    aligned = fast.token_logprobs(jnp.roll(logits, 1, axis=1), tokens, mask=mask)
    return shifted, jnp.exp(fast.token_log_ratio(shifted, aligned, mask))

  shifted, ratio = ratio_of(logits, tokens, mask)
  assert (ratio == 1).all()
  assert (jnp.where(mask, shifted, -1.0) < 0).all()


def test_packing() -> None:
  """Segments [1, 1, 1, 2, 2, 0]: targets 1, 2 and 4 are scored, not 3, whose sample starts there.

  Packed equals unpacked, and another sample 1 changes no bit of sample 2. huggingface/trl#5854.
  """
  segment_ids = jnp.array([1, 1, 1, 2, 2, 0])
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 5)), jnp.float32)
  tokens = jnp.array([0, 3, 1, 4, 2, 0])
  score = jax.jit(rl.next_token_logprobs)
  packed = np.asarray(score(logits, tokens, segment_ids=segment_ids))
  assert (packed != 0).tolist() == [False, True, True, False, True, False]
  for part in (slice(0, 3), slice(3, 5)):
    close(packed[part], score(logits[part], tokens[part]))

  other_logits = logits.at[:3].set(-logits[:3])
  other = score(other_logits, tokens.at[:3].set(2), segment_ids=segment_ids)
  np.testing.assert_array_equal(other[3:], packed[3:])
  # The levels too: the second sample's log-ratios never meet those of the first.
  mask = segment_ids > 0
  for level in (rl.per_prefix, rl.per_sequence, rl.per_sequence_geometric):
    level = jax.jit(level)
    rows = (jnp.array([x, x, x, 0.3, 0.1, 0.0]) for x in (0.7, 1e30))
    one, two = (level(row, mask, segment_ids=segment_ids) for row in rows)
    np.testing.assert_array_equal(one[3:], two[3:])


@pytest.mark.parametrize(
  ("tokens", "mask"),
  [([5, 2, 2, 2], [1, 1, 0, 0]), ([2, 7, 7, 7], [1, 0, 0, 0]), ([5, 2, 9, 9], [1, 1, 0, 0])],
)
def test_pad_is_eos(tokens: list[int], mask: list[int]) -> None:
  """End token 2, also the padding: the first one is an action, what follows is not.

  By value, `tokens != pad`, it would never be trained. huggingface/trl#4970.
  """
  assert fast.response_mask(jnp.array(tokens), stop_tokens=2).astype(int).tolist() == mask


def test_stop_token_set() -> None:
  """Stop ids {2, 9}, response [5, 9, 0, 0]: mask [1, 1, 0, 0], finished.

  With 2 alone: [1, 1, 1, 1] and cut off. THUDM/slime#1490.
  """
  tokens = jnp.array([5, 9, 0, 0])
  for stops, mask, finished in (([2, 9], [1, 1, 0, 0], True), ([2], [1, 1, 1, 1], False)):
    assert fast.response_mask(tokens, stop_tokens=stops).astype(int).tolist() == mask
    assert fast.is_finished(tokens, stop_tokens=stops) == finished


def test_missing_eos_prompt() -> None:
  """Prompt [2, 4, 2], response [5, 6, 7], end 2, score 1, penalty .5: the reward is .5.

  Searching the whole row finds the turn separators of the prompt: 1. huggingface/trl#6805.
  """
  tokens, within = jnp.array([2, 4, 2, 5, 6, 7]), on(0, 0, 0, 1, 1, 1)
  finished = fast.is_finished(tokens, stop_tokens=2, within=within)
  assert jnp.where(finished, 1.0, 1.0 - 0.5) == 0.5
  mask = fast.response_mask(tokens, stop_tokens=2, within=within)
  assert mask.astype(int).tolist() == [0, 0, 0, 1, 1, 1]


def test_tool_mask_len() -> None:
  """Response [1, 1, 1, 1], tools [1, 0, 0, 1]: their product [1, 0, 0, 1], or 0 if dropped.

  Masks of unequal length are refused. huggingface/trl#5144.
  """
  response, tools = on(1, 1, 1, 1), on(1, 0, 0, 1)
  for keep, want in ((True, [1, 0, 0, 1]), (False, [0, 0, 0, 0])):
    mask = response & tools & keep
    assert mask.astype(int).tolist() == want
    assert (fast.token_sum(mask) == jnp.array(want)).all()
    assert fast.lengths(mask) == sum(want)
  with pytest.raises(ValueError, match=r"mask is \(3,\), logprobs is \(4,\)"):
    rl.on_policy_log_ratio(jnp.zeros(4), tools[:3])
  with pytest.raises(ValueError, match=r"within is \(3,\), tokens is \(4,\)"):
    rl.response_mask(jnp.zeros(4, jnp.int32), stop_tokens=2, within=tools[:3])


def test_temperature() -> None:
  """Logits [2, 1, 0], T = .5, token 0: -ln(1 + e^-2 + e^-4) = -.142932, ratio 1.

  T ignored: -.407606 and ratio .7675; log-prob / T without normalising: -.815212.
  huggingface/trl#4159.
  """
  logits, tokens = jnp.array([[2.0, 1.0, 0.0]]), jnp.array([0])
  sampled = jax.nn.log_softmax(logits / 0.5)[:, 0]
  scored = fast.token_logprobs(logits, tokens, temperature=0.5)
  close(scored, -math.log(1 + math.exp(-2) + math.exp(-4)))
  ratio = lambda scored: jnp.exp(fast.token_log_ratio(scored, sampled, on(1)))
  close(ratio(scored), 1.0)
  close(ratio(fast.token_logprobs(logits, tokens)), 0.7675, rtol=1e-4)
  # Every function of logits takes it: p = (.866814, .117310, .015876) for T = .5.
  p = np.exp(np.array([4.0, 2.0, 0.0]) - np.log(np.sum(np.exp([4.0, 2.0, 0.0]))))
  close(fast.token_entropy(logits, temperature=0.5), -np.sum(p * np.log(p)))
  close(fast.exact_kl(logits, jnp.zeros((1, 3)), temperature=0.5), np.sum(p * np.log(3 * p)))
  both = jnp.concatenate([logits, logits])
  close(fast.next_token_logprobs(both, jnp.array([1, 0]), temperature=0.5)[1], scored[0])


def test_topp_logprob() -> None:
  """Logits [2, 1, 0], top-k 2, token 0: over all -.407606, over the kept -.313262.

  Their difference is the kept mass: exp(-.094344) = .909969. A token outside the filter has
  log-prob -inf and ratio 0, not NaN. modelscope/ms-swift#8442.
  """
  logits, token = jnp.array([[2.0, 1.0, 0.0]]), jnp.array([0])
  filtered = logits.at[0, 2].set(-jnp.inf)
  full, kept = (fast.token_logprobs(x, token) for x in (logits, filtered))
  close((full[0], kept[0]), (-0.407606, -0.313262))
  close(jnp.exp(full - kept), 0.909969)

  def gain(logits: jax.Array, surrogate: Any) -> jax.Array:
    outside = fast.token_logprobs(logits, jnp.array([2]))
    log_ratio = fast.token_log_ratio(outside, jnp.array([-2.4]), on(1))
    return surrogate(log_ratio, jnp.ones(1))[0]

  for surrogate in (rl.importance_weighted, rl.ppo_clip, rl.dual_clip):
    value, gradient = value_and_grad(partial(gain, surrogate=surrogate), filtered)
    assert value == 0
    assert not gradient.any()


def test_topk_off_by_one() -> None:
  """Logits [3, 2, 2, 2, 1], k = 2: two tokens are kept and three share the rest, ties or not.

  By threshold four would be kept. k = 1 keeps the likeliest, k = V is `exact_kl`.
  kingoflolz/mesh-transformer-jax#164.
  """
  logits, ref = np.array([3.0, 2, 2, 2, 1]), np.array([0.0, 1, -1, 2, 0])
  p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, ref))
  for k in (1, 2):
    buckets = [np.append(x[:k], x[k:].sum()) for x in (p, q)]
    want = np.sum(buckets[0] * np.log(buckets[0] / buckets[1]))
    close(fast.top_k_kl(logits[None], ref[None], k=k), want)
  close(fast.top_k_kl(logits[None], ref[None], k=5), fast.exact_kl(logits[None], ref[None]))
  with pytest.raises(ValueError, match="k must lie in"):
    rl.top_k_kl(logits[None], ref[None], k=6)


@pytest.mark.parametrize("scale", [2.0, 30.0])
def test_positive_logp(scale: float) -> None:
  """32000 logits N(0, 2) in bfloat16: at most 0, float32, and exact to float32 rounding.

  A log-softmax in bfloat16 is off by .07. AI-Hypercomputer/maxtext#5231.
  """
  logits = jnp.asarray(scale * np.random.default_rng(0).normal(size=(8, 32000)), jnp.bfloat16)
  exact = np.asarray(logits, np.float64)
  exact -= exact.max(-1, keepdims=True)
  exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
  for tokens in (np.arange(8), exact.argmax(-1), exact.argmin(-1)):
    got = fast.token_logprobs(logits, jnp.asarray(tokens, jnp.int32))
    assert got.dtype == jnp.float32
    assert (got <= 0).all()
    np.testing.assert_allclose(got, exact[np.arange(8), tokens], rtol=2e-6, atol=2e-6)
  certain = jnp.zeros((1, 32000), jnp.bfloat16).at[0, 7].set(100.0)
  assert fast.token_logprobs(certain, jnp.array([7])) == 0


def test_fp16_lsm_grad() -> None:
  """70000 equal float16 logits: log-prob -ln 70000, gradient 1 - 1/V there and -1/V elsewhere.

  All finite, though 1 / 70000 is near the end of float16. jax-ml/jax#40409.
  """
  logits = jnp.zeros((1, 70000), jnp.float16)
  f = lambda z: fast.token_logprobs(z, jnp.array([3]))[0]
  value, gradient = jax.value_and_grad(f)(logits)
  close(value, -math.log(70000))
  assert np.isfinite(gradient).all()
  gradient = np.asarray(gradient[0], np.float64)
  close(gradient[3], 1.0, rtol=1e-3)
  close(np.delete(gradient, 3), -1 / 70000, rtol=1e-2)


def test_softmax_where() -> None:
  """softmax([1, 2, 200], where=[T, T, F])[0]: p = .268941, gradient p (1 - p) = [.196612, -., 0].

  Of JAX itself, so that a version without the guard is noticed; and our way, -inf.
  jax-ml/jax#17117.
  """
  x, where = jnp.array([1.0, 2.0, 200.0]), on(1, 1, 0)
  want = [0.196612, -0.196612, 0.0]
  close(jax.grad(lambda x: jax.nn.softmax(x, where=where)[0])(x), want)
  f = lambda x: jnp.exp(fast.token_logprobs(jnp.where(where, x, -jnp.inf)[None], jnp.array([0]))[0])
  close(jax.grad(f)(x), want)


@pytest.mark.parametrize("how", ["cut", "-inf"])
def test_padded_vocab(how: str) -> None:
  """Logits [2, 1, 0, (pad) 0], three real ids, token 0: -.407606; with the pad column -.493812.

  Cut, or set to -inf; the entropy is at most ln 3. InternLM/lmdeploy#3661.
  """
  padded = jnp.array([[2.0, 1.0, 0.0, 0.0]])
  fix = lambda z: z[:, :3] if how == "cut" else z.at[:, 3].set(-jnp.inf)
  close(fast.token_logprobs(fix(padded), jnp.array([0])), -0.407606)
  close(fast.token_logprobs(padded, jnp.array([0])), -0.493812)
  close(fast.token_entropy(fix(jnp.zeros((1, 4)))), math.log(3))
  ref = fix(jnp.array([[0.0, 1.0, 0.0, 5.0]]))
  close(fast.exact_kl(fix(padded), ref), fast.exact_kl(padded[:, :3], ref[:, :3]))
  gradient = jax.grad(lambda z: fast.token_entropy(fix(z))[0] + fast.exact_kl(fix(z), ref)[0])(
    padded
  )
  assert np.isfinite(gradient).all()
  assert gradient[0, 3] == 0
  if how == "cut":
    assert np.isnan(fast.token_logprobs(fix(padded), jnp.array([3])))


def test_fused_parity() -> None:
  """Every option on, uneven lengths: the path from hidden states is the path from logits.

  The fused path had a gradient 100 times as large, for its normaliser was another.
  linkedin/Liger-Kernel#1082.
  """
  rng = np.random.default_rng(0)
  hidden, matrix = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 3, 5, 4), (11, 4)))
  mask = jnp.asarray(np.arange(5) < np.array([[5, 1, 3], [0, 2, 4]])[..., None])
  tokens = jnp.asarray(rng.integers(0, 11, mask.shape))
  scored = {"mask": mask, "temperature": 0.7}
  options = {
    "loss_weights": rl.DAPO.loss_weights(mask),
    "importance_weights": jnp.asarray(rng.uniform(0.5, 1.5, mask.shape)),
    "ref_logprobs": jnp.asarray(rng.normal(-2.0, 0.3, mask.shape)),
    "kl": rl.kl_k3,
    "kl_coef": 0.1,
    "entropy_coef": 0.1,
  }
  advantages = jnp.asarray(rng.normal(size=(2, 3, 1)))
  old = jnp.asarray(rng.normal(-2.0, 0.3, mask.shape))

  def plain(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
    logits = hidden @ matrix.T
    logprobs, entropy = (
      rl.token_logprobs(logits, tokens, **scored),
      rl.token_entropy(logits, **scored),
    )
    loss = rl.objective_loss(rl.DAPO, logprobs, old, advantages, mask, entropy=entropy, **options)
    return loss[0]

  def fused(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
    logprobs = rl.linear_token_logprobs(hidden, matrix, tokens, **scored)
    arguments = (hidden, matrix, tokens, logprobs, old, advantages)
    return rl.linear_policy_loss(rl.DAPO, *arguments, temperature=0.7, mask=mask, **options)[0]

  ours, theirs = (jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, matrix) for f in (fused, plain))
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bf16_batch_noise(dtype: Any) -> None:
  """The same row scored in batches of 1, 2 and 8: |ratio - 1| < 1e-5 from the same logits.

  (The matmuls before them are the model's.) verl-project/verl#6280.
  """
  rng = np.random.default_rng(0)
  logits = jnp.asarray(3 * rng.normal(size=(8, 4, 1000)), dtype)
  tokens = rng.integers(0, 1000, (8, 4))
  score = jax.jit(rl.token_logprobs)
  whole = np.asarray(score(logits, tokens))
  assert whole.dtype == jnp.float32
  for size in (1, 2):
    part = np.asarray(score(logits[:size], tokens[:size]))
    assert np.abs(np.exp(part - whole[:size]) - 1).max() < 1e-5


def test_eos_count() -> None:
  """Token log-probs [-1, -1, -4 (end)]: the mean is -6/3 = -2 with the end, -2/2 = -1 without.

  -2/3 would take the sum without it and the count with it. PaddlePaddle/PaddleFormers#4909.
  """
  logprobs = jnp.array([-1.0, -1.0, -4.0])
  for mask, total, mean in ((on(1, 1, 1), -6, -2), (on(1, 1, 0), -2, -1)):
    assert fast.sequence_logprob(logprobs, mask) == total
    assert fast.mean_logprob(logprobs, mask) == mean


# ------------------------------------------------------------------------- ratios and surrogates


def test_dual_clip() -> None:
  """Ratio 5, eps .2, cap 3: losses -1.2, 3 and 0 for A = 1, -1, 0; a cap <= 1 is refused.

  Without the sign A = 1 gives -3, without the cap A = -1 gives 5. thu-ml/tianshou#433.
  """
  log_ratio = jnp.full(3, math.log(5))
  close(-fast.dual_clip(log_ratio, jnp.array([1.0, -1.0, 0.0])), [-1.2, 3.0, 0.0])
  close(-fast.ppo_clip(log_ratio, jnp.array([1.0, -1.0, 0.0])), [-1.2, 5.0, 0.0])
  for cap in (1.0, 0.5):
    with pytest.raises(ValueError, match="ratio_cap"):
      rl.dual_clip(log_ratio, jnp.ones(3), ratio_cap=cap)


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("weights", [rl.sequence_mean, rl.token_mean])
def test_gspo_grad(token: bool, weights: Any) -> None:
  """log p [-1, -2], old [-1.2, -1.6], A = 1, eps .2: mean log-ratio -.1, loss -exp(-.1).

  The gradient is -exp(-.1) / 2 = -.452419 each, of the sequence form and of the token form; half
  of that has divided by the length twice. verl-project/verl#2775.
  """
  old, mask = jnp.array([[-1.2, -1.6]]), jnp.ones((1, 2), bool)
  clip = partial(rl.ppo_clip, clip_low=0.2, clip_high=0.2)
  objective = dataclasses.replace(rl.GSPO_TOKEN if token else rl.GSPO, surrogate=clip)

  def loss(logprobs: jax.Array) -> jax.Array:
    return fast.objective_loss(
      objective, logprobs, old, jnp.ones((1, 1)), mask, loss_weights=weights(mask)
    )[0]

  value, gradient = value_and_grad(loss, [[-1.0, -2.0]])
  close(value, -0.904837)
  close(gradient, [[-0.452419, -0.452419]])


def test_seq_weight_sum() -> None:
  """2000 tokens of log-ratio -.01: exp(sum) = e^-20 = 2.06e-9, exp(mean) = e^-.01 = .990050.

  Both are named levels; a sum of exponentials (1980) is neither. huggingface/trl#5814.
  """
  log_ratio, mask = jnp.full((1, 2000), -0.01), jnp.ones((1, 2000), bool)
  levels = jax.jit(
    lambda x, ids: [
      jnp.exp(level(x, mask, segment_ids=ids))
      for level in (rl.per_sequence, rl.per_sequence_geometric)
    ]
  )
  for segment_ids in (None, jnp.ones((1, 2000), jnp.int32)):
    total, mean = levels(log_ratio, segment_ids)
    close(total, 2.0611536e-9, rtol=1e-5, atol=0)
    close(mean, 0.990050)


def test_old_logp_per_minibatch() -> None:
  """Rollout -1, after one minibatch -.5, A = 1, eps .2: ratio e^.5, loss -1.2, gradient 0.

  With old log-probs refreshed the ratio is 1: loss -1, gradient -1. allenai/open-instruct#755.
  """
  mask = jnp.ones((1, 1), bool)

  def loss(old: Any, logprobs: jax.Array) -> jax.Array:
    return fast.objective_loss(
      rl.GRPO, logprobs, old, jnp.ones((1, 1)), mask, loss_weights=fast.token_mean(mask)
    )[0]

  for old, want in ((-1.0, (-1.2, 0.0)), (-0.5, (-1.0, -1.0)), (None, (-1.0, -1.0))):
    old = None if old is None else jnp.array([[old]])
    value, gradient = value_and_grad(partial(loss, old), [[-0.5]])
    close((value, gradient[0, 0]), want)


def test_tis_old() -> None:
  """Rollout -1.2, old -1, current -.7, cap 2: weight e^.2 = 1.2214, without a gradient.

  Current against rollout would be 1.6487. The policy term is 1.2214 e^.3 = 1.648721 with this
  gradient in the current log-prob, 0 in all others. THUDM/slime#179.
  """
  mask = jnp.ones((1, 1), bool)

  def loss(current: jax.Array, old: jax.Array, rollout: jax.Array) -> jax.Array:
    weights = fast.truncated(fast.token_log_ratio(old, rollout, mask), mask, cap=2.0)
    objective = dataclasses.replace(rl.GRPO, surrogate=rl.importance_weighted)
    return fast.objective_loss(
      objective,
      current,
      old,
      jnp.ones((1, 1)),
      mask,
      loss_weights=fast.token_mean(mask),
      importance_weights=weights,
    )[0]

  arrays = [jnp.array([[x]]) for x in (-0.7, -1.0, -1.2)]
  weights = fast.truncated(fast.token_log_ratio(arrays[1], arrays[2], mask), mask, cap=2.0)
  close(weights, 1.221403)
  value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(*arrays)
  close(value, -1.648721)
  close(gradients, np.reshape([-1.648721, 0.0, 0.0], (3, 1, 1)))


def test_clip_fraction() -> None:
  """Ratios [1.5, 1.5, .5, .5], A [1, -1, 1, -1], eps .2: positions 0 and 3 are clipped, 1/2.

  Without the sign all four would count. Over the mask, as a sum and a count. huggingface/trl#3175.
  """
  log_ratio = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5, 9.0]))
  advantages, mask = jnp.array([1.0, -1.0, 1.0, -1.0, 1.0]), on(1, 1, 1, 1, 0)
  found = fast.clip_fractions(log_ratio, advantages, mask, clip_low=0.2, clip_high=0.2)
  assert {name: float(x.mean()) for name, x in found.items()} == {
    "clipped": 0.5,
    "high": 0.25,
    "low": 0.25,
  }
  # Clipped is where the gradient is 0.
  gradient = jax.grad(lambda x: fast.ppo_clip(x, advantages, mask=mask).sum())(log_ratio)
  assert (gradient == 0).tolist() == [True, False, False, True, True]


# Another value of every constant in the table of calls, which must make a difference.
OTHER: dict[str, dict[str, Any]] = {
  "token_logprobs": {"temperature": 1.0},
  "next_token_logprobs": {"temperature": 1.0},
  "token_entropy": {"temperature": 1.0},
  "exact_kl": {"temperature": 1.0},
  "top_k_kl": {"temperature": 1.0, "k": 3},
  "response_mask": {"stop_tokens": [0]},
  "is_finished": {"stop_tokens": [0]},
  "sequence_mean": {"count_empty": True},
  "sequence_sum": {"count_empty": True},
  "constant_length": {"length": 9, "count_empty": True},
  "length_power": {"alpha": 0.6, "count_empty": True},
  "ppo_clip": {"clip_low": 0.1, "clip_high": 0.1},
  "dual_clip": {"clip_low": 0.1, "clip_high": 0.1, "ratio_cap": 1.3},
  "sapo": {"tau_pos": 2.0, "tau_neg": 2.0},
  "gmpo": {"clip_low": 0.1, "clip_high": 0.1},
  "cispo": {"clip_low": 0.1, "clip_high": 0.1},
  "vespo": {"k_pos": 1.0, "lam_pos": 1.0, "k_neg": 1.0, "lam_neg": 1.0},
  "dppo_tv": {"clip_low": 0.01, "clip_high": 0.01, "ratio_cap": 1.1},
  "dppo_kl": {"clip_low": 0.001, "clip_high": 0.001, "ratio_cap": 1.1},
  "dro": {"beta": 0.5},
  "clip_cov": {"clip_low": 0.1, "clip_high": 0.1},
  "kl_cov": {"kl_coef": 2.0},
  "top_entropy_mask": {"fraction": 0.9},
  "kl_cov_selection": {"fraction": 0.9},
  "clip_cov_selection": {
    "key": jax.random.key(1),
    "fraction": 0.9,
    "cov_low": 0.05,
    "cov_high": -0.2,
    "clip_low": 0.0,
    "clip_high": 5.0,
  },
  "truncated": {"cap": 1.1, "floor": 0.9},
  "banded": {"low": 0.95, "high": 1.05},
  "rejected": {"low": 0.5, "high": 0.6},
  "veto": {"low": 0.9},
  "off_policy_mask": {"threshold": 1.0},
  "self_normalised": {"mean": 3.0},
  "interpolated_proximal": {"alpha": 0.4},
  "group_normalized": {"ddof": 0, "eps": 0.1},
  "leave_one_out_normalized": {"eps": 0.1},
  "batch_scaled": {"ddof": 0, "eps": 0.1, "moments": (0.0, 4.0)},
  "multi_reward_normalized": {"ddof": 0, "eps": 0.1},
  "pass_at_k": {"k": 3},
  "signal_scaled": {"signal_fraction": 0.5},
  "to_groups": {"num_groups": 4, "group_size": 3},
  "discounted_returns": {"discount": 0.5},
  "gae": {"discount": 0.5, "gae_lambda": 0.5},
  "length_adaptive_lambda": {"alpha": 0.9},
  "kl_shaped_rewards": {"kl_coef": 0.2},
  "overlong_penalty": {"max_length": 4, "buffer": 2},
  "masked_moments": {"ddof": 0},
  "whiten": {"ddof": 0, "eps": 0.1, "moments": (0.0, 4.0)},
  "whitened_returns": {"discount": 0.5, "ddof": 0, "eps": 0.1, "moments": (0.0, 4.0)},
  "whitened_group_centered": {"ddof": 0, "eps": 0.1, "moments": (0.0, 4.0)},
  "masked_sum": {"axis": -1},
  "masked_mean": {"axis": -1},
  "clip_fractions": {"clip_low": 0.01, "clip_high": 5.0},
  "ratio_extremes": {"offset": 4},
  "gradient_share_by_length": {"edges": [3]},
  "objective_loss": {
    "objective": rl.CISPO,
    "kl": rl.kl_k3,
    "kl_coef": 0.2,
    "entropy_coef": 0.4,
  },
}
OTHER["recipe_loss"] = {"recipe": rl.trl_cispo(epsilon_high=5.0, beta=0.2, entropy_coef=0.4)}
OTHER["group_token_mean"] = {"count_empty": True}
OTHER |= preference_tables.OTHER_CONSTANTS
OTHER |= linear_tables.OTHER_CONSTANTS
OTHER |= {
  "forward_kl": {"temperature": 1.0},
  "skewed_forward_kl": {"temperature": 1.0, "skew": 0.2},
  "skewed_reverse_kl": {"temperature": 1.0, "skew": 0.2},
  "jensen_shannon": {"temperature": 1.0, "beta": 0.4},
  "top_k_with_tail": {"temperature": 1.0},
  "geometric_mixture": {"temperature": 1.0, "share": 0.4},
  "xpo_loss": {"alpha": 0.2},
  "nash_md_advantages": {"kl_coef": 0.2},
  "rejection_sampling": {"threshold": 9.0},
  "adaptive_kl_coef": {"target": 8.9, "gain": 0.2, "clip": 0.1},
}
# Where the arrays of the table hide the difference: a group without a token, a full group.
OTHER_ARRAYS = {
  "group_token_mean": {"mask": np.array([[[True, True]], [[False, False]]])},
  "leave_one_out_normalized": {"rewards": np.array([0.0, 1.0, 3.0], np.float32)},
}


def _constants(name: str) -> set[str]:
  """Parameters that are no arrays of tokens."""
  calls = [x for x in public_calls() if x.name == name and x.function is getattr(rl, name)]
  parameters = inspect.signature(getattr(rl, name)).parameters
  arrays = {x for call in calls for x in call.arrays} | {"selected", "segment_ids"}
  arrays |= linear_tables.NO_EFFECT
  arrays |= {x for x, p in parameters.items() if p.kind == p.VAR_KEYWORD}
  return set(parameters) - arrays - {"old_logprobs"} if calls else set()


@pytest.mark.slow  # one compilation for every public function
@pytest.mark.parametrize("name", FUNCTIONS)
def test_ignored_option(name: str) -> None:
  """Every option has an effect, and a misspelt one is an error.

  Margin of 4 with or without an option is a loss of preference pairs, tested with those.
  RLinf/RLinf#316.
  """
  call = next(x for x in public_calls() if x.name == name)
  with pytest.raises(TypeError, match="ratio_capp"):
    call.function(**call.arrays, **call.constants, ratio_capp=3.0)
  if name == "dr_grpo":
    assert rl.dr_grpo(8) != rl.dr_grpo(9)
    return
  other = OTHER.get(name, {})
  assert set(other) >= _constants(name)
  if not other:
    return

  call = dataclasses.replace(call, arrays=OTHER_ARRAYS.get(name, call.arrays))

  # Numbers are traced, so that all of a function's share one compilation.
  parameters = inspect.signature(call.function).parameters
  constants = {x: parameters[x].default for x in other} | call.constants
  numbers = {x: y for x, y in constants.items() if isinstance(y, float)}
  rest = {x: y for x, y in constants.items() if x not in numbers}

  def with_constants(rest: dict[str, Any]) -> Callable[..., Any]:
    return jax.jit(lambda numbers: jax.tree.leaves(call.function(**call.arrays, **numbers, **rest)))

  usual = with_constants(rest)
  plain = usual(numbers)
  for option, x in other.items():
    if option in numbers:
      changed = usual(numbers | {option: x})
    else:
      changed = with_constants(rest | {option: x})(numbers)
    same = list(map(np.array_equal, plain, changed))
    assert not all(same), f"{option} makes no difference"


# ----------------------------------------------------------------------------------------- KL

PI, REF = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])


def expected(estimator: Callable[..., jax.Array]) -> tuple[Any, Any]:
  """Expectation over tokens drawn from pi of the value, and of its gradient in the logits."""
  mask, ref = jnp.ones(3, bool), jnp.log(jnp.asarray(REF, jnp.float32))

  def values(logits: jax.Array) -> jax.Array:
    return estimator(jax.nn.log_softmax(logits), ref, mask)

  logits = jnp.log(jnp.asarray(PI, jnp.float32))
  return PI @ np.asarray(values(logits)), PI @ np.asarray(jax.jacrev(values)(logits))


def test_kl_gradient() -> None:
  """pi = [.7, .2, .1], ref = [.2, .3, .5]: KL(pi || ref) = .634897, its gradient in the logits
  [.432506, -.208072, -.224434].

  E k1 = E k3 = .634897, E k2 = .695250; gradients 0 of k1, the true one of k2, that of
  KL(ref || pi) = pi - ref = [.5, -.1, -.4] of k3. OpenRLHF/OpenRLHF#1309.
  """
  true, forward = [0.432506, -0.208072, -0.224434], [0.5, -0.1, -0.4]
  off_policy = lambda x, ref, mask: fast.kl_k3_off_policy(
    x, ref, mask, old_logprobs=jax.lax.stop_gradient(x)
  )
  for estimator, value, gradient in (
    (rl.kl_k1, 0.634897, [0.0, 0.0, 0.0]),
    (rl.kl_k2, 0.695250, true),
    (rl.kl_k3, 0.634897, forward),
    (off_policy, 0.634897, true),
    (rl.with_reverse_kl_gradient(rl.kl_k1), 0.634897, true),
    (rl.with_reverse_kl_gradient(rl.kl_k3), 0.634897, true),
  ):
    got = expected(estimator)
    close(got[0], value, atol=2e-6)
    close(got[1], gradient, atol=2e-6)
  exact = lambda z: fast.exact_kl(z[None], jnp.log(REF)[None])[0]
  value, gradient = value_and_grad(exact, np.log(PI))
  close(value, 0.634897, atol=2e-6)
  close(gradient, true, atol=2e-6)


def test_kl_sign() -> None:
  """log p = -.5, ref = -1.5, beta .1, reward 0: k1 = 1, k2 = .5, k3 = e^-1; reward -.1.

  Swapped: k1 = -1, k3 = .718282, reward +.1. huggingface/trl#463.
  """
  new, ref, mask = jnp.array([-0.5]), jnp.array([-1.5]), on(1)
  for estimator, value, swapped in (
    (rl.kl_k1, 1.0, -1.0),
    (rl.kl_k2, 0.5, 0.5),
    (rl.kl_k3, 0.367879, 0.718282),
    (rl.kl_abs, 1.0, 1.0),
  ):
    close(estimator(new, ref, mask), value)
    close(estimator(ref, new, mask), swapped)
  shaped = fast.kl_shaped_rewards(jnp.zeros(1), fast.kl_k1(new, ref, mask), mask, kl_coef=0.1)
  close(shaped, -0.1)
  # In a loss it is added: drifting away costs.
  loss = fast.objective_loss(
    rl.GRPO, new, None, jnp.zeros(1), mask, loss_weights=fast.token_mean(mask), ref_logprobs=ref,
    kl=rl.kl_k1, kl_coef=0.1,
  )[0]  # fmt: skip
  close(loss, 0.1)
  # Drift since the rollout is positive as well: KL(old || new), tokens from old.
  assert fast.policy_drift(ref, new, mask)["k1"].mean() > 0


def test_fullkl_inf() -> None:
  """Logits [1, 0, -inf], reference [0, 0, -inf]: KL = .731059 ln 1.462117 + ... = .110944.

  A token that both exclude adds 0; one that only the reference excludes makes it +inf.
  google-deepmind/optax#896.
  """
  inf = math.inf
  logits, ref = jnp.array([[1.0, 0.0, -inf]]), jnp.array([[0.0, 0.0, -inf]])
  exact = lambda z: fast.exact_kl(z, ref)[0]
  value, gradient = value_and_grad(exact, logits)
  close(value, 0.110944, atol=1e-6)
  p = 1 / (1 + math.exp(-1))
  slope = p * (math.log(2 * p) - 0.110944)  # d KL / d z = p (log(p / q) - KL)
  close(gradient, [[slope, -slope, 0.0]], atol=1e-6)
  for k in (1, 2, 3):
    value, gradient = value_and_grad(lambda z, k=k: fast.top_k_kl(z, ref, k=k)[0], logits)
    close(value, 0.110944, atol=1e-6)
    assert np.isfinite(gradient).all()
  allowed = jnp.array([[1.0, 0.0, 0.0]])
  assert fast.exact_kl(allowed, ref)[0] == inf
  assert fast.top_k_kl(allowed, ref, k=1)[0] < inf  # one bucket with a token that ref allows
  close(fast.exact_kl(logits, jnp.zeros((1, 3))), 0.110944 + math.log(3 / 2), atol=1e-6)
  assert fast.token_entropy(jnp.array([[0.0, -inf, -inf]])) == 0


@pytest.mark.parametrize("level", [rl.per_token, rl.per_sequence_geometric])
def test_kl_weight_level(level: Any) -> None:
  """Token ratios [2, .5] (their geometric mean is 1), k3 = [1, 0]: weighted [2, 0].

  The ratio of the sequence would give [1, 0]. delta + exp(-delta) = 2 at 1.8414057.
  huggingface/trl#6594.
  """
  new, mask = jnp.array([[-1.0, -2.0]]), jnp.ones((1, 2), bool)
  old = new - jnp.log(jnp.array([[2.0, 0.5]]))
  ref = new - jnp.array([[1.8414057, 0.0]])
  close(fast.kl_k3(new, ref, mask), [[1.0, 0.0]], atol=1e-6)
  estimator = partial(rl.kl_k3_off_policy, old_logprobs=old)
  aux = fast.objective_loss(
    dataclasses.replace(rl.GRPO, level=level), new, old, jnp.ones((1, 1)), mask,
    loss_weights=fast.token_mean(mask), ref_logprobs=ref, kl=estimator, kl_coef=1.0,
  )[1]  # fmt: skip
  close(aux.kl, [[2.0, 0.0]], atol=1e-6)


def test_zero_var_kl() -> None:
  """Rewards [1, 0] and [1, 1], one token each, k2 with delta 1, beta .1, A = +-.707106.

  By default the silent group stays in both: each token weighs 1/4, gradient of the KL .025. Taking
  it out of the mask takes it out of both: 1/2 each, and its gradient is 0. huggingface/trl#7068.
  """
  rewards = jnp.array([[1.0, 0.0], [1.0, 1.0]])
  advantages = fast.group_normalized(rewards, eps=0.0)[..., None]
  new = jnp.full((2, 2, 1), -1.0)
  everyone = jnp.ones((2, 2, 1), bool)
  signal = everyone & fast.has_signal(rewards)[:, None, None]

  def loss(logprobs: jax.Array, mask: jax.Array, kl_coef: float) -> jax.Array:
    return fast.objective_loss(
      rl.DAPO, logprobs, None, advantages, mask, loss_weights=fast.token_mean(mask),
      ref_logprobs=new - 1.0, kl=rl.kl_k2, kl_coef=kl_coef,
    )[0]  # fmt: skip

  a = math.sqrt(0.5)
  for mask, share in ((everyone, 1 / 4), (signal, 1 / 2)):
    for beta in (0.0, 0.1):
      value, gradient = value_and_grad(partial(loss, mask=mask, kl_coef=beta), new)
      close(value, beta * 0.5)
      silent = beta * share if mask is everyone else 0.0
      want = [[-a * share + beta * share, a * share + beta * share], [silent, silent]]
      close(gradient[..., 0], want)


# ------------------------------------------------------------------------ advantages and returns


def test_gae_pad_values() -> None:
  """r = [0, 1, 0, 0], v = [.1, .2, 7, 7], mask [1, 1, 0, 0], lambda .95: .8 and .1 + .95 * .8.

  [.86, .8, 0, 0]; reading the values of padding gives [1.508, 1.4825, ...]. alibaba/ROLL#447.
  """
  for pad in (7.0, math.nan, 1e30):
    values = jnp.array([0.1, 0.2, pad, pad])
    got = fast.gae(jnp.array([0.0, 1.0, pad, 0.0]), values, on(1, 1, 0, 0), gae_lambda=0.95)
    close(got, [0.86, 0.8, 0.0, 0.0])


def test_gae_truncation() -> None:
  """r = 0, v = [.4, .6], next value .8: ended [-.4, -.6]; cut off [.8 - .4, .8 - .6].

  lucidrains/dreamer4#22.
  """
  rewards, values, mask = jnp.zeros((2, 2)), jnp.array([[0.4, 0.6]] * 2), jnp.ones((2, 2), bool)
  close(fast.gae(rewards, values, mask), [[-0.4, -0.6]] * 2)
  # Per row: one ended, one cut off; and the same two in one packed row.
  got = fast.gae(rewards, values, mask, bootstrap_value=jnp.array([0.0, 0.8]))
  close(got, [[-0.4, -0.6], [0.4, 0.2]])
  packed = fast.gae(
    rewards.reshape(-1),
    values.reshape(-1),
    mask.reshape(-1),
    bootstrap_value=jnp.array([math.nan, 0.0, math.nan, 0.8]),
    segment_ids=jnp.array([1, 1, 2, 2]),
  )
  close(packed, [-0.4, -0.6, 0.4, 0.2])


GROUP_FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
  "centered": rl.group_centered,
  "normalized": rl.group_normalized,
  "normalized, eps = 0": partial(rl.group_normalized, eps=0.0),
  "normalized, eps = 0, ddof = 0": partial(rl.group_normalized, ddof=0, eps=0.0),
  "leave one out": rl.leave_one_out,
  "leave one out, normalized": rl.leave_one_out_normalized,
  "batch": rl.batch_scaled,
  "mean": rl.mean_normalized,
  "signal": rl.signal_scaled,
  "lengths": lambda r, where: fast.length_weighted_baseline(r, jnp.ones_like(r), where=where),
}


@pytest.mark.parametrize("name", GROUP_FUNCTIONS)
def test_group_of_one(name: str) -> None:
  """One reward of 2, or all of them 1, .1 or 1e8: exactly 0, and the gradient too.

  ddof = 1 with one sample is 0 / 0, leave-one-out divides by n - 1. A sample that cannot be scored
  leaves a group of one as well. ruc-datalab/DeepAnalyze#116.
  """
  function = GROUP_FUNCTIONS[name]

  @jax.jit
  def run(rewards: jax.Array, where: jax.Array) -> Any:
    advantages, pull = jax.vjp(lambda r: function(r, where=where), rewards)
    return advantages, pull(jnp.ones_like(advantages))[0]

  nan = math.nan
  one, none = [False, True, False, False], [False] * 4
  groups = [([nan, 2.0, nan, nan], one), ([nan] * 4, none)]
  groups += [([x] * 4, [True] * 4) for x in (1.0, 0.1, 1e8)]
  groups += [([0.1, nan, 0.1, 0.1], [True, False, True, True])]
  rewards, where = zip(*groups)
  for arrays in ((rewards, where), ([[2.0]], [[True]])):
    for got in run(*map(jnp.array, arrays)):
      assert not np.asarray(got).any()


def test_group_layout() -> None:
  """Rewards 1 0 | 0 1 | 5 7 of prompts A, B, C: group means .5, .5 and 6, in any order of rows.

  Reshaping tiled rows mixes prompts; ids 7, 3 as segment numbers are dropped silently.
  XU-YIJIE/grpo-flat#2.
  """
  rewards, prompts = np.array([1.0, 0, 0, 1, 5, 7], np.float32), np.array([7, 7, 3, 3, -1, -1])
  to_groups = jax.jit(partial(rl.to_groups, num_groups=3, group_size=2))
  want = np.array([0.5, -0.5, -0.5, 0.5, -1.0, 1.0])
  for order in (np.arange(6), np.array([0, 2, 4, 1, 3, 5]), np.array([5, 0, 3, 1, 4, 2])):
    groups = to_groups(rewards[order], prompts[order])
    assert bool(groups.where.all())
    means = np.asarray(groups.values.mean(-1))
    assert sorted(means.tolist()) == [0.5, 0.5, 6.0]
    advantages = fast.group_centered(groups.values, where=groups.where)
    close(fast.from_groups(advantages, groups.slots), want[order])
  # The group is an axis: the layout is seen, not declared.
  close(fast.group_centered(jnp.asarray(rewards).reshape(3, 2)).reshape(-1), want)
  with pytest.raises(ValueError, match="num_groups is 2, but group_ids hold 3 groups"):
    rl.to_groups(jnp.asarray(rewards), jnp.asarray(prompts), num_groups=2, group_size=2)


def test_ddof() -> None:
  """Rewards [0, 0, 0, 1], eps 0: std sqrt(3)/4 (ddof 0) and 1/2 (ddof 1), the default.

  [-.57735, ., ., 1.732051] and [-.5, ., ., 1.5]. unslothai/unsloth-zoo#832.
  """
  rewards = jnp.array([0.0, 0.0, 0.0, 1.0])
  close(fast.group_normalized(rewards, ddof=0, eps=0.0), [-0.57735027] * 3 + [1.7320508])
  close(fast.group_normalized(rewards, ddof=1, eps=0.0), [-0.5] * 3 + [1.5])
  close(fast.group_normalized(rewards, eps=0.0), [-0.5] * 3 + [1.5])
  # eps is outside the root: .75 / (.5 + .1)
  close(fast.group_normalized(rewards, eps=0.1), [-0.25 / 0.6] * 3 + [0.75 / 0.6])


def test_whiten() -> None:
  """[3, 1, 100] with mask [1, 1, 0]: [1, -1] (ddof 0), [.707107, -.707107] (ddof 1), 0 there.

  One valid token gives 0. Scale only, [6, 2] / std 2 = [3, 1] (mean 0 in the moments), not [5, 3].
  On parts of the batch the moments are those of the whole. alibaba/ROLL#475.
  """
  x, mask = jnp.array([3.0, 1.0, 100.0]), on(1, 1, 0)
  whiten, moments_of = (jax.jit(f, static_argnames="ddof") for f in (rl.whiten, rl.masked_moments))
  close(whiten(x, mask, ddof=0, eps=0.0), [1.0, -1.0, 0.0])
  close(whiten(x, mask, ddof=1, eps=0.0), [0.70710678, -0.70710678, 0.0])
  for one_or_none in (on(0, 1, 0), on(0, 0, 0)):
    assert not np.asarray(whiten(x, one_or_none, ddof=1, eps=0.0)).any()
  scale = (jnp.float32(0.0), moments_of(jnp.array([6.0, 2.0, 9.0]), mask, ddof=0)[1])
  close(whiten(jnp.array([6.0, 2.0, 9.0]), mask, moments=scale, eps=0.0), [3.0, 1.0, 0.0])

  batch = jnp.array([[3.0, 1.0], [5.0, 100.0]])
  mask = jnp.array([[True, True], [True, False]])
  moments = moments_of(batch, mask)
  mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
  local = jax.shard_map(
    lambda x, mask, *moments: fast.whiten(x, mask, moments=moments),
    mesh=mesh,
    in_specs=(P("data"), P("data"), P(), P()),
    out_specs=P("data"),
  )
  close(jax.jit(local)(batch, mask, *moments), [[0.0, -1.0], [1.0, 0.0]])


# ----------------------------------------------------------------------------- metrics, compiling


def test_mean_of_means() -> None:
  """One token of entropy 1 and nine of entropy 2: 19/10, not 1.5; an empty part changes nothing.

  huggingface/trl#7012.
  """
  one, nine = fast.average(jnp.ones(1), on(1)), fast.average(jnp.full(9, 2.0), jnp.ones(9, bool))
  empty = fast.average(jnp.full(3, math.nan), on(0, 0, 0))
  for parts in ((one, nine), (one, nine, empty), (empty, nine, one)):
    total = parts[0] + parts[1] + (parts[2] if len(parts) > 2 else empty)
    close(total.mean(), 1.9)
    assert total.count == 10


def test_length_metric() -> None:
  """Lengths 2 and 4, row 2 dropped from the loss: mean 3, least 2, largest 4, half cut off.

  Over the mask of the loss the mean would be 1: count what the policy produced.
  huggingface/trl#3476.
  """
  tokens = jnp.array([[5, 2, 0, 0], [5, 6, 7, 8]])
  mask = fast.response_mask(tokens, stop_tokens=2)
  loss_mask = mask & jnp.array([[True], [False]])
  lengths, rows = fast.lengths(mask), jnp.ones(2, bool)
  assert fast.average(lengths, rows).mean() == 3
  found = fast.ratio_extremes(lengths, rows)
  assert (found.low, found.high) == (2, 4)
  truncated = ~fast.is_finished(tokens, stop_tokens=2)
  assert fast.average(truncated, rows).mean() == 0.5
  assert fast.average(fast.lengths(loss_mask), rows).mean() == 1


def test_recompile() -> None:
  """Eight lengths in one width are one compilation; so are two temperatures, passed as numbers.

  (Equal objectives share one too: tests/test_objectives.py.) jax-ml/jax#817.
  """
  traces = []

  @jax.jit
  def step(logits: jax.Array, tokens: jax.Array, mask: jax.Array, ids: jax.Array, t: Any) -> Any:
    traces.append(t)
    logprobs = fast.next_token_logprobs(logits, tokens, mask=mask, segment_ids=ids, temperature=t)
    log_ratio = fast.per_sequence(fast.on_policy_log_ratio(logprobs, mask), mask, segment_ids=ids)
    return fast.ppo_clip(log_ratio, jnp.ones((1, 1)), mask=mask, clip_high=t)

  logits, tokens = jnp.zeros((1, 8, 3)), jnp.zeros((1, 8), jnp.int32)
  for length in range(1, 9):
    mask = jnp.arange(8)[None] < length
    step(logits, tokens, mask, mask.astype(jnp.int32), 1.0 if length % 2 else 0.7)
  assert len(traces) == 1


def test_chex_jit() -> None:
  """Checks look at shapes and dtypes only: every function traces, under vmap too.

  Values are never looked at while traced, nor asserted at run time. (Under jit and grad: all of
  tests/test_garbage.py.) google-deepmind/chex#387.
  """
  for call in public_calls():
    if call.arrays:
      twice = {name: np.stack([x, x]) for name, x in call.arrays.items()}
      mapped = jax.vmap(lambda arrays, call=call: jax.tree.leaves(call(**arrays)))
      assert all(x.shape[0] == 2 for x in jax.eval_shape(mapped, twice)), call.title
  assert_complete({call.name for call in public_calls()})
  # Constants too, and then their range is not known.
  jax.eval_shape(partial(rl.ppo_clip, jnp.zeros(1), jnp.ones(1)), clip_low=jnp.float32(7.0))


# ------------------------------------------------------------- hazards of JAX met on the way


def test_hazard_counts_are_integers() -> None:
  """70000 ones: 70144 in bfloat16, inf in float16."""
  mask = jnp.ones((1, 70000), bool)
  ones = jnp.ones((1, 70000), jnp.float16)
  assert fast.lengths(mask).dtype == jnp.int32
  assert fast.lengths(mask)[0] == 70000
  assert fast.masked_sum(ones, mask) == 70000
  assert fast.masked_mean(ones, mask) == 1
  assert fast.segment_count(mask)[0, 0] == 70000
  assert fast.segment_total(ones, mask)[0, 0] == 70000
  assert fast.average(ones, mask).count == 70000
  close(fast.token_mean(mask)[0, 0], 1 / 70000)


def test_hazard_all_logits_minus_infinity() -> None:
  """A masked row without any possible token: 0, and gradient 0."""
  logits = jnp.array([[1.0, 2.0], [-jnp.inf, -jnp.inf]])
  mask, tokens = on(1, 0), jnp.array([0, 1])
  for f in (
    lambda z: fast.token_logprobs(z, tokens, mask=mask),
    lambda z: fast.token_entropy(z, mask=mask),
    lambda z: fast.exact_kl(z, z, mask=mask),
    lambda z: fast.top_k_kl(z, z, k=1, mask=mask),
  ):
    value, gradient = value_and_grad(lambda z, f=f: jnp.sum(f(z)), logits)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert not gradient[1].any()


def test_hazard_temperature_zero_is_refused() -> None:
  """logits / 0 is inf, -inf and NaN: argmax is another function."""
  with pytest.raises(ValueError, match=r"temperature must lie in \(0.0, inf\), got 0"):
    rl.token_logprobs(jnp.zeros((1, 2)), jnp.array([0]), temperature=0)


def test_hazard_gradient_of_a_standard_deviation() -> None:
  """NaN at zero variance, so advantages are constants inside the library."""
  for f in (rl.group_normalized, rl.batch_scaled, lambda r: fast.whiten(r, jnp.ones(4, bool))):
    gradient = jax.grad(lambda r, f=f: jnp.sum(f(r)))(jnp.ones(4))
    assert not np.asarray(gradient).any()


def test_hazard_segment_ids_beyond_the_number_of_segments() -> None:
  """segment_sum drops them without a word; here any integer is an id."""
  ids = jnp.array([2**31 - 1, -5, 2**31 - 1, -5])
  call = named()["segment_total[segments]"].function
  assert call(jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.ones(4, bool), ids).tolist() == [5, 10, 5, 10]
