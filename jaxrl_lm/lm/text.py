"""Text <-> token ids: one small interface, and the tokenizer of a Hugging Face folder.

The one of llama2.c is in `llama2c`.
"""

from __future__ import annotations

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


class HuggingFaceTokenizer:
  """A tokenizer.json, run by the package `tokenizers`.

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
    self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1

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
    """
    return self._tokenizer.decode([int(i) for i in ids])

  def save(self, folder: Path) -> None:
    """Writes tokenizer.json.

    Args:
      folder: exists.

    Returns:
      None.
    """
    self._tokenizer.save(str(folder / TOKENIZER))
