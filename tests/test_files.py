"""Files: nothing half-written, nobody's own files deleted, and whatever cannot be written told in one line."""

import errno
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from simrl.errors import InputError
from simrl.files import (
    parquet_metadata,
    read_parquet,
    temporary_folder,
    write_parquet,
    write_whole_file,
    write_whole_folder,
)
from tests.command_line import contents

MANIFEST = "files.txt"


def write(path, text="new"):
    with write_whole_file(path) as temporary:
        temporary.write_text(text)


def write_folder(path, **files):
    with write_whole_folder(path, MANIFEST) as temporary:
        for name, text in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_text(text)


def refusal(call, *arguments, **more):
    """The one line of a refusal."""
    with pytest.raises(InputError) as refused:
        call(*arguments, **more)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# A file.


def test_a_file_appears_whole_with_the_folders_above_it(tmp_path):
    with write_whole_file(tmp_path / "a" / "b" / "file.txt") as temporary:
        temporary.write_text("text")
        assert not (tmp_path / "a" / "b" / "file.txt").exists()
    assert contents(tmp_path) == {"a": None, "a/b": None, "a/b/file.txt": b"text"}


def test_a_file_gets_the_mode_that_any_new_file_gets(tmp_path):
    (tmp_path / "plain.txt").write_text("")
    write(tmp_path / "file.txt")
    assert (tmp_path / "file.txt").stat().st_mode == (tmp_path / "plain.txt").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_on_any_error_neither_the_file_nor_a_new_folder_is_left(tmp_path, error):
    with pytest.raises(error), write_whole_file(tmp_path / "a" / "b" / "file.txt") as temporary:
        temporary.write_text("half")
        raise error
    assert contents(tmp_path) == {}


def test_on_an_error_the_old_file_stays_as_it_was(tmp_path):
    (tmp_path / "file.txt").write_text("old")
    with (
        pytest.raises(ValueError, match="broken"),
        write_whole_file(tmp_path / "file.txt") as temporary,
    ):
        temporary.write_text("half")
        raise ValueError("broken")
    assert contents(tmp_path) == {"file.txt": b"old"}


def test_a_folder_that_somebody_else_has_used_meanwhile_is_left_on_an_error(tmp_path):
    with pytest.raises(ValueError, match="broken"), write_whole_file(tmp_path / "a" / "file.txt"):
        (tmp_path / "a" / "theirs.txt").write_text("theirs")
        raise ValueError("broken")
    assert contents(tmp_path) == {"a": None, "a/theirs.txt": b"theirs"}


def test_a_file_is_replaced_by_one_of_its_kind_only(tmp_path):
    (tmp_path / "lengths.csv").write_text("step,prompt\n")
    message = refusal(write, tmp_path / "lengths.csv", "PAR1 and more")
    assert re.search(r"lengths\.csv: is another kind of file.*name another", message)
    assert contents(tmp_path) == {"lengths.csv": b"step,prompt\n"}
    write(tmp_path / "lengths.csv", "step and what follows")
    assert (tmp_path / "lengths.csv").read_text() == "step and what follows"


def test_an_empty_file_may_be_replaced_by_anything(tmp_path):
    (tmp_path / "file.txt").touch()
    write(tmp_path / "file.txt", "new")
    assert (tmp_path / "file.txt").read_text() == "new"


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "there" / "file.txt")
    write(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "there" / "file.txt").read_text() == "new"


@pytest.mark.parametrize("path", [os.devnull, "."])
def test_a_device_or_a_folder_is_never_replaced(path):
    assert f"{path}: is no file" in refusal(write, Path(path))
    assert Path(path).is_char_device() or Path(path).is_dir()


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("file.txt/below", "file.txt is no folder"),
        ("file.txt/far/below", "file.txt is no folder"),
        (f"{os.devnull}/below", "null is no folder"),
        ("n" * 300, "File name too long"),
        ("loop", "its links go round in a circle"),
        ("/proc/none/file.txt", "cannot be written"),
    ],
)
def test_where_no_file_can_be_it_says_why(tmp_path, path, what):
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = contents(tmp_path)
    for message in (refusal(write, tmp_path / path), refusal(write_folder, tmp_path / path)):
        assert path[-50:] in message and re.search(what, message)
    assert contents(tmp_path) == before


def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(tmp_path):
    def fill():
        with write_whole_file(tmp_path / "new" / "file.txt") as temporary:
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert "file.txt: cannot be written (No space left on device); name a place" in refusal(fill)
    assert contents(tmp_path) == {}


