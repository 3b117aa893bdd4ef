"""Photos and their labels: read, check, decode and crop them.

A module is imported when one of its names is first used: PyTorch is needed only for pixels.
"""

from typing import TYPE_CHECKING

from listwise.optional import import_when_used
from listwise.settings import CropSettings

if TYPE_CHECKING:
    from listwise.data.crops import CropBatch, CropDataset, collate, random_crop
    from listwise.data.images import Box, ImageError, image_size, list_images, load_image
    from listwise.data.labelled import (
        ImageReport,
        Images,
        LabelledImages,
        check_images,
        hold_out_classes,
    )
    from listwise.data.photos import DecodedPhoto, Decoding, PhotoFile, whole_image
    from listwise.data.pipeline import decode_photos
    from listwise.data.sources import read_images, read_labelled

__all__ = ["Box", "CropBatch", "CropDataset", "CropSettings", "DecodedPhoto", "Decoding"]
__all__ += ["ImageError", "ImageReport", "Images", "LabelledImages", "PhotoFile"]
__all__ += ["check_images", "collate", "decode_photos", "hold_out_classes"]
__all__ += ["image_size", "list_images", "load_image", "random_crop", "read_images"]
__all__ += ["read_labelled", "whole_image"]

_MODULES = ["images", "photos", "labelled", "sources", "pipeline", "crops"]

__getattr__, __dir__ = import_when_used(__name__, __all__, _MODULES)
