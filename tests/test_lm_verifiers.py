"""Answers, numbers, words and arithmetic in text: right, wrong, ambiguous and adversarial."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_lm.lm import arithmetic, number_tasks, problem_tasks, verifiers

MINUS = "\u2212"

# What is written -> its value; None = no number, several, or ambiguous.
NUMBERS = {
  "72": 72,
  "72.": 72,
  "72.0": 72,
  "72.00": 72,
  "0072": 72,
  "+72": 72,
  "**72**": 72,
  "72 clips": 72,
  "72kg": 72,
  "$72": 72,
  "\\$72": 72,
  "$72$": 72,
  "72 \u20ac": 72,
  "\u00a3 72": 72,
  "$72/hour": 72,
  "is...72": 72,
  "7.2e1": 72,
  "144/2": 72,
  "-72": -72,
  f"{MINUS}72": -72,
  "-$72": -72,
  "$-72": -72,
  f"{MINUS}$1,072.50": Fraction(-2145, 2),
  "--72": 72,  # a dash
  "1,234": 1234,
  "1,234,567.50": Fraction(2469135, 2),
  "1{,}234": 1234,
  "1\\,234": 1234,
  "1.000": 1,
  ".5": Fraction(1, 2),
  "-.5": Fraction(-1, 2),
  "1/2": Fraction(1, 2),
  "1 / 2": Fraction(1, 2),
  "-1/2": Fraction(-1, 2),
  "3 1/2 pies": Fraction(7, 2),
  "-3 1/2": Fraction(-7, 2),
  "\\frac{1}{2}": Fraction(1, 2),
  "-\\dfrac{1}{2}": Fraction(-1, 2),
  "3\\frac{1}{2}": Fraction(7, 2),
  "72\\text{ clips}": 72,
  "": None,
  "seventy-two": None,
  "71 or 72": None,
  "70-72": None,
  "3 x 24 = 72": None,
  "1,5": None,
  "1.5.2": None,
  "12,34": None,
  "1,2345": None,
  "1.000,50": None,
  "0,500": None,
  "12.05.2020": None,
  "1/2/3": None,
  "1/0": None,
  "\\frac{1}{0}": None,
  "2.5 1/2": None,
  "x2": None,
  "v1.5": None,
  "\uff17\uff12": None,  # full-width digits
  "7\u0662": None,  # an Arabic-Indic digit beside an ASCII one
  "7\u00b2": None,
  "7\u00bd": None,
  "7 \u00bd": None,
  "7^2": None,
  "0x48": None,
  "6x12": None,
  "_-5_": -5,
  "\u20135": -5,  # an en dash
  "- 5": None,  # a minus, or a dash
  "\u20145": None,
  "minus 5": None,
  "($5)": None,
  "(72)": 72,
  "72 m^2": 72,
  "72 cm^{3}": 72,
  "72 km2": 72,
  "72\\ \\text{m}^2": 72,
  "x^2 = 49": None,
  "10^3": 1000,
  "Rs.72": 72,
  "No.72": 72,
  "USD72": 72,
  "is.72": None,
  "\\frac12": Fraction(1, 2),
  "-\\dfrac12": Fraction(-1, 2),
  "\\frac123": None,
  "1\u00a0000": 1000,
  "1\u2009000": 1000,
  "1\u202f000": 1000,
  "1\\ 000": 1000,
  "1'000": 1000,
  "1 000": None,
  "12\u00a034": None,
  "72\u00a0kg": 72,
  "1e999": None,
  "9" * 5000: None,  # more digits than int() takes
}


@pytest.mark.parametrize(("text", "value"), NUMBERS.items(), ids=lambda x: str(x)[:20])
def test_a_number_is_read_as_it_is_meant_or_not_at_all(text, value):
  number = verifiers.read_number(text)
  assert (number and number.value) == value


def same(a, b):
  return verifiers.same_number(verifiers.read_number(a), verifiers.read_number(b))


EQUAL = [
  {"72", "72.", "72.0", "072", "$72", "7.2e1", "144/2", "72%", "72 percent", "72 \\%"},
  {"1,000", "1000", "1e3", "$1,000.00", "2000/2"},
  {"1/2", "0.5", ".50", "\\frac{1}{2}", "50%"},
  {f"{MINUS}3", "-3", "-3.0", "-$3"},
]


def test_numbers_are_the_same_however_they_are_written():
  for numbers in EQUAL:
    for a, b in itertools.product(numbers, repeat=2):
      assert same(a, b), (a, b)


def test_different_numbers_are_not_the_same():
  for one, other in itertools.combinations(EQUAL, 2):
    for a, b in itertools.product(one, other):
      assert not same(a, b), (a, b)
  for a, b in [("7", "72"), ("72", "-72"), ("1,5", "1,5"), ("50%", "5000%"), ("50%", "0.5%")]:
    assert not same(a, b), (a, b)
  for a, b in [("1/3", "0.333"), ("0.1", "0.10000000000000001"), ("", "")]:
    assert not same(a, b), (a, b)


@given(st.fractions(max_denominator=10**6), st.integers(0, 3), st.booleans())
def test_a_number_survives_being_written(value, zeros, unicode):
  minus = MINUS if unicode else "-"
  numerator = f"{abs(value.numerator):,}" if value.numerator % 2 else str(abs(value.numerator))
  text = f"{minus if value < 0 else ''}{numerator}.{'0' * zeros}/{value.denominator}"
  assert verifiers.read_number(f"so {text} of it.").value == value


# A solution -> the number that it ends on.
SOLUTIONS = {
  "48 + 24 = 72\n#### 72": 72,
  "#### 71\nNo:\n####  72  clips": 72,
  "48 + 24 = \\boxed{72}": 72,
  "\\boxed{71}, no, \\boxed{\\frac{144}{2}}": 72,
  "\\boxed{71}\n#### 72": 72,
  "She sold 48 and then 24, which is 72.": 72,
  "The answer is 72!": 72,
  "It takes 3 days to earn $72.": 72,
  "She has 7": 7,
  "#### 7": 7,
  "72\n#### unknown": None,
  "72\n####": 72,
  "\\boxed{72} clips\n####": 72,
  "#### 72 #### 72": 72,
  "#### 72 ####": 72,
  "#### Step 1\n6 * 12\n#### Final Answer\n$$\\boxed{72}$$": 72,
  "#### Final answer:\n72": 72,
  "#### Step 2: multiply\nThe answer is 72.": 72,
  "#### 1. Multiply\nThe answer is 72.": 72,
  "#### 72\n\nThat is 6 * 12.": 72,
  "#### unknown\n": None,
  "#### - 72": None,
  "72\n#### 71 or 72": None,
  "it is 72, so \\boxed{72": None,  # cut off: the next character may be a digit
  "the answer is 1,5": None,
  "no number": None,
  "": None,
}


@pytest.mark.parametrize(("text", "value"), SOLUTIONS.items())
def test_a_solution_ends_on_a_number(text, value):
  number = verifiers.final_number(text)
  assert (number and number.value) == value
  answer = verifiers.Number(Fraction(72), percent=False)
  assert problem_tasks.is_right(text, answer) == (value == 72)
  assert math.isnan(problem_tasks.is_right(text, None))


def test_an_answer_is_marked_only_if_it_is_one_number():
  marked = ["#### 72", "\\boxed{72}", "#### $1,000"]
  unmarked = ["72", "#### 71 or 72", "#### many", "\\boxed{}", "\\boxed{72", "### 72"]
  headings = ["#### Step 2: multiply", "#### Step 2\n72", "#### 1. Multiply\n72", "72\n####"]
  got = [problem_tasks.is_marked(text) for text in marked + unmarked + headings]
  assert got == [1.0] * 3 + [0.0] * 10


@given(st.text(st.sampled_from("0123456789.,-/$% ex\\{}\n"), max_size=60))
def test_what_is_in_front_of_the_last_number_changes_nothing(text):
  assert verifiers.last_number(f"{text} and 7") == verifiers.Number(Fraction(7), percent=False)


ADVERSARIAL = ["1", "1,", "-", "$", ".", " ", "!", "\u0661", "1 1/", "1/", "\\frac{", "\\frac{1}"]
ADVERSARIAL += ["\\boxed{", "####", "{", "}", "(", "1+", "((1)", "\U0001f600", "\x00", "dog", "do"]


@pytest.mark.parametrize("piece", ADVERSARIAL)
def test_no_text_is_slow_or_breaks_a_verifier(piece):
  for text in (piece * 30_000, f"#### {piece * 30_000}", f"\\boxed{{{piece * 30_000}}}"):
    start = time.process_time()
    verifiers.final_number(text)
    verifiers.read_number(text)
    verifiers.ends_sentence(text)
    verifiers.contains_word(text, "cat")
    arithmetic.value_of(text, [1])
    assert time.process_time() - start < 3.0  # 0.14 s was the most; a quadratic one takes minutes


@given(st.text())
def test_any_text_has_a_verdict(text):
  assert problem_tasks.is_right(text, verifiers.read_number("7")) in (0.0, 1.0)
  assert problem_tasks.is_marked(text) in (0.0, 1.0)
  assert verifiers.ends_sentence(text) in (True, False)
  assert isinstance(arithmetic.value_of(text, [1, 2]), Fraction | None)


def test_a_word_counts_where_it_is_whole():
  for text in ["A dog.", "Dog!", "the DOG's tail", '"dog"', "dogma, dogs, a dog", "hot-dog"]:
    assert verifiers.contains_word(text, "dog"), text
  for text in ["dogma", "hotdog", "dogs", "do g", "dog_1", "dog1", "dog\u00e9", "dog\u0301", ""]:
    assert not verifiers.contains_word(text, "dog"), text
  assert verifiers.contains_word("a red ball.", "red ball")
  assert verifiers.contains_word("a cafe\u0301.", "caf\u00e9")
  for word in ["", " dog", "dog.", "\n"]:
    with pytest.raises(ValueError, match="begin and end with a letter or digit"):
      verifiers.contains_word("text", word)


def test_a_sentence_ends_with_its_punctuation():
  for text in ["The end.", "Really?", "Run! ", '"Yes," he said. "Go!"', "(The end.)\n", "\u3002"]:
    assert verifiers.ends_sentence(text), text
  for text in ["The end\u2026", "end.\u00bb", "**end.**", "_The end._"]:
    assert verifiers.ends_sentence(text), text
  for text in ["", " ", "The end", "The end,", "The end:", "3.5", '"', ".)a", "**"]:
    assert not verifiers.ends_sentence(text), text


EXPRESSIONS = {
  "3+7": 10,
  " ( 25 - 3 ) * 2 ": 44,
  "25-3-7": 15,
  "25-(3-7)": 29,
  "3-25": -22,
  "25/3/7": Fraction(25, 21),
  "2+3*7": 23,
  "((((3))))": 3,
  "(25-3)*2=44": 44,
  "25\u00d73\u00f72\u22127": Fraction(61, 2),
  "7": 7,
  "007+3": 10,
  "(25-3)*2=45": None,
  "3+7=3+7": None,
  "3=": None,
  "25+25": None,  # there is one
  "4+3": None,  # another number
  "3**2": None,
  "3^2": None,
  "3//2": None,
  "-3+7": None,
  "+3": None,
  "3 7": None,
  "(3)(7)": None,
  "3+": None,
  "3+7)": None,
  "(3+7": None,
  "()": None,
  "": None,
  "3+()": None,
  "25/(3-3)": None,
  "25/(2*3-7+25/25)": None,
  "3.0+7": None,
  "3e1": None,
  "0x3": None,
  "__import__('os')": None,
  "3 if 7 else 2": None,
  "\u0663+7": None,  # an Arabic-Indic three
  "3+\u2167": None,
  "9" * 5000: None,
  "(" * 100_000: None,
  "(" * 100_000 + "3" + ")" * 100_000: 3,
}


@pytest.mark.parametrize(("text", "value"), EXPRESSIONS.items(), ids=lambda x: str(x)[:20])
def test_an_expression_has_the_value_of_arithmetic_or_none(text, value):
  assert arithmetic.value_of(text, [2, 3, 7, 25]) == value


def test_division_by_zero_has_no_value():
  assert arithmetic.value_of("25/(3-3)", [3, 3, 25]) is None
  assert arithmetic.value_of("25/(3-3+2)", [2, 3, 3, 25]) == Fraction(25, 2)


TREES = st.recursive(
  st.integers(0, 99), lambda x: st.tuples(x, st.sampled_from("+-*/"), x), max_leaves=12
)


def written(tree, parent=0):
  """Text with as few parentheses as precedence allows, its numbers, and its value by recursion."""
  if isinstance(tree, int):
    return str(tree), [tree], Fraction(tree)
  left, sign, right = tree
  level = 1 if sign in "+-" else 3
  a, first, x = written(left, level)
  b, second, y = written(right, level + 1)
  if x is None or y is None or (sign == "/" and y == 0):
    value = None
  else:
    value = {"+": x + y, "-": x - y, "*": x * y}.get(sign)
    value = x / y if value is None else value
  text = f"{a} {sign} {b}"
  return f"({text})" if level < parent else text, first + second, value


@given(TREES)
def test_an_expression_has_the_value_of_its_tree(tree):
  text, numbers, value = written(tree)
  assert arithmetic.value_of(text, numbers) == value
  assert arithmetic.value_of(text, numbers[1:]) is None


def test_verls_sequences_are_continued():
  assert number_tasks.continued("1,3:9,4") == "5,7,0,2"
  assert number_tasks.continued("9,8:9,3") == "7,6,5"  # 8 - 9 is 8 modulo 9
  assert number_tasks.continued("9,0:9,2") == "0,0"
  for prompt in ("1,3", "1,3:0,4", "a,b:9,4", ""):
    with pytest.raises(ValueError, match="a prompt must be a,b:m,n"):
      number_tasks.continued(prompt)


def test_every_reference_solution_of_gsm8k_is_right():
  default = Path(__file__).parents[2] / "shared" / "data"
  path = Path(os.environ.get("JAXRL_LM_DATA") or default) / "gsm8k" / "test.jsonl"
  if not path.exists():
    pytest.skip("gsm8k/test.jsonl not found (set JAXRL_LM_DATA)")
  problems = problem_tasks.read_gsm8k(path)
  solutions = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
  assert len(problems) == len(solutions) == 1319
  right = [
    problem_tasks.is_right(s, p.answer) * problem_tasks.is_marked(s)
    for s, p in zip(solutions, problems)
  ]
  assert sum(right) == 1319
  shifted = [*solutions[1:], solutions[0]]
  coincidences = sum(s.split("####")[1] == t.split("####")[1] for s, t in zip(solutions, shifted))
  wrong = sum(problem_tasks.is_right(s, p.answer) for s, p in zip(shifted, problems))
  assert wrong == coincidences < 50
