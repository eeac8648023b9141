"""The length bias of GRPO, exactly: what dividing a response's loss by its length does.

Claim: GRPO's 1/|o| biases the update, so that wrong answers grow long; its division by the group's
std biases it by difficulty; a sum over tokens without either is unbiased (Dr. GRPO,
arXiv:2503.20783, section 3.1). Added here: expectations over all groups instead of runs. How far
the update turns, what the bias buys in variance, what the true gradient itself does to
lengths, so that the share of the growth that is bias can be told, and whether the biased update
ascends any function at all.

Setting: a language of 5 tokens, one of which ends the response, up to 6 tokens (5,461 responses);
four prompts, reward 1 if the content sums to a target modulo 4; a reference policy from counting;
groups of 8. Configs: `demo`, less of it; `small`, for the test; `shared`, a network in place of
the table.

Time: 4 minutes on 2 CPU cores; demo 70 seconds, and 40 more where nothing is compiled yet.

Command: python -m experiments.length_bias [demo | small | shared]

Expected (goldens, to the digits; the others are hypotheses):
  P(correct)                          0.1672 0.1968 0.1420 0.2901
  mean length, correct and wrong      4.530 and 3.968
  cosine with grad J, sum, constant   1, size (G - 1) / G; with leave-one-out 1
  cosine, 1/n                         0.9436 0.9281 0.8651 0.9593, the same with a std
  cosine, token mean over the group   above 0.998, below 1
  weight of a std                     w_G(p) = E sqrt(K (G - K)) / (G p (1 - p)), K ~ Bin(G, p)
  curl                                0 for a sum with or without std and for 1/n without
                                      baseline, 0.18 for 1/n with one
  relative variance, 1/n over sum     0.25 0.52 0.57 0.44; the sum wins from 32 groups a prompt
  wrong answers, 1/n less gradient    longer on all prompts: 2.1 1.7 9.2 0.7 tokens per unit of J
  growth of wrong answers up to P(correct) = 0.8 under 1/n, and the part of it that is bias, as
  the sum makes the rest too: SGD 0.76 tokens, 21 %; Adam 0.31, 75 %; sampled Adam 0.74, 14 %
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.length_bias import FULL, Config
from experiments.harness import run
from experiments.length_bias import expectations
from experiments.length_bias import figures as draw
from experiments.length_bias.batch import batch
from experiments.length_bias.curl import curls
from experiments.length_bias.flows import flows
from experiments.length_bias.groups import DATA, token_weights
from experiments.length_bias.measures import decomposition, difficulty, filler, frontier, reference
from experiments.length_bias.setting import reference_problem


def main(config: Config = FULL, *, out: Path | None = None) -> dict[str, Any]:
  """Measures, compares with what is expected, draws.

  Args:
    config: the settings.
    out: folder of the results; None = results/length_bias.

  Returns:
    The summary.
  """
  with run.open("length_bias", config, out) as experiment:
    problem = reference_problem(config.setting, config.group_size)
    track = experiment.track
    start = experiment.part("reference", lambda: reference(problem))
    exact = experiment.part("decomposition", lambda: decomposition(problem, config.alphas, track))
    coupled = experiment.part("batch", lambda: batch(problem, config.batch_samples, track))
    pure = experiment.part("filler", lambda: filler(config.filler, track))
    trained = experiment.part("flows", lambda: flows(problem, config.flows, track))
    edge = experiment.part(
      "frontier",
      lambda: frontier(problem, config.frontier_alphas, config.frontier_groups, track),
    )
    weight = experiment.part("difficulty", lambda: difficulty(problem, config.difficulty, track))
    turning = experiment.part(
      "curl", lambda: curls(config.curl, config.setting, config.group_size, track)
    )
    real = {
      name: experiment.part(f"groups-{name}", token_weights, needs=[file])
      for name, file in DATA.items()
    }
    real = {name: table for name, table in real.items() if table is not None}

    expectations.of_decomposition(experiment, config, start, exact, coupled)
    expectations.of_filler(experiment, config, pure)
    expectations.of_flows(experiment, trained)
    expectations.of_frontier(experiment, config, edge)
    expectations.of_difficulty(experiment, config, weight)
    expectations.of_curl(experiment, turning)
    expectations.of_groups(experiment, real)

    experiment.figure("bias_and_drift", draw.bias_and_drift(exact, coupled))
    experiment.figure("flows", draw.flows(trained))
    experiment.figure("frontier_and_filler", draw.frontier_and_filler(config, edge, pure))
    experiment.figure("difficulty_and_curl", draw.difficulty_and_curl(config, weight, turning))
    if real:
      experiment.figure("real_groups", draw.real_groups(real))
  return experiment.summary
