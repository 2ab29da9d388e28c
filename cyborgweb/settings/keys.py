"""All configuration keys of the conductor, with types, defaults and descriptions.

The supervisor reads them without Django. `docs/configuration.md` is generated from them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_network
from pathlib import Path

from cyborgweb.settings.mail_address import MailAddressError, parse_mail_domain, parse_sender
from drivers.configuration import ConfigurationError, declare_key, load_configuration

HARDWARE_NAME = re.compile(r"[^:=]+:[^=]+=.*\S.*")
"""The form of an entry of CYBORG_HARDWARE_NAMES."""
MAX_BODY_BYTES = 1_048_576
"""The size of a request's body, except of an uploaded image."""
ANNOUNCEMENTS_FILE = "agent-announcements"
"""The file in the state directory with the announcements of certificates, unless CYBORG_AGENT_ANNOUNCEMENTS names
another."""
AUDIT_KEY_FILE = "audit-key.pem"
"""The file in the state directory with the key that signs seals, unless CYBORG_AUDIT_KEY_FILE names another."""


@dataclass(frozen=True)
class Keys:
    """The configuration: one field for each key. See `docs/configuration.md`."""

    state_dir: str = declare_key(
        "CYBORG_STATE_DIR", "./var", "Embedded database, secrets, and the agent's state in one-command mode."
    )
    database_url: str = declare_key(
        "CYBORG_DATABASE_URL",
        "",
        "`postgresql://user:password@host:port/name`, PostgreSQL 15 or later.",
        "*(absent: embedded PostgreSQL)*",
    )
    pg_bin: str = declare_key(
        "CYBORG_PG_BIN", "", "Folder with `postgres` and `initdb` for the embedded database.", "*(found)*"
    )
    listen: str = declare_key(
        "CYBORG_LISTEN", "127.0.0.1:8000", "Web, API and sockets in one-command mode; port 0 takes a free one."
    )
    agent_listen: str = declare_key(
        "CYBORG_AGENT_LISTEN",
        "",
        "ADDRESS:PORT of a separate TLS listener for agents; they can still connect to `CYBORG_LISTEN`, too.",
        "*(absent: `CYBORG_LISTEN` only)*",
    )
    agent_cert: str = declare_key(
        "CYBORG_AGENT_CERT",
        "",
        "That listener's certificate in PEM, then its issuers'. Agents pin it: announce a new one before you change it"
        " (`docs/agent-certificate.md`), or every host needs a new join token.",
        "*(self-made, in the state directory)*",
    )
    agent_key: str = declare_key("CYBORG_AGENT_KEY", "", "The certificate's key in PEM.", "*(in `CYBORG_AGENT_CERT`)*")
    agent_announcement_key: str = declare_key(
        "CYBORG_AGENT_ANNOUNCEMENT_KEY",
        "",
        "The public half of the key that signs announcements of new certificates for agents, as `cyborg"
        " announcement-key` prints it. The key itself is kept offline.",
        "*(certificates cannot be announced)*",
    )
    agent_announcements: str = declare_key(
        "CYBORG_AGENT_ANNOUNCEMENTS",
        "",
        "The file with all announcements of certificates for agents, one in each line; changes are noticed.",
        "*(`agent-announcements` in the state directory)*",
    )
    gateway_url: str = declare_key(
        "CYBORG_GATEWAY_URL",
        "",
        "The URL at which our other processes reach the web process that holds agents' connections, for example"
        " `http://10.0.0.5:8000`; needed if our processes run on several machines.",
        "*(`CYBORG_LISTEN`; if it listens on all addresses, this machine's address on the route to the database)*",
    )
    request_threads: int = declare_key(
        "CYBORG_REQUEST_THREADS",
        4,
        "How many HTTP requests one web process handles at once; higher values make agents wait.",
    )
    request_queue: int = declare_key(
        "CYBORG_REQUEST_QUEUE",
        64,
        "How many HTTP requests may wait for a thread; further ones are answered 503 with Retry-After.",
    )
    header_timeout_s: float = declare_key(
        "CYBORG_HEADER_TIMEOUT_S",
        10.0,
        "How long an HTTP client may take from the first byte of a request to the end of its headers, and from"
        " connecting to the first byte.",
    )
    body_timeout_s: float = declare_key(
        "CYBORG_BODY_TIMEOUT_S",
        30.0,
        "How long an HTTP client may take to send a request's body; it is answered 408 otherwise. An uploaded image may"
        " take as much longer as 16 KiB/s need.",
    )
    write_timeout_s: float = declare_key(
        "CYBORG_WRITE_TIMEOUT_S",
        60.0,
        "How long an HTTP client may take to accept the next 256 KiB of an answer; it is disconnected otherwise.",
    )
    keep_alive_s: float = declare_key(
        "CYBORG_KEEP_ALIVE_S", 5.0, "How long a connection is kept open for the next HTTP request."
    )
    body_buffer_bytes: int = declare_key(
        "CYBORG_BODY_BUFFER_BYTES",
        67_108_864,
        "The size of all request bodies in one web process, without the first 16 KiB of each; beyond it, requests get"
        " 503 with Retry-After.",
    )
    answer_buffer_bytes: int = declare_key(
        "CYBORG_ANSWER_BUFFER_BYTES",
        134_217_728,
        "The size of all answers in one web process that wait for their clients, without those of at most 64 KiB;"
        " beyond it, the client whose answers are the largest together loses its oldest one, or gets 503 with"
        " Retry-After.",
    )
    http_connections: int = declare_key(
        "CYBORG_HTTP_CONNECTIONS",
        5_000,
        "How many HTTP connections one web process keeps, TLS handshakes included; a further one ends the oldest that"
        " waits for its client, of the address with the most connections. WebSockets are not counted.",
    )
    flush_interval_ms: float = declare_key(
        "CYBORG_FLUSH_INTERVAL_MS", 5.0, "How long a gateway collects reports before one commit."
    )
    flush_max_rows: int = declare_key("CYBORG_FLUSH_MAX_ROWS", 500, "The maximum number of reports in one commit.")
    lease_flush_s: float = declare_key(
        "CYBORG_LEASE_FLUSH_S",
        5.0,
        "How often a gateway writes the leases that were renewed. With a longer interval, silent agents are noticed"
        " later.",
    )
    beat_s: float = declare_key(
        "CYBORG_BEAT_S",
        8.0,
        "How often an agent renews its lease. An agent is late when its lease is older than this interval and"
        " `CYBORG_LEASE_FLUSH_S` together, and down when it has been late for one more interval, for at least 3 s.",
    )
    max_message_bytes: int = declare_key(
        "CYBORG_MAX_MESSAGE_BYTES", 1_048_576, "The maximum size of a message from an agent."
    )
    handshakes: int = declare_key(
        "CYBORG_HANDSHAKES",
        512,
        "How many agents one web process lets connect at a time; further ones are answered 503 with Retry-After.",
    )
    agent_connections: int = declare_key(
        "CYBORG_AGENT_CONNECTIONS",
        20_000,
        "How many agents can be connected to one web process, each with one open file and 30 KB; further ones get 503.",
    )
    host_reports_per_s: float = declare_key(
        "CYBORG_HOST_REPORTS_PER_S",
        10.0,
        "How many reports of one host each web process stores a second; the reports of two minutes may come at once,"
        " further ones wait. The same number may wait to be merged; further reports are refused.",
    )
    host_report_bytes_per_s: int = declare_key(
        "CYBORG_HOST_REPORT_BYTES_PER_S", 524_288, "The same for the size of its reports, in bytes."
    )
    max_devices_per_host: int = declare_key(
        "CYBORG_MAX_DEVICES_PER_HOST",
        4096,
        "How many devices of one host are stored, missing ones included, and 16 times as many deployables and attach"
        " handles. A sixteenth is kept for each of its drivers that runs and has fewer, and for one driver that may be"
        " added later; so one driver alone has at most fifteen sixteenths (3840). A fault of each driver says how many"
        " devices exceed it, and how many one driver may have.",
    )
    pending_report_bytes: int = declare_key(
        "CYBORG_PENDING_REPORT_BYTES",
        268_435_456,
        "The size of the reports that wait in one web process for their commit; beyond it, agents must retry later.",
    )
    tick_stall_s: float = declare_key(
        "CYBORG_TICK_STALL_S",
        5.0,
        "If a job is not started for this time, its cluster counts as stuck and is replaced.",
    )
    placement_endpoint: str = declare_key(
        "CYBORG_PLACEMENT_ENDPOINT", "", "The URL of Placement; `off`: nothing is written to it.", "*(catalogue)*"
    )
    nova_endpoint: str = declare_key(
        "CYBORG_NOVA_ENDPOINT",
        "",
        "The URL of the compute API; `off`: instances' states stay unknown.",
        "*(catalogue)*",
    )
    glance_endpoint: str = declare_key(
        "CYBORG_GLANCE_ENDPOINT",
        "",
        "The URL of the image API; `off`: devices are programmed with uploaded images only.",
        "*(catalogue)*",
    )
    image_owners: tuple[str, ...] = declare_key(
        "CYBORG_IMAGE_OWNERS",
        (),
        "Ids of the projects whose images in Glance may say by the property `accel:function_id` which function they"
        " have, separated by commas. Public images always may.",
        "*(none)*",
    )
    image_max_bytes: int = declare_key(
        "CYBORG_IMAGE_MAX_BYTES",
        1_073_741_824,
        "The maximum size of an image, uploaded or from Glance, that a device is programmed with.",
    )
    bind_timeout_s: int = declare_key(
        "CYBORG_BIND_TIMEOUT_S",
        60,
        "A bind that needs its host fails after this time; keep it below Nova's `arq_binding_timeout`.",
    )
    program_timeout_s: int = declare_key(
        "CYBORG_PROGRAM_TIMEOUT_S", 240, "The same for a bind that programs its device first."
    )
    program_wait_s: int = declare_key(
        "CYBORG_PROGRAM_WAIT_S",
        60,
        "How long `PATCH /v2/deployables/{uuid}/program` waits for its command; the command goes on afterwards.",
    )
    detach_timeout_s: int = declare_key(
        "CYBORG_DETACH_TIMEOUT_S",
        300,
        "How long a detached PCI function may wait for its host to confirm that no guest uses it. Then its device is "
        "quarantined, and the host is still asked.",
    )
    missing_retention_s: int = declare_key(
        "CYBORG_MISSING_RETENTION_S", 86_400, "How long a missing, free device is kept before it is removed."
    )
    host_removal_delay_s: int = declare_key(
        "CYBORG_HOST_REMOVAL_DELAY_S",
        60,
        "How long an ordered removal of a host waits before it deletes anything. Until then it can be cancelled. 0: it "
        "does not wait.",
    )
    event_retention_months: int = declare_key(
        "CYBORG_EVENT_RETENTION_MONTHS",
        0,
        "How many whole months of events are kept before the present one; older ones are dropped. 0: all are kept.",
    )
    audit_key_file: str = declare_key(
        "CYBORG_AUDIT_KEY_FILE",
        "",
        "The file with the private key that signs the seals over events; `off`: this process seals nothing.",
        "*(`audit-key.pem` in the state directory; the cluster `work` creates it)*",
    )
    audit_anchor_file: str = declare_key(
        "CYBORG_AUDIT_ANCHOR_FILE",
        "",
        "A file with lines of `manage.py verify_events --anchor`; the job `verification` compares the seals with it.",
        "*(absent)*",
    )
    audit_trusted_keys: tuple[str, ...] = declare_key(
        "CYBORG_AUDIT_TRUSTED_KEYS",
        (),
        "Public keys of seals that the job `verification` trusts although no earlier key signed them, separated by"
        " commas.",
        "*(none)*",
    )
    join_token_hours: int = declare_key("CYBORG_JOIN_TOKEN_HOURS", 24, "How long a join token is valid.")
    auth: str = declare_key(
        "CYBORG_AUTH",
        "local",
        "The method that authenticates callers: `local` (Django's users, API tokens in `X-Auth-Token`) or `keystone`.",
    )
    cloud: str = declare_key(
        "CYBORG_CLOUD",
        "",
        "The cloud in `clouds.yaml` that the service user logs in to; without it, the `OS_…` variables.",
        "*(absent: `OS_…`)*",
    )
    www_authenticate_uri: str = declare_key(
        "CYBORG_WWW_AUTHENTICATE_URI",
        "",
        "The URL to which a 401 sends clients for a token, if it is not the service user's own auth URL.",
        "*(auth URL)*",
    )
    service_token_roles: tuple[str, ...] = declare_key(
        "CYBORG_SERVICE_TOKEN_ROLES",
        ("service",),
        "A service token (`X-Service-Token`) must have one of these roles.",
        "`service`",
    )
    policy_file: str = declare_key(
        "CYBORG_POLICY_FILE",
        "",
        "File with overrides of policy rules, read again when it changes; `manage.py policy_sample` prints all rules.",
        "*(`policy.yaml` in the state directory)*",
    )
    enforce_new_defaults: bool = declare_key(
        "CYBORG_ENFORCE_NEW_DEFAULTS",
        False,
        "Switch off the legacy rules, which allow every token of a project to read devices and use requests.",
        "`off`",
    )
    console_session_h: float = declare_key(
        "CYBORG_CONSOLE_SESSION_H",
        8.0,
        "With Keystone: how long a login to the console lasts; the next login reads the user's roles again.",
    )
    console_viewer_roles: tuple[str, ...] = declare_key(
        "CYBORG_CONSOLE_VIEWER_ROLES",
        ("manager",),
        "With Keystone: roles that may view the console and every project's requests in it; `admin` may also act.",
        "`manager`",
    )
    console_tenant_roles: tuple[str, ...] = declare_key(
        "CYBORG_CONSOLE_TENANT_ROLES",
        (),
        "With Keystone: roles that may see their own project's requests in the console, and nothing else.",
        "*(none)*",
    )
    subscription_owner_days: int = declare_key(
        "CYBORG_SUBSCRIPTION_OWNER_DAYS",
        90,
        "With Keystone: days after which a subscription ends if Keystone does not tell the service user whether its"
        " owner still has the roles that it needs, and no login of the owner has confirmed them.",
    )
    environment: str = declare_key(
        "CYBORG_ENVIRONMENT",
        "",
        "The name of this cloud, for example `prod` or `staging`; a strip on every page of the console shows it.",
        "*(absent: no strip)*",
    )
    webhook_allow_http: bool = declare_key(
        "CYBORG_WEBHOOK_ALLOW_HTTP", False, "Also send messages to webhooks over http, without encryption.", "`off`"
    )
    webhook_networks: tuple[str, ...] = declare_key(
        "CYBORG_WEBHOOK_NETWORKS",
        (),
        "Networks (`10.1.0.0/16`) in which webhooks are allowed in addition to public addresses, separated by commas.",
        "*(none)*",
    )
    mail_host: str = declare_key("CYBORG_MAIL_HOST", "", "The SMTP server that sends our mail.", "*(absent: no mail)*")
    mail_port: int = declare_key("CYBORG_MAIL_PORT", 25, "The port of the SMTP server.")
    mail_tls: str = declare_key(
        "CYBORG_MAIL_TLS", "off", "The encryption of the connection to the SMTP server: `off`, `starttls` or `tls`."
    )
    mail_from: str = declare_key(
        "CYBORG_MAIL_FROM",
        "accelerators@localhost",
        "The sender address of our mail: `NAME@DOMAIN` or `TEXT <NAME@DOMAIN>`.",
    )
    mail_domains: tuple[str, ...] = declare_key(
        "CYBORG_MAIL_DOMAINS",
        (),
        "Domains of mail addresses that may be subscribed, separated by commas; `*` allows any.",
        "*(that of `CYBORG_MAIL_FROM`)*",
    )
    mail_user: str = declare_key("CYBORG_MAIL_USER", "", "The user name for the SMTP server.", "*(absent: no login)*")
    mail_password_file: str = declare_key(
        "CYBORG_MAIL_PASSWORD_FILE", "", "The file with the password for the SMTP server.", "*(absent)*"
    )
    public_url: str = declare_key(
        "CYBORG_PUBLIC_URL",
        "",
        "The URL at which people reach the console: `https://NAME`, through a proxy that does TLS and sets"
        " `X-Forwarded-Proto` and `X-Forwarded-For` itself. Cookies are then sent over TLS only, and the console is"
        " redirected from http to this URL.",
        "*(absent: the console is served over http, which is meant for your own machine only)*",
    )
    proxy_addresses: tuple[str, ...] = declare_key(
        "CYBORG_PROXY_ADDRESSES",
        (),
        "Addresses or networks (`10.1.0.0/16`) of the proxies, separated by commas. With `CYBORG_PUBLIC_URL`,"
        " `X-Forwarded-For` is read only in requests from them.",
        "*(any: each client that reaches a listener directly can name any address)*",
    )
    allowed_hosts: tuple[str, ...] = declare_key(
        "CYBORG_ALLOWED_HOSTS", ("*",), "Host names that the web process accepts, separated by commas.", "`*`"
    )
    metrics_token: str = declare_key(
        "CYBORG_METRICS_TOKEN",
        "",
        "The token with which other machines read `/metrics` (`Authorization: Bearer …`); at least 16 characters.",
        "*(absent: this machine only)*",
    )
    metrics_devices: bool = declare_key(
        "CYBORG_METRICS_DEVICES",
        False,
        "Show the load of each device in `/metrics`, in at most 50 000 series.",
        "`off`",
    )
    metrics_units: tuple[str, ...] = declare_key(
        "CYBORG_METRICS_UNITS",
        ("class",),
        "How `/metrics` groups held, free and reserved units: `class` (resource class and type, at most 500 groups),"
        " `host` (and resource class, at most 5 000), `project` (and resource class, at most 2 000), or `off`.",
        "`class`",
    )
    pci_ids: str = declare_key(
        "CYBORG_PCI_IDS",
        "/usr/share/misc/pci.ids",
        "The PCI ID database, from which the console, `/api` and the command line have the names of hardware; Debian's"
        " package `pci.ids` has it. `off`, or a file that does not exist: hardware is shown as its driver reports it.",
    )
    hardware_names: tuple[str, ...] = declare_key(
        "CYBORG_HARDWARE_NAMES",
        (),
        "Names of single models of hardware, which take precedence: `VENDOR:MODEL=NAME` with what the driver reports,"
        " such as `10de:20b5=NVIDIA A100 80GB PCIe`, separated by commas. `VENDOR:MODEL:SUBVENDOR:SUBDEVICE=NAME` is"
        " for boards with these PCI ids of the subsystem only, and precedes the other form.",
        "*(none)*",
    )
    debug: bool = declare_key("CYBORG_DEBUG", False, "Django's debug pages. Never in production.", "`off`")

    @property
    def state_path(self) -> Path:
        """The absolute path of the state directory."""
        return Path(self.state_dir).absolute()

    @property
    def announcements_path(self) -> Path:
        """The absolute path of the file of announcements of certificates."""
        return (
            Path(self.agent_announcements).absolute()
            if self.agent_announcements
            else self.state_path / ANNOUNCEMENTS_FILE
        )

    @property
    def has_cloud(self) -> bool:
        """Whether a cloud is configured to which the service user can log in: by CYBORG_CLOUD, OS_CLOUD
        or OS_AUTH_URL.
        """
        return bool(self.cloud or os.environ.get("OS_CLOUD") or os.environ.get("OS_AUTH_URL"))

    @property
    def mail_password(self) -> str:
        """The password for the mail server, '' if there is none. Reads its file at every access.

        Raises ConfigurationError if the file cannot be read.
        """
        try:
            return Path(self.mail_password_file).read_text().strip() if self.mail_password_file else ""
        except OSError as error:
            raise ConfigurationError(f"CYBORG_MAIL_PASSWORD_FILE cannot be read: {error.strerror}") from None

    @property
    def allowed_mail_domains(self) -> tuple[str, ...]:
        """The domains to which mail may be sent, in ASCII; `*` stands for any domain."""
        if self.mail_domains:
            return tuple(word if word == "*" else parse_mail_domain(word) for word in self.mail_domains)
        return (parse_sender(self.mail_from).rpartition("@")[2],)

    @property
    def audit_key_path(self) -> Path | None:
        """The path of the private key that signs seals, None if this process is not to seal."""
        if self.audit_key_file == "off":
            return None
        return Path(self.audit_key_file).absolute() if self.audit_key_file else self.state_path / AUDIT_KEY_FILE

    @property
    def audit_anchor_path(self) -> Path | None:
        """The path of the file with kept anchors, None if there is none."""
        return Path(self.audit_anchor_file).absolute() if self.audit_anchor_file else None

    @property
    def policy_path(self) -> Path:
        """The path of the file with overrides of policy rules. The file does not have to exist."""
        return Path(self.policy_file).absolute() if self.policy_file else self.state_path / "policy.yaml"


