"""The explosion of the sequence ratio, on a transformer: responses that grow stale over 16 updates.

Claims (`experiments.ratio_explosion` has them exactly, for Markov chains):
  1. Half of the responses leave [0.8, 1.2] while under 1 % of their tokens do.
  2. log rho ~ N(-T KL, 2 T KL); its variance is the sum of the tokens' variances, and a response is
     worth exp(-Var[log rho]) fresh ones.
  3. Updates drift: the KL grows with the square of their number.
  4. GSPO's clip leaves out two orders of magnitude more tokens than GRPO's (arXiv:2507.18071,
     section 5.2).
  5. E[rho] = 1, and staleness measured on the responses that are trained on is that of fresh ones.

Setting: stories260K after 12 steps of GRPO towards stories with the word "tree". It draws 256
responses to train on and 256 that no update sees, of exactly 256 tokens each (none ends: responses
of at least T tokens would be a selection, and E[rho] of a selection is not 1). 16 updates of GRPO
without a KL term on 2 groups of 8 each, AdamW with the moments of the warm-up, at the learning rate
of `experiments.train`, 3e-4, and a tenth of it. Everything is scored after 1, 2, 4, 8 and 16, and
read for the first T tokens. Numbers are means of 5 rollouts, intervals 95 % over them (Student's t)
at T = 256 and on held-out responses, unless they say otherwise. Groups of equal rewards (a third)
teach nothing; in 2 rollouts the first update is idle. Where stories260K is absent: 128 tokens of a
small transformer that learns the Markov chain of `experiments.ratio_explosion`.

Time: 780 seconds of a CPU; demo about 150, by reckoning; `small` 25 with compilation; without
stories260K 100 more, once, for pretraining.

Expected (goldens): log ratios before any update are 0 to the bit by the scorer that made the old
log-probs (by the update's own gradient program 2e-5); E[rho] = 1 within 4 standard errors where
Var[log rho] < 1 (measured: 1.7); effective sample sizes fall with T.
Came out, after 1, 2, 4, 8, 16 updates:
                                 3e-4                                3e-5
  KL, nats per token             7e-4 3e-3 8e-3 0.015 0.020          6e-6 3e-5 9e-5 4e-4 1.4e-3
  tokens out of [0.8, 1.2]       0.4 3 9 17 20 %                     0 0 0.003 0.08 0.9 %
  responses out of it            46 86 95 98 98 %                    0.5 9 32 65 81 %
  effective samples per sample   0.75 0.34 0.08 0.03 0.02            1.00 0.99 0.95 0.82 0.50
  tokens that GSPO leaves out    20 28 24 19 19 %                    6 17 25 31 32 %
  tokens that GRPO leaves out    0.2 1 4 6 7 %                       0 0 0.003 0.04 0.4 %
  1. Confirmed at 3e-5 (half of the responses are out from 135 tokens on after 8 updates, from 47 on
     after 16); contradicted at 3e-4, where tokens leave, too.
  2. Confirmed: variance 2 T KL to 20 % (4 % at 3e-5), the normal law right to 3 % of the responses,
     effective sample size to 9 %. The sum of the variances is exact to 5 % at 3e-5; at 3e-4 it
     misses 10 to 16 % after 8 and 16 updates.
  3. Contradicted: exponent 1.74 +- 0.04 at 3e-5, 1.05 +- 0.04 at 3e-4; the squared distance of the
     parameters grows with the powers 1.65 and 1.55. A fresh Adam's first update goes 9 +- 3
     times as far in KL as one with moments.
  4. Contradicted as a constant: 129, 23, 6, 3, 2.5 times as many at 3e-4, and 9,000 to 80 at 3e-5.
  5. Contradicted: on responses that were trained on, after 16 updates, Var[log rho] is 4.6 +- 0.9
     (3e-5) and 11 +- 2 times (3e-4) as large, E[rho] 1.58 +- 0.26 at 3e-5, and the mean of
     advantage x log rho 1.09 nats against 0.17 (7.5 against 0.56). 16 responses to an update are
     few: larger minibatches learn less of each.

Command: python -m experiments.ratio_explosion_trained [full | demo | small] [--overrides]
"""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.ratio_explosion_trained import FULL, Config
from experiments.harness import run
from experiments.ratio_explosion_trained import expected, figures, measures, policies


def main(config: Config = FULL, *, out: Path | None = None) -> dict[str, Any]:
  """Runs the experiment; returns the summary."""
  asked, config = config, policies.possible(config)
  with run.open("ratio_explosion_trained", config, out, x64=False) as experiment:
    if config.stories != asked.stories:
      experiment.say(policies.ABSENT)
    folder = experiment.out / "warm-up"
    start = functools.cache(partial(policies.start, config, folder, experiment.say))
    by_seed = [
      experiment.part(f"seed-{seed}", lambda seed=seed: measures.measure(config, start(), seed))
      for seed in config.seeds
    ]
    found: dict[str, Any] = jax.tree.map(lambda *x: np.stack(x), *by_seed)
    rates = [f"{rate:g}" for rate in config.rates]
    expected.goldens(experiment, config, found, rates)
    for rate in rates:
      expected.explosion(experiment, config, found, rate)
      expected.drift(experiment, config, found, rate)
      expected.rules(experiment, config, found, rate)
    expected.cold(experiment, found, rates[0])
    for rate in rates:
      experiment.figure(f"explosion-{rate}", figures.explosion(config, found, rate))
    experiment.figure("staleness", figures.staleness(config, found, rates))
  return experiment.summary
