"""Generate: text of a pretrained model as it is drawn, each token in the colour of its log-prob.

Claim: what the sampler says of a token is what the scorer says of it: on the policy's own samples
the importance ratio of every token is 1, to the rounding of float32.
Setting: prefill and cached decoding against one forward pass over the whole text, same temperature.
Time: seconds after compilation, which takes some more.
Expected: max |ratio - 1| below 1e-4 in float32; a miss exits with an error. In bfloat16 the ratio
is printed and not judged: the mismatch is real, and what `corrections` is for.
Command: python -m experiments.generate --prompt "Once upon a time" [--model PATH] [--help]
Without --model it is stories260K, a model of children's stories, of the data folder.
"""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.segment import Segment, Segments
from rich.text import Text

import jaxrl_lm as rl
from configs.generate import Config
from experiments.harness.run import data_path
from jaxrl_lm.lm import pretrained, sampling, scoring

DEFAULT_MODEL = "stories260K/stories260K.bin"
TOLERANCE = 1e-4  # of the ratio, in float32
# (log-prob above which a token has the colour, colour, what the legend says)
COLOURS = (
  (np.log(1 / 2), "cyan", "p > 1/2"),
  (np.log(1 / 10), "green", "> 1/10"),
  (np.log(1 / 100), "yellow", "> 1/100"),
  (-np.inf, "red", "rarer"),
)
UNFINISHED = "\ufffd"  # what a tokenizer shows for the first bytes of a character


def colour(logprob: float) -> str:
  return next(name for above, name, _ in COLOURS if logprob > above or above == -np.inf)


def checkpoint(model: Path | None) -> Path:
  """The model's path, or that of the default model."""
  path = data_path(DEFAULT_MODEL) if model is None else model
  if path is None:
    raise FileNotFoundError(
      f"{DEFAULT_MODEL} was not found. Set JAXRL_LM_DATA to the folder that holds it, or name a "
      "model of your own: --model PATH (a folder of Hugging Face, or a .bin of llama2.c)"
    )
  return path


def load(config: Config) -> pretrained.Pretrained:
  dtypes = ("param_dtype", "compute_dtype") if config.bfloat16 else ()
  path = checkpoint(config.model)
  loaded = pretrained.load(path, **dict.fromkeys(dtypes, jnp.bfloat16))
  if loaded.tokenizer is None:
    raise FileNotFoundError(f"{path} comes without a tokenizer: there is no text to show")
  return loaded


def printable(text: str) -> str:
  """A text without what a terminal obeys: a model or a file may hold any control character."""
  return "".join(
    repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
  )


class Writer:
  """Prints tokens as text. A character of several tokens comes with the last of them.

  What is not a terminal gets the text as it is.
  """

  def __init__(self, console: Console, tokenizer: Any, prompt: Sequence[int], text: str):
    self.console, self.tokenizer, self.ids = console, tokenizer, list(prompt)
    self.shown = tokenizer.decode(self.ids)
    self._print(text, "bold")

  def add(self, token: int, logprob: float) -> None:
    self.ids.append(token)
    text = self.tokenizer.decode(self.ids)
    if not text.endswith(UNFINISHED):
      self._print(text[len(self.shown) :], colour(logprob))
      self.shown = text

  def close(self) -> None:
    self._print(self.tokenizer.decode(self.ids)[len(self.shown) :] + "\n", "")

  def _print(self, text: str, style: str) -> None:
    # A segment and not a `Text`, which drops some characters and expands tabs.
    text = printable(text) if self.console.is_terminal else text
    self.console.print(Segments([Segment(text, self.console.get_style(style))]), soft_wrap=True)


