"""Authentication of the `cyborg` command: a token with an address, or any authentication plugin of keystoneauth1.

No error message contains a secret.
"""

from __future__ import annotations

import argparse
import os
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cyborgweb.cli.problems import CliError, Exit

MAX_TOKEN_BYTES = 65_536
TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,8192}")
V2 = re.compile(r"(/accelerator)?(/v2(\.\d+)?)?/*\Z")
"""How the URL of the Accelerator API in a service catalogue ends. Without this end it is the server's own URL."""
SERVICE = "accelerator"
WAYS = ("token", "token_file", "os_cloud")
"""Fields of Login that authenticate the user, in order of precedence; see `_chosen`."""
HOW = "CYBORG_URL with CYBORG_TOKEN or CYBORG_TOKEN_FILE, or --os-cloud, or the cloud's OS_… variables"


@dataclass
class Login:
    """The connection settings from options and environment. `timeout` is in seconds, for one answer.

    `on_line` holds the names of the fields set on the command line, which take precedence over the environment.
    """

    url: str = ""
    token: str = ""
    token_file: str = ""
    os_cloud: str = ""
    cacert: str = ""
    insecure: bool = False
    timeout: float = 30.0
    on_line: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Way:
    """A keystoneauth1 session that has sent nothing yet, with the region and interface to look up in the catalogue.

    `endpoint` is the URL that clouds.yaml configures for the service; "" means that the catalogue is asked.
    """

    session: Any
    region: str | None = None
    interface: str | list[str] = "public"
    endpoint: str = ""


def open_session(login: Login) -> tuple[Any, str]:
    """Return a session and the server's URL without `/api`. Raises CliError, or keystoneauth1's errors of logging in.

    Without `login.url` the URL comes from the service catalogue, which costs a login at Keystone.
    """
    chosen = _chosen(login)
    way = _by_cloud(login) if chosen == "os_cloud" else _by_token(login, chosen)
    if login.cacert or login.insecure:
        way.session.verify = login.cacert or False
        warnings.filterwarnings("ignore", message="Unverified HTTPS request")  # the user asked for it with --insecure
    way.session.timeout = login.timeout
    way.session.redirect = False  # the token must not be sent to any other address
    if login.url:
        return way.session, _root(login.url)
    return way.session, V2.sub("", _root(way.endpoint or _catalogued(way)))


def _chosen(login: Login) -> str:
    """Return which of WAYS to use: the one given as an option, else the first one set in the environment.

    If none is set, return `os_cloud`, because the OS_… variables may be set. Raises CliError for several options.
    """
    on_line = [way for way in WAYS if way in login.on_line]
    if len(on_line) > 1:
        raise CliError(Exit.USAGE, "Give only one of --token, --token-file and --os-cloud.")
    return next(iter(on_line or [way for way in WAYS if getattr(login, way)]), "os_cloud")


def _catalogued(way: Way) -> str:
    """Return the URL of the Accelerator API in the cloud's service catalogue. Raises CliError if it has none."""
    from keystoneauth1.exceptions import CatalogException

    with suppress(CatalogException):
        if found := way.session.get_endpoint(
            service_type=SERVICE, interface=way.interface, region_name=way.region, skip_discovery=True
        ):
            return str(found)
    raise CliError(Exit.USAGE, f"The cloud's catalogue has no service of type {SERVICE}: give its address in --url.")


def _by_token(login: Login, way: str) -> Way:
    from keystoneauth1.session import Session
    from keystoneauth1.token_endpoint import Token

    if not login.url:
        raise CliError(Exit.USAGE, "A token needs the server's address: give it in --url or CYBORG_URL.")
    token = login.token.strip() if way == "token" else _of_file(login.token_file)
    if not TOKEN.fullmatch(token):
        raise CliError(Exit.USAGE, "This is no token: `manage.py api_token NAME` prints one as its last line.")
    return Way(Session(auth=Token(login.url, token)))


def _of_file(path: str) -> str:
    """Return the last word of the token file, so that the whole output of `manage.py api_token` may be stored in it."""
    try:
        with Path(path).expanduser().open("rb") as file:
            lines = file.read(MAX_TOKEN_BYTES).decode(errors="replace").split()
    except OSError as error:
        raise CliError(Exit.USAGE, f"The token file {path} cannot be read: {error.strerror}.") from None
    return lines[-1] if lines else ""


def _by_cloud(login: Login) -> Way:
    from keystoneauth1.exceptions import ClientException
    from keystoneauth1.identity.generic.base import BaseGenericPlugin

    cloud = login.os_cloud or os.environ.get("OS_CLOUD", "")
    if not cloud and not any(os.environ.get(name) for name in ("OS_AUTH_URL", "OS_AUTH_TYPE", "OS_TOKEN")):
        raise CliError(Exit.NOT_ALLOWED, f"You are not logged in. Log in with {HOW}.")
    try:
        way = _of_clouds_yaml(cloud) if cloud else _of_variables()
    except ClientException as error:
        raise CliError(Exit.USAGE, f"The OS_… variables cannot be used: {error}") from None
    auth = way.session.auth
    if isinstance(auth, BaseGenericPlugin):
        # A generic plugin discovers the version of Identity first. If that request is answered with 401, keystoneauth1
        # 5.18 waits for ever for a lock that it holds itself. So v3 is chosen here.
        url = auth.auth_url.rstrip("/")
        way.session.auth = auth.create_plugin(way.session, (3, 0), url if url.endswith("/v3") else f"{url}/v3")
    return way


def _of_clouds_yaml(cloud: str) -> Way:
    if find_spec("openstack") is None:
        raise CliError(
            Exit.USAGE, "clouds.yaml is read by openstacksdk: pip install openstacksdk, or use the OS_… variables."
        )
    from openstack.config import get_cloud_region
    from openstack.exceptions import ConfigException

    try:
        region = get_cloud_region(cloud=cloud)
        interface = region.get_interface(SERVICE) or "public"
        return Way(region.get_session(), region.region_name, interface, region.get_endpoint(SERVICE) or "")
    except ConfigException as error:
        raise CliError(Exit.USAGE, f"The cloud {cloud!r} cannot be used: {error}") from None


def _of_variables() -> Way:
    """Return a session of the plugin that OS_AUTH_TYPE names, with the OS_… variables as keystoneauth1 reads them.

    Without OS_AUTH_TYPE the plugin is `v3applicationcredential` if such a credential is set, else `password`.
    """
    from keystoneauth1 import loading

    application = os.environ.get("OS_APPLICATION_CREDENTIAL_ID") or os.environ.get("OS_APPLICATION_CREDENTIAL_NAME")
    parser = argparse.ArgumentParser()
    loading.register_auth_argparse_arguments(parser, [], "v3applicationcredential" if application else "password")
    loading.register_session_argparse_arguments(parser)
    said = parser.parse_args([])
    session = loading.load_session_from_argparse_arguments(said, auth=loading.load_auth_from_argparse_arguments(said))
    if os.environ.get("OS_INSECURE", "").lower() in ("1", "true", "yes"):
        session.verify = False
    return Way(session, os.environ.get("OS_REGION_NAME") or None, os.environ.get("OS_INTERFACE") or "public")


def _root(url: str) -> str:
    """Return the server's URL without a trailing `/` and `/api`. Raises CliError if it is no plain HTTP(S) URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise CliError(Exit.USAGE, f"{url!r} is no address of the API: write https://HOST[:PORT].")
    return url.rstrip("/").removesuffix("/api")
