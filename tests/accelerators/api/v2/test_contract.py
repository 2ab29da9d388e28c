"""Test the tables of the v2 contract: routes, tokens, microversions, methods, Accept headers, and forms of errors."""

from __future__ import annotations

import json

import pytest
from django.contrib.auth.models import User
from django.test import Client

from cyborgweb.models import ApiToken
from tests.accelerators.api.v2.conftest import Get

pytestmark = pytest.mark.django_db

UUID = "604c1d0e-3f10-4d5c-9c6b-6e0f9a3c1b2d"
NOT_FOUND = "404 Not Found\n\nThe resource could not be found.\n\n   "
UNACCEPTABLE = (
    "406 Not Acceptable\n\nThe resource could not be generated that was acceptable to your browser "
    "(content of type ${HTTP_ACCEPT}. \n\n "
)
MICROVERSION_HEADERS = (
    "OpenStack-API-Version",
    "OpenStack-API-Minimum-Version",
    "OpenStack-API-Maximum-Version",
    "Vary",
)


def get_microversion_headers(response: object) -> list[str | None]:
    """Return the four microversion headers of a response; None for an absent one."""
    return [response.headers.get(name) for name in MICROVERSION_HEADERS]  # type: ignore[attr-defined]


def get_fault(response: object) -> tuple[str, str]:
    """Return the faultcode and the sentence of an error of form A; check its form."""
    body = json.loads(response.content)  # type: ignore[attr-defined]
    assert list(body) == ["error_message"]
    inner = json.loads(body["error_message"])
    assert list(inner) == ["faultcode", "faultstring", "debuginfo"]
    assert inner["debuginfo"] is None
    return inner["faultcode"], inner["faultstring"]


@pytest.mark.parametrize("path", ["/", "/accelerator", "/accelerator/", ""])
def test_the_root_document_is_public_and_has_no_microversion(client: Client, path: str) -> None:
    response = client.get(path, headers={"OpenStack-API-Version": "nonsense", "Host": "testserver"})
    version = {
        "id": "v2",
        "status": "CURRENT",
        "max_version": "2.3",
        "min_version": "2.0",
        "links": [{"href": "http://testserver/accelerator/v2", "rel": "self"}],
    }
    assert response.status_code == 200
    assert response["Content-Type"] == "application/json"
    body = json.loads(response.content)
    assert list(body) == ["name", "description", "versions", "default_version"]
    assert body["name"] == "OpenStack Cyborg API"
    assert "GPUs,FPGAs, AI chips" in body["description"]
    assert (body["versions"], body["default_version"]) == ([version], version)
    assert list(body["default_version"]) == list(version)
    assert get_microversion_headers(response) == [None] * 4
    assert response["x-openstack-request-id"].startswith("req-")


@pytest.mark.parametrize("path", ["/v2", "/v2/", "/v2.json", "/accelerator/v2", "/accelerator/v2/"])
def test_the_version_document_is_public_and_negotiates_the_microversion(client: Client, path: str) -> None:
    response = client.get(path, headers={"OpenStack-API-Version": "accelerator latest"})
    assert response.content == (
        b'{"id":"v2.0","links":[{"href":"http://testserver/accelerator/v2/","rel":"self"}],'
        b'"max_version":"2.3","min_version":"2.0","status":"CURRENT"}'
    )
    assert get_microversion_headers(response) == ["accelerator 2.3", "2.0", "2.3", "OpenStack-API-Version"]
    assert client.get(path, headers={"OpenStack-API-Version": "accelerator 2.9"}).status_code == 406


@pytest.mark.parametrize("path", ["/v2/devices", "/devices", "/nope", "/v2/nope", "/accelerator/v2/deployables/x"])
@pytest.mark.parametrize("headers", [{}, {"X-Auth-Token": "wrong"}, {"OpenStack-API-Version": "abc"}])
def test_requests_without_a_valid_token_are_answered_401(client: Client, path: str, headers: dict[str, str]) -> None:
    response = client.get(path, headers=headers)
    assert response.status_code == 401
    assert json.loads(response.content) == {
        "error": {
            "code": 401,
            "title": "Unauthorized",
            "message": "The request you have made requires authentication.",
        }
    }
    assert response["WWW-Authenticate"].startswith('Keystone uri="http')
    assert response["x-openstack-request-id"].startswith("req-")
    assert get_microversion_headers(response) == [None] * 4


