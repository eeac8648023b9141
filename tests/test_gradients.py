"""Gradients of every public function: numerically, against a closed form, and 0 for constants.

Float64. `jax.test_util.check_grads` compares with finite differences, forward and reverse; the
closed forms are NumPy, written from the formula and not from the code. Where a gradient is by
definition not that of the value (a stopped weight, a chosen gradient) only the closed form says
what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxrl_lm as rl
from tests import linear_tables, preference_tables
from tests.calls import FUNCTIONS, Call, assert_complete, public_calls, value_and_pullback

pytestmark = pytest.mark.usefixtures("x64")

CALLS = public_calls(np.float64)
DIFFERENTIABLE = [call for call in CALLS if call.differentiable]


def words(text: str) -> set[str]:
  return set(text.split())


# Data in, numbers out, and no gradient in any argument.
CONSTANT = words(
  """average banded batch_scaled clip_fractions discounted_returns from_groups gae
  gradient_share_by_length greedy_baseline group_centered group_normalized interpolated_proximal
  kl_shaped_rewards leave_one_out leave_one_out_normalized length_weighted_baseline masked_moments
  mean_normalized multi_reward_normalized off_policy_mask pass_at_k perplexity_gap policy_drift
  ratio_extremes raw_rewards rejected self_normalised sequence_effective_sample_size signal_scaled
  terminal_rewards to_groups token_covariance token_effective_sample_size truncated veto whiten
  whitened_group_centered whitened_returns zero_signal_groups
  adaptive_kl_coef best_of_n distillation_advantages geometric_mixture nash_md_advantages
  rejection_sampling step_rewards"""
)
CONSTANT |= preference_tables.CONSTANT
# Nothing to differentiate: masks, integers and booleans in or out, or no array at all.
STRUCTURAL = words(
  """clip_cov_selection constant_length dr_grpo group_token_mean has_signal is_finished
  kl_cov_selection last_token_mask length_adaptive_lambda length_power lengths overlong_penalty
  preference_pairs response_mask segment_count sequence_mean sequence_sum token_mean token_sum
  top_entropy_mask"""
)
STRUCTURAL |= preference_tables.STRUCTURAL
# Their gradient is not the derivative of their value (on-policy, which is constantly 0).
STOPPED = words(
  """cispo dft_loss dppo_kl dppo_tv on_policy_log_ratio objective_loss[selected] topr vespo
  with_reverse_kl_gradient with_token_gradient with_token_gradient[segments]"""
)
STOPPED |= linear_tables.STOPPED

Arrays = dict[str, np.ndarray]


def module_of(call: Call) -> str:
  return getattr(rl, call.name).__module__.rpartition(".")[2]


def stopped(call: Call) -> bool:
  return call.name in STOPPED or call.title in STOPPED


def floats_of(call: Call) -> Arrays:
  return {name: x for name, x in call.arrays.items() if x.dtype == np.float64}


def test_every_public_function_has_a_gradient_case() -> None:
  differentiable = {call.name for call in DIFFERENTIABLE}
  kinds = (differentiable, CONSTANT, STRUCTURAL)
  assert sum(map(len, kinds)) == len(set.union(*kinds)), "in two lists"
  assert_complete(set.union(*kinds))
  assert set.union(*kinds) == set(FUNCTIONS)
  assert_complete(CLOSED_FORMS, differentiable)
  assert differentiable | {call.title for call in DIFFERENTIABLE} >= STOPPED


MODULES = sorted({module_of(call) for call in DIFFERENTIABLE if not stopped(call)})


@pytest.mark.slow  # the closed forms below are the default suite's
@pytest.mark.parametrize("module", MODULES)
def test_finite_differences(module: str) -> None:
  """All functions of a module at once: compiling is what costs."""
  calls = [call for call in DIFFERENTIABLE if module_of(call) == module and not stopped(call)]
  arrays = {x.title: {name: x.arrays[name] for name in x.differentiable} for x in calls}

  @jax.jit
  def values(arrays: Any) -> Any:
    return {call.title: jax.tree.leaves(call(**arrays[call.title])) for call in calls}

  rules = {call.name for call in calls} & linear_tables.REVERSE_ONLY
  modes = ("rev",) if rules else ("fwd", "rev")
  check_grads(values, (arrays,), 1, modes=modes, atol=1e-7, rtol=1e-7, eps=1e-5)


@cache
def derivatives(module: str) -> dict[str, Any]:
  """{title: (pullback of the cotangent, pushforward of the tangents)}, compiled at once."""
  calls = [call for call in DIFFERENTIABLE if module_of(call) == module]

  @jax.jit
  def run(directions: Any) -> Any:
    out = {}
    for call in calls:
      value = lambda floats, call=call: first(call(**floats))
      floats, (cotangent, tangents) = floats_of(call), directions[call.title]
      pulled, pushed = jax.vjp(value, floats)[1](cotangent)[0], None
      if call.name not in linear_tables.REVERSE_ONLY:
        pushed = jax.jvp(value, (floats,), (tangents,))[1]
      out[call.title] = pulled, pushed
    return out

  return jax.device_get(run({call.title: directions_of(call) for call in calls}))


def directions_of(call: Call) -> tuple[np.ndarray, Arrays]:
  """A cotangent of the value and tangents of the floating arrays."""
  rng = np.random.default_rng(5)
  shape = jax.eval_shape(lambda arrays: first(call(**arrays)), call.arrays).shape
  tangents = {name: rng.normal(size=x.shape) for name, x in floats_of(call).items()}
  return rng.normal(size=shape), tangents


@pytest.mark.parametrize("call", DIFFERENTIABLE, ids=lambda x: x.title)
def test_closed_form(call: Call) -> None:
  cotangent, tangents = directions_of(call)
  gradients, forward = derivatives(module_of(call))[call.title]
  want = CLOSED_FORMS[call.name](call.arrays, call.constants, cotangent)
  assert set(want) == set(call.differentiable)
  for name, got in gradients.items():
    truth = want.get(name, np.zeros(got.shape))
    size = np.abs(truth).max()
    assert size > 0 or name not in want
    assert np.abs(got - truth).max() <= 1e-12 * size, name

  if call.name in linear_tables.REVERSE_ONLY:
    return
  # Forward mode is its transpose.
  pulled = sum(np.sum(tangents[name] * x) for name, x in want.items())
  np.testing.assert_allclose(np.sum(cotangent * forward), pulled, rtol=1e-12)


@pytest.mark.parametrize(
  "call", [call for call in CALLS if call.name in CONSTANT], ids=lambda x: x.title
)
def test_constants_have_no_gradient(call: Call) -> None:
  assert floats_of(call)
  outputs = jax.tree.leaves(jax.eval_shape(lambda arrays: call(**arrays), call.arrays))
  assert any(jnp.issubdtype(x.dtype, jnp.floating) for x in outputs)
  # Only the gradients are asked for, so that nothing is left to compile if they are 0.
  gradients = jax.jit(lambda arrays: value_and_pullback(call)(arrays)[1])(call.arrays)
  assert gradients.keys() == floats_of(call).keys()
  for name, gradient in gradients.items():
    assert not np.asarray(gradient).any(), name


def first(output: Any) -> Any:
  """The loss of `objective_loss`, the array of the others."""
  return output[0] if isinstance(output, tuple) else output


# --------------------------------------------------------------------------------- closed forms


def segments(arrays: Arrays) -> Iterator[tuple[Any, list[int]]]:
  """Index of the row and the counted positions of each segment."""
  mask = arrays["mask"]
  ids = arrays.get("segment_ids", np.ones(mask.shape, int))
  for row in np.ndindex(mask.shape[:-1]):
    for name in np.unique(ids[row][mask[row]]):
      yield row, [t for t in range(mask.shape[-1]) if mask[row][t] and ids[row][t] == name]


def per_segment(rule: Callable[..., Any], key: str) -> Callable[..., Arrays]:
  """rule(values, cotangents) -> gradients, of the tokens of one segment."""

  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    x = arrays[key]
    out = np.zeros(x.shape)
    for row, at in segments(arrays):
      out[row][at] = rule(x[row][at], cotangent[row][at])
    return {key: out}

  return gradient


def per_token(rule: Callable[..., Any], key: str) -> Callable[..., Arrays]:
  """rule(arrays, constants) -> d out_t / d in_t; 0 where the mask is False."""

  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    slope = rule(arrays, constants) * np.ones(arrays[key].shape)
    return {key: np.where(arrays["mask"], slope * cotangent, 0.0)}

  return gradient


def surrogate(coefficient: Callable[..., Any]) -> Callable[..., Arrays]:
  """coefficient(log-ratio, advantage, old log-prob) of each token: gradient = coefficient A."""

  def rule(arrays: Arrays, constants: Any) -> np.ndarray:
    log_ratio = arrays["log_ratio"]
    advantages = np.broadcast_to(arrays["advantages"], log_ratio.shape)
    old = arrays.get("old_logprobs", np.zeros(log_ratio.shape))
    return np.vectorize(coefficient)(log_ratio, advantages, old) * advantages

  return per_token(rule, "log_ratio")


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
  weights = np.exp(logits / temperature)
  return weights / weights.sum(-1, keepdims=True)


def over_vocabulary(rule: Callable[..., np.ndarray]) -> Callable[..., Arrays]:
  """rule(arrays, constants, p) -> d out_t / d (logits_t / temperature), [..., V]."""

  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    temperature = constants["temperature"]
    slope = rule(arrays, constants, softmax(arrays["logits"], temperature)) / temperature
    counted = np.where(arrays["mask"], cotangent, 0.0)
    return {"logits": slope * counted[..., None]}

  return gradient


def one_hot(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
  return np.eye(vocabulary)[tokens]


def next_token(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
  temperature, out = constants["temperature"], np.zeros(arrays["logits"].shape)
  p = softmax(arrays["logits"], temperature)
  ids = arrays.get("segment_ids", np.ones(arrays["mask"].shape, int))
  for index in np.ndindex(arrays["mask"].shape):
    *row, t = index
    before = (*row, t - 1)
    if t > 0 and arrays["mask"][index] and ids[index] == ids[before] != 0:
      score = one_hot(arrays["tokens"][index], p.shape[-1]) - p[before]
      out[before] = cotangent[index] * score / temperature
  return {"logits": out}


def divergence_slope(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  """d KL(p || q) / d log-odds: p (log p / q - KL)."""
  log = np.log(p / q)
  return p * (log - np.sum(p * log, -1, keepdims=True))


def exact_kl(arrays: Arrays, constants: Any, p: np.ndarray) -> np.ndarray:
  return divergence_slope(p, softmax(arrays["ref_logits"], constants["temperature"]))


def top_k_kl(arrays: Arrays, constants: Any, p: np.ndarray) -> np.ndarray:
  """All tokens but the k likeliest move as one outcome, each by its share."""
  q = softmax(arrays["ref_logits"], constants["temperature"])
  rest = p < np.sort(p, -1)[..., [-constants["k"]]]
  p_rest, q_rest = (np.sum(x * rest, -1, keepdims=True) for x in (p, q))
  log = np.log(np.where(rest, p_rest / q_rest, p / q))
  return p * (log - np.sum(p * log, -1, keepdims=True))


def entropy(arrays: Arrays, constants: Any, p: np.ndarray) -> np.ndarray:
  log = np.log(p)
  return -p * (log - np.sum(p * log, -1, keepdims=True))


def gmpo(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
  out = np.zeros(arrays["log_ratio"].shape)
  for row, at in segments(arrays):
    advantage, x = arrays["advantages"][row][0], arrays["log_ratio"][row][at]
    inside = x < 0.4 if advantage > 0 else x > -0.4
    mean = np.mean(np.where(inside, x, 0.4 * np.sign(advantage)))
    out[row][at] = advantage * np.exp(mean) * inside * cotangent[row][at].sum() / len(at)
  return {"log_ratio": out}


def binary_kl(log_ratio: float, old: float) -> float:
  p, p_old = np.exp(log_ratio + old), np.exp(old)
  if p >= 1:
    return np.inf
  return p_old * np.log(p_old / p) + (1 - p_old) * np.log((1 - p_old) / (1 - p))


def dppo_kl(log_ratio: float, advantage: float, old: float) -> float:
  inside = binary_kl(log_ratio, old) <= 0.05
  keep = inside or log_ratio <= 0 if advantage > 0 else inside or log_ratio >= 0
  return min(np.exp(log_ratio), 20.0) * keep


def dppo_tv(log_ratio: float, advantage: float, old: float) -> float:
  moved = np.exp(log_ratio + old) - np.exp(old)
  keep = moved <= 0.2 if advantage > 0 else moved >= -0.2
  return min(np.exp(log_ratio), 20.0) * keep


def ppo(log_ratio: float, advantage: float, old: float = 0.0, cap: float = np.inf) -> float:
  ratio = np.exp(log_ratio)
  return ratio * (ratio <= 1.2 if advantage >= 0 else 0.8 <= ratio <= cap)


def sapo(log_ratio: float, advantage: float, old: float) -> float:
  ratio, tau = np.exp(log_ratio), 1.0 if advantage > 0 else 1.05
  gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
  return 4 * gate * (1 - gate) * ratio


def vespo(log_ratio: float, advantage: float, old: float) -> float:
  w, k, lam = np.exp(log_ratio), *((2, 3) if advantage >= 0 else (3, 2))
  return w**k * np.exp(lam * (1 - w))


def clip_cov(arrays: Arrays, constants: Any) -> np.ndarray:
  advantages = arrays["advantages"]
  return ~arrays["selected"] * np.vectorize(ppo)(arrays["log_ratio"], advantages) * advantages


def kl_cov(arrays: Arrays, constants: Any) -> np.ndarray:
  log_ratio = arrays["log_ratio"]
  return np.exp(log_ratio) * arrays["advantages"] - arrays["selected"] * np.sign(log_ratio)


def delta(arrays: Arrays) -> np.ndarray:
  return arrays["logprobs"] - arrays["ref_logprobs"]


def off_policy_k3(arrays: Arrays, constants: Any) -> np.ndarray:
  return np.exp(arrays["logprobs"] - arrays["old_logprobs"]) * delta(arrays)


def objective(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
  """-w iw A (GSPO's geometric ratio, clipped) + 0.1 w delta; KL-Cov on-policy: -w (A + 0)."""
  mask, weights = arrays["mask"], arrays["loss_weights"]
  if "selected" in arrays:  # the ratio is 1 and the penalty |0| is flat
    return {"logprobs": np.where(mask, -weights * arrays["advantages"] * cotangent, 0.0)}
  logprobs = 0.1 * weights * delta(arrays)
  log_ratio = arrays["logprobs"] - arrays["old_logprobs"]
  for row, at in segments(arrays):
    mean, advantage = log_ratio[row][at].mean(), arrays["advantages"][row][0]
    ratio = np.exp(mean)
    stopped = ratio > 1 + 4e-4 if advantage >= 0 else ratio < 1 - 3e-4
    slope = advantage * ratio * (not stopped) * weights[row][at].sum() / len(at)
    logprobs[row][at] -= arrays["importance_weights"][row][0] * slope
  entropy = -0.2 * weights
  return {
    "logprobs": np.where(mask, cotangent * logprobs, 0.0),
    "entropy": np.where(mask, cotangent * entropy, 0.0),
  }


def recipe(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
  """GSPO's gradient at a width of 0.2, and that of 0.1 w times geometric ratio times k3."""
  mask, weights = arrays["mask"], arrays["loss_weights"]
  log_ratio, difference = arrays["logprobs"] - arrays["old_logprobs"], delta(arrays)
  logprobs = np.zeros(mask.shape)
  for row, at in segments(arrays):
    ratio, advantage = np.exp(log_ratio[row][at].mean()), arrays["advantages"][row][0]
    stopped = ratio > 1.2 if advantage >= 0 else ratio < 0.8
    w, d = weights[row][at], difference[row][at]
    gain = arrays["importance_weights"][row][0] * advantage * (not stopped) * w.sum()
    kl = (w * (np.exp(-d) - 1 + d)).sum()
    logprobs[row][at] = ratio * ((0.1 * kl - gain) / len(at) + 0.1 * w * (1 - np.exp(-d)))
  entropy = -0.2 * weights
  return {
    "logprobs": np.where(mask, cotangent * logprobs, 0.0),
    "entropy": np.where(mask, cotangent * entropy, 0.0),
  }


def spread(divide: bool, key: str) -> Callable[..., Arrays]:
  """Of a sum, or a mean, over all tokens or over those of each row."""

  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    mask = arrays["mask"]
    rows = constants.get("axis", -1 if key == "logprobs" else None) == -1
    count = mask.sum(-1, keepdims=True) if rows else mask.sum()
    cotangent = cotangent[..., None] if rows else cotangent
    return {key: mask * cotangent / (np.maximum(count, 1) if divide else 1)}

  return gradient


def against_teacher(slope: Callable[..., np.ndarray]) -> Callable[..., Arrays]:
  """slope(S, T, constants) = d loss / d log S[v] of free log-probs; the softmax centres it."""

  def rule(arrays: Arrays, constants: Any, p: np.ndarray) -> np.ndarray:
    free = slope(p, softmax(arrays["teacher_logits"], constants["temperature"]), constants)
    return free - p * free.sum(-1, keepdims=True)

  return over_vocabulary(rule)


def skewed_forward(p: np.ndarray, q: np.ndarray, constants: Any) -> np.ndarray:
  skew = constants["skew"]
  return -q * (1 - skew) * p / (skew * q + (1 - skew) * p)


def skewed_reverse(p: np.ndarray, q: np.ndarray, constants: Any) -> np.ndarray:
  skew = constants["skew"]
  mixture = skew * p + (1 - skew) * q
  return p * (np.log(p / mixture) - skew * p / mixture)


def jensen_shannon(p: np.ndarray, q: np.ndarray, constants: Any) -> np.ndarray:
  beta = constants["beta"]
  return (1 - beta) * p * np.log(p / (beta * q + (1 - beta) * p))


def top_k_with_tail(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
  """Of the student's buckets: 1[v in bucket] p[v] / p[bucket] - p[v]."""
  p = softmax(arrays["logits"], constants["temperature"])
  kept = one_hot(arrays["teacher_ids"], p.shape[-1])
  inside = np.concatenate([kept, 1 - kept.sum(-2, keepdims=True)], -2)
  part = inside * p[..., None, :]
  slope = part / part.sum(-1, keepdims=True) - p[..., None, :]
  out = np.sum(cotangent[..., None] * slope, -2) / constants["temperature"]
  return {"logits": np.where(arrays["mask"][..., None], out, 0.0)}


def chosen_sample(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
  return {"values": cotangent[:, None] * one_hot(arrays["index"], arrays["values"].shape[-1])}


def xpo(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
  return {
    "preference_loss": cotangent,
    "reference_sample_logprobs": constants["alpha"] * cotangent,
  }


ONE = lambda arrays, constants: 1.0
CLOSED_FORMS: dict[str, Callable[..., Arrays]] = {
  "zero_masked": per_token(ONE, "x"),
  "masked_sum": spread(False, "x"),
  "masked_mean": spread(True, "x"),
  "segment_total": per_segment(lambda x, c: c.sum(), "x"),
  "segment_mean": per_segment(lambda x, c: c.mean(), "x"),
  "segment_max": per_segment(lambda x, c: (x == x.max()) * c.sum(), "x"),
  "sequence_logprob": spread(False, "logprobs"),
  "mean_logprob": spread(True, "logprobs"),
  "token_logprobs": over_vocabulary(lambda a, k, p: one_hot(a["tokens"], p.shape[-1]) - p),
  "next_token_logprobs": next_token,
  "token_entropy": over_vocabulary(entropy),
  "token_log_ratio": per_token(ONE, "logprobs"),
  "on_policy_log_ratio": per_token(ONE, "logprobs"),
  "per_token": per_token(ONE, "log_ratio"),
  "per_prefix": per_segment(lambda x, c: c[::-1].cumsum()[::-1], "log_ratio"),
  "per_sequence": per_segment(lambda x, c: c.sum(), "log_ratio"),
  "per_sequence_geometric": per_segment(lambda x, c: c.mean(), "log_ratio"),
  "with_token_gradient": per_token(ONE, "log_ratio"),
  "clamped": per_token(lambda a, k: np.abs(a["log_ratio"]) <= 0.3, "log_ratio"),
  "reinforce": surrogate(lambda d, a, old: 1.0),
  "importance_weighted": surrogate(lambda d, a, old: np.exp(d)),
  "ppo_clip": surrogate(ppo),
  "dual_clip": surrogate(lambda d, a, old: ppo(d, a, cap=3.0)),
  "sapo": surrogate(sapo),
  "gmpo": gmpo,
  "cispo": surrogate(lambda d, a, old: min(np.exp(d), 5.0)),
  "topr": surrogate(lambda d, a, old: 1.0 if a > 0 else min(np.exp(d), 1.0)),
  "vespo": surrogate(vespo),
  "dppo_tv": surrogate(dppo_tv),
  "dppo_kl": surrogate(dppo_kl),
  "dro": per_token(lambda a, k: a["advantages"] - k["beta"] * a["log_ratio"], "log_ratio"),
  "clip_cov": per_token(clip_cov, "log_ratio"),
  "kl_cov": per_token(kl_cov, "log_ratio"),
  "kl_k1": per_token(ONE, "logprobs"),
  "kl_k2": per_token(lambda a, k: delta(a), "logprobs"),
  "kl_k3": per_token(lambda a, k: 1 - np.exp(-delta(a)), "logprobs"),
  "kl_abs": per_token(lambda a, k: np.sign(delta(a)), "logprobs"),
  "kl_k3_off_policy": per_token(off_policy_k3, "logprobs"),
  "with_reverse_kl_gradient": per_token(lambda a, k: delta(a), "logprobs"),
  "exact_kl": over_vocabulary(exact_kl),
  "top_k_kl": over_vocabulary(top_k_kl),
  "objective_loss": objective,
  "recipe_loss": recipe,
  "forward_kl": against_teacher(lambda p, q, k: -q),
  "skewed_forward_kl": against_teacher(skewed_forward),
  "skewed_reverse_kl": against_teacher(skewed_reverse),
  "jensen_shannon": against_teacher(jensen_shannon),
  "top_k_with_tail": top_k_with_tail,
  "sft_loss": per_token(lambda a, k: -1.0, "logprobs"),
  "dft_loss": per_token(lambda a, k: -np.exp(a["logprobs"]), "logprobs"),
  "positive_nll_loss": per_token(lambda a, k: -1.0 * (a["rewards"] > 0)[..., None], "logprobs"),
  "sample_at": chosen_sample,
  "xpo_loss": xpo,
}
CLOSED_FORMS |= preference_tables.CLOSED_FORMS
CLOSED_FORMS |= linear_tables.closed_forms(CLOSED_FORMS)
