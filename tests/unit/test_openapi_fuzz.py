"""Requests drawn from the OpenAPI document: no fault of the server, and answers as it says."""

import warnings

import pytest
from hypothesis import HealthCheck, given, settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries it is made of
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

from rose.serving.gateway.app import create_app
from rose.serving.gateway.openapi import openapi
from rose.serving.gateway.routes import OPERATIONS
from rose.serving.gateway.server import Door
from rose.serving.process import listen
from tests.unit.gateway_stub import StubClient
from tests.unit.generation_stub import StubLLM
from tests.unit.test_gateway_doors import _thread as serving

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


def operations():
    """Methods and paths that the document has."""
    paths = openapi(OPERATIONS, False)["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


@pytest.fixture(scope="module")
def document():
    """The document of a server that runs."""
    app = create_app({"stub": StubClient(), "llm": StubLLM([70] * 5)})
    with listen("127.0.0.1", 0) as listener, serving(app, Door(listener=listener)):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/openapi.json"
        yield schemathesis.openapi.from_url(url)


@pytest.mark.parametrize(("method", "path"), operations())
def test_answers_are_as_the_document_says(document, method, path):
    @given(case=document[path][method].as_strategy())
    @settings(
        max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    def check(case):
        case.call_and_validate(checks=CHECKS)

    check()
