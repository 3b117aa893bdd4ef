"""Labels from geometry: photos that show the same thing form a class.

`label` matches photos by local features and keeps the groups of photos that match each other.
OpenCV is imported when photos are matched.
"""

from listwise.labeling.label import label
from listwise.labeling.result import ClassMerge, LabelledPhoto, Labels, PhotoGroup
from listwise.settings import LabelSettings

__all__ = ["ClassMerge", "LabelSettings", "LabelledPhoto", "Labels", "PhotoGroup", "label"]
