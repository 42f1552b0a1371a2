"""Grammars: what random walks through their masks say, masks of trees, forced tokens, ends, and what is refused."""
import collections
import json
import re
import sys

import jsonschema
import numpy as np
import pytest
import tokenizers

import tiny_tokenizers
from specjax import checkpoints
from specjax.serving import grammars
from specjax.serving.grammars import Grammar

MARKS = ["<tool_call>", "</tool_call>"]
MERGED = ['{"', '":', '",', ' "', "na", "me", "name", "ag", "age", '": ', '"}', "\n<", "tr", "ue", "true", "ab",
          b"\xed\x95", "한", b"\xea\xb5", "국", "한국"]
TOKENS = [bytes([byte]) for byte in range(256)] + MERGED
BYTES = tiny_tokenizers.byte_level(TOKENS, ["<|end|>", "<|stop|>"], eos="<|end|>")
MARKED = tiny_tokenizers.byte_level(TOKENS, ["<|end|>", *MARKS], eos="<|end|>")
LETTERS = [*"abcdefgnm{}\":, 0123456789", '{"', "한"]
PIECES = tiny_tokenizers.sentencepiece([*LETTERS, '":', "na", " a", "me", "name"], ["<unk>", "<s>", "</s>"],
                                       byte_tokens=bytes(range(256)), eos="</s>")
# No token for most bytes: some characters are there whole and not in parts, and others not at all.
POOR = tiny_tokenizers.sentencepiece([*LETTERS, "학"], ["<unk>", "</s>"], prefix=False, eos="</s>")
ROOT = ([0], [0], 1)


def with_marks_as_text():
  """The marks are added tokens but not special ones, as Qwen's: they are part of the text."""
  backend = tokenizers.Tokenizer.from_str(BYTES.files()["tokenizer.json"])
  backend.add_tokens([tokenizers.AddedToken(mark, special=False, normalized=False) for mark in MARKS])
  return checkpoints.Tokenizer(backend, byte_level=True, eos_ids=BYTES.eos_ids)


TEXT_MARKED = with_marks_as_text()

PERSON = {"type": "object", "properties": {"name": {"enum": ["a", "han", "한국"]},
                                           "age": {"type": "integer", "minimum": 0, "maximum": 120},
                                           "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
          "required": ["name", "age"], "additionalProperties": False}
COMPACT = PERSON | {"x-guidance": {"whitespace_flexible": False}}
TOOLS = [{"type": "function", "function": {
  "name": "weather", "description": "Weather of a day.", "parameters": {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"],
    "additionalProperties": False, "$defs": {"city": {"enum": ["서울", "Bonn"]}}, "x-guidance": COMPACT["x-guidance"]}}},
  {"name": "now"}]


def compiler(tokenizer, *, extra=0, eos_ids=None):
  return grammars.Compiler(tokenizer, tokenizer.vocab_size + extra, tokenizer.eos_ids if eos_ids is None else eos_ids)


def words(tokenizer, extra=0):
  return -(-(tokenizer.vocab_size + extra) // 32)


def ids_of(row):
  """The ids that a row of a mask allows."""
  return np.flatnonzero(np.unpackbits(row.astype("<u4").view(np.uint8), bitorder="little")).tolist()


def ids_at(matcher, tokenizer=BYTES):
  return ids_of(matcher.masks(*ROOT, words(tokenizer))[0])


def walk(matcher, tokenizer, random, longest=300):
  """Ids of a random text, sampled uniformly from the masks to its end, or None if that does not come."""
  said = []
  for _ in range(longest):
    token = int(random.choice(ids_at(matcher, tokenizer)))
    assert matcher.legal([token]) == 1
    matcher.advance([token])
    said.append(token)
    if token in tokenizer.eos_ids:
      return said
  return None


def texts(grammar, tokenizer, count=30):
  made, random = compiler(tokenizer), np.random.default_rng(0)
  found = [walk(made.matcher(grammar), tokenizer, random) for _ in range(count)]
  return [tokenizer.decode(said, skip_special_tokens=False).removesuffix(tokenizer.decode(
    said[-1:], skip_special_tokens=False)) for said in found if said]


def encode(tokenizer, text):
  """Ids of the single bytes of a text."""
  return [next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([b])) for b in text.encode()]


# --- texts ----------------------------------------------------------------------------------------------------------

TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])


