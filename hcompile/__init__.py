"""hcompile: each distinct block of a JAX program is compiled once and reused for every call."""

from ._jit import jit as jit
from ._region import RegionOptions as RegionOptions
from ._region import cache_info as cache_info
from ._region import disabled as disabled
from ._region import nested_compile_region as nested_compile_region
from ._region import nested_compile_region as region
from ._report import Report as Report
