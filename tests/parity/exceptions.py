"""The records that are not reproduced: why, and what the right value is instead.

Each cause names its records and asserts our value. An entry whose record is reproduced after all
fails the suite, so the list cannot hide anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tests.parity import preference_checks as check
from tests.parity import records, results
from tests.parity.records import Record

Check = Callable[[Record, Mapping[str, np.ndarray]], None]


@dataclass(frozen=True)
class Cause:
  name: str
  text: str
  ids: tuple[str, ...]
  right: Check


def numbered(file: str, *positions: int) -> tuple[str, ...]:
  return tuple(f"{file}#{position}" for position in positions)


def all_zero(record: Record, ours: Mapping[str, np.ndarray]) -> None:
  for name, value in ours.items():
    np.testing.assert_array_equal(value, np.zeros_like(value), err_msg=name)


def entropy_of_the_possible(record: Record, ours: Mapping[str, np.ndarray]) -> None:
  """The token of logit -inf adds 0; the others are softmax([0, 1])."""
  p = np.exp([0.0, 1.0]) / np.exp([0.0, 1.0]).sum()
  np.testing.assert_allclose(ours["token_entropy"], [[-(p * np.log(p)).sum()]], rtol=1e-12)


def as_in_float64(record: Record, ours: Mapping[str, np.ndarray]) -> None:
  """The peer's own function in float64, recorded on the same batch."""
  twin = next(
    other for other in results.all_records().values()
    if other.objective == "grpo" and other.peer == "verl" and other.batch == record.batch
    and other.settings == record.settings
  )  # fmt: skip
  assert records.error(twin, "advantages", ours["advantages"]) <= 1e-9


def gdpo_in_float64(record: Record, ours: Mapping[str, np.ndarray]) -> None:
  index, mask = record.inputs["index"], record.mask[:, : record.width]
  total = np.zeros(len(index))
  weights = record.settings["gdpo_reward_weights"] or (1.0, 1.0)
  for weight, key in zip(weights, record.settings["gdpo_reward_keys"]):
    rewards = record.inputs["reward_components"][key]
    for i, group in enumerate(index):
      members = rewards[index == group]
      total[i] += weight * (rewards[i] - members.mean()) / (members.std(ddof=1) + 1e-6)
  tokens = np.repeat(total, mask.sum(-1))
  expected = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
  got = ours["advantages"][: record.rows, : record.width][mask]
  np.testing.assert_allclose(got, expected, rtol=1e-9)


def margin_of_the_best(record: Record, ours: Mapping[str, np.ndarray]) -> None:
  """The best of the one group of k = 3 has its margin; smaller groups and all others have 0."""
  index, scores = record.inputs["index"], np.nansum(record.inputs["token_level_rewards"], -1)
  for i, group in enumerate(index):
    members = np.sort(scores[: record.rows][index == group])
    expected = 0.0
    if len(members) == 3 and scores[i] == members[-1]:
      expected = members[-1] - members[-2]
      if record.settings["norm_adv_by_std_in_grpo"]:
        expected /= members.std(ddof=1) + record.settings["epsilon"]
    got = ours["advantages"][i][record.mask[i]]
    np.testing.assert_allclose(got, np.full_like(got, expected), rtol=1e-9)


def no_row_to_add(record: Record, ours: Mapping[str, np.ndarray]) -> None:
  """The peer's gradient, and its value without -A / B of the rows that have no token."""
  empty = ~record.mask.any(-1)
  extra = -record.inputs["adv_seq"][empty].sum() / record.rows
  np.testing.assert_allclose(ours["loss"], record.outputs["loss"] - extra, rtol=1e-9)
  assert records.error(record, "grad_logps", ours["grad_logps"]) <= 1e-9


