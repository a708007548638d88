"""Processes on one machine: messages over Unix sockets, and memory that all of them see.

gloo uses TCP even within a machine: a message takes half a millisecond, and the kernel copies every gradient several
times.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["Neighbours", "SharedMemory", "connect"]

_MACHINE = Path("/proc/sys/kernel/random/boot_id")
# The largest message, and the seconds of a wait after which its caller may give up.
_LARGEST, _SLICE = 2**16, 0.2

Gather = Callable[[bytes], list[bytes]]
Ask = Callable[[int], bool]


class Neighbours:
    """Connections of this process to all others, which run on the same machine.

    Args:
        rank: The rank of this process.
        connections: The sockets to the others, by rank.
        timeout: Seconds that a process waits for the others.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], timeout: float) -> None:
        self._rank, self._connections, self._timeout = rank, connections, timeout
        for connection in connections.values():
            connection.settimeout(_SLICE)

    def exchange(self, data: bytes, may_wait: Ask) -> list[bytes]:
        """Returns the messages of all processes, by rank; no process returns before all have called this.

        Args:
            data: The message of this process, at most 64 kB and not empty.
            may_wait: Called with n after n waits of 0.2 s for a process; returns whether to go on waiting.

        Raises:
            RuntimeError: If another process does not answer in time, or has ended.
        """
        return [message for message, _ in self._swap(data, [], may_wait)]

    def share(self, memory: SharedMemory, may_wait: Ask) -> list[torch.Tensor]:
        """Returns the memory of all processes, by rank.

        Args:
            memory: The memory of this process; that of the others must be as large.
            may_wait: As for :meth:`exchange`.

        Raises:
            RuntimeError: As for :meth:`exchange`, or if the sizes differ.
        """
        memories: list[torch.Tensor] = []
        for rank, (_, descriptors) in enumerate(self._swap(b"memory", [memory.descriptor], may_wait)):
            if not descriptors:
                raise RuntimeError(f"rank {rank} has sent a message instead of its memory")
            if rank == self._rank:
                memories.append(memory.tensor)
                continue
            size = os.fstat(descriptors[0]).st_size
            memories.append(_mapped(descriptors[0]))
            os.close(descriptors[0])
            if size != memory.tensor.numel():
                raise RuntimeError(f"rank {rank} has gradients of {size} bytes, not {memory.tensor.numel()}")
        return memories

    def _swap(self, data: bytes, descriptors: list[int], may_wait: Ask) -> list[tuple[bytes, list[int]]]:
        """Sends a message with file descriptors to all; returns the messages and descriptors of all, by rank."""
        for rank, connection in self._connections.items():
            with _broken(rank):
                socket.send_fds(connection, [data], descriptors)
        messages = {rank: self._receive(rank, may_wait) for rank in self._connections}
        messages[self._rank] = data, descriptors
        return [messages[rank] for rank in sorted(messages)]

    def _receive(self, rank: int, may_wait: Ask) -> tuple[bytes, list[int]]:
        """Returns the next message of a process, with its file descriptors."""
        for count in range(1, 1 + max(1, round(self._timeout / _SLICE))):
            with _broken(rank):
                try:
                    data, descriptors, _, _ = socket.recv_fds(self._connections[rank], _LARGEST, 1)
                except TimeoutError:
                    if may_wait(count):
                        continue
                    break
            if not data:
                raise RuntimeError(f"rank {rank} has ended")
            return data, descriptors
        raise RuntimeError(f"rank {rank} has not answered")


class SharedMemory:
    """Memory that neighbours can map; all zeros at first.

    Args:
        nbytes: Its size.

    Attributes:
        descriptor: The file that it belongs to, which has no name.
        tensor: The memory, uint8.
    """

    def __init__(self, nbytes: int) -> None:
        self.descriptor = os.memfd_create("ort_trainer")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, max(nbytes, 1))
        self.tensor = _mapped(self.descriptor)


def _mapped(descriptor: int) -> torch.Tensor:
    """Returns a file as memory, uint8."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)


def connect(rank: int, size: int, timeout: float, gather: Gather) -> Neighbours | None:
    """Connects all processes if they run on one Linux machine; returns None in all of them otherwise.

    Args:
        rank, size: The rank of this process, and the number of processes.
        timeout: Seconds that a process waits for the others.
        gather: Returns the data of all processes, by rank.

    Raises:
        RuntimeError: If another process does not answer in time.
    """
    machine = _MACHINE.read_bytes() if hasattr(os, "memfd_create") and _MACHINE.exists() else b""
    folder = tempfile.mkdtemp(prefix="ort_trainer-") if rank == 0 else ""
    connections: dict[int, socket.socket] = {}
    try:
        answers = gather(machine + os.fsencode(folder))
        place = Path(os.fsdecode(answers[0][len(machine) :]))
        # SOCK_SEQPACKET keeps messages apart, so each is received whole.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            can_connect = bool(machine) and all(other.startswith(machine) for other in answers)
            try:
                if can_connect:
                    SharedMemory(1)  # sandboxes may refuse it
                    listener.bind(str(place / str(rank)))
                    listener.listen(size)
            except OSError:  # this process sees another file system, or the path is too long
                can_connect = False
            if b"" in gather(b"able" if can_connect else b""):
                return None
            with _broken("another process"):
                for other in range(rank):
                    connections[other] = _patient(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), timeout)
                    connections[other].connect(str(place / str(other)))
                    connections[other].send(str(rank).encode())
                for _ in range(rank + 1, size):
                    accepted = _patient(_patient(listener, timeout).accept()[0], timeout)
                    connections[int(accepted.recv(_LARGEST))] = accepted
        gather(b"")  # all are connected
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    return Neighbours(rank, connections, timeout)


def _patient(opened: socket.socket, timeout: float) -> socket.socket:
    """Sets a socket's timeout, and returns the socket."""
    opened.settimeout(timeout)
    return opened


@contextmanager
def _broken(rank: int | str) -> Iterator[None]:
    """A context in which a broken connection is a RuntimeError, as it is with gloo."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"the connection to rank {rank} is broken: {error}") from error
