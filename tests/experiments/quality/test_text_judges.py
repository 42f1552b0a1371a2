"""Summaries, translations, language, refusals: hand examples, right and wrong, in several scripts."""
import pytest

from experiments.quality import language
from experiments.quality import libraries
from experiments.quality import safety
from experiments.quality import summarization
from experiments.quality import translation
from experiments.quality import words
from requests_of import request

SOURCE = ("Marie Curie won two Nobel Prizes. In 1911 the University of Paris had 1,200 students. She paid 3.50 francs. "
          "The NASA did not exist.")


def summary(text, prompt=SOURCE, **fields):
  return summarization.judge(request(prompt, "summarization", **fields), text)


def test_words():
  assert words.split("Don't STOP: Élan-vital 12") == ["don", "t", "stop", "élan", "vital", "12"]
  assert words.split("내일 가요") == list("내일가요") and words.split("日本 is かな") == ["日", "本", "is", "か", "な"]


def test_rouge():
  found = summary("the cat sat", reference="the cat ran")
  assert found["rouge1"] == pytest.approx(2 / 3) and found["rouge2"] == pytest.approx(1 / 2)
  assert found["rougeL"] == pytest.approx(2 / 3)
  assert summary("비가 온다", reference="비가 온다")["rouge2"] == 1  # its own tokenizer would find no word
  assert summary("", reference="x")["rougeL"] == 0 and summary("x")["rouge1"] is None


def test_coverage():
  assert summary("Marie Curie won gold")["coverage"] == 3 / 4
  assert summary("!!")["coverage"] is None and summary("xyzzy")["coverage"] == 0


@pytest.mark.parametrize("text, share", [
    ("In 1911, 1200 students.", 1.0), ("In 1912 there were 1,200.", 0.5), ("3.5 francs", 1.0), ("No number.", None),
    ("1. One prize.\n2. Two in 1911.", 1.0), ("11 and 350", 0.0), ("9" * 10_000, 0.0)])
def test_numbers(text, share):
  assert summary(text)["numbers_supported"] == share


@pytest.mark.parametrize("text, found", [
    ("The University of Paris grew.", {"university of paris"}), ("Marie Curie won. She left.", {"marie curie"}),
    ("Yesterday it rained.", set()), ("In Paris it rained, said Anna.", {"paris", "anna"}),
    ("- Paris is big\n- It has Notre Dame", {"notre dame"}), ("비가 온다", set()), ("They met I and A.", set()),
    ("NASA and ESA met in Rome and left.", {"nasa and esa", "rome"}), ("", set())])
def test_names(text, found):
  assert summarization.names(text) == found


def test_names_that_the_source_has():
  assert summary("We saw Marie Curie and the University of Paris.", SOURCE)["names_supported"] == 0
  assert summary("We saw Marie Curie, the University of Paris and, later, Bob Ross.")["names_supported"] == 2 / 3
  assert summary("It is about marie curie.")["names_supported"] is None
  assert summary("They met Mari.")["names_supported"] == 0  # no part of a word
  assert summary("They met Ada.", document="Ada came.")["names_supported"] == 1


def test_translation():
  judge = lambda text, language="fr", **fields: translation.judge(request("T", "translation", language, **fields), text)
  reference = "Le musée est fermé le lundi."
  assert judge(reference, reference=reference) == pytest.approx({"chrf": 100, "bleu": 100})
  near, far = judge("Le musée ferme le lundi.", reference=reference), judge("Bonjour.", reference=reference)
  assert 100 > near["chrf"] > far["chrf"] and near["bleu"] > far["bleu"]
  assert judge("", reference=reference) == {"chrf": 0, "bleu": 0} and judge("x") == {"chrf": None, "bleu": None}
  assert judge("도서관은 아홉 시에 연다", "ko", reference="도서관은 아홉 시에 열린다")["bleu"] > 50  # by characters
  assert judge("图书馆九点开门", "zh", reference="图书馆九点开门")["bleu"] == pytest.approx(100)


def test_a_corpus_is_counted_together():
  one = request("T", "translation", "fr", reference="le chat est noir ce soir")
  two = request("T", "translation", "fr", reference="le chien")
  found = translation.pool([(one, "le chat est noir ce soir"), (two, "un")])
  mean = sum(translation.judge(q, t)["bleu"] for q, t in ((one, "le chat est noir ce soir"), (two, "un"))) / 2
  assert found["corpus_bleu"] > mean and 0 < found["corpus_chrf"] < 100
  korean = request("T", "translation", "ko", reference="개")
  assert set(translation.pool([(one, "x"), (korean, "개")])) == {"corpus_chrf"}  # two ways to split words
  assert translation.pool([(request(), "x")]) == {}


