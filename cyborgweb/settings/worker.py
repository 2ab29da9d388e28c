"""Settings of the django-q2 clusters and nothing else: they fork, so every process dies with its parent."""

from cyborgweb.settings.base import *  # noqa: F403
from drivers.isolation.process import die_with_parent

die_with_parent(forks_too=True)
