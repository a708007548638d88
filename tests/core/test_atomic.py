"""What is overwritten keeps its mode, its owner and its links, and is never more readable meanwhile."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ort_trainer.artifacts.files import target_folder, write_files
from ort_trainer.core.atomic import atomic_path, temporary_folder
from ort_trainer.runs import CheckpointManager
from ort_trainer.state import save_checkpoint_file
from ort_trainer.step.onnx_file import save_model
from ort_trainer.upstream import write_upstream_checkpoint

from ..artifacts.test_upstream_checkpoint import sample
from ..helpers import mlp_batches, mlp_trainer

pytestmark = pytest.mark.skipif(os.name == "nt", reason="modes and links of POSIX")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    old = os.umask(0o022)
    yield
    os.umask(old)


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def overwrite(path: Path, text: str = "new") -> list[str]:
    """Replaces a file, and returns the modes of the temporary one, before and after it has its content."""
    with atomic_path(path) as temporary:
        modes = [mode(temporary)]
        temporary.write_text(text)
        modes.append(mode(temporary))
        assert temporary.parent == Path(os.path.realpath(path)).parent
    assert path.read_text() == text
    return modes


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o400, 0o644, 0o664, 0o666])
def test_the_mode_stays(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "a"
    path.touch()
    path.chmod(bits)
    assert overwrite(path) == ["0o600", "0o600"]
    assert mode(path) == oct(bits)


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    overwrite(tmp_path / "a")
    os.umask(0o077)
    overwrite(tmp_path / "b")
    assert (mode(tmp_path / "a"), mode(tmp_path / "b")) == ("0o644", "0o600")


def test_a_mode_set_during_the_write_counts(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    with atomic_path(path):
        path.chmod(0o600)
    assert mode(path) == "0o600"


@pytest.mark.skipif(getattr(os, "geteuid", int)() != 0, reason="only root gives files away")
def test_the_owner_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    os.chown(path, 1234, 2345)
    path.chmod(0o640)
    overwrite(path)
    assert (path.stat().st_uid, path.stat().st_gid, mode(path)) == (1234, 2345, "0o640")


@pytest.mark.parametrize(("bits", "expected"), [(0o640, "0o600"), (0o664, "0o644"), (0o604, "0o600"), (0o660, "0o600")])
def test_another_group_gets_what_all_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, expected: str
) -> None:
    """A user who is no member of the file's group can't keep it."""
    path = tmp_path / "a"
    path.touch()
    path.chmod(bits)
    real = Path.stat

    def of_another_group(self: Path, **options: bool) -> os.stat_result:
        fields = list(real(self, **options))
        fields[5] += self == path
        return os.stat_result(fields)

    def refused(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "stat", of_another_group)
    monkeypatch.setattr(os, "chown", refused)
    overwrite(path)
    assert mode(path) == expected


def test_an_access_control_list_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the group are the mask of the list: without it, the group could read the file."""
    path, name = tmp_path / "a", "system.posix_acl_access"
    path.touch()
    entries = [(1, 6, -1), (2, 4, 12345), (4, 0, -1), (0x10, 4, -1), (0x20, 0, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(path, name, acl)
    except (AttributeError, OSError):
        pytest.skip("no access control lists here")
    assert mode(path) == "0o640"
    overwrite(path)
    assert os.getxattr(path, name) == acl and mode(path) == "0o640"

    def refused(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "setxattr", refused)
        overwrite(path)
    assert mode(path) == "0o600"
    os.setxattr(tmp_path, "system.posix_acl_default", acl)  # new files here get a list
    path.chmod(0o644)
    overwrite(path)
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(path, name)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    real, link, second = tmp_path / "far" / "file", tmp_path / "link", tmp_path / "second"
    real.touch()
    real.chmod(0o600)
    link.symlink_to("far/file")
    second.symlink_to(link)
    for path in (link, second):
        overwrite(path, path.name)
        assert real.read_text() == path.name and mode(real) == "0o600"
    assert link.is_symlink() and second.is_symlink()
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["file"]
    real.unlink()
    overwrite(link)
    assert link.is_symlink() and real.read_text() == "new"


def test_links_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, to in {"loop": "pool", "pool": "loop", "gone": "far/file", "folder": "."}.items():
        Path(name).symlink_to(to)
    os.mkfifo("pipe")
    for name, error, text in (
        ("loop", OSError, "can't write 'loop': .* it is a symbolic link that leads back to itself: remove it"),
        (
            "gone",
            FileNotFoundError,
            "'gone': it is a symbolic link to '.*far/file', and the folder '.*far'",
        ),
        ("folder", IsADirectoryError, "can't write 'folder': it is a folder"),
        ("pipe", FileExistsError, "can't write 'pipe': it is a device, a pipe or a socket: choose another path"),
        (os.devnull, FileExistsError, "it is a device"),
    ):
        with pytest.raises(error, match=text):
            overwrite(Path(name))
    assert {path.name for path in tmp_path.iterdir()} == {"loop", "pool", "gone", "folder", "pipe"}


def test_a_link_to_another_file_system(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    real = shared / f"ort_trainer_{os.getpid()}"
    (tmp_path / "checkpoint").symlink_to(real)
    try:
        overwrite(tmp_path / "checkpoint")
        real.chmod(0o600)
        write_files(tmp_path, lambda folder: (folder / "checkpoint").write_text("export") and None)
        assert (tmp_path / "checkpoint").is_symlink() and real.read_text() == "export" and mode(real) == "0o600"
        assert [path for path in shared.iterdir() if real.name in path.name] == [real]
    finally:
        real.unlink()


def _model(path: Path, limit: int) -> None:
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] y) { y = Add(x, w) }'
    )
    weight = ir.Value(name="w", shape=ir.Shape([1024]), type=ir.TensorType(ir.DataType.FLOAT))
    weight.const_value = ir.tensor(np.ones(1024, np.float32), name="w")
    model.graph.register_initializer(weight)
    save_model(model, path, limit)


