"""Commands that replace commands of `django.contrib.auth`. They are a Django application of their own, because the
application that is listed first in INSTALLED_APPS wins.
"""
