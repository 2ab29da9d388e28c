"""The WSGI application, for a separate server such as granian, and for the threads of the web process (`asgi`)."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
application = get_wsgi_application()
