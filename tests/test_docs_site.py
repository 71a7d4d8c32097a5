"""The documentation site builds strictly; its reference has every command and public name."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo
from octavo import ops
from octavo.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SPEC = importlib.util.spec_from_file_location("docs_reference", ROOT / "scripts/docs_reference.py")
docs_reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docs_reference)
expand, named = docs_reference.expand, docs_reference.named

REFERENCE = [page.read_text() for page in sorted((DOCS / "reference").rglob("*.md"))]
NAMED = {name for page in REFERENCE for name in named(page)}


def build(project: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a folder as `make docs` does."""
    paths = [ROOT / "scripts", ROOT / "src", os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=300,
    )


def pages_of(nav: object) -> Iterator[str]:
    """The pages that the navigation lists."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def test_the_site_builds_strictly_and_is_whole(tmp_path):
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "src").symlink_to(ROOT / "src")
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"

    # The reference has every command and every name.
    text = "".join(page.read_text() for page in (site / "reference").rglob("*.html"))
    ids = set(re.findall(r'id="([^"]+)"', text))
    for row in COMMANDS:
        assert f"octavo-{row.name}" in ids
        for child in getattr(row.load(), "commands", {}):
            assert f"octavo-{row.name}-{child}" in ids
    # A function that shares its name with its module is known by both.
    assert not {name for name in NAMED if not {name, f"{name}.{name.split('.')[-1]}"} & ids}

    # No page needs a network.
    loads = r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//|<link[^>]+href="(?:https?:)?//'
    for page in site.rglob("*.html"):
        assert not re.search(loads, page.read_text()), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_planted_mistakes_fail_the_build(tmp_path):
    text = (ROOT / "zensical.toml").read_text()
    text = re.sub(r"^nav = \[.*?^\]$", "", text, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "zensical.toml").write_text(text)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "site.css").touch()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[a](nothing.md), [b](#nowhere)\n")
    (tmp_path / "src").symlink_to(ROOT / "src")
    done = build(tmp_path)
    assert done.returncode != 0
    assert "2 issues found" in done.stdout + done.stderr


def test_the_navigation_has_every_page_once():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = list(pages_of(nav))
    assert sorted(pages) == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))


def test_the_reference_names_every_command():
    marks = {mark for page in REFERENCE for mark in re.findall(r"<!-- command: ([\w-]+) -->", page)}
    assert marks == {row.name for row in COMMANDS}


def test_the_reference_names_everything_public():
    public = {f"octavo.{name}" for name in octavo.__all__} - {"octavo.__version__", "octavo.ops"}
    public |= {f"octavo.ops.{name}" for name in ops.__all__}
    assert not public - NAMED


@pytest.mark.parametrize("name", sorted(NAMED))
def test_what_the_reference_names_exists(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


def test_help_becomes_markdown_that_shows_it_as_it_is():
    text = expand("<!-- command: image -->")
    assert "\n- `--seed <int>`: " in text
    assert "```console\n$ octavo image --prompt" in text
    assert r": \{method: fp8, weight\_block\_size: \[128, 128\], …\}" in text


def test_an_unknown_command_is_an_error():
    with pytest.raises(ValueError, match="expected a command in <!-- command: nothing -->"):
        expand("<!-- command: nothing -->")


def test_the_changelog_has_the_usual_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(
        r"^## \[(\d+\.\d+\.\d+)\] - (unreleased|\d{4}-\d\d-\d\d)$", text, re.MULTILINE
    )
    assert len(releases) == text.count("\n## ") >= 2
    versions = [tuple(map(int, version.split("."))) for version, _ in releases]
    assert versions == sorted(versions, reverse=True)
    assert [date for _, date in releases[1:] if date == "unreleased"] == []
    kinds = set(re.findall(r"^### (\w+)$", text, flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    body = text[text.index("\n## ") :]
    assert all(re.match(r"(- .+\.|#+ .+|)$", line) for line in body.splitlines())  # a line each
