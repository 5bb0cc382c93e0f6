"""An emulator of compiled kernels: it executes their PTX on the CPU, for all threads of a grid.

- `parse` reads the text.
- `instructions` defines the arithmetic, from the manual of PTX.
- `memory` checks accesses: bounds, alignment, and races.
- `machine` runs threads: registers, branches, barriers, and what the threads of a warp exchange.
- `launch` receives the launches of Triton's own launcher, through the stub of the driver.
"""
