"""Convert checkpoints between the two pairings of channels, and detect the pairing of a checkpoint.

:func:`convert` is `tightrope convert`; :func:`detect` is `tightrope detect`.
"""

from ._detect import Detection as Detection, Evidence as Evidence, detect as detect
from .model import Stated as Stated
from .run import Conversion as Conversion, convert as convert
from .verify import Verified as Verified

__all__ = ["Conversion", "Detection", "Evidence", "Stated", "Verified", "convert", "detect"]
