"""What a text must be: a JSON schema, a regular expression, one of some choices, a grammar, calls of tools.

A `Grammar` says it; a `Compiler` makes it ready for one tokenizer, through the package llguidance; a `Matcher` is one
request's place in it, and gives the mask of what may follow each node of a draft. All of it runs on the host, between
the halves of a step.

A grammar is about bytes: those that the ids of the output stand for, the special ones left out. (What decoding makes
of them comes later; a tokenizer that puts a space before every text drops the first of them there.) Where the grammar
forces bytes, the mask allows one token alone, the one that the tokenizer spells them with. So llguidance has it, as
models know no other spelling, and so a draft of forced tokens is accepted whole.

Letters: T nodes of a tree, W words of 32 bits.
"""
import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Sequence

import numpy as np

from specjax.checkpoints import vocabulary_map
from specjax.checkpoints.tokenizer import Tokenizer

KINDS = ("json_schema", "json_object", "regex", "choice", "lark", "tool_calls")
_CALL_OPENS, _CALL_CLOSES = "<tool_call>", "</tool_call>"
_EVERY = np.uint32(0xFFFFFFFF)
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_UNSPELT = "no token of the vocabulary goes on"
# Where llguidance's messages quote the line at fault: of a JSON schema that is all of it.
_QUOTED = re.compile(r"\n +\d+ \| ")


@dataclasses.dataclass(frozen=True)
class Grammar:
  """What a text must be, from its first output token to its end. Hashable; made by the constructors below.

  Attributes:
    kind: one of KINDS.
    source: JSON of the schema, the choices or the tools; the pattern; the Lark text; "" for `json_object`.
  """
  kind: str
  source: str

  def __post_init__(self):
    if self.kind not in KINDS or not isinstance(self.source, str):
      raise ValueError(f"Grammar(kind={self.kind!r}, source={self.source!r}): kind is one of {', '.join(KINDS)}, and "
                       "source a text; make it by Grammar.json_schema(...) and its like")

  @classmethod
  def json_schema(cls, schema: dict | str) -> "Grammar":
    """A JSON document that is valid under a schema, without white space around it.

    Properties come in the order of the schema. llguidance's own key "x-guidance" at the top of the schema may set how
    much white space there is inside (`{"whitespace_flexible": false}`: none) and what becomes of keywords that it
    cannot enforce (`{"lenient": true}`: they are ignored); without it they are refused when the grammar is compiled.

    Args:
      schema: a JSON object, or its text.

    Raises:
      ValueError: for anything else.
    """
    if isinstance(schema, str):
      schema = _parsed(schema)
    if not isinstance(schema, dict):
      raise ValueError(f"json_schema={schema!r}: a schema is a JSON object, as {{'type': 'object'}}")
    return cls("json_schema", _json(schema, "json_schema"))

  @classmethod
  def json_object(cls) -> "Grammar":
    """Any JSON object."""
    return cls("json_object", "")

  @classmethod
  def regex(cls, pattern: str) -> "Grammar":
    """A text that a regular expression matches from its first to its last byte.

    The syntax is that of Rust's crate `regex`: no look-around, no references to groups; a dot is no newline.

    Raises:
      ValueError: for a pattern that is no text, or is empty.
    """
    return cls("regex", _text(pattern, "regex", "a regular expression, as '[0-9]+'"))

  @classmethod
  def choice(cls, choices: Sequence[str]) -> "Grammar":
    """One of some texts, letter by letter.

    Raises:
      ValueError: for no choices, an empty one, one that is no text, or one that is there twice.
    """
    listed = list(choices) if isinstance(choices, (list, tuple)) else []
    if not listed or not all(isinstance(text, str) and text for text in listed):
      raise ValueError(f"choice={choices!r}: it must be a list of at least one text, none of them empty")
    if len(set(listed)) < len(listed):
      twice = next(text for text in listed if listed.count(text) > 1)
      raise ValueError(f"choice={choices!r}: {twice!r} is there more than once; name each text once")
    return cls("choice", _json(listed, "choice"))

  @classmethod
  def lark(cls, source: str) -> "Grammar":
    """A context-free grammar in llguidance's variant of Lark; its rule `start` is the text.

    It may name special tokens as <|name|> or <[id]>; the output text does not show them, and what follows one that
    is an end id is never said.

    Raises:
      ValueError: for a source that is no text, or is empty.
    """
    return cls("lark", _text(source, "lark", "a grammar, as 'start: /[0-9]+/'"))

  @classmethod
  def tool_calls(cls, tools: Sequence[dict], *, parallel: bool = False) -> "Grammar":
    """Calls of tools as Hermes and Qwen write them, and nothing else.

    A call is `<tool_call>`, a newline, `{"name": "...", "arguments": {...}}`, a newline, `</tool_call>`; each of the
    two marks is one special token where the tokenizer has it as such, and text where it has not.

    Args:
      tools: functions as OpenAI describes them: `{"type": "function", "function": {"name": ..., "parameters": ...}}`,
        or the inner mapping alone. `parameters` is the JSON schema of the arguments, as of `json_schema`; a function
        without it has no arguments.
      parallel: any number of calls from one, a newline between them; otherwise just one.

    Raises:
      ValueError: for no tools, a tool of another form, or two of one name.
    """
    if not isinstance(tools, (list, tuple)) or not tools:
      raise ValueError(f"tools={tools!r}: it must be a list of at least one function")
    functions = [_function(tool) for tool in tools]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
      raise ValueError(f"the tools are named {names!r}; each name may be there once")
    return cls("tool_calls", _json({"parallel": bool(parallel), "tools": functions}, "tools"))


