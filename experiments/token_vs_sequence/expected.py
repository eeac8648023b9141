"""What `experiments.token_vs_sequence` expects of its numbers, and what came out."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl
from configs.token_vs_sequence import Config
from experiments.harness.run import Experiment

GAE = "Schulman et al. 2016, arXiv:1506.02438"
GSPO = "GSPO, arXiv:2507.18071"
CURL = "Nota & Thomas 2020, arXiv:1906.07073"
THEOREM = "the policy gradient theorem, e.g. Sutton et al. 1999"
LABORATORY = "the laboratory"
ROUNDING = 1e-9


def two_normalisations(experiment: Experiment) -> None:
  """Two responses that the sum and the mean of their token log-probs rank in opposite order."""
  logprobs = jnp.array(
    [[-2.2320, -2.8010, -3.9580, -3.3960, -2.2290], [-4.4220, -1.5100, -3.0590, 0.0, 0.0]]
  )
  mask = jnp.arange(5)[None] < jnp.array([[5], [3]])
  # 2.232 + 2.801 + 3.958 + 3.396 + 2.229 = 14.616, over 5; 4.422 + 1.51 + 3.059 = 8.991, over 3.
  totals, means = (f(logprobs, mask) for f in (rl.sequence_logprob, rl.mean_logprob))
  experiment.golden("log-probs of two responses", totals, ("-14.616", "-8.991"))
  experiment.golden("the same per token: the other order", means, ("-2.923", "-2.997"))


def late_tokens(experiment: Experiment) -> None:
  """How much of a reward of 1 each of six tokens gets from the library's discounted returns."""
  rewards, mask = jnp.zeros((1, 6)).at[0, -1].set(1.0), jnp.ones((1, 6), jnp.bool_)
  returns = rl.discounted_returns(rewards, mask, discount=0.9)[0]
  # 0.9^5, 0.9^4, 0.9^3, 0.9^2, 0.9, 1: the last token gets all, the first one 0.59.
  powers = np.array([0.59049, 0.6561, 0.729, 0.81, 0.9, 1.0])
  experiment.golden("weights of six tokens, discounted returns, 0.9", returns, powers, atol=1e-12)


def identity(experiment: Experiment, config: Config, name: str, found: dict[str, Any]) -> None:
  """Token MDP = sequence bandit."""
  if config.known is not None and name == "table":
    known = config.known
    right, wrong = (found[f"length_{which}"].mean() for which in ("correct", "wrong"))
    experiment.golden("P(correct)", found["correct"], known.correct)
    experiment.golden("mean length of correct responses", right, known.length_correct)
    experiment.golden("mean length of wrong responses", wrong, known.length_wrong)
  for where, what in (
    ("parameters", "the two gradients of a response, in the policy's parameters"),
    ("log-probs", "the two coefficients of a log-prob, in any parameters"),
    ("one ratio", "a ratio per token and a ratio per response, on-policy"),
  ):
    experiment.golden(f"{name}: largest distance of {what}", found[where], 0.0, atol=1e-12)


def critic(experiment: Experiment, config: Config, name: str, found: dict[str, Any]) -> None:
  """A critic keeps the mean, and changes every sample."""
  middle = f"lambda {config.critic.gae_lambda:g}"
  unbiased = [*(f"exact critic, {x}" for x in ("lambda 1", middle, "lambda 0"))]
  unbiased.append("wrong critic, lambda 1")
  experiment.golden(
    f"{name}: largest bias of an exact critic, or of any at lambda = 1",
    max(found[row]["bias"].max() for row in unbiased),
    0.0,
    atol=ROUNDING,
  )
  apart = found["exact critic, lambda 1"]["apart"]
  experiment.hypothesis(
    f"{name}: distance of r - V(s_t) from r - V(x), sample by sample",
    "A critic breaks the identity.",
    apart,
    np.all(apart > 1e-3),
    source=LABORATORY,
  )
  for row in ("exact critic, lambda 1", "exact critic, lambda 0", f"wrong critic, {middle}"):
    ratio = found[row]["variance"] / found["sequence"]["variance"]
    experiment.hypothesis(
      f"{name}: variance of {row} over the sequence's",
      "A critic lowers the variance.",
      ratio,
      np.all(ratio < 1),
      source=GAE,
      explanation="A baseline nearer to the mean return at likely tokens is further from it at "
      "unlikely ones, whose scores are long; an error of the critic adds noise of its own.",
    )
  bias = found[f"wrong critic, {middle}"]["bias"]
  experiment.hypothesis(
    f"{name}: bias of a wrong critic, {middle}",
    "Below lambda = 1 a wrong critic biases the update.",
    bias,
    np.all(bias > 1e-4),
    source=f"{GAE}, section 3",
  )


