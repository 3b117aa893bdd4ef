"""The Hugging Face Hub: upload and download models, as safetensors alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from listwise.errors import InputError, first_line
from listwise.files import write_text
from listwise.models.storage import MODEL_FILE, ModelFile, write_model

PREFIX: Final = "hub:"
CARD_FILE: Final = "README.md"
_DEFAULT = "https://huggingface.co"


def _endpoint() -> str:
    # Read when it is used: huggingface_hub reads it only when it is imported.
    return os.environ.get("HF_ENDPOINT", _DEFAULT).rstrip("/")


def upload(content: ModelFile, card: str, repository: str, private: bool, token: str | None) -> str:
    """Upload the file of a model and its card; return the address of the repository.

    The repository is created if it does not exist. One commit has both files.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=_endpoint(), token=token)
    with TemporaryDirectory() as folder:
        write_model(folder, content)
        write_text(Path(folder) / CARD_FILE, card)
        with _explained(repository):
            made = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                allow_patterns=[MODEL_FILE, CARD_FILE],
                commit_message="Upload a model of Listwise",
            )
    return str(made)


def download(source: str) -> Path:
    """Download the model of `hub:owner/name` or `hub:owner/name@revision`; return its folder.

    Files that were downloaded before are not downloaded again. Without a connection, an earlier
    download is used.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = source.removeprefix(PREFIX).partition("@")
    with _explained(repository):
        # Nothing else is downloaded, so that a repository cannot bring a pickle or code.
        folder = snapshot_download(
            repository, revision=revision or None, allow_patterns=[MODEL_FILE], endpoint=_endpoint()
        )
    if not (Path(folder) / MODEL_FILE).is_file():
        raise InputError(
            f"{repository} at {_endpoint()} is not a model of Listwise: expected {MODEL_FILE}; "
            "upload one with model.push_to_hub"
        )
    return Path(folder)


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Turn errors of the hub into one line each."""
    from huggingface_hub import errors

    place = f"{repository} at {_endpoint()}"
    try:
        yield
    except (
        errors.HFValidationError,
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
    ) as error:
        raise InputError(
            f"no model {place}, or it is private ({first_line(error)}): give owner/name or "
            "owner/name@revision, or log in with hf auth login"
        ) from error
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise InputError(
                f"no access to {place}: log in with hf auth login, with a token that may write"
            ) from error
        raise InputError(
            f"cannot use {place} ({first_line(error)}): check the connection, or copy the model "
            "folder and load that"
        ) from error
