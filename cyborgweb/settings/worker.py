"""Django's settings for the django-q2 clusters only. Clusters fork, so importing this makes every process of a cluster
end when its parent ends."""

from cyborgweb.settings.base import *  # noqa: F403
from drivers.isolation.process import die_with_parent

die_with_parent(include_forks=True)
