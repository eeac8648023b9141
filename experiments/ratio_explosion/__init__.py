"""Importance ratios of long responses explode while no token's ratio does; what each one buys.

Claims:
  1. E[rho] = 1, and E[rho^2] grows by a Perron root per token, about exp(2 KL): a mismatch that no
     token shows decides everything in a response (importance sampling, e.g. Owen 2013, section
     9.3). log rho ~ N(-T KL, 2 T KL).
  2. GSPO's ratio rho^(1/T) (arXiv:2507.18071, eq. 7) corrects almost nothing as an importance
     weight; as a gate it becomes a threshold on KL per token. LUSPO (arXiv:2602.05261) widens it.
  3. A token ratio removes nearly all of the bias at no cost in variance, and so beats the unbiased
     sequence ratio in squared error.
  4. The token variances of a real mismatch, sampler against trainer, add up.

Setting:
  1, 2. A Markov chain over 5 tokens, samples from mu, a random direction followed to 5e-5, 2e-4,
     1e-3 and 5e-3 nats of KL(mu || pi) per token; T up to 4096; all by dynamic programming.
  2, 3. A counting language: tokens a and b, state = position and number of a's, reward for a
     majority of a's or for a first a, mu a fair coin; four ways to shift the policy (see
     `ratio_explosion.counting`) to 2e-4 and 5e-3 nats per token; bias and variance exactly.
     `shared`: a small network in place of one logit per state.
  4. 64 stories of up to 251 tokens, log-probs of a sampler with bfloat16 weights and of trainers in
     float32 and in bfloat16 (`stories260K_rollouts64.npz`; skipped if absent).

Time on two CPU cores: 3 minutes; `demo` 1 minute; `shared` 3 minutes; `small` 10 seconds.

Expected (full settings):
  1. At 2e-4 nats the token ratios lie in [0.95, 1.04], and the ratios of 52.85 % of the responses
     leave [0.8, 1.2] at T = 256, of 89.63 % at T = 4096 (68 % below, 22 % above). log E[rho^2] and
     Var[log rho] are 2 T KL to 0.4 %. Effective samples per sample at T = 4096: 0.66, 0.19, 2.7e-4
     and 1.5e-18 at the four rates. A band that grows with sqrt(T) holds what it clips (21 % at
     T = 64, 26 % at 4096 for 2e-4 nats) until the drift, which grows with T, overtakes it.
  2. As a weight the exponent removes 0.1 to 2.2 % of the bias, between 1 / T and 3.5 / T. GSPO's
     band [1 - 3e-4, 1 + 4e-4] clips 99 % of the responses of 4 tokens at 2e-4 nats, 61 % at 1024,
     40 % at 4096, 0.5 % at 262,144: a threshold (below 3e-4 nats nothing, above it everything) only
     for T well over 2 KL / (KL - 3e-4)^2, here 40,000 tokens. LUSPO's [1 - 2e-3, 1 + 2.5e-3] clips
     9 % at 256 and 0.2 % at 1024.
  3. Contradicted. Share of the bias that a token ratio removes at 2e-4 nats, T = 64 and 1024:
     constant shift 89 and 48 %, random 69 and 89 %, reverting 23 and 24 %, along the gradient 56
     and 30 %; 100 % where the first token decides. It leaves the error of the states that are
     visited and that of the rest of the response, which can cancel: a prefix ratio, which removes
     the first alone, is worse than no ratio along the gradient (-46 and -15 %). The cost in
     variance is none. The sequence ratio, with exp(2 KL T) times the variance for a constant or
     random shift (24,000 times at 5e-3 nats and T = 1024), wins from n* samples on: 1,100
     (reverting, T = 64) to 1.8e7 (random, T = 1024) at 2e-4 nats, 9e4 (reverting) to 3e10 (random)
     at 5e-3 nats and T = 1024.
     `shared`, 2e-4 nats, T = 32 and 256: constant 9 and 50 %, random 86 and 92 %, along the
     gradient -24 and -53 % (worse than no ratio), with 8 to 19 % more variance; n* from 0 to 2,500.
  4. float32: KL 7e-5 nats per token; no token ratio leaves [0.8, 1.2], 33 % of the responses do at
     251 tokens; Var[log rho] is the sum of its tokens' variances at every T, and T times a token's
     mean variance from T = 64 on only (0.08 of it at T = 8: stories begin alike). Effective samples
     per sample 0.96 at T = 251, predicted 0.55 at 4096. bfloat16: 5e-6 nats, none leave.

Command: python -m experiments.ratio_explosion [full | demo | small | shared] [--overrides]
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from configs.ratio_explosion import FULL, Config
from experiments.harness import run
from experiments.ratio_explosion import expected
from experiments.ratio_explosion import figures as drawings
from experiments.ratio_explosion.chains import chain_clipping, chain_moments, gates, rollouts
from experiments.ratio_explosion.counting import REWARDS, measure

ROLLOUTS = "stories260K_rollouts64.npz"


def main(config: Config = FULL, *, out: Path | None = None) -> dict[str, Any]:
  """Runs the experiment; returns the summary."""
  chain, bands = config.chain, config.bands
  with run.open("ratio_explosion", config, out) as experiment:
    moments, clipping, gated = [], [], []
    for rate in chain.rates:
      name = f"{rate:g}"
      moments.append(experiment.part(f"moments-{name}", partial(chain_moments, chain, rate)))
      clipping.append(
        experiment.part(f"clipping-{name}", partial(chain_clipping, chain, bands, rate))
      )
      gated.append(experiment.part(f"gates-{name}", partial(gates, chain, bands, rate)))
    expected.moments(experiment, config, moments)
    expected.clipping(experiment, config, moments, clipping)
    expected.gates(experiment, config, gated)
    experiment.figure("explosion", drawings.explosion(config, moments, clipping))
    experiment.figure("gates", drawings.gates(config, gated))

    rows = []
    for length in config.counting.lengths:
      for reward in REWARDS:
        compute = partial(measure, config.counting, reward, length, track=experiment.track)
        rows += experiment.part(f"counting-{reward}-{length}", compute)
    expected.exact(experiment, rows)
    expected.token(experiment, config, rows)
    expected.others(experiment, config, rows)
    experiment.figure("estimators", drawings.estimators(config, rows))

    compute = partial(rollouts, config.rollouts, bands)
    if (real := experiment.part("rollouts", compute, needs=[ROLLOUTS])) is not None:
      expected.rollouts(experiment, config, real)
      experiment.figure("rollouts", drawings.rollouts(config, real))
  return experiment.summary
