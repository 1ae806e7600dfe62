"""One rank of a DeepSpeed group: `python -m tasks.deepspeed_rank FD`, started by infra/ranks.py.

It has no store and knows no role: it builds a trainer from what it is sent, takes the steps it is told to, and
answers. The first rank alone sends results along.
"""

import dataclasses
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from infra.ranks import Channel, Message, end_with_parent, tell_error


class Worker:
    """Answers messages."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._has_joined = False
        self._rank = -1

    def answer(self, message: Message) -> Message:
        """Do what a message asks for and return the result."""
        actions: dict[str, Callable[[Message], Message]] = {
            "build": self._build,
            "step": self._step,
            "weights": self._weights,
            "checkpoint": self._checkpoint,
            "load": self._load,
            "adopt": self._adopt,
        }
        return actions[message.fields["do"]](message)

    def _build(self, message: Message) -> Message:
        import torch

        from data_contracts.algorithm import AlgorithmConfig
        from data_contracts.config import DeepspeedBackend, TrainConfig
        from models.policy import build_policy, weights_from_bytes
        from models.trainer import Trainer
        from models.zero import ZeroBackend, join_group

        fields = message.fields
        train = TrainConfig.model_validate(fields["train"])
        backend = DeepspeedBackend.model_validate(fields["train"]["backend"])
        self._rank = fields["rank"]
        torch.set_num_threads(train.threads)
        if not self._has_joined:
            join_group(self._rank, fields["num_ranks"], fields["meeting_place"], backend)
            self._has_joined = True
        files = {name: body for name, body in message.blobs.items() if name != "weights"}
        weights = weights_from_bytes(message.blobs["weights"])
        model = build_policy(files, next(iter(weights.values())).dtype, weights).model
        algorithm = AlgorithmConfig.model_validate(fields["algorithm"])
        self._trainer = Trainer(
            model,
            algorithm,
            train,
            total_steps=fields["total_steps"],
            make_backend=partial(ZeroBackend, backend=backend),
        )
        return Message({})

    def _step(self, message: Message) -> Message:
        from models.samples import groups_from_bytes

        groups = groups_from_bytes(message.blobs["groups"])
        result = self._trainer.step(
            groups, version=message.fields["version"], max_staleness=message.fields["max_staleness"]
        )
        return Message(dataclasses.asdict(result))

    def _weights(self, message: Message) -> Message:
        from models.policy import weights_to_bytes

        weights = self._trainer.weights(message.fields["dtype"])
        return self._first(lambda: {"weights": weights_to_bytes(weights)})

    def _checkpoint(self, message: Message) -> Message:
        from models.optimizer import checkpoint_to_bytes

        del message
        state = self._trainer.checkpoint_state()
        return self._first(lambda: {"checkpoint": checkpoint_to_bytes(*state)})

    def _load(self, message: Message) -> Message:
        from models.optimizer import checkpoint_from_bytes

        self._trainer.load_checkpoint(*checkpoint_from_bytes(message.blobs["checkpoint"]))
        return Message({})

    def _adopt(self, message: Message) -> Message:
        from models.policy import weights_from_bytes

        self._trainer.adopt_weights(weights_from_bytes(message.blobs["weights"]))
        return Message({})

    def _first(self, make: Callable[[], dict[str, bytes]]) -> Message:
        return Message({}, make() if self._rank == 0 else {})


def main(arguments: Sequence[str]) -> int:
    """Serve the parent on the socket whose descriptor is the one argument; return the exit code."""
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    end_with_parent(channel)
    warnings.simplefilter("ignore", FutureWarning)  # of torch about DeepSpeed, at every collective
    worker = Worker()
    while True:
        try:
            message = channel.receive()
        except EOFError:
            return 1
        try:
            channel.send(worker.answer(message))
        except Exception as error:  # noqa: BLE001 whatever it is, the parent is told and the group ends
            tell_error(channel, error)
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
