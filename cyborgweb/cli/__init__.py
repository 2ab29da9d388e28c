"""The command line for operators, over `/api/` of a local or remote server. It imports no Django.

`cyborgweb.management.operator_verbs` offers the same verbs as commands of `manage.py`, without a network.
"""
