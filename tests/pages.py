"""Reads pages of the report back."""

from __future__ import annotations

import json
from html.parser import HTMLParser

_VOID = {"meta", "img", "input"}


class Page(HTMLParser):
    """Tags with their attributes, and text; every element must be closed.

    Args:
        text: HTML, or a part of it.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        """Called by the parser."""
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        """Called by the parser."""
        assert self._open.pop() == tag

    def handle_data(self, data):
        """Called by the parser."""
        self.text += data

    def all(self, tag: str) -> list[dict]:
        """Attributes of all elements of a kind."""
        return [attributes for name, attributes in self.tags if name == tag]

    def charts(self) -> dict[str, list]:
        """Series of each chart by its title."""
        titles = [attributes["aria-label"] for attributes in self.all("svg")]
        data = [json.loads(attributes["data-series"]) for _, attributes in self.tags if "data-series" in attributes]
        return dict(zip([title for title in titles if title != "what each lane did when"], data, strict=True))
