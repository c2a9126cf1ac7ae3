"""Real data or a clear refusal: found in all accepted places, checked always, fetched whole or not at all."""

import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tersegrad.lab import datasets
from tersegrad.lab.datasets import Archive, DamagedData, MissingData, Part, Source

DATA = Path(__file__).parents[2] / "data"  # put or link datasets here to have them tested
TEXT = b"To be, or not to be"
NOWHERE = "http://127.0.0.1:9"  # the discard port: refused at once


def md5(contents: bytes) -> str:
    return "md5:" + hashlib.md5(contents).hexdigest()


def tar_of(contents: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        entry = tarfile.TarInfo("play/hamlet.txt")
        entry.size = len(contents)
        tar.addfile(entry, io.BytesIO(contents))
    return file.getvalue()


PACKED = {"hamlet.txt": TEXT, "hamlet.txt.gz": gzip.compress(TEXT), "hamlet.tar.gz": tar_of(TEXT)}


def source(archive: str, address: str = NOWHERE) -> Source:
    """A dataset of one file, published in one of three forms."""
    name = "play/hamlet.txt" if archive.endswith(".tar.gz") else "hamlet.txt"
    part = Part(name, md5(TEXT), Archive(f"{address}/{archive}", md5(PACKED[archive])))
    return Source("Hamlet", (part,), folders=("hamlet", ""))


def text_of(wanted: Source, data: Path | None) -> bytes:
    ((_, contents),) = datasets.read(wanted, data)
    return contents


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; of a file named short-... only the first half, with the length of the whole."""

    def log_message(self, *args: object) -> None:
        pass

    def copyfile(self, source, outputfile):
        whole = source.read()
        outputfile.write(whole[: len(whole) // 2] if "short" in self.path else whole)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder, and the address at which it is published."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "server"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path):
    """An empty --data DIR."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("under", ["", "hamlet", "downloads"])
@pytest.mark.parametrize("archive", PACKED)
def test_finds_what_is_there(folder, archive, under):
    (folder / under).mkdir(exist_ok=True)
    assert datasets.missing(source(archive), folder)
    (folder / under / archive).write_bytes(PACKED[archive])
    assert not datasets.missing(source(archive), folder)
    assert text_of(source(archive), folder) == TEXT


def test_finds_an_unpacked_file(folder):
    (folder / "play").mkdir()
    (folder / "play/hamlet.txt").write_bytes(TEXT)
    assert text_of(source("hamlet.tar.gz"), folder) == TEXT


def test_an_absolute_folder_needs_no_data_option(folder):
    (folder / "hamlet.txt").write_bytes(TEXT)
    wanted = Source("Hamlet", source("hamlet.txt").parts, folders=(str(folder),))
    assert text_of(wanted, None) == TEXT


@pytest.mark.parametrize("archive", PACKED)
def test_refuses_damaged_files(folder, archive):
    for damaged in (PACKED[archive][:-9], PACKED[archive][:4] + b"x" + PACKED[archive][5:], b""):
        if damaged[10:] == PACKED[archive][10:] and archive == "hamlet.txt.gz":
            continue  # the time stamp in a gzip header may differ: the contents are what counts
        (folder / archive).write_bytes(damaged)
        with pytest.raises(DamagedData, match=rf"{archive} .*Put the published file in its place"):
            text_of(source(archive), folder)


def test_a_tar_is_checked_before_it_is_opened(folder, monkeypatch):
    (folder / "hamlet.tar.gz").write_bytes(tar_of(TEXT + b"!"))
    monkeypatch.setattr(tarfile, "open", lambda *args: pytest.fail("opened"))
    with pytest.raises(DamagedData, match="the published file has"):
        text_of(source("hamlet.tar.gz"), folder)


@pytest.mark.parametrize("archive", PACKED)
def test_fetches_once(folder, server, archive):
    published, address = server
    (published / archive).write_bytes(PACKED[archive])
    assert text_of(source(archive, address), folder) == TEXT
    assert os.listdir(folder / "downloads") == [archive]
    assert text_of(source(archive, NOWHERE), folder) == TEXT


def test_another_file_at_the_address_is_not_kept(folder, server):
    published, address = server
    (published / "hamlet.tar.gz").write_bytes(tar_of(b"2b | !2b"))
    with pytest.raises(DamagedData, match="not kept"):
        text_of(source("hamlet.tar.gz", address), folder)
    assert os.listdir(folder / "downloads") == []


def test_half_a_download_is_not_kept(folder, server):
    published, address = server
    (published / "short-hamlet").write_bytes(TEXT)
    part = Part("hamlet.txt", md5(TEXT), Archive(f"{address}/short-hamlet", md5(TEXT)))
    with pytest.raises((DamagedData, MissingData)):
        text_of(Source("Hamlet", (part,), ("",)), folder)
    assert os.listdir(folder / "downloads") == []


def test_a_failed_download_says_what_to_do(folder):
    with pytest.raises(MissingData) as error:
        text_of(source("hamlet.txt"), folder)
    for word in (
        "Hamlet is needed",
        f"hamlet.txt is not in {folder}/hamlet",
        f"{NOWHERE}/hamlet.txt",
        "refused",
        md5(TEXT),
        "write --data DIR",
    ):
        assert word in str(error.value)
    assert os.listdir(folder / "downloads") == []


def test_a_missing_page_says_what_to_do(folder, server):
    _, address = server
    with pytest.raises(MissingData, match=r"404.*write --data DIR"):
        text_of(source("hamlet.txt", address), folder)


def test_no_folder_says_what_to_do(folder):
    with pytest.raises(MissingData, match=r"CIFAR-10 is needed and no folder .*/cifar-10-python.tar.gz .*--data DIR"):
        datasets.cifar10(None)
    with pytest.raises(MissingData, match=r"Penn Treebank is needed and --data .*typo is not a folder"):
        datasets.penn_treebank(folder / "typo")
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("load", "file"),
    [
        (datasets.cifar10, "cifar10/cifar-10-batches-py/data_batch_1"),
        (datasets.cifar10, "cifar-10-python.tar.gz"),
        (datasets.penn_treebank, "ptb/ptb.train.txt"),
        (datasets.shakespeare, "tinyshakespeare/input.txt"),
        (datasets.fashion, "train-images-idx3-ubyte.gz"),
    ],
)
def test_every_dataset_is_checked(folder, load, file):
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(gzip.compress(b"something else"))
    with pytest.raises(DamagedData, match=Path(file).name):
        load(folder)


