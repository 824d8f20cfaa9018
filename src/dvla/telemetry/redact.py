"""Keeps secrets that the environment holds, such as tokens of other services, out of files that people share."""

from __future__ import annotations

import os
import re

_SECRET_NAMES = re.compile("TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_MIN_LENGTH = 8
"""Shorter values are hardly secrets, and would blot out ordinary words."""


def redact(text: str) -> str:
    """`text` with the name of the variable, as ``<HF_TOKEN>``, in place of every secret."""
    secrets = [(value, name) for name, value in os.environ.items() if _SECRET_NAMES.search(name)]
    for value, name in sorted(secrets, key=lambda secret: -len(secret[0])):  # one may be part of another
        if len(value) >= _MIN_LENGTH:
            text = text.replace(value, f"<{name}>")
    return text
