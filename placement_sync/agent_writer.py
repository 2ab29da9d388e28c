"""Write to Placement from the compute host itself, with the host's own credentials. It does not use Django.

The agent loads it through the entry point `direct` of the group `cyborg.placement`, because `agents` and
`placement_sync` do not import each other. The conductor sends what is desired, because only the conductor knows it. The
rest is the conductor's own code (`reconcile`, `apply_writes`, `client`). Libraries that it needs besides msgspec are
imported at the first command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from placement_sync.apply_writes import ProviderMissingError, synchronize_host
from placement_sync.client import (
    PlacementClient,
    PlacementConflictError,
    PlacementRejectedError,
    PlacementUnavailableError,
    WriterStoppedError,
)
from placement_sync.errors import PlacementSyncError
from placement_sync.mapping import DesiredProvider
from placement_sync.reconcile import WrittenRecord

CLOUD_FILES = ("clouds.yaml", "clouds.yml")
CLOUD_DIRECTORIES = (Path("."), Path("~/.config/openstack"), Path("/etc/openstack"))
"""Directories in which openstacksdk looks for clouds.yaml."""

WriteResult = tuple[str, str]
"""The result and a sentence that describes it. Results: `succeeded`; `failed`, after at least one write was tried;
`refused`, before any write was tried.
"""


class ProviderWork(msgspec.Struct, frozen=True, omit_defaults=True):
    """The desired providers of one host. `written` and `root` come from the conductor's last look and save reads."""

    desired: dict[str, DesiredProvider]
    written: dict[str, WrittenRecord] = {}
    root: str = ""
    endpoint: str = ""


def lacks(environ: Mapping[str, str]) -> str:
    """Return why this host cannot write to Placement, or '' if it can. Makes no calls and imports nothing."""
    if find_spec("keystoneauth1") is None:
        return "keystoneauth1 is not installed on the host: pip install 'cyborgweb[placement]'"
    if environ.get("OS_AUTH_URL"):
        return ""
    if not environ.get("OS_CLOUD") and not environ.get("OS_CLIENT_CONFIG_FILE"):
        if any((place.expanduser() / name).is_file() for place in CLOUD_DIRECTORIES for name in CLOUD_FILES):
            return "the host has a clouds.yaml: set OS_CLOUD to the cloud that the agent is to use"
        return "the host has no credentials: give its agent OS_CLOUD and a clouds.yaml, or OS_AUTH_URL, OS_USERNAME …"
    if find_spec("openstack") is None:
        return "clouds.yaml is read by openstacksdk, which is not installed on the host; OS_AUTH_URL works without it"
    return ""


def write(host: str, payload: str, environ: Mapping[str, str], refused: Callable[[], str]) -> WriteResult:
    """Make Placement show the providers of `payload` (a ProviderWork) below the compute provider `host`.

    `refused` is called before each call to Placement and returns why this host may not write any more, or '' while it
    may. Blocks until Placement has answered all calls. Expected errors are returned as 'refused' or 'failed', not
    raised.
    """

    def raise_if_stopped() -> None:
        """Raise WriterStoppedError with the reason if this host may not write any more."""
        if why := refused():
            raise WriterStoppedError(why)

    placement = None
    try:
        work = msgspec.json.decode(payload, type=ProviderWork)
        placement = PlacementClient(_open_adapter(environ), work.endpoint, before_call=raise_if_stopped)
        outcome = synchronize_host(placement, host, work.desired, work.written, work.root)
    except (
        ProviderMissingError,
        PlacementUnavailableError,
        PlacementConflictError,
        PlacementRejectedError,
        WriterStoppedError,
        _CredentialsError,
        msgspec.DecodeError,
    ) as error:
        writes = placement.writes if placement else 0
        counted = "1 write" if writes == 1 else f"{writes} writes"
        text = f"{error}, after {counted}" if writes else f"{error}; nothing was written"
        return "failed" if writes else "refused", text
    return "succeeded", "; ".join([f"writes: {placement.writes}, reads: {placement.reads}", *outcome.problems])[:4096]


class _CredentialsError(PlacementSyncError):
    """The credentials cannot be used as they are."""


def _open_adapter(environ: Mapping[str, str]) -> Any:
    """Return a keystoneauth1 adapter for the host's credentials. It logs in at its first call.

    Raises _CredentialsError; its text contains no secret.
    """
    if problem := lacks(environ):
        raise _CredentialsError(problem)
    from keystoneauth1.adapter import Adapter
    from keystoneauth1.identity.generic.base import BaseGenericPlugin

    try:
        if environ.get("OS_AUTH_URL"):
            session = _session_from_variables(environ)
        else:
            from openstack.config import get_cloud_region

            session = get_cloud_region(cloud=environ.get("OS_CLOUD")).get_session()
        if isinstance(session.auth, BaseGenericPlugin):
            # A generic plugin first discovers the version of Identity. If that is answered with 401, the plugin waits
            # for its own lock for ever. So the v3 plugin is created directly.
            url = session.auth.auth_url.rstrip("/")
            session.auth = session.auth.create_plugin(session, (3, 0), url if url.endswith("/v3") else f"{url}/v3")
    except Exception as error:  # noqa: BLE001 - loaders raise their own kinds; whatever it is, the operator reads it
        raise _CredentialsError(
            f"the host's credentials cannot be used: {type(error).__name__}: {error}"[:500]
        ) from None
    return Adapter(
        session, region_name=environ.get("OS_REGION_NAME") or None, interface=environ.get("OS_INTERFACE") or None
    )


def _session_from_variables(environ: Mapping[str, str]) -> Any:
    """Return a session made from the `OS_…` variables, which have the names of keystoneauth1's options."""
    from keystoneauth1.loading import get_plugin_loader
    from keystoneauth1.session import Session

    auth_type = environ.get("OS_AUTH_TYPE") or (
        "v3applicationcredential" if environ.get("OS_APPLICATION_CREDENTIAL_ID") else "password"
    )
    loader: Any = get_plugin_loader(auth_type)
    values = {}
    for option in loader.get_options():
        names = [option, *option.deprecated]
        candidates = (environ.get("OS_" + one.name.upper().replace("-", "_")) for one in names)
        values[option.dest] = next(filter(None, candidates), None)
    cacert = environ.get("OS_CACERT")
    verify: bool | str = cacert if cacert else environ.get("OS_INSECURE", "").lower() not in ("1", "true", "yes")
    return Session(auth=loader.load_from_options(**values), verify=verify)
