"""Photos and their labels: read, check, decode and crop them."""

from listwise.data.checks import ImageReport, check_images
from listwise.data.crops import CropBatch, CropDataset, UnreadableClassError, collate, random_crop
from listwise.data.images import Box, ImageError, image_size, list_images, load_image
from listwise.data.labelled import Images, LabelledImages, hold_out_classes
from listwise.data.photos import DecodedPhoto, Decoding, PhotoFile, whole_image
from listwise.data.pipeline import decode_photos
from listwise.data.sources import read_images, read_labelled
from listwise.settings import CropSettings

__all__ = ["Box", "CropBatch", "CropDataset", "CropSettings", "DecodedPhoto", "Decoding"]
__all__ += ["ImageError", "ImageReport", "Images", "LabelledImages", "PhotoFile"]
__all__ += ["UnreadableClassError", "check_images", "collate", "decode_photos", "hold_out_classes"]
__all__ += ["image_size", "list_images", "load_image", "random_crop", "read_images"]
__all__ += ["read_labelled", "whole_image"]
