"""Pictures inside a page: no files beside it, no network."""

import base64
import io

from torch import Tensor


def png_data_uri(pixels: Tensor) -> str:
    """A uint8 image (channels, height, width), grey or colour, as the `src` of an <img>."""
    from PIL import Image

    array = pixels.numpy()
    picture = Image.fromarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
