"""The visual words of local descriptors, found again fast."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from listwise.columns import FileHeader
from listwise.errors import InputError
from listwise.files import write_tensors
from listwise.machine import Machine
from listwise.optional import requires

WORDS: Final = 65_536

# Up to so many words are compared one by one: nothing is faster.
FEW = 4096
# Nearest by 4-bit codes, which are then compared exactly. So many find the nearest of 65,536 words
# for RootSIFT descriptors as surely as comparing with all, at less than half the cost.
_CANDIDATES = 64
_CANDIDATES_EACH = 32
ROWS = 1 << 14  # descriptors looked up at a time
_PRODUCTS = 1 << 28  # of descriptors and words on a GPU at a time: 1 GB

Float32 = NDArray[np.float32]
Words = NDArray[np.int32]


class CodebookInfo(FileHeader):
    """Where a codebook comes from: `extractor` names what made the descriptors, and its settings.

    `learned_from` is the number of descriptors that k-means saw, drawn by `seed`.
    """

    extractor: str
    learned_from: int
    seed: int


@dataclass(frozen=True, eq=False)
class Codebook:
    """K visual words: float32 `centroids` [K, D].

    Words are looked up on `device`: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.
    """

    centroids: Float32
    info: CodebookInfo
    device: str = "auto"

    def __post_init__(self) -> None:
        rows = np.ascontiguousarray(self.centroids, dtype=np.float32)
        object.__setattr__(self, "centroids", rows)
        if rows.ndim != 2 or not len(rows) or rows.shape[1] % 8:
            raise InputError(
                "a codebook is centroids [K, D], D a multiple of 8 (a bit of each dimension is "
                f"kept), not {list(rows.shape)}"
            )
        if not np.isfinite(rows).all():
            raise InputError("the codebook has values that are not finite: learn it again")

    def __len__(self) -> int:
        return len(self.centroids)

    @property
    def dim(self) -> int:
        """Dimensions D of a descriptor."""
        return int(self.centroids.shape[1])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the centroids and the extractor's name: equal if the words must be."""
        digest = hashlib.sha256(repr((self.info.extractor, self.centroids.shape)).encode())
        digest.update(self.centroids.tobytes())
        return digest.hexdigest()

    def require(self, extractor: str) -> None:
        """Refuse the descriptors of another extractor."""
        if extractor != self.info.extractor:
            raise InputError(
                f"the codebook is for descriptors of {self.info.extractor}, not of {extractor}: "
                "learn another, or extract again"
            )

    def assign(self, descriptors: NDArray[np.floating], count: int = 1) -> Words:
        """The `count` nearest words of each descriptor, nearest first: [n, D] -> int32 [n, count].

        Without a GPU larger codebooks are searched by compact codes first: a word that is not the
        nearest comes about once in ten thousand.
        """
        rows = checked(descriptors, self.dim)
        if not 1 <= count <= len(self):
            raise InputError(f"{count} words asked for of a codebook of {len(self)}")
        if self._on_gpu is not None:
            given = torch.from_numpy(rows).to(self._on_gpu.device)
            words: Words = nearest_words(given, self._on_gpu, count).int().cpu().numpy()
            return words
        found = np.empty((len(rows), count), np.int32)
        settings: Any = None
        if len(self) > FEW:
            faiss = import_faiss()
            settings = faiss.IndexRefineSearchParameters()
            settings.k_factor = max(_CANDIDATES / count, _CANDIDATES_EACH)
        for start in range(0, len(rows), ROWS):
            part = rows[start : start + ROWS]
            _, nearest = self._index.search(part, count, params=settings)
            found[start : start + ROWS] = nearest
        return found

    @cached_property
    def _on_gpu(self) -> Tensor | None:
        """The centroids where a GPU can use them, None without one."""
        device = Machine.detect(self.device).device
        if not device.startswith("cuda"):
            return None
        return torch.from_numpy(self.centroids).to(device)

    @cached_property
    def _index(self) -> Any:
        faiss = import_faiss()
        index: Any = faiss.IndexFlatL2(self.dim)
        if len(self) > FEW:
            codes = faiss.IndexPQFastScan(self.dim, self.dim // 2, 4)
            codes.pq.cp.niter = 10
            index = faiss.IndexRefineFlat(codes)
            train_index(index, self.centroids)
        index.add(self.centroids)
        return index

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, which says where the codebook comes from."""
        metadata = {"codebook": self.info.model_dump_json(), "fingerprint": self.fingerprint}
        write_tensors(Path(path), {"centroids": self.centroids}, metadata)

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> "Codebook":
        """Read a codebook, whose words are then looked up on a device; nothing in it is run."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"no codebook {path}: listwise local codebook learns one")
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                centroids = file.get_tensor("centroids")
            header, fingerprint = metadata["codebook"], metadata["fingerprint"]
        except (OSError, SafetensorError, KeyError) as error:
            raise InputError(f"{path} is damaged or not a codebook: learn it again") from error
        info = CodebookInfo.parse(header, path, "learn it again")
        codebook = cls(centroids, info, device)
        if codebook.fingerprint != fingerprint:
            raise InputError(f"{path} is damaged: learn it again, or copy it again")
        return codebook


def is_codebook(path: str | Path) -> bool:
    """Whether a file is a codebook, and not something else."""
    try:
        Codebook.load(path)
    except InputError:
        return False
    return True


def checked(descriptors: NDArray[np.floating], dim: int) -> Float32:
    """Local descriptors as float32 [n, dim], or an error that says what is wrong with them."""
    rows = np.ascontiguousarray(descriptors, dtype=np.float32)
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise InputError(f"local descriptors should be [n, {dim}], found shape {list(rows.shape)}")
    if not np.isfinite(rows).all():
        raise InputError("local descriptors have values that are not finite: extract them again")
    return rows


def train_index(index: Any, centroids: Float32) -> None:
    """Learn an index's codes, in one thread: many would only wait for each other."""
    with threadpool_limits(1):
        index.train(centroids)


def nearest_words(rows: Tensor, centroids: Tensor, count: int = 1) -> Tensor:
    """The `count` nearest of all words, nearest first: [n, D], [K, D] -> int64 [n, count]."""
    # The nearest word has the largest product, less half of its squared length.
    halves = -centroids.square().sum(dim=1) / 2
    found = torch.empty(len(rows), count, dtype=torch.int64, device=rows.device)
    step = max(1, _PRODUCTS // len(centroids))
    for start in range(0, len(rows), step):
        scores = torch.addmm(halves, rows[start : start + step], centroids.T)
        if count == 1:
            found[start : start + step, 0] = scores.argmax(dim=1)
        else:
            found[start : start + step] = scores.topk(count, dim=1).indices
    return found


def import_faiss() -> Any:
    """The library FAISS, which searches codebooks without a GPU."""
    with requires("local", "a codebook"):
        import faiss
    return faiss
