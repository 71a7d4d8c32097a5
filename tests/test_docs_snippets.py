"""README and docs: every python block runs, one namespace per page; every link leads somewhere.

A block that cannot run here says why in a comment right before it: <!-- not run: needs a model -->.
It must still compile.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SPEC = importlib.util.spec_from_file_location("docs_reference", ROOT / "scripts/docs_reference.py")
docs_reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docs_reference)

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+)\s*(?P<language>[\w+-]*)")
NOT_RUN = re.compile(r"<!--\s*not run:(?P<reason>.*?)-->")
MISSPELT = {"py", "python3", "Python", "pycon"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and text, the line of its fence, and why it is not run."""

    language: str
    code: str
    line: int
    not_run: str | None = None


def blocks(text: str) -> list[Block]:
    """Every fenced block of a page, in order."""
    found = []
    lines = iter(enumerate(text.splitlines(), 1))
    before = ""  # the last line that is not blank
    for number, line in lines:
        if not (opening := FENCE.match(line)):
            before = line.strip() or before
            continue
        body = []
        for _, inside in lines:
            if inside.strip() == opening["fence"]:
                break
            body.append(inside.removeprefix(opening["indent"]))
        else:
            raise AssertionError(f"line {number}: the block has no end")
        mark = NOT_RUN.fullmatch(before)
        reason = mark["reason"].strip() if mark else None
        found.append(Block(opening["language"], "\n".join(body) + "\n", number, reason))
        before = ""
    return found


def run_page(text: str, name: str) -> None:
    """Compile every python block of a page and run those that are not marked."""
    namespace = {"__name__": "__main__"}
    for block in blocks(text):
        assert block.language not in MISSPELT, f"{name}:{block.line}: write ```python"
        if block.language != "python":
            continue
        # As many lines before it as in the page: a traceback names the page's own lines.
        code = compile("\n" * block.line + block.code, name, "exec")
        if block.not_run is None:
            exec(code, namespace)
        else:
            assert block.not_run, f"{name}:{block.line}: `not run` needs a reason"


def prose(text: str) -> str:
    """The page without fenced blocks, inline code and comments: where links count."""
    lines, fence = [], None
    for line in text.splitlines():
        if fence is None and (opening := FENCE.match(line)):
            fence = opening["fence"]
        elif fence is not None:
            fence = None if line.strip() == fence else fence
        else:
            lines.append(line)
    return re.sub(r"`[^`\n]*`|<!--.*?-->", "", "\n".join(lines), flags=re.DOTALL)


def links(text: str) -> list[str]:
    """The targets of links and images, in Markdown and HTML."""
    inline = re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", text)
    named = re.findall(r"^\[[^\]]+\]:\s*<?(\S+?)>?\s*$", text, flags=re.MULTILINE)
    return inline + named + re.findall(r"\b(?:href|src)=[\"']([^\"']+)[\"']", text)


