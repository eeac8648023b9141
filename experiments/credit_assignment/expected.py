"""What `experiments.credit_assignment` expects of its numbers, and what came out."""

from __future__ import annotations

from typing import Any

import numpy as np

from configs.credit_assignment import Config
from experiments.credit_assignment.measures import squared_error
from experiments.harness.run import Experiment

GAE = "Schulman et al. 2016, arXiv:1506.02438"
BASELINES = "Williams 1992; for the best constant Greensmith et al. 2004, JMLR 5"
CRITICS = "VAPO, arXiv:2504.05118"
ROUNDING = 1e-9


def known_numbers(experiment: Experiment, config: Config, found: dict[str, Any]) -> None:
  """The numbers of the setting that were computed independently."""
  known = config.known
  if known is None:
    return
  on_sum, on_first = (found[reward]["advantages"] for reward in ("sum", "first"))
  tokens = on_sum["tokens"].mean(axis=0)
  experiment.golden("sum: P(correct)", on_sum["correct"], known.correct)
  experiment.golden("sum: mean |A_t|, by token", tokens, known.sum_tokens)
  experiment.golden("sum: mean |r - V(x)|", on_sum["response"].mean(), known.sum_response)
  tokens = on_first["tokens"].mean(axis=0)
  experiment.golden("first: mean |A_t| of the first token", tokens[0], known.first_token)
  experiment.golden("first: mean |r - V(x)|", on_first["response"].mean(), known.first_token)


def identities(experiment: Experiment, config: Config, name: str, found: dict[str, Any]) -> None:
  """What must hold under either reward, whatever the policy."""
  telescoping, bias, last = [], [], []
  for row in found.values():
    telescoping.append(row["advantages"]["telescoping"])
    bias += [x["bias"].max() for x in row["rows"].values()]
    bias.append(row["grids"]["exact critic"]["bias"].max())
    last += [grid["bias"][-1].max() for grid in row["grids"].values()]
  say = lambda text: f"{name}: {text}"  # noqa: E731
  experiment.golden(say("largest |sum of A_t - (r - V(x))|"), max(telescoping), 0.0, atol=1e-12)
  experiment.golden(
    say("largest bias of a baseline, of A, and of GAE with an exact critic at any lambda"),
    max(bias),
    0.0,
    atol=ROUNDING,
  )
  experiment.golden(
    say("largest bias at lambda = 1, whatever the critic"), max(last), 0.0, atol=ROUNDING
  )
  for reward, row in found.items():
    _of_reward(experiment, f"{name}, {reward}", row)
  _of_first_token(experiment, config, name, found["first"])


def _of_first_token(experiment: Experiment, config: Config, name: str, first: Any) -> None:
  say = lambda text: f"{name}, first token decides: {text}"  # noqa: E731
  lambdas = np.array(config.lambdas)
  experiment.golden(
    say("largest mean |A_t| of a later one"),
    first["advantages"]["tokens"][:, 1:].max(),
    0.0,
    atol=1e-12,
  )
  # Only the first token has a gradient, and T - 1 tokens follow it: 0.95^3 = 0.857375.
  sizes = first["grids"]["uninformative critic"]["size"]
  decay = lambdas[:, None] ** (config.setting.horizon - 1) * np.ones(sizes.shape)
  experiment.golden(
    say("size of the update without a critic, lambda^(T-1)"),
    sizes,
    decay,
    atol=ROUNDING,
  )
  variance = first["grids"]["exact critic"]["variance"]
  experiment.golden(
    say("spread of the variance over lambda, exact critic"),
    (variance.max(axis=0) / variance.min(axis=0)).max() - 1.0,
    0.0,
    atol=ROUNDING,
  )


def _of_reward(experiment: Experiment, name: str, row: dict[str, Any]) -> None:
  rows, grids = row["rows"], row["grids"]
  experiment.golden(
    f"{name}: variance that V(x) adds to none is V E|S|^2 (V - 2 b*)",
    rows["V(x)"]["variance"] - rows["none"]["variance"],
    row["baseline"]["added"],
    rtol=ROUNDING,
    atol=ROUNDING,
  )
  experiment.golden(
    f"{name}: GAE of an uninformative critic is lambda^(T-1-t) (r - V(x))",
    row["decay"],
    0.0,
    atol=1e-12,
  )
  # E[g] of lambda^(T-1-t) (r - V(x)) is that of discount^(T-1-t) r - V(s_t).
  experiment.golden(
    f"{name}: bias of lambda without a critic is that of a discount",
    grids["uninformative critic"]["bias"],
    grids["discount"]["bias"],
    atol=ROUNDING,
  )
  # The bias is linear in the critic's error.
  experiment.golden(
    f"{name}: half the error of a critic, half the bias",
    grids["half as wrong critic"]["bias"],
    0.5 * grids["wrong critic"]["bias"],
    rtol=1e-7,
    atol=ROUNDING,
  )


