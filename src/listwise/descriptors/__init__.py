"""Descriptors of photos: models, extraction into files, whitening."""

from listwise.descriptors.extract import Shard, extract
from listwise.descriptors.learning import learn_whitening, remove_whitening
from listwise.descriptors.loading import load_model
from listwise.descriptors.model import Model
from listwise.descriptors.storage import DescriptorFile, DescriptorHeader, DescriptorWriter
from listwise.descriptors.whitening import Whitening, matching_pairs

__all__ = ["DescriptorFile", "DescriptorHeader", "DescriptorWriter", "Model", "Shard", "Whitening"]
__all__ += ["extract", "learn_whitening", "load_model", "matching_pairs", "remove_whitening"]
