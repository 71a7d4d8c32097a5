"""The page at / in a real browser: chat by keyboard, numbers that move, errors that show."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.browser import browsing, find_browser
from octavo_testkit.serving.fake_engine import FakeEngine
from octavo_testkit.serving.fake_server import listening

BROWSER = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
]

LAST = "document.querySelector('.message:last-child').textContent"


def text(id):
    return f"document.getElementById('{id}').textContent"


def test_chat_and_numbers(tmp_path):
    with listening(FakeEngine(step_s=0.01)) as (base_url, engine, _), browsing(BROWSER) as page:
        page.open(base_url)
        page.look()
        page.wait_for(f"{text('status')} === 'ready'")
        assert page.run("document.activeElement.id") == "prompt"
        facts = page.run("[...document.querySelectorAll('#precision li')].map(x => x.textContent)")
        assert facts == [
            "KV cache: FP8 in 28 of 30 layers (2 in BF16), 32.0 MiB; saves 28.0 MiB",
            "linear layers: FP8 in 196 of 197 (lm_head in BF16); saves 1.0 MiB",
        ]
        assert page.run(text("saved")) == "29.0 MiB"
        page.type("say:<b>Grüezi</b>")
        page.press("Enter")
        page.wait_for("!document.getElementById('send').disabled")
        assert "<b>Grüezi</b>" in page.run(LAST)
        assert page.run("document.querySelectorAll('#messages b').length") == 0
        for time in ("queue", "ttft", "itl"):
            page.wait_for(f"{text(time)}.endsWith('ms')")
        # Escape stops an answer, and the engine with it.
        page.type("long:")
        page.press("Enter")
        page.wait_for(f"{LAST}.includes('la la')")
        page.wait_for(f"{text('requests')}.startsWith('1 running')")
        page.wait_for(f"Number({text('rate')}) > 10")
        page.save_screenshot(tmp_path / "light.png")
        page.press("Escape")
        page.wait_for(f"{LAST}.endsWith('stopped')")
        page.wait_for(f"{text('requests')}.startsWith('0 running')")
        assert "abort" in engine.ended.values()
        # An error is shown below what came before it.
        page.type("fail: now, please")
        page.press("Enter")
        page.wait_for(f"{LAST}.includes('cannot go on')")
        page.look(is_dark=True)
        page.save_screenshot(tmp_path / "dark.png")
        page.look(is_dark=True, width=420, height=900)
        assert page.run("document.documentElement.scrollWidth") <= 420
        page.save_screenshot(tmp_path / "narrow.png")
        assert page.problems == []
        assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()


def test_a_server_with_a_key_says_so():
    settings = ServerSettings(api_keys=("secret",))
    with listening(settings=settings) as (base_url, _, _), browsing(BROWSER) as page:
        page.open(base_url)
        page.wait_for(f"{text('status')}.includes('API key')")
        page.run("document.getElementById('key').value = 'secret'")
        page.wait_for(f"{text('status')} === 'ready'")
