"""Write docs/configuration.md from src/dvla/config.py: ``make docs``, or ``python docs/build.py``.

Keys, types and defaults are those of the dataclasses, meanings the strings below their fields; the source is read, not run.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PAGE = ROOT / "src/dvla/config.py", ROOT / "docs/configuration.md"
HEAD = """# Every setting

Written by `make docs` from [src/dvla/config.py](../src/dvla/config.py). Defaults are the program's; the files in `conf/` set
others, and `python -m dvla.train … --cfg job` shows what a command line comes to. A default of ??? must be given.
"""
PROGRAMS = {
    "Config": "dvla.train",
    "SftConfig": "dvla.sft",
    "EvaluateConfig": "dvla.evaluate",
    "ServeConfig": "dvla.serve",
}


def documented(body: list[ast.stmt]) -> list[tuple[ast.AnnAssign | ast.Assign, str]]:
    """Assignments of a class, each with the string below it."""
    found = []
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign | ast.Assign):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found.append((statement, " ".join(str(after.value.value).split()) if is_text else ""))
    return found


def cell(text: str) -> str:
    """For a table: Markdown's code instead of reStructuredText's, no bars."""
    return re.sub(r"``(.+?)``", r"`\1`", text).replace("|", "\\|")


class Reference:
    """The classes of the source by name."""

    def __init__(self, text: str) -> None:
        self._classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}

    def _doc(self, name: str) -> str:
        return (ast.get_docstring(self._classes[name]) or "").splitlines()[0]

    def _is_enum(self, name: str) -> bool:
        return name in self._classes and any(ast.unparse(base) == "Enum" for base in self._classes[name].bases)

    def _choices(self, name: str) -> str:
        members = documented(self._classes[name].body)
        return "; ".join(
            f"`{ast.unparse(member.targets[0])}`{': ' if text else ''}{text}".rstrip(".")
            for member, text in members
            if isinstance(member, ast.Assign)
        )

    def section(self, name: str, prefix: str) -> list[str]:
        """A table of the keys of a class; its parts as sections of their own."""
        rows, parts = [], []
        for field, text in documented(self._classes[name].body):
            if not isinstance(field, ast.AnnAssign):
                continue
            key, kind = ast.unparse(field.target), ast.unparse(field.annotation)
            if kind in self._classes and not self._is_enum(kind):
                parts.append((kind, f"{prefix}{key}."))
                continue
            default = "" if field.value is None else ast.unparse(field.value)
            words = [text] if text else []
            if self._is_enum(kind):
                words.append(f"{self._doc(kind)} {self._choices(kind)}.")
                default = default.rpartition(".")[2]
            default = {"None": "null", "True": "true", "False": "false", "field(default_factory=dict)": "{}"}.get(
                default, default.strip("'")
            )
            row = (f"`{prefix}{key}`", f"`{kind.replace(' | None', '')}`", f"`{default}`", " ".join(words))
            rows.append("| " + " | ".join(map(cell, row)) + " |")
        title = f"`{prefix[:-1]}`" if prefix else f"`{PROGRAMS[name]}`"
        lines = [f"\n## {title}\n", f"{self._doc(name)}\n"]
        if rows:
            lines += ["| key | type | default | meaning |\n|---|---|---|---|", *rows]
        for kind, below in parts:
            if kind not in self._shown:
                self._shown.add(kind)
                lines += self.section(kind, below)
        return lines

    def page(self) -> str:
        """The whole page."""
        self._shown: set[str] = set()
        lines = [HEAD.rstrip("\n")]
        for name in PROGRAMS:
            lines += self.section(name, "")
        return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(Reference(SOURCE.read_text()).page())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
