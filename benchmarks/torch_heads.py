"""The log-prob heads of PyTorch trainers, written plainly from what they compute.

Each returns the loss -sum(c log pi) and the gradients of hidden states and unembedding, float32, on
the CPU: a yardstick of speed for `benchmarks.linear_logprobs`. As a program it reads the inputs and
what they should give from a folder, lists its heads, and answers each name it is sent with the CPU
seconds of one call and its largest error relative to the largest number.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CHUNK = 512  # tokens, as in verl's fused head
TEMPERATURE = 1.0  # TRL and verl divide by it whatever it is

Head = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def cross_entropy(hidden: Tensor, matrix: Tensor, tokens: Tensor, coefficients: Tensor) -> Tensor:
  """The library's fused softmax and gather, on logits in memory."""
  losses = torch.nn.functional.cross_entropy(hidden @ matrix.T, tokens, reduction="none")
  return (coefficients * losses).sum()


def selective(hidden: Tensor, matrix: Tensor, tokens: Tensor, coefficients: Tensor) -> Tensor:
  """As in TRL: logits over the temperature, chosen one minus a log-sum-exp taken row by row."""
  logits = (hidden @ matrix.T) / TEMPERATURE
  chosen = logits.gather(-1, tokens[:, None])[:, 0]
  normalizer = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
  return -(coefficients * (chosen - normalizer)).sum()


class _Chunked(torch.autograd.Function):
  """Log-prob and entropy, some tokens at a time; the logits are computed again backward."""

  @staticmethod
  def forward(ctx, hidden: Tensor, matrix: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    parts = [_scores((h @ matrix.T) / TEMPERATURE, y) for h, y in _chunks(hidden, tokens)]
    ctx.save_for_backward(hidden, matrix, tokens)
    logprobs, entropy = (torch.cat(x) for x in zip(*parts, strict=True))
    return logprobs, entropy

  @staticmethod
  def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor):
    hidden, matrix, tokens = ctx.saved_tensors
    grad_hidden, grad_matrix = torch.empty_like(hidden), torch.zeros_like(matrix)
    for start in range(0, len(tokens), CHUNK):
      rows = slice(start, start + CHUNK)
      logprobs = ((hidden[rows] @ matrix.T) / TEMPERATURE).log_softmax(-1)
      p = logprobs.exp()
      entropy = -(p * logprobs).sum(-1)
      slope = -p * (logprobs + entropy[:, None]) * grad_entropy[rows, None]
      slope -= p * grad_logprobs[rows, None]
      slope.scatter_add_(-1, tokens[rows, None], grad_logprobs[rows, None])
      slope /= TEMPERATURE
      grad_hidden[rows] = slope @ matrix
      grad_matrix += slope.T @ hidden[rows]
    return grad_hidden, grad_matrix, None


def chunked(hidden: Tensor, matrix: Tensor, tokens: Tensor, coefficients: Tensor) -> Tensor:
  """As in verl's fused head: chunks of tokens, log-prob and entropy, recomputed backward."""
  logprobs, _ = _Chunked.apply(hidden, matrix, tokens)
  return -(coefficients * logprobs).sum()


HEADS: dict[str, Head] = {
  "PyTorch cross_entropy": cross_entropy,
  "PyTorch, as in TRL": selective,
  "PyTorch, as in verl": chunked,
}


def value_and_gradients(head: Head, arrays: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
  hidden, matrix, tokens, coefficients = arrays
  hidden, matrix = (x.detach().requires_grad_() for x in (hidden, matrix))
  loss = head(hidden, matrix, tokens, coefficients)
  return (loss.detach(), *torch.autograd.grad(loss, (hidden, matrix)))


def main() -> None:
  folder = Path(sys.argv[1])
  files = ("hidden", "matrix", "tokens", "coefficients", "value", "grad_hidden", "grad_matrix")
  hidden, matrix, tokens, *rest = (torch.from_numpy(np.load(folder / f"{x}.npy")) for x in files)
  coefficients, *wanted = rest
  print(json.dumps(list(HEADS)), flush=True)
  for line in sys.stdin:
    head = HEADS[json.loads(line)]
    start = time.process_time()
    got = value_and_gradients(head, (hidden, matrix, tokens.long(), coefficients))
    taken = time.process_time() - start
    errors = [
      ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, wanted, strict=True)
    ]
    print(json.dumps([taken, max(errors)]), flush=True)


def _scores(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
  logprobs = logits.log_softmax(-1)
  entropy = -(logprobs.exp() * logprobs).sum(-1)
  return logprobs.gather(-1, tokens[:, None])[:, 0], entropy


def _chunks(hidden: Tensor, tokens: Tensor) -> zip:
  return zip(hidden.split(CHUNK), tokens.split(CHUNK), strict=True)


if __name__ == "__main__":
  main()
