"""Install the guard against calls inside transactions in every Python process that has this folder in PYTHONPATH."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("callguard", Path(__file__).parent.parent / "callguard.py")
assert _spec and _spec.loader
_callguard = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_callguard)
_callguard.install()