def _parsed(schema):
  try:
    return json.loads(schema)
  except ValueError as error:
    raise ValueError(f"json_schema={schema!r} is not JSON ({error}); give a JSON object") from error


def _json(value, name):
  try:
    return json.dumps(value, allow_nan=False)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{name}={value!r} cannot be written as JSON ({error})") from error


def _text(value, name, wanted):
  if not isinstance(value, str) or not value:
    raise ValueError(f"{name}={value!r}: it must be the text of {wanted}")
  return value


def _function(tool):
  inner = tool.get("function", tool) if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
  parameters = inner.get("parameters", _NO_ARGUMENTS) if isinstance(inner, dict) else None
  if not isinstance(parameters, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
    raise ValueError(f"tool {tool!r}: it must be {{'type': 'function', 'function': {{'name': a text, 'parameters': a "
                     "JSON schema}}")
  return {"name": inner["name"], "parameters": parameters}


# --- grammars as Lark -----------------------------------------------------------------------------------------------


def _lark(grammar: Grammar, special_ids: dict[bytes, int]) -> str:
  """The grammar in Lark, for a tokenizer with these special tokens."""
  kind, source = grammar.kind, grammar.source
  if kind == "json_schema":
    return f"start: %json {source}"
  if kind == "json_object":
    return 'start: %json {"type": "object"}'
  if kind == "regex":
    return f"start: /{_llguidance().regex_to_lark(source, '')}/"
  if kind == "choice":
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(source)))
  if kind == "tool_calls":
    return _calls(special_ids, **json.loads(source))
  return source