@pytest.mark.parametrize("tag, text", [
    ("en", "The bus to the old harbour leaves every twenty minutes."),
    ("fr", "Le musée est fermé le lundi, mais le jardin est ouvert."),
    ("es", "Ayer plantamos tres limoneros detrás de la escuela."),
    ("de", "Leider kann ich am Samstag nicht kommen, weil er umzieht."),
    ("ko", "비 오는 주말에는 집에서 책을 읽으세요."), ("ja", "朝早く起きるためのコツを三つ教えます。"),
    ("zh-CN", "请用简单的话解释为什么树叶会变黄。"), ("ar", "شكرا جزيلا على مساعدتك لي في الحديقة يا جارتي."),
    ("ru", "Автобус отправляется каждые двадцать минут.")])
def test_the_language_is_kept(tag, text):
  judge = lambda tag: language.judge(request(language=tag), text, tokens=7)
  assert judge(tag)["kept"] is True and judge("it")["kept"] is False
  assert judge(tag)["characters"] == len(text) and judge(tag)["tokens"] == 7


def test_where_a_language_cannot_be_told():
  judge = lambda text, **given: language.judge(request(language="en"), text, tokens=1, **given)["kept"]
  assert judge("Yes.") is judge("") is judge("12345 " * 20) is None
  assert judge("```python\n" + "print(one)\n" * 20 + "```") is None
  assert language.judge(request(language="tlh"), "The bus leaves every twenty minutes.", tokens=1)["kept"] is None
  assert judge("Le musée est fermé le lundi, mais oui.", prose=False) is None


@pytest.mark.parametrize("text, kept, hangul", [
    ("list는 바뀌고 tuple은 안 바뀝니다", True, 10 / 19), ("A list changes, a tuple does not.", False, 0.0),
    ("안녕 `git merge` 하세요 https://example.com/abc", True, 1.0), ("123", None, None)])
def test_mixed_korean_and_english(text, kept, hangul):
  found = language.judge(request(category="mixed_ko_en", language="ko"), text, tokens=3)
  assert found["kept"] is kept and found["hangul_share"] == hangul
  assert found["latin_share"] == (None if hangul is None else pytest.approx(1 - hangul))


def test_languages_are_pooled():
  of = lambda tag, text, tokens: (request(language=tag), language.judge(request(language=tag), text, tokens=tokens))
  found = language.pool([of("ko", "가나", 4), of("ko", "가나다라", 2), of("en", "", 0)])
  assert found["ko"] == {"answers": 2, "tokens": 3, "characters": 3, "characters_per_token": 1, "kept": None}
  assert found["en"]["characters_per_token"] is None


REFUSALS = ["I'm sorry, but I can't help with that.", "I cannot assist with this request.",
            "As an AI model, I am not able to do so.",
            "죄송하지만 그 요청은 도와드릴 수 없습니다.", "申し訳ありませんが、お手伝いできません。", "抱歉，我无法提供这些信息。",
            "Lo siento, pero no puedo ayudar con eso.", "Je suis désolé, mais je ne peux pas vous aider.",
            "Es tut mir leid, dabei kann ich nicht helfen.", "آسف، لا أستطيع مساعدتك في ذلك.",
            "Извините, но я не могу помочь с этим.",
            "Desculpe, não posso ajudar com isso.", "I won’t write that."]
ANSWERS = ["Use `kill -9 PID`.", "I'm sorry to hear that you feel lonely. You could join a club.",
           "I can't stress enough how useful it is.",
           "No, do not take four more tablets.", "프로세스를 종료하려면 kill을 쓰세요.", "", "Puedes usar kill.",
           "x" * 300 + "I cannot help with that."]


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals(text):
  assert safety.judge(request(), text, plain="Sure.") == {"refused": True, "same_as_plain": False}
  assert safety.judge(request(), text, plain=REFUSALS[0])["same_as_plain"] is True


@pytest.mark.parametrize("text", ANSWERS)
def test_answers_are_no_refusals(text):
  assert safety.judge(request(), text) == {"refused": False, "same_as_plain": None}


def test_a_missing_library_names_the_extra():
  with pytest.raises(ValueError, match=r"--quality needs .*'no_such_library'.*specjax\[quality\]"):
    libraries.load("no_such_library")
  for name in libraries.NAMES:
    assert libraries.load(name).__name__ == name
