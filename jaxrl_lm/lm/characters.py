"""A tokenizer of single characters, for policies too small for words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

END = 0
_FIRST = 1


@dataclasses.dataclass(frozen=True)
class Characters:
  """One id for each character of an alphabet, from 1 on; 0 ends a text.

  Attributes:
    alphabet: the characters, each once.
    bos_id: None: a text begins with its first character.
    eos_ids: (0,).

  Example:
    >>> tokenizer = Characters("0123456789+=")
    >>> tokenizer.encode("12+"), tokenizer.decode([2, 3, 11, 0])
    ([2, 3, 11], '12+')
  """

  alphabet: str
  bos_id: int | None = dataclasses.field(default=None, init=False)
  eos_ids: tuple[int, ...] = dataclasses.field(default=(END,), init=False)

  def __post_init__(self) -> None:
    if not self.alphabet or len(set(self.alphabet)) < len(self.alphabet):
      raise ValueError(f"alphabet must hold characters, each once, got {self.alphabet!r}")

  @property
  def vocab_size(self) -> int:
    """Characters, and the end."""
    return _FIRST + len(self.alphabet)

  def encode(self, text: str) -> list[int]:
    """Ids of a text.

    Args:
      text: of characters of the alphabet.

    Returns:
      The ids.

    Raises:
      ValueError: a character is not in the alphabet.
    """
    ids = {character: i for i, character in enumerate(self.alphabet, _FIRST)}
    unknown = sorted(set(text) - ids.keys())
    if unknown:
      raise ValueError(f"{text!r} has characters outside of {self.alphabet!r}: {unknown}")
    return [ids[character] for character in text]

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids.

    Args:
      ids: any; 0 is left out, what is outside of the alphabet (a padded vocabulary) is U+FFFD.

    Returns:
      The text.
    """
    table = ("", *self.alphabet)
    return "".join(table[i] if 0 <= i < len(table) else "\N{REPLACEMENT CHARACTER}" for i in ids)