def anchors(text: str) -> set[str]:
    """The anchors of headings, those set by hand, and those of the generated reference."""
    found: list[str] = re.findall(r"<a (?:id|name)=[\"']([^\"']+)[\"']", text)
    found += sorted(docs_reference.named(text))
    text = docs_reference.expand(text)
    no_blocks = re.sub(r"^ *(```+|~~~+).*?^ *\1 *$", "", text, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ +(.+?) *#*$", no_blocks, flags=re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        copies = sum(
            re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found
        )
        found.append(f"{slug}-{copies}" if copies else slug)
    return set(found)


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead to no file or no heading."""
    broken = []
    for link in links(prose(page.read_text())):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):  # https:, mailto:
            continue
        place, _, anchor = link.partition("#")
        target = page.parent / place if place else page
        is_known = not anchor or target.suffix != ".md"
        if not target.exists() or not (is_known or anchor in anchors(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page.read_text(), page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def fenced(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}\n```\n"


def test_blocks_are_found_with_line_language_and_reason():
    text = (
        "# Title\n" + fenced("x = 1") + "words\n\n<!-- not run: needs a GPU -->\n\n" + fenced("y")
    )
    text += "- item\n\n  ```bash\n  ls\n    -l\n  ```\n~~~\nplain ```\n~~~\n"
    assert blocks(text) == [
        Block("python", "x = 1\n", 2),
        Block("python", "y\n", 9, "needs a GPU"),
        Block("bash", "ls\n  -l\n", 14),
        Block("", "plain ```\n", 18),
    ]


def test_a_mark_counts_only_right_before_its_block():
    text = "<!-- not run: old -->\nother words\n" + fenced("x = 1")
    assert blocks(text)[0].not_run is None
    twice = "<!-- not run: one -->\n" + fenced("a") + fenced("b")
    assert [block.not_run for block in blocks(twice)] == ["one", None]


def test_blocks_of_a_page_share_a_namespace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(
        fenced("x = 1") + fenced("from pathlib import Path\nPath('made').write_text(str(x + 1))"),
        "page.md",
    )
    assert (tmp_path / "made").read_text() == "2"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (fenced("x = 1") + fenced("assert x == 2, x"), AssertionError, "1"),
        (fenced("import no_such_module"), ImportError, "no_such_module"),
        (fenced("x ="), SyntaxError, "invalid syntax"),
        ("<!-- not run: needs a model -->\n" + fenced("x ="), SyntaxError, "invalid syntax"),
        ("<!-- not run: -->\n" + fenced("x"), AssertionError, "page.md:2: .* needs a reason"),
        (fenced("x = 1", "py"), AssertionError, "page.md:1: write ```python"),
        ("text\n```python\nx = 1\n", AssertionError, "line 2: the block has no end"),
    ],
)
def test_planted_failure_fails(text, error, message):
    with pytest.raises(error, match=message):
        run_page(text, "page.md")


def test_a_failure_names_the_line_of_the_page():
    with pytest.raises(ZeroDivisionError) as info:
        run_page("one\ntwo\n" + fenced("x = 1\n1 / 0"), "page.md")
    last = info.traceback[-1]
    assert (str(last.path), last.lineno + 1) == ("page.md", 5)


def test_a_marked_block_and_other_languages_do_not_run():
    run_page("<!-- not run: would fail -->\n" + fenced("1 / 0") + fenced("rm -rf /", "bash"), "p")


@pytest.mark.parametrize(
    "link",
    [
        "[a](other.md)",
        "[a](other.md#two-words)",
        "[a](other.md#two-words-1)",
        "[a](other.md#fp8-vs-bf16-link)",
        "[a](#here)",
        "![a](pictures/x.png 'title')".replace("'", '"'),
        "[a](https://example.org/nothing)",
        "[a](mailto:x@example.org)",
        "<img src='pictures/x.png'>",
        "[a][b]\n\n[b]: other.md",
        "`[code](nothing.md)`",
        "```\n[code](nothing.md)\n```",
        "<!-- [comment](nothing.md) -->",
    ],
)
def test_good_links(tmp_path, link):
    write_site(tmp_path, link)
    assert broken_links(tmp_path / "page.md") == []


@pytest.mark.parametrize(
    "link",
    [
        "[a](nothing.md)",
        "[a](other.md#no-such-heading)",
        "[a](#comment)",
        "[a](#nowhere)",
        "![a](pictures/y.png)",
        "<a href='nothing.md'>x</a>",
        "[a][b]\n\n[b]: nothing.md",
    ],
)
def test_broken_links(tmp_path, link):
    write_site(tmp_path, link)
    assert len(broken_links(tmp_path / "page.md")) == 1


def write_site(folder: Path, link: str) -> None:
    (folder / "pictures").mkdir()
    (folder / "pictures" / "x.png").touch()
    headings = "# Two words\n## Two words\n## FP8 vs. `BF16` ([link](x))\n"
    (folder / "other.md").write_text(headings)
    (folder / "page.md").write_text(f"# Here\n\n{link}\n\n{fenced('# comment')}")
