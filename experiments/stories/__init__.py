"""Reward against KL to the start: what five algorithms get, and what the same KL could buy.

Claims:
  1. No policy earns more at its KL to the start than pi* ~ pi_start exp(r / beta) (Gibbs'
     variational principle), and pi*'s reward and KL need samples of the start alone.
  2. Reward grows linearly with the square root of the KL (arXiv:2204.05862).
  3. With as many steps CISPO (arXiv:2506.13585) and GSPO (arXiv:2507.18071) learn faster than GRPO;
     GSPO clips two orders of magnitude more tokens.
  4. Without the division by the group's std, RLOO and Dr. GRPO earn more at the same KL.
Setting: stories260K is rewarded for the word dog in 64 tokens; 16 steps of 8 prompts x 8 samples, 4
optimiser steps each, AdamW at 1.5e-4, no KL term, no clip of the gradient; five seeds, which are
prompts and noise, so that differences are of pairs. 64 responses to each of 4 held-out openings
every 4 steps; KL(policy || start) is of whole responses. Intervals are 95 % t intervals over seeds.
The end of a story is measured and not rewarded: the start earns both once in 8,000 responses, and
then neither the curve nor 16 steps could see it. Without stories260K, addition on a transformer
that pretrains itself.
Time: 680 seconds of a CPU, 6 minutes on two quiet cores; `demo` 250 seconds; `small` 15 seconds.
Expected: 0.035 of the start's responses have the word, and a policy that always writes it needs
3.4 nats. GRPO ends at 0.978 +- 0.012 with 22.7 +- 3.5 nats, Dr. GRPO 0.971 and 23.0, RLOO 0.983 and
28.4, CISPO 0.983 and 28.7, GSPO 0.863 +- 0.034 and 12.1 +- 1.5: 4.8 (GSPO) to 8.8 times the least.
  2. Contradicted: powers of 1.04 to 1.32 in place of 0.5; the optimum's is 0.63.
  3. Confirmed for CISPO (+0.064 +- 0.049 over the run, and not twice as fast: half of the reward at
     step 6.8, GRPO's at 8.0), contradicted for GSPO (-0.160 +- 0.059). It clips 31 %, GRPO 0.29 %.
  4. Undecided: at 10.7 nats +0.003 +- 0.071 and -0.014 +- 0.070.
Command: python -m experiments.stories [full | demo | small] [--overrides]
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from configs.stories import FULL, Config
from experiments.harness import run, storage
from experiments.stories import expected, figures, frontier, measures, report, runs
from experiments.train import policies


def main(config: Config = FULL, *, out: Path | None = None) -> dict[str, Any]:
  """Runs the experiment; returns the summary."""
  config, absent = _with_data(config)
  with run.open("stories", config, out, x64=False) as experiment:
    if absent:
      experiment.say(absent)
    start = policies.start(config.run, None, experiment.say)
    found: dict[str, dict[int, Any]] = {name: {} for name in config.algorithms}
    for seed in config.seeds:
      for name in config.algorithms:
        compute = partial(runs.path, config, start, name, seed, experiment.out)
        found[name][seed] = experiment.part(f"{name}-{seed}", compute)

    compute = partial(frontier.rewards_of_start, config, start, experiment.track)
    tilted = experiment.part("start", compute)
    levels = tilted["levels"]
    curve, best_of = (
      f(levels, tilted["probabilities"]) for f in (frontier.optimum, frontier.best_of)
    )
    others = [frontier.optimum(levels, x) for x in tilted["resampled"]]

    table = {name: measures.stacked(list(paths.values())) for name, paths in found.items()}
    rows = measures.rows(table, curve)
    expected.rises(experiment, rows, known=not absent)
    expected.goldens(experiment, table, curve, others)
    expected.hypotheses(experiment, table, rows, curve)
    experiment.say(report.results(rows, kl := measures.matched_kl(table)))
    experiment.say(report.differences(pairs := measures.pairs(table)))
    experiment.summary |= {
      "matched_kl": kl,
      "rows": storage.readable(rows),
      "pairs": storage.readable(pairs),
    }
    last = {name: paths[config.seeds[0]] for name, paths in found.items()}
    storage.write(experiment.out / "samples.md", text := report.samples(last))
    experiment.say(text)
    claims = expected.claims(table, rows, pairs)
    experiment.figure("frontier", figures.frontier(table, curve, others, best_of, claims[0]))
    experiment.figure("steps", figures.steps(table, pairs, claims[1]))
  return experiment.summary


def _with_data(config: Config) -> tuple[Config, str]:
  """The settings in use; without the model the others, and a line that says so."""
  if config.without_data is None or run.data_path(policies.STORIES) is not None:
    return replace(config, without_data=None), ""
  line = (
    f"{policies.STORIES} was not found (set JAXRL_LM_DATA): instead of stories the task is "
    f"{config.without_data.task}, on a small transformer that is pretrained here"
  )
  return replace(config, run=config.without_data, without_data=None), line