def _calls(special_ids, parallel, tools):
  mark = lambda text: f"<[{special_ids[text.encode()]}]>" if text.encode() in special_ids else json.dumps(text)
  # Every schema stands by itself, as its references begin at its own top.
  heads = [f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "arguments": ' for tool in tools]
  bodies = [f'{json.dumps(head)} %json {json.dumps(tool["parameters"])} "}}"' for head, tool in zip(heads, tools)]
  rules = ['start: call ("\\n" call)*' if parallel else "start: call",
           f'call: {mark(_CALL_OPENS)} "\\n" body "\\n" {mark(_CALL_CLOSES)}',
           "body: " + "\n  | ".join(bodies)]
  return "\n".join(rules)


def _llguidance():
  try:
    import llguidance
  except ImportError as error:
    raise ValueError(f"grammars need the package llguidance ({error}); install it with: pip install 'specjax[serve]'"
                     ) from error
  return llguidance


# --- one tokenizer --------------------------------------------------------------------------------------------------


class Compiler:
  """Makes grammars ready for one tokenizer. Threads may share it: compiled grammars are never changed."""

  def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int], *, kept: int = 128):
    """Reads the vocabulary, which takes some tenths of a second.

    Args:
      tokenizer: the target's.
      vocab_size: of the target; ids that only one of the two has are never allowed.
      eos_ids: ids that end a text, allowed exactly where it may end; () if nothing does. They are no text to a
        grammar, even if they are to the tokenizer.
      kept: greatest number of compiled grammars that are kept, those used last.

    Raises:
      ValueError: llguidance is not installed, or an end id is not in the vocabulary.
    """
    self._package = _llguidance()
    self._vocabulary = _Vocabulary(tokenizer, vocab_size, eos_ids)
    self._tokens = self._package.LLTokenizer(self._package.TokenizerWrapper(self._vocabulary))
    self._compiled = functools.lru_cache(maxsize=kept)(self._compile)

  def check(self, grammar: Grammar) -> None:
    """Compiles a grammar, so that what is wrong with it is said before anything runs.

    Raises:
      ValueError: it cannot be compiled, with llguidance's reason (a keyword of JSON schema that it cannot enforce, a
        look-around); or no token of the vocabulary begins it, or it allows the empty text only.
    """
    self._ready(grammar)

  def matcher(self, grammar: Grammar, eos_ids: Iterable[int] | None = None) -> "Matcher":
    """A request's place at the beginning of a grammar.

    Args:
      grammar: compiled, if it is not yet.
      eos_ids: ids that end this request's text; None: the compiler's; () to ignore the end of sequence.

    Raises:
      ValueError: as `check`; or an end id that is text and was not named to the compiler.
    """
    ends = self._vocabulary.eos_ids if eos_ids is None else frozenset(map(int, eos_ids))
    wrong = sorted(ends - self._vocabulary.special)
    if wrong:
      raise ValueError(f"eos_ids {sorted(ends)}: {wrong} are text to the tokenizer, or not in its vocabulary; under a "
                       f"grammar a text ends by special tokens, or by {sorted(self._vocabulary.eos_ids)}")
    text = self._ready(grammar).deep_copy()
    return Matcher(grammar, _Place(text, self._vocabulary.rules(ends)))

  def _ready(self, grammar):
    if not isinstance(grammar, Grammar):
      raise ValueError(f"grammar={grammar!r}: it must be a Grammar, as Grammar.json_schema(...) makes it")
    return self._compiled(grammar)

  def _compile(self, grammar):
    lark = self._vocabulary.header + _lark(grammar, self._vocabulary.special_texts)
    text = self._package.LLMatcher(self._tokens, json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0)
    if text.is_error():
      raise ValueError(f"this {grammar.kind} grammar cannot be compiled: {_reason(text, quote=grammar.kind == 'lark')}")
    start = _Place(text, self._vocabulary.rules(frozenset())).row()
    if not start.open:
      raise ValueError(f"nothing can be said by this {grammar.kind} grammar, {grammar.source!r}: "
                       + (start.problem or "it allows the empty text only"))
    return text


def _reason(text, *, quote=True):
  """llguidance's message, without what it says about itself, and for `quote=False` without the line at fault."""
  message = text.get_error().split("\n<")[0]
  if message.startswith("NoExtension") or _UNSPELT in message:
    return _UNSPELT
  return message if quote else _QUOTED.split(message)[0]