@TOKENIZERS
def test_random_walks_through_a_schema_are_valid(tokenizer):
  said = texts(Grammar.json_schema(COMPACT), tokenizer)
  assert len(said) == 30 and len(set(said)) > 10
  for text in said:
    jsonschema.validate(json.loads(text), PERSON)


def test_random_walks_with_white_space_are_valid():
  said = texts(Grammar.json_schema(json.dumps(PERSON)), BYTES)
  assert len(said) >= 20 and any("\n" in text for text in said)
  for text in said:
    jsonschema.validate(json.loads(text), PERSON)


def test_random_walks_through_any_object_are_objects():
  said = texts(Grammar.json_object(), BYTES, count=60)
  assert len(said) >= 20 and all(isinstance(json.loads(text), dict) for text in said)


@TOKENIZERS
@pytest.mark.parametrize("pattern", ["[a-f]{2,4}-[0-9]{1,9}x?", "(한국|학/)+|a", r"\{\"n\": [0-9]\}"])
def test_random_walks_through_a_regex_match_it(tokenizer, pattern):
  said = texts(Grammar.regex(pattern), tokenizer)
  assert len(said) >= 20 and all(re.fullmatch(pattern, text) for text in said)


@TOKENIZERS
def test_random_walks_through_choices_are_choices(tokenizer):
  """Characters of several bytes are put together from tokens of one; quotes and newlines stand for themselves."""
  choices = ["한국어", "학생", "😀", "😁😀", "na", "name", 'a"b\\n\n', "\x01\x7f", "e\u0301"]
  said = texts(Grammar.choice(choices), tokenizer, count=60)
  assert len(said) == 60 and set(said) <= set(choices) and len(set(said)) >= 7


def test_random_walks_through_a_lark_grammar_are_its_sums():
  said = texts(Grammar.lark('start: N ("+" N)*\nN: /[0-9]{1,2}/'), BYTES)
  assert len(said) >= 20 and all(re.fullmatch(r"\d{1,2}(\+\d{1,2})*", text) for text in said)


@pytest.mark.parametrize("tokenizer", [BYTES, MARKED, TEXT_MARKED], ids=["text", "special", "added"])
@pytest.mark.parametrize("parallel", [False, True])
def test_random_walks_call_tools(tokenizer, parallel):
  """The marks are text without a token, special tokens, or added tokens that are text."""
  said = texts(Grammar.tool_calls(TOOLS, parallel=parallel), tokenizer)
  assert len(said) >= 20 and any(text.count("<tool_call>") > 1 for text in said) == parallel
  for text in said:
    calls = re.findall(r"(?s)<tool_call>\n(.*?)\n</tool_call>", text)
    assert "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls) == text
    for call in map(json.loads, calls):
      assert list(call) == ["name", "arguments"]
      assert call["arguments"] == {} if call["name"] == "now" else call["arguments"]["city"] in ("서울", "Bonn")


def test_names_and_keys_are_written_as_they_are():
  odd = 'f"\x7f한'
  call = '<tool_call>\n{"name": "f\\"\x7f한", "arguments": {}}\n</tool_call>'
  matcher = compiler(BYTES).matcher(Grammar.tool_calls([{"name": odd, "parameters": {"const": {}}}]))
  random = np.random.default_rng(0)
  assert BYTES.decode(walk(matcher, BYTES, random)) == call
  said = texts(Grammar.json_schema({"const": odd}), BYTES, count=1)
  assert [json.loads(text) for text in said] == [odd]


def test_a_mark_that_is_special_is_said_by_its_token():
  opening = MARKED.encode("<tool_call>")
  matcher = compiler(MARKED).matcher(Grammar.tool_calls(TOOLS))
  assert len(opening) == 1 and MARKED.is_special(opening[0]) and ids_at(matcher, MARKED) == opening
  assert matcher.forced(9)[:1] == opening
  (added,) = TEXT_MARKED.encode("<tool_call>")
  assert compiler(TEXT_MARKED).matcher(Grammar.tool_calls(TOOLS)).forced(1) == [added]


