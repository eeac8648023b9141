"""Tasks: what is rewarded, what is reported, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm import exact, lm
from jaxrl_lm.lm import number_tasks, problem_tasks, story_tasks, tasks, token_tasks, verifiers
from jaxrl_lm.lm.tasks import Component, Prompt, Responses, Task, score

LETTERS = lm.Characters(
  "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,!?#\n:+=*-/()\\{}"
)
ONE = Component("one", lambda r: np.ones(len(r.texts)))
PROMPT = Prompt("2+2=", (1, 2), "4")


def responses_to(prompts, texts, finished=None):
  """As if these texts had been sampled."""
  n = len(texts)
  finished = np.ones(n, bool) if finished is None else np.array(finished)
  return Responses(
    list(prompts), np.zeros((n, 1), np.int32), np.ones((n, 1), bool), finished, texts
  )


def numbers(task, texts, *, prompt=None, finished=None):
  """Component -> a list of rewards, for responses to one prompt."""
  prompts = [task.prompts[0] if prompt is None else prompt] * len(texts)
  scores = score(task, responses_to(prompts, texts, finished))
  return {name: values.tolist() for name, values in scores.components.items()}


# --- rewards


def test_components_are_reported_and_weighted():
  a = Component("length", tasks.per_text(lambda text, _: len(text)), 0.5)
  b = Component("right", tasks.per_text(lambda text, reference: text == reference), 2.0)
  scores = score(Task((PROMPT,), (), (a, b)), responses_to([PROMPT] * 3, ["4", "44", ""]))
  assert list(scores.components) == ["length", "right"]
  assert {x.dtype for x in (*scores.components.values(), scores.total)} == {np.dtype("float32")}
  assert scores.components["length"].tolist() == [1, 2, 0]
  assert scores.total.tolist() == [2.5, 1.0, 0.0]


def test_what_cannot_be_judged_is_nan_in_its_own_row_and_only_if_it_has_weight():
  unsure = Component("unsure", tasks.per_text(lambda text, _: math.nan if text == "?" else 1.0))
  task = Task((PROMPT,), (), (ONE, unsure))
  given = responses_to([PROMPT] * 3, ["a", "?", "b"])
  scores = score(task, given)
  np.testing.assert_array_equal(scores.components["one"], [1, 1, 1])
  np.testing.assert_array_equal(scores.components["unsure"], [1, np.nan, 1])
  np.testing.assert_array_equal(scores.total, [2, np.nan, 2])
  scores = score(task.weighted({"unsure": 0.0}), given)
  np.testing.assert_array_equal(scores.components["unsure"], [1, np.nan, 1])
  np.testing.assert_array_equal(scores.total, [1, 1, 1])


def test_a_response_that_is_cut_off_does_not_get_a_reward_that_is_for_finished_ones():
  reward = tasks.if_finished(tasks.per_text(lambda text, _: math.nan if text == "?" else 3.0))
  values = reward(responses_to([PROMPT] * 4, ["a", "a", "?", "?"], [True, False, True, False]))
  np.testing.assert_array_equal(values, [3, 0, np.nan, np.nan])


def test_booleans_and_integers_are_rewards():
  rewards = (
    Component("finished", lambda r: r.finished),
    Component("two", lambda r: 1 + r.mask[:, 0]),
  )
  scores = score(
    Task((PROMPT,), (), rewards), responses_to([PROMPT] * 2, ["a", "b"], [True, False])
  )
  assert scores.total.tolist() == [3.0, 2.0]


def failing(text, reference):
  if text == "bad":
    raise KeyError("no such thing")
  return 1.0


def raises(rewards, texts, match):
  task = Task((PROMPT,), (), tuple(rewards))
  with pytest.raises(lm.RewardError, match=match) as caught:
    score(task, responses_to([PROMPT] * len(texts), texts))
  return caught.value


def test_a_reward_that_raises_shows_the_sample():
  error = raises(
    [ONE, Component("fails", tasks.per_text(failing))], ["good", "bad"], "no such thing"
  )
  assert (error.component, error.prompt, error.text) == ("fails", PROMPT, "bad")
  assert isinstance(error, ValueError)
  assert isinstance(error.__cause__, KeyError)
  for part in ("'fails'", "KeyError", "'2+2='", "'4'", "'bad'"):
    assert part in str(error)


def test_a_reward_of_whole_batches_that_raises_shows_the_sample_too():
  def whole(responses):
    return np.array([1 / len(text) for text in responses.texts])

  error = raises([Component("whole", whole)], ["a", "b", "", "c"], "ZeroDivisionError")
  assert (error.component, error.text) == ("whole", "")
  small = Component("small", lambda r: 1 / 0 if len(r.texts) > 1 else np.ones(1))
  error = raises([small], ["a", "b"], "ZeroDivisionError")  # no sample's fault
  assert (error.component, error.text) == ("small", None)


def test_a_long_text_is_cut_in_the_message_only():
  error = raises([Component("x", tasks.per_text(lambda *_: None))], ["y" * 10**6], "TypeError")
  assert len(str(error)) < 5000
  assert "characters more" in str(error)
  assert len(error.text) == 10**6


@pytest.mark.parametrize(
  ("values", "match"),
  [
    (np.ones(3), r"must return \[N\] values, \(2,\), got shape \(3,\)"),
    (np.ones((2, 1)), r"got shape \(2, 1\)"),
    (1.0, r"got shape \(\)"),
    (np.array(["1", "2"]), "must return real numbers, got <U1"),
    ([None, 1.0], "must return real numbers, got object"),
    (np.ones(2) * 1j, "must return real numbers, got complex128"),
    (np.array([1.0, np.inf]), "must be finite in float32, or NaN .* got inf"),
    (np.array([1.0, -np.inf]), "got -inf"),
    (np.array([1.0, 1e39]), r"got 1e\+39"),
  ],
)
def test_what_is_no_reward_is_refused(values, match):
  error = raises([Component("odd", lambda r: values)], ["a", "b"], match)
  assert error.component == "odd"
  if "finite" in str(error):
    assert error.text == "b"


def test_a_total_that_overflows_is_refused():
  large = [Component(name, lambda r: np.full(len(r.texts), 3e38)) for name in "ab"]
  assert raises(large, ["a"], "finite in float32").component == "the total"


def test_fields_that_do_not_belong_together_are_refused():
  task, good = Task((PROMPT,), (), (ONE,)), responses_to([PROMPT] * 2, ["a", "b"])
  with pytest.raises(ValueError, match="1 texts for 2 prompts"):
    score(task, good._replace(texts=["a"]))
  with pytest.raises(ValueError, match="prompts must be one per row: 1 prompts, tokens are"):
    score(task, good._replace(prompts=[PROMPT], finished=np.ones(1, bool)))
  with pytest.raises(ValueError, match=r"finished must be of shape \(2,\), got \(2, 1\)"):
    score(task, good._replace(finished=np.ones((2, 1), bool)))
  with pytest.raises(TypeError, match="mask must be boolean, got float64"):
    score(task, good._replace(mask=np.ones((2, 1))))
  with pytest.raises(TypeError, match=r"tokens must be \[N, T\] integers"):
    score(task, good._replace(tokens=np.ones((2, 1))))
  with pytest.raises(ValueError, match="0 texts"):
    score(task, responses_to([], []))


# --- tasks


@pytest.mark.parametrize(
  ("parts", "error", "match"),
  [
    ({"prompts": ()}, ValueError, "prompts must hold at least one prompt, got none"),
    ({"prompts": (Prompt("x", ()),)}, ValueError, "the prompt 'x' has no tokens"),
    ({"held_out": (Prompt("x", ()),)}, ValueError, "the prompt 'x' has no tokens"),
    ({"prompts": (Prompt("x", "12"),)}, TypeError, "tokens of a prompt must be ints"),
    ({"prompts": (Prompt("x", (1.0,)),)}, TypeError, "tokens of a prompt must be ints"),
    ({"rewards": (ONE, ONE)}, ValueError, r"different names, got \['one'\] more than once"),
    ({"rewards": (ONE._replace(weight=math.nan),)}, ValueError, "weight of reward 'one' .* nan"),
    ({"rewards": (ONE._replace(weight=math.inf),)}, ValueError, "weight of reward 'one' .* inf"),
    ({"rewards": (ONE._replace(weight=0.0),)}, ValueError, "one of weight != 0"),
    ({"rewards": ()}, ValueError, "one of weight != 0"),
    # The policy sees tokens: another text or answer does not make it another prompt.
    ({"held_out": (Prompt("two and two", (1, 2), "four"),)}, ValueError, "'two and two' is both"),
  ],
)
def test_a_task_that_cannot_be_trained_on_is_refused(parts, error, match):
  with pytest.raises(error, match=match):
    Task(**{"prompts": (PROMPT,), "held_out": (Prompt("y", (1,)),), "rewards": (ONE,)} | parts)


def test_weights_are_replaced_by_name():
  task = number_tasks.countdown(LETTERS, prompts=4, held_out=2).weighted({"legal": 0.25})
  assert [(x.name, x.weight) for x in task.rewards] == [("right", 1.0), ("legal", 0.25)]
  with pytest.raises(ValueError, match=r"of \['right', 'legal'\], got \['legel'\]"):
    task.weighted({"legel": 1.0})
  with pytest.raises(ValueError, match="must be finite"):
    task.weighted({"legal": math.nan})


# --- text of responses


class Pieces:
  """A tokenizer of pieces, of which [1, 2] and [3] are the same text."""

  bos_id, eos_ids, vocab_size = None, (0,), 6
  pieces = ("", "a", "b", "ab", " ab", "\ud800")

  def encode(self, text):
    raise AssertionError("ids must never come from text")

  def decode(self, ids):
    return "".join(self.pieces[i] for i in ids)


def test_ids_pass_through_and_text_is_what_counts():
  ids = np.array([[1, 2, 0, 5], [3, 0, 5, 5], [4, 4, 4, 4], [5, 1, 5, 5]])
  mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]], bool)
  finished = np.array([True, True, False, False])
  prompts = [Prompt("b", (2,))] * 4
  responses = tasks.decode_responses(prompts, jnp.asarray(ids), mask, finished, Pieces())
  assert responses.texts == ["ab", "ab", " ab ab ab ab", "\ufffda"]  # a lone surrogate is no text
  np.testing.assert_array_equal(responses.tokens, ids)
  assert responses.tokens.dtype == np.int32
  texts = tasks.decode_responses(prompts, ids, mask, finished, None).texts
  assert texts == ["1 2 0", "3 0", "4 4 4 4", "5 1"]
  with pytest.raises(ValueError, match="read-only"):
    responses.tokens[0, 0] = 7
  with pytest.raises(ValueError, match=r"mask must be of shape \(4, 4\)"):
    tasks.decode_responses(prompts, ids, mask[:, :2], finished, None)


def test_a_tokenizer_that_drops_the_first_space_does_not_glue_words():
  """In text of its own " dog" begins with "dog", which after "hot" would be another word."""

  class Stripping(Pieces):
    pieces = ("", "hot", " dog", "dog")

    def decode(self, ids):
      return super().decode(ids).removeprefix(" ")

  ids = np.array([[2], [3]])
  made = tasks.decode_responses(
    [Prompt("hot", (1,))] * 2, ids, np.ones((2, 1), bool), np.zeros(2, bool), Stripping()
  )
  assert made.texts == [" dog", "dog"]


def test_a_character_cut_by_the_prompt_is_replaced():
  class Bytes(Pieces):
    def decode(self, ids):
      return bytes(ids).decode(errors="replace")

  first, second = "\u00e9".encode()
  made = tasks.decode_responses(
    [Prompt("?", (first,))],
    np.array([[second, 97]]),
    np.ones((1, 2), bool),
    np.ones(1, bool),
    Bytes(),
  )
  assert made.texts == ["\ufffda"]


# --- the tasks there are


def test_characters_round_trip():
  text = "abc (1+2)=3\n"
  assert LETTERS.decode([*LETTERS.encode(text), 0]) == text
  assert 0 not in LETTERS.encode(text)
  assert max(LETTERS.encode(LETTERS.alphabet)) == LETTERS.vocab_size - 1
  assert LETTERS.decode([1, LETTERS.vocab_size]) == "a\ufffd"
  with pytest.raises(ValueError, match="outside of"):
    LETTERS.encode("\u00e9")
  for alphabet in ("", "aa"):
    with pytest.raises(ValueError, match="each once"):
      lm.Characters(alphabet)


MADE = {
  "addition": partial(number_tasks.addition, lm.Characters(number_tasks.ADDITION_CHARACTERS)),
  "digits": partial(number_tasks.digits, lm.Characters(number_tasks.DIGITS_CHARACTERS)),
  "countdown": partial(number_tasks.countdown, lm.Characters(number_tasks.COUNTDOWN_CHARACTERS)),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_prompts_differ_and_depend_on_the_seed_only(make):
  task = make(prompts=40, held_out=10, seed=3)
  assert (len(task.prompts), len(task.held_out)) == (40, 10)
  both = task.prompts + task.held_out
  assert len({prompt.text for prompt in both}) == len({prompt.tokens for prompt in both}) == 50
  again, other = make(prompts=40, held_out=10, seed=3), make(prompts=40, held_out=10, seed=4)
  assert again.prompts + again.held_out == both
  assert other.prompts != task.prompts


def test_addition():
  task = MADE["addition"](digits=2, prompts=300)
  for prompt in task.prompts:
    a, b = prompt.text.removesuffix("=").split("+")
    assert int(a) + int(b) == int(prompt.reference)
    assert max(int(a), int(b)) < 100
  prompt = Prompt("65+63=", (1,), "128")
  found = numbers(
    task,
    ["128", " 128 ", "129", "1288", "", "821", "128", "0128"],
    prompt=prompt,
    finished=[True] * 6 + [False, True],
  )
  assert found["right"] == [1, 1, 0, 0, 0, 0, 0, 0]
  expected = [1, 1, 2 / 3, 3 / 4, 0, 1 / 3, 1, 0]
  np.testing.assert_allclose(found["characters"], expected, rtol=1e-6)
  MADE["addition"](digits=1, prompts=90, held_out=5)
  with pytest.raises(ValueError, match="found 100 different prompts where 101 were asked for"):
    MADE["addition"](digits=1, prompts=90, held_out=11)


def test_digits():
  task = MADE["digits"](modulus=7, most=5, prompts=150)
  for prompt in task.prompts:
    asked = list(map(int, prompt.text.replace(":", ",").split(",")))
    sequence = [*asked[:2], *map(int, prompt.reference.split(","))]
    assert len(sequence) == 2 + asked[3]
    assert all((c - b - b + a) % 7 == 0 for a, b, c in zip(sequence, sequence[1:], sequence[2:]))
  found = numbers(task, ["5,7,0,2", "5,7,0", "5,7,0,3"], prompt=Prompt("1,3:9,4", (1,), "5,7,0,2"))
  assert found["right"] == [1, 0, 0]
  np.testing.assert_allclose(found["characters"], [1, 5 / 7, 6 / 7], rtol=1e-6)


def reachable(chosen):
  """Every whole number that uses all of the numbers, by joining any two of them."""
  if len(chosen) == 1:
    return set(chosen)
  found = set()
  for i in range(len(chosen)):
    for j in range(len(chosen)):
      if i != j:
        rest = [x for k, x in enumerate(chosen) if k not in (i, j)]
        a, b = chosen[i], chosen[j]
        results = [a + b, a - b, a * b] + ([a // b] if b and a % b == 0 else [])
        found |= set().union(*(reachable([*rest, result]) for result in results))
  return found


def test_no_number_of_countdown_is_its_target():
  task = MADE["countdown"](numbers=3, largest=25, prompts=512)
  assert not [x.text for x in task.prompts if x.reference[1] in x.reference[0]]


def test_countdown_can_be_solved():
  task = MADE["countdown"](numbers=3, largest=9, prompts=60, held_out=10)
  for prompt in task.prompts + task.held_out:
    chosen, target = prompt.reference
    assert prompt.text == f"{','.join(map(str, chosen))}:{target}="
    assert list(chosen) == sorted(chosen)
    assert min(chosen) >= 1
    assert max(chosen) <= 9
    assert target in reachable(list(chosen))
  found = numbers(
    task,
    ["(25-3)*2", "2*(25-3)=44", "25+3", "25+25-6", "44", "(25-3)*2", "1/0", "25**2"],
    prompt=Prompt("2,3,25:44=", (1,), ((2, 3, 25), 44)),
    finished=[True] * 5 + [False, True, True],
  )
  assert found["right"] == [1, 1, 0, 0, 0, 0, 0, 0]
  assert found["legal"] == [1, 1, 1, 0, 0, 1, 0, 0]
  with pytest.raises(ValueError, match="numbers must be at least 2"):
    MADE["countdown"](numbers=1)
  with pytest.raises(ValueError, match="different prompts where"):
    MADE["countdown"](numbers=2, largest=1, prompts=4)


def test_stories():
  task = story_tasks.stories(LETTERS, word="dog")
  assert {x.reference for x in task.prompts} == {"dog"}
  assert tuple(x.text for x in task.held_out) == story_tasks.HELD_OUT_OPENINGS
  texts = ["She had a Dog. The end.", "Her dogma.", "A dog", "A dog.", "The end."]
  found = numbers(task, texts, finished=[True, True, True, False, True])
  assert found["word"] == [1, 0, 1, 1, 0]
  assert found["ending"] == [1, 1, 0, 0, 1]
  with pytest.raises(ValueError, match="word must begin"):
    story_tasks.stories(LETTERS, word="")
  # The word of the opening is not the policy's merit.
  task = story_tasks.stories(LETTERS, word="dog", openings=["A dog"], held_out=[])
  assert numbers(task, [" ran."])["word"] == [0]


def test_word_problems(tmp_path):
  path = tmp_path / "train.jsonl"
  rows = [
    {"question": f"What is {i} + {i}?", "answer": f"It is.\n#### {2 * i:,}"} for i in (36, 800)
  ]
  path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
  held_out = tmp_path / "test.jsonl"
  held_out.write_bytes(b'{"question": "What is \xff?", "answer": "#### 1"}')
  decoder = Pieces()
  decoder.encode = lambda text: list(text.encode())
  task = problem_tasks.gsm8k(path, decoder, held_out_path=held_out)
  assert "What is 36 + 36?" in task.prompts[0].text
  assert "What is \ufffd?" in task.held_out[0].text
  found = numbers(task, ["#### 72", "So 72", "#### 7", "nothing", "\\boxed{72.0}"])
  assert found["right"] == [1, 1, 0, 0, 1]
  assert found["marked"] == [1, 0, 1, 0, 1]
  assert numbers(task, ["1600", "1,600"], prompt=task.prompts[1])["right"] == [1, 1]
  short = problem_tasks.gsm8k(path, decoder, ask=lambda question: question)
  assert short.prompts[0].text == "What is 36 + 36?"
  unknown = problem_tasks.word_problems([problem_tasks.Problem("Why?", None)], decoder)
  scores = score(unknown, responses_to(unknown.prompts, ["#### 7"]))
  assert np.isnan(scores.total).all()
  assert scores.components["marked"] == 1
  with pytest.raises(ValueError, match="'Question: What is 36"):
    problem_tasks.gsm8k(path, decoder, held_out_path=path)


@pytest.mark.parametrize(
  "line", ["{", "[]", "3", '{"question": "x"}', '{"question": "x", "answer": 3}', "null"]
)
def test_a_line_that_is_no_problem_is_named(tmp_path, line):
  path = tmp_path / "train.jsonl"
  path.write_text('{"question": "x", "answer": "#### 1"}\n' + line)
  with pytest.raises(ValueError, match=r"train\.jsonl:2: no question and answer"):
    problem_tasks.read_gsm8k(path)
  path.write_text('{"question": "x", "answer": "#### many"}')
  with pytest.raises(ValueError, match=r"train\.jsonl:1: no number after ####"):
    problem_tasks.read_gsm8k(path)


# --- on tokens


@pytest.mark.parametrize(("vocabulary", "horizon", "end"), [(3, 4, None), (4, 4, 3), (4, 3, 0)])
def test_rewards_on_tokens_are_those_of_the_laboratory(vocabulary, horizon, end):
  language = exact.enumerate_language(vocabulary, horizon, end_token=end)
  rng = np.random.default_rng(0)
  garbage = rng.choice([-100, 2**31 - 1, 0, 1, 2], language.tokens.shape)
  tokens = np.where(language.mask, language.tokens, garbage).astype(np.int32)
  arguments = jnp.asarray(tokens), jnp.asarray(language.mask)
  kinds = vocabulary - (end is not None)
  sums = partial(token_tasks.modular_sum_reward, vocabulary=vocabulary, end_token=end)
  for function, exact_reward, targets in (
    (sums, exact.modular_sum_reward, np.arange(kinds, dtype=np.int32)),
    (
      token_tasks.first_token_reward,
      exact.first_token_reward,
      np.arange(vocabulary, dtype=np.int32),
    ),
  ):
    expected = exact_reward(language, targets)
    assert 0 < expected.sum() < expected.size

    @jax.jit
    def rewards(tokens, mask, targets, function=function):
      return jax.vmap(lambda target: function(tokens, mask, target=target))(targets)

    np.testing.assert_array_equal(rewards(*arguments, targets), expected)
    each = function(*arguments, target=np.full(len(tokens), targets[1]))
    np.testing.assert_array_equal(each, expected[1])


@pytest.mark.parametrize("end", [None, 3])
def test_tasks_on_tokens_give_the_laboratorys_rewards(end):
  language = exact.enumerate_language(4, 3, end_token=end)
  count = len(language.tokens)
  for task, reward in (
    (token_tasks.modular_sum(4, [2, 0], end_token=end), exact.modular_sum_reward),
    (token_tasks.first_token(4, [2, 0]), exact.first_token_reward),
  ):
    assert [prompt.tokens for prompt in task.prompts] == [(2,), (0,)]
    prompts = [prompt for prompt in task.prompts for _ in range(count)]
    tokens, mask = (np.concatenate([x, x]) for x in (language.tokens, language.mask))
    finished = np.zeros(2 * count, bool)
    total = score(task, tasks.decode_responses(prompts, tokens, mask, finished, None)).total
    np.testing.assert_array_equal(total.reshape(2, count), reward(language, [2, 0]))


def test_bad_targets_are_refused():
  with pytest.raises(ValueError, match=r"targets must lie in \[0, 3\), got 3"):
    token_tasks.modular_sum(4, [3], end_token=3)
  with pytest.raises(ValueError, match=r"targets must lie in \[0, 4\), got -1"):
    token_tasks.first_token(4, [-1])
  with pytest.raises(ValueError, match="at least one prompt"):
    token_tasks.first_token(4, [])
  tokens, mask = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool)
  with pytest.raises(ValueError, match="target must have the shape"):
    token_tasks.first_token_reward(tokens, mask, target=jnp.zeros((2, 1), jnp.int32))
  with pytest.raises(ValueError, match="tokens"):
    token_tasks.first_token_reward(tokens, mask[:, :2], target=0)
  with pytest.raises(ValueError, match="vocabulary must lie"):
    token_tasks.modular_sum_reward(tokens, mask, target=0, vocabulary=1, end_token=0)


# --- of every task


EVERY = {
  "addition": MADE["addition"](prompts=6, held_out=2),
  "digits": MADE["digits"](prompts=6, held_out=2),
  "countdown": MADE["countdown"](prompts=6, held_out=2),
  "stories": story_tasks.stories(LETTERS, word="dog"),
  "problems": problem_tasks.word_problems(
    [
      problem_tasks.Problem("a", verifiers.read_number("7")),
      problem_tasks.Problem("b", None),
    ],
    LETTERS,
    ask=str,
  ),
  "modular_sum": token_tasks.modular_sum(9, [0, 4, 8]),
  "first_token": token_tasks.first_token(9, [0, 4, 8]),
}
TEXTS = st.one_of(
  st.text(max_size=20),
  st.sampled_from(["7", "#### 7", "1+2", "10", "A dog.", "dogma", "5,7", "\\boxed{7}", "1,2"]),
)


@pytest.mark.parametrize("task", EVERY.values(), ids=EVERY)
@settings(max_examples=20)
@given(data=st.data())
def test_a_reward_knows_its_own_row_only(task, data):
  """Of one batch size, so that what runs on arrays is compiled once."""
  n = 6
  integers = st.lists(st.integers(0, 8), min_size=4 * n, max_size=4 * n)
  tokens = np.array(data.draw(integers), np.int32).reshape(n, 4)
  mask = (
    np.arange(4) < np.array(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))[:, None]
  )
  finished = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
  prompts = data.draw(st.lists(st.sampled_from(task.prompts), min_size=n, max_size=n))
  texts = data.draw(st.lists(TEXTS, min_size=n, max_size=n))
  order = data.draw(st.permutations(range(n)))
  given = Responses(prompts, tokens, mask, finished, texts)
  other = Responses(
    [prompts[i] for i in order],
    tokens[order],
    mask[order],
    finished[order],
    [texts[i] for i in order],
  )
  before, again, moved = score(task, given), score(task, given), score(task, other)
  for name in before.components:
    np.testing.assert_array_equal(before.components[name], again.components[name])
    np.testing.assert_array_equal(before.components[name][order], moved.components[name])
  np.testing.assert_array_equal(before.total[order], moved.total)
  np.testing.assert_array_equal(before.total, again.total)


def test_ten_thousand_texts_take_less_than_a_second():
  word = "She had 3 apples and bought 12 more for $4.50 each. "
  texts = [f"{word * 5}{i % 90}" for i in range(10_000)]
  for name in ("stories", "problems", "countdown", "addition"):
    task = EVERY[name]
    given = responses_to([task.prompts[0]] * len(texts), texts)
    start = time.process_time()
    score(task, given)
    # 0.4 s was the most (problems).
    assert time.process_time() - start < 2.0, name


def test_a_task_of_ones_own_takes_the_rewards_of_others():
  base = EVERY["stories"]
  short = Component("short", tasks.per_text(lambda text, _: -float(len(text))), 0.01)
  task = dataclasses.replace(base, rewards=(*base.rewards, short))
  scores = score(task, responses_to([task.prompts[0]], ["A dog."]))
  np.testing.assert_allclose(scores.total, [1.0 + 0.5 - 0.06], rtol=1e-6)


def test_the_page_on_tasks_shows_what_runs():
  page = Path(__file__).parents[1] / "docs" / "tasks.md"
  text = page.read_text()
  blocks = re.findall(r"^<!-- run -->\n```python\n(.*?)^```", text, re.M | re.S)
  assert len(blocks) == text.count("```python") == 2
  names = {}
  exec(compile("\n".join(blocks), "tasks.md", "exec"), names)
  assert names["responses"].texts == ["god", "godd", "tac"]
  assert names["scores"].components["right"].tolist() == [1, 0, 1]
  np.testing.assert_allclose(names["scores"].total, [1, -0.1, 1], rtol=1e-6)
  assert names["scores"].components["brevity"].tolist() == [0, -1, 0]
  own = blocks[0][blocks[0].index("tokenizer =") :].splitlines()
  assert sum(bool(line.strip()) for line in own) <= 15
  listed = set(re.findall(r"^\| `lm\.(\w+)\(", text, re.M))
  assert listed == {"stories", "gsm8k", *MADE, "modular_sum", "first_token"}
