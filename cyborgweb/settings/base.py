"""Django's settings for web processes, commands and tests. Values come from `keys`. Clusters use `worker`."""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from accelerators.domain import states
from cyborgweb.database.postgres import Postgres, PostgresError
from cyborgweb.settings import over_tls
from cyborgweb.settings.keys import MAX_BODY_BYTES, Keys, get_keys
from drivers.configuration import ConfigurationError

KEYS = get_keys()
BASE_DIR = Path(__file__).resolve().parents[2]


def _find_templates(base: Path) -> Path:
    """Return the folder of the templates. Raises ConfigurationError if it is absent, as after an installation from a
    wheel."""
    folder = base / "templates"
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} does not exist: the conductor runs from a checkout (docs/install.md); a wheel has what the"
            " agent and the command `cyborg` need, but not the console's pages"
        )
    return folder


def _load_secret_key(settings: Keys) -> str:
    """Return Django's secret key from the file in the state directory. If there is none, create a random key in a file
    that only its owner can read.

    Processes that start at the same time get the same key. An empty file, as a full disk leaves it, gets a new key.
    Raises OSError if the file cannot be read or written.
    """
    path = settings.state_path / "secret-key"
    with suppress(FileNotFoundError):
        if stored := path.read_text().strip():
            return stored
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if stored := file.read().strip():
            return stored
        new_key = secrets.token_urlsafe(48)
        file.write(new_key)
    return new_key


STATEMENT_OPTIONS: dict[str, object] = {"prepare_threshold": 5}
"""A connection prepares a statement when it has run it five times. Django switches this off by default. It saves half
of the database's CPU time."""


KEEPALIVE_OPTIONS: dict[str, object] = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "options": "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
    " -c tcp_user_timeout=30000",
}
"""Keepalive options, with which we and PostgreSQL detect within half a minute that the other machine has vanished. By
default this takes two hours, and PostgreSQL would keep the locks of a vanished client for that time."""


def _secure_socket_folder(settings: Keys) -> Path:
    """Return the folder of the embedded database's socket. Raises ConfigurationError if it is not safe."""
    try:
        return Postgres(settings.state_path / "postgres").secure_socket_folder()
    except PostgresError as error:
        raise ConfigurationError(str(error)) from None


def _make_database_settings(settings: Keys) -> dict[str, object]:
    """Return Django's settings of the one database: that of CYBORG_DATABASE_URL, or the embedded one at its socket.

    Options in the URL's query, such as `sslmode`, are passed to libpq and override ours.
    """
    common = {
        "ENGINE": "django.db.backends.postgresql",
        "CONN_MAX_AGE": 300,
        "CONN_HEALTH_CHECKS": True,
        "TEST": {"NAME": "test_cyborg"},
    }
    if not settings.database_url:
        return common | {
            "NAME": "cyborg",
            "USER": "postgres",
            "HOST": str(_secure_socket_folder(settings)),
            "OPTIONS": STATEMENT_OPTIONS,
        }
    url = urlsplit(settings.database_url)
    options = dict(pair.split("=", 1) for pair in url.query.split("&") if "=" in pair)
    return common | {
        "NAME": unquote(url.path.lstrip("/")),
        "USER": unquote(url.username or ""),
        "PASSWORD": unquote(url.password or ""),
        "HOST": options.pop("host", None) or url.hostname or "",
        "PORT": str(url.port or ""),
        "OPTIONS": STATEMENT_OPTIONS | KEEPALIVE_OPTIONS | options,
    }


