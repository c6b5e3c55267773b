"""Requests that are made up from our OpenAPI document find no failure of the server, and answers are as it says."""

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from tiny_serving import Served, scene_folder

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def document(tiny_model, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("schema")
    (folder / "scenes").mkdir()
    scenes = scene_folder(folder / "scenes")
    with Served(tiny_model, tiny_tokenizer, scenes, folder / "data", persistence=True) as served:
        video = {"scene": "day", "trajectory_name": "left"}
        httpx.post(f"{served.url}/v1/videos", json=video).raise_for_status()
        yield schemathesis.openapi.from_url(f"{served.url}/openapi.json")


@pytest.mark.slow
def test_made_up_requests(document):
    checks = schemathesis.specs.openapi.checks
    wanted = [
        schemathesis.checks.not_a_server_error,
        checks.response_schema_conformance,
        checks.status_code_conformance,
        checks.content_type_conformance,
    ]
    paths = set()
    for found in document.get_all_operations():
        operation = found.ok()
        paths.add(operation.path)

        @settings(
            max_examples=15,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=[*HealthCheck],
        )
        @given(operation.as_strategy())
        def check(case):
            answer = case.call()
            assert answer.status_code < 500, answer.text
            case.validate_response(answer, checks=wanted)

        check()
    assert {"/v1/videos", "/v1/videos/{video_id}/content", "/v1/contexts", "/metrics"} <= paths