@lru_cache(maxsize=1)
def get_keys() -> Keys:
    """Return this process's configuration, from the environment and the file that CYBORG_CONFIG names.

    It is read and checked once, at the first call. Raises ConfigurationError, with one sentence, for an unusable value.
    """
    loaded = load_configuration(Keys, os.environ)
    if loaded.auth not in ("local", "keystone"):
        raise ConfigurationError(f"CYBORG_AUTH={loaded.auth!r} is not usable: write local or keystone")
    if loaded.console_session_h <= 0:
        raise ConfigurationError(
            f"CYBORG_CONSOLE_SESSION_H={loaded.console_session_h} is not usable: write a number of hours above 0"
        )
    if loaded.subscription_owner_days < 1:
        raise ConfigurationError(
            f"CYBORG_SUBSCRIPTION_OWNER_DAYS={loaded.subscription_owner_days} is not usable: write a number above 0"
        )
    _check_client_limits(loaded)
    _check_agent_settings(loaded)
    _check_public_keys(loaded)
    if unknown := set(loaded.metrics_units) - {"class", "host", "project", "off"}:
        raise ConfigurationError(
            f"CYBORG_METRICS_UNITS={sorted(unknown)[0]!r} is not usable: write class, host, project"
        )
    for entry in loaded.hardware_names:
        if not HARDWARE_NAME.fullmatch(entry):
            raise ConfigurationError(f"CYBORG_HARDWARE_NAMES: {entry!r} is not usable: write VENDOR:MODEL=NAME")
    if len(loaded.environment) > 40 or not loaded.environment.isprintable():
        raise ConfigurationError("CYBORG_ENVIRONMENT is not usable: write at most 40 printable characters")
    return loaded


