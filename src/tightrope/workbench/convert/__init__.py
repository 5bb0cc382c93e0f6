"""Move checkpoints between the two pairings of channels, and tell which one a checkpoint has.

"""

from .model import Said as Said
from .run import Conversion as Conversion, convert as convert
from .verify import Verified as Verified