# --- trees ----------------------------------------------------------------------------------------------------------


def random_tree(made, grammar, random, prefix, nodes=14):
  """A tree of mostly legal tokens behind a committed prefix, with its tokens, parents, and each node's path."""
  tokens, parents, paths = [0], [0], [[]]
  for node in range(1, nodes):
    parent = int(random.integers(node))
    behind = made.matcher(grammar)
    if behind.legal([*prefix, *paths[parent]]) == len(prefix) + len(paths[parent]):
      behind.advance([*prefix, *paths[parent]])
      token = int(random.choice(ids_at(behind)))
    if random.random() < 0.2:
      token = int(random.integers(BYTES.vocab_size))
    tokens, parents, paths = [*tokens, token], [*parents, parent], [*paths, [*paths[parent], token]]
  return np.array(tokens, np.int32), np.array(parents, np.int32), paths


GRAMMARS = {"schema": Grammar.json_schema(PERSON), "compact": Grammar.json_schema(COMPACT),
            "object": Grammar.json_object(), "regex": Grammar.regex("([a-c]{2,4}-[0-9]+ ?)+"),
            "choice": Grammar.choice(["name", "names", "na", "한국", "한글", "학"]), "tools": Grammar.tool_calls(TOOLS),
            "branches": Grammar.lark('start: ("a" X "d" | "b" X "e" | "c" X start)\nX: /[cC]+/')}


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_masks_of_a_tree_are_those_of_its_paths(grammar):
  made, random = compiler(BYTES), np.random.default_rng(1)
  illegal = 0
  for _ in range(8):
    prefix = (walk(made.matcher(grammar), BYTES, random, 200) or [0])[:-1]
    prefix = prefix[:int(random.integers(len(prefix) + 1))]
    tokens, parents, paths = random_tree(made, grammar, random, prefix)
    matcher = made.matcher(grammar)
    matcher.advance(prefix)
    before = ids_at(matcher)
    rows = matcher.masks(tokens, parents, len(tokens) - 2, words(BYTES))
    for node, path in enumerate(paths[:-2]):
      fresh = made.matcher(grammar)
      fresh.advance(prefix)
      assert matcher.legal(path) == fresh.legal(path)
      if fresh.legal(path) < len(path):
        illegal += 1
        assert (rows[node] == 0xFFFFFFFF).all()
      else:
        fresh.advance(path)
        assert ids_of(rows[node]) == ids_at(fresh)
    assert (rows[-2:] == 0xFFFFFFFF).all()
    assert ids_at(matcher) == before and (matcher.masks(tokens, parents, len(tokens) - 2, words(BYTES)) == rows).all()
  assert illegal


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_an_id_is_legal_exactly_where_the_mask_allows_it(grammar):
  made, random = compiler(BYTES), np.random.default_rng(2)
  matcher = made.matcher(grammar)
  for _ in range(12):
    allowed = ids_at(matcher)
    assert [index for index in range(-1, BYTES.vocab_size + 2) if matcher.legal([index])] == allowed
    matcher.advance([random.choice(allowed)])
    if matcher.complete:
      break


def test_siblings_that_meet_in_one_state_of_the_lexer_keep_their_own_masks():
  """llguidance 1.9, rolled back from "ac" and led to "bc", allows "d" there: the mask of the branch that it left."""
  a, b, c, d, e = encode(BYTES, "abcde")
  rows = compiler(BYTES).matcher(GRAMMARS["branches"]).masks([0, a, c, b, c], [0, 0, 1, 0, 3], 5, words(BYTES))
  assert d in ids_of(rows[2]) and e not in ids_of(rows[2])
  assert e in ids_of(rows[4]) and d not in ids_of(rows[4])


def test_masks_never_change_what_is_committed():
  matcher = compiler(BYTES).matcher(GRAMMARS["branches"])
  a, b, c, d, e = encode(BYTES, "abcde")
  matcher.masks([0, a, c, d], [0, 0, 1, 2], 4, words(BYTES))
  matcher.advance([b, c])
  assert e in ids_at(matcher) and d not in ids_at(matcher)


