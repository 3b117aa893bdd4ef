"""Images and labels: reading, checking and cropping them."""

from listwise.data.checks import ImageReport, check_images
from listwise.data.crops import (
    Crop,
    CropBatch,
    CropDataset,
    UnreadableClassError,
    collate,
    random_crop,
)
from listwise.data.images import (
    IMAGE_SUFFIXES,
    MAX_PIXELS,
    Box,
    ImageError,
    image_size,
    list_images,
    load_image,
)
from listwise.data.labelled import Images, LabelledImages, hold_out_classes
from listwise.data.photos import DecodedPhoto, Decoding, PhotoFile, whole_image
from listwise.data.pipeline import decode_photos
from listwise.data.sources import read_images, read_labelled
from listwise.settings import CropSettings

__all__ = ["IMAGE_SUFFIXES", "MAX_PIXELS", "Box", "Crop", "CropBatch", "CropDataset"]
__all__ += ["CropSettings", "DecodedPhoto", "Decoding", "ImageError", "ImageReport", "Images"]
__all__ += ["LabelledImages", "PhotoFile", "UnreadableClassError"]
__all__ += ["check_images", "collate", "decode_photos", "hold_out_classes", "image_size"]
__all__ += ["list_images", "load_image", "random_crop", "read_images", "read_labelled"]
__all__ += ["whole_image"]
