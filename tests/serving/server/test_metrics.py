"""What /metrics and /stats say: names that stay, times in the queue, FP8, saturation."""

import asyncio
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from octavo_testkit.serving.fake_engine import FakeEngine
from octavo_testkit.serving.fake_server import CHAT, HELLO, TEXT, with_client
from octavo_testkit.serving.metrics_text import series

ANSWER = "0.01 0.05 0.1 0.25 0.5 1.0 2.5 5.0 10.0 30.0 60.0 120.0 300.0 600.0 +Inf"
TOKEN = "0.001 0.002 0.005 0.01 0.02 0.03 0.05 0.075 0.1 0.2 0.5 1.0 2.5 +Inf"
# As dashboards have them: none of these may change. Name without _total, type, labels or buckets.
KEPT = {
    "octavo_requests": ("counter", "outcome route"),
    "octavo_requests_open": ("gauge", ""),
    "octavo_requests_running": ("gauge", ""),
    "octavo_requests_waiting": ("gauge", ""),
    "octavo_pages": ("gauge", ""),
    "octavo_pages_in_use": ("gauge", ""),
    "octavo_prompt_tokens": ("counter", ""),
    "octavo_completion_tokens": ("counter", ""),
    "octavo_cached_tokens": ("counter", ""),
    "octavo_preemptions": ("counter", ""),
    "octavo_steps": ("counter", ""),
    "octavo_time_to_first_token_seconds": ("histogram", ANSWER),
    "octavo_inter_token_latency_seconds": ("histogram", TOKEN),
    "octavo_request_seconds": ("histogram", ANSWER),
}
NEW = {
    "octavo_queue_seconds",
    "octavo_saturated_values",
    "octavo_saturation_checked_values",
    "octavo_layers",
    "octavo_fp8_layers",
    "octavo_kv_cache_bytes",
}


def scrape(engine=None):
    async def scenario(client):
        await client.post(CHAT, json={"messages": HELLO})
        return (await client.get("/metrics")).text

    return with_client(scenario, engine)


def shape(family):
    """A family's type, and its labels; of a histogram the bounds of its buckets."""
    if family.type == "histogram":
        bounds = [one.labels["le"] for one in family.samples if one.name.endswith("_bucket")]
        assert {one.name.removeprefix(family.name) for one in family.samples} == {
            *("_bucket", "_sum", "_count")
        }
        return family.type, " ".join(bounds)
    return family.type, " ".join(sorted({name for one in family.samples for name in one.labels}))


def test_existing_metrics_stay_as_they_were():
    families = {family.name: family for family in text_string_to_metric_families(scrape())}
    assert {name: shape(families[name]) for name in KEPT} == KEPT
    for name, (kind, _) in KEPT.items():
        suffix = "_total" if kind == "counter" else ""
        if kind != "histogram":
            assert {one.name for one in families[name].samples} == {name + suffix}


def test_every_metric_is_known_and_none_has_a_creation_time():
    families = {family.name: family for family in text_string_to_metric_families(scrape())}
    assert families.keys() == KEPT.keys() | NEW
    assert all(family.documentation for family in families.values())


def test_two_servers_in_a_process_count_by_themselves():
    for _ in range(2):
        assert series(scrape(), "octavo_requests_total") == {("stop", CHAT): 1}


def test_the_time_in_the_queue():
    """The engine has room for one: the second request waits for all of the first."""

    async def scenario(client):
        first = {"prompt": "long:", "max_tokens": 10}
        start_s = time.perf_counter()
        await asyncio.gather(
            client.post(TEXT, json=first), client.post(TEXT, json={"prompt": "say:b"})
        )
        most_s = 2 * (time.perf_counter() - start_s)
        return (await client.get("/metrics")).text, (await client.get("/stats")).json(), most_s

    engine = FakeEngine(max_num_seqs=1, step_s=0.03)
    text, stats, most_s = with_client(scenario, engine)
    assert series(text, "octavo_queue_seconds_count") == {(): 2}
    (total_s,) = series(text, "octavo_queue_seconds_sum").values()
    assert 0.3 <= total_s < most_s
    assert stats["times"]["queue"] == {"sum_s": total_s, "count": 2}


def test_what_is_in_fp8():
    text = scrape()
    assert series(text, "octavo_layers") == {("kv_cache",): 30, ("linear",): 197}
    assert series(text, "octavo_fp8_layers") == {("kv_cache",): 28, ("linear",): 196}
    assert series(text, "octavo_kv_cache_bytes") == {
        ("float8_e4m3fn", "full_attention", "pages"): 28 * 2**20,
        ("bfloat16", "full_attention", "pages"): 4 * 2**20,
    }

    async def scenario(client):
        return (await client.get("/stats")).json()["precision"]

    assert with_client(scenario) == {
        "KV cache": "FP8 in 28 of 30 layers (2 in BF16), 32.0 MiB",
        "linear layers": "FP8 in 196 of 197 (lm_head in BF16)",
    }


def test_a_scrape_reads_the_counters_of_saturation_now_and_then():
    """The engine's thread reads them, for the next scrape, and not with every step."""

    async def scenario(client):
        engine, found = client.server.engine, []
        for _ in range(2):
            await client.post(CHAT, json={"messages": HELLO})
            found.append((await client.get("/metrics")).text)
            while client.server.engine.last_stats.saturated.keys is None:
                await asyncio.sleep(0.01)
        for _ in range(20):
            await client.get("/metrics")
            await client.get("/stats")
        await client.post(CHAT, json={"messages": HELLO})
        assert client.engine.num_readings == 1
        engine._saturation_due_s = 0.0
        await client.get("/metrics")
        while engine.last_stats.saturated.keys == 1:
            await asyncio.sleep(0.01)
        return [*found, (await client.get("/metrics")).text]

    before, first, second = with_client(scenario)
    name = "octavo_saturated_values_total"
    assert series(before, name) == {}
    assert series(first, name) == {("key",): 1, ("value",): 0, ("linear_input",): 3}
    assert series(second, name)["key",] == 2
    checked = series(second, "octavo_saturation_checked_values_total")
    assert checked == {("linear_input",): 400}
