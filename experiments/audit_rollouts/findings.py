"""Numbers to plain sentences: a rule, its threshold, and an interval that must lie beyond it.

Three answers are possible: *found* (the whole interval is beyond the threshold), *not found*, and
*undecided* (too few groups, or the number is not defined here). A *fault* is seen in the log; an
*exposure* is what a reduction would do to these responses if the run's loss used it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from configs.audit_rollouts import Rules

FOUND, NOT_FOUND, UNDECIDED = "found", "not found", "undecided"


@dataclasses.dataclass(frozen=True)
class Finding:
  """One rule and what became of it.

  Attributes:
    name: of the rule.
    kind: fault or exposure.
    status: found, not found or undecided.
    number: [3] value and interval, in `unit`.
    rule: the number, its side and its threshold in words.
    sentence: in plain language.
  """

  name: str
  kind: str
  status: str
  number: np.ndarray
  unit: str
  rule: str
  sentence: str


def judge(measured: dict[str, Any], rules: Rules, unit: str) -> list[Finding]:
  """All rules that this log has the columns for.

  Args:
    measured: part -> its measurements; absent or None where the log has no columns for it.
    rules: the thresholds.
    unit: of the lengths.
  """
  rows: list[Finding] = []
  for part, rule in (
    ("trends", _growth),
    ("groups", _silent),
    ("truncation", _cut),
    ("mismatch", _mismatch),
    ("mismatch", _worth),
    ("shifts", _exposures),
  ):
    if measured.get(part) is not None:
      enough = _number_of_parts(measured, part) >= rules.least
      for finding in rule(measured, rules, unit):
        if not enough:
          few = f"Too few groups or responses to decide (fewer than {rules.least})."
          finding = dataclasses.replace(finding, status=UNDECIDED, sentence=few)
        rows.append(finding)
  return rows


def _number_of_parts(measured: dict[str, Any], part: str) -> int:
  """Independent parts behind the numbers: groups, those with signal, or responses."""
  if part == "mismatch":
    return measured["mismatch"]["responses"]
  return measured["push" if part == "shifts" else "groups"]["groups"]


def _finding(
  name: str,
  number: np.ndarray,
  threshold: float,
  *,
  what: str,
  found: str,
  otherwise: str,
  below: bool = False,
  kind: str = "fault",
  unit: str = "%",
) -> Finding:
  """Found if all of the interval is above the threshold, or below it."""
  value, low, high = number
  side = "below" if below else "above"
  if not np.isfinite(number).all():
    status, sentence = UNDECIDED, f"Not defined in this log: {what}."
  elif high < threshold if below else low > threshold:
    status, sentence = FOUND, found
  else:
    status, sentence = NOT_FOUND, otherwise
  return Finding(
    name, kind, status, number, unit, f"{what}, {side} {_text(threshold, unit)}", sentence
  )


def _growth(measured: dict[str, Any], rules: Rules, unit: str) -> list[Finding]:
  trends = measured["trends"]
  first, last = trends["span"]
  over = f"from step {first} to {last}"
  wrong, correct = trends["wrong"]["change"], trends["correct"]["change"]
  mixture = "The mix of prompts that are answered wrongly may have changed with it."
  return [
    _finding(
      "wrong answers grow",
      wrong,
      rules.growth,
      what=f"change of the mean length of wrong answers {over}",
      found=f"Wrong answers grew by {_range(wrong)} of their mean length {over}. {mixture}",
      otherwise=f"Wrong answers did not clearly grow {over}: {_range(wrong)}.",
    ),
    _finding(
      "correct answers shrink",
      correct,
      -rules.growth,
      below=True,
      what=f"change of the mean length of correct answers {over}",
      found=f"Correct answers changed by {_range(correct)} of their mean length {over}.",
      otherwise=f"Correct answers did not clearly shrink {over}: {_range(correct)}.",
    ),
    _finding(
      "wrong answers outgrow correct ones",
      trends["difference"],
      rules.growth,
      what=f"change of wrong less correct mean length {over}, over the mean length",
      found=f"Wrong answers outgrew correct ones by {_range(trends['difference'])} of the mean "
      f"length {over}: what a loss divided by each response's length does. Compare with "
      "sequence sum or constant length.",
      otherwise="Wrong answers did not clearly outgrow correct ones: "
      f"{_range(trends['difference'])}.",
    ),
  ]


def _silent(measured: dict[str, Any], rules: Rules, unit: str) -> list[Finding]:
  groups = measured["groups"]
  silent, right, bad = (_range(groups[key]) for key in ("silent", "all_correct", "all_wrong"))
  return [
    _finding(
      "groups without signal",
      groups["silent"],
      rules.silent,
      what="share of the groups whose rewards are all equal",
      found=f"{silent} of the groups teach nothing: {right} are all correct, {bad} all wrong. "
      "Their compute is lost; choose prompts of middling difficulty, or sample more per prompt.",
      otherwise=f"{silent} of the groups teach nothing ({right} all correct, {bad} all wrong).",
    )
  ]


def _cut(measured: dict[str, Any], rules: Rules, unit: str) -> list[Finding]:
  cut = measured["truncation"]
  how = "are flagged as cut off" if cut["flag"] else f"stop at exactly {cut['limit']} {unit}"
  detail = f"{_range(cut['wrong'])} of the wrong ones are among them"
  if cut["limit"]:
    detail += f", and {_range(cut['wrong_if_cut'])} of them count as wrong"
  none = "No response is flagged as cut off." if cut["flag"] else "No limit shows in the lengths."
  return [
    _finding(
      "truncation",
      cut["all"],
      rules.truncated,
      what="share of the responses that were cut off"
      + ("" if cut["flag"] else " (no flag: inferred from a pile-up at the longest length)"),
      found=f"{_range(cut['all'])} of the responses {how}; {detail}. A reward of 0 for being cut "
      "off punishes length whatever the answer was.",
      otherwise=f"{_range(cut['all'])} of the responses {how}." if cut["limit"] else none,
    )
  ]


def _mismatch(measured: dict[str, Any], rules: Rules, unit: str) -> list[Finding]:
  k3, excess = measured["mismatch"]["k3"], measured["mismatch"]["excess"]
  away = excess if not excess[0] < 0 else -excess[[0, 2, 1]]  # on the side on which it lies
  per_token = f"{k3[0]:.2g} nats per token ({k3[1]:.2g} to {k3[2]:.2g})"
  return [
    _finding(
      "sampler mismatch",
      k3,
      rules.mismatch,
      unit="nats",
      what="KL(sampler || trainer) per token, k3",
      found=f"Sampler and trainer differ by {per_token}: weigh by a truncated or banded ratio, or "
      "find the cause (precision, temperature, stale weights).",
      otherwise=f"Sampler and trainer differ by {per_token}.",
    ),
    _finding(
      "sampler log-probs are not the sampler's",
      away,
      rules.normalised,
      what="distance from 1 of the mean token ratio",
      found=f"The mean token ratio is {1 + excess[0]:.4f} ({1 + excess[1]:.4f} to "
      f"{1 + excess[2]:.4f}), and would be 1 if the tokens had been drawn from the logged sampler: "
      "another temperature, filtered logits, or log-probs of other tokens.",
      otherwise=f"The mean token ratio is {1 + excess[0]:.4f}, and 1 is expected.",
    ),
  ]


def _worth(measured: dict[str, Any], rules: Rules, unit: str) -> list[Finding]:
  found = measured["mismatch"]
  worth, doubling = found["predicted"][0], found["doubling"]
  at = f"at the mean length of {found['length']:.0f} tokens"
  later = ", ".join(
    f"{100 * x:.2g} % at {length:.0f}"
    for length, x in zip(found["horizons"][1:], found["predicted"][1:, 0], strict=True)
  )
  value = f"With whole-response ratios a response is worth {_range(worth)} of one {at}; "
  value += f"predicted: {later}."
  times = "{:.3g} ({:.3g} to {:.3g}) times".format(*doubling)
  return [
    _finding(
      "few effective samples",
      worth,
      rules.worth,
      below=True,
      what=f"exp(-v T), the effective sample size per response {at}",
      found=value,
      otherwise=value,
    ),
    _finding(
      "mismatch grows faster than length",
      doubling,
      1.0,
      unit="x",
      what="variance per token of the log-ratio, whole responses over their first halves",
      found=f"The log-ratio's variance per token is {times} that of the first halves: later tokens "
      "differ more, or errors add up, and the predictions at longer lengths are too good.",
      otherwise=f"The log-ratio's variance per token is {times} that of the first halves: it does "
      "not clearly grow faster than the length.",
    ),
  ]


def _exposures(measured: dict[str, Any], rules: Rules, unit: str) -> list[Finding]:
  rows = []
  for side, verb, below in (("wrong", "lengthen", False), ("correct", "shorten", True)):
    table = measured["shifts"][side]
    for name in ("sequence mean", "group token mean"):
      shift, mean = table[name]["shift"], table["length"]
      moves = (
        f"{shift[0]:+.3g} {unit} ({shift[1]:+.3g} to {shift[2]:+.3g}) per unit of reward gained, "
        f"beside what the policy gradient does; their mean is {mean:.0f}"
      )
      rows.append(
        _finding(
          f"{name} would {verb} {side} answers",
          shift / mean,
          -rules.exposure if below else rules.exposure,
          below=below,
          kind="exposure",
          what=f"shift of {side} lengths per unit of reward, over their mean",
          found=f"If the loss is a {name}, it moves the length of {side} answers by {moves}.",
          otherwise=f"A {name} would move the length of {side} answers by {moves}.",
        )
      )
  return rows


def _range(number: np.ndarray) -> str:
  value, low, high = 100 * number
  return f"{value:.3g} % ({low:.3g} to {high:.3g})" if np.isfinite(value) else "an unknown share"


def _text(threshold: float, unit: str) -> str:
  if unit == "%":
    return f"{100 * threshold:g} %"
  return f"{threshold:g} {unit}" if unit != "x" else f"{threshold:g}"
