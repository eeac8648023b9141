"""The length bias of GRPO on a trained transformer: lengths at equal reward.

Claim: dividing a response's loss by its length lengthens wrong answers and shortens right ones
(Dr. GRPO, arXiv:2503.20783, section 3.1); a token mean of the batch almost does not (DAPO,
arXiv:2503.14476; exactly in `experiments.length_bias`).

Settings, Dr. GRPO with one slot changed, Adam, one step on each rollout, no KL term:
  filler    a transformer of two layers that pretrains itself on sums of one digit and filler whose
            length says nothing: "3+4=" is followed by "7...." or, as often, by "?..", giving up.
            The pure case: the first token decides the reward, and a table would have no drift of
            length but the bias. For contrast "....7", filler first. First the expected update of
            3,072 responses and its drift of the lengths, on responses that it was not made of;
            then 24 steps of 16 x 8 responses, eight seeds.
  stories   stories260K, taught to end within 96 tokens; a story is right if it contains "happy"
            and ends. 16 steps of 8 x 8 responses, five seeds. Without the data it is left out,
            and said.
Runs are compared at equal P(right) on held-out prompts: the mean over four values that all have
gone through. Intervals: 95 %, t, over folds or seeds.

Time: 25 CPU minutes, of which stories take 17; pretraining of two small policies included.

Expected (cosines, runs of a sum and rises are goldens; drifts in tokens per unit of P(right)):
  sum and constant length         one direction, and one run to the last bit: 16 is a power of 2
  P(right)                        rises in every run, 0.38 -> 0.84 (filler), 0.11 -> 0.98
  first drift, constant length    wrong 0.15 +- 0.37: none, as in a table
  what 1/n adds to it             wrong 0.098 +- 0.035: confirmed; right 0.083 +- 0.055 too:
                                  contradicted there
  filler first: what 1/n adds     wrong 2.3 +- 0.4, right 2.2 +- 0.5; in a table 0: contradicted
  trained, 1/n less constant      filler: wrong -0.07 +- 0.09 tokens, right -0.08 +- 0.08, wrong
                                  less right 0.012 +- 0.025; stories: 2.0 +- 5.4, -1.1 +- 5.0 and
                                  3.1 +- 3.7: undecided
  token mean of the batch         wrong 0.01 +- 0.04 and -2.4 +- 4.9

Command: python -m experiments.length_bias_trained [full | demo | small] [--overrides]
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from configs.length_bias_trained import FULL, Config, Stories, Training
from experiments.harness import run
from experiments.length_bias_trained import expected, figures, policies
from experiments.length_bias_trained.beginning import drifts
from experiments.length_bias_trained.paths import follow
from experiments.length_bias_trained.policies import Start
from experiments.length_bias_trained.rows import CONSTANT, SUM


def main(config: Config = FULL, *, out: Path | None = None) -> dict[str, Any]:
  """Measures the first update, trains, compares at equal reward, draws."""
  with run.open("length_bias_trained", config, out, x64=False) as experiment:
    training = config.training

    def filler(first: bool = False) -> Start:
      return policies.filler(config.filler, first, experiment.say)

    def beginning(first: bool) -> dict[str, Any]:
      return drifts(filler(first), config.beginning, training, experiment.track)

    def train(row: str, seeds: tuple[int, ...]) -> dict[str, Any]:
      return _trained(experiment, filler(), training, f"filler-{row}", row, seeds)

    last = experiment.part("beginning-filler", lambda: beginning(False))
    first = experiment.part("beginning-filler_first", lambda: beginning(True))
    again = experiment.part(f"filler-{SUM}", lambda: train(SUM, training.seeds[:1]))
    trained = {
      row: experiment.part(f"filler-{row}", partial(train, row, training.seeds))
      for row in training.rows
    }
    expected.of_beginning(experiment, last, first)
    expected.of_sum(experiment, trained[CONSTANT], again)
    expected.of_training(experiment, "filler", trained)
    experiment.figure("lengths", figures.lengths("filler", trained))

    told = {} if config.stories is None else _stories(experiment, config.stories)
    if told:
      expected.of_training(experiment, "stories", told)
      experiment.figure("stories", figures.lengths("stories", told))
    experiment.figure("differences", figures.differences(last, first, trained, told))
  return experiment.summary


def _stories(experiment: run.Experiment, settings: Stories) -> dict[str, Any]:
  """The runs on stories; none without the data."""
  training = settings.training

  def train(row: str, model: Path) -> dict[str, Any]:
    start = policies.stories(settings, model, experiment.out / "runs" / "endings")
    return _trained(experiment, start, training, f"stories-{row}", row, training.seeds)

  found = {
    row: experiment.part(f"stories-{row}", partial(train, row), needs=[policies.STORIES])
    for row in training.rows
  }
  return {row: path for row, path in found.items() if path is not None}


def _trained(
  experiment: run.Experiment,
  start: Start,
  training: Training,
  name: str,
  row: str,
  seeds: tuple[int, ...],
) -> dict[str, Any]:
  return follow(start, training, row, seeds, experiment.out / "runs" / name, experiment.track)
