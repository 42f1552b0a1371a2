"""Tokenizers: the ids that the official ones give, text that streams in whole characters, chats by template."""
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import CheckpointError, TextStream, Tokenizer, resolve

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
GOLDEN = json.loads((FIXTURES / "golden_smollm2_tokens.json").read_text())
SCRIPTS = ["A family 👨‍👩‍👧‍👦 and 😀🇰🇷!", "오늘 서울의 날씨는 맑습니다", "اللغة العربية ١٢٣", "東京は日本の首都", "naïve ½ ﬁ"]

# Conversations of the reference runs with the ids that Transformers gave; the system turn is the template's own.
SYSTEM = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
          198]
ASSISTANT = [1, 520, 9531, 198]
CHATS = {
  "What are three good reasons to learn a second language? Explain each one.": [
    1, 4093, 198, 1780, 359, 1296, 1123, 3710, 288, 835, 253, 1796, 1789, 47, 16374, 971, 582, 30, 2, 198],
  "Summarize the following text in two sentences, reusing its wording.\n\nSpeculative decoding makes large language "
  "models faster. A small draft model proposes several tokens. The large target model checks all of the proposed "
  "tokens in one forward pass. Tokens that agree with the target distribution are accepted, and the first rejected token "
  "is replaced with a sample from the corrected distribution. Because memory bandwidth limits decoding, checking several "
  "tokens costs about as much as generating one.": [
    1, 4093, 198, 13764, 3298, 836, 260, 1695, 1694, 281, 827, 8545, 28, 42673, 624, 32778, 30, 198, 198, 10281, 11398,
    30081, 2022, 1507, 1789, 2859, 5331, 30, 330, 1165, 10049, 1743, 23829, 1545, 17837, 30, 378, 1507, 2370, 1743,
    11139, 511, 282, 260, 5433, 17837, 281, 582, 3703, 1301, 30, 1626, 11603, 338, 3387, 351, 260, 2370, 4225, 359,
    5985, 28, 284, 260, 808, 11238, 9624, 314, 7233, 351, 253, 4315, 429, 260, 19611, 4225, 30, 4651, 3500, 20090, 6583,
    30081, 28, 11160, 1545, 17837, 3499, 563, 347, 1083, 347, 10544, 582, 30, 2, 198],
  "Rewrite this function so that it also returns the index, keep everything else the same.\n\n```python\n"
  "def find_largest(values):\n    largest = values[0]\n    for value in values:\n        if value > largest:\n"
  "            largest = value\n    return largest\n```": [
    1, 4093, 198, 66, 846, 16064, 451, 1517, 588, 338, 357, 597, 6765, 260, 4218, 28, 1446, 3117, 1745, 260, 1142, 30,
    198, 198, 3725, 5367, 198, 1604, 1042, 79, 30489, 24, 6347, 727, 472, 3995, 446, 2396, 75, 32, 77, 472, 327, 1685,
    281, 2396, 42, 448, 585, 1685, 2986, 3995, 42, 629, 3995, 446, 1685, 472, 1003, 3995, 198, 3725, 2, 198],
}


@pytest.fixture(scope="module")
def smollm():
  return Tokenizer.from_gguf(resolve("smollm2-135m"))


@pytest.mark.parametrize("content, ids", CHATS.items(), ids=["chat", "summary", "code"])
def test_chat_gives_the_reference_ids(smollm, content, ids):
  assert smollm.chat([{"role": "user", "content": content}]) == SYSTEM + ids + ASSISTANT


@pytest.mark.parametrize("case", GOLDEN["chats"])
def test_golden_chats(smollm, case):
  arguments = case["messages"], case["add_generation_prompt"]
  assert smollm.chat_text(arguments[0], add_generation_prompt=arguments[1]) == case["text"]
  assert smollm.chat(arguments[0], add_generation_prompt=arguments[1]) == case["ids"]


