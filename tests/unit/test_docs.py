"""Links of README.md and docs/ lead somewhere, and what they name is there."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(path):
    """The text without blocks of code."""
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def anchors(path):
    """What a heading can be reached by."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_are_named_are_there(page):
    for name in re.findall(r"`((?:conf|src|launch|perf|docs|tests)/[\w./-]+(?:/|\.\w+))`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_every_page_is_reached_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[\w.]+)\)", (ROOT / "README.md").read_text()))
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= linked


def test_the_reference_of_settings_is_what_the_source_says():
    build = runpy.run_path(str(ROOT / "docs" / "build.py"))
    assert build["PAGE"].read_text() == build["Reference"](build["SOURCE"].read_text()).page(), "run make docs"


def test_every_setting_has_a_meaning_in_the_reference():
    rows = re.findall(
        r"^\| `([\w.]+)` \|.*\| ([^|]*) \|$", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 130
    assert [key for key, meaning in rows if not meaning.strip()] == []


def test_every_error_warning_and_exit_code_has_an_entry():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    errors = set(re.findall(r"^class ([A-Z]\w*Error)\(", source, re.MULTILINE)) - {
        "RunFailedError"
    }  # it carries another
    assert {name for name in errors if f"| `{name}` |" not in text} == set()
    health = (ROOT / "src" / "dvla" / "rl" / "health.py").read_text()
    warnings = set(re.findall(r"HealthWarning\(\s*\"(\w+)\"", health))
    assert len(warnings) >= 12
    assert {name for name in warnings if f"`{name}`" not in text} == set()
    assert [f"| {code} |" in text for code in range(5)] == [True, True, True, True, False]


SECTIONS = "run|env|render|model|evaluation|algo|placement|runtime|memory|telemetry"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "metrics.md"], ids=lambda path: path.name)
def test_settings_that_are_named_are_there(page):
    text = page.read_text()
    if page.name == "coming_from_rlinf.md":
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)  # the other project's names
    known = set(re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE))
    named = set(re.findall(rf"(?<![\w./])((?:{SECTIONS})\.(?!jsonl?\b)\w+)(?:=|`)", text))
    parts = {f"{key}.options" for key in ("env", "model")}
    assert {key for key in named if key not in known and key not in parts} == set()
