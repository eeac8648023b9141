"""What `experiments.length_bias` expects of its numbers, and what came out."""

from __future__ import annotations

from typing import Any

import numpy as np

from configs.length_bias import Config
from experiments.harness.run import Experiment

DR_GRPO = "arXiv:2503.20783"
ROUNDING = 1e-9


def of_decomposition(
  experiment: Experiment, config: Config, start: Any, exact: Any, coupled: Any
) -> None:
  size = config.group_size
  if config.known is not None:
    known = config.known
    right, wrong = (start[f"length_{which}"].mean() for which in ("correct", "wrong"))
    experiment.golden("P(correct)", start["correct"], known.correct)
    experiment.golden("mean length of correct responses", right, known.length_correct)
    experiment.golden("mean length of wrong responses", wrong, known.length_wrong)
  ones = np.ones(len(start["correct"]))
  for name in ("sum", "constant length"):
    for scaling, row in exact[name].items():
      experiment.golden(f"cosine, {name}, {scaling}", row["cosine"], ones, atol=ROUNDING)
  experiment.golden(
    "size, sum, centred: (G - 1) / G",
    exact["sum"]["centred"]["scale"],
    ones * (size - 1) / size,
    rtol=ROUNDING,
  )
  per_response = [name for name in exact if name != "token mean"]
  cosines = {s: [exact[name][s]["cosine"] for name in per_response] for s in exact["sum"]}
  experiment.golden(
    "cosines with a group std are those without, where a response's weight is its own",
    cosines["group std"],
    np.array(cosines["centred"]),
    atol=ROUNDING,
  )
  _of_direction(experiment, config, exact)
  _of_drift(experiment, start, exact["sequence mean"]["centred"])
  _of_batch(experiment, exact, coupled)


def _of_direction(experiment: Experiment, config: Config, exact: Any) -> None:
  mean, token = exact["sequence mean"]["centred"], exact["token mean"]["centred"]
  low, high = config.cosine_band
  experiment.hypothesis(
    "cosine, 1/n",
    f"between {low:g} and {high:g} on all prompts",
    mean["cosine"],
    np.all((mean["cosine"] > low) & (mean["cosine"] < high)),
    source=DR_GRPO,
    explanation="the band is that of the table in the full setting; a network shares parameters",
  )
  experiment.hypothesis(
    "cosine, token mean over the group",
    "above 0.998, but not 1",
    token["cosine"],
    np.all((token["cosine"] > 0.998) & (token["cosine"] < 1.0 - ROUNDING)),
    source="a random denominator",
    explanation="the smaller the group, the more its number of tokens varies with the response",
  )
  between = [row["centred"]["cosine"] for name, row in exact.items() if name.startswith("1/n^")]
  ordered = np.array([exact["sum"]["centred"]["cosine"], *between, mean["cosine"]])
  experiment.hypothesis(
    "cosine, 1/n^alpha",
    "falls with alpha on all prompts",
    np.diff(ordered, axis=0).max(axis=0),
    np.all(np.diff(ordered, axis=0) < 0),
    source="interpolation",
  )
  less = mean["variance"] / exact["sum"]["centred"]["variance"]
  experiment.hypothesis(
    "relative variance, 1/n over sum",
    "below 1 on all prompts: the bias buys variance",
    less,
    np.all(less < 1.0),
    source="the laboratory",
    explanation="1/n also cuts the component along the gradient, by which noise is measured",
  )


def _of_drift(experiment: Experiment, start: Any, mean: Any) -> None:
  more = mean["drift_wrong"] - start["drift_wrong"]
  experiment.hypothesis(
    "drift of wrong lengths, 1/n less true gradient (tokens per unit of J)",
    "above 0 on all prompts: 1/n lengthens wrong answers",
    more,
    np.all(more > 0),
    source=DR_GRPO,
  )
  right = mean["drift_correct"] - start["drift_correct"]
  experiment.hypothesis(
    "drift of correct lengths, 1/n less true gradient (tokens per unit of J)",
    "mixed in sign over the prompts",
    right,
    np.any(right > 0) and np.any(right < 0),
    source="the laboratory",
    explanation="with few prompts the signs may agree",
  )
  experiment.hypothesis(
    "drift of wrong and correct lengths along the true gradient (tokens per unit of J)",
    "not 0: the true gradient is not neutral to length",
    [start["drift_wrong"].mean(), start["drift_correct"].mean()],
    abs(start["drift_wrong"].mean()) > 0.1 and abs(start["drift_correct"].mean()) > 0.1,
    source="the laboratory",
  )