# A folder.


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_a_living_one_writes_is_not(
    tmp_path,
):
    code = (
        "import sys, time, pathlib; from simrl.files import write_whole_folder\n"
        "with write_whole_folder(pathlib.Path(sys.argv[1]), 'files') as folder:\n"
        "    (folder / 'half').touch(); print(folder.name, flush=True); time.sleep(600)"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    names = [writer.stdout.readline().strip() for writer in writers]
    try:
        writers[0].kill()
        writers[0].wait()
        for name in names:
            os.utime(tmp_path / name, (0, 0))  # long ago
        with write_whole_folder(tmp_path / "out", "files") as folder:
            (folder / "whole").touch()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[1], "out"])
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def test_temporary_folders_of_killed_processes_are_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = (
        "import sys, time; from simrl.files import temporary_folder\n"
        "with temporary_folder() as folder:\n"
        "    (folder / 'half').touch(); print(folder, flush=True); time.sleep(600)"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    left = Path(writer.stdout.readline().strip())
    writer.kill()
    writer.communicate()
    assert (left / "half").exists() and left.parent == tmp_path
    with temporary_folder() as folder:
        assert left.exists()  # for a minute: another process may be about to lock it
        os.utime(left, (0, 0))
    with temporary_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_was_set_aside_when_the_process_was_killed_comes_back(tmp_path):
    aside = tmp_path / ".out.simrl-12345678"
    (aside / "out").mkdir(parents=True)
    (aside / "out" / "files").write_text("files\nkept\n")
    (aside / "out" / "kept").touch()
    os.utime(aside, (0, 0))
    with pytest.raises(RuntimeError), write_whole_folder(tmp_path / "out", "files"):
        assert (tmp_path / "out" / "kept").exists()
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_any_flipped_bit_of_a_table_that_simrl_wrote_is_noticed(tmp_path):
    path, rng = tmp_path / "table.parquet", np.random.default_rng(3)
    write_parquet(
        pa.table({"n": rng.integers(0, 50, 300), "text": ["a", "b", "c"] * 100}),
        path,
        b"key",
        Notes(note="kept"),
    )
    whole, table = path.read_bytes(), read_parquet(path)
    assert parquet_metadata(table, path, b"key", Notes, "").note == "kept"
    for bit in rng.choice(8 * len(whole), 400, replace=False):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with suppress(
            InputError
        ):  # only a seal that is no longer found leaves a table, the right one
            found = read_parquet(path)
            assert (
                found.equals(table)
                and found.schema.metadata[b"key"] == table.schema.metadata[b"key"]
            )


class Notes(BaseModel):
    note: str


def test_a_folder_appears_whole_with_a_list_of_its_files(tmp_path):
    write_folder(tmp_path / "out", **{"a.txt": "a", "run/b.txt": "b"})
    assert (tmp_path / "out" / MANIFEST).read_text() == "files.txt\na.txt\nrun/b.txt\n"
    assert contents(tmp_path / "out").keys() == {"a.txt", "run", "run/b.txt", MANIFEST}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_simrl_wrote_is_replaced_altogether(tmp_path):
    write_folder(tmp_path / "out", **{"a.txt": "a", "run/b.txt": "b"})
    write_folder(tmp_path / "out", **{"c.txt": "c"})
    assert contents(tmp_path / "out").keys() == {"c.txt", MANIFEST}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_list_of_files_that_is_no_text_lists_none(tmp_path):
    write_folder(tmp_path / "out", **{"a.txt": "a"})
    (tmp_path / "out" / MANIFEST).write_bytes("files.txt\na.txt\n".encode("utf-16"))
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match="which simrl did not write"):
        write_folder(tmp_path / "out", **{"b.txt": "b"})
    assert contents(tmp_path / "out") == before


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", **{"a.txt": "a"})
    assert (tmp_path / "out" / "a.txt").exists()


@pytest.mark.parametrize("name", ["notes.md", "run/notes.md", "run/.hidden", "link"])
def test_a_folder_with_somebodys_own_file_is_refused_and_untouched(tmp_path, name):
    write_folder(tmp_path / "out", **{"run/b.txt": "b"})
    (tmp_path / "out" / name).symlink_to(tmp_path)
    before = contents(tmp_path)
    message = refusal(write_folder, tmp_path / "out", **{"c.txt": "c"})
    assert (
        f"out: holds {name}, which simrl did not write; move it, or name another output folder"
        in message
    )
    assert contents(tmp_path) == before


