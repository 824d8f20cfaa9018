"""A tokenizer trained on the run's own instructions, for models that start without a checkpoint.

A random-weight model has no vocabulary to be faithful to, and a run may have no network. So the vocabulary is learnt, in
milliseconds, from the prompts themselves. It keeps the traits of Llama's tokenizer that the model relies on: the same
three special ids, a word begins with "▁", a text that ends in a space ends in a lone "▁", and no text is out of
vocabulary, because unseen characters are spelt in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPACE = "▁"
UNK, BOS, EOS = "<unk>", "<s>", "</s>"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer on `texts`.

    The result is a function of the set of texts: their order and number of occurrences do not matter, and every process
    gets the same ids, so that ranks need not exchange the vocabulary.

    Args:
        texts: The prompts as they will be tokenised.
        vocab_size: Upper bound of the ids; fewer are used when every word is one piece already.
    """
    corpus = sorted(set(texts))
    alphabet = {character for text in corpus for character in text.replace(" ", SPACE)} | {SPACE}
    specials = [UNK, BOS, EOS, *_BYTES]
    if vocab_size < len(specials) + len(alphabet):
        raise ValueError(
            f"a vocabulary of {vocab_size} is too small: {len(specials)} special and byte pieces and "
            f"{len(alphabet)} characters of the instructions need a place"
        )
    words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=True),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    learner = Tokenizer(models.BPE(unk_token=UNK))
    learner.pre_tokenizer = words
    learner.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=specials,
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        ),
    )
    # Reserving the byte pieces made them special tokens, which would be cut out of any text that spells one. Rebuilding
    # from the learnt vocabulary keeps their ids and makes them ordinary pieces.
    learnt = json.loads(learner.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=learnt["vocab"],
            merges=[tuple(merge) for merge in learnt["merges"]],
            unk_token=UNK,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement=SPACE, prepend_scheme="first"), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNK, bos_token=BOS, eos_token=EOS)
