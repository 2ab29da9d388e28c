"""`/v2/deployables` (contract section 2.5)."""

from __future__ import annotations

from accelerators.api.v2.devices import SHOWN, held
from accelerators.api.v2.resource import Column, Resource, links, moment, plain
from accelerators.api.v2.views import DetailView, ListView

# A JSON text inside a string, spaced as Python's json module does it.
ATTRIBUTES = """(SELECT '[' || coalesce(
    string_agg('{' || to_json(a.key) || ': ' || to_json(a.value) || '}', ', ' ORDER BY a.id), '') || ']'
    FROM accelerators_attribute a WHERE a.deployable_id = p.id)"""

DEPLOYABLES = Resource(
    name="deployables",
    noun="Deployable",
    alias="p",
    tables="accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id",
    shown=f"{SHOWN} AND (p.missing_since IS NULL OR {held('p')})",
    columns=(
        plain("uuid", "p.uuid"),
        plain("parent_id", "p.parent_id"),
        plain("root_id", "p.root_id"),
        plain("name", "p.name"),
        plain("num_accelerators", "p.num_accelerators"),
        plain("device_id", "p.device_id"),
        Column("attributes_list", ATTRIBUTES, None),
        plain("rp_uuid", "p.rp_uuid"),
        plain("driver_name", "p.driver_name"),
        plain("bitstream_id", "p.bitstream_id"),
        links("p.uuid", self="/accelerator/v2/deployables/", bookmark="/accelerator/deployables/"),
        moment("created_at", "p.created_at"),
        moment("updated_at", "p.updated_at"),
    ),
)


class DeployableList(ListView):
    """`GET /v2/deployables`."""

    resource = DEPLOYABLES
    policy_rules = {"GET": "cyborg:deployable:get_all"}


class DeployableDetail(DetailView):
    """`GET /v2/deployables/{uuid}`."""

    resource = DEPLOYABLES
    policy_rules = {"GET": "cyborg:deployable:get_one"}
