"""The console's first page: counts by state."""


def context(request, context):
    return context
