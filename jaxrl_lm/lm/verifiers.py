r"""Is the answer right? Final answers in text, and whether two are the same number.

Numbers are exact rationals, so that nothing is right by rounding. What can be read in two ways is
no number: "1,5" (a European decimal, or two numbers), "1,2345", "12.05.2020", digits that are not
ASCII, a dash that may or may not be a minus. The text of a policy under training is adversarial:
everything here is linear in its length, evaluates nothing, and answers None or False where it does
not understand.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

LONGEST_NUMBER = 60  # characters; a longer one is no number
LARGEST_EXPONENT = 30

# A run of digits, points and commas that does not go on inside a word or another run. What it
# means is decided afterwards, as a whole: no part of an ambiguous one is read as a number. The
# lookbehinds come after the digit, which makes the search for it fast.
_NUMBER = re.compile(
  r"(?P<run>\d(?<![^\W_]\d)(?<![^\W_][.,]\d)[\d.,]*)"
  r"(?:[eE](?P<exponent>[-+]?[0-9]+)(?!\w))?"
  r"(?: (?P<above>[0-9]+)(?= ?/ ?[0-9]))?"
  r"(?: ?/ ?(?P<below>\d[\d.,]*(?:/\d)?))?"
  r"(?P<percent> ?\\?%| percent\b)?"
)
# In front of it. A minus between two operands (5-7), or a dash (--5), is no sign.
_BEFORE = re.compile(
  r"(?P<minus>(?<![-\u2212\u2013)\]}])(?<![^\W_])[-\u2212\u2013])?"
  r"(?:\\?[$\u20ac\u00a3\u00a5] ?(?P<inner>[-\u2212\u2013])?)?"  # dollar, euro, pound, yen
  r"(?P<point>(?<!\.)\.)?\Z"
)
_LONGEST_BEFORE = 8
# What may or may not be a sign, and a number that goes on: minus 5, - 5 in front of no operand, a
# long dash, a power; 7½, 0x48, 6x12. What stands at the end of m2 or cm3 is a unit.
_DOUBTFUL_BEFORE = re.compile(
  r"(?:\b(?:minus|negative)[ \t]{1,3}|(?:^|[^-\u2013\u2212\s0-9)\]}%])[ \t]{0,3}[-\u2013\u2212]"
  r"[ \t]{1,3}|[\u2012\u2014\u2015][ \t]{0,3}|\^[ {]{0,2}-?|(?<=[0-9)])\*\*)"
  r"\\?[$\u20ac\u00a3\u00a5]?\Z",
  re.IGNORECASE,
)
_DOUBTFUL_AFTER = re.compile(
  r" ?[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070\u2074-\u2079\u2150-\u215e\u2189]"
  r"|(?!(?:mm|cm|dm|m|km|in|ft|yd|mi)[23]\b)[^\W\d_]{1,8}[0-9]"
)
_DOUBTFUL_WINDOW = 24  # characters; more than either can match
_ACCOUNTING = re.compile(r"\( ?\\?[$\u20ac\u00a3\u00a5][^()]*\)")  # ($5) may be -5
_DECIMAL = re.compile(r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]*)?")
_HASHES = "####"
_NUMBERED_HEADING = re.compile(r"[\W_]*(?:step|part|case|section|question|problem)\b\W*[0-9]", re.I)
_LISTED_HEADING = re.compile(r"[\s*_]*[0-9]{1,2}[.)][\s*_]+[^\W\d]")
_LATEX = (
  (re.compile(r"\\(?:text|mathrm|textbf|mathbf|textrm) *\{([^{}]*)\}"), r" \1 "),
  (re.compile(r"(?<=[0-9])(?=\\[dt]?frac)"), " "),
  (re.compile(r"\\[dt]?frac *\{([^{}]*)\} *\{([^{}]*)\}"), r"\1/\2"),
  (re.compile(r"\\[dt]?frac *([0-9])([0-9])(?![0-9])"), r"\1/\2"),
  (re.compile(r"\\!"), ""),
)
_NO_BREAK = "\u00a0\u2009\u202f"  # spaces inside of a number, or before its unit
_WRITTEN = (
  (
    re.compile(
      r"\{,\}|\\,|(?<=[0-9])(?:\\[ ;:]|~|['\u2019" + _NO_BREAK + r"])(?=[0-9]{3}(?![0-9]))"
    ),
    ",",
  ),
  (re.compile(r"\\[ ;:]|~|[" + _NO_BREAK + "]"), " "),
  (
    re.compile(
      r"\b(mm|cm|dm|m|km|in|ft|yd|mi|inch|inches|feet|meters|units)\}? ?\^\{?[23]\}?(?![0-9])"
    ),
    r"\1",
  ),
  (re.compile(r"\b(?:Rs|No|no)\.(?=[0-9])"), ""),
  (re.compile(r"\b(?:USD|US|EUR|GBP|INR|Rs)(?=[0-9$])"), ""),
  (re.compile(r"(?<![\w.,*^/])10 ?\^ ?(?:\{([0-9]{1,2})\}|([0-9]{1,2})(?![0-9]))"), r"1e\1\2"),
)
_ENDING = re.compile("[.!?\u2026\u3002\uff01\uff1f]['\"\u2019\u201d\u00bb)\\]*_]*")


class Number(NamedTuple):
  """A number as it was written.

  Attributes:
    value: what stands before the percent sign, if there is one.
    percent: whether there is one.
  """

  value: Fraction
  percent: bool


def read_number(text: str) -> Number | None:
  r"""The one number in a short text; words, units and currency around it do not matter.

  Reads signs (also the minus of Unicode), thousands separators, leading zeros, decimals, "72.",
  1e3, fractions (1/2, 3 1/2, \frac{1}{2}), percent. Units are not converted.

  Args:
    text: an answer.

  Returns:
    The number; None if there is none, several, or one that is ambiguous.

  Example:
    >>> read_number("$1,250.50 each").value, read_number("1,5"), read_number("71 or 72")
    (Fraction(2501, 2), None, None)
  """
  text = _plain(text)
  found = list(_NUMBER.finditer(text))
  return _number(found[0]) if len(found) == 1 and not _ACCOUNTING.search(text) else None


def _plain(text: str) -> str:
  """Without LaTeX, signs of currency in letters, and powers of units and of ten."""
  for pattern, replacement in (*(_LATEX if "\\" in text else ()), *_WRITTEN):
    text = pattern.sub(replacement, text)
  return text


def _number(match: re.Match[str]) -> Number | None:
  start = match.start()
  before = _BEFORE.search(match.string, max(0, start - _LONGEST_BEFORE), start)
  assert before is not None  # it matches the empty string
  window = match.string[max(0, start - _DOUBTFUL_WINDOW) : start]
  if _DOUBTFUL_BEFORE.search(window) or _DOUBTFUL_AFTER.match(match.string, match.end()):
    return None
  value = _decimal((before["point"] or "") + match["run"])
  exponent, above = int((match["exponent"] or "0")[:9]), match["above"]
  if value is None or len(match[0]) > LONGEST_NUMBER or abs(exponent) > LARGEST_EXPONENT:
    return None
  value *= Fraction(10) ** exponent
  if match["below"]:
    below = _decimal(match["below"])
    if not below or (above and value.denominator > 1):
      return None
    value = value + int(above) / below if above else value / below
  negative = bool(before["minus"]) != bool(before["inner"])
  return Number(-value if negative else value, bool(match["percent"]))


def _decimal(run: str) -> Fraction | None:
  """A run of digits, points and commas, without those that end a sentence."""
  run = run.rstrip(".,")
  known = len(run) <= LONGEST_NUMBER and _DECIMAL.fullmatch(run)
  return Fraction(run.replace(",", "")) if known else None


def same_number(a: Number | None, b: Number | None) -> bool:
  """Whether two numbers are equal, exactly.

  "50%" is 50 beside an answer of 50 and 1/2 beside one of 0.5: a question that asks for percent is
  answered with and without the sign. Two percentages are compared as they stand.

  Args:
    a, b: numbers; None equals nothing.

  Returns:
    Whether they are.

  Example:
    >>> half = read_number("1/2")
    >>> [same_number(half, read_number(text)) for text in (".50", "50%", "50", "2")]
    [True, True, False, False]
  """
  if a is None or b is None:
    return False
  if a.value == b.value:
    return True
  if a.percent == b.percent:
    return False
  percent, plain = (a, b) if a.percent else (b, a)
  return percent.value == 100 * plain.value


def hash_answer(text: str) -> str | None:
  r"""What stands after the last "####", to the end of its line; a heading of Markdown is no answer.

  A heading is "Step 2: ...", also of a part or a case, and in front of other lines "1. ..." and
  what has no digit ("Final answer:"); so is a last "####" with nothing after it.

  Args:
    text: a solution.

  Returns:
    The answer; None without the mark, or if the last one makes a heading.

  Example:
    >>> hash_answer("6 * 12 = 72\n#### 72 clips")
    '72 clips'
  """
  _, mark, rest = text.rpartition(_HASHES)
  line, _, after = rest.partition("\n")
  wordless, followed = not line.strip(), bool(after.strip())
  heading = _NUMBERED_HEADING.match(line) or (
    followed and (_LISTED_HEADING.match(line) or not any(map(str.isdigit, line)))
  )
  return None if not mark or wordless or heading else line.strip()


def boxed_answer(text: str) -> str | None:
  r"""What stands in the last \boxed{...}, braces balanced.

  Args:
    text: a solution.

  Returns:
    The answer; "" if the last one is not closed (it was cut off), None without one.

  Example:
    >>> boxed_answer(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
  """
  _, mark, rest = text.rpartition(r"\boxed{")
  if not mark:
    return None
  depth = 1
  for brace in re.finditer(r"[{}]", rest):
    depth += 1 if brace[0] == "{" else -1
    if not depth:
      return rest[: brace.start()].strip()
  return ""


def marked_answer(text: str) -> str | None:
  r"""The answer that is marked as such: after "####", else in \boxed{}.

  Args:
    text: a solution.

  Returns:
    The answer, whatever it is; None if none is marked.
  """
  hashes = hash_answer(text)
  return boxed_answer(text) if hashes is None else hashes


def last_number(text: str) -> Number | None:
  """The last number of a text.

  Args:
    text: a solution.

  Returns:
    The number; None if there is none, or if the last one is ambiguous.

  Example:
    >>> last_number("There are 71, no, 72.").value, last_number("It costs 1,5.")
    (Fraction(72, 1), None)
  """
  last = None
  for match in _NUMBER.finditer(_plain(text)):
    last = match
  return _number(last) if last else None


def final_number(text: str) -> Number | None:
  """The number that a solution ends on: of its marked answer, else its last one.

  A marked answer that is not one number is the answer all the same: it is not looked for elsewhere.

  Args:
    text: a solution.

  Returns:
    The number, or None.
  """
  marked = marked_answer(text)
  return last_number(text) if marked is None else read_number(marked)


def contains_word(text: str, word: str) -> bool:
  """Whether a word stands in a text as a whole word, in any case: "Dog's", not "dogma".

  Args:
    text: any.
    word: one or several, beginning and ending with a letter or digit.

  Returns:
    Whether it does.

  Raises:
    ValueError: `word` is not such a word.

  Example:
    >>> contains_word("The Dog ran.", "dog"), contains_word("Her dogma.", "dog")
    (True, False)
  """
  if not (word and word[0].isalnum() and word[-1].isalnum()):
    raise ValueError(f"word must begin and end with a letter or digit, got {word!r}")
  text, word = (unicodedata.normalize("NFC", x.casefold()) for x in (text, word))
  start = text.find(word)
  while start >= 0:
    around = text[max(0, start - 1) : start] + text[start + len(word) : start + len(word) + 1]
    if not any(x.isalnum() or x == "_" or unicodedata.combining(x) for x in around):
      return True
    start = text.find(word, start + 1)
  return False


def ends_sentence(text: str) -> bool:
  """Whether a text ends with the punctuation of a sentence, inside or outside of quotes.

  Args:
    text: any; space at its end does not matter.

  Returns:
    Whether it does.

  Example:
    >>> [ends_sentence(text) for text in ("The end.", '"Yes!"', "and then", "")]
    [True, True, False, False]
  """
  tail = text[-64:].rstrip()[-8:]
  return any(match.end() == len(tail) for match in _ENDING.finditer(tail))
