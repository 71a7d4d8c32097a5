"""A bar that no thread draws."""

import threading

from octavo.cli import still_progress
from octavo.cli.still_progress import StillProgress


def test_it_is_drawn_now_and_then_by_whoever_steps(monkeypatch):
    drawn, now = [], [100.0]
    monkeypatch.setattr(still_progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(StillProgress, "refresh", lambda self: drawn.append(now[0]))
    before = threading.active_count()
    with StillProgress() as progress:
        assert threading.active_count() == before
        task = progress.add_task("x", total=100)
        del drawn[:]
        for _ in range(50):
            progress.step(task, "tokens")
            now[0] += 0.1
        assert progress.tasks[0].completed == 50 and progress.tasks[0].description == "tokens"
        assert len(drawn) == 3