def penalty(experiment: Experiment, name: str, found: dict[str, Any]) -> None:
  """A KL per token."""
  for way, rows in found.items():
    start = f"{name}, moved along {'the gradient' if way == 'gradient' else 'a random direction'}"
    experiment.golden(
      f"{start}: largest bias of a KL penalty per response, and per token in the return",
      max(rows[row]["bias"].max() for row in ("sequence", "token, to go")),
      0.0,
      atol=ROUNDING,
    )
    apart = rows["token, to go"]["apart"]
    experiment.hypothesis(
      f"{start}: distance of a KL per token from a KL per response, sample by sample",
      "A KL per token in the return breaks the identity, not the mean.",
      apart,
      np.all(apart > 1e-3),
      source=LABORATORY,
    )
    ratio = rows["token, to go"]["variance"] / rows["sequence"]["variance"]
    experiment.hypothesis(
      f"{start}: variance of the KL to go over that of the whole KL",
      "Leaving out the penalties of the past makes the update less noisy.",
      ratio,
      np.all(ratio < 1),
      source=THEOREM,
      explanation="The penalties of the past add a term of mean 0, correlated with the rest. "
      "Where the policy has moved towards the reward, right responses have a high log-ratio, so "
      "that the penalty cancels a part of the reward's noise; elsewhere either sign occurs.",
    )
    share = {
      row: rows[row]["bias"] / rows["no penalty"]["bias"]
      for row in ("token, immediate", "token, k3 in the loss")
    }
    for row, missed in share.items():
      experiment.hypothesis(
        f"{start}: bias of {row.removeprefix('token, ')}, as a part of the penalty's gradient",
        "A penalty that no earlier token is charged for is biased.",
        missed,
        np.all(missed > 1e-3),
        source=THEOREM,
      )


def clip(experiment: Experiment, config: Config, name: str, found: dict[str, Any]) -> None:
  """Off-policy: ratios and clips."""
  nats = np.array(config.clip.nats)
  for way, rows in found.items():
    start = f"{name}, moved along {'the gradient' if way == 'gradient' else 'a random direction'}"
    experiment.golden(
      f"{start}: largest bias of a ratio per response",
      rows["sequence ratio"]["bias"].max(),
      0.0,
      atol=ROUNDING,
    )
    apart = rows["token ratio"]["apart"].mean(axis=1)
    slope = np.diff(np.log(apart)) / np.diff(np.log(nats))
    experiment.hypothesis(
      f"{start}: power of the KL with which token ratios leave the sequence ratio, by distance",
      "The identity ends as the root of the KL: 0.5, within 0.03 where the KL is least.",
      slope,
      abs(slope[0] - 0.5) < 0.03,
      source=LABORATORY,
    )
    _of_variance(experiment, start, nats, rows)
    cosine = rows["token ratio"]["cosine"][-1]
    experiment.hypothesis(
      f"{start}: cosine of token ratios with grad J, {nats[-1]:g} nats",
      "What a token ratio leaves out turns the update little: above 0.95.",
      cosine,
      np.all(cosine > 0.95),
      source=GSPO,
      explanation="It leaves out the ratio of the states that are visited.",
    )
    _of_clips(experiment, start, nats, rows)