def clipped_gradient(record: Record, ours: Mapping[str, np.ndarray]) -> None:
  """The peer's value; the gradient -A r / B of the rows whose ratio is not clipped, else 0."""
  assert records.error(record, "loss", ours["loss"]) <= 1e-9
  x, s = record.inputs, record.settings
  mask = record.mask
  for i, advantage in enumerate(x[s["advantages"]]):
    log_ratio = (x["logps"][i] - x["old_logps"][i])[mask[i]].sum()
    low, high = np.log1p(-s["epsilon_low"]), np.log1p(s["epsilon_high"])
    clipped = log_ratio > high if advantage > 0 else log_ratio < low
    slope = 0.0 if clipped else -advantage * np.exp(log_ratio) / record.rows
    np.testing.assert_allclose(ours["grad_logps"][i], np.where(mask[i], slope, 0.0), rtol=1e-9)


def luspo_of_the_counted(record: Record, ours: Mapping[str, np.ndarray]) -> None:
  """Sum over counted tokens, mean over rows; gradient by central differences, 0 elsewhere."""
  x, mask = record.inputs, record.mask
  logps = x["logps"][: record.rows]

  def loss(logps: np.ndarray) -> float:
    return sum(luspo_row(record, i, logps[i][mask[i]]) for i in range(record.rows)) / record.rows

  np.testing.assert_allclose(ours["loss"], loss(logps), rtol=1e-9)
  step, expected = 1e-6, np.zeros(mask.shape)
  for position in zip(*np.nonzero(mask)):
    shift = np.zeros(mask.shape)
    shift[position] = step
    expected[position] = (loss(logps + shift) - loss(logps - shift)) / (2 * step)
  np.testing.assert_allclose(ours["grad_logps"][: record.rows], expected, rtol=1e-6, atol=1e-8)


def luspo_row(record: Record, i: int, logps: np.ndarray) -> float:
  s, x, on = record.settings, record.inputs, record.mask[i]
  log_ratio = logps - x["old_logps"][i][on]
  if s.get("importance_sampling_level") == "sequence":
    log_ratio = np.full_like(log_ratio, log_ratio.mean() if on.any() else 0.0)
  ratio, advantage = np.exp(log_ratio), x["adv_seq"][i]
  capped = np.minimum(ratio, s.get("delta") or np.inf)
  band = np.clip(ratio, 1 - s["epsilon_low"], 1 + s["epsilon_high"])
  loss = -np.minimum(capped * advantage, band * advantage)
  if s["beta"]:
    delta = x["ref_logps"][i][on] - logps
    loss = loss + s["beta"] * (np.exp(delta) - 1 - delta)
  return float(loss.sum())


def divergence_of_the_possible(record: Record, ours: Mapping[str, np.ndarray]) -> None:
  """Sums over the tokens that both allow, divided by the rows."""
  beta = record.settings["beta"]
  z = [record.inputs[f"{x}_logits"] for x in ("student", "teacher")]
  s, t = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in z)
  on = (s > 0) & (t > 0)
  kl = lambda p, q: float(np.sum(p[on] * np.log(p[on] / q[on])))
  m = beta * t + (1 - beta) * s
  inside = beta * kl(t, m) + (1 - beta) * kl(s, m)
  expected = {0.0: kl(t, s), 1.0: kl(s, t)}.get(beta, inside) / len(s)
  np.testing.assert_allclose(ours["loss"], expected, rtol=1e-9)
  np.testing.assert_array_equal(ours["grad_student_logits"][~on], 0.0)


