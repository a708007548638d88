"""Draws attacks on all readers of files: ``python -m tests.hostile.draws --count 10000``.

Each attack ends in a refusal, which has changed nothing, or in a file that is read and can be used. Everything else is
a failure: another error, a crash, more than ten seconds, too much memory, or a look at another file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ort_trainer.core.errors import PACKAGE

from .attacks import PLACES, attacked
from .parts import parts_of
from .readers import Reader, describes, readers
from .watch import WATCH

SECONDS = 10
_MEMORY = 4 << 30


def attack(name: str, seed: str, folder: Path, part: tuple[Any, ...] | None = None) -> tuple[str, str]:
    """Makes a drawn attack.

    Args:
        name: The reader.
        seed: Draws the attack.
        folder: Where files may be written.
        part: The path of the part of the first valid file that is attacked; by default, any part of any file.

    Returns:
        A description of the attack, and the outcome: ``read``, ``refused``, or a failure.
    """
    source, reader = random.Random(f"{name} {seed}"), readers()[name]
    (folder / "evil").write_text("never read")
    content = source.choice(reader.sound) if part is None else reader.sound[0]
    if part is None and reader.by_path and source.random() < 0.03:
        what = source.choice(list(PLACES))
        path = reader.prepared(folder)
        PLACES[what](path)
        told, outcome = what, _outcome(reader, path, (OSError,))
    else:
        parts = parts_of(name, content)
        told, data = attacked(content, reader.form, parts if part is None else {part: parts[part]}, source)
        path = reader.prepared(folder)
        path.write_bytes(data)
        outcome = _outcome(reader, path)
    return told, outcome


def _outcome(reader: Reader, path: Path, also: tuple[type[Exception], ...] = ()) -> str:
    WATCH.seen.clear()
    WATCH.on = True
    try:
        outcome = "read" if reader.accepts_path(path) else "refused"
        describes(path)
    except also:
        outcome = "refused"
    except Exception as error:
        at = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        ours = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else at[-1]
        outcome = f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:200]} {at[-4:]}"
    finally:
        WATCH.on = False
    return f"looked at {WATCH.seen}" if WATCH.seen else outcome


def attacks(name: str, seeds: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yields the seeds, descriptions and outcomes of attacks, which forks make; a fork that ends is replaced."""
    left = list(seeds)
    while left:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            _make(name, left, writing)
        os.close(writing)
        try:
            yield from _answers(reading, left)
        finally:
            os.close(reading)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
        if left:
            code = os.waitstatus_to_exitcode(status)
            how = f"more than {SECONDS} seconds" if code == -signal.SIGKILL else f"the process ended with {code}"
            yield left.pop(0), "", how


def _make(name: str, seeds: Sequence[str], writing: int) -> None:
    """Makes attacks in a fork, and writes a line for each."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for seed in seeds:
                told, outcome = attack(name, seed, Path(folder))
                os.write(writing, f"{told[:300]!r}\t{outcome[:2000]!r}\n".encode(errors="backslashreplace"))
        os._exit(0)
    finally:
        os._exit(1)


def _answers(reading: int, left: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields the answers of a fork, and removes their seeds from those that are left."""
    text, end = b"", time.monotonic() + SECONDS
    while left:
        ready, _, _ = select.select([reading], [], [], max(0.0, end - time.monotonic()))
        received = os.read(reading, 1 << 16) if ready else b""
        if not received:
            return
        *lines, text = (text + received).split(b"\n")
        end = time.monotonic() + SECONDS
        for line in lines:
            told, _, outcome = line.decode().partition("\t")
            yield left.pop(0), told, outcome.strip("'\"")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="attacks in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", choices=list(readers()), help="by default, all")
    parser.add_argument("--case", help="repeats one attack of one reader, in this process")
    parsed = parser.parse_args(arguments)
    names = parsed.reader or list(readers())
    if parsed.case:
        with tempfile.TemporaryDirectory() as folder:
            print(*attack(names[0], parsed.case, Path(folder)), sep=": ")
        return 0
    total, failures = 0, 0
    for at, name in enumerate(names):
        count = parsed.count * (at + 1) // len(names) - parsed.count * at // len(names)
        outcomes, start, kinds = Counter[str](), time.monotonic(), Counter[str]()
        for seed, told, outcome in attacks(name, [f"{parsed.seed}.{number}" for number in range(count)]):
            known = outcome in ("read", "refused")
            outcomes[outcome if known else "FAILED"] += 1
            kind = outcome[:60]
            if not known and not kinds[kind]:
                print(f"  --reader {name!r} --case {seed}: {told}: {outcome}", flush=True)
            kinds[kind] += not known
        failures, total = failures + outcomes["FAILED"], total + count
        print(f"{name}: {count} in {time.monotonic() - start:.0f} s: {dict(outcomes)}", flush=True)
    print(f"{total} attacks, {failures} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
