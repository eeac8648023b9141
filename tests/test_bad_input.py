"""Wrong input is an error that names the argument, at trace time, under jit too.

Each valid call of the table is spoilt in one argument: dtype, shape, rank, a missing axis that
would broadcast silently, an unknown keyword. Ranges and what is required have a table of their
own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import linear_tables, preference_tables
from tests.calls import FUNCTIONS, Call, assert_complete, public_calls

CALLS = public_calls()
JIT = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])


def attempt(call: Call, arrays: dict[str, Any], jit: bool) -> None:
  arrays = call.arrays | arrays
  if jit:
    jax.eval_shape(jax.jit(lambda arrays: jax.tree.leaves(call(**arrays))), arrays)
  else:
    call(**arrays)


def spoilt(call: Call, jit: bool, name: str, x: np.ndarray, error: Any) -> str:
  """The message of the error that the wrong argument must raise."""
  with pytest.raises(error) as raised:
    attempt(call, {name: x}, jit)
  message = str(raised.value)
  assert re.search(rf"\b{name}\b", message), f"{name} is not named: {message}"
  return message


def names(call: Call, kinds: str) -> list[str]:
  """The arrays of a call whose dtype is of these kinds."""
  return [name for name, x in call.arrays.items() if x.dtype.kind in kinds]


def calls_with(kinds: str) -> Any:
  """Parametrises over the calls that have such an array."""
  calls = [call for call in CALLS if names(call, kinds)]
  return pytest.mark.parametrize("call", calls, ids=[call.title for call in calls])


@JIT
@calls_with("b")
def test_masks_are_boolean(call: Call, jit: bool) -> None:
  for name in names(call, "b"):
    for dtype in (np.float32, np.int32):
      message = spoilt(call, jit, name, call.arrays[name].astype(dtype), TypeError)
      assert "boolean" in message
      assert np.dtype(dtype).name in message


@JIT
@calls_with("i")
def test_ids_are_integers(call: Call, jit: bool) -> None:
  for name in names(call, "i"):
    if name != "lengths":  # numbers, which may be fractions
      message = spoilt(call, jit, name, call.arrays[name].astype(np.float32), TypeError)
      assert "integer" in message


@JIT
@calls_with("f")
def test_numbers_are_real(call: Call, jit: bool) -> None:
  if call.name not in ("zero_masked", "segment_max"):  # these select, from whatever it is
    for name in names(call, "f"):
      spoilt(call, jit, name, call.arrays[name].astype(np.complex64), TypeError)


@JIT
@calls_with("bif")
def test_shapes_match(call: Call, jit: bool) -> None:
  """An axis of length 1 and a missing axis would both broadcast, and neither does."""
  if len(call.arrays) == 1 or call.name == "from_groups":
    return  # nothing to compare the shape with; slots go into groups of any shape
  for name, x in call.arrays.items():
    # A matrix of one axis is wrong by itself, with no other shape to show.
    for wrong in (x[:1], x[0])[: 1 if name in linear_tables.HEADS else x.ndim]:
      message = spoilt(call, jit, name, wrong, ValueError)
      shapes = re.findall(r"\([\d, ]*\)", message)
      assert len(set(shapes)) >= 2, f"both shapes are not shown: {message}"


def square(call: Call) -> dict[str, np.ndarray] | None:
  """The arrays of a call cut to [B, T] with B == T, and [B] per row; None if there is no T."""
  x = call.arrays.get("mask", call.arrays.get("within"))
  if x is None or len(call.arrays) == 1:
    return None
  tokens = {name: a for name, a in call.arrays.items() if a.shape[:3] == x.shape}
  rows = {name: a[0] for name, a in call.arrays.items() if name not in tokens}
  rows |= {name: call.arrays[name] for name in linear_tables.HEADS if name in call.arrays}
  return {name: a[0, :3, :3] for name, a in tokens.items()} | rows


@JIT
@pytest.mark.parametrize("call", [x for x in CALLS if square(x)], ids=lambda x: x.title)
def test_square_batches_do_not_broadcast(call: Call, jit: bool) -> None:
  """[B] against [B, T] with B == T."""
  arrays = square(call)
  assert arrays
  attempt(call, arrays, jit=True)
  for name, x in arrays.items():
    if x.ndim >= 2 and name not in linear_tables.HEADS:
      with pytest.raises(ValueError, match=rf"\b{name}\b"):
        attempt(call, arrays | {name: x[:, 0]}, jit)


@JIT
@calls_with("bif")
def test_scalars_are_refused(call: Call, jit: bool) -> None:
  """A time axis, a group axis, a batch axis: there is always one."""
  if call.title not in SCALARS:
    for name, x in call.arrays.items():
      spoilt(call, jit, name, x.ravel()[0], (ValueError, TypeError))


# A single number is a legal argument.
SCALARS = ("overlong_penalty", "interpolated_proximal[tokens]")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_keywords_are_refused(name: str) -> None:
  """Nothing is swallowed by **kwargs: a misspelt option does not silently have no effect."""
  kinds = [p.kind for p in inspect.signature(getattr(rl, name)).parameters.values()]
  if name != "linear_policy_loss":  # which hands them to `objective_loss`
    assert inspect.Parameter.VAR_KEYWORD not in kinds
  assert inspect.Parameter.VAR_POSITIONAL not in kinds
  for call in (x for x in CALLS if x.name == name):
    with pytest.raises(TypeError, match="clip_hihg"):
      call.function(**call.arrays, **call.constants, clip_hihg=0.3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_required_arguments_are_named(name: str) -> None:
  """A length to divide by, a band, a cap: no silent default."""
  function = getattr(rl, name)
  call = next(x for x in CALLS if x.name == name)
  arguments = call.arrays | call.constants if call.function is function else {}
  for parameter in inspect.signature(function).parameters.values():
    if parameter.default is inspect.Parameter.empty and parameter.kind != parameter.VAR_KEYWORD:
      rest = {k: x for k, x in arguments.items() if k != parameter.name}
      with pytest.raises(TypeError, match=rf"\b{parameter.name}\b"):
        function(**rest)


# Each constant of each function, out of its range.
NAN = float("nan")
BAND = [{"clip_low": -0.1}, {"clip_low": 1.1}, {"clip_high": -0.1}, {"clip_high": NAN}]
DIVISIONS = [{"ddof": 2}, {"ddof": -1}, {"eps": -1e-6}]
RANGES: dict[str, list[dict[str, Any]]] = {
  "token_logprobs": [{"temperature": 0.0}, {"temperature": -1.0}, {"temperature": NAN}],
  "next_token_logprobs": [{"temperature": 0.0}],
  "token_entropy": [{"temperature": 0.0}],
  "exact_kl": [{"temperature": 0.0}],
  "top_k_kl": [{"temperature": 0.0}, {"k": 0}, {"k": 5}],
  "constant_length": [{"length": 0}, {"length": -8}, {"length": NAN}],
  "length_power": [{"alpha": NAN}],
  "ppo_clip": BAND,
  "dual_clip": [*BAND, {"ratio_cap": 1.0}, {"ratio_cap": 0.5}],
  "sapo": [{"tau_pos": 0.0}, {"tau_neg": -1.0}],
  "gmpo": [{"clip_low": -0.1}, {"clip_high": -0.1}],
  "cispo": BAND,
  "vespo": [{"k_pos": 0.0}, {"k_neg": 0.0}, {"lam_pos": 0.0}, {"lam_neg": -1.0}],
  "dppo_tv": [{"clip_low": -0.1}, {"clip_high": -0.1}, {"ratio_cap": 0.0}],
  "dppo_kl": [{"clip_low": -0.1}, {"clip_high": -0.1}, {"ratio_cap": 0.0}],
  "dro": [{"beta": -0.1}],
  "clip_cov": BAND,
  "kl_cov": [{"kl_coef": -1.0}],
  "top_entropy_mask": [{"fraction": -0.1}, {"fraction": 1.1}],
  "kl_cov_selection": [{"fraction": -0.1}, {"fraction": 1.1}],
  "clip_cov_selection": [{"fraction": 1.1}, *BAND, {"cov_low": NAN}, {"cov_high": -2.0}],
  "truncated": [{"cap": 0.0}, {"cap": -1.0}, {"floor": -0.1}, {"floor": 2.0}],
  "banded": [{"low": -0.1}, {"high": 0.5}],
  "rejected": [{"high": 0.05}, {"low": NAN}],
  "veto": [{"low": -0.1}],
  "off_policy_mask": [{"threshold": -0.1}],
  "self_normalised": [{"mean": -1.0}],
  "interpolated_proximal": [{"alpha": -0.1}, {"alpha": 1.1}],
  "group_normalized": DIVISIONS,
  "leave_one_out_normalized": [{"eps": -1e-6}],
  "batch_scaled": DIVISIONS,
  "multi_reward_normalized": DIVISIONS,
  "pass_at_k": [{"k": 1}, {"k": 4}],
  "signal_scaled": [{"signal_fraction": 1.5}],
  "to_groups": [{"num_groups": 0}, {"group_size": 0}, {"num_groups": 2}, {"group_size": 1}],
  "discounted_returns": [{"discount": -0.1}, {"discount": 1.1}],
  "gae": [{"discount": 1.1}, {"gae_lambda": -0.1}, {"gae_lambda": 1.1}],
  "length_adaptive_lambda": [{"alpha": 0.0}],
  "kl_shaped_rewards": [{"kl_coef": -0.1}],
  "overlong_penalty": [{"buffer": 0}, {"max_length": 3}],
  "masked_moments": [{"ddof": 2}],
  "whiten": DIVISIONS,
  "whitened_returns": [*DIVISIONS, {"discount": 1.1}],
  "whitened_group_centered": DIVISIONS,
  "clip_fractions": BAND,
  "gradient_share_by_length": [{"edges": [4, 2]}, {"edges": [2, 2]}],
  "objective_loss": [{"kl_coef": NAN}, {"entropy_coef": NAN}],
  "forward_kl": [{"temperature": 0.0}, {"temperature": -1.0}],
  "skewed_forward_kl": [{"temperature": 0.0}, {"skew": 0.0}, {"skew": 1.0}, {"skew": NAN}],
  "skewed_reverse_kl": [{"temperature": 0.0}, {"skew": 0.0}, {"skew": 1.0}],
  "jensen_shannon": [{"temperature": 0.0}, {"beta": -0.1}, {"beta": 1.1}, {"beta": NAN}],
  "top_k_with_tail": [{"temperature": 0.0}],
  "geometric_mixture": [{"temperature": 0.0}, {"share": -0.1}, {"share": 1.1}],
  "xpo_loss": [{"alpha": -0.1}],
  "nash_md_advantages": [{"kl_coef": -0.1}],
  "rejection_sampling": [{"threshold": NAN}],
  "adaptive_kl_coef": [{"target": 0.0}, {"gain": -0.1}, {"clip": 0.0}, {"clip": 10.0}],
}

RANGES |= preference_tables.RANGES
RANGES |= linear_tables.RANGES


@JIT
@pytest.mark.parametrize("function", RANGES)
def test_ranges(function: str, jit: bool) -> None:
  call = next(x for x in CALLS if x.name == function)
  for wrong in RANGES[function]:
    refused(call, wrong, jit)


def attempt_constants(call: Call, constants: dict[str, Any], jit: bool) -> None:
  """Ids stay concrete, as `to_groups` only then knows how many groups they hold."""
  arrays = call.arrays if not jit else {k: x for k, x in call.arrays.items() if "ids" not in k}
  rest = {k: x for k, x in call.arrays.items() if k not in arrays} | call.constants | constants

  def run(arrays: dict[str, Any]) -> Any:
    return jax.tree.leaves(call.function(**arrays, **rest))

  jax.eval_shape(run, arrays) if jit else run(arrays)


def refused(call: Call, wrong: dict[str, Any], jit: bool) -> None:
  ((name, value),) = wrong.items()
  with pytest.raises(ValueError, match=rf"\b{name}\b") as raised:
    attempt_constants(call, wrong, jit)
  value = value if isinstance(value, list) else [value]
  assert any(str(x) in str(raised.value) for x in value), raised.value


# One per row, or one per token, is legal.
ARRAYS = {"discount", "gae_lambda", "alpha", "edges"}


@JIT
@pytest.mark.parametrize("function", RANGES)
def test_constants_are_single_numbers(function: str, jit: bool) -> None:
  """One number per token, or per sequence, would broadcast."""
  call = next(x for x in CALLS if x.name == function)
  for name in {name for wrong in RANGES[function] for name in wrong} - ARRAYS:
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
      attempt_constants(call, {name: jnp.full(5, 1.5)}, jit)


def test_ends_of_a_clamp_are_in_order() -> None:
  with pytest.raises(ValueError, match=r"high must lie in \[1.0, inf\), got -1.0"):
    rl.clamped(rl.per_token, 1.0, -1.0)


def test_every_range_that_is_documented_is_tested() -> None:
  """A `Raises:` that speaks of more than shapes has an entry above."""
  words = re.compile(r"<=? [0-9]|>=? [0-9]|negative|out of range|outside|positive|neither|increase")
  documented = []
  for name in FUNCTIONS:
    raises = (inspect.getdoc(getattr(rl, name)) or "").partition("Raises:")[2]
    if words.search(raises.partition("Example:")[0]):
      documented.append(name)
  tested = {*RANGES, "clamped"}
  assert len(documented) > 30
  assert_complete(tested, documented)


SPECIAL: dict[str, tuple[Callable[[], Any], Any, str]] = {
  "no more tokens than the vocabulary holds": (
    lambda: rl.top_k_with_tail(jnp.ones((3, 4)), jnp.ones((3, 5)), jnp.ones((3, 5), jnp.int32)),
    ValueError,
    r"teacher_ids must keep 1 to V tokens: teacher_ids is \(3, 5\), V is 4",
  ),
  "at least one kept token": (
    lambda: rl.top_k_with_tail(jnp.ones((3, 4)), jnp.ones((3, 0)), jnp.ones((3, 0), jnp.int32)),
    ValueError,
    r"teacher_ids must keep 1 to V tokens: teacher_ids is \(3, 0\)",
  ),
  "chosen and rejected of different batches": (
    lambda: rl.dpo_loss(jnp.ones(3), jnp.ones(4)),
    ValueError,
    r"rejected_log_ratio is \(4,\), chosen_log_ratio is \(3,\)",
  ),
  "rejected without the axis of pairs": (
    lambda: rl.simpo_loss(jnp.ones(3), jnp.ones((3, 1))),
    ValueError,
    r"rejected_mean_logprob is \(3, 1\), chosen_mean_logprob is \(3,\)",
  ),
  "a pair that is one number": (
    lambda: rl.ipo_loss(jnp.ones(()), jnp.ones(())),
    ValueError,
    r"chosen_log_ratio must have at least 1 axes, got shape \(\)",
  ),
  "a reference that was not given": (
    lambda: rl.sequence_log_ratio(jnp.ones((2, 3)), None, jnp.ones((2, 3), bool)),
    TypeError,
    "ref_logprobs is required, got None",
  ),
  "a reference of the mean that was not given": (
    lambda: rl.mean_log_ratio(jnp.ones((2, 3)), None, jnp.ones((2, 3), bool)),
    TypeError,
    "ref_logprobs is required, got None",
  ),
  "margins of a reference that were not given": (
    lambda: rl.aot_loss(jnp.ones(3), None),
    TypeError,
    "ref_margins is required, got None",
  ),
  "no reference where there is none": (
    lambda: rl.simpo_loss(jnp.ones(3), jnp.ones(3), ref_logprobs=jnp.ones(3)),
    TypeError,
    "ref_logprobs",
  ),
  "no smoothing where it has no meaning": (
    lambda: rl.dpo_loss(jnp.ones(3), jnp.ones(3), label_smoothing=0.1),
    TypeError,
    "label_smoothing",
  ),
  "one baseline for the batch": (
    lambda: rl.kto_loss(jnp.ones(3), jnp.ones(3, bool), baseline=jnp.ones(3)),
    ValueError,
    r"baseline must be one number, got shape \(3,\)",
  ),
  "a baseline that was not given": (
    lambda: rl.kto_loss(jnp.ones(3), jnp.ones(3, bool), baseline=None),
    TypeError,
    "baseline is required, got None",
  ),
  "a margin per pair": (
    lambda: rl.bradley_terry_loss(jnp.ones(3), jnp.ones(3), margin=jnp.ones(2)),
    ValueError,
    r"margin is \(2,\), chosen_rewards is \(3,\)",
  ),
  "a group axis": (
    lambda: rl.group_token_mean(jnp.ones(3, bool)),
    ValueError,
    r"mask must have at least 2 axes, got shape \(3,\)",
  ),
  "a reward axis": (
    lambda: rl.multi_reward_normalized(jnp.ones(3), weights=jnp.ones(3)),
    ValueError,
    r"rewards must have at least 2 axes, got shape \(3,\)",
  ),
  "a vocabulary axis": (
    lambda: rl.token_entropy(jnp.ones(3)),
    ValueError,
    r"logits must have at least 2 axes, got shape \(3,\)",
  ),
  "a length that is None": (
    lambda: rl.constant_length(jnp.ones((1, 3), bool), length=None),
    TypeError,
    "length is required, got None",
  ),
  "a length of a named algorithm": (lambda: rl.dr_grpo(), TypeError, "length"),
  "no bound at all": (
    lambda: rl.rejected(jnp.ones(3), jnp.ones(3, bool)),
    ValueError,
    "low and high are both None",
  ),
  "probabilities": (
    lambda: rl.dppo_tv(jnp.ones(3), jnp.ones(3)),
    ValueError,
    "old_logprobs is required",
  ),
  "probabilities of dppo_kl": (
    lambda: rl.dppo_kl(jnp.ones(3), jnp.ones(3)),
    ValueError,
    "old_logprobs is required",
  ),
  "one weight per reward": (
    lambda: rl.multi_reward_normalized(jnp.ones((2, 3)), weights=jnp.ones(3)),
    ValueError,
    r"weights are \(3,\), rewards \[K, ..., G\] are \(2, 3\)",
  ),
  "moments that are scalars": (
    lambda: rl.whiten(jnp.ones(3), jnp.ones(3, bool), moments=(jnp.ones(3), jnp.ones(3))),
    ValueError,
    r"\(3,\)",
  ),
  "groups as an axis": (
    lambda: rl.from_groups(jnp.ones(3), jnp.zeros(3, jnp.int32)),
    ValueError,
    r"grouped must be \[P, G\] and slots \[N\]",
  ),
  "stop tokens that are integers": (
    lambda: rl.response_mask(jnp.ones(3, jnp.int32), stop_tokens=[0.5]),
    TypeError,
    "stop_tokens must be integer",
  ),
  "an advantage per sequence without its axis": (
    lambda: rl.importance_weighted(jnp.zeros((3, 3)), jnp.ones(3)),
    ValueError,
    r"advantages\[..., None\]: advantages is \(3,\), log_ratio is \(3, 3\)",
  ),
  "an advantage per token of another row": (
    lambda: rl.importance_weighted(jnp.zeros((3, 3)), jnp.ones((1, 3))),
    ValueError,
    r"advantages is \(1, 3\), log_ratio is \(3, 3\)",
  ),
}


@JIT
@pytest.mark.parametrize("what", SPECIAL)
def test_missing(what: str, jit: bool) -> None:
  run, error, match = SPECIAL[what]
  with pytest.raises(error, match=match):
    jax.eval_shape(run) if jit else run()


def test_traced_constants_are_not_looked_at() -> None:
  """So that they vmap; the range of a traced number is not known."""
  clip = jax.vmap(lambda low: rl.ppo_clip(jnp.zeros(1), jnp.ones(1), clip_low=low))
  assert clip(jnp.array([0.1, 7.0])).shape == (2, 1)


def test_errors_are_the_same_with_checks_inside_transformations() -> None:
  bad = lambda x: rl.ppo_clip(x, jnp.ones(2), mask=jnp.ones(3, bool)).sum()
  for transform in (jax.jit, jax.grad, jax.vmap, partial(partial, jax.linearize)):
    with pytest.raises(ValueError, match="advantages"):
      transform(bad)(jnp.zeros((3, 3)))
