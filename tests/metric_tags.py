"""The metric tags that docs/metrics.md documents."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "metrics.md"


def documented() -> list[re.Pattern[str]]:
    """Patterns of the tags in the document's tables; `<...>` stands for one part."""
    tags = re.findall(r"^\| `([^`]+)`", DOCUMENT.read_text(), flags=re.MULTILINE)
    return [re.compile(re.sub(r"<[^>]+>", "[^/]+", re.escape(tag).replace(r"\<", "<"))) for tag in tags]
