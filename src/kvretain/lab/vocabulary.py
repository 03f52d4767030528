"""The laboratory animal's vocabulary: whole words, split at blanks."""

from __future__ import annotations

from typing import Any

from .chains import NAMES, OPERATORS

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
WORDS = (*SPECIAL, *map(str, range(10)), *OPERATORS, "=", ";", ":", "?", "\\boxed{", "}", *NAMES)
IDS = {word: place for place, word in enumerate(WORDS)}
DIGITS = range(IDS["0"], IDS["9"] + 1)
"""Ids of the digits."""


def tokenizer() -> Any:
    """A transformers tokenizer of :data:`WORDS`; it puts ``<bos>`` in front.

    Example:
        >>> tokenizer()("x = a + b ;")["input_ids"] == [IDS[word] for word in "<bos> x = a + b ;".split()]
        True
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", IDS["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def check(given: Any, size: int, name: str) -> None:
    """Checks that a model speaks this vocabulary.

    Args:
        given: its tokenizer.
        size: ``vocab_size`` of its configuration.
        name: of the model, for the message.

    Raises:
        ValueError: it has other words, the same ones with other ids, or embeddings for more or fewer of them.
    """
    if given.get_vocab() != IDS:
        raise ValueError(
            f"{name} has another vocabulary than the chains of this release: they need a laboratory animal, which "
            "`kvretain lab train` makes"
        )
    if size != len(WORDS):
        raise ValueError(
            f"{name} has {size} embeddings, but its tokenizer, that of the chains of this release, has {len(WORDS)} "
            "words: its weights and its tokenizer do not belong together"
        )