class Evil:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize("evil", [Evil(), [1, {"data": Evil()}], print, np.float32, Path()])
def test_a_pickle_with_code_is_refused(evil):
    with pytest.raises(DamagedData, match="data needs no code"):
        datasets.unpickle(pickle.dumps(evil, protocol=2))


@pytest.mark.parametrize("values", [np.array([print]), np.arange(3.0)])
def test_a_pickle_with_other_arrays_is_refused(values):
    with pytest.raises(DamagedData, match=r"images are uint8|data needs no code"):
        datasets.unpickle(pickle.dumps(values, protocol=2))


def test_a_pickle_as_cifar_has_them_is_read():
    """In Python 2's form: byte strings, and numpy's old module name."""
    head = b"\x80\x02}q\x00(U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01K\x02K\x03\x86" + dtype + b"\x89U\x06abcdeftb"
    batch = datasets.unpickle(head + state + b"U\x06labels]q\x02(K\x05K\x06eu.")
    assert batch[b"labels"] == [5, 6]
    assert batch[b"data"].tolist() == [[97, 98, 99], [100, 101, 102]]
    assert torch.from_numpy(batch[b"data"]).dtype == torch.uint8


def test_digits():
    data = datasets.digits()
    assert data.train_x.shape == (1437, 1, 8, 8)
    assert data.test_x.shape == (360, 1, 8, 8)
    assert data.train_x.dtype == torch.uint8
    assert int(data.train_x.max()) == 16


def real(wanted: Source) -> Path:
    """The folder with a real dataset, or a skip: tests fetch nothing."""
    if datasets.missing(wanted, DATA):
        pytest.skip(f"{wanted.title} is not in {DATA.name}/ of the project")
    return DATA


def test_cifar10():
    data = datasets.cifar10(real(datasets.CIFAR10))
    assert data.train_x.shape == (50_000, 3, 32, 32)
    assert data.test_y.bincount().tolist() == [1000] * 10
    assert data.train_y[:5].tolist() == [6, 9, 9, 4, 1]


def test_fashion():
    data = datasets.fashion(real(datasets.FASHION))
    assert data.train_x.shape == (60_000, 1, 28, 28)
    assert data.test_y.bincount().tolist() == [1000] * 10
    assert float(data.train_x.float().mean()) == pytest.approx(72.9, abs=0.1)


def test_penn_treebank():
    data = datasets.penn_treebank(real(datasets.PTB))
    assert (len(data.train), len(data.test), data.vocabulary) == (929_589, 82_430, 10_000)
    assert int(data.train.max()) == 9_999


def test_shakespeare():
    data = datasets.shakespeare(real(datasets.SHAKESPEARE))
    assert (len(data.train) + len(data.test), data.vocabulary) == (1_115_394, 65)
