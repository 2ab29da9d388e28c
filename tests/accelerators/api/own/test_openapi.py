"""Test the OpenAPI document: it is valid, committed, served, and equal to what the API accepts and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from django.test import Client

from cyborgweb.api import openapi
from tests.accelerators.api.own.conftest import Ask, Fill

COMMITTED_DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "openapi.yaml"


def test_the_committed_openapi_document_is_valid_and_up_to_date() -> None:
    openapi.validate_document()
    assert COMMITTED_DOCUMENT.read_text() == openapi.render_yaml(), "run `make docs`"


def test_the_openapi_document_is_served_as_yaml_and_as_json(client: Client) -> None:
    served = client.get("/api/schema/")
    assert served.content.decode() == COMMITTED_DOCUMENT.read_text()
    assert served["Content-Type"] == "application/vnd.oai.openapi"
    as_json = client.get("/api/schema", headers={"Accept": "application/json"})
    assert json.loads(as_json.content)["paths"].keys() == openapi.generate_document()["paths"].keys()


def test_every_operation_documents_its_refusals_and_query_parameters() -> None:
    document = openapi.generate_document()
    for address, methods in document["paths"].items():
        for method, operation in methods.items():
            assert {"400", "401", "403", "406", "503"} <= set(operation["responses"]), address
            if method == "get":
                names = {parameter["name"] for parameter in operation["parameters"]}
                assert {"fields", "If-None-Match"} <= names
                assert ("cursor" in names) == ("{" not in address)
    assert document["components"]["schemas"]["ProfileRequest"]["additionalProperties"] is False


@pytest.mark.slow
@pytest.mark.django_db
def test_list_answers_have_exactly_the_documented_fields(ask: Ask, fill: Fill) -> None:
    fill(2)
    ask("/api/rules/", method="POST", data={"name": "all", "action": "inactive"})
    ask("/api/join_tokens/", method="POST", data={"host": "cmp9", "address": "https://10.0.0.1:8443"})
    inbox = {"name": "mine", "kinds": ["request.bound"], "way": "inbox"}
    mine = json.loads(ask("/api/subscriptions/", method="POST", data=inbox).content)
    ask(f"/api/subscriptions/{mine['uuid']}/test/", method="POST")
    document = openapi.generate_document()
    for address, methods in document["paths"].items():
        if "{" not in address and "get" in methods:
            page = methods["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
            element = document["components"]["schemas"][page.rpartition("/")[2]]["properties"]["results"]["items"]
            fields = document["components"]["schemas"][element["$ref"].rpartition("/")[2]]["properties"]
            rows = json.loads(ask(address).content)["results"]
            assert [list(row) for row in rows[:1]] == [list(fields)]


def test_the_documented_schemas_of_units_and_rollouts_match_their_validation() -> None:
    document = openapi.generate_document()
    schemas = document["components"]["schemas"]
    assert [way["required"] for way in schemas["AddUnitsRequest"]["allOf"][0]["oneOf"]] == [["targets"], ["selector"]]
    assert [way["required"] for way in schemas["TargetRequest"]["oneOf"]] == [["device"], ["host", "backend"]]
    assert schemas["RolloutWithStepsRequest"]["properties"]["settings"]["type"] == ["object", "null"]
    for address in ("/api/accelerators/", "/api/accelerators/delete/", "/api/rollouts/"):
        assert "404" in document["paths"][address]["post"]["responses"]


def test_usage_is_documented_as_json_and_as_an_event_stream() -> None:
    said = openapi.generate_document()["paths"]["/api/devices/{uuid}/usage/"]["get"]
    assert {*said["responses"]["200"]["content"]} == {"application/json", "text/event-stream"}
    assert "every second" in said["description"]
