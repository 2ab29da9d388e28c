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

from cyborgweb.cli.exit_codes import CliError, ExitCode

MAX_TOKEN_BYTES = 65_536
TOKEN_PATTERN = re.compile(r"[A-Za-z0-9._~+/=-]{1,8192}")
V2_URL_ENDING = re.compile(r"(/accelerator)?(/v2(\.\d+)?)?/*\Z")
"""How the URL of the Accelerator API in a service catalogue ends. Without this end it is the server's own URL."""
SERVICE_TYPE = "accelerator"
LOGIN_FIELDS = ("token", "token_file", "os_cloud")
"""Fields of LoginOptions that authenticate the user, in order of precedence; see `_choose_login_field`."""
LOGIN_HELP = "CYBORG_URL with CYBORG_TOKEN or CYBORG_TOKEN_FILE, or --os-cloud, or the cloud's OS_… variables"


@dataclass
class LoginOptions:
    """The connection settings from options and environment. `timeout` is in seconds, for one answer.

    `from_command_line` holds the names of the fields set on the command line, which take precedence over the
    environment.
    """

    url: str = ""
    token: str = ""
    token_file: str = ""
    os_cloud: str = ""
    cacert: str = ""
    insecure: bool = False
    timeout: float = 30.0
    from_command_line: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class UnopenedSession:
    """A keystoneauth1 session that has sent nothing yet, with the region and interface to look up in the catalogue.

    `endpoint` is the URL that clouds.yaml configures for the service; "" means that the catalogue is asked.
    """

    session: Any
    region: str | None = None
    interface: str | list[str] = "public"
    endpoint: str = ""


def open_session(login: LoginOptions) -> tuple[Any, str]:
    """Return a session and the server's URL without `/api`. Raises CliError, or keystoneauth1's errors of logging in.

    Without `login.url` the URL comes from clouds.yaml or else from the service catalogue, which costs a login at
    Keystone. With `login.cacert` or `login.insecure`, urllib3's warnings about unverified requests are switched off for
    the whole process; if both are set, the server's certificate is verified with `cacert`.
    """
    login_field = _choose_login_field(login)
    unopened = _open_cloud_session(login) if login_field == "os_cloud" else _open_token_session(login, login_field)
    if login.cacert or login.insecure:
        unopened.session.verify = login.cacert or False
        warnings.filterwarnings("ignore", message="Unverified HTTPS request")  # the user asked for it with --insecure
    unopened.session.timeout = login.timeout
    unopened.session.redirect = False  # the token must not be sent to any other address
    if login.url:
        return unopened.session, _strip_api_path(login.url)
    return unopened.session, V2_URL_ENDING.sub(
        "", _strip_api_path(unopened.endpoint or _find_url_in_catalogue(unopened))
    )


def _choose_login_field(login: LoginOptions) -> str:
    """Return which of LOGIN_FIELDS to use: the one given as an option, else the first of them that is set at all.

    If none is set, return `os_cloud`, because the OS_… variables may be set. Raises CliError if several are given as
    options.
    """
    given_options = [way for way in LOGIN_FIELDS if way in login.from_command_line]
    if len(given_options) > 1:
        raise CliError(ExitCode.USAGE, "Give only one of --token, --token-file and --os-cloud.")
    return next(iter(given_options or [way for way in LOGIN_FIELDS if getattr(login, way)]), "os_cloud")


def _find_url_in_catalogue(unopened: UnopenedSession) -> str:
    """Return the URL of the Accelerator API in the cloud's service catalogue, which costs a login at Keystone.

    Raises CliError if the catalogue does not have the service, and keystoneauth1's errors if the login fails.
    """
    from keystoneauth1.exceptions import CatalogException

    with suppress(CatalogException):
        if url := unopened.session.get_endpoint(
            service_type=SERVICE_TYPE, interface=unopened.interface, region_name=unopened.region, skip_discovery=True
        ):
            return str(url)
    raise CliError(
        ExitCode.USAGE, f"The cloud's catalogue has no service of type {SERVICE_TYPE}: give its address in --url."
    )


def _open_token_session(login: LoginOptions, login_field: str) -> UnopenedSession:
    """Return a session that sends the token of `login_field` (`token` or `token_file`) unchanged, without a login.

    Raises CliError if `login.url` is not set, the file cannot be read, or the text is no token.
    """
    from keystoneauth1.session import Session
    from keystoneauth1.token_endpoint import Token

    if not login.url:
        raise CliError(ExitCode.USAGE, "A token needs the server's address: give it in --url or CYBORG_URL.")
    token = login.token.strip() if login_field == "token" else _read_token_file(login.token_file)
    if not TOKEN_PATTERN.fullmatch(token):
        raise CliError(ExitCode.USAGE, "This is no token: `manage.py api_token NAME` prints one as its last line.")
    return UnopenedSession(Session(auth=Token(login.url, token)))


