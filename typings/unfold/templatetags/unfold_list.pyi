from collections.abc import Iterator
from typing import Any

def items_for_result(cl: Any, result: Any, form: Any) -> Iterator[Any]: ...