SERVED_VERSIONS = [
    ("", "2.0"),
    ("accelerator 2.0", "2.0"),
    ("2.0", "2.0"),
    ("2.1", "2.1"),
    ("accelerator 2.3", "2.3"),
    ("accelerator latest", "2.3"),
    ("latest", "2.3"),
    ("accelerator LATEST", "2.3"),
    ("accelerator 2.01", "2.1"),
    ("compute 2.1,accelerator 2.2", "2.2"),
    ("accelerator +2.1", "2.1"),
    ("accelerator 2. 1", "2.1"),
    ("accelerator 2.00000000001", "2.1"),
]


@pytest.mark.parametrize(("asked", "given"), SERVED_VERSIONS)
def test_supported_microversions_are_served(get: Get, asked: str, given: str) -> None:
    response = get("/v2/devices", asked)
    assert response.status_code == 200
    assert get_microversion_headers(response) == [f"accelerator {given}", "2.0", "2.3", "OpenStack-API-Version"]


SUPPORTED_RANGE = "The supported version range is: [2.0, 2.3]."
UNSUPPORTED_MINOR = (
    f"Version {{}} was requested but the minor version is not supported by this service. {SUPPORTED_RANGE}"
)
UNSUPPORTED_MAJOR = (
    "Mutually exclusive versions requested. Version {} requested but not supported by this service. " + SUPPORTED_RANGE
)
INVALID_HEADER = "Invalid value for OpenStack-API-Version header"
REFUSED_VERSIONS = [
    ("accelerator 2.4", UNSUPPORTED_MINOR.format("2.4")),
    ("2.9", UNSUPPORTED_MINOR.format("2.9")),
    ("accelerator 1.0", UNSUPPORTED_MAJOR.format("1.0")),
    ("accelerator 3.0", UNSUPPORTED_MAJOR.format("3.0")),
    ("accelerator -1.0", UNSUPPORTED_MAJOR.format("-1.0")),
    ("-2.1", UNSUPPORTED_MAJOR.format("-2.1")),
    ("accelerator 2.-1", UNSUPPORTED_MINOR.format("2.-1")),
    ("accelerator 999999999999.0", UNSUPPORTED_MAJOR.format("999999999999.0")),
    ("accelerator 2.999999999999", UNSUPPORTED_MINOR.format("2.999999999999")),
    *((asked, INVALID_HEADER) for asked in ("accelerator 10", "accelerator 2", "accelerator 2.0.0", "abc")),
    *(
        (asked, INVALID_HEADER)
        for asked in ("compute 2.50", "placement latest", "accelerator", ",", "2.\u0661", "2.0 2.1 2.2")
    ),
    *((asked, INVALID_HEADER) for asked in ("-.1", "2.", "9" * 5000 + ".0")),
]


@pytest.mark.parametrize("path", ["/v2/devices", "/v2/nope", "/v2/devices?foo=1"])
@pytest.mark.parametrize(("asked", "text"), REFUSED_VERSIONS)
def test_unsupported_microversions_are_refused_before_routing(get: Get, path: str, asked: str, text: str) -> None:
    response = get(path, asked)
    assert response.status_code == 406
    assert json.loads(response.content) == {"error_message": UNACCEPTABLE + text}
    assert get_microversion_headers(response) == (
        [None] * 4 if text == INVALID_HEADER else [None, "2.0", "2.3", "OpenStack-API-Version"]
    )


@pytest.mark.parametrize(
    "path",
    ["/v1", "/v3", "/v2.0", "/nope", "/v2/nope", "/v2/v2/devices", f"/v2/devices/{UUID}/nope", "/accelerator/nope"],
)
def test_unknown_urls_are_answered_404_by_the_router(get: Get, path: str) -> None:
    response = get(path, "2.3")
    assert response.status_code == 404
    assert json.loads(response.content) == {"error_message": NOT_FOUND}
    assert response["Content-Type"] == "application/json"
    assert get_microversion_headers(response) == [None] * 4


@pytest.mark.parametrize("resource", ["devices", "deployables"])
def test_every_spelling_of_a_url_gets_the_same_answer(get: Get, resource: str) -> None:
    spellings = [f"{mount}/{resource}{end}" for mount in ("", "/v2", "/accelerator/v2") for end in ("", "/", ".json")]
    assert {get(path).content for path in spellings} == {b'{"%s":[]}' % resource.encode()}


