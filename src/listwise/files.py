"""Files that are always whole, and text that people write."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from listwise.errors import InputError


def publish(partial: Path, final: Path) -> None:
    """Put a finished file in its place: readers see the old one or the new one, never a part.

    A kill or a loss of power at any moment leaves one of the two. The file gets the permissions
    that an ordinary new file has.
    """
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    mask = os.umask(0)
    os.umask(mask)
    partial.chmod(0o666 & ~mask)
    os.replace(partial, final)


def write_text(path: Path, text: str) -> None:
    """Write a text file that is at every moment the old one or the new one."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(text, encoding="utf-8")
    publish(partial, path)


def write_tensors(
    path: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file that is at every moment the old one or the new one.

    Args:
        path: of the file; its folder is made if there is none.
        tensors: all of PyTorch, on any device, or all of NumPy.
        metadata: texts to go with them.

    Raises:
        OSError: it cannot be written; the message says what and why.
    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors import numpy as of_numpy

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        if all(isinstance(value, np.ndarray) for value in tensors.values()):
            of_numpy.save_file(dict(tensors), partial, metadata)
        else:
            import torch
            from safetensors import torch as of_torch

            # A copy each: safetensors takes neither shared memory nor gaps between the values.
            plain = {
                key: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                for key, value in tensors.items()
            }
            of_torch.save_file(plain, partial, metadata)
        publish(partial, path)
    except SafetensorError as error:
        # It has no error of its own for a full disk, and leaves the system's as text.
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    """A JSON object; where the file holds none, an error that ends with the words `otherwise`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{path} {otherwise}")
    return content


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
