"""Checkpoints and tokenizers of llama2.c (export version 0).

The model file is seven int32 (hidden_size, width of the MLP, layers, heads, key/value heads,
vocabulary, context) and then float32 tensors, each over all layers. A negative vocabulary says
that an output head of its own follows at the end. The rotary embedding turns adjacent pairs.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl_lm.lm.config import PolicyConfig
from jaxrl_lm.lm.rope import Rope
from jaxrl_lm.lm.text import known_ids

_HEADER = struct.Struct("<7i")
_LATER_VERSIONS = 0x616B3432  # first int of the versions that begin with a magic number
_BOS, _EOS, _FIRST_BYTE = 1, 2, 3
_GONE = -1  # a piece that was merged into the one before it


def read_model(path: Path) -> tuple[PolicyConfig, dict[str, np.ndarray]]:
  """Configuration and tensors of a model file.

  Args:
    path: of the file, which stays mapped while the tensors are in use.

  Returns:
    The configuration (theta 1e4, eps 1e-5, which the file does not say), and views of the tensors
    under the names of Hugging Face.

  Raises:
    ValueError: it is not such a file, or its size is not the one that its header says.
  """
  size = path.stat().st_size
  if size < _HEADER.size:
    raise ValueError(f"{path} is truncated: {size} bytes are less than the header of llama2.c")
  with path.open("rb") as file:
    header = _HEADER.unpack(file.read(_HEADER.size))
  if header[0] == _LATER_VERSIONS:
    raise ValueError(f"{path} is a later version of llama2.c; only export version 0 is supported")
  hidden, width, layers, heads, shared, vocabulary, context = header
  if min(*header[:5], abs(vocabulary), context) < 1 or hidden % heads:
    raise ValueError(f"{path} is not a model of llama2.c: its header is {header}")
  try:
    config = PolicyConfig(
      vocab_size=abs(vocabulary),
      hidden_size=hidden,
      intermediate_size=width,
      num_layers=layers,
      num_heads=heads,
      num_kv_heads=shared,
      head_dim=hidden // heads,
      max_length=context,
      rope=Rope(interleaved=True),
      tied=vocabulary > 0,
    )
  except ValueError as error:
    raise ValueError(f"{path}: its header is {header}: {error}") from error
  shapes = _shapes(config)
  expected = _HEADER.size + 4 * sum(math.prod(shape) for _, shape in shapes)
  if size != expected:
    raise ValueError(
      f"{path} is truncated or of another format: {size} bytes, its header says {expected}"
    )
  return config, _views(path, shapes)


def _shapes(config: PolicyConfig) -> list[tuple[str, tuple[int, ...]]]:
  """Tensors in the order of the file; "{}" stands for the layer."""
  layers, hidden, width = config.num_layers, config.hidden_size, config.intermediate_size
  shared = config.num_kv_heads * config.head_dim
  table = (config.max_length, config.head_dim // 2)
  shapes = [
    ("model.embed_tokens.weight", (config.vocab_size, hidden)),
    ("model.layers.{}.input_layernorm.weight", (layers, hidden)),
    ("model.layers.{}.self_attn.q_proj.weight", (layers, hidden, hidden)),
    ("model.layers.{}.self_attn.k_proj.weight", (layers, shared, hidden)),
    ("model.layers.{}.self_attn.v_proj.weight", (layers, shared, hidden)),
    ("model.layers.{}.self_attn.o_proj.weight", (layers, hidden, hidden)),
    ("model.layers.{}.post_attention_layernorm.weight", (layers, hidden)),
    ("model.layers.{}.mlp.gate_proj.weight", (layers, width, hidden)),
    ("model.layers.{}.mlp.down_proj.weight", (layers, hidden, width)),
    ("model.layers.{}.mlp.up_proj.weight", (layers, width, hidden)),
    ("model.norm.weight", (hidden,)),
    ("", table),  # cosines and sines, which the configuration says too
    ("", table),
  ]
  return shapes if config.tied else [*shapes, ("lm_head.weight", (config.vocab_size, hidden))]


def _views(path: Path, shapes: list[tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
  numbers = np.memmap(path, np.dtype("<f4"), mode="r", offset=_HEADER.size)
  tensors: dict[str, np.ndarray] = {}
  start = 0
  for name, shape in shapes:
    end = start + math.prod(shape)
    tensor = numbers[start:end].reshape(shape)
    if "{}" in name:
      tensors |= {name.format(i): layer for i, layer in enumerate(tensor)}
    elif name:
      tensors[name] = tensor
    start = end
  return tensors


class Llama2cTokenizer:
  """Byte-pair encoding of llama2.c: merges in the order of scores, bytes for what is unknown.

  Attributes:
    bos_id: in front of every text. It ends one as well: the model writes it between stories.
    eos_ids: (1,).
    vocab_size: number of pieces.
    pieces, scores: bytes of each id, and its rank among merges: the higher, the earlier.
  """

  bos_id: int | None = _BOS
  eos_ids: tuple[int, ...] = (_BOS,)

  def __init__(self, path: Path, vocab_size: int):
    self.pieces, self.scores = _read_tokenizer(path, vocab_size)
    # The first of equal pieces.
    self._ids = {piece: i for i, piece in reversed(list(enumerate(self.pieces)))}
    self.vocab_size = vocab_size

  def encode(self, text: str) -> list[int]:
    """BOS and the ids of a text, as llama2.c encodes a prompt.

    Args:
      text: any; a space is put in front of it, as in pretraining.

    Returns:
      The ids; [BOS] for the empty text.
    """
    ids = [self._ids[b" "]] if text else []
    for character in text:
      data = character.encode()
      known = self._ids.get(data)
      ids += [_FIRST_BYTE + byte for byte in data] if known is None else [known]
    return [_BOS, *self._merged(ids)]

  def _merged(self, ids: list[int]) -> list[int]:
    """Merges the pair with the highest score, of equal ones the first, until none is left.

    The pairs wait in a heap. One that has changed since is not what it was put there as, and goes.
    """
    before, after = (list(range(shift, len(ids) + shift)) for shift in (-1, 1))
    waiting: list[tuple[float, int, int, int, int]] = []

    def wait(i: int) -> None:
      """For the piece at i and the one after it."""
      if i < 0 or after[i] == len(ids):
        return
      left, right = ids[i], ids[after[i]]
      merged = self._ids.get(self.pieces[left] + self.pieces[right])
      if merged is not None and self.scores[merged] > -np.inf:
        heapq.heappush(waiting, (-self.scores[merged], i, left, right, merged))

    for i in range(len(ids)):
      wait(i)
    while waiting:
      _, i, left, right, merged = heapq.heappop(waiting)
      second = after[i]
      if ids[i] != left or second == len(ids) or ids[second] != right:
        continue
      ids[i], ids[second], after[i] = merged, _GONE, after[second]
      if after[i] < len(ids):
        before[after[i]] = i
      wait(before[i])
      wait(i)
    return [i for i in ids if i != _GONE]

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids, without BOS and EOS.

    Args:
      ids: below `vocab_size`. After BOS, and at the start, the space of `encode` is dropped.

    Returns:
      The text; bytes that are not UTF-8 become U+FFFD.

    Raises:
      ValueError: an id is outside of the vocabulary.
    """
    data = b""
    begins = True
    for i in known_ids(ids, self.vocab_size):
      special = i in (_BOS, _EOS)
      if not special:
        piece = self.pieces[i]
        if _FIRST_BYTE <= i < _FIRST_BYTE + 256:
          piece = bytes([i - _FIRST_BYTE])
        data += piece.removeprefix(b" ") if begins else piece
      begins = special
    return data.decode(errors="replace")


def _read_tokenizer(path: Path, vocab_size: int) -> tuple[list[bytes], list[float]]:
  """Pieces and scores. The file does not say how many there are; the model does."""
  data = path.read_bytes()
  pieces: list[bytes] = []
  scores: list[float] = []
  at = 4  # the length of the longest piece comes first
  while at < len(data):
    if at + 8 > len(data):
      raise ValueError(f"{path} is truncated in piece {len(pieces)}")
    score, length = struct.unpack_from("<fi", data, at)
    at += 8 + length
    if length < 0 or at > len(data):
      raise ValueError(f"{path} is truncated in piece {len(pieces)}")
    pieces.append(data[at - length : at])
    scores.append(score)
  if len(pieces) != vocab_size:
    raise ValueError(
      f"{path} has {len(pieces)} pieces, the model a vocabulary of {vocab_size}: "
      "they do not belong together, or the file is truncated"
    )
  of_bytes = [f"<0x{byte:02X}>".encode() for byte in range(256)]
  if pieces[_FIRST_BYTE : _FIRST_BYTE + 256] != of_bytes or b" " not in pieces:
    raise ValueError(f"{path} is no tokenizer of llama2.c: it lacks the pieces of bytes, or ' '")
  return pieces, scores
