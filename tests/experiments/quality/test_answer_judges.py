"""Final answers of problems, ends of answers, use of the cache."""
import pytest

from experiments.quality import long_documents
from experiments.quality import math
from experiments.quality import stops
from requests_of import request


def right(text, reference):
  return math.judge(request(category="math", reference=reference), text)


@pytest.mark.parametrize("reference, text", [
    ("16 - 3 = <<16-3=13>>13\n#### 18", "She makes 9 * 2 = $18 a day. The answer is $18."), ("18", "It is 2 * 9 = 18"),
    ("1200", "#### 1,200"), ("1,200", "so \\boxed{1200} follows, unlike 7"),
    ("1.5", "The answer is: **1.50** metres, of 20"), ("-4", "x = -4"),
    ("0.75", "Final answer: 3/4"), ("23", "答えは２３歳です。"), ("44", "답은 44입니다. 총 5열"), ("3", "答案是3小时"), ("8", "الجواب هو ٨"),
    ("A", "The answer is (A)."), ("(B)", "so it is (C), no: (B)"), ("C", "**C**"), ("D", "\\boxed{D}"),
    ("Yes", "So the answer is Yes."),
    ("False", "not True is false, so: False"), ("> > }", "The answer is > > }"), ("1,5", "respuesta: 1,5")])
def test_right_answers(reference, text):
  assert right(text, reference) == {"answered": True, "right": True}


@pytest.mark.parametrize("reference, text, answered", [
    ("18", "The answer is 17, not 18.", True), ("18", "Nothing.", False), ("18", "", False),
    ("A", "The answer is B", True),
    ("A", "All of them", False), ("Yes", "No", True), ("Yes", "Yesterday", True), ("5", "1/0", False),
    ("5", "9" * 5000, False),
    ("12", "The answer is 120", True), ("3", "#### -3", True), ("7", "The answer is " * 2000, False)])
def test_wrong_answers(reference, text, answered):
  assert right(text, reference) == {"answered": answered, "right": False}


def test_without_a_reference():
  judge = lambda text: math.judge(request(category="math"), text)
  assert judge("It is 5.") == {"answered": True, "right": None} and judge("No idea") == {"answered": False,
                                                                                         "right": None}
  two = request(["1 + 1?", "And 2 + 2?"], category="math", reference="4")  # of which turn?
  assert math.judge(two, "4")["right"] is None


END = 9


@pytest.mark.parametrize("ids, reason, budget, cut_right", [
    ([1, 2, END], "stop", 5, True), ([1, END, 2], "stop", 5, False), ([1, END, END], "stop", 5, False),
    ([1, 2], "stop", 5, False),
    ([1, 2, END], "stop", 2, False), ([], "stop", 5, False), ([1, 2], "length", 2, True), ([1], "length", 2, False),
    ([1, 2, 3], "length", 2, False), ([1, END], "length", 2, False), ([END, 1], "length", 2, False),
    ([END], "stop", 1, True)])
def test_stops(ids, reason, budget, cut_right):
  found = stops.judge(request(), "x", token_ids=ids, finish_reason=reason, max_new_tokens=budget, eos_ids=(END, 8))
  assert found == {"stopped": reason == "stop", "cut_right": cut_right, "same_reason": None}


def test_reasons_are_compared():
  judge = lambda plain: stops.judge(request(), "x", token_ids=[1], finish_reason="length", max_new_tokens=1,
                                    plain_reason=plain)
  assert judge("length")["same_reason"] is True and judge("stop")["same_reason"] is False


@pytest.mark.parametrize("prompt, output, context, share",
                         [(200, 57, 2048, 1.0), (200, 58, 2048, 257 / 512), (1000, 1001, 2000, 1.0),
                                                            (1, 1, 2048, 1 / 256)])
def test_tokens_per_slot(prompt, output, context, share):
  found = long_documents.judge(request(), "x", prompt_tokens=prompt, output_tokens=output, max_context=context)
  assert found == {"prompt_tokens": prompt, "tokens_per_slot": pytest.approx(share)}


def test_lengths_are_pooled():
  record = lambda tokens, first, each: {"prompt_tokens": tokens, "time_to_first_token_ms": first,
                                        "time_per_output_token_ms": each}
  found = long_documents.pool([record(100, 1, 4), record(127, 3, None), record(128, 5, 6)],
                              [{"prompt_tokens": n, "tokens_per_slot": 0.5} for n in (100, 127, 128)])
  assert list(found) == ["64", "128"]
  assert found["64"] == {"answers": 2, "prompt_tokens": 113.5, "tokens_per_slot": 0.5, "time_to_first_token_ms": 2,
                         "time_per_output_token_ms": 4}
