"""The codebook: visual words of local descriptors, and their fast lookup."""

import hashlib
import re
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

# Codebooks up to this size are searched exactly: nothing is faster.
EXACT_LIMIT = 4096
# Words that are nearest by 4-bit codes, and are then compared exactly. This number finds the
# nearest of 65,536 words for RootSIFT as reliably as a full comparison, at less than half the cost.
_CANDIDATES = 64
_CANDIDATES_EACH = 32
ROWS = 1 << 14  # descriptors per lookup
_PRODUCTS = 1 << 28  # products of descriptors and words on a GPU at a time: 1 GB

Float32 = NDArray[np.float32]
Words = NDArray[np.int32]


class CodebookInfo(FileHeader):
    """Origin of a codebook.

    `extractor` is the name of the extractor of the descriptors, with its settings. `learned_from`
    is the number of descriptors that k-means used, drawn with `seed`.
    """

    extractor: str
    learned_from: int
    seed: int


@dataclass(frozen=True, eq=False)
class Codebook:
    """K visual words: float32 `centroids` [K, D].

    Words are looked up on `device`: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
    """

    centroids: Float32
    info: CodebookInfo
    device: str = "auto"

    def __post_init__(self) -> None:
        rows = np.ascontiguousarray(self.centroids, dtype=np.float32)
        object.__setattr__(self, "centroids", rows)
        if rows.ndim != 2 or not len(rows) or rows.shape[1] % 8:
            raise InputError(
                "the centroids of a codebook should be [K, D] with D a multiple of 8 (one bit per "
                f"dimension is stored), found {list(rows.shape)}"
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
        """SHA-256 of the centroids and the name of the extractor; equal for equal words."""
        digest = hashlib.sha256(repr((self.info.extractor, self.centroids.shape)).encode())
        digest.update(self.centroids.tobytes())
        return digest.hexdigest()

    def require(self, extractor: str) -> None:
        """Raise an error for the descriptors of another extractor."""
        if extractor != self.info.extractor:
            raise InputError(
                f"the codebook is for descriptors of {self.info.extractor}, not of {extractor}: "
                f"extract the features {_how_to_extract(self.info.extractor, extractor)}, "
                "or learn another codebook"
            )

    def assign(self, descriptors: NDArray[np.floating], count: int = 1) -> Words:
        """Return the `count` nearest words of each descriptor: [n, D] -> int32 [n, count].

        Without a GPU, large codebooks are searched by compact codes first. About one word in ten
        thousand is then not the nearest.
        """
        rows = check_descriptors(descriptors, self.dim)
        if not 1 <= count <= len(self):
            raise InputError(
                f"`count` must be from 1 to {len(self)}, the number of words, not {count}"
            )
        if self._on_gpu is not None:
            given = torch.from_numpy(rows).to(self._on_gpu.device)
            words: Words = nearest_words(given, self._on_gpu, count).int().cpu().numpy()
            return words
        found = np.empty((len(rows), count), np.int32)
        settings: Any = None
        if len(self) > EXACT_LIMIT:
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
        """The centroids on the GPU; None without a GPU."""
        device = Machine.detect(self.device).device
        if not device.startswith("cuda"):
            return None
        return torch.from_numpy(self.centroids).to(device)

    @cached_property
    def _index(self) -> Any:
        faiss = import_faiss()
        index: Any = faiss.IndexFlatL2(self.dim)
        if len(self) > EXACT_LIMIT:
            codes = faiss.IndexPQFastScan(self.dim, self.dim // 2, 4)
            codes.pq.cp.niter = 10
            index = faiss.IndexRefineFlat(codes)
            train_index(index, self.centroids)
        index.add(self.centroids)
        return index

    def save(self, path: str | Path) -> None:
        """Write the codebook and its origin to a safetensors file."""
        metadata = {"codebook": self.info.model_dump_json(), "fingerprint": self.fingerprint}
        write_tensors(Path(path), {"centroids": self.centroids}, metadata)

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> "Codebook":
        """Read a codebook; its words are looked up on `device`. No code in the file is executed."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"no codebook at {path}: learn one with listwise local codebook")
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
            raise InputError(f"{path} is damaged: copy it again, or learn it again")
        return codebook


def is_codebook(path: str | Path) -> bool:
    """Whether a file is a codebook."""
    try:
        Codebook.load(path)
    except InputError:
        return False
    return True


def _how_to_extract(wanted: str, given: str) -> str:
    """Return how to extract features for the extractor `wanted` instead of `given`."""
    count = re.fullmatch(r"(.*rootsift-|delf-[0-9a-f]+-)(\d+)(.*)", wanted)
    if count is None:
        return "again"
    if re.fullmatch(rf"{re.escape(count[1])}\d+{re.escape(count[3])}", given):
        return f"with `count={count[2]}`"
    if wanted.startswith("delf-"):
        return "with the network of the codebook as `delf`"
    return "without `delf`"


def check_descriptors(descriptors: NDArray[np.floating], dim: int) -> Float32:
    """Return local descriptors as float32 [n, dim]; raise an error if shape or values are wrong."""
    rows = np.ascontiguousarray(descriptors, dtype=np.float32)
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise InputError(f"local descriptors should be [n, {dim}], found shape {list(rows.shape)}")
    if not np.isfinite(rows).all():
        raise InputError("local descriptors have values that are not finite: extract them again")
    return rows


def train_index(index: Any, centroids: Float32) -> None:
    """Train the codes of an index in one thread: more threads would wait for each other."""
    with threadpool_limits(1):
        index.train(centroids)


def nearest_words(rows: Tensor, centroids: Tensor, count: int = 1) -> Tensor:
    """Return the `count` nearest words, nearest first: [n, D], [K, D] -> int64 [n, count]."""
    # The nearest word has the largest product minus half of its squared length.
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
    """Import FAISS, which searches codebooks without a GPU."""
    with requires("local", "a codebook"):
        import faiss
    return faiss