CAUSES = (
  Cause(
    "no token",
    "No token is left and the peer divides 0 by 0: NaN. Ours: loss 0, gradient 0.",
    numbered("verl_agg_loss", 22, 24, 25, 26),
    all_zero,
  ),
  Cause(
    "-inf logit",
    "A logit of -inf makes the peer's entropy NaN. Ours: the entropy of the other tokens.",
    numbered("verl_entropy", 8),
    entropy_of_the_possible,
  ),
  Cause(
    "float32 statistics",
    "The peer takes mean and standard deviation of nearly equal rewards in float32. Ours: the "
    "value its own float64 function gives.",
    numbered("verl_adv_grpo_vectorized", 6, 20, 21),
    as_in_float64,
  ),
  Cause(
    "float32 rewards",
    "The peer casts reward components near 1000 to float32. Ours: the float64 value.",
    numbered("verl_adv_gdpo", 32, 33),
    gdpo_in_float64,
  ),
  Cause(
    "equal rewards",
    "All rewards of the group are equal and the peer gives the rounding error of their mean (up "
    "to 0.9 after division by it). Ours: exactly 0.",
    numbered("trl_grpo_advantages", 12, 13, 14)
    + numbered("trl_rloo_advantages", 13, 14)
    + numbered("openrlhf_advantages", 19, 20, 21, 22, 23, 24, 25),
    all_zero,
  ),
  Cause(
    "peer raises",
    "The peer raises on a group of one. Ours: 0 there, and for groups smaller than k.",
    numbered("verl_adv_grpo_passk", 12, 13),
    margin_of_the_best,
  ),
  Cause(
    "one generation",
    "The standard deviation of one sample makes the peer's advantage NaN. Ours: 0.",
    numbered("tunix_misc", 9),
    all_zero,
  ),
  Cause(
    "0 * inf",
    "The product of the ratios overflows and the peer's clip gives 0 * inf in the gradient: NaN "
    "(the loss agrees). Ours: 0 on the clipped rows.",
    numbered("trl_rloo_loss", 4),
    clipped_gradient,
  ),
  Cause(
    "empty row",
    "A row without a token has ratio 1 and adds -A / B to the peer's loss (the gradient agrees). "
    "Ours: it adds nothing.",
    numbered("trl_gmpo", 8, 9) + numbered("trl_rloo_loss", 6),
    no_row_to_add,
  ),
  Cause(
    "no mask",
    "The peer sums over masked positions: garbage and padding enter loss and gradient. Ours: they "
    "do not.",
    numbered("liger_grpo", 16, 17, 19, 27),
    luspo_of_the_counted,
  ),
  Cause(
    "no label",
    "No label is left and the peer divides 0 by 0: NaN. Ours: loss 0.",
    numbered("openrlhf_preference", 22),
    all_zero,
  ),
  Cause(
    "1 - sigmoid",
    "The derivative sig (1 - sig) has no digits left where it is tiny, and the peer's gradient is "
    "0 or wrong (the loss agrees). Ours: sig(x) sig(-x).",
    numbered("trl_dpo", 35, 50),
    check.tiny_gradient,
  ),
  Cause(
    "score overflow",
    "exp of a log-ratio above 709: the peer's loss is inf. Ours: a score grows to a quarter of the "
    "largest float, so that the difference of two is never NaN.",
    numbered("trl_dpo_fdiv", 1),
    check.as_large_as_it_gets,
  ),
  Cause(
    "score clamp",
    "The peer clamps the exponent of its score at 80: no gradient beyond. Ours: unclamped.",
    numbered("trl_dpo_fdiv", 9),
    check.without_a_clamp,
  ),
  Cause(
    "log(1 + exp)",
    "A gap of rewards above 709 on the wrong side is inf with gradient NaN. Ours: linear.",
    numbered("openrlhf_preference", 16),
    check.logistic,
  ),
  Cause(
    "log-prob 0",
    "Odds of a log-prob of exactly 0 make the peer's gradient NaN. Ours: log-probs are read no "
    "closer to 0 than machine epsilon.",
    numbered("liger_preference", 34),
    check.odds_of_epsilon,
  ),
  Cause(
    "odds of an empty row",
    "A row without a token has log-prob 0 and mean 0 / 0: NaN. Ours: as above, and no gradient "
    "there.",
    numbered("tunix_dpo", 9),
    check.odds_with_an_empty_row,
  ),
)

CAUSES += (
  Cause(
    "excluded token",
    "A logit of -inf in both distributions makes the peer's divergence NaN. Ours: it adds 0.",
    numbered("trl_gkd_jsd", 32, 33, 34),
    divergence_of_the_possible,
  ),
  Cause(
    "no token to learn",
    "No token is left and the peer divides 0 by 0: NaN. Ours: loss 0, gradient 0.",
    numbered("openrlhf_value_sft_kl", 15, 16),
    all_zero,
  ),
)

BY_RECORD = {record_id: cause for cause in CAUSES for record_id in cause.ids}
