"""What starts from hidden states in the tables of the sweeps over all public functions.

Calls for `calls.py`, closed forms for `test_gradients.py`, ranges for `test_bad_input.py`, other
constants for `test_faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxrl_lm as rl

Arrays = dict[str, np.ndarray]

# Of a model, not of its tokens: nothing in them is masked.
HEADS = ("unembedding", "bias", "teacher_unembedding", "ref_unembedding")
HEAD = ("hidden", "unembedding", "bias")
TERMS = {
  "reverse_kl_terms": {},
  "forward_kl_terms": {},
  "skewed_forward_kl_terms": {"skew": 0.1},
  "skewed_reverse_kl_terms": {"skew": 0.6},
  "jensen_shannon_terms": {"beta": 0.3},
}
# A custom gradient rule: forward mode is an error of JAX.
REVERSE_ONLY = {
  "linear_divergence",
  "linear_policy_loss",
  "linear_token_logprobs",
  "linear_token_stats",
  "linear_top_k_kl",
  "linear_top_k_with_tail",
  "linear_weighted_logprobs",
}
# Statistics that are constants, or coefficients taken at other log-probs.
STOPPED = {"linear_policy_loss", "linear_weighted_logprobs"}


def calls(
  call: Callable[..., Any], values: Arrays, mask: np.ndarray, vocabulary: int, dtype: Any
) -> Iterator[Any]:
  """The calls."""
  rng = np.random.default_rng(6)
  shape, off, empty = mask.shape, ~mask, ~mask.any(-1)

  def normal(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(dtype)

  head = {"unembedding": normal(vocabulary, 3), "bias": normal(vocabulary)}
  head["hidden"] = normal(*shape, 3)
  other = normal(*shape, 2), normal(vocabulary, 2)
  kept = {
    "teacher_logprobs": np.log(rng.uniform(0.1, 0.5, (*shape, 2))).astype(dtype),
    "teacher_ids": np.argsort(rng.random((*shape, vocabulary)), -1)[..., :2].astype(np.int32),
  }
  advantages = normal(*shape[:-1], 1)

  def linear(name: str, *tokens: str, arrays: Any = None, unused: Any = None, **rest: Any) -> Any:
    return call(
      name,
      *tokens,
      arrays=head | (arrays or {}),
      unused={"hidden": off} | (unused or {}),
      differentiable=HEAD,
      temperature=0.7,
      memory_budget=160,
      **rest,
    )

  yield linear("linear_token_logprobs", "tokens")
  yield linear("linear_token_stats", "tokens")
  coefficients = {"coefficients": normal(*shape), "entropy_coefficients": normal(*shape)}
  yield linear(
    "linear_weighted_logprobs",
    "tokens",
    arrays=coefficients,
    unused=dict.fromkeys(coefficients, off),
  )
  yield linear(
    "linear_policy_loss",
    *("tokens", "logprobs", "old_logprobs", "loss_weights", "ref_logprobs"),
    arrays={"advantages": advantages, "importance_weights": np.abs(advantages)},
    unused={"advantages": empty[..., None], "importance_weights": empty[..., None]},
    objective=rl.GSPO,
    kl=rl.kl_k2,
    kl_coef=0.1,
    entropy_coef=0.2,
  )
  for name, prefix, constants in (
    ("linear_divergence", "teacher", {"terms": rl.reverse_kl_terms}),
    ("linear_top_k_kl", "ref", {"k": 2}),
  ):
    arrays = dict(zip((f"{prefix}_hidden", f"{prefix}_unembedding"), other, strict=True))
    yield linear(name, arrays=arrays, unused={f"{prefix}_hidden": off}, **constants)
  yield linear("linear_top_k_with_tail", arrays=kept, unused=dict.fromkeys(kept, off))
  two = {
    name: -rng.uniform(0.1, 3.0, shape).astype(dtype) for name in ("logprobs", "teacher_logprobs")
  }
  for name, constants in TERMS.items():
    yield call(name, arrays=two, differentiable=tuple(two), masked=None, **constants)


# ---------------------------------------------------------------------------------- closed forms


def from_hidden(rule: Callable[..., Arrays]) -> Callable[..., Arrays]:
  """rule(arrays with the logits, constants, cotangent) -> {"logits": gradient}, of the matrices."""

  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    extra = {"logits": arrays["hidden"] @ arrays["unembedding"].T + arrays["bias"]}
    for prefix, name in (("teacher", "ref_logits"), ("ref", "ref_logits")):
      if f"{prefix}_hidden" in arrays:
        extra[name] = arrays[f"{prefix}_hidden"] @ arrays[f"{prefix}_unembedding"].T
    slope = rule(arrays | extra, constants, cotangent)["logits"]
    flat = slope.reshape(-1, slope.shape[-1])
    return {
      "hidden": slope @ arrays["unembedding"],
      "unembedding": flat.T @ arrays["hidden"].reshape(flat.shape[0], -1),
      "bias": flat.sum(0),
    }

  return gradient


def weighted(coefficients: Callable[..., tuple[np.ndarray, np.ndarray]]) -> Callable[..., Arrays]:
  """coefficients(arrays, constants) of log-prob and entropy -> gradient of the weighted sum."""

  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    temperature = constants["temperature"]
    weights = np.exp(arrays["logits"] / temperature)
    p = weights / weights.sum(-1, keepdims=True)
    score = np.eye(p.shape[-1])[arrays["tokens"]] - p
    entropy = -p * (np.log(p) - np.sum(p * np.log(p), -1, keepdims=True))
    on = arrays["mask"]
    c, e = (np.where(on, x, 0.0)[..., None] for x in coefficients(arrays, constants))
    return {"logits": cotangent * (c * score + e * entropy) / temperature}

  return gradient


def terms(slopes: Callable[..., Any]) -> Callable[..., Arrays]:
  """slopes(p, q, s, t, share) -> derivatives in s = log p and t = log q."""

  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    s, t = arrays["logprobs"], arrays["teacher_logprobs"]
    share = constants.get("skew", constants.get("beta"))
    both = slopes(np.exp(s), np.exp(t), s, t, share)
    return {
      name: cotangent * x for name, x in zip(("logprobs", "teacher_logprobs"), both, strict=True)
    }

  return gradient


def _skewed(p: np.ndarray, q: np.ndarray, s: np.ndarray, share: float) -> tuple[Any, Any]:
  """Of p (s - log m), m = share p + (1 - share) q: derivatives in s and in log q."""
  m = share * p + (1 - share) * q
  return p * (s - np.log(m)) + p * (1 - share * p / m), -p * (1 - share) * q / m


def _jensen_shannon(p: Any, q: Any, s: Any, t: Any, beta: float) -> tuple[Any, Any]:
  log_mixture = np.log(beta * q + (1 - beta) * p)
  return (1 - beta) * p * (s - log_mixture), beta * q * (t - log_mixture)


TERM_FORMS: dict[str, Callable[..., Arrays]] = {
  "reverse_kl_terms": terms(lambda p, q, s, t, share: (p * (s - t + 1), -p)),
  "forward_kl_terms": terms(lambda p, q, s, t, share: (-q, q * (t - s + 1))),
  "skewed_forward_kl_terms": terms(lambda p, q, s, t, share: _skewed(q, p, t, share)[::-1]),
  "skewed_reverse_kl_terms": terms(lambda p, q, s, t, share: _skewed(p, q, s, share)),
  "jensen_shannon_terms": terms(_jensen_shannon),
}


def closed_forms(of_logits: dict[str, Callable[..., Arrays]]) -> dict[str, Callable[..., Arrays]]:
  """From the closed forms of logits."""

  def known(arrays: Arrays, constants: Any) -> tuple[np.ndarray, np.ndarray]:
    return arrays["coefficients"], arrays["entropy_coefficients"]

  def of_objective(arrays: Arrays, constants: Any) -> tuple[np.ndarray, np.ndarray]:
    slopes = of_logits["objective_loss"](arrays, constants, np.ones(()))
    return slopes["logprobs"], slopes["entropy"]

  return TERM_FORMS | {
    "linear_token_logprobs": from_hidden(of_logits["token_logprobs"]),
    "linear_token_stats": from_hidden(of_logits["token_logprobs"]),
    "linear_weighted_logprobs": from_hidden(weighted(known)),
    "linear_policy_loss": from_hidden(weighted(of_objective)),
    "linear_divergence": from_hidden(of_logits["exact_kl"]),
    "linear_top_k_kl": from_hidden(of_logits["top_k_kl"]),
    "linear_top_k_with_tail": from_hidden(of_logits["top_k_with_tail"]),
  }


# --------------------------------------------------------------------------- ranges and constants

HEAD_RANGES: list[dict[str, Any]] = [
  {"temperature": 0.0},
  {"softcap": 0.0},
  {"valid_vocab": 0},
  {"valid_vocab": 5},
  {"memory_budget": 0},
]
RANGES: dict[str, list[dict[str, Any]]] = {
  "linear_token_logprobs": HEAD_RANGES,
  "linear_token_stats": HEAD_RANGES,
  "linear_weighted_logprobs": HEAD_RANGES,
  "linear_policy_loss": HEAD_RANGES,
  "linear_divergence": [*HEAD_RANGES, {"teacher_softcap": -1.0}],
  "linear_top_k_kl": [*HEAD_RANGES, {"ref_softcap": -1.0}, {"k": 0}, {"k": 4}],
  "linear_top_k_with_tail": HEAD_RANGES,
  "skewed_forward_kl_terms": [{"skew": 0.0}, {"skew": 1.0}],
  "skewed_reverse_kl_terms": [{"skew": 0.0}, {"skew": 1.0}],
  "jensen_shannon_terms": [{"beta": -0.1}, {"beta": 1.1}],
}
# How, not what, is computed: another value must make no difference.
NO_EFFECT = {"memory_budget", "sharding"}
HEAD_OTHER: dict[str, Any] = {"temperature": 1.0, "softcap": 2.0, "valid_vocab": 3}
OTHER_CONSTANTS: dict[str, dict[str, Any]] = {
  "linear_token_logprobs": HEAD_OTHER,
  "linear_token_stats": HEAD_OTHER,
  "linear_weighted_logprobs": HEAD_OTHER,
  "linear_policy_loss": HEAD_OTHER | {"objective": rl.CISPO, "entropy_coef": 0.4},
  "linear_divergence": HEAD_OTHER
  | {"terms": rl.forward_kl_terms, "teacher_softcap": 2.0, "teacher_bias": np.arange(4.0)},
  "linear_top_k_kl": HEAD_OTHER | {"k": 1, "ref_softcap": 2.0, "ref_bias": np.arange(4.0)},
  "linear_top_k_with_tail": HEAD_OTHER,
  "skewed_forward_kl_terms": {"skew": 0.2},
  "skewed_reverse_kl_terms": {"skew": 0.2},
  "jensen_shannon_terms": {"beta": 0.4},
}
