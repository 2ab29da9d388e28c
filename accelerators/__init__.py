"""The truth and its rules: what hardware there is, who may have it, what changed and why.

`conductor` is the only writer. Imports `drivers.inventory` for words and nothing to its right.
"""