def _of_batch(experiment: Experiment, exact: Any, coupled: Any) -> None:
  for name in ("sum", "sequence mean"):
    experiment.golden(
      f"cosine, {name}, batch std: as without",
      coupled[f"{name}, batch std"]["cosine"],
      exact[name]["centred"]["cosine"],
      atol=ROUNDING,
    )
  cosine = coupled["token mean over the batch"]["cosine"]
  experiment.hypothesis(
    "cosine, token mean over the batch",
    "nearer to 1 than over the group, but not 1",
    cosine,
    np.all((cosine > exact["token mean"]["centred"]["cosine"]) & (cosine < 1.0 - ROUNDING)),
    source="a random denominator",
  )
  sampled = {name: row["sampled"] for name, row in coupled.items() if "sampled" in row}
  if sampled:
    off = [abs(row["scale"] - row["exact"]) / row["scale_error"] for row in sampled.values()]
    experiment.golden(
      "exact and sampled size agree within 4 standard errors", np.max(off) < 4.0, True
    )


def of_filler(experiment: Experiment, config: Config, pure: Any) -> None:
  experiment.golden("filler: drift of the true gradient", pure["gradient"], np.zeros(2), atol=1e-9)
  for which, sign in (("wrong", 1.0), ("correct", -1.0)):
    mean, token = (np.array(pure[name][which]) * sign for name in ("sequence mean", "token mean"))
    verb = "lengthens" if sign > 0 else "shortens"
    experiment.hypothesis(
      f"filler: drift within the {which} branch, 1/n (tokens per unit of J)",
      f"1/n {verb} it, whatever the group size",
      mean * sign,
      np.all(mean > 0) and np.allclose(mean, mean[0], rtol=1e-6),
      source=DR_GRPO,
    )
    experiment.hypothesis(
      f"filler: drift within the {which} branch, token mean (tokens per unit of J)",
      f"token mean {verb} it a little, less with larger groups",
      token * sign,
      np.all(token > 0) and np.all(np.diff(token) < 0) and np.all(token < mean),
      source="a random denominator",
    )


