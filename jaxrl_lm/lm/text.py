"""Text <-> token ids: one small interface, and the tokenizer of a Hugging Face folder.

The one of llama2.c is in `llama2c`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxrl_lm.lm.checkpoint_files import optional_module

TOKENIZER = "tokenizer.json"


class Tokenizer(Protocol):
  """What a tokenizer can do.

  Attributes:
    bos_id: begins a text; None where the model has none.
    eos_ids: any of them ends a text.
    vocab_size: ids lie below it.
  """

  bos_id: int | None
  eos_ids: tuple[int, ...]
  vocab_size: int

  def encode(self, text: str) -> list[int]:
    """Ids of a text, with what the model expects in front of it (BOS).

    Args:
      text: any.

    Returns:
      The ids.
    """
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids, without special tokens.

    Args:
      ids: below `vocab_size`.

    Returns:
      The text; bytes that are not UTF-8 are U+FFFD.
    """
    ...


def known_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
  """Ids of a text as Python integers.

  Args:
    ids: to be decoded.
    vocab_size: they lie below it.

  Returns:
    The same.

  Raises:
    ValueError: one is outside of the vocabulary.
    TypeError: one is not an integer.
  """
  known = [operator.index(i) for i in ids]
  if outside := sorted({i for i in known if not 0 <= i < vocab_size}):
    raise ValueError(
      f"ids must lie in the tokenizer's [0, {vocab_size}), got {outside[:5]}; the sampler's "
      "valid_vocab keeps it from drawing others"
    )
  return known


class HuggingFaceTokenizer:
  """A tokenizer.json, run by the package `tokenizers`; a text is neither cut nor padded.

  Attributes:
    bos_id, eos_ids: from generation_config.json or config.json.
    vocab_size: one more than the largest id.
  """

  def __init__(self, path: Path, bos_id: int | None, eos_ids: tuple[int, ...]):
    try:
      self._tokenizer: Any = optional_module("tokenizers").Tokenizer.from_file(str(path))
    except ImportError:
      raise
    except Exception as error:  # what `tokenizers` raises for a damaged file is a bare Exception
      raise ValueError(f"{path} is not a tokenizer: {error}") from error
    self.bos_id = bos_id
    self.eos_ids = eos_ids
    self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
    if not self.vocab_size:
      raise ValueError(f"{path} has no tokens")
    # A file may hold what its last user cut and padded to: tokens would go, or appear, in silence.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()

  def encode(self, text: str) -> list[int]:
    """Ids of a text, with the special tokens that the file says to add.

    Args:
      text: any.

    Returns:
      The ids.
    """
    return list(self._tokenizer.encode(text).ids)

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids, without special tokens.

    Args:
      ids: below `vocab_size`.

    Returns:
      The text.

    Raises:
      ValueError: an id is outside of the vocabulary.
    """
    return self._tokenizer.decode(known_ids(ids, self.vocab_size))

  def save(self, folder: Path) -> None:
    """Writes tokenizer.json.

    Args:
      folder: exists.

    Returns:
      None.
    """
    self._tokenizer.save(str(folder / TOKENIZER))