def test_an_illegal_draft_is_cut_wherever_it_stands():
  """vllm#53777: one token that the grammar does not allow is a rejected draft and no error."""
  made, text = compiler(BYTES), encode(BYTES, "ab-12")
  grammar, wrong = Grammar.regex("[a-c]{2}-[0-9]{2,3}"), encode(BYTES, "z")
  for place in range(len(text)):
    matcher = made.matcher(grammar)
    draft = [*text[:place], *wrong, *text[place + 1:]]
    assert matcher.legal(draft) == place
    rows = matcher.masks([0, *draft], [0, *range(len(draft))], len(draft) + 1, words(BYTES))
    assert [bool((row == 0xFFFFFFFF).all()) for row in rows] == [node > place for node in range(len(draft) + 1)]
    assert wrong[0] not in ids_of(rows[place])
    with pytest.raises(ValueError, match=f"id {wrong[0]} at place {place} .* the grammar does not allow it"):
      matcher.advance(draft)


@pytest.mark.parametrize("token", [-1, 10**6, BYTES.vocab_size, BYTES.vocab_size + 3])
def test_a_draft_of_no_id_at_all_is_cut(token):
  matcher = compiler(BYTES, extra=5).matcher(Grammar.json_object())
  assert matcher.legal([token]) == 0
  rows = matcher.masks([0, token], [0, 0], 2, words(BYTES, 5))
  assert token not in ids_of(rows[0]) and (rows[1] == 0xFFFFFFFF).all()


@pytest.mark.parametrize("arguments, message", [
  (([0, 1], [0, 0], 0, 9), "size=0: it must be in 1 to 2"),
  (([0, 1], [0, 0], 3, 9), "size=3: it must be in 1 to 2"),
  (([0, 1], [0, 1], 2, 9), "node 1 has parent 1"),
  (([0], [0], 1, 8), "words=8: the ids of the vocabulary take 9"),
])
def test_trees_that_are_none_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    compiler(BYTES).matcher(Grammar.json_object()).masks(*arguments)


# --- ends -----------------------------------------------------------------------------------------------------------


def test_an_end_is_allowed_where_the_text_may_end_and_all_end_ids_are():
  end, stop = BYTES.encode("<|end|><|stop|>")
  matcher = compiler(BYTES, eos_ids=[stop, end]).matcher(Grammar.choice(["na", "name"]))
  assert not matcher.may_end and not matcher.complete and not {end, stop} & set(ids_at(matcher))
  matcher.advance(encode(BYTES, "na"))
  assert matcher.may_end and not matcher.complete and {end, stop} < set(ids_at(matcher))
  matcher.advance(encode(BYTES, "me"))
  assert matcher.may_end and matcher.complete and set(ids_at(matcher)) == {end, stop}
  assert matcher.forced(3) == [] and matcher.problem is None  # which of the two is a choice
  matcher.advance([stop])
  assert matcher.may_end and matcher.complete and set(ids_at(matcher)) == {end, stop}
  assert matcher.legal([end]) == 0 and matcher.forced(3) == []


def test_an_end_in_the_middle_of_a_draft_is_its_last_legal_token():
  (end,), text = BYTES.eos_ids, encode(BYTES, "name")
  made, grammar = compiler(BYTES), Grammar.choice(["na", "name"])
  assert made.matcher(grammar).legal([*text[:2], end, *text[2:]]) == 3
  assert made.matcher(grammar).legal([*text[:3], end, *text[3:]]) == 3
  rows = made.matcher(grammar).masks([0, *text[:2], end, end, text[2]], [0, 0, 1, 2, 3, 3], 6, words(BYTES))
  assert ids_of(rows[3]) == [end] and (rows[4:] == 0xFFFFFFFF).all()
  with pytest.raises(ValueError, match="at place 3"):
    made.matcher(grammar).advance([*text[:2], end, text[2]])


def test_without_end_ids_a_complete_text_is_all_there_is():
  (end,), text = BYTES.eos_ids, encode(BYTES, "name")
  matcher = compiler(BYTES).matcher(Grammar.choice(["na", "name"]), eos_ids=())
  rows = matcher.masks([0, *text, text[0]], [0, 0, 1, 2, 3, 4], 6, words(BYTES))
  assert all(end not in ids_of(row) for row in rows[:4]) and (rows[4:] == 0xFFFFFFFF).all()
  assert matcher.legal([*text, end]) == matcher.legal([*text, text[0]]) == 4
  matcher.advance(text)
  assert matcher.complete and matcher.may_end and matcher.forced(3) == []
  assert (matcher.masks(*ROOT, words(BYTES)) == 0xFFFFFFFF).all()