def of_flows(experiment: Experiment, trained: Any) -> None:
  for optimiser, runs in trained.items():
    last = next(iter(runs.values()))["correct"].mean(axis=0)[-1]
    grown = {name: _growth(row, -1) for name, row in runs.items()}
    mean, own = grown["sequence mean"].mean(), grown["sum"].mean()
    half = {name: _growth(row, row["correct"].shape[1] // 2).mean() for name, row in runs.items()}
    error = _standard_error(grown["sequence mean"], grown["sum"])
    experiment.hypothesis(
      f"{optimiser}: wrong answers at P(correct) = {last:.2g}",
      "longer under 1/n than under the sum. Growth under 1/n, under the sum, their difference, its "
      "s.e. (tokens); share of the growth that is bias, and half way",
      [mean, own, mean - own, error, 1.0 - own / mean, 1.0 - half["sum"] / half["sequence mean"]],
      _above(mean - own, error),
      source=DR_GRPO,
      explanation="the seeds scatter more than the bias",
    )
    ends = [runs[name]["length_correct"][:, -1] for name in ("sequence mean", "sum")]
    less, error = ends[1].mean() - ends[0].mean(), _standard_error(*ends)
    experiment.hypothesis(
      f"{optimiser}: correct answers at P(correct) = {last:.2g}",
      "shorter under 1/n than under the sum: by how much, its s.e. (tokens)",
      [less, error],
      _above(less, error),
      source=DR_GRPO,
      explanation="what 1/n does to correct answers is mixed at the reference too, and Adam "
      "on exact updates moves rare prefixes as far as common ones",
    )


def _growth(run: Any, point: int) -> np.ndarray:
  """[seeds] growth of the mean length of wrong responses up to a point, tokens."""
  lengths: np.ndarray = run["length_wrong"]
  return lengths[:, point] - lengths[:, 0]


def _standard_error(*samples: np.ndarray) -> float:
  """Of a difference of means over seeds; 0 for exact flows."""
  return float(np.sqrt(sum(x.var(ddof=1) / len(x) for x in samples if len(x) > 1)))


def _above(x: float, error: float) -> bool | None:
  """Whether x > 0; None within two standard errors."""
  return None if abs(x) <= 2.0 * error else bool(x > 0)


def of_frontier(experiment: Experiment, config: Config, edge: Any) -> None:
  few, many = edge["best"][0], edge["best"][-1]
  experiment.hypothesis(
    f"alpha of least error at {config.frontier_groups[0]} and {config.frontier_groups[-1]} groups",
    "falls as more groups are averaged",
    [few, many],
    few > many,
    source="bias and variance",
  )
  experiment.hypothesis(
    "groups per prompt from which the sum has a lower error than 1/n",
    "above 1",
    edge["crossover"][-1],
    edge["crossover"][-1] > 1.0,
    source="bias and variance",
  )


def of_difficulty(experiment: Experiment, config: Config, weight: Any) -> None:
  experiment.golden(
    "weight of a std (ddof 0), family of policies: w_G(p)",
    weight["std"],
    weight["formula"],
    rtol=ROUNDING,
  )
  experiment.golden(
    "weight of a std (ddof 0), reference: w_G(p)",
    weight["reference"],
    weight["reference_formula"],
    rtol=ROUNDING,
  )
  experiment.golden(
    "weight of leave-one-out: 1", weight["leave one out"], np.ones(weight["std"].shape), rtol=1e-9
  )
  sizes = np.array(config.difficulty.group_sizes)
  experiment.golden(
    "weight of a std at G = 2: 1",
    weight["std"][sizes == 2],
    1.0 + 0.0 * weight["std"][sizes == 2],
    rtol=1e-9,
  )
  below = weight["std"] <= np.sqrt(np.maximum(sizes - 1, 1))[:, None] * (1 + ROUNDING)
  experiment.golden("weight of a std is at most sqrt(G - 1)", bool(below.all()), True)
  p = np.array(config.difficulty.correct)
  middle = np.abs(p - 0.3).argmin()
  limit = weight["std"][:, middle] * np.sqrt(p[middle] * (1 - p[middle]))
  experiment.hypothesis(
    f"weight of a std at p = {p[middle]:g} over 1 / sqrt(p (1 - p)), by group size",
    "rises to 1",
    limit,
    np.all(np.diff(limit) > 0) and np.all(limit < 1),
    source="large G",
  )


def of_curl(experiment: Experiment, turning: Any) -> None:
  curl, loop = turning["curl"], turning["loop"]
  flat = ("sum, centred", "sum, group std", "1/n, no baseline")
  experiment.golden("curl of " + "; ".join(flat), [curl[x] for x in flat], np.zeros(3), atol=1e-10)
  experiment.golden(
    "work around a loop: the same", [loop[x] for x in flat], np.zeros(3), atol=1e-10
  )
  named = {name: value for name, value in curl.items() if name.isupper()}
  if named:
    zero = ("DR_GRPO", "LUSPO", "REINFORCE", "RLOO", "REMAX", "OPO", "TOPR", "DRO")
    most = max(named[name] for name in zero)
    experiment.golden(f"largest curl of {', '.join(zero)}", most, 0.0, atol=1e-10)
    least = min(value for name, value in named.items() if name not in zero)
    experiment.hypothesis(
      "least curl of the other rows of the table",
      "not 0: a mean over tokens with a baseline ascends no function",
      least,
      least > 1e-3,
      source="the laboratory",
    )
  experiment.hypothesis(
    "curl, and work around a loop, of 1/n with centred rewards",
    "not 0: it ascends no function",
    [curl["1/n, centred"], loop["1/n, centred"]],
    curl["1/n, centred"] > 1e-3 and abs(loop["1/n, centred"]) > 1e-3,
    source="the laboratory",
  )


def of_groups(experiment: Experiment, real: Any) -> None:
  for name, table in real.items():
    got = {key: table[key]["share_wrong_longest"] for key in ("sum", "sequence mean")}
    experiment.hypothesis(
      f"{name}: push on the longest fifth of wrong answers, share under 1/n, under a sum, "
      "and of tokens",
      "1/n pushes long wrong answers less than a sum",
      [got["sequence mean"], got["sum"], table["share_tokens"]],
      got["sequence mean"] < got["sum"],
      source=DR_GRPO,
    )