def _check_client_limits(loaded: Keys) -> None:
    """Check the deadlines and limits of HTTP clients. Raise ConfigurationError for the first unusable value."""
    for name, value in (
        ("REQUEST_THREADS", loaded.request_threads),
        ("HEADER_TIMEOUT_S", loaded.header_timeout_s),
        ("BODY_TIMEOUT_S", loaded.body_timeout_s),
        ("WRITE_TIMEOUT_S", loaded.write_timeout_s),
        ("KEEP_ALIVE_S", loaded.keep_alive_s),
        ("HTTP_CONNECTIONS", loaded.http_connections),
    ):
        if not 0 < value < float("inf"):
            raise ConfigurationError(f"CYBORG_{name}={value} is not usable: write a number above 0")
    for name, size in (("BODY", loaded.body_buffer_bytes), ("ANSWER", loaded.answer_buffer_bytes)):
        if size < MAX_BODY_BYTES:
            raise ConfigurationError(
                f"CYBORG_{name}_BUFFER_BYTES={size} is not usable: write at least {MAX_BODY_BYTES}"
            )


def _check_agent_settings(loaded: Keys) -> None:
    """Check the limits on agents' connections and messages, and the gateway's URL. Raise ConfigurationError for the
    first unusable value.
    """
    for name, value in (
        ("HANDSHAKES", loaded.handshakes),
        ("AGENT_CONNECTIONS", loaded.agent_connections),
        ("MAX_DEVICES_PER_HOST", loaded.max_devices_per_host),
    ):
        if value < 1:
            raise ConfigurationError(f"CYBORG_{name}={value} is not usable: write a number above 0")
    if loaded.pending_report_bytes < loaded.max_message_bytes:
        raise ConfigurationError(
            f"CYBORG_PENDING_REPORT_BYTES={loaded.pending_report_bytes} is not usable: write at least"
            f" CYBORG_MAX_MESSAGE_BYTES ({loaded.max_message_bytes}), so that every report fits"
        )
    for name, rate, lowest in (
        ("REPORTS", loaded.host_reports_per_s, 0.25),
        ("REPORT_BYTES", loaded.host_report_bytes_per_s, 65_536),
    ):
        if rate < lowest:
            raise ConfigurationError(f"CYBORG_HOST_{name}_PER_S={rate} is not usable: write at least {lowest}")
    if loaded.gateway_url and not re.fullmatch(r"https?://[^/?#@\s]{1,200}", loaded.gateway_url):
        raise ConfigurationError("CYBORG_GATEWAY_URL is not usable: write http://ADDRESS:PORT, without a path")
    _check_announcement_key(loaded.agent_announcement_key)


