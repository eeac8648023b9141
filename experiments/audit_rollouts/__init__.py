"""An audit of rollouts that you already have: what the loss does with their lengths, and more.

Claims looked into, on any log: dividing a response's loss by its length spares the tokens of
long wrong answers and lengthens them (Dr. GRPO, arXiv:2503.20783, section 3.1); groups with equal
rewards teach nothing (DAPO, arXiv:2503.14476, section 3.2); ratios of sampler and trainer that no
token shows decide everything in a long response (`experiments.ratio_explosion`).

Setting: no model and no accelerator. JSON lines, CSV, .npz, or parquet (if pyarrow is installed),
one row per response: a group or prompt id, a reward, a length; optionally a step, a truncation
flag, and the log-probs of the tokens by trainer and sampler. verl's rollout dumps and TRL's
completion logs are recognised. Groups may be scattered over the files. Rows are read once, and of
each some 40 bytes are kept (with log-probs 100), whatever its text was.

Time: a million rows without log-probs 15 seconds of a CPU core, a thousand 5.

Command: python -m experiments.audit_rollouts FILES... [--columns.reward NAME] [--help]

Expected (goldens): the weights are those of the library's own reductions; every row is accounted
for. How to read the report: docs/audit.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.audit_rollouts import FULL, Config
from experiments.audit_rollouts import figures as draw
from experiments.audit_rollouts import mismatch, report, shares, trends, weights
from experiments.audit_rollouts.collection import Log, read
from experiments.audit_rollouts.faults import BadLog
from experiments.audit_rollouts.findings import Finding, judge
from experiments.harness import folder, run

__all__ = ["Audited", "BadLog", "main", "measure"]


@dataclasses.dataclass(frozen=True)
class Audited:
  """What the results belong to: the settings, and the files as they are."""

  config: Config
  files: tuple[str, ...]


def main(
  files: Sequence[Path], config: Config = FULL, *, out: Path | None = None, fresh: bool = False
) -> dict[str, Any]:
  """Reads logs, measures, judges, draws. Nothing is written before all rows have been read.

  Args:
    files: the logs.
    config: columns, thresholds.
    out: folder of the results; None = results/audit_rollouts/ and a name made of the files.
    fresh: delete the results in the folder first.

  Returns:
    The summary.

  Raises:
    BadLog: a log cannot be read; the message says where and why.
    OccupiedFolder: the folder holds something else.
  """
  _check_settings(config)
  with jax.enable_x64(True):
    log = read([Path(file) for file in files], config)
    measured = measure(log, config)
  found = judge(measured, config.rules, log.unit)
  audited = Audited(config, tuple(_identity(Path(file)) for file in files))
  out = default_folder(audited) if out is None else Path(out)
  if fresh:
    folder.empty(out)
  with run.open("audit_rollouts", audited, out) as experiment:
    experiment.part("audit", lambda: _results(log, measured, found))
    _check(experiment, log, measured)
    experiment.figure("audit", draw.page(measured, log.unit, _claim(files, log, found)))
  report.show(measured, found, log.unit, log.notes)
  return experiment.summary


def measure(log: Log, config: Config) -> dict[str, Any]:
  """All measurements, by part; under 64-bit numbers."""
  rules, measured = config.rules, {}
  if (responses := log.responses) is not None:
    wrong = ~(responses.reward > config.correct_above)
    advantages, signal = weights.group_advantages(responses)
    measured = {
      "push": weights.push(responses, advantages, signal, wrong, config.bins),
      "shifts": weights.shifts(responses, advantages, wrong, rules.confidence),
      "trends": trends.lengths_over_steps(responses, wrong, config.blocks, rules.confidence),
      "groups": shares.silent_groups(responses, signal, wrong, rules.confidence),
      "truncation": shares.truncation(responses, wrong, rules.confidence),
      "lengths": shares.lengths(responses, wrong),
      "reward": {"mean": responses.reward.mean(), "correct": np.mean(~wrong)},
    }
  if log.tokens is not None:
    measured["mismatch"] = mismatch.mismatch(log.tokens, config.horizons, rules.confidence)
  return {name: part for name, part in measured.items() if part is not None}


def default_folder(audited: Audited) -> Path:
  """Another folder for other files, other contents of them and other settings."""
  name = Path(audited.files[0].partition(" (")[0]).stem
  digest = hashlib.sha256(repr(audited).encode()).hexdigest()[:8]
  return run.RESULTS / "audit_rollouts" / f"{name}-{digest}"


def _results(log: Log, measured: dict[str, Any], found: Sequence[Finding]) -> dict[str, Any]:
  read = {"unit": log.unit, "counts": log.counts, "notes": log.notes}
  rows = [dataclasses.asdict(row) for row in found]
  return {"log": read, **measured, "findings": rows, "sentences": report.sentences(found)}


def _check_settings(config: Config) -> None:
  for name, good in {
    "bins must be at least 1": config.bins >= 1,
    "blocks must be at least 4, as a slope needs": config.blocks >= trends.LEAST,
    "horizons must be at least 1": min(config.horizons, default=1) >= 1,
    "band must lie in [0, 1) below and at or above 0 above": 0 <= config.band[0] < 1
    and config.band[1] >= 0,
    "rules.confidence must lie between 0 and 1": 0 < config.rules.confidence < 1,
  }.items():
    if not good:
      raise BadLog(f"--{name}.")


def _identity(path: Path) -> str:
  status = path.stat()
  return f"{path} ({status.st_size} bytes, changed {status.st_mtime_ns})"


def _check(experiment: run.Experiment, log: Log, measured: dict[str, Any]) -> None:
  if log.tokens is not None:
    experiment.golden(
      "responses with log-probs",
      len(log.tokens.sums["tokens"]),
      log.counts["responses"],
      source="rows read",
    )
  if log.responses is None:
    return
  experiment.golden(
    "difference of the weights from jaxrl_lm.loss_weights on the first groups",
    weights.disagreement(log.responses),
    0.0,
    atol=1e-12,
    source="the reductions of the library, on masks",
  )
  counts = [measured["lengths"][side]["count"] for side in ("wrong", "correct")]
  experiment.golden(
    "responses: wrong + correct + without a reward",
    sum(counts) + log.counts["unscored"],
    log.counts["responses"],
    source="rows read",
  )


def _claim(files: Sequence[Path], log: Log, found: Sequence[Finding]) -> str:
  name = Path(files[0]).name + (f" and {len(files) - 1} more" if len(files) > 1 else "")
  faults = [row.name for row in found if row.kind == "fault" and row.status == "found"]
  return f"{name}, {log.counts['responses']:,} responses: " + (
    ", ".join(faults) or "no fault found"
  )