def test_what_a_file_manager_leaves_behind_is_nobodys_own(tmp_path):
    write_folder(tmp_path / "out", **{"a.txt": "a"})
    (tmp_path / "out" / ".DS_Store").touch()
    write_folder(tmp_path / "out", **{"c.txt": "c"})
    assert (tmp_path / "out" / "c.txt").exists()


def test_a_folder_that_simrl_did_not_write_is_refused_before_any_work(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("text")
    before = contents(tmp_path)
    message = refusal(write_whole_folder(tmp_path / "out", MANIFEST).__enter__)
    assert (
        "out: exists and was not written by simrl (no files.txt in it); name another output folder"
        in message
    )
    assert contents(tmp_path) == before


def test_what_appears_while_the_work_goes_on_is_not_deleted(tmp_path):
    with (
        pytest.raises(InputError, match="not written by simrl"),
        write_whole_folder(tmp_path / "out", MANIFEST),
    ):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("text")
    assert contents(tmp_path) == {"out": None, "out/thesis.tex": b"text"}


def test_the_current_folder_and_those_above_are_refused(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in (Path(), Path(".."), Path("/"), tmp_path / "here"):
        assert re.search("cannot be replaced.*name a folder in it", refusal(write_folder, path))
    assert contents(tmp_path) == {"here": None}


def test_a_file_is_refused_as_an_output_folder(tmp_path):
    (tmp_path / "file.txt").write_text("text")
    assert "file.txt: is a file; name another output folder" in refusal(
        write_folder, tmp_path / "file.txt"
    )
    assert contents(tmp_path) == {"file.txt": b"text"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_on_an_error_the_old_folder_stays_whole(tmp_path, error):
    write_folder(tmp_path / "out", **{"a.txt": "a"})
    before = contents(tmp_path)
    with pytest.raises(error), write_whole_folder(tmp_path / "out", MANIFEST) as temporary:
        (temporary / "half.txt").write_text("half")
        raise error
    assert contents(tmp_path) == before


def test_an_old_folder_comes_back_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    write_folder(tmp_path / "out", **{"a.txt": "a"})
    before = contents(tmp_path)
    rename = Path.rename

    def fails_once(path, target):
        if not path.name.startswith(".") or path.parent != tmp_path:
            return rename(path, target)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "rename", fails_once)
    assert "out: cannot be written (Input/output error)" in refusal(
        write_folder, tmp_path / "out", **{"b.txt": "b"}
    )
    assert contents(tmp_path) == before


def test_an_error_inside_names_the_folder_and_not_its_temporary_place(tmp_path):
    def fill():
        with (
            write_whole_folder(tmp_path / "out", MANIFEST) as temporary,
            write_whole_file(temporary / "a.png"),
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert refusal(fill).startswith(
        f"{tmp_path}/out/a.png: cannot be written (No space left on device)"
    )
    assert contents(tmp_path) == {}


def test_ctrl_c_pressed_again_does_not_stop_the_tidying_up(tmp_path, monkeypatch):
    import shutil

    remove = shutil.rmtree

    def impatient(path, **more):
        signal.raise_signal(signal.SIGINT)
        remove(path, **more)

    monkeypatch.setattr(shutil, "rmtree", impatient)
    with (
        pytest.raises(KeyboardInterrupt),
        write_whole_folder(tmp_path / "out", MANIFEST) as temporary,
    ):
        (temporary / "half.txt").write_text("half")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_a_small_file_of_huge_texts_is_refused_before_they_fill_the_memory(tmp_path, kind):
    path = tmp_path / "huge.parquet"
    texts = pa.array([f"{i:04d}" + "a" * 1_000_000 for i in range(400)]).cast(kind)
    pq.write_table(
        pa.table({"step": range(400), "note": texts}),
        path,
        compression="zstd",
        use_dictionary=False,
    )
    before = pa.total_allocated_bytes()
    with pytest.raises(
        InputError, match=r"says that it holds 400 rows, 0.4 GB, in a file of 0.\d MB"
    ):
        read_parquet(path)
    assert pa.total_allocated_bytes() - before < 1 << 26
    assert read_parquet(path, ["step"]).column_names == ["step"]


def test_a_text_that_is_repeated_is_as_large_as_its_repetitions(tmp_path):
    path = tmp_path / "repeated.parquet"
    texts = pa.array(["a" * 100_000] * 4000)
    pq.write_table(pa.table({"note": texts}), path, compression="zstd")
    with pytest.raises(InputError, match=r"column 'note' holds 0.\d GB of texts or more"):
        read_parquet(path)