def _check_announcement_key(public_key: str) -> None:
    """Raise ConfigurationError unless this is '' or an Ed25519 public key."""
    if public_key and not re.fullmatch(r"[A-Za-z0-9_-]{43}=", public_key):
        raise ConfigurationError(
            "CYBORG_AGENT_ANNOUNCEMENT_KEY is not usable: write the line that `cyborg announcement-key FILE` prints"
        )


def _check_public_keys(loaded: Keys) -> None:
    """Check the keys of metrics, the public URL, mail and webhooks; raise ConfigurationError for an unusable value."""
    if loaded.metrics_token and not re.fullmatch(r"[!-~]{16,}", loaded.metrics_token):
        raise ConfigurationError("CYBORG_METRICS_TOKEN is not usable: write 16 characters or more, without blanks")
    if loaded.public_url and not re.fullmatch(r"https://[^/?#@\s]{1,200}", loaded.public_url):
        raise ConfigurationError("CYBORG_PUBLIC_URL is not usable: write https://NAME, without a path")
    try:
        parse_sender(loaded.mail_from)
    except MailAddressError:
        raise ConfigurationError(
            f"CYBORG_MAIL_FROM={loaded.mail_from!r} is not usable: write NAME@DOMAIN, or TEXT <NAME@DOMAIN>"
        ) from None
    for word in loaded.mail_domains:
        try:
            word == "*" or parse_mail_domain(word)
        except MailAddressError:
            raise ConfigurationError(f"CYBORG_MAIL_DOMAINS is not usable: {word!r} is no domain") from None
    if loaded.mail_tls not in ("off", "starttls", "tls"):
        raise ConfigurationError(f"CYBORG_MAIL_TLS={loaded.mail_tls!r} is not usable: write off, starttls or tls")
    try:
        [ip_network(word) for word in loaded.webhook_networks]
    except ValueError as error:
        raise ConfigurationError(f"CYBORG_WEBHOOK_NETWORKS is not usable: {error}") from None
    try:
        [ip_network(word) for word in loaded.proxy_addresses]
    except ValueError as error:
        raise ConfigurationError(f"CYBORG_PROXY_ADDRESSES is not usable: {error}") from None


def parse_listen_address(listen: str, name: str = "CYBORG_LISTEN") -> tuple[str, int]:
    """Return host and port of an ADDRESS:PORT value, such as that of `CYBORG_LISTEN`.

    An IPv6 address is written in brackets, which the returned host does not have. `name` is the key for the error
    message. Raises ConfigurationError for another form, or a port above 65535.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{name}={listen!r} is not usable: write ADDRESS:PORT, for example 127.0.0.1:8000")
    return host.strip("[]"), int(port)