def test_an_end_id_that_is_text_to_the_tokenizer_is_none_to_a_grammar():
  a, b = encode(BYTES, "ab")
  made = compiler(BYTES, eos_ids=[b])
  matcher = made.matcher(Grammar.regex("a[bc]?"))
  matcher.advance([a])
  assert set(ids_at(matcher)) == {b, *encode(BYTES, "c")} and matcher.legal([b, a]) == 1
  with pytest.raises(ValueError, match=rf"eos_ids \[{a}\]: \[{a}\] are text to the tokenizer"):
    made.matcher(Grammar.regex("a"), eos_ids=[a])


def test_a_grammar_may_name_an_end_id():
  matcher = compiler(BYTES).matcher(Grammar.lark('start: "a" <|end|>'))
  assert not matcher.complete
  matcher.advance(encode(BYTES, "a"))
  assert matcher.complete and ids_at(matcher) == list(BYTES.eos_ids) == matcher.forced(2)
  assert matcher.legal([*BYTES.eos_ids] * 2) == 1
  matcher.advance(BYTES.eos_ids)
  assert matcher.complete and matcher.problem is None


# --- vocabularies ---------------------------------------------------------------------------------------------------


def test_ids_of_the_padded_head_are_never_allowed():
  grammar, size = Grammar.regex("(.|\n)*"), BYTES.vocab_size
  matcher = compiler(BYTES, extra=70).matcher(grammar)
  allowed = ids_of(matcher.masks(*ROOT, words(BYTES, 70))[0])
  assert len(allowed) > 100 and set(allowed) <= {*BYTES.eos_ids, *(i for i in range(size) if BYTES.token_bytes(i))}


def test_ids_that_the_target_lacks_are_never_allowed():
  made = grammars.Compiler(BYTES, 256 + MERGED.index("name"), ())
  matcher = made.matcher(Grammar.choice(["name"]))
  assert matcher.forced(9) == [*BYTES.encode("na"), *BYTES.encode("me")]
  assert max(ids_of(matcher.masks(*ROOT, words(BYTES))[0])) < 256 + MERGED.index("name")


def test_several_ids_of_one_text_are_all_allowed():
  """A letter, and the byte token of its byte."""
  letter, byte = [i for i in range(PIECES.vocab_size) if PIECES.token_bytes(i) == b"a"]
  matcher = compiler(PIECES).matcher(Grammar.regex("[ab]"))
  assert {letter, byte} < set(ids_at(matcher, PIECES))


def test_characters_whose_bytes_are_no_tokens_are_said_whole():
  """The first two bytes of both are the same, and forced, but no token spells them."""
  matcher = compiler(POOR).matcher(Grammar.choice(["한", "학"]))
  assert sorted(POOR.tokens()[i] for i in ids_at(matcher, POOR)) == ["학", "한"] and matcher.forced(5) == []


def test_a_text_that_the_vocabulary_cannot_finish_has_a_problem():
  matcher = compiler(POOR).matcher(Grammar.regex("a[xy]"))
  matcher.advance(POOR.encode("a"))
  assert matcher.problem == "no token of the vocabulary goes on" and matcher.complete and not matcher.may_end
  assert ids_at(matcher, POOR) == list(POOR.eos_ids)
  matcher.advance(POOR.eos_ids)
  unending = compiler(POOR).matcher(Grammar.regex("a[xy]"), eos_ids=())
  rows = unending.masks([0, *POOR.encode("a")], [0, 0], 2, words(POOR))
  assert ids_of(rows[0]) == POOR.encode("a") and (rows[1] == 0xFFFFFFFF).all()


