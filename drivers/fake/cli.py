"""The command `python -m drivers.fake`: change the simulated hardware of a running fake driver, by hand or in tests."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import msgspec

from drivers.errors import KINDS, Invalid
from drivers.fake.driver import Script, read_script

EXAMPLES = """\
The driver reads its control file at every call, and searches for devices again as soon as it changes. Things to try:

  count 3                               three devices
  unplug 1; plug 1                      device 1 disappears and comes back
  fail 0 "no power"; degrade 0 warm     change its health until it is plugged again
  set install '["firmware", "clock"]'   making a device ready takes two steps
  set handle_type '"MDEV"'              handles are made on the host when they are bound
  refuse install Busy "a guest has it"  an act is refused for this reason; kinds: {kinds}
  set wrong '{{"install": true}}'         an act fails at its last step, and is undone
  set slow_s '{{"program": 5}}'           planning an act takes 5 s
  set busy '[0]'                        another program on the host uses device 0
  set stats '{{"power_watts": 12.5}}'     the load of every device; with `null` it changes by itself
  set slow_s '{{"stats": 9}}'             the load is not read in time; everything else works
  set hardware '["10ee", "7038", "17aa:402f"]'   vendor, model and board, whose names the PCI ID database has
  misbehave hang                        the driver itself fails; five times in ten minutes: it is not started again
  reset                                 go back to one healthy device
"""


def main() -> None:
    """Change the fake driver's control file as the command line says: which devices exist, and how they fail.

    `reset` replaces even an unusable file. Exits with a message if the arguments or the file cannot be used.
    """
    arguments = _build_parser().parse_args()
    try:
        script = Script() if arguments.verb == "reset" else _apply_change(read_script(arguments.control), arguments)
        _write_script(Path(arguments.control), script)
    except (Invalid, OSError, msgspec.MsgspecError) as error:
        sys.exit(f"drivers.fake: {error}")


def _build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line.

    The default control file is `fake-driver.json` in CYBORG_STATE_DIR, or in `./var` without that variable.
    """
    state = os.environ.get("CYBORG_STATE_DIR", "./var")
    parser = argparse.ArgumentParser(
        prog="drivers.fake",
        description="Change what the fake driver of this machine shows and does.",
        epilog=EXAMPLES.format(kinds=", ".join(KINDS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--control", default=f"{state}/fake-driver.json", help="control file (default: %(default)s)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (("unplug", "remove device N"), ("plug", "put device N back")):
        verbs.add_parser(verb, help=text).add_argument("n", type=int)
    for verb, text in (("fail", "device N fails"), ("degrade", "device N is degraded")):
        subparser = verbs.add_parser(verb, help=text)
        subparser.add_argument("n", type=int)
        subparser.add_argument("reason")
    verbs.add_parser("count", help="have N devices").add_argument("n", type=int)
    refuse_parser = verbs.add_parser("refuse", help="make the driver refuse an act")
    refuse_parser.add_argument("act")
    refuse_parser.add_argument("kind", choices=[*KINDS])
    refuse_parser.add_argument("reason")
    misbehave_parser = verbs.add_parser("misbehave", help="make the driver itself fail")
    misbehave_parser.add_argument("how", choices=["raise", "fail", "hang", "flood", "rubbish", "die"])
    set_parser = verbs.add_parser("set", help="set a key of the control file to a JSON value")
    set_parser.add_argument(
        "key", choices=Script.__struct_fields__, metavar="KEY", help=", ".join(Script.__struct_fields__)
    )
    set_parser.add_argument("json", metavar="JSON")
    verbs.add_parser("reset", help="go back to one healthy device")
    return parser


def _apply_change(script: Script, arguments: argparse.Namespace) -> Script:
    """Return the Script with the change that the command line names; `script` itself is changed, too.

    `plug` also makes the device healthy again. Raises msgspec.MsgspecError if a JSON value cannot be decoded or the
    result is no valid Script.
    """
    if arguments.verb == "misbehave":
        script.misbehave = arguments.how
    elif arguments.verb == "count":
        script.count = arguments.n
    elif arguments.verb == "unplug":
        script.unplugged = sorted({*script.unplugged, arguments.n})
    elif arguments.verb == "plug":
        script.unplugged = [n for n in script.unplugged if n != arguments.n]
        script.failing.pop(str(arguments.n), None)
        script.degraded.pop(str(arguments.n), None)
    elif arguments.verb == "refuse":
        script.refuse[arguments.act] = (arguments.kind, arguments.reason)
    elif arguments.verb == "set":
        setattr(script, arguments.key, msgspec.json.decode(arguments.json))
    else:
        (script.failing if arguments.verb == "fail" else script.degraded)[str(arguments.n)] = arguments.reason
    return msgspec.convert(msgspec.to_builtins(script), Script)


def _write_script(path: Path, script: Script) -> None:
    """Write the control file atomically, so that the driver never reads an incomplete file.

    Its directory is created if needed. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(msgspec.json.encode(script))
    os.replace(file.name, path)
