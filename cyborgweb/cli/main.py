"""Entry point of the console script `cyborg`: the command group with its verbs in order, and `completion`."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import get_completion_class

from cyborgweb.cli import (
    accelerators,
    attachments,
    backends,
    bulk,
    census,
    certificates,
    device_commands,
    devices,
    drivers,
    images,
    nova,
    rules,
    subscriptions,
    usage,
)
from cyborgweb.cli.exit_codes import CliError, ExitCode
from cyborgweb.cli.interruption import describe_interruption
from cyborgweb.cli.options import CliContext, VerbCommand, connection_options, output_options

SHELLS = ("bash", "zsh", "fish")
EPILOG = """\b
First steps:
  export CYBORG_URL=https://accelerators.example CYBORG_TOKEN_FILE=~/.cyborg-token
  cyborg agent-list
  cyborg device-list --state inactive
  cyborg device-ready 3f1c --reason "burnt in"
  cyborg accelerator-create --device 3f1c --count 4
  source <(cyborg completion bash)

\b
Exit codes: 0 done, 1 refused or failed, 2 usage, 3 not found, 4 not allowed or
not logged in, 5 cannot be reached, cannot be trusted or busy, 6 partly done,
130 interrupted.
"""


class VerbGroup(click.Group):
    """A command group that lists its verbs in the order in which they were added, not alphabetically.

    Its verbs end with the exit code INTERRUPTED if the user interrupts them.
    """

    def invoke(self, context: click.Context) -> Any:
        """Run the verb. Raises CliError with INTERRUPTED if the user interrupts it; the text says what was ordered."""
        cli_context = context.ensure_object(CliContext)
        try:
            return super().invoke(context)
        except (KeyboardInterrupt, click.Abort):
            raise CliError(ExitCode.INTERRUPTED, describe_interruption(cli_context.api)) from None

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the verbs' names in the order in which they were added."""
        return [*self.commands]


@click.group(
    "cyborg",
    cls=VerbGroup,
    params=[*connection_options(), *output_options()],
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="cyborgweb", prog_name="cyborg")
def cli() -> None:
    """Manage the accelerators of a cloud: drivers, backends, devices, and the units that instances hold.

    For help on a verb: cyborg VERB --help.
    """


@click.command("completion", cls=VerbCommand, example="completion bash >> ~/.bash_completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script with which a shell completes the verbs and options."""
    completion_class = get_completion_class(shell)
    if completion_class:
        click.echo(completion_class(cli, {}, "cyborg", "_CYBORG_COMPLETE").source())


VERB_COMMANDS = (
    drivers.driver_list,
    drivers.install_driver,
    drivers.uninstall_driver,
    drivers.update_driver,
    drivers.rollout_show,
    drivers.rollout_cancel,
    drivers.rollout_retry,
    backends.backend_list,
    backends.backend_show,
    backends.backend_add,
    backends.backend_set,
    backends.backend_enable,
    backends.backend_disable,
    backends.backend_remove,
    backends.service_list,
    backends.discover_services,
    devices.device_list,
    devices.device_show,
    devices.device_ready,
    devices.device_admit,
    devices.device_maintain,
    devices.device_drain,
    devices.device_quarantine,
    devices.device_release,
    devices.device_retire,
    devices.device_reinstate,
    bulk.bulk_show,
    bulk.bulk_cancel,
    *device_commands.ORDER_VERBS.values(),
    device_commands.command_list,
    device_commands.command_show,
    rules.rule_list,
    rules.rule_create,
    rules.rule_set,
    rules.rule_delete,
    images.image_upload,
    images.image_list,
    images.image_remove,
    accelerators.accelerator_list,
    accelerators.accelerator_create,
    accelerators.accelerator_update,
    accelerators.accelerator_delete,
    accelerators.accelerator_label,
    attachments.attach_instance,
    attachments.detach_instance,
    attachments.attachment_list,
    attachments.attachment_show,
    attachments.attachment_detach,
    nova.nova_list,
    nova.nova_confirm,
    nova.nova_withdraw,
    subscriptions.subscription_list,
    subscriptions.subscription_resend,
    subscriptions.subscription_hand_over,
    usage.show_usage,
    census.load_census,
    devices.agent_list,
    devices.agent_admit,
    devices.agent_rotate,
    devices.agent_revoke,
    devices.join_token,
    devices.join_token_list,
    devices.join_token_delete,
    devices.host_remove,
    devices.host_removal_cancel,
    certificates.announcement_key,
    certificates.announce_certificate,
    completion,
)
for command in VERB_COMMANDS:
    cli.add_command(command)


def main() -> None:
    """Run the command line; never returns, because click ends the process with the exit code."""
    cli(prog_name="cyborg")