def test_bytes_that_no_token_spells_are_a_problem_where_they_are_forced():
  letters = tiny_tokenizers.byte_level("abcd", ["<e>"], eos="<e>")
  made = compiler(letters)
  with pytest.raises(ValueError, match="'abx'.*no token of the vocabulary goes on"):
    made.check(Grammar.regex("abx"))
  matcher = made.matcher(Grammar.regex("a(bx|c)"))
  matcher.advance(letters.encode("a"))
  assert matcher.legal(letters.encode("c")) == 1
  rows = matcher.masks([0, *letters.encode("b")], [0, 0], 2, 1)
  assert ids_of(rows[1]) == list(letters.eos_ids) and matcher.problem is None


def test_special_tokens_are_no_text():
  """A text that spells one is said by other tokens, and a special token is allowed nowhere."""
  text = "<|stop|>"
  matcher = compiler(BYTES).matcher(Grammar.choice([text]))
  said = matcher.forced(99)
  assert BYTES.decode(said) == text and said[-1:] == list(BYTES.eos_ids) and matcher.legal(said) == len(said)


# --- forced tokens --------------------------------------------------------------------------------------------------


@TOKENIZERS
def test_what_a_schema_leaves_no_choice_about_is_forced(tokenizer):
  schema = {"type": "object", "properties": {"name": {"const": "na"}, "age": {"type": "integer"}},
            "required": ["name", "age"], "additionalProperties": False, **{"x-guidance": COMPACT["x-guidance"]}}
  matcher = compiler(tokenizer).matcher(Grammar.json_schema(schema))
  said = matcher.forced(99)
  spelt = tokenizer.decode(said)
  assert spelt.startswith('{"name":"na","age"') and '{"name":"na","age":'.startswith(spelt)
  assert matcher.forced(3) == said[:3] and matcher.forced(0) == [] and matcher.legal(said) == len(said)
  for token in said:  # the masks allow nothing else, so that the draft is accepted whole
    assert ids_at(matcher, tokenizer) == [token]
    matcher.advance([token])
  assert matcher.forced(5) == []
  with pytest.raises(ValueError, match="limit=-1"):
    matcher.forced(-1)


def test_an_end_that_must_come_is_forced_as_well():
  matcher = compiler(BYTES).matcher(Grammar.regex("x?name"))
  matcher.advance(encode(BYTES, "x"))
  assert matcher.forced(9) == [*BYTES.encode("name"), *BYTES.eos_ids]
  matcher.advance(matcher.forced(9)[:1])
  assert matcher.complete and matcher.forced(9) == list(BYTES.eos_ids)


def test_another_spelling_of_forced_bytes_is_illegal():
  matcher = compiler(BYTES).matcher(Grammar.choice(["name"]))
  assert matcher.forced(1) == BYTES.encode("name") and matcher.legal(encode(BYTES, "name")) == 0
  open_end = compiler(BYTES).matcher(Grammar.choice(["name", "nb"]))
  assert open_end.legal(encode(BYTES, "nb")) == 2


# --- compiling ------------------------------------------------------------------------------------------------------


def test_compiled_grammars_are_kept_up_to_a_bound(monkeypatch):
  made = grammars.Compiler(BYTES, BYTES.vocab_size, (), kept=2)
  counted = collections.Counter()
  inner = grammars._lark
  monkeypatch.setattr(grammars, "_lark", lambda grammar, ids: counted.update([grammar.source]) or inner(grammar, ids))
  for pattern in ["a", "b", "a", "c", "a", "b"]:
    made.check(Grammar.regex(pattern))
    made.matcher(Grammar.regex(pattern))
  assert counted == {"a": 1, "b": 2, "c": 1}


def test_requests_of_one_grammar_do_not_share_their_place():
  made = compiler(BYTES)
  first, second = (made.matcher(Grammar.choice(["na", "name"])) for _ in range(2))
  first.advance(encode(BYTES, "na"))
  assert first.may_end and not second.may_end and second.legal(encode(BYTES, "na")) == 2