@pytest.mark.parametrize(("path", "status"), [("/admin/", 302), ("/healthz", 200), ("/readyz", 200), ("/ws/x", 404)])
def test_urls_outside_v2_are_answered_by_other_applications(client: Client, path: str, status: int) -> None:
    assert client.get(path).status_code == status


UNSUPPORTED_METHODS = [
    *(
        (path, method, 405)
        for path in ("/v2", "/v2/devices")
        for method in ("HEAD", "OPTIONS", "PUT", "POST", "DELETE")
    ),
    *((f"/v2/deployables/{UUID}", method, 405) for method in ("HEAD", "OPTIONS", "PUT", "POST", "DELETE", "PATCH")),
    ("/v2/devices", "PATCH", 404),
    ("/v2/deployables", "PATCH", 404),
    (f"/v2/devices/{UUID}", "PATCH", 405),
    ("/", "POST", 405),
    ("/nope", "PUT", 405),
    ("/nope", "HEAD", 405),
]


@pytest.mark.parametrize(("path", "method", "status"), UNSUPPORTED_METHODS)
def test_unsupported_methods_are_answered_405_with_allow_or_404(get: Get, path: str, method: str, status: int) -> None:
    response = get(path, method=method)
    assert response.status_code == status
    assert response.headers.get("Allow") == ("GET" if status == 405 else None)
    assert get_microversion_headers(response) == [None] * 4
    if method != "HEAD":
        text = f"405 Method Not Allowed\n\nThe method {method} is not allowed for this resource. \n\n "
        assert json.loads(response.content) == {"error_message": text if status == 405 else NOT_FOUND}


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ("*/*", 200),
        ("", 200),
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("text/html,*/*;q=0.8", 200),
        ("text/html", 406),
        ("application/xml", 406),
        ("text/plain", 406),
    ],
)
def test_an_accept_header_that_excludes_json_is_answered_406(get: Get, accept: str, status: int) -> None:
    response = get("/v2/devices", Accept=accept)
    assert response.status_code == status
    assert response["Content-Type"] == "application/json"
    if status == 406:
        text = json.loads(response.content)["error_message"]
        assert text.startswith("<html>" if accept == "text/html" else UNACCEPTABLE.replace("${HTTP_ACCEPT}", accept))
        assert get_microversion_headers(response) == [None] * 4


def test_browsers_get_html_pages(get: Get) -> None:
    browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    for path, status in (("/v2/devices", 200), ("/v2/nope", 404), ("/", 200)):
        response = get(path, Accept=browser)
        assert (response.status_code, response["Content-Type"]) == (status, "text/html; charset=utf-8")


def test_a_404_for_clients_that_prefer_html_contains_a_page_in_the_json_string(get: Get) -> None:
    text = json.loads(get("/v2/nope", Accept="text/html,*/*;q=0.8").content)["error_message"]
    assert text.startswith("<html>\n <head>\n  <title>404 Not Found</title>")


@pytest.mark.parametrize("path", ["/v2/devices?foo=1", "/v2/devices/x", "/v2/deployables", "/v2/deployables/nope"])
def test_a_token_without_a_project_is_refused_by_policy(client: Client, path: str) -> None:
    secret = ApiToken.create_with_secret("system", User.objects.create_user("sam"), ["admin"], "")
    response = client.get(path, headers={"X-Auth-Token": secret, "OpenStack-API-Version": "2.3"})
    resource = "device" if "devices" in path else "deployable"
    rule = f"cyborg:{resource}:{'get_one' if path.count('/') == 3 else 'get_all'}"
    assert response.status_code == 403
    assert get_fault(response) == ("Client", f"Access was denied to the following resource: {rule}")
    assert get_microversion_headers(response) == ["accelerator 2.3", "2.0", "2.3", "OpenStack-API-Version"]


