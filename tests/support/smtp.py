"""A real SMTP server at a free port of loopback, which answers each command as a test tells it."""

from __future__ import annotations

import email
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import policy
from email.message import EmailMessage


@dataclass
class SmtpServer:
    """The mails that the server accepted, and how it behaves.

    `answer(verb, argument, recipient)` returns the answer to a command, for example `550 5.1.1 no`; '' means the usual
    answer, `closes` ends the connection, and `hangs` waits until the end of the test. `verb` is `CONNECT`, an SMTP
    command, or `.` for the end of a mail.
    """

    port: int = 0
    accepted: list[EmailMessage] = field(default_factory=list)
    recipients: list[str] = field(default_factory=list)
    connections: int = 0
    answer: Callable[[str, str, str], str] = lambda verb, argument, recipient: ""
    released: threading.Event = field(default_factory=threading.Event)


USUAL_ANSWERS = {"CONNECT": "220 mail", "EHLO": "250 mail", "DATA": "354 go on", "QUIT": "221 bye"}


@contextmanager
def run_smtp_server() -> Iterator[SmtpServer]:
    """Run a server, which is gone at the end."""
    state = SmtpServer()

    class Handler(socketserver.StreamRequestHandler):
        recipient = ""

        def handle(self) -> None:
            state.connections += 1
            goes_on = self.reply("CONNECT", "")
            while goes_on and (line := self.rfile.readline()):
                verb, _, argument = line.decode("ascii").rstrip("\r\n").partition(" ")
                if verb.upper() == "RCPT":
                    self.recipient = argument[argument.index("<") + 1 : argument.index(">")]
                goes_on = self.reply(verb.upper(), argument) and verb.upper() != "QUIT"

        def reply(self, verb: str, argument: str) -> bool:
            """Answer a command; after DATA, receive the mail and answer that, too. Return whether to go on."""
            answer = state.answer(verb, argument, self.recipient)
            if answer == "hangs":
                state.released.wait(30)
            if answer in ("hangs", "closes"):
                return False
            answer = answer or USUAL_ANSWERS.get(verb, "250 ok")
            if verb == "." and answer.startswith("250"):
                state.recipients.append(self.recipient)
                state.accepted.append(email.message_from_bytes(self.content, policy=policy.default))
            self.wfile.write(f"{answer}\r\n".encode())
            if verb == "DATA" and answer.startswith("354"):
                lines = iter(self.rfile.readline, b".\r\n")
                self.content = b"".join(line.removeprefix(b".") for line in lines if line)
                return self.reply(".", "")
            return not answer.startswith("421")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Ignore the error: the client has closed the connection."""

    with Server(("127.0.0.1", 0), Handler) as server:
        state.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield state
        finally:
            state.released.set()
            server.shutdown()
