"""Prompts of pi0.5: the instruction, and the state in words if the model was trained so."""

from __future__ import annotations

import numpy as np

from dvla.models.tokenizer import TextTokenizer

_STATE_EDGES = np.linspace(-1.0, 1.0, 257)[:-1]


def clean_text(instruction: str) -> str:
    """The instruction as prompts spell it."""
    return instruction.strip().replace("_", " ").replace("\n", " ")


def state_bins(state: np.ndarray) -> np.ndarray:
    """Bins -1 … 255 of a normalised state; values below -1 give -1, as in the original."""
    return np.digitize(state, _STATE_EDGES) - 1


def prompt_text(instruction: str, state: np.ndarray | None) -> str:
    """The prompt of an instruction and a normalised state (n,), or of an instruction alone."""
    if state is None:
        return clean_text(instruction)
    return f"Task: {clean_text(instruction)}, State: {' '.join(map(str, state_bins(state)))};\nAction: "


def tokenize(tokenizer: TextTokenizer, instruction: str, state: np.ndarray | None, max_len: int) -> list[int]:
    """Token ids of a prompt, at most `max_len`."""
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt_text(instruction, state))]
    if state is None:
        ids += tokenizer.encode("\n")
    return ids[:max_len]
