"""Commands of `manage.py` that do the same as commands of the client `cyborg`, without a network and without a login,
for a person who is logged in to the server.

`VERBS` maps a command of `manage.py` and the word after it, such as `device list`, to the command of `cyborg`.
`DEFAULTS` lists the options whose defaults differ from those of `cyborg`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click
from django.core.management.base import BaseCommand, CommandError, CommandParser

from accelerators.management import shell
from cyborgweb.cli import accelerators, attachments, bulk, device_commands, devices, drivers, images, nova, rules
from cyborgweb.cli.exit_codes import CliError
from cyborgweb.cli.main import VerbGroup
from cyborgweb.cli.options import CliContext
from cyborgweb.management.local_api import LocalApiClient

DEFAULTS = {"wait": False, "yes": True, "history": True, "which": "all", "limit": 1_000_000}
"""Defaults of options that differ from those of `cyborg`: scripts of operators do not expect to wait or to be asked."""


DJANGO_OPTIONS = {"--settings", "--pythonpath"}
"""Options that Django takes from the command line itself, before it runs a command of `manage.py`."""


def _drop_django_options(verb: click.Command) -> click.Command:
    """Return a copy of the verb without the option names in DJANGO_OPTIONS, which Django would take for its own.

    Each option keeps its other names, such as `--settings-file`.
    """
    copied = copy.copy(verb)
    copied.params = [copy.copy(parameter) for parameter in verb.params]
    for parameter in copied.params:
        parameter.opts = [spelling for spelling in parameter.opts if spelling not in DJANGO_OPTIONS]
    return copied


VERBS: Mapping[str, Mapping[str, click.Command]] = {
    "device": {
        "list": devices.device_list,
        "show": devices.device_show,
        "enable": devices.device_ready,
        "drain": devices.device_drain,
        "disable": devices.device_maintain,
        "release": devices.device_release,
        "quarantine": devices.device_quarantine,
        "reinstate": devices.device_reinstate,
        "retire": devices.device_retire,
        "bulk": bulk.bulk_show,
        "bulk-cancel": bulk.bulk_cancel,
        "admit": devices.device_admit,
    },
    "driver": {
        "list": drivers.driver_list,
        "install": _drop_django_options(drivers.install_driver),
        "update": _drop_django_options(drivers.update_driver),
        "uninstall": drivers.uninstall_driver,
        "rollout": drivers.rollout_show,
        "cancel": drivers.rollout_cancel,
        "retry": drivers.rollout_retry,
    },
    "host": {"remove": devices.host_remove, "cancel-removal": devices.host_removal_cancel},
    "command": {
        **{name.partition("-")[2]: verb for name, verb in device_commands.ORDER_VERBS.items()},
        "list": device_commands.command_list,
        "show": device_commands.command_show,
    },
    "attachment": {
        "attach": attachments.attach_instance,
        "detach": attachments.attachment_detach,
        "list": attachments.attachment_list,
        "show": attachments.attachment_show,
    },
    "accelerator": {
        "list": accelerators.accelerator_list,
        "create": accelerators.accelerator_create,
        "delete": accelerators.accelerator_delete,
        "update": accelerators.accelerator_update,
    },
    "rule": {
        "list": rules.rule_list,
        "create": rules.rule_create,
        "set": rules.rule_set,
        "delete": rules.rule_delete,
    },
    "image": {"upload": images.image_upload, "list": images.image_list, "remove": images.image_remove},
    "nova": {"list": nova.nova_list, "confirm": nova.nova_confirm, "withdraw": nova.nova_withdraw},
}
"""The verbs by the name of the command of `manage.py` and the word after it."""
SPELLINGS = {"agent-list": "manage.py agents"} | {
    verb.name or "": f"manage.py {noun} {word}" for noun, verbs in VERBS.items() for word, verb in verbs.items()
}


class VerbsCommand(BaseCommand):
    """A command of `manage.py` that passes its words to the verbs in `VERBS[noun]`. `help` is shown above them.

    The exit code is 2 for wrong usage and 1 for everything else that does not succeed.
    """

    noun: str

    def add_arguments(self, parser: CommandParser) -> None:
        """Accept any words; click parses them."""
        parser.add_argument("words", nargs="*")

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command with all words of the command line, options included, as arguments: `--` keeps argparse from
        parsing them.
        """
        super().run_from_argv([*argv[:2], "--", *argv[2:]])

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Print the help of the verbs, for `manage.py help`."""
        self.handle(words=["--help"])

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the verb that `words` names, as the person who runs `manage.py`.

        Raises CommandError if the API refuses it or the user interrupts it. Ends the process with 2 for wrong usage,
        and with 1 if the verb itself exits without success.
        """
        verbs = VERBS[self.noun]
        group = VerbGroup(self.noun, commands=dict(verbs), help=self.help)
        try:
            group.main(
                _repeat_layout_option(options["words"]),
                f"manage.py {self.noun}",
                standalone_mode=False,
                obj=CliContext(client=LocalApiClient(shell.current_operator(), SPELLINGS)),
                default_map=dict.fromkeys(verbs, DEFAULTS),
                help_option_names=["-h", "--help"],
                max_content_width=100,
            )
        except CliError as error:
            raise CommandError(error.format_message()) from None
        except click.Abort:
            raise CommandError("The command was interrupted.") from None
        except click.UsageError as error:
            error.show()
            sys.exit(error.exit_code)
        except SystemExit as ended:
            sys.exit(ended.code and 1)


def _repeat_layout_option(words: Iterable[str]) -> list[str]:
    """Return the words with `--layout vfs=4 mtu=9000` written as `--layout vfs=4 --layout mtu=9000`."""
    repeated: list[str] = []
    option = ""
    for word in words:
        option = word if word.startswith("-") else option
        if option == "--layout" and "=" in word and repeated[-1] != "--layout":
            repeated.append("--layout")
        repeated.append(word)
    return repeated
