"""One valid call, or several, of every public function: the table that the sweeps go through.

A call knows more than its arguments: which positions of each array nothing may depend on
(`unused`), and what its gradient flows to (`differentiable`). Functions that take `segment_ids`
are called with and without; a complete table is asserted by every sweep that uses it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import numpy as np

import jaxrl_lm as rl
from tests import linear_tables, preference_tables

VOCABULARY = 4
# Presets take no arrays.
FUNCTIONS = [
  name
  for name in rl.__all__
  if inspect.isfunction(getattr(rl, name)) and not getattr(rl, name).__module__.endswith("_presets")
]

# Mask and segments of [2, 3, 5]: a full row, gaps, a single token, an empty row; two segments.
MASK = np.array(
  [
    [[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 1, 0, 0, 0]],
    [[0, 0, 0, 0, 0], [0, 1, 1, 0, 1], [1, 1, 1, 0, 0]],
  ],
  bool,
)
SEGMENTS = np.array(
  [
    [[7, 7, 7, 3, 3], [2, 2, 2, 9, 0], [1, 1, 1, 0, 0]],
    [[0, 0, 0, 0, 0], [4, 4, 4, 4, 5], [6, 8, 8, 0, 0]],
  ],
  np.int32,
)
# Which samples of the groups count.
WHERE = np.array([[True, False, True], [False, True, True]])


@dataclasses.dataclass(frozen=True)
class Call:
  """A call by keyword: function(**arrays, **constants).

  Attributes:
    name: of the public function; `title` tells two calls of the same function apart.
    function: what is called: the public function, or what it returned.
    arrays: what may be traced.
    constants: the rest.
    differentiable: names of the arrays that have a gradient; of all others it is 0.
    unused: positions of each array that must not matter; an array not named has none.
  """

  name: str
  title: str
  function: Callable[..., Any]
  arrays: dict[str, np.ndarray]
  constants: dict[str, Any]
  differentiable: tuple[str, ...]
  unused: dict[str, np.ndarray]

  def __call__(self, **arrays: Any) -> Any:
    return self.function(**self.arrays | arrays, **self.constants)


@cache
def public_calls(dtype: Any = np.float32) -> tuple[Call, ...]:
  """The table."""
  return tuple(_calls(dtype))


def named(dtype: Any = np.float32) -> dict[str, Call]:
  """The table by title."""
  return {call.title: call for call in public_calls(dtype)}


def _calls(dtype: Any) -> Iterator[Call]:
  rng = np.random.default_rng(3)
  mask, shape, empty = MASK, MASK.shape, ~MASK.any(-1)
  off = ~mask

  def normal(shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    return (scale * rng.normal(size=shape)).astype(dtype)

  log_ratio = np.clip(normal(shape, 0.5), -1.5, 0.5)
  old = -rng.uniform(0.6, 2.5, shape).astype(dtype)
  logprobs = old + log_ratio
  advantages = normal(shape)
  advantages[0, 0, 1] = 0.0
  values = {
    "logprobs": logprobs,
    "old_logprobs": old,
    "ref_logprobs": (logprobs + normal(shape, 0.5)).astype(dtype),
    "sampler_logprobs": (logprobs + normal(shape, 0.1)).astype(dtype),
    "log_ratio": log_ratio,
    "log_weights": normal(shape, 0.3),
    "statistic": np.abs(normal(shape)),
    "weights": rng.uniform(0.2, 2.0, shape).astype(dtype),
    "loss_weights": rng.uniform(0.1, 1.0, shape).astype(dtype),
    "alpha": rng.uniform(0.0, 1.0, shape).astype(dtype),
    "token_gradients": normal(shape),
    "entropy": rng.uniform(0.1, 1.5, shape).astype(dtype),
    "rewards": normal(shape),
    "values": normal(shape),
    "kl": np.abs(normal(shape)),
    "x": normal(shape),
    "advantages": advantages,
    "selected": rng.random(shape) < 0.4,
    "logits": normal((*shape, VOCABULARY), 2.0),
    "ref_logits": normal((*shape, VOCABULARY), 2.0),
    "tokens": rng.integers(0, VOCABULARY, shape).astype(np.int32),
  }
  # Every advantage of a sequence is the same for gmpo.
  row_advantages = normal(shape[:-1])[..., None]
  rewards = normal(WHERE.shape)

  def call(
    name: str,
    *tokens: str,
    differentiable: tuple[str, ...] = (),
    arrays: dict[str, np.ndarray] | None = None,
    unused: dict[str, np.ndarray] | None = None,
    also: str = "",
    function: Callable[..., Any] | None = None,
    masked: str | None = "mask",
    **constants: Any,
  ) -> Call:
    """`tokens`: per-token arrays from `values`, unused where the mask is False."""
    unused = dict.fromkeys(tokens, off) | (unused or {})
    arrays = {x: values[x] for x in tokens} | (arrays or {})
    arrays |= {masked: mask} if masked else {}
    title = f"{name}[{also}]" if also else name
    function = function or getattr(rl, name)
    return Call(name, title, function, arrays, constants, differentiable, unused)

  def segmented(name: str, *tokens: str, **rest: Any) -> Iterator[Call]:
    """Without and with segment_ids."""
    also, arrays = rest.pop("also", ""), rest.pop("arrays", None) or {}
    unused = rest.pop("unused", None) or {}
    yield call(name, *tokens, also=also, arrays=arrays, unused=unused, **rest)
    arrays, unused = arrays | {"segment_ids": SEGMENTS}, unused | {"segment_ids": off}
    also = f"{also}, segments" if also else "segments"
    yield call(name, *tokens, also=also, arrays=arrays, unused=unused, **rest)

  # Masks.
  yield call("zero_masked", "x", differentiable=("x",))
  for name in ("masked_sum", "masked_mean"):
    yield call(name, "x", differentiable=("x",))
    yield call(name, "x", differentiable=("x",), also="rows", axis=-1)
  yield call("lengths")
  for name in ("response_mask", "is_finished"):
    yield call(name, "tokens", masked="within", stop_tokens=[1, 3])
  yield from segmented("last_token_mask")
  yield from segmented("segment_total", "x", differentiable=("x",))
  yield from segmented("segment_mean", "x", differentiable=("x",))
  yield from segmented("segment_max", "x", differentiable=("x",))
  yield from segmented("segment_count")

  # Log-probs.
  yield call("token_logprobs", "logits", "tokens", differentiable=("logits",), temperature=0.7)
  # Logits are used where the next token is scored, segment ids there and at the token itself.
  scored = mask.copy()
  scored[..., 0] = False
  before = np.roll(scored, -1, -1)
  yield call(
    "next_token_logprobs",
    "tokens",
    differentiable=("logits",),
    arrays={"logits": values["logits"]},
    unused={"logits": ~before, "tokens": ~scored},
    temperature=0.7,
  )
  scored = scored & (np.roll(SEGMENTS, 1, -1) == SEGMENTS) & (SEGMENTS != 0)
  yield call(
    "next_token_logprobs",
    differentiable=("logits",),
    arrays={"logits": values["logits"], "segment_ids": SEGMENTS, "tokens": values["tokens"]},
    unused={
      "logits": ~np.roll(scored, -1, -1),
      "tokens": ~scored,
      "segment_ids": off & ~np.roll(mask, -1, -1),
    },
    also="segments",
    temperature=0.7,
  )
  yield call("token_entropy", "logits", differentiable=("logits",), temperature=0.7)
  for name in ("sequence_logprob", "mean_logprob"):
    yield call(name, "logprobs", differentiable=("logprobs",))

  # Loss weights.
  for name in ("token_mean", "sequence_mean", "sequence_sum", "token_sum", "group_token_mean"):
    yield call(name)
  yield call("constant_length", length=8)
  yield call("length_power", alpha=0.5)

  # Ratios.
  yield call("token_log_ratio", "logprobs", "old_logprobs", differentiable=("logprobs",))
  yield call("on_policy_log_ratio", "logprobs", differentiable=("logprobs",))
  levels: dict[str, dict[str, Any]] = {
    name: {} for name in ("per_token", "per_prefix", "per_sequence", "per_sequence_geometric")
  }
  levels["with_token_gradient"] = {"function": rl.with_token_gradient(rl.per_sequence_geometric)}
  levels["clamped"] = {"function": rl.clamped(rl.per_token, -0.3, 0.3)}
  for name, rest in levels.items():
    yield from segmented(name, "log_ratio", differentiable=("log_ratio",), **rest)

  # Surrogates: with a value per token, and the plainest call there is.
  surrogates: dict[str, dict[str, Any]] = {
    name: {}
    for name in ("reinforce", "importance_weighted", "ppo_clip", "dual_clip", "sapo", "gmpo")
  }
  surrogates |= {name: {} for name in ("cispo", "topr", "vespo", "dppo_tv", "dppo_kl")}
  surrogates |= {"dro": {"beta": 0.4}, "clip_cov": {}, "kl_cov": {}}
  for name, constants in surrogates.items():
    tokens = ["log_ratio", "advantages", "old_logprobs"]
    tokens += ["selected"] if name in ("clip_cov", "kl_cov") else []
    one_a_row = {
      "arrays": {"advantages": row_advantages},
      "unused": {"advantages": empty[..., None]},
    }
    rest = one_a_row if name == "gmpo" else {}
    rest |= {"differentiable": ("log_ratio",), **constants}
    # Segments matter to gmpo alone; the others take them and do nothing with them.
    yield from list(segmented(name, *tokens, **rest))[name != "gmpo" :]
  one_a_row["differentiable"] = ("log_ratio",)
  yield call("ppo_clip", "log_ratio", also="rows", **one_a_row)

  # Selections.
  yield call("top_entropy_mask", "entropy", fraction=0.4)
  yield call("token_covariance", "logprobs", "advantages")
  yield call("kl_cov_selection", "logprobs", "advantages", fraction=0.3)
  yield call(
    "clip_cov_selection",
    "logprobs",
    "log_ratio",
    "advantages",
    key=jax.random.key(0),
    fraction=0.2,
    cov_low=-1.0,
  )

  # Corrections.
  yield call("truncated", "log_weights", cap=1.2, floor=0.8)
  yield call("banded", "log_weights", low=0.8, high=1.2)
  yield call("rejected", "statistic", low=0.1, high=1.0)
  yield from segmented("veto", "log_weights", low=0.6)
  yield from segmented("off_policy_mask", "log_ratio", "advantages", threshold=0.1)
  yield call("self_normalised", "weights", "loss_weights")
  yield call("interpolated_proximal", "logprobs", "sampler_logprobs", alpha=0.3)
  yield call("interpolated_proximal", "logprobs", "sampler_logprobs", "alpha", also="tokens")

  # KL.
  for name in ("kl_k1", "kl_k2", "kl_k3", "kl_abs"):
    yield call(name, "logprobs", "ref_logprobs", differentiable=("logprobs",))
  yield call(
    "with_reverse_kl_gradient",
    "logprobs",
    "ref_logprobs",
    differentiable=("logprobs",),
    function=rl.with_reverse_kl_gradient(rl.kl_k3),
  )
  tokens = ["logprobs", "ref_logprobs", "old_logprobs"]
  yield call("kl_k3_off_policy", *tokens, differentiable=("logprobs",))
  yield call("exact_kl", "logits", "ref_logits", differentiable=("logits",), temperature=0.7)
  yield call("top_k_kl", "logits", "ref_logits", differentiable=("logits",), k=2, temperature=0.7)

  # Advantages.
  group = {"arrays": {"rewards": rewards, "where": WHERE}, "unused": {"rewards": ~WHERE}}
  group["masked"] = None
  for function in (
    rl.has_signal,
    rl.raw_rewards,
    rl.group_centered,
    rl.group_normalized,
    rl.leave_one_out,
    rl.leave_one_out_normalized,
    rl.batch_scaled,
    rl.mean_normalized,
    rl.signal_scaled,
    rl.zero_signal_groups,
  ):
    yield call(function.__name__, **group)
  yield call("pass_at_k", **group, k=2)
  lengths = MASK.sum(-1).astype(np.int32)
  extra = {"lengths": lengths}
  yield call(
    "length_weighted_baseline",
    arrays=group["arrays"] | extra,
    unused={"rewards": ~WHERE, "lengths": ~WHERE},
    masked=None,
  )
  no_group = np.array([True, False])
  where = np.array([[False, False, False], [True, True, False]])
  yield call(
    "greedy_baseline",
    arrays={"rewards": rewards, "greedy_rewards": normal((2,)), "where": where},
    unused={"rewards": ~where, "greedy_rewards": no_group},
    masked=None,
  )
  several = np.stack([WHERE, where])
  yield call(
    "multi_reward_normalized",
    arrays={"rewards": normal(several.shape), "weights": normal((2,)), "where": several},
    unused={"rewards": ~several},
    masked=None,
  )
  ids = np.array([7, 3, 7, 5], np.int32)
  yield call(
    "to_groups",
    arrays={"values": normal((4,)), "group_ids": ids, "episode_ids": np.arange(4, dtype=np.int32)},
    masked=None,
    num_groups=3,
    group_size=2,
  )
  slots = np.array([0, 2, 1], np.int32)
  yield call("from_groups", arrays={"grouped": normal((2, 2)), "slots": slots}, masked=None)

  # Returns, whitening.
  yield from segmented("discounted_returns", "rewards", discount=0.9)
  ends = {"arrays": {"bootstrap_value": normal(shape[:-1])}, "unused": {"bootstrap_value": empty}}
  factors = {"discount": 0.9, "gae_lambda": 0.8}
  yield call("gae", "rewards", "values", **ends, **factors)
  last = last_tokens(SEGMENTS)
  yield call(
    "gae",
    "rewards",
    "values",
    arrays={"bootstrap_value": normal(shape), "segment_ids": SEGMENTS},
    unused={"bootstrap_value": ~last, "segment_ids": off},
    also="segments",
    **factors,
  )
  yield call("length_adaptive_lambda", alpha=0.5)
  yield call("terminal_rewards", arrays={"scores": normal(shape[:-1])}, unused={"scores": empty})
  yield call("kl_shaped_rewards", "rewards", "kl", kl_coef=0.1)
  yield call("overlong_penalty", arrays={"lengths": lengths}, masked=None, max_length=5, buffer=3)
  yield call("masked_moments", "x")
  yield call("whiten", "x")
  yield call("whiten", "x", also="moments", moments=(0.3, 2.0))
  yield from segmented("whitened_returns", "rewards", discount=0.9)
  yield call("whitened_group_centered", **group | {"masked": "mask"})

  # Diagnostics.
  yield call("average", "x")
  yield call("clip_fractions", "log_ratio", "advantages", clip_low=0.2, clip_high=0.2)
  yield call("policy_drift", "logprobs", "old_logprobs")
  yield call("perplexity_gap", "logprobs", "sampler_logprobs")
  yield call("token_effective_sample_size", "log_weights")
  # The weight of a sequence is read at its last token.
  ends = last_tokens(np.ones_like(SEGMENTS))
  yield call("sequence_effective_sample_size", "log_weights", unused={"log_weights": ~ends})
  yield call(
    "sequence_effective_sample_size",
    "log_weights",
    arrays={"segment_ids": SEGMENTS},
    unused={"log_weights": ~last, "segment_ids": off},
    also="segments",
  )
  yield call("ratio_extremes", "log_ratio", offset=3)
  yield from segmented("gradient_share_by_length", "token_gradients", edges=[2, 4])

  # Objectives.
  yield call("dr_grpo", masked=None, length=8)
  everything = ["logprobs", "old_logprobs", "loss_weights", "ref_logprobs", "entropy"]
  yield from segmented(
    "objective_loss",
    *everything,
    differentiable=("logprobs", "entropy"),
    arrays={"advantages": row_advantages, "importance_weights": np.abs(row_advantages)},
    unused={"advantages": empty[..., None], "importance_weights": empty[..., None]},
    objective=rl.GSPO,
    kl=rl.kl_k2,
    kl_coef=0.1,
    entropy_coef=0.2,
  )
  yield call(
    "objective_loss",
    "logprobs",
    "advantages",
    "loss_weights",
    "selected",
    differentiable=("logprobs",),
    also="selected",
    objective=rl.KL_COV,
    old_logprobs=None,
  )
  yield from segmented(
    "recipe_loss",
    *everything,
    differentiable=("logprobs", "entropy"),
    arrays={"advantages": row_advantages, "importance_weights": np.abs(row_advantages)},
    unused={"advantages": empty[..., None], "importance_weights": empty[..., None]},
    recipe=rl.trl_grpo(
      beta=0.1, entropy_coef=0.2, importance_sampling_level=rl.per_sequence_geometric
    ),
  )

  yield from _distillation_calls(call, dtype)
  yield from linear_tables.calls(call, values, MASK, VOCABULARY, dtype)
  yield from preference_tables.calls(call, values, MASK, WHERE, dtype)


def _distillation_calls(call: Callable[..., Call], dtype: Any) -> Iterator[Call]:
  """Distillation, online preferences, process rewards."""
  rng = np.random.default_rng(4)
  shape, off, empty = MASK.shape, ~MASK, ~MASK.any(-1)

  def normal(shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    return (scale * rng.normal(size=shape)).astype(dtype)

  logits = {name: normal((*shape, VOCABULARY), 2.0) for name in ("logits", "teacher_logits")}
  logprobs = {"logprobs": -rng.uniform(0.1, 3.0, shape).astype(dtype)}
  rewards = {"rewards": normal(WHERE.shape), "where": WHERE}
  both = {"arrays": logits, "unused": dict.fromkeys(logits, off), "differentiable": ("logits",)}
  for name, constants in {
    "forward_kl": {},
    "skewed_forward_kl": {"skew": 0.1},
    "skewed_reverse_kl": {"skew": 0.1},
    "jensen_shannon": {"beta": 0.3},
  }.items():
    yield call(name, **both, **constants, temperature=0.7)
  teacher = {
    "teacher_logprobs": np.log(rng.uniform(0.1, 0.5, (*shape, 2))).astype(dtype),
    "teacher_ids": np.argsort(rng.random((*shape, VOCABULARY)), -1)[..., :2].astype(np.int32),
  }
  yield call(
    "top_k_with_tail",
    arrays={"logits": logits["logits"]} | teacher,
    unused=dict.fromkeys(("logits", *teacher), off),
    differentiable=("logits",),
    temperature=0.7,
  )
  teacher = {"teacher_logprobs": (logprobs["logprobs"] + normal(shape)).astype(dtype)}
  yield call(
    "distillation_advantages",
    arrays=logprobs | teacher,
    unused=dict.fromkeys(("logprobs", "teacher_logprobs"), off),
  )
  scored = {"arrays": logprobs, "unused": {"logprobs": off}, "differentiable": ("logprobs",)}
  for name in ("sft_loss", "dft_loss"):
    yield call(name, **scored)
  scored["arrays"] = logprobs | {"rewards": np.array([[1, -1, 1], [1, 1, 0]], dtype)}
  scored["unused"] = {"logprobs": off, "rewards": empty}
  yield call("positive_nll_loss", **scored)

  group = {"arrays": rewards, "unused": {"rewards": ~WHERE}, "masked": None}
  yield call("preference_pairs", **group)
  yield call("best_of_n", **group)
  yield call("rejection_sampling", **group, threshold=0.0)
  index = np.array([2, 0], np.int32)
  at = {"values": normal((2, 3)), "index": index}
  yield call("sample_at", arrays=at, differentiable=("values",), masked=None)
  pairs = {"preference_loss": normal((3,)), "reference_sample_logprobs": normal((3,))}
  yield call("xpo_loss", arrays=pairs, differentiable=tuple(pairs), masked=None, alpha=0.1)
  two = {"logprobs": normal(shape), "ref_logprobs": normal(shape)}
  yield call(
    "nash_md_advantages",
    arrays=two | {"preferences": rng.uniform(size=shape[:-1]).astype(dtype)},
    unused=dict.fromkeys(two, off) | {"preferences": empty},
    kl_coef=0.1,
  )
  two = {"logits": logits["logits"], "ref_logits": logits["teacher_logits"]}
  yield call(
    "geometric_mixture",
    arrays=two,
    unused=dict.fromkeys(two, off),
    share=0.3,
    temperature=0.7,
  )
  step_ids = np.array([[1, 1, 2, 2, 3], [1, 0, 2, 2, 0], [4, 4, 4, 0, 0]], np.int32)
  step_ids = np.stack([step_ids, step_ids])
  present = [[np.isin(s, ids[on]) for s in range(1, 5)] for ids, on in _rows(step_ids, MASK)]
  scores = {"scores": normal((2, 3, 4))}
  yield call(
    "step_rewards",
    arrays=scores | {"step_ids": step_ids},
    unused={"scores": ~np.reshape(present, (2, 3, 4)), "step_ids": off},
  )
  yield call(
    "adaptive_kl_coef",
    arrays={"kl_coef": np.array([0.1, 0.2], dtype), "kl": np.array([1.0, 9.0], dtype)},
    masked=None,
    target=6.0,
  )


def _rows(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
  return zip(*(x.reshape(-1, x.shape[-1]) for x in arrays), strict=True)


def last_tokens(segment_ids: np.ndarray) -> np.ndarray:
  """True at the last counted token of each segment."""
  last = np.zeros(MASK.shape, bool)
  for row in np.ndindex(MASK.shape[:-1]):
    for name in np.unique(segment_ids[row][MASK[row]]):
      last[row][np.flatnonzero(MASK[row] & (segment_ids[row] == name))[-1]] = True
  return last


def assert_complete(names: Any, needed: Any = FUNCTIONS) -> None:
  """Every function that needs a case has one."""
  missing = set(needed) - set(names)
  assert not missing, f"without a case: {sorted(missing)}"


def value_and_pullback(call: Call) -> Callable[..., Any]:
  """arrays -> (leaves of the value, gradients), to be jitted.

  The gradients are of a random linear function of all floating leaves, in every floating array.
  """

  def run(arrays: dict[str, jax.Array]) -> Any:
    floats = {k: x for k, x in arrays.items() if np.issubdtype(x.dtype, np.floating)}
    others = {k: x for k, x in arrays.items() if k not in floats}

    def value(floats: dict[str, jax.Array]) -> Any:
      leaves = jax.tree.leaves(call(**floats, **others))
      is_float = [hasattr(x, "dtype") and np.issubdtype(x.dtype, np.floating) for x in leaves]
      return [x for x, yes in zip(leaves, is_float) if yes], leaves

    outputs, pull, leaves = jax.vjp(value, floats, has_aux=True)
    rng = np.random.default_rng(11)
    cotangents = [np.asarray(rng.normal(size=x.shape), x.dtype) for x in outputs]
    return leaves, pull(cotangents)[0]

  return run
