"""A process that serves the fake engine: python listen.py PORT GRACE_S STEP_S."""

import sys

from fake_engine import FakeEngine, FakeGrammar

from octavo.serving.server.app import create_app
from octavo.serving.server.run import run
from octavo.serving.server.settings import ServerSettings

if __name__ == "__main__":
    port, grace_s, step_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    settings = ServerSettings(grace_s=grace_s)
    run(create_app(FakeEngine(step_s=step_s), settings, FakeGrammar), "127.0.0.1", port)
