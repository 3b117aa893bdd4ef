"""Training from an index: on its labels and marks, starting from its model."""

from listwise.feedback.comparison import Comparison, QueryComparison
from listwise.feedback.photos import IndexPhotos, MarkedPhotos, read_index_photos
from listwise.feedback.retrain import resume_from_index, train_from_index

__all__ = ["Comparison", "IndexPhotos", "MarkedPhotos", "QueryComparison"]
__all__ += ["read_index_photos", "resume_from_index", "train_from_index"]