def _of_clips(experiment: Experiment, start: str, nats: np.ndarray, rows: dict[str, Any]) -> None:
  zero = {row: rows[f"{row} clip"]["zero"].mean(axis=1)[-2:] for row in ("token", "sequence")}
  experiment.hypothesis(
    f"{start}: share of tokens that the same band stops, per token and per response, at "
    f"{nats[-2]:g} and {nats[-1]:g} nats",
    "A band on the response stops more tokens.",
    [*zero["token"], *zero["sequence"]],
    np.all(zero["sequence"] > zero["token"]),
    source=f"{GSPO}, section 5",
  )
  cosines = [rows[f"{row} clip"]["cosine"][-1] for row in ("token", "sequence")]
  experiment.hypothesis(
    f"{start}: cosine of a clip per token and per response with grad J, {nats[-1]:g} nats",
    "Either clip leaves an ascent direction.",
    np.concatenate(cosines),
    np.min(cosines) > 0,
    source=LABORATORY,
    explanation="Where the policy has moved up the gradient, the clip stops the responses "
    "that made it move; the rest pulls back. That is what a trust region is for.",
  )


def _of_variance(
  experiment: Experiment, start: str, nats: np.ndarray, rows: dict[str, Any]
) -> None:
  ratio = rows["token ratio"]["variance"] / rows["sequence ratio"]["variance"]
  experiment.hypothesis(
    f"{start}: variance of token ratios over the sequence ratio, {nats[-1]:g} nats",
    "A ratio per token brings more noise than a ratio per response.",
    ratio[-1],
    np.all(ratio[-1] > 1),
    source=f"{GSPO}, section 3",
    explanation="The ratio of a response is the product of all of its tokens', and multiplies the "
    "score of every one of them.",
  )


def discount(experiment: Experiment, config: Config, name: str, found: dict[str, Any]) -> None:
  """The three meanings of a discount."""
  values = np.array(config.discounts)
  lowest = int(values.argmin())
  for meaning in ("returns", "objective", "prefactor"):
    cosine = found[meaning]["cosine"][lowest]
    experiment.hypothesis(
      f"{name}: cosine of a discount of {values[lowest]:g} in the {meaning} with grad J",
      "A discount turns the update.",
      cosine,
      np.all(cosine < 1 - 1e-4),
      source=LABORATORY,
      explanation="Where nearly all right responses are of one length, the discounted objective is "
      "J times a constant.",
    )
  experiment.golden(
    f"{name}: discounted returns with gamma^t are the objective's, largest difference",
    found["twice"],
    0.0,
    atol=1e-12,
  )
  experiment.golden(
    f"{name}: cosine of the discounted objective's update with its own gradient",
    found["objective"]["own"],
    np.ones(found["objective"]["own"].shape),
    atol=ROUNDING,
  )
  _of_length(experiment, name, found, lowest)
  own = found["returns"]["own"] - found["returns"]["cosine"]
  experiment.hypothesis(
    f"{name}: cosine of discounted returns with the discounted objective's gradient, less that "
    "with grad J",
    "They are nearer to the discounted objective than to J.",
    own.min(axis=1),
    np.all(own > 0),
    source=LABORATORY,
  )


def _of_length(experiment: Experiment, name: str, found: dict[str, Any], lowest: int) -> None:
  shorter = {
    meaning: found[meaning]["drift_correct"][lowest] - found["none"]["drift_correct"]
    for meaning in ("returns", "objective")
  }
  experiment.hypothesis(
    f"{name}: drift of correct lengths, discounted objective less grad J (tokens per unit of J)",
    "The discounted objective penalises length.",
    shorter["objective"],
    np.all(shorter["objective"] < 0),
    source=LABORATORY,
  )
  experiment.hypothesis(
    f"{name}: drift of correct lengths, discounted returns less grad J (tokens per unit of J)",
    "Discounted returns only weigh late tokens more: correct responses do not get shorter.",
    shorter["returns"],
    np.all(shorter["returns"] >= 0),
    source=LABORATORY,
    explanation="From any token on, the rest of the response is worth gamma^(what is left): every "
    "token is taught to end soon.",
  )


def curl(experiment: Experiment, found: dict[str, Any]) -> None:
  """Which meanings ascend a function."""
  for name, rows in found.items():
    experiment.golden(
      f"{name}: largest curl of the discounted objective's update",
      rows["objective"].max(),
      0.0,
      atol=1e-10,
    )
    for meaning in ("returns", "prefactor"):
      experiment.hypothesis(
        f"{name}: curl of a discount in the {meaning}",
        "It is the gradient of no function.",
        rows[meaning],
        np.all(rows[meaning] > 1e-6),
        source=CURL if meaning == "returns" else LABORATORY,
      )