@pytest.mark.parametrize("grammar, message", [
  (Grammar.json_schema({"type": "array", "uniqueItems": True}), r'compiled: .*Unimplemented keys: \["uniqueItems"\]$'),
  (Grammar.json_schema({"type": "dict"}), "Invalid type: dict$"),
  (Grammar.json_schema({"type": "integer", "minimum": 2, "maximum": 1}), "cannot be compiled"),
  (Grammar.tool_calls([{"name": "f", "parameters": {"type": "dict"}}]), "tool_calls .*Invalid type: dict$"),
  (Grammar.regex("(a"), "unclosed group$"),
  (Grammar.regex("a(?=b)"), "look-around.* is not supported$"),
  (Grammar.regex("a{0}"), "it allows the empty text only"),
  (Grammar.lark("start: WORD"), "(?s)WORD.*start: WORD"),
  (Grammar.lark("start: <|nope|>"), r"unknown special token: \"<\|nope\|>\""),
  ("[0-9]+", r"grammar='\[0-9\]\+': it must be a Grammar"),
  ({"type": "object"}, "grammar={'type': 'object'}: it must be a Grammar"),
])
def test_grammars_that_cannot_be_compiled_are_refused_with_the_reason(grammar, message):
  made = compiler(BYTES)
  for ask in (made.check, made.matcher):
    with pytest.raises(ValueError, match=message):
      ask(grammar)


@pytest.mark.parametrize("make, message", [
  (lambda: Grammar("xml", ""), "kind='xml'"),
  (lambda: Grammar("regex", b"a"), "source a text"),
  (lambda: Grammar.json_schema(True), "json_schema=True: a schema is a JSON object"),
  (lambda: Grammar.json_schema("{"), "json_schema='{' is not JSON"),
  (lambda: Grammar.json_schema("[]"), r"json_schema=\[\]"),
  (lambda: Grammar.json_schema({"const": float("nan")}), "cannot be written as JSON"),
  (lambda: Grammar.json_schema({"const": {1}}), "cannot be written as JSON"),
  (lambda: Grammar.regex(""), "regex=''"),
  (lambda: Grammar.regex(None), "regex=None"),
  (lambda: Grammar.lark(""), "lark=''"),
  (lambda: Grammar.choice([]), r"choice=\[\]: it must be a list of at least one text"),
  (lambda: Grammar.choice("yes"), "choice='yes'"),
  (lambda: Grammar.choice(["a", ""]), "none of them empty"),
  (lambda: Grammar.choice(["a", 1]), "none of them empty"),
  (lambda: Grammar.choice(["a", "b", "a"]), "'a' is there more than once"),
  (lambda: Grammar.tool_calls([]), r"tools=\[\]"),
  (lambda: Grammar.tool_calls({"name": "f"}), "at least one function"),
  (lambda: Grammar.tool_calls(["f"]), "tool 'f': it must be"),
  (lambda: Grammar.tool_calls([{"type": "custom", "name": "f"}]), "tool .*'custom'"),
  (lambda: Grammar.tool_calls([{"type": "function", "function": None}]), "'function': None"),
  (lambda: Grammar.tool_calls([{"name": ""}]), "tool {'name': ''}"),
  (lambda: Grammar.tool_calls([{"name": "f", "parameters": None}]), "'parameters': None"),
  (lambda: Grammar.tool_calls([{"name": "f"}, {"name": "f"}]), r"named \['f', 'f'\]"),
])
def test_what_is_no_grammar_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_grammars_are_equal_if_they_say_the_same():
  assert Grammar.json_schema(' {"type":  "object"}') == Grammar.json_schema({"type": "object"})
  assert len({Grammar.choice(["a"]), Grammar.choice(("a",)), Grammar.regex("a"), Grammar.json_object()}) == 3
  described = [TOOLS[0], {"type": "function", "function": TOOLS[1]}]
  assert Grammar.tool_calls(described) == Grammar.tool_calls(TOOLS) != Grammar.tool_calls(TOOLS, parallel=True)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
  monkeypatch.setitem(sys.modules, "llguidance", None)
  with pytest.raises(ValueError, match=r"llguidance .*pip install 'specjax\[serve\]'"):
    compiler(BYTES)


@pytest.mark.parametrize("eos_ids", [[-1], [BYTES.vocab_size]])
def test_end_ids_outside_of_the_vocabulary_are_refused(eos_ids):
  with pytest.raises(ValueError, match=rf"eos_ids \[{eos_ids[0]}\]: each must be in 0 to {BYTES.vocab_size - 1}"):
    compiler(BYTES, extra=9, eos_ids=eos_ids)
