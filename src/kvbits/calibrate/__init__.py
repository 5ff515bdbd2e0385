"""Static scales: measured once over a few short prompts, saved, and refused for any other model or scheme.

calibration.py   Calibration: scales per layer, fingerprint, safetensors file
ranges.py        Ranges: exact percentiles of a stream in bounded memory
collect.py       calibrate(): run a model and see every key and value where the cache is written
"""

from .calibration import Calibration, fingerprint
from .collect import ObservingCache, calibrate, prompts_from_text
from .ranges import Ranges

__all__ = ["Calibration", "ObservingCache", "Ranges", "calibrate", "fingerprint", "prompts_from_text"]
