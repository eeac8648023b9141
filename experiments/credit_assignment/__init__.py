"""Credit assignment, exactly: which token earned the reward, and the variance of every answer.

Claims:
  1. The exact advantages A_t = V(s_{t+1}) - V(s_t) of a response add up to r - V(x), the credit
     that a group baseline gives to every token.
  2. A baseline, a critic and the exact advantage lower the variance in turn; the exact advantage
     has almost the lowest there is (Schulman et al. 2016, arXiv:1506.02438, section 2).
  3. GAE's lambda trades bias for variance: it is unbiased with an exact critic at every value,
     with any critic at 1, and biases far less than a discount (section 3). With a critic that
     knows nothing it is a decay lambda^(T-1-t) of credit (VC-PPO, arXiv:2503.01491).

Setting: 5 tokens, 4 of them in a response (625 responses), 4 prompts; reward 1 if the tokens sum
to a target modulo 5 (`sum`), or if the first one is the target (`first`). A reference policy from
counting (`table`) and a network fitted to it, which shares all its parameters (`network`). Mean
and variance of the update of one response, exactly. A wrong critic is the exact one with a normal
error per state, of 0.3 of the reward's standard deviation.

Time: 20 seconds on 2 CPU cores.

Command: python -m experiments.credit_assignment [full | demo | small] [--overrides]

Expected (goldens; four numbers are the four prompts):
  P(correct), sum                     0.0175 0.1875 0.7073 0.4387
  mean |A_t|, sum                     0.1314 0.0687 0.0874 0.1418, and 0.3114 for r - V(x)
  mean |A_t|, first                   0.1540 0 0 0, and 0.1540 for r - V(x)
  sum of A_t - (r - V(x))             0 for every response
  bias                                0 for none, V(x), V(s), A, and GAE as in claim 3
  variance of V(x) less that of none  V E|S|^2 (V - 2 b*), S the score of a response, b* the best
                                      constant baseline: V(x) is worse than none where V > 2 b*
  update of `first` without a critic  lambda^3 of the gradient, 0.857 at lambda = 0.95
Came out (hypotheses; of the table; the network confirms and contradicts the same):
  variance, V(x) over none            sum 0.97 0.80 2.43 1.03: contradicted
                                      first 0.48 0.65 1.00 0.99
  variance, r - V(s) over r - V(x)    sum 0.96 1.07 1.00 1.27: contradicted
                                      first 0.52 0.30 0.47 0.47
  variance, A over r - V(x)           sum 0.32 0.53 0.80 0.81; first as r - V(s)
  the best state baseline of A        takes off 25 25 90 70 % more (sum), 99.7 4 1 1 % (first):
                                      "almost the lowest" is contradicted
  bias at 0.95, wrong critic          0.022 of the batch's gradient (sum), of a discount 0.099
  lambda of least error, wrong critic sum: 0, 0.2, 0.8, 0.95, then 1 at 1, 10, ... responses per
                                      prompt; first: 1 at every number
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from configs.credit_assignment import FULL, Config
from experiments.credit_assignment import expected
from experiments.credit_assignment import figures as draw
from experiments.credit_assignment.measures import measure
from experiments.harness import run


def main(config: Config = FULL, *, out: Path | None = None) -> dict[str, Any]:
  """Measures, compares with what is expected, draws.

  Args:
    config: the settings.
    out: folder of the results; None = results/credit_assignment.

  Returns:
    The summary.
  """
  with run.open("credit_assignment", config, out) as experiment:
    policies = {"table": config.table, "network": config.network}
    found = {
      name: experiment.part(name, partial(measure, config, kind)) for name, kind in policies.items()
    }
    expected.known_numbers(experiment, config, found["table"])
    for name, by_reward in found.items():
      expected.identities(experiment, config, name, by_reward)
      expected.claims(experiment, config, name, by_reward)
    experiment.figure("advantages", draw.advantages(config, found["table"]))
    experiment.figure("variance", draw.variance(found))
    experiment.figure("gae", draw.gae(config, found["table"]))
  return experiment.summary
