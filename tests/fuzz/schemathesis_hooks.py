"""Loaded by schemathesis: the photos of forms are photos, damaged photos, or any bytes."""

import numpy as np
import schemathesis
from hypothesis import strategies as st
from mutations import encoded_photos, mutate
from schemathesis.transport.serialization import Binary

PHOTOS = [photo for seed in range(4) for photo in encoded_photos(seed)]
photos = st.sampled_from(PHOTOS)
damaged = st.builds(
    lambda photo, seed: mutate(photo, np.random.default_rng(seed)), photos, st.integers(0, 999)
)
schemathesis.openapi.format("binary", (photos | damaged | st.binary()).map(Binary))
