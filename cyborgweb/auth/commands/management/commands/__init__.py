"""Commands that replace commands of `django.contrib.auth`."""