INVALID_INPUT = "Invalid input for field/attribute {}. Value: '{}'. {}"
NOT_A_COUNT = "It must be an integer, 0 or more."
REFUSALS = [
    ("/v2?foo=1", 400, 'Unknown argument: "foo"'),
    ("/v2/devices?foo=1&bar=2", 400, 'Unknown argument: "bar, foo"'),
    ("/v2/devices?status=enabled", 400, 'Unknown argument: "status"'),
    ("/v2/devices?sort_key=id", 400, 'Unknown argument: "sort_key"'),
    ("/v2/deployables?type=GPU", 400, 'Unknown argument: "type"'),
    (f"/v2/devices/{UUID}?type=GPU", 400, 'Unknown argument: "type"'),
    ("/v2/devices?type=%00", 400, INVALID_INPUT.format("type", "\\0", "It must not contain NUL.")),
    ("/v2/devices?limit=abc", 400, INVALID_INPUT.format("limit", "abc", NOT_A_COUNT)),
    ("/v2/devices?limit=-1", 400, INVALID_INPUT.format("limit", "-1", NOT_A_COUNT)),
    (
        f"/v2/devices?marker={UUID}",
        400,
        INVALID_INPUT.format("marker", UUID, "It must be the uuid of an item of this list."),
    ),
    ("/v2/devices?filters=%7B%7D", 400, INVALID_INPUT.format("filters", "{}", "unable to convert to ArrayType.")),
    ("/v2/devices?filters.field=limit&filters.value=abc", 400, INVALID_INPUT.format("limit", "abc", NOT_A_COUNT)),
    (
        "/v2/devices?filters.field=sort_key&filters.value=x",
        400,
        'The sort_key value "x" is an invalid field for sorting',
    ),
    (
        "/v2/devices?filters.field=sort_dir&filters.value=up",
        400,
        INVALID_INPUT.format("sort_dir", "up", "Value should be one of: asc, desc"),
    ),
    (
        "/v2/devices?filters.field=limit",
        400,
        'Missing argument: "filters.value"',
    ),
    ("/v2/devices/nope", 404, "Device not found with uuid=nope"),
    (f"/v2/devices/{UUID}", 404, f"Device not found with uuid={UUID}"),
    (f"/v2/deployables/{UUID}", 404, f"Deployable not found with uuid={UUID}"),
    (f"/v2/deployables/{UUID.upper()}", 404, f"Deployable not found with uuid={UUID.upper()}"),
    (
        "/v2/deployables/nope",
        400,
        "Invalid input for field/attribute uuid. Value: 'nope'. unable to convert to uuid. "
        "Error: Expected a uuid but received nope.",
    ),
]


@pytest.mark.parametrize(("path", "status", "sentence"), REFUSALS)
def test_handlers_refuse_requests_with_one_sentence(get: Get, path: str, status: int, sentence: str) -> None:
    response = get(path)
    assert (response.status_code, get_fault(response)) == (status, ("Client", sentence))
    assert response["Content-Type"] == "application/json"
    assert get_microversion_headers(response) == ["accelerator 2.0", "2.0", "2.3", "OpenStack-API-Version"]


def test_an_unknown_filter_field_is_refused(get: Get) -> None:
    response = get("/v2/deployables?filters.field=vendor&filters.value=x")
    assert response.status_code == 400
    assert get_fault(response)[1].startswith(INVALID_INPUT.format("field", "vendor", "Value should be one of: "))


def test_more_query_parameters_than_django_allows_are_answered_400(get: Get) -> None:
    assert get("/v2/devices?" + "&".join(f"a{n}=1" for n in range(2000))).status_code == 400


def test_an_unexpected_exception_is_answered_500_without_its_details(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import ProgrammingError

    from accelerators.api.v2.resource import V2Resource

    def broken(*_: object) -> bytes:
        raise ProgrammingError("SELECT secret FROM /var/lib")

    monkeypatch.setattr(V2Resource, "fetch_list", broken)
    response = get("/v2/devices")
    assert response.status_code == 500
    code, sentence = get_fault(response)
    assert code == "Server"
    assert "SELECT" not in sentence
    assert "/var" not in sentence
    assert get_microversion_headers(response)[0] == "accelerator 2.0"


def test_an_unavailable_database_is_answered_503(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import OperationalError

    from accelerators.api.v2.resource import V2Resource

    def away(*_: object) -> bytes:
        raise OperationalError("connection to server on socket /run/x failed")

    monkeypatch.setattr(V2Resource, "fetch_list", away)
    response = get("/v2/devices")
    assert response.status_code == 503
    assert get_fault(response) == ("Server", "The database does not answer; try again in a moment.")
