"""Tokenizers: a checkpoint's own, or one trained on the run's instructions for models that start without a checkpoint.

A random-weight model has no vocabulary to be faithful to, and a run may have no network. So the vocabulary is learnt, in
milliseconds, from the prompts themselves. It keeps the traits of Llama's tokenizer that the model relies on: the same
three special ids, a word begins with "▁", a text that ends in a space ends in a lone "▁", and no text is out of
vocabulary, because unseen characters are spelt in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dvla.config import ConfigError

SPACE = "▁"
UNK, BOS, EOS = "<unk>", "<s>", "</s>"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SENTENCEPIECE_NAMES = ("tokenizer.model", "paligemma_tokenizer.model")


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """What the models need of a tokenizer, whichever library it comes from."""

    encode: Callable[[str], list[int]]
    """Token ids of a text, without special tokens."""
    bos_id: int
    eos_id: int
    space_id: int
    """Id of the lone "▁"."""
    save: Callable[[Path], None] | None = None
    """Write it to a folder; None when it is a file of a checkpoint anyway."""


def load_tokenizer(key: str, path: Path) -> TextTokenizer:
    """A tokenizer from a folder in Hugging Face layout, or from a SentencePiece file.

    Args:
        key: The config key that named `path`, for messages.
        path: The file, or a folder with ``tokenizer.json`` or a ``.model`` file.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        found = [path / name for name in _SENTENCEPIECE_NAMES if (path / name).is_file()]
        if not found:
            raise ConfigError(
                f"{key}={path}: no tokenizer there (looked for tokenizer.json, {', '.join(_SENTENCEPIECE_NAMES)}): set "
                "model.tokenizer to its folder or SentencePiece file"
            )
        path = found[0]
    try:
        if path.is_dir():
            return text_tokenizer(_from_folder(path))
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except Exception as error:  # the libraries raise bare Exceptions
        raise ConfigError(f"{key}={path}: the tokenizer cannot be read: {error}") from error
    return TextTokenizer(pieces.encode, pieces.bos_id(), pieces.eos_id(), pieces.piece_to_id(SPACE))


def _from_folder(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder, whatever model its ``config.json`` says it belongs to."""
    settings = folder / "tokenizer_config.json"
    named = json.loads(settings.read_text()) if settings.is_file() else {}
    specials = {}
    for kind, default in (("unk_token", UNK), ("bos_token", BOS), ("eos_token", EOS)):
        token = named.get(kind) or default
        specials[kind] = token["content"] if isinstance(token, dict) else token
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **specials)
    if missing := [token for token in (*specials.values(), SPACE) if token not in tokenizer.get_vocab()]:
        raise ValueError(f"it has no token {', '.join(missing)}")
    return tokenizer


def text_tokenizer(tokenizer: PreTrainedTokenizerBase) -> TextTokenizer:
    """A tokenizer of `transformers` as the models see it."""
    return TextTokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        space_id=tokenizer.convert_tokens_to_ids(SPACE),
        save=lambda folder: tokenizer.save_pretrained(folder) and None,
    )


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
    learner = Tokenizer(models.BPE(unk_token=UNK, byte_fallback=True))
    words = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first")
    learner.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.Digits(individual_digits=True)])
    spaces = decoders.Metaspace(replacement=SPACE, prepend_scheme="first")
    learner.decoder = decoders.Sequence([decoders.ByteFallback(), spaces, decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=sorted(alphabet), show_progress=False
    )
    learner.train_from_iterator(corpus, trainer)
    # Reserving the byte pieces made them special tokens, which would be cut out of any text that spells one. Here they
    # become ordinary pieces that keep their ids.
    learnt = json.loads(learner.to_str()) | {"added_tokens": []}
    tokenizer = Tokenizer.from_str(json.dumps(learnt))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNK, bos_token=BOS, eos_token=EOS)
