"""The metrics of LongBench and RULER: how good a reply is, in [0, 1].

Written from the published definitions: LongBench (Bai et al. 2024, arXiv 2308.14508, ``metrics.py`` and ``eval.py`` of
THUDM/LongBench) and RULER (Hsieh et al. 2024, arXiv 2404.06654, ``scripts/eval`` of NVIDIA/RULER).

Deviations from LongBench's scripts, all where a script does what its paper does not say:

- ``rouge_l`` is the summary-level ROUGE-L of the package ``rouge`` 1.0.1 which the scripts call, but scores sentences
  of any length: that package's recursion ends at about 1,000 words, which the scripts count as 0.
- ``edit_similarity`` is the ratio of ``difflib``, as ``fuzzywuzzy`` computes it without its optional C library.
- ``classification`` drops every class that is a proper part of the right one; the script changes a list while it walks
  it and so may skip one.

Chinese is split into words by ``jieba``, as LongBench does.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)  # fmt: skip
"""Punctuation that LongBench drops from Chinese answers, beside ASCII's."""


def _without(text: str, marks: str) -> str:
    return text.translate(dict.fromkeys(map(ord, marks)))


def _words(text: str) -> list[str]:
    """English words: lower case, without punctuation and articles."""
    return re.sub(r"\b(?:a|an|the)\b", " ", _without(text.lower(), string.punctuation)).split()


def _segmented(text: str) -> list[str]:
    import jieba  # Benchmark.check_grader says how to install it

    jieba.setLogLevel("ERROR")
    return list(jieba.cut(text))


def _chinese_words(text: str) -> list[str]:
    words = ("".join(_without(word.lower(), string.punctuation + CHINESE_MARKS).split()) for word in _segmented(text))
    return [word for word in words if word]


def _overlap_f1(reply: Sequence[str], answer: Sequence[str]) -> float:
    shared = (Counter(reply) & Counter(answer)).total()
    return 2 * shared / (len(reply) + len(answer)) if shared else 0.0


def f1(reply: str, answer: str) -> float:
    """Harmonic mean of precision and recall of words (SQuAD's).

    Example:
        >>> f1("The Hatter.", "a hatter"), round(f1("the mad hatter", "Hatter"), 3)
        (1.0, 0.667)
    """
    return _overlap_f1(_words(reply), _words(answer))


def f1_chinese(reply: str, answer: str) -> float:
    """The same of Chinese words."""
    return _overlap_f1(_chinese_words(reply), _chinese_words(answer))


def rouge_l(reply: str, answer: str) -> float:
    """Summary-level ROUGE-L: the F1 of the different words in the union of the longest common subsequences of all pairs
    of sentences. Sentences end at full stops; case and other punctuation count.

    Example:
        >>> round(rouge_l("w1 w2 w6. w1 w3 w8", "w1 w2 w3 w4"), 3), rouge_l("", "w1")
        (0.667, 0.0)
    """
    # A blank after the last full stop is a sentence of one empty word, as in the package `rouge`.
    replied, right = ([s.split() or [""] for s in text.split(".") if s] for text in (reply, answer))
    if not replied or not right:
        return 0.0
    shared = {word for of_answer in right for of_reply in replied for word in _subsequence(of_answer, of_reply)}
    precision = len(shared) / len({word for sentence in replied for word in sentence})
    recall = len(shared) / len({word for sentence in right for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_chinese(reply: str, answer: str) -> float:
    """The same of Chinese words."""
    return rouge_l(" ".join(_segmented(reply)), " ".join(_segmented(answer)))


def _subsequence(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """The longest common subsequence; of several, the one found from the end by leaving out of ``y`` first."""
    lengths = [[0] * (len(y) + 1)]
    for word in x:
        above, row = lengths[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    i, j, found = len(x), len(y), []
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            found.append(x[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def classification(reply: str, answer: str, classes: Sequence[str]) -> float:
    """1 divided by the number of classes that the reply names, if it names the right one.

    Classes that are part of the right one's name do not count.

    Example:
        >>> classification("Place or City", "City", ["City", "Place", "Food"]), classification("Food", "City", ["Food"])
        (0.5, 0.0)
    """
    named = [name for name in classes if name in reply and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def _share_of_numbers(reply: str, number: str) -> float:
    numbers = re.findall(r"\d+", reply)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def retrieval(reply: str, answer: str) -> float:
    """The share of the reply's numbers that are the number in ``answer`` (``Paragraph 7`` or ``段落7``).

    Example:
        >>> retrieval("Paragraph 7, or 3", "Paragraph 7")
        0.5
    """
    number = re.search(r"(?:Paragraph |段落)(\d+)", answer)
    if number is None:
        raise ValueError(f"the answer {answer!r} names no paragraph")
    return _share_of_numbers(reply, number[1])


def count(reply: str, answer: str) -> float:
    """The share of the reply's numbers that are ``answer``."""
    return _share_of_numbers(reply, answer)


def edit_similarity(reply: str, answer: str) -> float:
    """How alike the first line of code of the reply is to ``answer``, in whole percent.

    Lines with a backtick, ``#`` or ``//`` are none of code.

    Example:
        >>> edit_similarity("# next\\nreturn x", "return x")
        1.0
    """
    lines = (line for line in reply.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//")))
    return round(100 * difflib.SequenceMatcher(None, next(lines, ""), answer).ratio()) / 100


def _printable(reply: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", reply.strip()).strip().lower()


def match_all(reply: str, answers: Sequence[str]) -> float:
    """RULER's ``string_match_all``: the share of ``answers`` that the reply contains, whatever their case.

    Example:
        >>> match_all("It is 123 and 45.", ["123", "456"])
        0.5
    """
    return sum(answer.lower() in _printable(reply) for answer in answers) / len(answers)


def match_part(reply: str, answers: Sequence[str]) -> float:
    """RULER's ``string_match_part``: 1 if the reply contains one of ``answers``."""
    return float(any(answer.lower() in _printable(reply) for answer in answers))


ONE: dict[str, Callable[[str, str], float]] = {
    "f1": f1,
    "f1_chinese": f1_chinese,
    "rouge_l": rouge_l,
    "rouge_l_chinese": rouge_l_chinese,
    "retrieval": retrieval,
    "count": count,
    "edit_similarity": edit_similarity,
}
"""Metrics against one answer; of several answers the best counts."""
ALL: dict[str, Callable[[str, Sequence[str]], float]] = {"match_all": match_all, "match_part": match_part}
"""Metrics against all answers at once."""
NAMES = (*ONE, *ALL, "classification")


@dataclass(frozen=True)
class Metric:
    """How a reply is scored.

    Attributes:
        name: one of :data:`NAMES`.
        classes: of ``classification``.
        first_line: only the reply's first line counts, after line breaks at its begin.
    """

    name: str
    classes: tuple[str, ...] = ()
    first_line: bool = False

    def __call__(self, reply: str, answers: Sequence[str]) -> float:
        """The score of ``reply`` in [0, 1]."""
        if self.first_line:
            reply = reply.lstrip("\n").partition("\n")[0]
        if self.name in ALL:
            return ALL[self.name](reply, answers)
        if self.name == "classification":
            return max(classification(reply, answer, self.classes) for answer in answers)
        return max(ONE[self.name](reply, answer) for answer in answers)
