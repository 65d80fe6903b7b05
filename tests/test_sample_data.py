"""The bundled corpus and its labels are what sample_data/README.md says they are."""

import re
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path

SAMPLE_DATA = Path(__file__).resolve().parents[1] / "sample_data"
PHENOMENA = {
    "agreement",
    "agreement_attractor",
    "coreference",
    "garden_path",
    "list",
    "long",
    "name",
    "negation",
    "number",
    "punctuation",
    "question",
    "quotation",
    "repetition",
    "short",
    "word_sense",
}


def read_lines(name: str) -> list[str]:
    """The lines of one file, from its bytes, so that no newline is translated and bad UTF-8 raises."""
    text = (SAMPLE_DATA / name).read_bytes().decode("utf-8")
    assert text.endswith("\n")
    return text[:-1].split("\n")


def read_labels() -> list[dict[str, str]]:
    header, *rows = (line.split("\t") for line in read_lines("labels.tsv"))
    assert header == ["line", "phenomenon", "word", "sense"]
    return [dict(zip(header, row, strict=True)) for row in rows]


def labelled(phenomenon: str) -> list[str]:
    """The sentences of one phenomenon."""
    sentences = read_lines("sentences.txt")
    return [sentences[int(row["line"]) - 1] for row in read_labels() if row["phenomenon"] == phenomenon]


def words(sentence: str) -> list[str]:
    return re.findall(r"\w+", sentence.lower())


def test_sentences_are_clean_text() -> None:
    for name in ("sentences.txt", "labels.tsv"):
        raw = (SAMPLE_DATA / name).read_bytes()
        assert not raw.startswith(b"\xef\xbb\xbf")
        assert b"\r" not in raw
        assert unicodedata.is_normalized("NFC", raw.decode("utf-8"))
    for sentence in read_lines("sentences.txt"):
        assert sentence.strip()
        assert sentence == " ".join(sentence.split())
        assert all(character.isprintable() for character in sentence)
        assert sentence.rstrip('"')[-1] in ".?!"
    assert any(not sentence.isascii() for sentence in read_lines("sentences.txt"))


def test_sentences_are_about_sixty_and_unique() -> None:
    sentences = read_lines("sentences.txt")
    assert 55 <= len(sentences) <= 70
    assert len({sentence.casefold() for sentence in sentences}) == len(sentences)


def test_lengths_run_from_two_to_sixty_tokens() -> None:
    lengths = [len(sentence.split()) for sentence in read_lines("sentences.txt")]
    assert min(lengths) == 2
    assert 50 <= max(lengths) <= 60
    assert all(2 <= len(sentence.split()) <= 3 for sentence in labelled("short"))
    assert all(40 <= len(sentence.split()) <= 60 for sentence in labelled("long"))


def test_the_two_banks_are_there() -> None:
    senses = {sentence: row["sense"] for sentence, row in zip(read_lines("sentences.txt"), read_labels(), strict=True)}
    assert senses["The fisherman sat down by the river bank."] == "riverside"
    assert senses["She deposited the cheque at the savings bank."] == "finance"


def test_labels_number_every_sentence_once_and_in_order() -> None:
    expected = [str(number) for number in range(1, len(read_lines("sentences.txt")) + 1)]
    assert [row["line"] for row in read_labels()] == expected


def test_every_phenomenon_is_present_and_described() -> None:
    assert {row["phenomenon"] for row in read_labels()} == PHENOMENA
    readme = (SAMPLE_DATA / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z_]+)` \|", readme.split("| Phenomenon |")[1], re.MULTILINE)) == PHENOMENA


def test_word_and_sense_are_given_only_for_word_senses() -> None:
    for row in read_labels():
        applies = row["phenomenon"] == "word_sense"
        assert bool(row["word"]) is applies, row
        assert bool(row["sense"]) is applies, row


def test_each_named_word_occurs_exactly_once_in_its_line() -> None:
    for sentence, row in zip(read_lines("sentences.txt"), read_labels(), strict=True):
        if row["word"]:
            assert words(sentence).count(row["word"]) == 1, (row, sentence)


def test_each_ambiguous_word_has_two_sentences_and_two_senses() -> None:
    senses = defaultdict(list)
    for row in read_labels():
        if row["word"]:
            senses[row["word"]].append(row["sense"])
    assert len(senses) >= 10
    for word, found in senses.items():
        assert len(found) >= 2, word
        assert len(set(found)) >= 2, word
    assert min(Counter(senses["bank"]).values()) >= 2


def test_the_twenty_banks_are_ten_of_each_sense_and_none_of_the_sentences() -> None:
    header, *rows = (line.split("\t") for line in read_lines("bank.tsv"))
    assert header == ["text", "sense"]
    assert Counter(sense for _, sense in rows) == {"riverside": 10, "finance": 10}
    texts = [text for text, _ in rows]
    assert all(words(text).count("bank") == 1 for text in texts)
    assert len({*texts, *read_lines("sentences.txt")}) == 20 + len(read_lines("sentences.txt"))


def test_sentences_show_the_surface_mark_of_their_phenomenon() -> None:
    assert all(sentence.endswith("?") for sentence in labelled("question"))
    assert all(re.search(r"\d", sentence) for sentence in labelled("number"))
    assert all(sentence.count('"') % 2 == 0 and '"' in sentence for sentence in labelled("quotation"))
    assert all(sentence.count(",") >= 3 for sentence in labelled("list"))
    assert all(set("—():;!") <= set(sentence) for sentence in labelled("punctuation"))
    assert all({"not", "no", "nobody", "never"} & set(words(sentence)) for sentence in labelled("negation"))
    assert all(max(Counter(words(sentence)).values()) >= 5 for sentence in labelled("repetition"))