def _upstream(path: Path, limit: int) -> None:
    write_upstream_checkpoint(path, sample(), limit)


@pytest.mark.parametrize("write", [_model, _upstream])
def test_second_files(tmp_path: Path, write: Callable[[Path, int], None]) -> None:
    """A second file holds what a private first file held."""
    path, data = tmp_path / "a", tmp_path / "a.data"
    write(path, 1 << 20)
    path.chmod(0o600)
    write(path, 0)
    assert (mode(path), mode(data)) == ("0o600", "0o600")
    (tmp_path / "far").mkdir()
    data.rename(tmp_path / "far" / "data")
    data.symlink_to("far/data")
    (tmp_path / "far" / "data").chmod(0o640)
    write(path, 0)
    assert data.is_symlink() and mode(data) == "0o640" and mode(path) == "0o600"
    assert {path.name for path in tmp_path.rglob("*")} == {"a", "a.data", "far", "data"}


def test_artifacts(tmp_path: Path) -> None:
    folder, names = tmp_path / "art", ["checkpoint", "training_model.onnx"]

    def write(folder: Path, *more: str) -> None:
        for name in (*names, *more):
            (folder / name).write_text(name)

    write_files(folder, write)
    assert {mode(path) for path in folder.iterdir()} == {"0o644"}
    folder.chmod(0o700)
    (folder / "checkpoint").rename(tmp_path / "real")
    (folder / "checkpoint").symlink_to("../real")
    (tmp_path / "real").chmod(0o600)
    write_files(folder, lambda folder: write(folder, "nominal_checkpoint"))
    found = {path.name: mode(path) for path in folder.iterdir()}
    private = dict.fromkeys(["checkpoint", "nominal_checkpoint"], "0o600")
    assert found == {**private, "training_model.onnx": "0o644"} and mode(folder) == "0o700"
    assert (folder / "checkpoint").is_symlink() and (tmp_path / "real").read_text() == "checkpoint"
    (tmp_path / "link").symlink_to("new")
    write_files(target_folder(tmp_path / "link"), write)
    assert (tmp_path / "link").is_symlink() and len(list((tmp_path / "new").iterdir())) == 2
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        target_folder(tmp_path / "loop")


