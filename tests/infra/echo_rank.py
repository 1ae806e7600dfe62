"""A rank that does what its parent asks for, for test_ranks.py."""

import os
import signal
import socket
import sys
import time

from data_contracts.errors import ConfigError
from infra.ranks import Channel, Message, end_with_parent, tell_error


def answer(message: Message) -> Message:
    match message.fields["do"]:
        case "echo":
            return Message(message.fields, message.blobs)
        case "raise":
            time.sleep(message.fields.get("after_s", 0.0))
            raise ValueError(message.fields["text"])
        case "refuse":
            raise ConfigError(message.fields["text"])
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            print("first line\nlast words")
            sys.stdout.flush()
            os._exit(7)
        case "wait":
            time.sleep(1000)
    raise AssertionError(message)


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    end_with_parent(channel)
    while True:
        message = channel.receive()
        try:
            channel.send(answer(message))
        except Exception as error:  # noqa: BLE001 as the real one does
            tell_error(channel, error)
            return


if __name__ == "__main__":
    main()
