"""HTML made of elements; text is escaped unless it was made here, so nothing that a file holds can become markup."""

from __future__ import annotations

import html

_VOID = {"img", "input", "meta"}


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: str | None, **attributes: str | float | None) -> Html:
    """An element.

    Args:
        tag: Its name.
        children: Texts, escaped if they are not `Html`; None is left out.
        attributes: By name, where ``_`` at the end is dropped and other ones become ``-``; None is left out.
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Html(f"<{tag}{named}>")
    return Html(f"<{tag}{named}>{join(*children)}</{tag}>")


def join(*parts: str | None) -> Html:
    """Parts one after another."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts if part is not None))