class _Vocabulary:
  """What llguidance asks of a tokenizer: the bytes of all ids, which of them no text spells, and the ids of a text."""
  # With None llguidance adds an end id of its own behind all others. It is never said: end ids are the matcher's.
  eos_token_id = bos_token_id = None

  def __init__(self, tokenizer, vocab_size, eos_ids):
    meanings = vocabulary_map.meanings(tokenizer)[:vocab_size]
    self.eos_ids = frozenset(map(int, eos_ids))
    if not self.eos_ids <= set(range(len(meanings))):
      raise ValueError(f"eos_ids {sorted(self.eos_ids)}: each must be in 0 to {len(meanings) - 1}, the ids that the "
                       "tokenizer and the target share")
    self.special_texts = {meaning[1]: index for index, meaning in enumerate(meanings) if meaning and meaning[0]}
    self.special = self.eos_ids | set(self.special_texts.values())
    self.special_token_ids = sorted(self.special)
    self.tokens = [meaning[1] if meaning else b"" for meaning in meanings]
    self._ids = {whole: index for index, whole in enumerate(self.tokens) if whole and index not in self.special}
    self._longest, self._speller = max(map(len, self._ids), default=0), vocabulary_map.Speller(tokenizer)
    # llguidance's own end id has a bit too.
    self._usable = _bits([index for index, whole in enumerate(self.tokens) if whole], len(self.tokens) + 1)
    # Forced bytes may end within a character. Where its bytes are no tokens, they have no spelling, and forcing is off.
    single = {bytes([byte]) for byte in set(b"".join(self._ids))}
    self.header = "" if single <= self._ids.keys() else '%llguidance {"no_forcing": true}\n'

  def rules(self, ends: frozenset[int]) -> "_Rules":
    """For places in texts that these ids end."""
    return _Rules(-(-len(self.tokens) // 32), self._usable, ends, _bits(ends, len(self.tokens) + 1))

  def __call__(self, text: str) -> list[int]:
    """Ids that stand for exactly this text, none of them special.

    Raises:
      ValueError: there are none. llguidance makes an error of it, and a place without a next token.
    """
    whole = text.encode()
    ids = self._speller.spell(whole)
    if ids is None or not all(index < len(self.tokens) and index not in self.special for index in ids):
      ids = self._longest_first(whole)
    return ids

  def _longest_first(self, whole):
    ids, begin = [], 0
    while begin < len(whole):
      ends = range(min(begin + self._longest, len(whole)), begin, -1)
      end = next((end for end in ends if whole[begin:end] in self._ids), None)
      if end is None:
        raise ValueError(_UNSPELT)
      ids.append(self._ids[whole[begin:end]])
      begin = end
    return ids


def _bits(ids, count):
  """Bits of some ids among `count` of them, in words u32."""
  flags = np.zeros(-(-count // 32) * 32, np.uint8)
  flags[list(ids)] = 1
  return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def _has(bits, index) -> bool:
  return 0 <= index < 32 * len(bits) and bool(bits[index >> 5] >> np.uint32(index & 31) & 1)


# --- one request ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rules:
  """What the places of one request share."""
  words: int              # that the ids of the vocabulary take
  usable: np.ndarray      # bits of the ids that may be said at all, in as many words as llguidance's masks have
  ends: frozenset[int]    # ids that end the text
  end_bits: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Row:
  """What may follow a place."""
  bits: np.ndarray | None  # as `_Rules.usable`; None: nothing is judged here
  open: bool               # something but the end may follow
  problem: str | None = None


class _Place:
  """A place in a text: what llguidance knows there, and whether an end id was said.

  It only goes forward, and branches are copies. llguidance can roll back, but up to 1.9 it keeps its last mask by the
  number of the parser's row and the state of the lexer, which two branches may share: rolled back and led elsewhere, it
  answers with the mask of the branch that it left. Copies also go where it cannot roll back (`max_tokens`), and outlive
  errors.
  """

  def __init__(self, text, rules, ended=False):
    self._text, self.rules, self.ended = text, rules, ended

  def copy(self) -> "_Place":
    return _Place(self._text.deep_copy(), self.rules, self.ended)

  @property
  def may_end(self) -> bool:
    return self.ended or self._text.is_accepting()

  def take(self, token: int) -> bool:
    """Goes on by an id; where that is illegal it stays and returns False."""
    if self.ended or not _has(self.rules.usable, token):
      return False
    if token in self.rules.ends and (self._text.is_accepting() or self._text.is_error()):
      self.ended = True
      return True
    forced = self._text.compute_ff_tokens()
    if forced and forced[0] != token or self._text.try_consume_tokens([token]) != 1:
      return False
    self.ended = token in self.rules.ends  # a grammar may name an end id as its last token
    return True

  def forced(self) -> list[int]:
    """Tokens that must follow."""
    if self.ended:
      return []
    only_end = len(self.rules.ends) == 1 and self._text.is_accepting() and not self.row().open
    return list(self.rules.ends) if only_end else self._text.compute_ff_tokens()

  def row(self) -> _Row:
    """What may follow here. Where nothing may, not even an end, as none is named, there is nothing to judge."""
    whole, ends = self.may_end, self.rules.end_bits
    bits = np.zeros_like(ends)
    if not self.ended:
      bits = np.frombuffer(self._text.compute_bitmask(), "<u4").astype(np.uint32) & self.rules.usable
    problem = None if whole or bits.any() else _reason(self._text)
    is_open = bool((bits & ~ends).any())
    if whole or problem:
      bits |= ends
    return _Row(bits if bits.any() else None, is_open, problem)


class Matcher:
  """The place of one request in its grammar: what is committed, and what may follow it.

  Only `advance` moves it. For one thread at a time.
  """

  def __init__(self, grammar: Grammar, place: _Place):
    """See `Compiler.matcher`."""
    self._grammar, self._place, self._row = grammar, place, place.row()

  @property
  def complete(self) -> bool:
    """Whether nothing but the end may follow: the text is whole, or has a `problem`."""
    return not self._row.open

  @property
  def may_end(self) -> bool:
    """Whether the text is whole as it stands."""
    return self._place.may_end

  @property
  def problem(self) -> str | None:
    """Why the text is not whole and never will be; None where it may be.

    No token of the vocabulary spells what must follow, or llguidance gave up at a limit of its own. The end ids are
    allowed then, and nothing else.
    """
    return self._row.problem

  def masks(self, tokens: Sequence[int], parents: Sequence[int], size: int, words: int) -> np.ndarray:
    """Which ids may follow each node of a tree; see `tree.TokenTree`.

    A row is never empty. Rows of all ones stand where nothing is judged: at padding; at a node that is illegal behind
    its parent, and at its descendants, since the parent's row leaves such a node no probability; and where the text is
    complete and no id ends it, as the request ends there all the same.

    Args:
      tokens, parents: i32[T]. Node 0 is committed, and its token is not read.
      size: nodes 0 to size - 1 are valid.
      words: W; at least enough for every id of the vocabulary. Bits of ids beyond it are 0 where something is judged.

    Returns:
      u32[T, W]; bit j of word i says whether id 32 i + j is allowed.

    Raises:
      ValueError: for a size beyond the tree, a parent that does not come before its child, or too few words.
    """
    tokens, parents = np.asarray(tokens).tolist(), np.asarray(parents).tolist()
    children = _children(parents, size)
    filled = self._place.rules.words
    if words < filled:
      raise ValueError(f"words={words}: the ids of the vocabulary take {filled}")
    rows = np.full((len(tokens), words), _EVERY, np.uint32)
    stack = [(0, self._place, self._row)]
    while stack:
      node, place, row = stack.pop()
      if row.bits is None:
        continue
      rows[node] = 0
      rows[node, :filled] = row.bits[:filled]
      legal = [child for child in children[node] if _has(row.bits, tokens[child])]
      for child in legal:
        # The last child goes on from its parent's place itself, which nobody needs any more; what is committed stays.
        branch = place if node and child == legal[-1] else place.copy()
        if branch.take(tokens[child]):
          stack.append((child, branch, branch.row()))
    return rows

  def legal(self, tokens: Iterable[int]) -> int:
    """How many tokens of a chain are legal from here, up to and with the first end id."""
    place, count = self._place.copy(), 0
    for token in tokens:
      if not place.take(int(token)):
        break
      count += 1
    return count

  def forced(self, limit: int) -> list[int]:
    """The next tokens that the grammar leaves no choice about, at most `limit`; often none.

    They are to be drafted: as far as nothing else forbids them, the masks allow nothing in their place. A text that is
    whole is followed by its end, if there is one end id.

    Raises:
      ValueError: for a limit below 0.
    """
    if limit < 0:
      raise ValueError(f"limit={limit}: it must be 0 or more")
    place, found = self._place, []
    while ids := place.forced()[:limit - len(found)]:
      place = place.copy() if place is self._place else place
      if not all(place.take(token) for token in ids):
        break
      found += ids
    return found

  def commit(self, ids: Iterable[int]) -> int:
    """Commits what of some tokens belongs to the text, and says how many they are: those before the first that is
    illegal, without an end id behind a text that is complete, which ends there whether anything was drafted or not."""
    count = 0
    for token in map(int, ids):
      if token in self._place.rules.ends and not self._place.row().open or not self._place.take(token):
        break
      count += 1
    self._row = self._place.row()
    return count

  def advance(self, ids: Iterable[int]) -> None:
    """Commits accepted tokens; an end id may be the last of them.

    Raises:
      ValueError: an id is illegal, which the masks rule out; those before it are committed.
    """
    ids = [int(index) for index in ids]
    for place, index in enumerate(ids):
      if not self._place.take(index):
        self._row = self._place.row()
        why = self.problem or "the grammar does not allow it"
        raise ValueError(f"id {index} at place {place} of {ids} under a {self._grammar.kind} grammar: {why}")
    self._row = self._place.row()


def _children(parents, size):
  if not 1 <= size <= len(parents):
    raise ValueError(f"size={size}: it must be in 1 to {len(parents)}, the nodes of the tree")
  children = [[] for _ in range(size)]
  for node in range(1, size):
    if not 0 <= parents[node] < node:
      raise ValueError(f"node {node} has parent {parents[node]}; a parent comes before its children")
    children[parents[node]].append(node)
  return children