def claims(experiment: Experiment, config: Config, name: str, found: dict[str, Any]) -> None:
  """What is said of baselines, critics and lambda."""
  for reward, row in found.items():
    _of_variance(experiment, f"{name}, {reward}", row["rows"])
    _of_lambda(experiment, config, f"{name}, {reward}", reward, row["grids"])


def _of_variance(experiment: Experiment, name: str, rows: dict[str, Any]) -> None:
  ratio = lambda a, b: rows[a]["variance"] / rows[b]["variance"]  # noqa: E731
  against_none = ratio("V(x)", "none")
  experiment.hypothesis(
    f"{name}: variance of V(x) over none, by prompt",
    "The baseline V(x) lowers the variance.",
    against_none,
    np.all(against_none < 1),
    source=BASELINES,
    explanation="Where right responses are the probable ones, their scores S are short. The best "
    "constant is b* = E[|S|^2 r] / E|S|^2, and V(x) is worse than none where V > 2 b*.",
  )
  critic = ratio("V(s)", "V(x)")
  experiment.hypothesis(
    f"{name}: variance of r - V(s_t) over r - V(x), by prompt",
    "A critic that knows every V(s) lowers the variance.",
    critic,
    np.all(critic < 1),
    source=CRITICS,
    explanation="Without lambda the return keeps all later surprises; a baseline nearer to the "
    "mean of the return at likely tokens is further from it at the unlikely ones, whose scores "
    "are long.",
  )
  exact = ratio("A", "V(x)")
  experiment.hypothesis(
    f"{name}: variance of the exact A over r - V(x), by prompt",
    "The exact advantage lowers the variance.",
    exact,
    np.all(exact < 1),
    source=GAE,
  )
  best = ratio("A - c*(s)", "A")
  experiment.hypothesis(
    f"{name}: variance of A with the best state baseline over that of A, by prompt",
    "A has almost the lowest variance: no state baseline takes off more than a tenth.",
    best,
    np.all(best > 0.9),
    source=f"{GAE}, section 2",
    explanation="In a peaked policy a rare token has a score of length near 1, a probable one of "
    "near 0. The best baseline is the advantage of the rare tokens, not 0.",
  )


def _of_lambda(
  experiment: Experiment, config: Config, name: str, reward: str, grids: dict[str, Any]
) -> None:
  at = config.lambdas.index(config.compared)
  if reward == "sum":  # of a first token that decides, all lambdas are equal
    variance = grids["exact critic"]["batch_variance"]
    experiment.hypothesis(
      f"{name}: variance at lambda = 0 and 1, exact critic, over the gradient's square",
      "The variance rises with lambda.",
      variance[[0, -1]],
      np.all(np.diff(variance) > 0),
      source=f"{GAE}, section 3",
    )
  bias = np.array([grids[key]["batch_raw_bias"][at] for key in ("wrong critic", "discount")])
  experiment.hypothesis(
    f"{name}: bias of lambda = {config.compared:g}, and of a discount of the same, wrong critic",
    "lambda introduces far less bias than a discount: less than half.",
    bias,
    bias[0] < 0.5 * bias[1],
    source=f"{GAE}, section 3",
  )
  flat = grids["uninformative critic"]
  experiment.hypothesis(
    f"{name}: cosine of lambda = {config.compared:g} without a critic, by prompt",
    "It weighs late tokens more, and so turns the update.",
    flat["cosine"][at],
    np.all(flat["cosine"][at] < 1 - 1e-6),
    source="VC-PPO, arXiv:2503.01491",
    explanation="Where only the first token has a gradient, its decay shrinks the update to "
    "lambda^(T-1) and cannot turn it.",
  )
  best = np.array(config.lambdas)[
    np.nanargmin(squared_error(grids["wrong critic"], config.samples), axis=0)
  ]
  experiment.hypothesis(
    f"{name}: lambda of least error with a wrong critic, at {config.samples[0]:,} to "
    f"{config.samples[-1]:,} responses per prompt",
    "A value between 0 and 1 is best at some of these batch sizes, and 1 at the largest.",
    best,
    np.any((best > 0) & (best < 1)) and best[-1] == 1,
    source=f"{GAE}, section 6",
    explanation="Where only the first token matters, lambda < 1 adds the critic's error and takes "
    "off no noise: the return has none after the first token.",
  )
