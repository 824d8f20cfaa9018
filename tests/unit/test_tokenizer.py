"""The offline tokenizer: what the model relies on, and that all ranks get the same ids."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dvla.models.openvla_oft import prompt_text
from dvla.models.tokenizer import SPACE, build_tokenizer

TASKS = ("push the cube to the goal", "pick up the black bowl and place it on the plate", "stack 12 cubes")
TEXTS = [prompt_text(task) for task in TASKS]

PRINT_VOCABULARY = """
import sys
from dvla.models.tokenizer import build_tokenizer
print(sorted(build_tokenizer(sys.argv[1:], 400).get_vocab().items()))
"""


@pytest.mark.parametrize("vocab_size", [300, 400, 1000])
def test_prompt_ends_in_a_lone_space(vocab_size: int) -> None:
    tokenizer = build_tokenizer(TEXTS, vocab_size)
    for text in TEXTS:
        pieces = tokenizer.tokenize(text)
        assert pieces[-1] == SPACE
        assert tokenizer.unk_token not in pieces


def test_special_ids_are_those_of_llama() -> None:
    tokenizer = build_tokenizer(TEXTS, 400)
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_ids_stay_below_the_vocabulary_size() -> None:
    tokenizer = build_tokenizer(TEXTS, 310)
    assert max(tokenizer.get_vocab().values()) < 310


def test_frequent_words_become_one_piece() -> None:
    tokenizer = build_tokenizer(TEXTS, 1000)
    assert f"{SPACE}robot" in tokenizer.tokenize(TEXTS[0])


@pytest.mark.parametrize("text", ["Ünseen 漢字 <0x41> 7\nOut: ", *TEXTS])
def test_any_text_survives_a_round_trip(text: str) -> None:
    tokenizer = build_tokenizer(TEXTS, 400)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_split() -> None:
    tokenizer = build_tokenizer(TEXTS, 1000)
    assert {"1", "2"} <= set(tokenizer.tokenize(TEXTS[2]))


def test_order_and_repetition_do_not_matter() -> None:
    expected = build_tokenizer(TEXTS, 400).get_vocab()
    assert build_tokenizer([*reversed(TEXTS), TEXTS[1]], 400).get_vocab() == expected


def test_every_process_gets_the_same_ids() -> None:
    expected = str(sorted(build_tokenizer(TEXTS, 400).get_vocab().items()))
    command = [sys.executable, "-c", PRINT_VOCABULARY, *TEXTS]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    assert result.stdout.strip() == expected


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        build_tokenizer(TEXTS, 259)
