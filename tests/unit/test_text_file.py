"""Reading what users name: regular files within bounds, and everything else in one line, at once."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from pearl.text_file import Unreadable, read_text
from pearl.units import MIB


def refused(path: Path, most_bytes: int = 100) -> str:
    with pytest.raises(Unreadable) as found:
        read_text(path, most_bytes=most_bytes)
    return str(found.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a"


class TestText:
    @pytest.mark.parametrize("content", ["", "é\n", "a\r\nb\u2028"])
    def test_all_of_it_as_it_is(self, file: Path, content: str) -> None:
        file.write_bytes(content.encode())
        assert read_text(file, most_bytes=100) == content

    def test_through_a_link(self, file: Path, tmp_path: Path) -> None:
        file.write_text("x")
        (tmp_path / "link").symlink_to(file)
        assert read_text(tmp_path / "link", most_bytes=1) == "x"

    @pytest.mark.parametrize("size", [3, MIB + 1, 3 * MIB])
    def test_up_to_its_bound(self, file: Path, size: int) -> None:
        file.write_bytes(b"x" * size)
        assert len(read_text(file, most_bytes=size)) == size
        assert " more than " in refused(file, size - 1)


class TestRefused:
    def test_nothing_there(self, file: Path) -> None:
        assert refused(file) == f"{file}: no such file"
        file.symlink_to("nowhere")
        assert refused(file) == f"{file}: no such file"

    def test_a_folder(self, tmp_path: Path) -> None:
        assert refused(tmp_path) == f"{tmp_path}: got a folder, no regular file"

    def test_a_pipe_that_nobody_writes(self, file: Path) -> None:
        os.mkfifo(file)
        assert refused(file) == f"{file}: got a pipe, no regular file"

    def test_a_pipe_without_a_name(self) -> None:
        reading, writing = os.pipe()
        path = Path(f"/proc/self/fd/{reading}")
        try:
            if not path.exists():
                pytest.skip("no /proc here")
            assert refused(path) == f"{path}: got a pipe, no regular file"
        finally:
            os.close(reading)
            os.close(writing)

    def test_a_pipe_that_came_after_we_looked(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is not waited for."""
        os.mkfifo(file)
        (file.parent / "b").write_text("x")
        regular = (file.parent / "b").stat()
        monkeypatch.setattr(Path, "stat", lambda self: regular)
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(read_text(file, most_bytes=1)), daemon=True)
        thread.start()
        thread.join(60)
        assert found == [""]

    @pytest.mark.parametrize("name", ["/dev/zero", "/dev/null"])
    def test_a_device(self, name: str) -> None:
        assert refused(Path(name)) == f"{name}: got a device, no regular file"

    def test_a_socket(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with socket.socket(socket.AF_UNIX) as there:
            there.bind("s")  # a relative path: those of sockets must be short
            assert refused(Path("s")) == "s: got a socket, no regular file"

    def test_what_is_too_long(self, file: Path) -> None:
        """Known from what it says of itself, before all of it is read."""
        file.touch()
        os.truncate(file, 3 * 2**40)
        assert refused(file, MIB) == f"{file}: got 3072.0 GiB, more than 1.0 MiB"

    def test_what_is_longer_than_it_says(self) -> None:
        path = Path("/proc/cpuinfo")
        if not path.exists():
            pytest.skip("no /proc here")
        assert refused(path, 10).endswith(" B, more than 10 B") or refused(path, 10).endswith("KiB, more than 10 B")

    def test_not_text(self, file: Path) -> None:
        file.write_bytes(b"ab\xe9")
        assert refused(file) == f"{file}: cannot be read: not UTF-8 at byte 2"

    def test_errors_of_the_system(self, file: Path) -> None:
        file.touch()
        assert refused(file / "x") == f"{file}/x: cannot be read: Not a directory"
        (file.parent / "loop").symlink_to("loop")
        assert refused(file.parent / "loop").endswith("loop: cannot be read: Too many levels of symbolic links")

    def test_no_path_at_all(self) -> None:
        assert refused(Path("a\0b")) == "'a\\x00b': cannot be read: embedded null byte"

    def test_no_descriptor_is_left_open(self, file: Path) -> None:
        file.write_bytes(b"xx")
        before = os.listdir("/proc/self/fd")
        read_text(file, most_bytes=2)
        refused(file, 1)
        assert os.listdir("/proc/self/fd") == before
