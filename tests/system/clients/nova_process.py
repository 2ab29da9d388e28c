"""Run Nova's own accelerator client (`nova.accelerator.cyborg`) as a client process in an environment with Nova.

A question is {"method", "arguments", "token", "project", "catalogue"}: it calls that method of the client with a
request context like a Nova service's. The answer is {"result"} or {"error", "text"}. `NOVA_CONF` is the path of Nova's
configuration.
"""

from __future__ import annotations

import os
from typing import Any

from drivers.isolation.process import die_with_parent
from tests.system.clients.lines import serve


def call_nova_client(question: dict[str, Any]) -> dict[str, Any]:
    """Call a method of Nova's client as the user of the token, and return the answer to the question."""
    from nova.accelerator import cyborg
    from nova.context import RequestContext
    from nova.exception import NovaException

    context = RequestContext(
        auth_token=question["token"], project_id=question["project"], service_catalog=question["catalogue"]
    )
    try:
        result = getattr(cyborg.get_client(context), question["method"])(*question["arguments"])
    except NovaException as error:
        return {"error": type(error).__name__, "text": str(error)}
    if question["method"] == "get_device_request_groups":
        result = [[one.requester_id, one.resources, sorted(one.required_traits)] for one in result]
    return {"result": result}


def main() -> None:
    """Configure Nova as a Nova service does, then answer questions."""
    die_with_parent()
    import nova.conf
    from nova import objects

    objects.register_all()
    nova.conf.CONF(["--config-file", os.environ["NOVA_CONF"]], project="nova")
    serve(call_nova_client)


if __name__ == "__main__":
    main()
