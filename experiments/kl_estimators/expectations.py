"""What `experiments.kl_estimators` expects of its numbers, and what came out."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.harness.run import Experiment

ROUNDING = 1e-9
TANG = "arXiv:2506.09477"
COMEDY = "arXiv:2512.21852"
RETHINKING = "arXiv:2510.01555"
SCHULMAN = "Schulman 2020"
AMINI = "arXiv:2504.10637"


def of_identities(experiment: Experiment, policy: str, on: Any, off: Any) -> None:
  """Goldens: what must be the same, and what must be unbiased, at every level."""
  for name, apart in {**on["identity"], **off["identity"]}.items():
    experiment.golden(f"{policy}: {name}", apart, 0.0 * apart, atol=ROUNDING)
  for estimator in ("k1", "k3"):
    for kind, values in (("on", on["value"]), ("prefix", off["value"]), ("seq", off["value"])):
      ratio = {"on": "none", "prefix": "prefix", "seq": "sequence"}[kind]
      bias = values[estimator][ratio]["bias"]
      experiment.golden(
        f"{policy}: value of {estimator} is unbiased, {_samples(kind, ratio)}",
        bias,
        0.0 * bias,
        atol=1e-7,  # of a KL of 1e-3 nats
      )
  k1 = on["gradient"]["k1"]
  size = k1["loss"]["none"]["bias"] - 1.0  # |E g - target| / |target| of nothing is 1
  experiment.golden(f"{policy}: k1 in the loss has no gradient", size, 0.0 * size, atol=ROUNDING)
  for place in ("whole", "to go", "advantage"):
    bias = k1[place]["none"]["bias"]
    experiment.golden(
      f"{policy}: k1 in the reward is unbiased, {place}", bias, 0.0 * bias, atol=ROUNDING
    )
  for estimator in ("k1", "k3", "exact per state"):
    for ratio in ("prefix", "sequence"):
      bias = off["gradient"][estimator]["live"][ratio]["bias"]
      experiment.golden(
        f"{policy}: {estimator} times a live {ratio} ratio is unbiased off-policy",
        bias,
        0.0 * bias,
        atol=ROUNDING,
      )


def _samples(kind: str, ratio: str) -> str:
  return "on-policy" if kind == "on" else f"off-policy with a {ratio} ratio"


def of_values(experiment: Experiment, policy: str, on: Any) -> None:
  value = {name: row["none"] for name, row in on["value"].items()}
  less = value["k3"]["std"] / value["k1"]["std"]
  experiment.hypothesis(
    f"{policy}: spread of k3 over k1 as the KL grows",
    "below 1: k3 is unbiased with lower variance",
    less,
    np.all(less < 1),
    source=SCHULMAN,
    explanation="its exp(-delta) is heavy-tailed where the policy has lost tokens of the reference",
  )
  experiment.hypothesis(
    f"{policy}: bias of k2 over the KL",
    "within 5 % up to 0.1 nats",
    value["k2"]["bias"],
    np.all(np.abs(value["k2"]["bias"][on["kl"] < 0.11]) < 0.05),
    source=SCHULMAN,
    explanation="a token that the policy has nearly lost adds delta^2 / 2 far from its KL",
  )
  better = value["exact per state"]["std"] / np.minimum(value["k1"]["std"], value["k3"]["std"])
  experiment.hypothesis(
    f"{policy}: spread of the exact KL per state over the better of k1 and k3",
    "below 1: Rao-Blackwell",
    better,
    np.all(better < 1),
    source=AMINI,
  )


def of_gradients(experiment: Experiment, policy: str, on: Any) -> None:
  gradient = on["gradient"]
  k1, k2, k3 = (gradient[name] for name in ("k1", "k2", "k3"))
  experiment.hypothesis(
    f"{policy}: noise of k1 in the loss over that of k1 in the reward, to go",
    "above 1: it regularises nothing, and is no cheap way to do so",
    k1["loss"]["none"]["noise"] / k1["to go"]["none"]["noise"],
    np.all(k1["loss"]["none"]["noise"] > k1["to go"]["none"]["noise"]),
    source=TANG,
    explanation="far from the reference the noise of a log-ratio outgrows that of a score",
  )
  experiment.hypothesis(
    f"{policy}: k2 in the loss, |E g - grad KL| / |grad KL|",
    "0: gradient-equivalent to k1 in the reward",
    k2["loss"]["none"]["bias"],
    np.all(k2["loss"]["none"]["bias"] < ROUNDING),
    source=RETHINKING,
    explanation="per token it holds the visited states fixed, as an immediate reward does; only k2 "
    "of the whole response is k1 in the reward (goldens). What is left out is small here: up to 5 "
    "tokens",
  )
  experiment.hypothesis(
    f"{policy}: cosine with grad KL of k3 in the loss",
    "a first-order approximation: 1 near the reference, and falls",
    k3["loss"]["none"]["cosine"],
    k3["loss"]["none"]["cosine"][0] > 0.999 and np.all(np.diff(k3["loss"]["none"]["cosine"]) < 0),
    source=RETHINKING,
  )
  reward = k3["to go"]["none"]
  experiment.hypothesis(
    f"{policy}: size of k3 in the reward along grad KL",
    "biased, and not weakly: near 0 at the reference, and beyond 0.01 nats against the gradient",
    reward["scale"],
    abs(reward["scale"][0]) < 0.05 and np.all(reward["scale"][on["kl"] > 0.011] < 0),
    source=f"{COMEDY} (biased; how much and which way: here)",
    explanation="it is the gradient less the forward one, which need not be the larger",
  )
  less = k1["to go"]["none"]["noise"] / k1["whole"]["none"]["noise"]
  experiment.hypothesis(
    f"{policy}: noise of k1 to go over that of the whole response's",
    "below 1: what came before a token is no consequence of it",
    less,
    np.all(less < 1),
    source="Sutton & Barto 2018, section 13.3",
    explanation="past and future log-ratios can cancel in the sum",
  )
  baseline = k1["advantage"]["none"]["noise"] / k1["to go"]["none"]["noise"]
  experiment.hypothesis(
    f"{policy}: noise of k1 less its exact expectation over k1 to go",
    "below 1: Q - V has less variance than a return",
    baseline,
    np.all(baseline < 1),
    source="arXiv:1506.02438",
    explanation="V is not the best baseline: far from the reference a rare token has both a large "
    "score and a large log-ratio",
  )
  exact = gradient["exact per state"]["live"]["prefix"]["noise"] / k1["to go"]["none"]["noise"]
  experiment.hypothesis(
    f"{policy}: noise of the exact KL per state times a live prefix ratio over k1 to go",
    "below 1: both are unbiased",
    exact,
    np.all(exact < 1),
    source=AMINI,
  )
  same = [k3["loss"]["none"]["cosine"], k3["live"]["token"]["cosine"]]
  experiment.hypothesis(
    f"{policy}: k3 in the loss, without and with a live token ratio, cosine on-policy",
    "the same: a ratio of 1 changes nothing",
    same,
    np.allclose(*same, rtol=0, atol=ROUNDING),
    source="the value of the ratio is 1 on-policy",
    explanation="its gradient is not 0: it turns the forward gradient of k3 into the reverse one",
  )


def of_old_samples(experiment: Experiment, policy: str, off: Any) -> None:
  gradient, stale = off["gradient"], slice(1, None)
  none = gradient["k1"]["to go"]["none"]["bias"]
  token = gradient["k1"]["to go"]["token"]["bias"]
  experiment.hypothesis(
    f"{policy}: bias of k1 to go on old samples, no ratio and a token ratio",
    "the token ratio removes more than half of it",
    [none, token],
    np.all(token[stale] < 0.5 * none[stale]),
    source="the ratio that the surrogate has",
    explanation="it corrects the token, not the states before it nor the costs after it",
  )
  token = gradient["k3"]["live"]["token"]["bias"]
  experiment.hypothesis(
    f"{policy}: bias of k3 times its live token ratio on old samples",
    "0: an unbiased estimate of the KL",
    token,
    np.all(token < ROUNDING),
    source="arXiv:2512.02556",
    explanation="right in every state, but the states are the old policy's and held fixed",
  )
  ratio = gradient["k3"]["live"]["prefix"]["noise"] / gradient["k3"]["live"]["sequence"]["noise"]
  experiment.hypothesis(
    f"{policy}: noise of k3 times a live prefix ratio over that of a sequence ratio",
    "below 1: both are unbiased for the KL of the response, which was left open",
    ratio,
    np.all(ratio[stale] < 1),
    source=COMEDY,
  )
