"""Critics, reward models and preferences in the tables of the sweeps over all public functions.

Calls for `calls.py`, closed forms for `test_gradients.py`, ranges for `test_bad_input.py`, other
constants for `test_faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests import reference_preferences as ref

Arrays = dict[str, np.ndarray]

PAIR = ("chosen_log_ratio", "rejected_log_ratio")
LOGPROBS = ("chosen_logprob", "rejected_logprob")
MEAN_LOGPROBS = ("chosen_mean_logprob", "rejected_mean_logprob")
REWARDS = ("chosen_rewards", "rejected_rewards")
MARGINS = ("policy_margins", "ref_margins")
# Loss of a pair: its two arguments, and constants that are none of its defaults.
PAIRED: dict[str, tuple[tuple[str, str], dict[str, float]]] = {
  "dpo_loss": (PAIR, {"beta": 0.7}),
  "conservative_dpo_loss": (PAIR, {"beta": 0.7, "label_smoothing": 0.1}),
  "robust_dpo_loss": (PAIR, {"beta": 0.7, "label_smoothing": 0.1}),
  "hinge_dpo_loss": (PAIR, {"beta": 0.7}),
  "ipo_loss": (PAIR, {"beta": 0.7}),
  "exo_loss": (PAIR, {"beta": 0.7, "label_smoothing": 0.1}),
  "discopop_loss": (PAIR, {"beta": 0.7, "tau": 0.5}),
  "nca_loss": (PAIR, {"beta": 0.7}),
  "bco_pair_loss": (PAIR, {"beta": 0.7, "delta": 0.3}),
  "sppo_loss": (PAIR, {"beta": 0.7}),
  "apo_zero_loss": (PAIR, {"beta": 0.7}),
  "apo_down_loss": (PAIR, {"beta": 0.7}),
  "simpo_loss": (MEAN_LOGPROBS, {"beta": 1.5, "gamma": 0.4}),
  "cpo_loss": (LOGPROBS, {"beta": 0.7}),
  "orpo_loss": (MEAN_LOGPROBS, {}),
  "bradley_terry_loss": (REWARDS, {}),
  "reward_centering_loss": (REWARDS, {}),
}
SORTED = {"beta": 0.7, "label_smoothing": 0.1}
CLASS_WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.8}
LABELLED = {
  "kto_loss": {"beta": 0.7, "baseline": 0.3, **CLASS_WEIGHTS},
  "bco_loss": {"beta": 0.7, "delta": 0.3, **CLASS_WEIGHTS},
}
CRITICS = {
  "value_loss": {},
  "clipped_value_loss": {"clip": 0.5},
  "huber_value_loss": {"delta": 0.6},
  "clipped_huber_value_loss": {"clip": 0.5, "delta": 0.6},
  "value_clip_fraction": {"clip": 0.5},
  "explained_variance": {},
}


def calls(
  call: Callable[..., Any], values: Arrays, mask: np.ndarray, where: np.ndarray, dtype: Any
) -> Iterator[Any]:
  """One valid call or several of each function; see `calls.py`."""
  rng, rows = np.random.default_rng(6), mask.shape[:-1]

  def normal(shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape).astype(dtype)

  def log_ratios(names: Any) -> Arrays:
    negative = names in (LOGPROBS, MEAN_LOGPROBS)
    return {name: -np.abs(normal(rows)) if negative else normal(rows) for name in names}

  for name, (names, constants) in PAIRED.items():
    arrays = log_ratios(names)
    yield call(name, arrays=arrays, differentiable=names, masked=None, **constants)
  arrays = log_ratios(REWARDS) | {"margin": np.abs(normal(rows))}
  yield call(
    "bradley_terry_loss", arrays=arrays, differentiable=REWARDS, masked=None, also="margin"
  )
  for name, names, count in (("aot_loss", MARGINS, 1), ("aot_unpaired_loss", PAIR, 2)):
    arrays = log_ratios(names) | {"where": where}
    yield call(
      name,
      arrays=arrays,
      unused=dict.fromkeys(names, ~where),
      differentiable=names[:count],
      masked=None,
      **SORTED,
    )
  for name, constants in LABELLED.items():
    arrays = {"log_ratio": normal(rows), "desirable": where}
    yield call(name, arrays=arrays, differentiable=("log_ratio",), masked=None, **constants)
  yield call(
    "kto_baseline",
    arrays={"log_ratio": np.abs(normal(rows)), "where": where},
    unused={"log_ratio": ~where},
    masked=None,
  )
  yield call(
    "preference_statistics",
    arrays=log_ratios(REWARDS) | {"where": where},
    unused=dict.fromkeys(REWARDS, ~where),
    masked=None,
  )
  for name in ("sequence_log_ratio", "mean_log_ratio"):
    yield call(name, "logprobs", "ref_logprobs", differentiable=("logprobs",))

  scored: dict[str, Any] = {"differentiable": ("log_ratio",), "masked": None}
  yield call("alpha_divergence_score", arrays={"log_ratio": normal(rows)}, alpha=0.4, **scored)
  yield call("jensen_shannon_score", arrays={"log_ratio": normal(rows)}, **scored)
  yield call(
    "length_desensitized_weights",
    arrays={"shared_lengths": np.array([[2, 1, 1], [0, 1, 2]], np.int32)},
    unused={"shared_lengths": ~mask.any(-1)},
    alpha=0.4,
  )
  yield call("log_collision_probability", "logits", differentiable=("logits",), temperature=0.7)
  yield call(
    "wpo_weights",
    "logprobs",
    arrays={"collision_logprobs": values["old_logprobs"]},
    unused={"collision_logprobs": ~mask},
  )

  for name, constants in CRITICS.items():
    arrays = {"returns": values["rewards"]}
    if "clip" in constants:
      arrays["old_values"] = (values["values"] + normal(mask.shape)).astype(arrays["returns"].dtype)
    trained = () if name in CONSTANT else ("values",)
    unused = dict.fromkeys(arrays, ~mask)
    yield call(name, "values", arrays=arrays, unused=unused, differentiable=trained, **constants)


CONSTANT = {
  "explained_variance",
  "kto_baseline",
  "preference_statistics",
  "value_clip_fraction",
  "wpo_weights",
}
STRUCTURAL = {"length_desensitized_weights"}

# --------------------------------------------------------------------------------- closed forms


def pairwise(name: str, names: tuple[str, str]) -> Callable[..., Arrays]:
  slope = getattr(ref, f"{name.replace('cpo_loss', 'dpo_loss')}_slope")

  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    chosen, rejected = (arrays[x] for x in names)
    margin = [arrays["margin"]] if "margin" in arrays else []
    slopes = np.vectorize(slope)(chosen, rejected, *margin, **constants)
    return {x: cotangent * s for x, s in zip(names, slopes)}

  return gradient


def sorted_rows(names: tuple[str, str], count: int) -> Callable[..., Arrays]:
  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    out = {x: np.zeros(cotangent.shape) for x in names}
    for row, where in enumerate(arrays["where"]):
      pair = [list(arrays[x][row][where]) for x in names]
      pulled = ref.aot_unpaired_loss_vjp(*pair, **constants, cotangents=list(cotangent[row]))
      for x, values in zip(names, pulled):
        out[x][row][where] = values
    return {x: out[x] for x in names[:count]}

  return gradient


def labelled(name: str) -> Callable[..., Arrays]:
  slope = getattr(ref, f"{name}_slope")

  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    weights = tuple(constants[x] for x in CLASS_WEIGHTS)
    rest = {k: x for k, x in constants.items() if k not in CLASS_WEIGHTS} | {"weights": weights}
    one = lambda s, d: slope(float(s), bool(d), **rest)
    return {"log_ratio": cotangent * np.vectorize(one)(arrays["log_ratio"], arrays["desirable"])}

  return gradient


def score(name: str) -> Callable[..., Arrays]:
  slope = getattr(ref, f"{name}_slope")

  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    one = lambda u: slope(float(u), **constants)
    return {"log_ratio": cotangent * np.vectorize(one)(arrays["log_ratio"])}

  return gradient


def log_ratio(divide: bool) -> Callable[..., Arrays]:
  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    mask = arrays["mask"]
    lengths = np.maximum(mask.sum(-1, keepdims=True), 1) if divide else 1
    return {"logprobs": mask * cotangent[..., None] / lengths}

  return gradient


def collision(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
  out = np.zeros(arrays["logits"].shape)
  for index in np.argwhere(arrays["mask"]):
    at = tuple(index)
    slope = ref.log_collision_probability_slope(list(arrays["logits"][at]), **constants)
    out[at] = cotangent[at] * np.array(slope)
  return {"logits": out}


def critic(slope: Callable[..., float], *names: str) -> Callable[..., Arrays]:
  def gradient(arrays: Arrays, constants: Any, cotangent: np.ndarray) -> Arrays:
    inputs = [arrays[x] for x in ("values", *names)]
    slopes = np.vectorize(lambda *x: slope(*map(float, x), **constants))(*inputs)
    return {"values": np.where(arrays["mask"], cotangent * slopes, 0.0)}

  return gradient


CLOSED_FORMS: dict[str, Callable[..., Arrays]] = {
  **{name: pairwise(name, names) for name, (names, _) in PAIRED.items()},
  "aot_loss": sorted_rows(MARGINS, 1),
  "aot_unpaired_loss": sorted_rows(PAIR, 2),
  **{name: labelled(name) for name in LABELLED},
  "alpha_divergence_score": score("alpha_divergence_score"),
  "jensen_shannon_score": score("jensen_shannon_score"),
  "sequence_log_ratio": log_ratio(False),
  "mean_log_ratio": log_ratio(True),
  "log_collision_probability": collision,
  "value_loss": critic(ref.value_loss_slope, "returns"),
  "clipped_value_loss": critic(ref.clipped_value_loss_slope, "old_values", "returns"),
  "huber_value_loss": critic(ref.huber_slope, "returns"),
  "clipped_huber_value_loss": critic(ref.clipped_huber_slope, "old_values", "returns"),
}

# ------------------------------------------------------------------------------------- bad input

NAN = float("nan")
BETA = [{"beta": 0.0}, {"beta": -0.1}, {"beta": NAN}]
SMOOTHING = [{"label_smoothing": x} for x in (-0.1, 0.5, 0.9, NAN)]
WEIGHTS = [{"desirable_weight": -1.0}, {"undesirable_weight": -1.0}]
CLIP = [{"clip": -0.1}, {"clip": NAN}]
DELTA = [{"delta": 0.0}, {"delta": -1.0}]
RANGES: dict[str, list[dict[str, Any]]] = {
  **{name: BETA for name, (_, constants) in PAIRED.items() if "beta" in constants},
  "conservative_dpo_loss": [*BETA, *SMOOTHING],
  "robust_dpo_loss": [*BETA, *SMOOTHING],
  "exo_loss": [*BETA, *SMOOTHING, {"label_smoothing": 0.0}],
  "discopop_loss": [*BETA, {"tau": 0.0}, {"tau": -1.0}],
  "bco_pair_loss": [*BETA, {"delta": NAN}],
  "simpo_loss": [*BETA, {"gamma": -0.1}],
  "aot_loss": [*BETA, *SMOOTHING],
  "aot_unpaired_loss": [*BETA, *SMOOTHING],
  "kto_loss": [*BETA, *WEIGHTS, {"baseline": NAN}],
  "bco_loss": [*BETA, *WEIGHTS, {"delta": NAN}],
  "alpha_divergence_score": [{"alpha": NAN}],
  "length_desensitized_weights": [{"alpha": -0.1}, {"alpha": 1.1}],
  "log_collision_probability": [{"temperature": 0.0}],
  "clipped_value_loss": CLIP,
  "huber_value_loss": DELTA,
  "clipped_huber_value_loss": [*CLIP, *DELTA],
  "value_clip_fraction": CLIP,
}

# Every option with another value, which must matter.
OTHER_CONSTANTS: dict[str, dict[str, Any]] = {
  **{name: dict.fromkeys(constants, 0.37) for name, (_, constants) in PAIRED.items()},
  "aot_loss": dict.fromkeys(SORTED, 0.37),
  "aot_unpaired_loss": dict.fromkeys(SORTED, 0.37),
  **{name: dict.fromkeys(constants, 0.37) for name, constants in LABELLED.items()},
  "alpha_divergence_score": {"alpha": 0.9},
  "length_desensitized_weights": {"alpha": 0.9},
  "log_collision_probability": {"temperature": 0.9},
  **{name: dict.fromkeys(constants, 0.1) for name, constants in CRITICS.items() if constants},
}
