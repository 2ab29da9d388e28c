"""Put a mutant into a process that has already imported its module, by replacing the code of the changed functions.

So Django is imported and the tests are collected once for many mutants; each mutant runs in a fork. This works for
changes inside functions. Code that runs at import (tables, classes, defaults, decorators) needs a new process.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType, FunctionType

INLINE = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


def find_live_functions(root: Path) -> dict[str, list[FunctionType]]:
    """Return every function object below `root` by file, including those that decorators have wrapped."""
    found: dict[str, list[FunctionType]] = defaultdict(list)
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(str(root)):
            found[each.__code__.co_filename].append(each)
    return found


def can_swap(path: Path, old: str, new: str) -> bool:
    """Return whether the two texts differ only inside functions."""
    return _find_changed_pairs(_compile(path, old), _compile(path, new), in_function=False) is not None


def swap(path: Path, old: str, new: str, functions: list[FunctionType]) -> int:
    """Replace the code of the changed functions; return how many were changed (0 if the module is not imported yet)."""
    pairs = _find_changed_pairs(_compile(path, old), _compile(path, new), in_function=False) or []
    done = 0
    for function in functions:
        for before, after in pairs:
            if function.__code__ == before:
                function.__code__ = after
                done += 1
                break
    return done


def is_imported(path: Path) -> bool:
    """Return whether a module of this file is imported."""
    return any(getattr(module, "__file__", None) == str(path) for module in list(sys.modules.values()))


def _compile(path: Path, text: str) -> CodeType:
    return compile(text, str(path), "exec", dont_inherit=True)


def _find_changed_pairs(old: CodeType, new: CodeType, *, in_function: bool) -> list[tuple[CodeType, CodeType]] | None:
    """Return the pairs of function code objects that differ, outermost first; None if other code differs."""
    pairs = []
    nested_old, nested_new = _list_nested_code(old), _list_nested_code(new)
    alike = _get_own_content(old) == _get_own_content(new) and [c.co_name for c in nested_old] == [
        c.co_name for c in nested_new
    ]
    if not alike and not in_function:
        return None
    if len(nested_old) == len(nested_new):
        for one, other in zip(nested_old, nested_new, strict=True):
            is_function = in_function or (bool(one.co_flags & 2) and one.co_name not in INLINE)  # 2: CO_NEWLOCALS
            found = _find_changed_pairs(one, other, in_function=is_function)
            if found is None or (found and not is_function and one.co_name in INLINE):
                return None
            if is_function and one != other:
                pairs.append((one, other))
            pairs += found
    return pairs


def _list_nested_code(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _get_own_content(code: CodeType) -> tuple[object, ...]:
    """Return the content of a code object to compare, without nested functions and line numbers."""
    constants = tuple("code" if isinstance(c, CodeType) else (type(c), repr(c)) for c in code.co_consts)
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
