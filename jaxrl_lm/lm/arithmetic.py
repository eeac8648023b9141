"""Arithmetic in text, judged: an expression that uses given numbers, without `eval`.

Precedence is resolved with a stack (shunting yard), so nesting costs no recursion. There are whole
numbers of ASCII digits, + - * / and parentheses; no signs, powers or names. An expression that is
not understood, divides by zero or uses another number has no value.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

LONGEST_LITERAL = 18  # digits
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")
_SYMBOLS = str.maketrans("\u00d7\u00b7\u00f7\u2212", "**/-")  # times, dot, division, minus
_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2}
_OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
  "+": operator.add,
  "-": operator.sub,
  "*": operator.mul,
  "/": operator.truediv,
}


def value_of(expression: str, numbers: Sequence[int]) -> Fraction | None:
  """The exact value of an expression that uses some of the numbers, each at most once.

  Args:
    expression: with or without "= result" at its end, which must then be its value.
    numbers: that may be used; one that stands there twice may be used twice.

  Returns:
    The value, or None: the expression is not understood (powers, signs, names, other digits),
    uses another number or one too often, divides by zero, or is not what it says it is.

  Example:
    >>> value_of("(25 - 3) * 2", [2, 3, 25]), value_of("25 + 25", [2, 3, 25])
    (Fraction(44, 1), None)
  """
  formula, equals, claim = expression.translate(_SYMBOLS).partition("=")
  tokens = _tokens(formula)
  if tokens is None or Counter(int(x) for x in tokens if x.isdigit()) - Counter(numbers):
    return None
  value = _evaluated(tokens)
  if not equals:
    return value
  claimed = _tokens(claim)
  is_number = claimed is not None and len(claimed) == 1 and claimed[0].isdigit()
  return value if claimed and is_number and value == int(claimed[0]) else None


def _tokens(text: str) -> list[str] | None:
  text = text.rstrip()
  tokens, at = [], 0
  while at < len(text):
    match = _TOKEN.match(text, at)
    if match is None or len(match[1] or "") > LONGEST_LITERAL:
      return None
    tokens.append(match[1] or match[2])
    at = match.end()
  return tokens


def _evaluated(tokens: list[str]) -> Fraction | None:
  values: list[Fraction] = []
  waiting: list[str] = []  # operators and open parentheses
  wants_value = True

  def reduce(level: int) -> None:
    while waiting and waiting[-1] != "(" and _LEVEL[waiting[-1]] >= level:
      right, left = values.pop(), values.pop()
      values.append(_OPERATIONS[waiting.pop()](left, right))

  try:
    for token in tokens:
      if (token == "(" or token.isdigit()) != wants_value:
        return None
      if token.isdigit():
        values.append(Fraction(int(token)))
        wants_value = False
      elif token == "(":
        waiting.append(token)
      elif token == ")":
        reduce(1)
        if not waiting:
          return None
        waiting.pop()
      else:
        reduce(_LEVEL[token])
        waiting.append(token)
        wants_value = True
    if wants_value:
      return None
    reduce(1)
  except ZeroDivisionError:
    return None
  return None if waiting else values[0]