def _read_token_file(path: str) -> str:
    """Return the last word of the token file, so that the whole output of `manage.py api_token` may be stored in it.

    Only the first MAX_TOKEN_BYTES are read; '' if there is no word. Raises CliError if the file cannot be read.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            words = file.read(MAX_TOKEN_BYTES).decode(errors="replace").split()
    except OSError as error:
        raise CliError(ExitCode.USAGE, f"The token file {path} cannot be read: {error.strerror}.") from None
    return words[-1] if words else ""


def _open_cloud_session(login: LoginOptions) -> UnopenedSession:
    """Return a session of the cloud in clouds.yaml or, if none is named, of the OS_… variables; it sends no request.

    Raises CliError if neither is set, or if they cannot be used.
    """
    from keystoneauth1.exceptions import ClientException
    from keystoneauth1.identity.generic.base import BaseGenericPlugin

    cloud = login.os_cloud or os.environ.get("OS_CLOUD", "")
    if not cloud and not any(os.environ.get(name) for name in ("OS_AUTH_URL", "OS_AUTH_TYPE", "OS_TOKEN")):
        raise CliError(ExitCode.NOT_ALLOWED, f"You are not logged in. Log in with {LOGIN_HELP}.")
    try:
        unopened = _load_clouds_yaml(cloud) if cloud else _load_os_variables()
    except ClientException as error:
        raise CliError(ExitCode.USAGE, f"The OS_… variables cannot be used: {error}") from None
    auth = unopened.session.auth
    if isinstance(auth, BaseGenericPlugin):
        # A generic plugin discovers the version of Identity first. If that request is answered with 401, keystoneauth1
        # 5.18 waits for ever for a lock that it holds itself. So v3 is chosen here.
        url = auth.auth_url.rstrip("/")
        unopened.session.auth = auth.create_plugin(
            unopened.session, (3, 0), url if url.endswith("/v3") else f"{url}/v3"
        )
    return unopened


def _load_clouds_yaml(cloud: str) -> UnopenedSession:
    """Return a session of one cloud in clouds.yaml.

    Raises CliError if openstacksdk is missing or the cloud is unusable.
    """
    if find_spec("openstack") is None:
        raise CliError(
            ExitCode.USAGE, "clouds.yaml is read by openstacksdk: pip install openstacksdk, or use the OS_… variables."
        )
    from openstack.config import get_cloud_region
    from openstack.exceptions import ConfigException

    try:
        region = get_cloud_region(cloud=cloud)
        interface = region.get_interface(SERVICE_TYPE) or "public"
        return UnopenedSession(
            region.get_session(), region.region_name, interface, region.get_endpoint(SERVICE_TYPE) or ""
        )
    except ConfigException as error:
        raise CliError(ExitCode.USAGE, f"The cloud {cloud!r} cannot be used: {error}") from None


def _load_os_variables() -> UnopenedSession:
    """Return a session of the plugin that OS_AUTH_TYPE names, with the OS_… variables as keystoneauth1 reads them.

    Without OS_AUTH_TYPE the plugin is `v3applicationcredential` if such a credential is set, else `password`. Raises
    keystoneauth1's ClientException if the plugin is unknown or a variable is missing.
    """
    from keystoneauth1 import loading

    has_application_credential = os.environ.get("OS_APPLICATION_CREDENTIAL_ID") or os.environ.get(
        "OS_APPLICATION_CREDENTIAL_NAME"
    )
    parser = argparse.ArgumentParser()
    loading.register_auth_argparse_arguments(
        parser, [], "v3applicationcredential" if has_application_credential else "password"
    )
    loading.register_session_argparse_arguments(parser)
    arguments = parser.parse_args([])
    session = loading.load_session_from_argparse_arguments(
        arguments, auth=loading.load_auth_from_argparse_arguments(arguments)
    )
    if os.environ.get("OS_INSECURE", "").lower() in ("1", "true", "yes"):
        session.verify = False
    return UnopenedSession(
        session, os.environ.get("OS_REGION_NAME") or None, os.environ.get("OS_INTERFACE") or "public"
    )


def _strip_api_path(url: str) -> str:
    """Return the server's URL without a trailing `/` and `/api`.

    Raises CliError if the URL is no HTTP(S) URL, or has a user, a query or a fragment.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise CliError(ExitCode.USAGE, f"{url!r} is no address of the API: write https://HOST[:PORT].")
    return url.rstrip("/").removesuffix("/api")
