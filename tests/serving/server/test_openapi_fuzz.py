"""schemathesis over the OpenAPI schema: whatever comes, no 5xx."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.fake_server import listening


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_input_leads_to_a_server_error():
    limits = ServerSettings(max_tokens=64)
    with listening(settings=limits) as (base_url, engine, server):
        schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
        num_operations = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            num_operations += 1
            for mode in schemathesis.GenerationMode:

                @given(case=operation.as_strategy(generation_mode=mode))
                @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
                def check(case):
                    response = case.call(base_url=base_url)
                    assert response.status_code < 500, (case, response.text)

                try:
                    check()
                except Unsatisfiable:
                    # Without a body there is nothing that can be wrong.
                    assert operation.method == "get" and mode.is_negative
        assert num_operations >= 9
        assert engine.num_open == 0
        assert server.status() == (200, "ok")
        assert engine.added
