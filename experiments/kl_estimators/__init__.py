"""The estimators of the KL to a reference: value, and the gradient each really has, exactly.

Claims: k3 is the better estimate of the value (Schulman 2020); in the loss k1 does nothing, k2 has
the gradient of the reverse KL and k3 that of the forward KL (arXiv:2506.09477, arXiv:2510.01555);
k1 in the reward is right and k3 in the reward is not (arXiv:2512.21852); on samples of an old
policy a ratio is needed (arXiv:2505.17508), and that of the token is not enough for the
KL of the response. Added here: by how much, for which samples, at what noise.

Setting: a language of 5 tokens, one of which ends the response, up to 5 tokens (1,365 responses);
four prompts; the policy leaves the reference along grad J up to 1 nat per response, the old policy
lies in a random direction from it. A table and a network that shares its parameters. The truth
is the gradient of KL(policy || reference) of whole responses; an update is one response
per prompt, its token terms summed. Nothing is sampled. Config: `small`, for the test.

Time: two minutes on 2 CPU cores.

Command: python -m experiments.kl_estimators [full | small]

Expected (goldens, to rounding, for both policies and at every distance):
  k1 in the loss                       an expected gradient of 0
  k2 in the loss                       the reverse KL of the states, states held fixed; sample by
                                       sample k1 as an immediate reward
  k2 of the response in the loss       the whole gradient; sample by sample k1 in the reward
  k3 in the loss                       the forward KL of the states, states held fixed
  k3 in the reward                     the gradient less what it has in the loss
  k1 in the reward                     the whole gradient, for the response's sum, to go, less V
  k1, k3, exact times a live ratio     the whole gradient off-policy too, ratio of the prefix or
                                       the sequence; of the token: as k2, per state
Came out (hypotheses; at 0.001, 0.01, 0.1, 0.3, 1 nats, on the table; the network alike):
  spread of k3 over k1, value          0.016 0.05 0.19 0.53 4.4: "lower variance" is contradicted
  k2 in the loss, off by               0.1 0.4 1.5 3.0 10 % of the gradient (network to 15 %):
                                       "equivalent to k1 in the reward" is contradicted
  k3 in the loss, cosine               0.9999 0.999 0.989 0.953 0.790
  k3 in the reward, along the gradient 0.000 -0.003 -0.060 -0.183 -0.551: away from the reference
  noise of k1 to go over the whole's   0.29 0.30 0.32 0.34 0.36
  exact KL x live prefix ratio over it 0.05 0.06 0.13 0.24 0.50
  on old samples, at 0.1 nats each     off by 16 % k3 in the loss, 12 % k1 in the reward, 6 % with
                                       a token ratio, 4 % k3 x live token ratio; 0 by the prefix
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from configs.kl_estimators import FULL, Config
from experiments.harness import run
from experiments.kl_estimators import expectations
from experiments.kl_estimators import figures as draw
from experiments.kl_estimators.measures import measure


def main(config: Config = FULL, *, out: Path | None = None) -> dict[str, Any]:
  """Measures, compares with what is expected, draws.

  Args:
    config: the settings.
    out: folder of the results; None = results/kl_estimators.

  Returns:
    The summary.
  """
  with run.open("kl_estimators", config, out) as experiment:
    found = {
      name: experiment.part(name, partial(measure, config, settings, experiment.track))
      for name, settings in {"table": config.table, "network": config.network}.items()
    }
    for name, measured in found.items():
      expectations.of_identities(experiment, name, **measured)
    for name, measured in found.items():
      expectations.of_values(experiment, name, measured["on"])
      expectations.of_gradients(experiment, name, measured["on"])
      expectations.of_old_samples(experiment, name, measured["off"])
      experiment.figure(f"on_policy_{name}", draw.on_policy(measured["on"]))
      experiment.figure(f"off_policy_{name}", draw.off_policy(measured["off"]))
  return experiment.summary