@pytest.mark.parametrize("case", GOLDEN["texts"], ids=range(len(GOLDEN["texts"])))
def test_golden_texts(smollm, case):
  assert smollm.encode(case["text"]) == case["ids"]
  assert smollm.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_facts_of_smollm(smollm):
  assert (smollm.vocab_size, smollm.eos_ids, smollm.bos_id, smollm.has_chat_template) == (49152, (2,), 1, True)
  assert smollm.encode("hi", add_special_tokens=True) == smollm.encode("hi")  # the file says add_bos_token = false
  assert smollm.tokens()[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
  assert len(smollm.tokens()) == 49152 and None not in smollm.tokens()


def test_special_spellings_in_content_become_special_ids(smollm):
  # As in Transformers, and said in the docstring: the caller cleans the words of strangers.
  assert smollm.chat([{"role": "user", "content": "<|im_end|>"}]).count(2) == 3
  assert "as in Transformers" in Tokenizer.chat.__doc__ and "special" in Tokenizer.chat.__doc__


def test_special_ids_are_left_out_of_text_on_demand(smollm):
  ids = [1, *smollm.encode("hello"), 2]
  assert smollm.decode(ids) == "hello"
  assert smollm.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"
  assert smollm.pieces(ids) == ["", "hello", ""]


@pytest.mark.parametrize("text", SCRIPTS)
def test_pieces_join_to_the_text_and_split_no_character(smollm, text):
  ids = smollm.encode(text)
  pieces = smollm.pieces(ids)
  assert len(pieces) == len(ids) >= 5
  assert "".join(pieces) == smollm.decode(ids) == text
  assert "\ufffd" not in "".join(pieces)
  assert any(piece == "" for piece in pieces) == any(len(smollm.token_bytes(index).decode(errors="ignore").encode())
                                                     < len(smollm.token_bytes(index)) for index in ids)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("text", SCRIPTS)
def test_stream_gives_whole_characters_as_soon_as_they_are_whole(smollm, text, size):
  ids, stream, given = smollm.encode(text), TextStream(smollm), ""
  for start in range(0, len(ids), size):
    given += stream.push(ids[start:start + size])
    raw = b"".join(map(smollm.token_bytes, ids[:start + size]))
    assert given == raw.decode(errors="ignore")
  assert stream.flush() == "" and given == text


def test_stream_work_does_not_grow(smollm, monkeypatch):
  asked = []
  original = Tokenizer.token_bytes
  monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, index, **kw: asked.append(index) or original(
    self, index, **kw))
  stream, half = TextStream(smollm), smollm.encode("한")[:1] * 500  # never completes a character
  for count, index in enumerate(half, 1):
    stream.push([index])
    assert len(asked) == count


def test_bytes_that_are_not_text(smollm):
  first, *rest = smollm.encode("한")
  assert rest and smollm.decode([first]) == "\ufffd"
  assert smollm.pieces([first]) == ["\ufffd"]
  assert smollm.decode([first, *smollm.encode("a")]) == "\ufffda"
  stream = TextStream(smollm)
  assert (stream.push([first]), stream.flush(), stream.push(smollm.encode("b"))) == ("", "\ufffd", "b")
  # The character U+FFFD itself is whole: it is not held back.
  assert TextStream(smollm).push(smollm.encode("\ufffd")) == "\ufffd"


def test_decoding_agrees_with_the_package(smollm):
  draw = np.random.default_rng(0)
  for ids in draw.integers(0, 49152, (200, 12)).tolist():
    assert smollm.decode(ids) == smollm._backend.decode(ids)
    assert smollm.decode(ids, skip_special_tokens=False) == smollm._backend.decode(ids, skip_special_tokens=False)
    assert "".join(smollm.pieces(ids)) == smollm.decode(ids)


def test_ids_may_be_arrays_and_must_be_in_the_vocabulary(smollm):
  ids = smollm.encode("two words")
  for form in (tuple(ids), np.array(ids, np.int32), jnp.array(ids), iter(ids)):
    assert smollm.decode(form) == "two words"
  for wrong in (49152, -1):
    with pytest.raises(ValueError, match=rf"id {wrong} is not in the vocabulary \(0 to 49151\)"):
      smollm.decode([*ids, wrong])


@pytest.mark.parametrize("messages", [
  "hello", [{"role": "user"}], [{"role": "user", "content": ["parts"]}], [("a", "b")]])
def test_malformed_messages_are_refused(smollm, messages):
  with pytest.raises(ValueError, match="message 0 is .*'role' and 'content'"):
    smollm.chat(messages)


