"""HTTP as WSGI: what granian serves at scale, and what the one-command web server runs in its threads."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
application = get_wsgi_application()
