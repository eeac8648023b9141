"""A token as an action or a response as an action: one gradient, and what breaks it, by how much.

Claim: with a reward at the end, no discount and a baseline per prompt the gradient of the Markov
decision process of tokens and that of the bandit of responses are the same, sample for sample
(e.g. Ahmadian et al. 2024, arXiv:2402.14740). A critic, a KL per token, a clip per token or per
response, and each of the three meanings of a discount break it: how far apart are the two on one
sample, how biased is the update, how noisy?

Setting: the language of `length_bias`, 5 tokens of which one ends the response, up to 6 of them
(5,461 responses), 4 prompts, a reward on the sum; a reference policy from counting (`table`) and a
network fitted to it (`network`). Mean and variance of the update of one response, exactly, from
the coefficients of the library's own losses. `apart` is the root mean square, over responses, of
the difference of two updates over that of the sequence's.

Time: 80 seconds on 2 CPU cores; demo 60 seconds.

Command: python -m experiments.token_vs_sequence [full | demo | small] [--overrides]

Expected (goldens; four numbers are the four prompts):
  the two gradients               the same to rounding for every response and parameter
  two given responses             log-probs -14.616, -8.991, but per token -2.923, -2.997
  P(correct), mean lengths        0.1672 0.1968 0.1420 0.2901; 4.530 correct, 3.968 wrong
  bias                            0 for an exact critic at any lambda, any critic at 1, a KL per
                                  token in the return, a ratio per response
  discount                        gamma^t times discounted returns is the discounted objective's
                                  update, sample for sample; its curl is 0
Came out (hypotheses; of the table; the network confirms and contradicts the same):
  exact critic, lambda = 1        apart 0.26 0.36 0.31 0.26, variance 0.95 0.94 1.00 0.93
  exact advantage, lambda = 0     apart 0.85 to 0.89, variance 0.27 to 0.29
  wrong critic, lambda = 0.95     bias 0.03 0.04 0.09 0.06, variance 0.83 to 0.93
  KL per token, in the return     apart 0.04 to 0.09, unbiased, and 1 to 2 % noisier where the
                                  policy moved up the gradient: "less noisy" is contradicted
  KL per token, not in it         misses 1 to 15 % of the penalty's gradient there, 6 to 24 % where
                                  the policy moved at random; k3 in the loss 8 to 29 %
  ratio per token                 apart as the root of the KL: 0.01, 0.04, 0.1, 0.3 to 0.5 at 1e-4,
                                  1e-3, 0.01, 0.1 nats per response; at 0.1 cosine still 0.96 to
                                  0.99, variance 0.57 to 0.87 of a ratio per response: "token
                                  ratios are noisier" (arXiv:2507.18071) is contradicted
  clip of 0.2 at 0.1 nats         stops 13 to 16 % of the tokens, per response 30 to 43 %; cosine
                                  with grad J -0.6 to 0.2 up the gradient, 0.5 to 0.96 at random
  discount of 0.8                 cosine 0.93 to 0.98 in the returns, 0.94 to 0.98 in the
                                  objective, 0.96 to 0.99 as a prefactor
  length of correct responses     the objective shortens it, by 2.4 1.1 3.1 1.0 tokens per unit of
                                  J at 0.8, and so do discounted returns, by 2.4 0.9 1.7 0.7
  curl at 0.8                     0.12 in the returns, 0.11 as a prefactor: gradients of nothing
                                  (Nota & Thomas 2020, arXiv:1906.07073)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from configs.policies import Network, Table
from configs.token_vs_sequence import FULL, Config
from experiments.harness import run
from experiments.token_vs_sequence import expected
from experiments.token_vs_sequence import figures as draw
from experiments.token_vs_sequence.measures import (
  Track,
  clips,
  critics,
  curls,
  discounted,
  identity,
  penalties,
  problem,
)


def main(config: Config = FULL, *, out: Path | None = None) -> dict[str, Any]:
  """Measures, compares with what is expected, draws.

  Args:
    config: the settings.
    out: folder of the results; None = results/token_vs_sequence.

  Returns:
    The summary.
  """
  with run.open("token_vs_sequence", config, out) as experiment:
    expected.two_normalisations(experiment)
    expected.late_tokens(experiment)
    found: dict[str, Any] = {}
    for name, kind in {"table": config.setting.policy, "network": config.network}.items():
      parts = _parts(config, kind, experiment.track)
      found[name] = {part: experiment.part(f"{name}-{part}", f) for part, f in parts.items()}
      expected.identity(experiment, config, name, found[name]["identity"])
      expected.critic(experiment, config, name, found[name]["critic"])
      expected.penalty(experiment, name, found[name]["kl"])
      expected.clip(experiment, config, name, found[name]["clip"])
      expected.discount(experiment, config, name, found[name]["discount"])
    turning = experiment.part("curl", lambda: curls(config.curl, config.setting, config.discounts))
    expected.curl(experiment, turning)
    experiment.figure("breakers", draw.breakers(config, found))
    experiment.figure("clips", draw.clips(config, found["table"]["clip"]))
    experiment.figure("discounts", draw.discounts(config, found["table"]["discount"], turning))
  return experiment.summary


def _parts(config: Config, kind: Table | Network, track: Track) -> dict[str, Callable[[], Any]]:
  """The measurements of one policy, which is made for the first one that is not stored."""
  given = functools.cache(partial(problem, config, kind))
  return {
    "identity": lambda: identity(given()),
    "critic": lambda: critics(given(), config.critic),
    "kl": lambda: penalties(given(), config.kl),
    "clip": lambda: clips(given(), config.clip, track),
    "discount": lambda: discounted(given(), config.discounts, track),
  }