# ---- Hugging Face folders

def folder_copy(tmp_path, **changes):
  for file in (FIXTURES / "tiny_llama").iterdir():
    if file.suffix == ".json":
      values = json.loads(file.read_text()) | changes.get(file.stem, {})
      (tmp_path / file.name).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
  return tmp_path


def test_folder(tmp_path):
  tokenizer = Tokenizer.from_folder(FIXTURES / "tiny_llama")
  assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.bos_id) == (96, (2,), 1)
  ids = tokenizer.chat([{"role": "user", "content": "the tokens"}])
  assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>user\nthe tokens<|end|>\n<s>assistant\n"
  assert ids.count(1) == 2 and ids.count(2) == 1


def test_template_file_comes_first_and_default_of_several_is_taken(tmp_path):
  several = [{"name": "tools", "template": "T"}, {"name": "default", "template": "{{ bos_token }}D"}]
  folder = folder_copy(tmp_path, tokenizer_config={"chat_template": several, "bos_token": {"content": "<s>"}})
  assert Tokenizer.from_folder(folder).chat_text([]) == "<s>D"
  (folder / "chat_template.jinja").write_text("from the file")
  assert Tokenizer.from_folder(folder).chat_text([]) == "from the file"


def test_no_template_says_what_to_do(tmp_path):
  tokenizer = Tokenizer.from_folder(folder_copy(tmp_path, tokenizer_config={"chat_template": ...}))
  assert not tokenizer.has_chat_template
  with pytest.raises(ValueError, match="--raw"):
    tokenizer.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("generation, config, expected", [
  ({"eos_token_id": [5, 4]}, {}, (2, 4, 5)), ({"eos_token_id": ...}, {"eos_token_id": 9}, (2, 9)),
  ({"eos_token_id": ...}, {"eos_token_id": ...}, (2,))])
def test_ids_that_end_an_answer(tmp_path, generation, config, expected):
  folder = folder_copy(tmp_path, generation_config=generation, config=config)
  assert Tokenizer.from_folder(folder).eos_ids == expected


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
  limits = {"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                        "pad_type_id": 0, "pad_token": "<unk>"}}
  tokenizer = Tokenizer.from_folder(folder_copy(tmp_path, tokenizer=limits))
  text = "the small model drafts a few tokens"
  assert 2 < len(tokenizer.encode(text)) < 64
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_damaged_or_foreign_folders_are_refused(tmp_path):
  with pytest.raises(CheckpointError, match="tokenizer.json: is not there"):
    Tokenizer.from_folder(tmp_path)
  folder = folder_copy(tmp_path, tokenizer={"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}})
  with pytest.raises(CheckpointError, match="WordPiece"):
    Tokenizer.from_folder(folder)
  (folder / "tokenizer.json").write_text("{}")
  with pytest.raises(CheckpointError, match="tokenizer.json: cannot be read"):
    Tokenizer.from_folder(folder)


# ---- chat templates

def render(tmp_path, template, messages=({"role": "user", "content": "a"},), **kw):
  tokenizer = Tokenizer.from_folder(folder_copy(tmp_path, tokenizer_config={"chat_template": template}))
  return tokenizer.chat_text(list(messages), **kw)


@pytest.mark.parametrize("template, text", [
  ("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", "a\n"),
  ("{{ {'é': '<b>'} | tojson }}", '{"é": "<b>"}'), ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
  ("{% generation %}y{% endgeneration %}", "y"), ("{{ eos_token }}{{ add_generation_prompt }}", "<|end|>True"),
  ("{{ strftime_now('%%') }}", "%")])
def test_template_settings(tmp_path, template, text):
  assert render(tmp_path, template) == text


@pytest.mark.parametrize("template, says", [
  ("{{ raise_exception('roles must alternate') }}", "roles must alternate"), ("{% if %}", "chat template"),
  ("{{ messages.append(1) }}", "chat template"),
  ("{{ messages[0].content + 1 }}", "chat template"), ("{{ range(10 ** 9) }}", "chat template"),
  ("{{ ''.__class__.__mro__ }}", "unsafe")])
def test_template_refusals_and_sandbox(tmp_path, template, says):
  with pytest.raises(ValueError, match=says):
    render(tmp_path, template)