def test_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint_file(path, {}, {})
    path.chmod(0o600)
    save_checkpoint_file(path, {"x": 1}, {}, overwrite=True)
    assert mode(path) == "0o600"


def test_rotated_checkpoints_stay_private(tmp_path: Path) -> None:
    trainer, manager = mlp_trainer(), CheckpointManager(tmp_path, keep_last=1)
    for batch in mlp_batches(3):
        trainer.train_step(*batch)
        manager.save(trainer)
        for path in tmp_path.iterdir():
            if trainer.train_step_info.step == 1:
                path.chmod(0o600)
            assert mode(path) == "0o600"


def failing(fail: Callable[[int], bool], number: int) -> Callable[[int], None]:
    """Returns an ``os.fsync`` that fails on some files."""

    def fsync(handle: int) -> None:
        if fail(handle):
            raise OSError(number, os.strerror(number))

    return fsync


def of_folder(handle: int) -> bool:
    return stat.S_ISDIR(os.fstat(handle).st_mode)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES, errno.ENOTSUP, errno.EIO])
def test_a_folder_that_can_not_be_synced_fails_no_write(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFS, VirtualBox and FUSE refuse it; the file is there. Only an error of the disk is worth a warning."""
    monkeypatch.setattr(os, "fsync", failing(of_folder, number))
    with warnings.catch_warnings(record=True) as caught, atomic_path(tmp_path / "file") as temporary:
        warnings.simplefilter("always")
        temporary.write_text("new")
    assert (tmp_path / "file").read_text() == "new"
    assert ["can't say that they are on the disk" in str(each.message) for each in caught] == [True] * (
        number == errno.EIO
    )


def test_a_file_that_can_not_be_synced_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fsync", failing(lambda handle: not of_folder(handle), errno.EIO))
    with pytest.raises(OSError, match="can't write .*file"), atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "old"


def test_a_lock_that_can_not_be_closed_fails_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = os.close

    def fail(handle: int) -> None:
        is_lock = (tmp_path / "file").exists() and not of_folder(handle)
        close(handle)
        if is_lock:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("new")
        patch.setattr(os, "close", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["open", "close"])
def test_a_temporary_folder_that_can_not_be_opened_or_closed_goes(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(os, call), []

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if call == "close":
            real(*args)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return None if call == "close" else real(*args, **kwargs)

    raises = pytest.raises(OSError) if call == "open" else contextlib.nullcontext()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail_once)
        with raises, temporary_folder(tmp_path, "a") as folder:
            (folder / "inner").mkdir()
            calls.clear()  # what closes now is in the removal
    assert calls and not any(tmp_path.iterdir())


def test_a_target_without_positions_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"can't write .*file'"), atomic_path(tmp_path / "file"):
        raise io.UnsupportedOperation("File or stream is not seekable.")


def test_an_outdated_checkpoint_that_can_not_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, manager = mlp_trainer(), CheckpointManager(tmp_path, keep_last=1)
    trainer.train_step(*mlp_batches(1)[0])
    first = manager.save(trainer)
    unlink = Path.unlink

    def busy(path: Path, missing_ok: bool = False) -> None:
        if path == first:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", busy)
    trainer.train_step(*mlp_batches(1)[0])
    with pytest.warns(UserWarning, match="outdated checkpoint .*step-00000001.* can't be removed"):
        second = manager.save(trainer)
    assert second.exists() and first.exists() and manager.latest == second