def ratio_error(
  loaded: pretrained.Pretrained, prompts: jax.Array, mask: jax.Array, samples: Any, config: Config
) -> float:
  """Largest |ratio - 1| of sampler and scorer over the tokens."""
  score = jax.jit(scoring.response_logprobs, static_argnums=0)
  temperature = config.temperature or 1.0  # greedy decoding reports log-probs at temperature 1
  scored = score(
    loaded.model,
    loaded.params,
    prompts,
    mask,
    samples.tokens,
    samples.mask,
    temperature=temperature,
    valid_vocab=loaded.tokenizer.vocab_size,
  )
  log_ratio = rl.token_log_ratio(scored, samples.untruncated_logprobs, samples.mask)
  return float(jnp.max(jnp.abs(jnp.expm1(log_ratio))))


def report(console: Console, found: dict[str, Any], config: Config) -> None:
  legend = Text("log-prob: ")
  for _, style, label in COLOURS:
    legend.append(f"{label}  ", style)
  console.print(legend)
  rate = found["tokens_per_second"]
  speed = "" if rate is None else f" at {rate:.0f} tokens/s"
  end = "a stop token" if found["finished"] else "the limit"
  first, mean = found["first_seconds"], found["mean_logprob"]
  console.print(
    f"{found['tokens']} tokens{speed}, the first after {first:.1f} s, ended by {end}; "
    f"mean log-prob {mean:.3f}",
    soft_wrap=True,
  )
  verdict = "not judged in bfloat16" if config.bfloat16 else f"expected below {TOLERANCE:g}"
  console.print(
    f"sampler / scorer: max |ratio - 1| = {found['ratio_error']:.1e}, {verdict}", soft_wrap=True
  )


def main(config: Config) -> dict[str, Any]:
  """Prints the text and the check; returns the numbers."""
  loaded = load(config)
  ids = loaded.tokenizer.encode(config.prompt)
  prompts, mask = sampling.pad_prompts([ids])
  stream = sampling.stream(
    loaded.model,
    loaded.params,
    prompts,
    mask,
    chunk=config.chunk,
    seed=config.seed,
    max_new_tokens=config.max_new_tokens,
    temperature=config.temperature,
    top_k=config.top_k,
    top_p=config.top_p,
    min_p=config.min_p,
    stop_tokens=loaded.tokenizer.eos_ids,
    valid_vocab=loaded.tokenizer.vocab_size,
  )
  writer = Writer(Console(highlight=False), loaded.tokenizer, ids, config.prompt)
  marks = [(time.perf_counter(), 0)]
  # Both passes in float32 where products are rounded by default: that is not what is checked.
  with jax.default_matmul_precision("float32"):
    for samples in stream:
      count = int(samples.mask.sum())
      for token in range(marks[-1][1], count):
        writer.add(int(samples.tokens[0, token]), float(samples.untruncated_logprobs[0, token]))
      marks.append((time.perf_counter(), count))
    writer.close()
    error = ratio_error(loaded, prompts, mask, samples, config)
  # The first two results wait for their compilation.
  (begin, before), (end, after) = marks[min(2, len(marks) - 1)], marks[-1]
  found = {
    "text": writer.shown,
    "tokens": after,
    "finished": bool(samples.finished[0]),
    "mean_logprob": float(rl.mean_logprob(samples.untruncated_logprobs, samples.mask)[0]),
    "first_seconds": marks[1][0] - marks[0][0],
    "tokens_per_second": (after - before) / (end - begin) if after > before else None,
    "ratio_error": error,
  }
  report(writer.console, found, config)
  return found


def cli(arguments: Sequence[str] | None = None) -> None:
  """The command line.

  Raises:
    SystemExit: 1 when the ratio is not 1, 2 when an argument or the model is wrong, 130 when it is
      interrupted.
  """
  config = tyro.cli(
    Config, args=arguments, prog="python -m experiments.generate", description=__doc__
  )
  try:
    found = main(config)
  except KeyboardInterrupt:
    raise SystemExit(130) from None
  except (OSError, TypeError, ValueError, ImportError) as error:
    print(printable(str(error)), file=sys.stderr)
    raise SystemExit(2) from None
  if not config.bfloat16 and not found["ratio_error"] < TOLERANCE:
    raise SystemExit(1)


if __name__ == "__main__":
  cli()