SECRET_KEY = _load_secret_key(KEYS)
DEBUG = KEYS.debug
ALLOWED_HOSTS = list(KEYS.allowed_hosts)
DATABASES = {"default": _make_database_settings(KEYS)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "unfold",
    "cyborgweb.auth.commands",  # before django.contrib.auth, whose commands it replaces
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular_sidecar",
    "django_q",
    "accelerators",
    "agents",
    "placement_sync",
    "cyborgweb",
]
SESSION_ENGINE = "cyborgweb.auth.sessions"
MIDDLEWARE = [
    "cyborgweb.monitoring.served.RequestMetricsMiddleware",
    "cyborgweb.middleware.headers.HeadersMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "cyborgweb.middleware.requests.RequestIdMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "cyborgweb.middleware.requests.ReadOnlyMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "cyborgweb.urls"
ASGI_APPLICATION = "cyborgweb.asgi.application"
WSGI_APPLICATION = "cyborgweb.wsgi.application"
APPEND_SLASH = True
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [_find_templates(BASE_DIR)],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
STATIC_URL = "/static/"
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = False
LOGIN_URL = "admin:login"
WITH_KEYSTONE = KEYS.auth == "keystone"
AUTHENTICATION_BACKENDS = [
    "cyborgweb.auth.login.KeystoneBackend" if WITH_KEYSTONE else "django.contrib.auth.backends.ModelBackend"
]
USE_TZ = True
TIME_ZONE = "UTC"
USE_I18N = False
FORMAT_MODULE_PATH = ["cyborgweb.settings.formats"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
globals().update(over_tls.make_tls_settings(KEYS.public_url))
DATA_UPLOAD_MAX_MEMORY_SIZE = MAX_BODY_BYTES
EMAIL_HOST, EMAIL_PORT, DEFAULT_FROM_EMAIL = KEYS.mail_host, KEYS.mail_port, KEYS.mail_from
EMAIL_USE_TLS, EMAIL_USE_SSL = KEYS.mail_tls == "starttls", KEYS.mail_tls == "tls"
EMAIL_HOST_USER, EMAIL_TIMEOUT = KEYS.mail_user, 10
EMAIL_HOST_PASSWORD = KEYS.mail_password
CHANNEL_LAYERS: dict[str, object] = {}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["cyborgweb.auth.authentication.CallerAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["cyborgweb.auth.policy.RulePermission"],
    "UNAUTHENTICATED_USER": None,
    "URL_FORMAT_OVERRIDE": None,
    "DEFAULT_SCHEMA_CLASS": "cyborgweb.api.openapi.ViewSchema",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Accelerators",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SCHEMA_PATH_PREFIX": "/api/",
    "COMPONENT_SPLIT_REQUEST": True,
    "COMPONENT_NO_READ_ONLY_REQUIRED": False,
    "ENUM_NAME_OVERRIDES": {
        "DeviceState": list(states.DeviceState),
        "DeviceType": list(states.DeviceType),
        "Health": list(states.Health),
        "RequestState": list(states.RequestState),
        "EventSource": list(states.EventSource),
        "DriverState": list(states.DriverState),
        "RolloutOp": list(states.RolloutOp),
        "RolloutState": list(states.RolloutState),
        "RolloutStepState": list(states.RolloutStepState),
        "AgentState": list(states.AgentState),
        "BulkState": list(states.BulkState),
        "DeviceOutcome": list(states.DeviceOutcome),
        "DrainTarget": list(states.DrainTarget),
        "AdmittedState": list(states.AdmittedState),
        "BulkActionName": "accelerators.api.own.bulk_previews.ALL_ACTIONS",
    },
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "cyborgweb.api.openapi.complete_document",
    ],
}

Q_CLUSTER = {
    "name": "work",
    "label": "Jobs",
    "orm": "default",
    "broker_class": "accelerators.runtime.task_broker.DatabaseClockBroker",
    "workers": 2,
    "timeout": 60,
    "retry": 90,
    "max_attempts": 1,
    "bulk": 10,
    "queue_limit": 4,
    "poll": 0.1,
    "save_limit": -1,
    "catch_up": False,
    "recycle": 5000,
    "log_level": "WARNING",
    "scheduler": False,  # it would call any function that somebody writes into its table
    "ALT_CLUSTERS": {"ingest": {"workers": 1, "poll": 0.05, "queue_limit": 2}},
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
    "loggers": {"django-q": {"level": "WARNING"}},
}

UNFOLD = {
    "SITE_TITLE": "Accelerators",
    "LOGIN": {"form": f"cyborgweb.auth.login.{'LoginForm' if WITH_KEYSTONE else 'LocalLoginForm'}"},
    "SITE_HEADER": "Accelerators",
    "SITE_SUBHEADER": "control plane",
    "SITE_SYMBOL": "memory",
    "SITE_URL": None,
    "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": f"{STATIC_URL}console/icon.svg"}],
    "SHOW_HISTORY": False,
    "SHOW_VIEW_ON_SITE": False,
    "STYLES": [f"{STATIC_URL}console/console.css"],
    "SIDEBAR": {"navigation": "cyborgweb.pages.navigation.build_sidebar"},
    "DASHBOARD_CALLBACK": "cyborgweb.pages.overview.build_overview_context",
}
