"""What a step of training did: sums and counts, a few texts, times, and what went wrong."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_lm.lm.micro_batches import Batch
from jaxrl_lm.lm.rollouts import Rollout
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.update_metrics import UpdateMetrics
from jaxrl_lm.statistics import Average

LARGEST_REWARD = 1e18  # about the root of the largest float32: variances square


class Sample(NamedTuple):
  """A response to look at.

  Attributes:
    prompt, text: of both.
    rewards: name -> reward; "total" too, NaN where it could not be given.
    length: tokens.
    finished: whether a stop token was drawn.
  """

  prompt: str
  text: str
  rewards: dict[str, float]
  length: int
  finished: bool


class Report(NamedTuple):
  """One step. Averages keep totals and counts, so that steps can be merged by `+`.

  Attributes:
    step: which, from 0.
    rewards: name of each component, and "total", before any KL penalty -> over the responses that
      could be scored.
    lengths: tokens, over all responses, whatever the loss counts.
    finished: share of the responses with a stop token.
    scored: share of the responses that could be scored.
    signal: share of the groups whose rewards differ.
    discarded: groups that dynamic sampling drew and left out.
    tokens: drawn, of the responses that were kept.
    metrics: of all updates of the step; None if there was none.
    seconds: "sampling" (with decoding and rewards), "scoring", "update".
    samples: responses of the first groups, one of each.
    warnings: what somebody should know. One that is true of every step alike comes with step 0.
  """

  step: int
  rewards: dict[str, Average]
  lengths: Average
  finished: Average
  scored: Average
  signal: Average
  discarded: int
  tokens: int
  metrics: UpdateMetrics | None
  seconds: dict[str, float]
  samples: tuple[Sample, ...]
  warnings: tuple[str, ...]


def report(
  config: TrainConfig,
  step: int,
  rollout: Rollout,
  batch: Batch,
  metrics: UpdateMetrics | None,
  seconds: dict[str, float],
) -> Report:
  """The report of a step.

  Args:
    config: of the run.
    step: which.
    rollout: its responses.
    batch: its rows.
    metrics: of its updates, or None.
    seconds: it took, by part.

  Returns:
    The report.
  """
  scores, drawn = rollout.scores, rollout.samples
  lengths = drawn.mask.sum(axis=-1)
  rewards = {**scores.components, "total": scores.total}
  return Report(
    step=step,
    rewards={name: _average(x, ~np.isnan(x)) for name, x in rewards.items()},
    lengths=_average(lengths),
    finished=_average(drawn.finished),
    scored=_average(~np.isnan(scores.total)),
    signal=_average(rollout.signal),
    discarded=rollout.discarded,
    tokens=int(lengths.sum()),
    metrics=metrics,
    seconds=seconds,
    samples=_samples(config, rollout),
    warnings=tuple(_warnings(config, step, rollout, batch, metrics)),
  )


def _average(x: Any, where: Any = None) -> Average:
  where = np.ones(x.shape, bool) if where is None else where
  return Average.of(jnp.asarray(x, jnp.float32), jnp.asarray(where))


def _samples(config: TrainConfig, rollout: Rollout) -> tuple[Sample, ...]:
  """The first response of each group, then the second, until there are enough."""
  rows = np.arange(config.rollout.rows).reshape(-1, config.rollout.group_size).T.reshape(-1)
  rewards = {**rollout.scores.components, "total": rollout.scores.total}
  return tuple(
    Sample(
      prompt=rollout.responses.prompts[i].text,
      text=rollout.responses.texts[i],
      rewards={name: float(x[i]) for name, x in rewards.items()},
      length=int(rollout.samples.mask[i].sum()),
      finished=bool(rollout.samples.finished[i]),
    )
    for i in rows[: config.shown]
  )


def _warnings(
  config: TrainConfig, step: int, rollout: Rollout, batch: Batch, metrics: UpdateMetrics | None
) -> list[str]:
  """In words, with the numbers."""
  groups, signal = config.rollout.num_prompts, int(rollout.signal.sum())
  found = []
  unscorable = int((~rollout.scorable).sum())
  largest = float(np.nanmax(np.abs(rollout.scores.total), initial=0))
  dropped = int((rollout.samples.mask.any(axis=-1) & ~batch.mask.any(axis=-1)).sum()) - unscorable
  if metrics is None:
    found.append(
      f"step {step}: no advantage of the {groups} groups differs from 0 ({signal} have rewards "
      f"that differ, {unscorable} of {len(batch.mask)} responses could not be scored, {dropped} "
      "were dropped as unfinished), so there was no update"
    )
  if largest > LARGEST_REWARD:
    found.append(
      f"step {step}: a reward is {largest:g} in size; above {LARGEST_REWARD:g} the spread of a "
      "group may not be finite in float32, so that its advantages are 0 or the update is skipped: "
      "scale the reward"
    )
  if config.rollout.attempts > 1 and not rollout.signal.all():
    found.append(
      f"step {step}: after {rollout.consumed} prompts only {signal} of {groups} "
      f"groups have rewards that differ; the others are without signal"
    )
  if step == 0 and config.rollout.truncated and config.importance is None:
    found.append(
      "top_k, top_p or min_p is on and importance is None: the samples are off-policy for the "
      "loss. sampler_logprobs are of the truncated distribution, old_logprobs of the whole one"
    )
  if metrics is not None and int(metrics.skipped.total):
    found.append(
      f"step {step}: {int(metrics.skipped.total)} of {int(metrics.skipped.count)} updates were "
      "skipped, because a loss or gradient was not finite"
    )
  return found
