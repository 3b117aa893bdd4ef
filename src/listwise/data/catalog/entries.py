"""The catalog of public data sets: their terms, addresses, layouts and sizes.

Addresses are from the pages and download scripts of the authors. A file has a checksum only if
several public projects print the same one, or if the authors publish it with the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set at its public address.

    A plain file becomes `to`; an archive is unpacked into the folder `to`, without its own
    folders if `flat`. `checksum` is "md5:…" or "sha256:…"; `checksum_url` is the address of a text
    whose first word is the file's MD5. `name` is what a copy downloaded by hand is called.
    """

    url: str
    to: str = ""
    unpack: bool = False
    flat: bool = False
    checksum: str | None = None
    checksum_url: str | None = None
    saved_as: str | None = None

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.saved_as or urlsplit(self.url).path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class DataSetEntry:
    """One data set by name.

    `layout` names its reader, `marks` are files (glob patterns) that only this one has, `counts`
    are numbers of images by split (database and queries for a benchmark). Without `files` there
    is no public address: `how` explains how to get it. `gigabytes` is the size of a download, 0
    where that is not known. `broken` names photos that its makers say are damaged.
    """

    name: str
    title: str
    layout: str
    terms: str
    page: str
    marks: tuple[str, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    files: tuple[RemoteFile, ...] = ()
    how: str = ""
    gigabytes: float = 0.0
    broken: frozenset[str] = frozenset()


_VGG = "https://www.robots.ox.ac.uk/~vgg/data"
_CTU = "http://cmp.felk.cvut.cz"
_DISTRACTORS = "http://ptak.felk.cvut.cz/revisitop/revisitop1m"
_FLICKR = "photos from Flickr: respect Flickr's terms of use and VGG's terms of access"
_PARIS_BROKEN = {
    "louvre": "000136 000146",
    "moulinrouge": "000422",
    "museedorsay": "001059",
    "notredame": "000188",
    "pantheon": "000284 000960 000974",
    "pompidou": "000195 000196 000201 000467 000640",
    "sacrecoeur": "000299 000330 000353",
    "triomphe": "000662 000833 000863 000867",
}


def _unpacked(place: str, name: str, to: str) -> RemoteFile:
    """An archive of the VGG group, unpacked without its own folders."""
    return RemoteFile(f"{_VGG}/{place}buildings/{name}.tgz", to, unpack=True, flat=True)


_OXFORD = (_unpacked("ox", "oxbuild_images-v1", "jpg"),)
_PARIS = (_unpacked("paris", "paris_1-v1", "jpg"), _unpacked("paris", "paris_2-v1", "jpg"))


def _revisited(
    name: str, title: str, photos: int, archives: tuple[RemoteFile, ...], gigabytes: float
) -> DataSetEntry:
    file = f"gnd_{name}.pkl"
    judgments = RemoteFile(f"{_CTU}/revisitop/data/datasets/{name}/{file}", file)
    return DataSetEntry(
        name,
        f"Revisited {title}",
        "revisited",
        _FLICKR,
        f"{_CTU}/revisitop/",
        (file,),
        {"database": photos, "queries": 70},
        (judgments, *archives),
        gigabytes=gigabytes,
    )


def _original(
    name: str, title: str, query: str, place: str, truth: str, archives: tuple[RemoteFile, ...]
) -> DataSetEntry:
    """`query` is a file that only this benchmark has, `truth` the archive of its ground truth."""
    return DataSetEntry(
        name,
        title,
        "oxford",
        _FLICKR,
        f"{_VGG}/{place}buildings/",
        (query, f"*/{query}"),
        {"queries": 55},
        (_unpacked(place, truth, "gt"), *archives),
    )


_ALL = (
    _revisited("roxford5k", "Oxford", 4993, _OXFORD, 2.0),
    _revisited("rparis6k", "Paris", 6322, _PARIS, 2.5),
    replace(
        _original(
            "oxford5k",
            "Oxford Buildings",
            "all_souls_1_query.txt",
            "ox",
            "gt_files_170407",
            _OXFORD,
        ),
        gigabytes=2.0,
    ),
    replace(
        _original("paris6k", "Paris", "defense_1_query.txt", "paris", "paris_120310", _PARIS),
        gigabytes=2.5,
        broken=frozenset(
            f"paris_{place}_{number}"
            for place, numbers in _PARIS_BROKEN.items()
            for number in numbers.split()
        ),
    ),
    DataSetEntry(
        "revisitop1m",
        "The million distractors of revisited Oxford and Paris",
        "distractors",
        "photos belong to their authors; for research, see the page",
        f"{_CTU}/revisitop/",
        ("revisitop1m.txt",),
        files=(
            RemoteFile(f"{_DISTRACTORS}/revisitop1m.txt", "revisitop1m.txt"),
            *(
                RemoteFile(f"{_DISTRACTORS}/jpg/revisitop1m.{i}.tar.gz", "jpg", unpack=True)
                for i in range(1, 101)
            ),
        ),
    ),
    DataSetEntry(
        "landmarks-clean",
        "Landmarks, cleaned (Gordo et al.)",
        "landmarks",
        "photos belong to their authors; the lists are Naver Labs Europe's",
        "https://github.com/naver/deep-image-retrieval",
        ("annotation_clean_train.txt",),
        how="only lists of photo addresses are published, and many photos are not online any more: "
        "get annotation_clean_train.txt and annotation_clean_val.txt from "
        "http://download.europe.naverlabs.com/Computer-Vision-CodeandModels/ and save each photo "
        "that is still online as images/MD5-OF-ITS-ADDRESS.jpg",
    ),
    DataSetEntry(
        "retrieval-SfM-120k",
        "Retrieval-SfM (Radenović et al.)",
        "sfm",
        "photos from Flickr belong to their authors; for research, see the page",
        f"{_CTU}/cnnimageretrieval/",
        ("retrieval-SfM-120k.pkl",),
        files=(
            *(
                RemoteFile(f"{_CTU}/cnnimageretrieval/data/train/dbs/{name}", name)
                for name in ("retrieval-SfM-120k.pkl", "retrieval-SfM-120k-whiten.pkl")
            ),
            RemoteFile(f"{_CTU}/cnnimageretrieval/data/train/ims/ims.tar.gz", "ims", unpack=True),
        ),
    ),
    DataSetEntry(
        "google-landmarks-v2",
        "Google Landmarks v2, the cleaned training set",
        "gldv2",
        "labels CC BY 4.0 (Google); every photo has a Creative Commons license of its own, listed "
        "in train_attribution.csv",
        "https://github.com/cvdfoundation/google-landmark",
        ("train_clean.csv",),
        {"train": 1580470},
        (
            *(
                RemoteFile(f"https://s3.amazonaws.com/google-landmark/metadata/{name}", name)
                for name in ("train_clean.csv", "train_attribution.csv")
            ),
            *(
                RemoteFile(
                    f"https://s3.amazonaws.com/google-landmark/train/images_{i:03}.tar",
                    "train",
                    unpack=True,
                    checksum_url="https://s3.amazonaws.com/google-landmark/md5sum/train/"
                    f"md5.images_{i:03}.txt",
                )
                for i in range(500)
            ),
        ),
        gigabytes=500.0,
    ),
    DataSetEntry(
        "SOP",
        "Stanford Online Products",
        "sop",
        "product photos from eBay belong to their sellers; for research, see the page",
        "https://cvgl.stanford.edu/projects/lifted_struct/",
        ("Ebay_train.txt", "Stanford_Online_Products/Ebay_train.txt"),
        {"train": 59551, "test": 60502},
        (
            RemoteFile(
                "https://drive.usercontent.google.com/download"
                "?id=1TclrpQOF_ullUP99wk_gjGN8pKvtErG8&export=download&authuser=0&confirm=t",
                unpack=True,
                checksum="md5:7f73d41a2f44250d4779881525aea32e",
                saved_as="Stanford_Online_Products.zip",
            ),
        ),
        gigabytes=3.1,
    ),
    DataSetEntry(
        "CUB-200",
        "Caltech-UCSD Birds 200-2011",
        "cub",
        "non-commercial research and education; the photos belong to their authors",
        "https://data.caltech.edu/records/65de6-vp158",
        ("image_class_labels.txt", "CUB_200_2011/image_class_labels.txt"),
        {"train": 5864, "test": 5924},
        (
            RemoteFile(
                "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
                unpack=True,
                checksum="md5:97eceeb196236b17998738112f37df78",
            ),
        ),
        gigabytes=1.2,
    ),
    DataSetEntry(
        "Cars-196",
        "Stanford Cars",
        "cars",
        "for research; the photos belong to their authors",
        "https://github.com/pytorch/vision/issues/7545",
        ("cars_annos.mat",),
        {"train": 8054, "test": 8131},
        how="its original server is offline: get car_ims.tgz (MD5 d5c8f0aa497503f355e17dc7886c3f14)"
        " and cars_annos.mat (MD5 b407c6086d669747186bd1d764ff9dbc) from a copy you trust, and "
        "unpack them into one folder",
    ),
    DataSetEntry(
        "In-shop",
        "DeepFashion In-shop Clothes Retrieval",
        "inshop",
        "non-commercial research and education only, under the agreement on the page",
        "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html",
        ("Eval/list_eval_partition.txt", "list_eval_partition.txt"),
        {"train": 25882, "query": 14218, "gallery": 12612},
        how="its authors require an agreement: request access on the page, then unpack img.zip "
        "into Img/ and put list_eval_partition.txt into Eval/",
    ),
)

ENTRIES: Final[Mapping[str, DataSetEntry]] = {entry.name: entry for entry in _ALL}
"""The catalog: all data sets by name."""
