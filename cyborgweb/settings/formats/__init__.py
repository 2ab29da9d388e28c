"""Formats of times and dates in the console (FORMAT_MODULE_PATH). Django looks for a module of each language."""
