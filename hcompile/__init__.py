"""hcompile: each distinct block of a JAX program is compiled once and reused for every call."""

from importlib import metadata as _metadata

from ._errors import NewRegionError as NewRegionError
from ._errors import ReuseCheckError as ReuseCheckError
from ._errors import ReuseHashError as ReuseHashError
from ._errors import ReuseLimitError as ReuseLimitError
from ._jit import clear_caches as clear_caches
from ._jit import jit as jit
from ._options import RegionOptions as RegionOptions
from ._region import cache_info as cache_info
from ._region import disabled as disabled
from ._region import nested_compile_region as nested_compile_region
from ._report import Report as Report
from ._reuse import no_new_regions as no_new_regions

region = nested_compile_region
__version__ = _metadata.version("hcompile")
