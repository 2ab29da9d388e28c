"""The product's settings for the bench: the ceilings of the API are served too, and granian's workers die with it."""

from cyborgweb.settings.base import *  # noqa: F403
from drivers.isolation.process import die_with_parent

die_with_parent()
ROOT_URLCONF = "tests.bench.views"
