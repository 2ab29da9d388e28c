# django-unfold ships no types. These stubs say which of Django's classes its own ones extend.
